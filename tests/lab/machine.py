"""What the machine must offer before a lab can be made: root, Linux features, packages, room on the disk."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from . import execute
from .execute import LabError, Steps

_TOOLS = {
    # program -> Debian package. None of them starts a daemon of its own by being installed.
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "iptables-nft": "iptables",
    "nft": "nftables",
    "nsenter": "util-linux",
    "systemd-nspawn": "systemd-container",
    "zstd": "zstd",
}
_GIB = 1 << 30
ROOM_TREES = 3 * _GIB
ROOM_BOX = 4 * _GIB


def prepare(steps: Steps) -> None:
    """Install what is missing. Raises LabError when this machine cannot have a lab."""
    if os.geteuid() != 0:
        raise LabError("the lab needs root: it makes namespaces and boots a box", "run it as root")
    if not Path("/usr/bin/apt-get").exists():
        raise LabError("the lab needs a Debian machine: there is no apt-get")
    if not _has_lists():
        with steps("apt-get update"):
            execute.run(["/usr/bin/apt-get", "-q", "update"], timeout=300)
    missing = [package for program, package in _TOOLS.items() if not _installed(program)]
    if missing:
        with steps(f"installing {' '.join(missing)}"):
            _install(missing)


def prepare_compiler(steps: Steps) -> None:
    """Install what compiling an extension of this Python takes, where it is missing. Raises LabError."""
    missing = [] if shutil.which("gcc") else ["gcc", "libc6-dev"]
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        missing.append("python3-dev")
    if missing:
        with steps(f"installing {' '.join(missing)}"):
            _install(missing)


def install_libraries(package: str, steps: Steps) -> None:
    """Install the libraries of a package that is extracted and not installed."""
    missing = _missing_libraries(package)
    if missing:
        with steps(f"installing {' '.join(missing)}"):
            _install(missing)


def check_room(directory: Path, needed: int) -> None:
    """Raises LabError when the disk of `directory` has less than `needed` bytes free."""
    while not directory.exists():
        directory = directory.parent
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise LabError(
            f"{directory} has {free / _GIB:.1f} GiB free, the lab needs {needed / _GIB:.0f} GiB there",
            "make room, or set XDG_CACHE_HOME to a directory on a larger disk",
        )


def wanted_libraries(depends: str) -> list[str]:
    """Library packages among the lines of `apt-cache depends`."""
    words = [line.split("Depends:")[1].strip() for line in depends.splitlines() if "Depends:" in line]
    return [word for word in words if word.startswith("lib")]


def _missing_libraries(package: str) -> list[str]:
    command = [execute.tool("apt-cache"), "depends", "--no-recommends", "--no-suggests", package]
    wanted = wanted_libraries(execute.run(command, env=_plain()).stdout)
    status = execute.run(
        [execute.tool("dpkg-query"), "-W", "-f", "${Package} ${db:Status-Status}\n", *wanted], check=False
    ).stdout
    present = {line.split()[0] for line in status.splitlines() if line.endswith(" installed")}
    return [package for package in wanted if package not in present]


def _installed(program: str) -> bool:
    try:
        execute.tool(program)
    except LabError:
        return False
    return True


def _has_lists() -> bool:
    return any(Path("/var/lib/apt/lists").glob("*_Packages*"))


def _install(packages: list[str]) -> None:
    command = ["/usr/bin/apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", "install", "-y"]
    command += ["--no-install-recommends", *packages]
    if execute.run(command, timeout=600, check=False, env=_plain()).returncode != 0:
        # The lists may be older than the archive.
        execute.run(["/usr/bin/apt-get", "-q", "update"], timeout=300)
        execute.run(command, timeout=600, env=_plain())


def _plain() -> dict[str, str]:
    return {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
