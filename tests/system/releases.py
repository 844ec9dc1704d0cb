"""Other releases of corral for the box: this tree with another version and other schemas."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.lab import Box, Lab
from tests.lab.execute import Steps
from tests.lab.layout import Layout
from tests.lab.product import PROJECT, build_wheel, sources

INBOX = "/var/lib/corral-lab/releases"

# file -> what differs in a release with this version, whose every schema but that of the labels is one higher.
RAISED = "one higher"
NEWER: dict[str, tuple[tuple[str, str], ...]] = {
    "pyproject.toml": ((r'(?m)^version = "[^"]*"', 'version = "{version}"'),),
    "corral/__init__.py": ((r'__version__ = "[^"]*"', '__version__ = "{version}"'),),
    "enforcer/netfilter/VERSION": ((r".*\n?", "{version}\n"),),
    "policy/versions.py": tuple(
        (rf"(?<=\b{name}: )\d+(?=[,}}])", RAISED) for name in ("API", "STATE", "PROTOCOL", "SKELETON")
    ),
    "enforcer/netfilter/model.py": ((r"(?<=PROTOCOL_VERSION = )\d+", RAISED),),
    "enforcer/netfilter/schemas.py": ((r"(?<=SKELETON = )\d+", RAISED),),
    # Rules that differ, so that the old writer and the new one do not want the same.
    "enforcer/netfilter/skeleton.py": ((r"--hashlimit-upto 20/sec", "--hashlimit-upto 21/sec"),),
}


def _changed(pattern: str, replacement: str, version: str, text: str) -> str:
    if replacement == RAISED:
        return re.sub(pattern, lambda found: str(int(found[0]) + 1), text, count=1)
    return re.sub(pattern, replacement.format(version=version), text, count=1)


def derive(directory: Path, version: str) -> Path:
    """Copy what goes into the wheel to ``directory`` and make it that release."""
    for path in sources(PROJECT):
        target = directory / path.relative_to(PROJECT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    for name, changes in NEWER.items():
        text = (directory / name).read_text()
        for pattern, replacement in changes:
            changed = _changed(pattern, replacement, version, text)
            assert changed != text, f"{name} has no {pattern}"
            text = changed
        (directory / name).write_text(text)
    return directory


class Releases:
    """Wheels in the box, and which of them the user's environment holds."""

    def __init__(self, lab: Lab, scratch: Path) -> None:
        self._lab = lab
        self._scratch = scratch
        self._box: Box = lab.box

    def put(self, version: str | None) -> str:
        """Bring a wheel into the box (None: of this tree) and return its path there."""
        project = PROJECT if version is None else derive(self._scratch / version, version)
        wheel = build_wheel(Layout.of(self._lab.name), Steps(), project)
        self._box.write(f"{INBOX}/{wheel.name}", wheel.read_bytes(), owner="root")
        return f"{INBOX}/{wheel.name}"

    def use(self, wheel: str) -> None:
        """Let the user's environment hold that release, as ``pipx upgrade`` does; nothing else is done."""
        pip = ["pipx", "runpip", "corral", "install", "-q", "--no-deps", "--no-index", "--force-reinstall"]
        self._box.run([*pip, wheel], timeout=180)

    @contextmanager
    def restored(self, wheel: str) -> Iterator[None]:
        """Whatever the block does, this release is installed afterwards, on clean ground."""
        try:
            yield
        finally:
            self.use(wheel)
            data = f"{self._box.home}/.local/share/corral"
            self._box.run(["rm", "-f", f"{data}/schema.json"])
            self._box.run(["corral", "uninstall", "--yes", "--force"], timeout=180)
            self._box.run(["corral", "install"], timeout=180)
