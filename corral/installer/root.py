"""The part of ``corral install`` that needs root. Stdlib only: it travels over stdin to the system's Python.

Nothing it leaves behind executes, imports or reads a path that a non-root user can write.
"""

# An older Python must get as far as the message about its age.
from __future__ import annotations

import base64
import grp
import io
import json
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import tarfile
from typing import Any, NoReturn

UNITS = pathlib.Path("/etc/systemd/system")
MODULES = pathlib.Path("/etc/modules-load.d/corral.conf")
SEARCH = ("/usr/sbin", "/sbin", "/usr/bin", "/bin")
TOOLS = ("nft", "iptables-nft", "iptables-nft-restore", "ip6tables-nft", "ip6tables-nft-restore")


class StopError(Exception):
    """The installation cannot go on; nothing that runs has been changed."""


def fail(message: str, fix: str) -> NoReturn:
    raise StopError(json.dumps({"message": message, "hint": fix}))


def run(*argv: str) -> str:
    environ = {"PATH": ":".join(SEARCH), "LC_ALL": "C"}
    done = subprocess.run(argv, capture_output=True, text=True, env=environ, check=False)
    if done.returncode != 0:
        fail(f"{' '.join(argv)} failed: {done.stderr.strip()}", "journalctl -xe")
    return done.stdout


def only_root_writes(path: pathlib.Path) -> pathlib.Path | None:
    """Return the first part of a path that someone else than root could replace, or None."""
    for part in (path, *path.parents):
        found = os.lstat(part)
        if stat.S_ISLNK(found.st_mode):
            target = pathlib.Path(os.path.realpath(part))
            if found.st_uid != 0:
                return part
            worse = only_root_writes(target)
            if worse:
                return worse
            continue
        if found.st_uid != 0 or (found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX):
            return part
    return None


def check_host(directory: pathlib.Path, python: str) -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 (this is the system's Python, not the package's)
        fail(
            f"{python}, the system's Python, is {sys.version.split()[0]}; the netfilter writer runs on it "
            "and needs 3.11 or newer",
            "upgrade the system (Debian 12, Ubuntu 24.04); the Python of corral itself does not count",
        )
    missing = [tool for tool in TOOLS if not any(os.access(f"{d}/{tool}", os.X_OK) for d in SEARCH)]
    if missing:
        fail(f"missing: {', '.join(missing)}", "install the packages iptables and nftables")
    try:
        grp.getgrnam("docker")
    except KeyError:
        fail("there is no group docker", "install Docker Engine first")
    for path in (pathlib.Path(python), pathlib.Path("/etc/systemd/system")):
        weak = only_root_writes(path)
        if weak:
            fail(f"{weak} can be changed by others than root", f"chown root: {weak}; chmod go-w {weak}")
    directory.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    weak = only_root_writes(directory.parent)
    if weak:
        fail(f"{weak} can be changed by others than root", f"chown root: {weak}; chmod go-w {weak}")


def unpack(archive: bytes, directory: pathlib.Path) -> None:
    """Put the writer's code at ``directory`` in one rename; the files are root's."""
    partial = directory.with_name(directory.name + ".new")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o755)
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        for member in tar.getmembers():
            path = pathlib.PurePosixPath(member.name)
            if not member.isfile() or path.is_absolute() or ".." in path.parts:
                fail(f"{member.name}: not a plain file", "build corral's wheel again")
            target = partial / path
            target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            content = tar.extractfile(member)
            target.write_bytes(content.read() if content else b"")
            target.chmod(0o644)
    for made in (partial, *partial.rglob("*")):
        os.chown(made, 0, 0)
        if made.is_dir():
            made.chmod(0o755)
    # Compiled now: the writer runs as a user who could not write the cache.
    run(sys.executable, "-I", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", str(partial))
    if directory.exists():
        shutil.rmtree(directory)
    partial.rename(directory)


def write_root_file(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".corral-new")
    partial.write_text(text)
    partial.chmod(0o644)
    os.chown(partial, 0, 0)
    partial.rename(path)


def install(payload: dict[str, Any]) -> None:
    directory = pathlib.Path(payload["directory"])
    os.umask(0o022)
    check_host(directory, payload["python"])
    unpack(base64.b64decode(payload["archive"]), directory)
    for name, text in payload["units"].items():
        write_root_file(UNITS / name, text)
    write_root_file(MODULES, payload["modules"])
    run("systemctl", "daemon-reload")
    run("systemctl", "enable", *payload["units"])
    # The skeleton is loaded by the new version before the writer of the new version answers.
    run("systemctl", "restart", "corral-skeleton.service")
    run("systemctl", "start", "corral-netfilter.socket")
    run("systemctl", "restart", "corral-netfilter.service")
    for old in directory.parent.iterdir():
        if old.is_dir() and old != directory:
            shutil.rmtree(old)


def main(payload: dict[str, Any]) -> int:
    if os.geteuid() != 0:
        print(json.dumps({"message": "this step needs root", "hint": "run it with sudo"}), file=sys.stderr)
        return 1
    try:
        install(payload)
    except StopError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
