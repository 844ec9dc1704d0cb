"""Mounts that stay what they were when the policy was checked.

Docker is told a path and follows it again each time: when it creates a container, and when it starts one. So
what a path leads to is looked at without following a single link, held by a descriptor, compared before and
after the container is created, and told to the entrypoint, which compares once more from inside, after Docker
has mounted for good. The last leaves no moment in between; the others tell sooner and in better words.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

from policy.errors import CorralError
from policy.records import dataclass

Identity = tuple[int, int]
_PLACE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def open_place(path: str) -> int:
    """Return a descriptor (O_PATH) of an absolute path, no part of which is a symbolic link.

    Raises:
        OSError: it is not there, or a part of it is a link (ELOOP).
    """
    current = os.open("/", _PLACE)
    for part in PurePosixPath(path).parts[1:]:
        try:
            below = os.open(part, _PLACE, dir_fd=current)
        finally:
            os.close(current)
        current = below
        if stat.S_ISLNK(os.fstat(current).st_mode):
            os.close(current)
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    return current


def identity(descriptor: int) -> Identity:
    """Return (device, inode) of what is open."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


@dataclass(frozen=True)
class Held:
    """Paths and what they led to."""

    places: dict[str, Identity]

    def rows(self) -> list[tuple[str, int, int]]:
        """Return (path, device, inode) of each, as the entrypoint takes them."""
        return [(path, *found) for path, found in self.places.items()]

    def check(self) -> None:
        """Look again.

        Raises:
            CorralError: a path leads elsewhere.
        """
        for path, before in self.places.items():
            if look(path) != before:
                raise CorralError(
                    f"{path} was exchanged while the sandbox was being made",
                    "find out by what, then try again",
                )


def look(path: str) -> Identity | None:
    """Return what a path leads to without links, None when it does not."""
    try:
        descriptor = open_place(path)
    except OSError:
        return None
    try:
        return identity(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def held(paths: Iterable[str]) -> Iterator[Held]:
    """Hold what the paths lead to: an inode that is open is not given to another file.

    Raises:
        CorralError: one is not there any more, or leads through a link.
    """
    with contextlib.ExitStack() as stack:
        places = {}
        for path in paths:
            try:
                descriptor = open_place(path)
            except OSError as error:
                raise CorralError(
                    f"{path} changed while the sandbox was being made: {error.strerror}",
                    "find out by what, then try again",
                ) from error
            stack.callback(os.close, descriptor)
            places[path] = identity(descriptor)
        yield Held(places)
