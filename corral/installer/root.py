"""The part of ``corral install`` that needs root. Stdlib only: it travels over stdin to the system's Python.

Nothing it leaves behind executes, imports or reads a path that a non-root user can write. It may be cut off
anywhere: rules that stand go on standing, and the next installation brings everything to the same end.
"""

from __future__ import annotations

import base64
import grp
import io
import json
import os
import pathlib
import pwd
import shutil
import sys
import tarfile
from typing import Any

from corral.installer import common, legacy, netfilter
from corral.installer.common import UNITS, Places, fail, only_root_writes
from policy import versions

TOOLS = ("nft", "iptables-nft", "iptables-nft-restore", "ip6tables-nft", "ip6tables-nft-restore")


def check_host(directory: pathlib.Path, python: str, places: Places) -> None:
    missing = [tool for tool in TOOLS if not any(os.access(f"{d}/{tool}", os.X_OK) for d in common.SEARCH)]
    if missing:
        fail(f"missing: {', '.join(missing)}", "install the packages iptables and nftables")
    try:
        grp.getgrnam("docker")
    except KeyError:
        fail("there is no group docker", "install Docker Engine first")
    directory.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    places.users.mkdir(mode=0o755, parents=True, exist_ok=True)
    for path in (pathlib.Path(python), places.units, directory.parent, places.users):
        weak = only_root_writes(path)
        if weak:
            fail(f"{weak} can be changed by others than root", f"chown root: {weak}; chmod go-w {weak}")


def refuse_downgrade(payload: dict[str, Any], places: Places) -> None:
    found = common.installed(places)
    problem = versions.downgrade(versions.parse("corral", payload["manifest"]), found) if found else None
    if problem:
        fail(*problem)


def unpack(archive: bytes, directory: pathlib.Path, run: common.Run, library: bytes | None = None) -> None:
    """Put the writer's code at ``directory`` in one rename; the files are root's."""
    partial, aside = (
        directory.with_name(directory.name + ".new"),
        directory.with_name(directory.name + ".old"),
    )
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o755)
    for content in (archive, library):
        if content is not None:
            _extract(content, partial)
    for made in (partial, *partial.rglob("*")):
        os.chown(made, 0, 0)
        if made.is_dir():
            made.chmod(0o755)
    # Compiled now: the writer runs as a user who could not write the cache.
    compiling = ["-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"]
    run([sys.executable, "-I", *compiling, str(partial)], None)
    # On the disk before any unit names it: a power cut must not leave a boot without rules.
    os.sync()
    shutil.rmtree(aside, ignore_errors=True)
    if directory.exists():
        # The same version again. What runs has its code in memory.
        directory.rename(aside)
    partial.rename(directory)


def _extract(archive: bytes, partial: pathlib.Path) -> None:
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


def write_root_file(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    partial = path.with_name(path.name + common.PARTIAL)
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.chmod(0o644)
    os.chown(partial, 0, 0)
    partial.rename(path)


def start_units(run: common.Run) -> None:
    """Let the new code take over: rules first. The old writer would mend its own rules, and hold the table.

    Until the new one is there its socket stays open: were this cut off here, the next request would start it.
    """
    run(["systemctl", "daemon-reload"], None)
    run(["systemctl", "enable", *UNITS], None)
    run(["systemctl", "stop", "corral-netfilter.service"], None)
    try:
        run(["systemctl", "restart", "corral-skeleton.service"], None)
    finally:
        # Whatever came of that: what stands needs somebody who mends it.
        # Started anew, or it would go on with what its old unit said.
        run(["systemctl", "restart", "corral-netfilter.socket"], None)
        run(["systemctl", "restart", "corral-netfilter.service"], None)


def install(
    payload: dict[str, Any], places: Places | None = None, run: common.Run = common.run
) -> dict[str, Any]:
    places = Places() if places is None else places
    directory = pathlib.Path(payload["directory"])
    os.umask(0o022)
    with common.locked(places):
        check_host(directory, payload["python"], places)
        refuse_downgrade(payload, places)
        if not places.before.exists():
            write_root_file(places.before, json.dumps(netfilter.base_chains(run)) + "\n")
        library = add_library(payload, run)
        unpack(base64.b64decode(payload["archive"]), directory, run, library)
        for name, text in payload["units"].items():
            write_root_file(places.units / name, text)
        for name, text in legacy.drop_ins().items():
            if library is not None and text is not None:
                write_root_file(places.units / name, text)
            else:
                (places.units / name).unlink(missing_ok=True)
        write_root_file(places.modules, payload["modules"])
        uid = int(payload["uid"])
        write_root_file(places.users / str(uid), pwd.getpwuid(uid).pw_name + "\n")
        start_units(run)
        removed = [old.name for old in directory.parent.iterdir() if old.is_dir() and old != directory]
        for name in removed:
            shutil.rmtree(directory.parent / name)
    why = "legacy" if library is not None else ""
    return {"directory": str(directory), "removed": sorted(removed), "library": why}


def add_library(payload: dict[str, Any], run: common.Run) -> bytes | None:
    """Return python-iptables for a host that needs it, None for others, which do without compiled code."""
    needed = legacy.hooked(run)
    library = payload.get("library", "")
    if needed and not library:
        fail("Docker's rules are in the legacy tables, and python-iptables is not installed", legacy.FIX)
    return base64.b64decode(library) if library and (needed or legacy.alternative()) else None


def main(payload: dict[str, Any]) -> int:
    return common.main(install, payload)
