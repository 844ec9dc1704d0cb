"""What an agent could try on a file of root's. Each try undoes itself when it succeeds.

A try takes a path, raises OSError when the kernel refuses, and returns what it could not put back.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Try = Callable[[Path], str]

# Larger files are not truncated for a try: ``cut`` asks the kernel for the same right.
SMALL = 1 << 20


def _opened(flags: int) -> Try:
    def attempt(path: Path) -> str:
        os.close(os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW))
        return ""

    return attempt


def cut(path: Path) -> str:
    """Truncate to the length it has, which needs the right to write and changes no byte."""
    os.truncate(path, path.stat().st_size)
    return ""


def emptied(flags: int) -> Try:
    """Return a try that opens with O_TRUNC and writes back what was there."""

    def attempt(path: Path) -> str:
        if path.is_dir() or path.stat().st_size > SMALL:
            raise OSError("not tried")
        content = path.read_bytes()
        os.close(os.open(path, flags | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW))
        try:
            path.write_bytes(content)
        except OSError:
            return f"its {len(content)} bytes are lost"
        return ""

    return attempt


def renamed(path: Path) -> str:
    """Move it aside, and back."""
    aside = _beside(path)
    path.rename(aside)
    try:
        aside.rename(path)
    except OSError:
        return f"it is now {aside}"
    return ""


def unlinked(path: Path) -> str:
    """Remove a file or an empty directory, and make it again with the same content and mode."""
    found = path.lstat()
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISDIR(found.st_mode):
        path.rmdir()
        path.mkdir()
        path.chmod(mode)
        return "" if path.stat().st_uid == found.st_uid else "it is the agent's now"
    with path.open("rb") as content:
        path.unlink()
        try:
            with path.open("xb") as again:
                shutil.copyfileobj(content, again)
            path.chmod(mode)
        except OSError:
            return "it is gone"
    return "" if path.stat().st_uid == found.st_uid else "it is the agent's now"


def chmodded(path: Path) -> str:
    """Set the mode that it has, which only its owner may."""
    path.chmod(stat.S_IMODE(path.stat().st_mode))
    return ""


def chowned(path: Path) -> str:
    """Make it the agent's, and give it back."""
    owner = path.lstat().st_uid
    os.chown(path, os.getuid(), -1, follow_symlinks=False)
    try:
        os.chown(path, owner, -1, follow_symlinks=False)
    except OSError:
        return "it is the agent's now"
    return ""


def dated(path: Path) -> str:
    """Set the times that it has, which only its owner may."""
    found = path.lstat()
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns), follow_symlinks=False)
    return ""


def linked(path: Path) -> str:
    """Give it a second name in its directory."""
    beside = _beside(path)
    os.link(path, beside, follow_symlinks=False)
    return _removed(beside)


def joined(path: Path) -> str:
    """Put a new file beside it, or into it: what may be put there may take its place."""
    beside = path / _hidden("") if path.is_dir() else _beside(path)
    os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    return _removed(beside)


def moved_with_parent(path: Path) -> str:
    """Move any directory that leads to it aside, and back."""
    refused: OSError | None = None
    for parent in path.parents:
        if parent.parent == parent:
            break
        try:
            return renamed(parent)
        except OSError as problem:
            refused = problem
    raise refused or OSError("it lies in no directory but the root")


TRIES: dict[str, Try] = {
    "opened for writing": _opened(os.O_WRONLY),
    "opened for appending": _opened(os.O_WRONLY | os.O_APPEND),
    "opened for reading and writing": _opened(os.O_RDWR),
    "truncated": cut,
    "emptied": emptied(os.O_WRONLY),
    "emptied by a reader": emptied(os.O_RDONLY),
    "renamed": renamed,
    "removed": unlinked,
    "chmodded": chmodded,
    "chowned": chowned,
    "given other times": dated,
    "linked": linked,
    "replaced": joined,
    "moved with its directory": moved_with_parent,
}


def _hidden(name: str) -> str:
    return f".{name}.corral-verify-{os.urandom(6).hex()}"


def _beside(path: Path) -> Path:
    return path.with_name(_hidden(path.name))


def _removed(path: Path) -> str:
    with contextlib.suppress(OSError):
        path.unlink()
        return ""
    return f"{path} is left"
