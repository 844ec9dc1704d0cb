"""Whether somebody looks after a session: who makes one holds a lock on its directory until its own end.

The kernel lets go of the lock when the process ends, however it does. What is locked cannot be a leftover.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from policy.errors import CorralError

# Files in a session's directory, which no container sees. The first: its user wants to look at it after its
# end (keep: true). The second: whoever started it left it running, and wants to read what it said.
KEPT, LEFT = "kept", "left"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def take(directory: Path) -> int:
    """Lock a session's directory, which was made just now; return what holds it until it is closed.

    Raises:
        CorralError: it was taken away at this moment.
        OSError: there is none, or the file system cannot lock.
    """
    descriptor = os.open(directory, _DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not _same(directory, descriptor):
            raise CorralError(f"{directory} was removed while it was being made", "try again")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def unheld(directory: Path) -> Iterator[bool]:
    """Say whether nobody looks after a session, and keep it so; a directory that is not there has nobody."""
    try:
        descriptor = os.open(directory, _DIRECTORY)
    except FileNotFoundError:
        yield True
        return
    except OSError:
        # Whatever it is, it is not for us to judge.
        yield False
        return
    try:
        yield _exclusive(descriptor)
    finally:
        os.close(descriptor)


def share(file: Path) -> int:
    """Say that somebody works with a sandbox, until what is returned is closed; waits for who cleans up.

    Raises:
        OSError: the file cannot be opened.
    """
    descriptor = os.open(file, _LOCK, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


@contextlib.contextmanager
def idle(file: Path) -> Iterator[bool]:
    """Say whether nobody works with a sandbox, and keep it so; see ``share``."""
    try:
        # Where there is no file nobody has worked yet; making one would make a sandbox's directory again.
        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    except OSError:
        yield False
        return
    try:
        yield _exclusive(descriptor)
    finally:
        os.close(descriptor)


def _exclusive(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _same(path: Path, descriptor: int) -> bool:
    ours = os.fstat(descriptor)
    with contextlib.suppress(OSError):
        there = path.stat(follow_symlinks=False)
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)
    return False
