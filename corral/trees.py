"""Removing a directory tree that an agent filled: however deep, closed or full of links it is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import field
from pathlib import Path

from policy.records import dataclass

# Directories that are noted when one is read: to begin anew after each would read what is left, and on some
# file systems what was there, as often as there are directories.
AT_ONCE, FEW = 4096, 64
# Of all that are noted, after which only few are.
NOTED = 1_000_000
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove(tree: Path, late: Callable[[], bool] = lambda: False) -> None:
    """Remove a tree in which nobody writes any more; what cannot be removed stays.

    No link is followed and there is one open directory at a time, so neither depth nor the length of a path
    ends it; when ``late`` says so it ends with what is left.
    """
    with contextlib.suppress(OSError):
        parent = os.open(tree.parent, _DIRECTORY)
        try:
            _empty(parent, tree.name, late)
        finally:
            os.close(parent)
    with contextlib.suppress(OSError):
        if tree.is_symlink() or tree.is_file():
            tree.unlink()
        else:
            tree.rmdir()


def _empty(parent: int, name: str, late: Callable[[], bool]) -> None:
    current = _enter(parent, name)
    way, noted = [_Level(name)], 0
    try:
        while not late():
            level = way[-1]
            if not level.waiting:
                noted += _clear(current, level, AT_ONCE if noted < NOTED else FEW, late)
            if level.waiting:
                below = level.waiting.pop()
                noted -= 1
                try:
                    deeper = _enter(current, below)
                except OSError:
                    level.kept.add(below)
                    continue
                way.append(_Level(below))
            elif len(way) == 1:
                return
            else:
                way.pop()
                deeper = os.open("..", _DIRECTORY, dir_fd=current)
                try:
                    os.rmdir(level.name, dir_fd=deeper)
                except OSError:
                    way[-1].kept.add(level.name)
            os.close(current)
            current = deeper
    finally:
        os.close(current)


@dataclass
class _Level:
    """A directory on the way down: what could not be removed in it, and directories still to be gone into."""

    name: str
    kept: set[str] = field(default_factory=set)
    waiting: list[str] = field(default_factory=list)


def _clear(directory: int, level: _Level, most: int, late: Callable[[], bool]) -> int:
    """Remove what is not a directory; let some that are wait, and were not given up; return how many."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if late() or len(level.waiting) >= most:
                break
            if entry.name in level.kept:
                continue
            if entry.is_dir(follow_symlinks=False):
                level.waiting.append(entry.name)
                continue
            try:
                os.unlink(entry.name, dir_fd=directory)
            except OSError:
                level.kept.add(entry.name)
    return len(level.waiting)


def _enter(parent: int, name: str) -> int:
    """Open a directory that may be closed to its owner."""
    place = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
    try:
        path = f"/proc/self/fd/{place}"
        with contextlib.suppress(OSError):
            os.chmod(path, 0o700)  # noqa: PTH101 - of what is open
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(place)
