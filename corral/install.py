"""``corral install``: bring the host part of corral into place.

The part that needs root is one program, sent over stdin to the system's Python: it copies the writer and its
dependency to a root-owned, versioned directory and enables three units. The rest is one unit of the user's
own service manager.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import json
import os
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

from corral import oserrors, process, relay
from corral.membership import (
    Membership,
    join,
    membership,
    process_groups,
    restart_manager,
    writer_problem,
)
from enforcer.client import Client, socket_path
from policy.errors import EnforcerError, InstallError

ROOT_DIRECTORY = Path("/opt/corral")
SYSTEM_PYTHON = "/usr/bin/python3"
SYSTEM_UNITS = ("corral-skeleton.service", "corral-netfilter.socket", "corral-netfilter.service")
USER_UNIT = "corral-enforcer.service"
OLDEST_PYTHON = (3, 11)
# Seconds the enforcer may take until it reaches the writer.
PATIENCE = 15.0
STALE = (
    "your service manager (systemd --user) was started before you joined group docker, so the enforcer could "
    "use neither Docker nor the netfilter writer"
)
LAUNCHER = """\
import sys
sys.path.insert(0, {directory!r})
from enforcer.netfilter.__main__ import main
sys.exit(main())
"""


def unit_text(name: str) -> str:
    """Return a unit file of the package, or of the source tree when run from there."""
    packaged = resources.files("corral") / "units" / name
    if packaged.is_file():
        return packaged.read_text(encoding="utf-8")
    return (Path(__file__).parent.parent / "systemd" / name).read_text(encoding="utf-8")


def _package_files(package: str) -> Iterator[tuple[str, bytes]]:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise InstallError(f"the Python package {package} is missing", "install corral again")
    top = Path(next(iter(spec.submodule_search_locations)))
    prefix = Path(*package.split("."))
    for path in sorted(top.rglob("*")):
        if path.is_file() and path.suffix in (".py", "") and "__pycache__" not in path.parts:
            yield str(prefix / path.relative_to(top)), path.read_bytes()


def writer_files() -> dict[str, bytes]:
    """Return what the root-owned directory will hold, by relative path, without the launcher."""
    files = {"enforcer/__init__.py": b'"""The root-owned copy of the writer."""\n'}
    for package in ("enforcer.netfilter", "pyroute2"):
        files.update(_package_files(package))
    return files


def digest(files: dict[str, bytes]) -> str:
    """Return a hash over names and contents: the versioned directory's name carries it."""
    total = hashlib.sha256()
    for name, content in sorted(files.items()):
        total.update(f"{name}\0{len(content)}\0".encode() + content)
    return total.hexdigest()[:8]


def archive(files: dict[str, bytes]) -> bytes:
    """Return a gzipped tar of plain files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def root_program() -> tuple[str, Path]:
    """Return the program for root, with everything it installs inside, and the directory it will fill."""
    files = writer_files()
    directory = ROOT_DIRECTORY / f"{version('corral')}-{digest(files)}"
    files["corral-netfilter"] = LAUNCHER.format(directory=str(directory)).encode()
    units = {
        name: unit_text(name).replace("@DIR@", str(directory)).replace("@PYTHON@", SYSTEM_PYTHON)
        for name in SYSTEM_UNITS
    }
    payload = {
        "directory": str(directory),
        "python": SYSTEM_PYTHON,
        "archive": base64.b64encode(archive(files)).decode(),
        "units": units,
        "modules": unit_text("corral-modules.conf"),
    }
    source = (resources.files("corral") / "installer" / "root.py").read_text(encoding="utf-8")
    return f"{source}\n\nsys.exit(main(json.loads({json.dumps(payload)!r})))\n", directory


def plan_text(directory: Path) -> str:
    """Return what the installation will do and why, one step a line."""
    return "\n".join(
        (
            "corral install will do this with sudo:",
            f"  copy the netfilter writer to {directory}",
            "    (root-owned: no system unit runs what a user can write)",
            "  write /etc/systemd/system/corral-skeleton.service (rules before Docker starts a container)",
            "  write /etc/systemd/system/corral-netfilter.socket and .service",
            "    (group docker may ask; one process with CAP_NET_ADMIN and CAP_NET_RAW writes)",
            "  write /etc/modules-load.d/corral.conf (br_netfilter, ipset)",
            "  load the rules: they match interfaces named corral-* only, foreign rules stay as they are",
            "and this as you:",
            f"  write ~/.config/systemd/user/{USER_UNIT} and start it",
        )
    )


def install(*, echo: Callable[[str], None], dry_run: bool = False, assume_yes: bool = False) -> None:
    """Install the host part.

    Raises:
        InstallError: run as root, something is missing (then nothing has been done), or a step failed; what
            ran before keeps running.
    """
    uid = os.geteuid()
    if uid == 0:
        raise InstallError(
            "corral is installed by the user who will run agents, not by root",
            "log in as that user (a member of group docker) and run: corral install",
        )
    program, directory = root_program()
    echo(plan_text(directory))
    if dry_run:
        return
    environ = relay.environment(os.environ, uid)
    found = membership(uid)
    check_before(environ, found)
    if not assume_yes and sys.stdin.isatty():
        echo("go on? [Y/n]")
        if sys.stdin.readline().strip().lower() not in ("", "y", "yes"):
            raise InstallError("nothing has been installed")
    _root_step(program)
    echo("system part: done")
    _user_step(environ)
    await_enforcer(Client(socket_path(environ), timeout=5).version, found)
    echo("user part: done")
    if not _lingers(found.user):
        echo(f"note: sandboxes end when you log out; to keep them: sudo loginctl enable-linger {found.user}")


def check_before(environ: Mapping[str, str], found: Membership) -> None:
    """Look at everything that could stop the installation half way.

    Args:
        environ: see ``relay.environment``.
        found: the user who installs.

    Raises:
        InstallError: something is missing; nothing has been done.
    """
    enforcer_executable()
    _check_system_python(environ)
    if found.group is not None and not found.member:
        raise InstallError(f"{found.user} is not in group docker", f"{join(found)}; then: corral install")
    _check_manager(environ, found)


def _check_system_python(environ: Mapping[str, str]) -> None:
    what = f"{SYSTEM_PYTHON}, the system's Python, on which the netfilter writer runs,"
    try:
        done = process.run(
            [SYSTEM_PYTHON, "-I", "-c", "import sys; print('.'.join(map(str, sys.version_info[:2])))"],
            environ=environ,
            check=False,
        )
    except process.ProgramError as error:
        raise InstallError(f"{what} cannot be run: {error.message}", "sudo apt install python3") from error
    try:
        told = tuple(int(part) for part in done.stdout.strip().split("."))
    except ValueError:
        raise InstallError(
            f"{what} does not work: {done.stderr.strip()}", "sudo apt install --reinstall python3"
        ) from None
    if told < OLDEST_PYTHON:
        raise InstallError(
            f"{what} is {done.stdout.strip()}, and 3.11 or newer is needed",
            "upgrade the system (Debian 12, Ubuntu 24.04); the Python of corral itself does not count",
        )


def _check_manager(environ: Mapping[str, str], found: Membership) -> None:
    """The user's service manager has to run, and to know that the user is in group docker."""
    asked = process.run(
        ["systemctl", "--user", "show", "-P", "Version"], environ=environ, timeout=30, check=False
    )
    if asked.code != 0:
        raise InstallError(
            f"your service manager (systemd --user) does not answer: {asked.stderr.strip()}",
            f"sudo loginctl enable-linger {found.user}, then: corral install",
        )
    unit = f"user@{found.uid}.service"
    told = process.run(["systemctl", "show", "-P", "MainPID", unit], environ=environ, timeout=30, check=False)
    pid = told.stdout.strip()
    groups = process_groups(int(pid)) if told.code == 0 and pid.isdecimal() and pid != "0" else None
    if groups is not None and found.group is not None and found.group not in groups:
        raise InstallError(STALE, f"{restart_manager(found)}; then: corral install")


def await_enforcer(
    ask: Callable[[], Mapping[str, Any]],
    found: Membership,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until the enforcer answers and reaches the writer.

    Args:
        ask: its ``version``.
        found: the user it runs as.
        clock: seconds, monotonic.
        sleep: waits so many seconds.

    Raises:
        InstallError: not within ``PATIENCE`` seconds; with what stands in the way.
    """
    end = clock() + PATIENCE
    while True:
        try:
            problem = writer_problem(ask(), found)
        except EnforcerError as error:
            problem = (f"the enforcer was started, but: {error.message}", f"journalctl --user -u {USER_UNIT}")
        if problem is None:
            return
        if clock() >= end:
            raise InstallError(*problem)
        sleep(0.2)


def _root_step(program: str) -> None:
    prefix = ["sudo"] if sys.stdin.isatty() else ["sudo", "-n"]
    try:
        done = process.run(
            [*prefix, "--", SYSTEM_PYTHON, "-I", "-"],
            environ=os.environ,
            stdin=program,
            timeout=180,
            check=False,
        )
    except process.ProgramError as error:
        raise InstallError(
            f"sudo cannot be run: {error.message}", "install sudo, or ask an administrator"
        ) from error
    if done.code != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        try:
            told = json.loads(last)
            raise InstallError(str(told["message"]), str(told["hint"]))
        except (ValueError, KeyError, TypeError):
            raise InstallError(
                f"the step with sudo failed: {last}", "run it in a terminal: corral install"
            ) from None


def enforcer_executable() -> Path:
    """Return the absolute path of the service's program beside the running Python."""
    path = Path(sys.executable).parent / "corral-enforcer"
    if not path.exists():
        raise InstallError(f"{path} is missing", "install corral with pipx, then run: corral install")
    return path


def _user_step(environ: Mapping[str, str]) -> None:
    base = environ.get("XDG_CONFIG_HOME", "")
    config = Path(base) if base.startswith("/") else Path.home() / ".config"
    unit = config / "systemd" / "user" / USER_UNIT
    unit.parent.mkdir(parents=True, exist_ok=True)
    text = unit_text(USER_UNIT).replace("@ENFORCER@", str(enforcer_executable()))
    with oserrors.naming(unit):
        unit.write_text(text, encoding="utf-8")
    for words in (["daemon-reload"], ["enable", USER_UNIT], ["restart", USER_UNIT]):
        done = process.run(["systemctl", "--user", *words], environ=environ, timeout=60, check=False)
        if done.code != 0:
            raise InstallError(
                f"systemctl --user {' '.join(words)}: {done.stderr.strip()}",
                f"journalctl --user -u {USER_UNIT}",
            )


def _lingers(user: str) -> bool:
    return (Path("/var/lib/systemd/linger") / user).exists()
