"""Removing a directory tree that an agent filled: however deep, closed or full of links it is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

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
    # The way down: (name, what could not be removed there).
    way: list[tuple[str, set[str]]] = [(name, set())]
    try:
        while not late():
            below = _clear(current, way[-1][1], late)
            if below is not None:
                try:
                    deeper = _enter(current, below)
                except OSError:
                    way[-1][1].add(below)
                    continue
                way.append((below, set()))
            elif len(way) == 1:
                return
            else:
                gone, _ = way.pop()
                deeper = os.open("..", _DIRECTORY, dir_fd=current)
                try:
                    os.rmdir(gone, dir_fd=deeper)
                except OSError:
                    way[-1][1].add(gone)
            os.close(current)
            current = deeper
    finally:
        os.close(current)


def _clear(directory: int, kept: set[str], late: Callable[[], bool]) -> str | None:
    """Remove what is not a directory; return the first that is one and was not given up, None without any."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if late():
                return None
            if entry.name in kept:
                continue
            if entry.is_dir(follow_symlinks=False):
                return entry.name
            try:
                os.unlink(entry.name, dir_fd=directory)
            except OSError:
                kept.add(entry.name)
    return None


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
