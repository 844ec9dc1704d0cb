"""Whether somebody looks after a session: who makes one holds a lock on its directory until its own end.

The kernel lets go of the lock when the process ends, however it does. What is locked cannot be a leftover.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from policy.errors import CorralError

# Files in a session's directory, which no container sees. The first: its user wants to look at it after its
# end (keep: true). The second: whoever started it left it running, and wants to read what it said.
KEPT, LEFT = "kept", "left"
# Locked by who looks after a session at the moment: who made it, later perhaps somebody who came back to it.
ATTENDED = "attended"
_UNABLE = frozenset({errno.EBADF, errno.EINVAL, errno.EISDIR, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS})
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def take(directory: Path) -> int:
    """Lock a session's directory, which was made just now; return what holds it until it is closed.

    Raises:
        CorralError: it was taken away at this moment.
        OSError: there is none.
    """
    descriptor = os.open(directory, _DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            # Some network file systems lock no directories. What is locked in it in a moment then has to do.
            if error.errno not in _UNABLE:
                raise
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
        # Without the file: who makes the session holds its directory, and has not come to it.
        with idle(directory / ATTENDED) as nobody:
            yield nobody and _exclusive(descriptor, unable=True)
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
    """Say whether nobody has a lock on this file, and keep it so; see ``share``."""
    try:
        # Where there is no file nobody has come yet; making one would make its directory again.
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


def _exclusive(descriptor: int, *, unable: bool = False) -> bool:
    """Lock; False when somebody else has it, ``unable`` when the file system locks nothing of this kind."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return unable and error.errno in _UNABLE
    return True


def _same(path: Path, descriptor: int) -> bool:
    ours = os.fstat(descriptor)
    with contextlib.suppress(OSError):
        there = path.stat(follow_symlinks=False)
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)
    return False
