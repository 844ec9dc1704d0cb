"""``corral install``: bring the host part of corral into place.

The part that needs root is one program, sent over stdin to the system's Python: it copies the writer and its
dependency to a root-owned, versioned directory and enables three units. The rest is one unit of the user's
own service manager.
"""

from __future__ import annotations

import base64
import contextlib
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
from pathlib import Path
from typing import Any

from corral import __version__, hostcheck, hostfacts, oserrors, process, relay, rootless, unitwords
from corral.context import check_versions
from corral.installer import common
from corral.installer.bundle import program
from corral.installer.elevate import SYSTEM_PYTHON, as_root
from corral.membership import (
    Membership,
    join,
    membership,
    process_groups,
    restart_manager,
)
from corral.user import user_units
from enforcer.client import Client, socket_path
from policy import versions
from policy.errors import EnforcerError, EngineError, InstallError
from policy.identity import data_home

ROOT_DIRECTORY = Path("/opt/corral")
USER_UNIT = "corral-enforcer.service"
# Pulled in by each start of the one above.
SWEEP_UNIT = "corral-sweep.service"
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


def library_files() -> dict[str, bytes]:
    """Return python-iptables, by relative path, for hosts that use the legacy tables; empty without it.

    Its shared library is told by a name without the Python version: the system's Python loads it.
    """
    spec = importlib.util.find_spec("iptc")
    if spec is None or spec.origin is None:
        return {}
    found = next(Path(spec.origin).parents[1].glob("libxtwrapper*.so"), None)
    if found is None:
        return {}
    return {**dict(_package_files("iptc")), "libxtwrapper.so": found.read_bytes()}


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


def root_program(uid: int | None = None) -> tuple[str, Path]:
    """Return the program for root, with everything it installs inside, and the directory it will fill.

    Args:
        uid: who installs; root notes it, so that uninstalling knows who else uses the system part.
    """
    files, library = writer_files(), library_files()
    directory = ROOT_DIRECTORY / f"{__version__}-{digest(files)}"
    manifest = versions.describe(__version__, versions.WRITER_SCHEMAS)
    files["corral-netfilter"] = LAUNCHER.format(directory=str(directory)).encode()
    files[common.MANIFEST] = json.dumps(manifest).encode()
    units = {
        name: unit_text(name).replace("@DIR@", str(directory)).replace("@PYTHON@", SYSTEM_PYTHON)
        for name in common.UNITS
    }
    payload = {
        "directory": str(directory),
        "python": SYSTEM_PYTHON,
        "archive": base64.b64encode(archive(files)).decode(),
        "library": base64.b64encode(archive(library)).decode() if library else "",
        "units": units,
        "modules": unit_text("corral-modules.conf"),
        "manifest": manifest,
        "uid": os.getuid() if uid is None else uid,
    }
    return program("corral.installer.root", payload), directory


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
            "  note in /var/lib/corral/users that you use corral (uninstalling asks)",
            "  load the rules: they match interfaces named corral-* only, foreign rules stay as they are",
            "and this as you:",
            f"  write ~/.config/systemd/user/{USER_UNIT} and start it",
            f"  write ~/.config/systemd/user/{SWEEP_UNIT}",
            "    (at each start of the former: removes what dead sessions left)",
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
    if rootless.chosen(relay.environment(os.environ, uid)):
        from corral import installrootless

        installrootless.run(echo=echo, dry_run=dry_run, assume_yes=assume_yes)
        return
    system_part, directory = root_program(uid)
    echo(plan_text(directory))
    if dry_run:
        return
    environ = relay.environment(os.environ, uid)
    found = membership(uid)
    check_before(environ, found)
    confirm(echo, assume_yes=assume_yes)
    as_root(system_part, environ, "corral install")
    echo("system part: done")
    write_user_units(user_units(Path.home(), environ), rootless=False)
    start_units(environ, USER_UNIT)
    await_enforcer(Client(socket_path(environ), timeout=5).version, found)
    echo("user part: done")
    note_linger(echo, found.user)


def confirm(echo: Callable[[str], None], *, assume_yes: bool) -> None:
    """Ask whether to go on, when somebody can be asked.

    Raises:
        InstallError: not.
    """
    if not assume_yes and sys.stdin.isatty():
        echo("go on? [Y/n]")
        if sys.stdin.readline().strip().lower() not in ("", "y", "yes"):
            raise InstallError("nothing has been installed")


def note_linger(echo: Callable[[str], None], user: str) -> None:
    """Say that sandboxes end with the login, when they do."""
    if not (Path("/var/lib/systemd/linger") / user).exists():
        echo(f"note: sandboxes end when you log out; to keep them: sudo loginctl enable-linger {user}")


def check_before(environ: Mapping[str, str], found: Membership) -> None:
    """Look at everything that could stop the installation half way.

    Args:
        environ: see ``relay.environment``.
        found: the user who installs.

    Raises:
        InstallError: something is missing; nothing has been done.
        EngineError: Docker is missing, or its engine is one that corral cannot fence.
    """
    programs()
    check_going_back(common.Places(), data_home(Path.home(), dict(environ)))
    check_system_python(environ)
    if found.group is not None and not found.member:
        raise InstallError(f"{found.user} is not in group docker", f"{join(found)}; then: corral install")
    check_manager(environ, found)
    _check_groups(environ, found)
    hostfacts.require_local_engine(environ)
    check_running(environ, found.uid)


def check_going_back(places: common.Places, data: Path) -> None:
    """Refuse to install over something newer; root looks at the system part once more.

    Raises:
        InstallError: the system part is newer.
        CorralError: the user's state is.
    """
    there = common.installed(places)
    own = versions.parse("corral", versions.describe(__version__))
    problem = versions.downgrade(own, there) if there is not None else None
    if problem is not None:
        raise InstallError(*problem)
    versions.check_state(data, __version__)


def check_running(environ: Mapping[str, str], uid: int) -> None:
    """What runs goes on running under the new version, so that has to understand its labels."""
    from corral.engine import connect
    from corral.inventory import take

    try:
        with contextlib.closing(connect(environ)) as api:
            containers = take(api).containers
    except EngineError:
        # Then nothing of it runs that could lose anything; that Docker is there is for others to look at.
        return
    labels = str(versions.SCHEMAS[versions.LABELS])
    alien = [c for c in containers if c.uid == uid and c.alive and c.schema != labels]
    if alien:
        raise InstallError(
            f"{', '.join(c.name for c in alien)} was started by another version (labels schema "
            f"{alien[0].schema or 'unknown'}, this version reads {labels}) and would lose its network",
            "end it first (corral down), then: corral install",
        )


def check_system_python(environ: Mapping[str, str]) -> None:
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


def check_manager(environ: Mapping[str, str], found: Membership) -> None:
    """The user's service manager has to run."""
    asked = process.run(
        ["systemctl", "--user", "show", "-P", "Version"], environ=environ, timeout=30, check=False
    )
    if asked.code != 0:
        raise InstallError(
            f"your service manager (systemd --user) does not answer: {asked.stderr.strip()}",
            f"sudo loginctl enable-linger {found.user}, then: corral install",
        )


def _check_groups(environ: Mapping[str, str], found: Membership) -> None:
    """The service manager has to know that the user is in group docker."""
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
            check_versions(ask(), found)
            return
        except EnforcerError as error:
            problem = error
        if clock() >= end:
            told = "the enforcer was started, but: "
            hint = problem.hint or f"journalctl --user -u {USER_UNIT}"
            raise InstallError(told + problem.message, hint) from problem
        sleep(0.2)


def programs() -> tuple[Path, Path]:
    """Return the absolute paths of the service's program and of corral, beside the running Python.

    Raises:
        InstallError: one is not there.
        CorralError: no unit can name one.
    """
    enforcer, own = (Path(sys.executable).parent / name for name in ("corral-enforcer", "corral"))
    for path in (enforcer, own):
        if not path.exists():
            raise InstallError(f"{path} is missing", "install corral with pipx, then run: corral install")
        # Here, before anything is done: a unit will have to say it.
        unitwords.program(path)
    return enforcer, own


def enforcer_unit(*, rootless: bool) -> str:
    """Return the text of the enforcer's unit.

    Args:
        rootless: for an engine of the user's own.
    """
    text = _with(unit_text(USER_UNIT), "@ENFORCER@", programs()[0])
    return text.replace("@OPTIONS@", " --rootless" if rootless else "")


def _with(text: str, mark: str, program: Path) -> str:
    """Fill in a program, as a condition takes it and as a command does."""
    text = text.replace(f"PathExists={mark}", f"PathExists={unitwords.directory(program)}")
    return text.replace(mark, unitwords.program(program))


def sweep_unit(*, rootless: bool) -> str:
    """Return the text of the unit that sweeps at each start of the enforcer; see ``enforcer_unit``."""
    text = _with(unit_text(SWEEP_UNIT), "@CORRAL@", programs()[1])
    return text.replace("@ENGINE@", "unix://%t/docker.sock" if rootless else hostcheck.DEFAULT_SOCKET)


def write_user_units(directory: Path, *, rootless: bool) -> None:
    """Write the units that are of every installation.

    Raises:
        CorralError: one cannot be written.
    """
    write_unit(directory / SWEEP_UNIT, sweep_unit(rootless=rootless))
    write_unit(directory / USER_UNIT, enforcer_unit(rootless=rootless))


def write_unit(path: Path, text: str) -> None:
    """Write a file of the user's service manager, whole or not at all.

    Raises:
        CorralError: it cannot be written.
    """
    with oserrors.naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + common.PARTIAL)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)


def start_units(environ: Mapping[str, str], *units: str) -> None:
    """Have units of the user's started now, anew, and with each login.

    Raises:
        InstallError: systemd refuses.
    """
    systemctl(environ, "daemon-reload")
    # Before the enforcer: its first start pulls it in, too.
    systemctl(environ, "enable", SWEEP_UNIT)
    for unit in units:
        systemctl(environ, "enable", unit)
        systemctl(environ, "restart", unit)


def systemctl(environ: Mapping[str, str], *words: str) -> str:
    """Tell the user's service manager something and return what it printed.

    Raises:
        InstallError: it refuses.
    """
    done = process.run(["systemctl", "--user", *words], environ=environ, timeout=90, check=False)
    if done.code != 0:
        raise InstallError(
            f"systemctl --user {' '.join(words)}: {done.stderr.strip()}", f"journalctl --user -u {words[-1]}"
        )
    return done.stdout
