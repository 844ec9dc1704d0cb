"""corral in the box, installed the way a user does it: a wheel, pipx, the box's own Python."""

from __future__ import annotations

import hashlib
import re
import sys
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path

from . import execute
from .box import Box
from .execute import LabError, Steps
from .layout import Layout
from .state import locked, remove_tree

PROJECT = Path(__file__).resolve().parents[2]
_LOCK = PROJECT / "requirements" / "test.lock"
_METADATA = ("pyproject.toml", "README.md", "LICENSE")
_INBOX = "/var/lib/corral-lab"


def install(lab: Layout, box: Box, steps: Steps, project: Path = PROJECT) -> str:
    """Install the work tree's corral for `dev` when its wheel is another than the installed one.

    Returns the version line `pipx list` has for it. Raises LabError.
    """
    wheel = build_wheel(lab, steps, project)
    content = wheel_key(wheel)
    marker = f"{_INBOX}/installed"
    there = box.run(["sh", "-c", f"test -x {box.home}/.local/bin/corral && cat {marker}"], check=False).stdout
    if there.strip() != content:
        wheels = wheelhouse(lab, box, steps)
        with steps("installing corral in the box"):
            _install(box, wheel, wheels)
            box.write(marker, content, owner="root")
    return box.run(["pipx", "list", "--short"]).stdout.strip()


def interpreter(box: Box) -> str:
    """The Python that runs the installed corral: where pipx puts its environments is pipx's business."""
    first = box.run(["head", "-n", "1", f"{box.home}/.local/bin/corral"]).stdout
    return first.removeprefix("#!").split()[0]  # some pipx adds options


def build_wheel(lab: Layout, steps: Steps, project: Path = PROJECT) -> Path:
    """The wheel of the work tree as it is now; built again only when a source file changed."""
    directory = lab.cache / "wheels" / source_key(project)
    with locked(lab.cache / "wheels.lock", "wheels", wait=lambda: None):
        if not (found := list(directory.glob("*.whl"))):
            partial = lab.cache / "wheels" / "partial"
            remove_tree(partial)
            with steps("building the wheel"):
                pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(partial)]
                execute.run([*pip, str(project)], timeout=300)
            _forget(directory.parent)
            partial.rename(directory)
            found = list(directory.glob("*.whl"))
    return found[0]


def wheelhouse(lab: Layout, box: Box, steps: Steps) -> Path:
    """Wheels of the whole lock for the box's Python, hashes checked, kept by content."""
    python = box.run(["python3", "-c", "import sys; print(*sys.version_info[:2], sep='.')"]).stdout.strip()
    key = hashlib.sha256(python.encode() + _LOCK.read_bytes()).hexdigest()[:16]
    directory = lab.cache / "wheelhouse" / key
    with locked(lab.cache / "wheelhouse.lock", "dependencies", wait=lambda: None):
        if not directory.is_dir():
            partial = lab.cache / "wheelhouse" / "partial"
            remove_tree(partial)
            partial.mkdir(parents=True)
            with steps("fetching corral's dependencies"):
                _download(box, partial)
            _forget(directory.parent)
            partial.rename(directory)
    return directory


def source_key(project: Path) -> str:
    """Hash of everything that goes into the wheel, by pyproject's own list of packages."""
    digest = hashlib.sha256()
    for path in sources(project):
        digest.update(str(path.relative_to(project)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def wheel_key(wheel: Path) -> str:
    """Hash of the wheel's files; the time it was built does not count."""
    with zipfile.ZipFile(wheel) as archive:
        members = sorted((member.filename, member.CRC, member.file_size) for member in archive.infolist())
    return hashlib.sha256(repr((wheel.name, members)).encode()).hexdigest()[:16]


def constraints(lock: str) -> str:
    """The pins of a lock without their hashes (which would oblige the project's own wheel to have one)."""
    return "".join(f"{pin}\n" for pin in re.findall(r"^([\w.\[\]-]+==[^\s;\\]+)", lock, re.MULTILINE))


def _forget(directory: Path, days: float = 1) -> None:
    """Remove what is so old that no parallel lab can be reading it."""
    for old in directory.iterdir():
        if time.time() - old.stat().st_mtime > days * 86400:
            remove_tree(old)


def sources(project: Path) -> Iterable[Path]:
    """Every file that goes into the wheel."""
    rooms = ("policy", "enforcer", "agent_image", "corral", "systemd", "docs/man")
    files = [path for room in rooms for path in sorted((project / room).rglob("*")) if path.is_file()]
    yield from (path for path in files if "__pycache__" not in path.parts)
    yield from (project / name for name in _METADATA)


def _download(box: Box, directory: Path) -> None:
    """pip of the box fetches, through the registry proxy: it knows which wheels fit."""
    box.write(f"{_INBOX}/test.lock", _LOCK.read_text(), owner="root")
    script = f"""
        set -e
        python3 -m venv "$HOME/.cache/lab-fetch"
        "$HOME/.cache/lab-fetch/bin/pip" download -q --no-deps --require-hashes --only-binary :all: \
            -r {_INBOX}/test.lock -d "$HOME/.cache/lab-wheels"
        rm -rf "$HOME/.cache/lab-fetch"
    """
    box.run(["sh", "-c", script], timeout=600)
    inside = Path(f"/proc/{box.leader}/root{box.home}/.cache/lab-wheels")
    for wheel in inside.glob("*.whl"):
        (directory / wheel.name).write_bytes(wheel.read_bytes())
    box.run(["rm", "-rf", f"{box.home}/.cache/lab-wheels"])


def _install(box: Box, wheel: Path, wheels: Path) -> None:
    inside = Path(f"/proc/{box.leader}/root{_INBOX}")
    box.write(f"{_INBOX}/constraints.txt", constraints(_LOCK.read_text()), owner="root")
    box.run(["sh", "-c", f"rm -rf {_INBOX}/wheels; mkdir -p {_INBOX}/wheels"], user="root")
    for file in [wheel, *wheels.glob("*.whl")]:
        (inside / "wheels" / file.name).write_bytes(file.read_bytes())
    arguments = f"--no-index --find-links {_INBOX}/wheels --constraint {_INBOX}/constraints.txt"
    command = ["pipx", "install", "--force", "--pip-args", arguments, f"{_INBOX}/wheels/{wheel.name}"]
    result = box.run(command, check=False, timeout=300)
    if result.returncode != 0:
        logs = box.run(
            [
                "sh",
                "-c",
                "tail -n 40 ~/.local/state/pipx/log/*_pip_errors.log ~/.local/pipx/logs/*_pip_errors.log",
            ],
            check=False,
        ).stdout
        raise LabError(f"pipx cannot install {wheel.name}\n{result.stdout}{result.stderr}{logs}")
    box.run(["test", "-x", f"{box.home}/.local/bin/corral"])
