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
from collections.abc import Callable, Iterator
from importlib import resources
from importlib.metadata import version
from pathlib import Path

from corral import process
from policy.errors import InstallError

ROOT_DIRECTORY = Path("/opt/corral")
SYSTEM_PYTHON = "/usr/bin/python3"
SYSTEM_UNITS = ("corral-skeleton.service", "corral-netfilter.socket", "corral-netfilter.service")
USER_UNIT = "corral-enforcer.service"
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
        InstallError: run as root, without sudo, or a step failed; what ran before keeps running.
    """
    if os.geteuid() == 0:
        raise InstallError(
            "corral is installed by the user who will run agents, not by root",
            "log in as that user (a member of group docker) and run: corral install",
        )
    program, directory = root_program()
    echo(plan_text(directory))
    if dry_run:
        return
    if not assume_yes and sys.stdin.isatty():
        echo("go on? [Y/n]")
        if sys.stdin.readline().strip().lower() not in ("", "y", "yes"):
            raise InstallError("nothing has been installed")
    _root_step(program)
    echo("system part: done")
    _user_step()
    echo("user part: done")
    if not _lingers():
        echo(f"note: sandboxes end when you log out; to keep them: sudo loginctl enable-linger {_user()}")


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


def _user_step() -> None:
    base = os.environ.get("XDG_CONFIG_HOME", "")
    config = Path(base) if base.startswith("/") else Path.home() / ".config"
    unit = config / "systemd" / "user" / USER_UNIT
    unit.parent.mkdir(parents=True, exist_ok=True)
    unit.write_text(unit_text(USER_UNIT).replace("@ENFORCER@", str(enforcer_executable())), encoding="utf-8")
    for words in (["daemon-reload"], ["enable", USER_UNIT], ["restart", USER_UNIT]):
        done = process.run(["systemctl", "--user", *words], environ=os.environ, timeout=60, check=False)
        if done.code != 0:
            raise InstallError(
                f"systemctl --user {' '.join(words)}: {done.stderr.strip()}",
                f"journalctl --user -u {USER_UNIT}",
            )


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


def _lingers() -> bool:
    return (Path("/var/lib/systemd/linger") / _user()).exists()
