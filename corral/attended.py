"""Whether somebody looks after a session: a lock beside its files, which ends with who has it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from corral import oserrors
from policy import holding
from policy.errors import CorralError

FILE = holding.ATTENDED
_NEW = "attended.new"
# Who only looks holds the lock for an instant; who wants it tries again.
TRIES, PAUSE = 20, 0.01


class Attendance:
    """A lock that this process has, or has not."""

    def __init__(self) -> None:
        self._descriptor = -1

    @property
    def held(self) -> bool:
        """Whether we are the one who looks after it."""
        return self._descriptor >= 0

    def begin(self, directory: Path) -> None:
        """Look after a session that is being made; nobody sees its file before it is locked.

        Raises:
            CorralError: the disk refuses.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._descriptor = os.open(directory / _NEW, flags, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (directory / _NEW).rename(directory / FILE)
        except OSError as error:
            self.close()
            raise CorralError(
                f"cannot lock {directory / FILE}: {error.strerror}", oserrors.hint(error)
            ) from error

    def take(self, directory: Path) -> bool:
        """Look after a session that nobody looks after; say whether we do."""
        for attempt in range(TRIES):
            descriptor = _open(directory)
            if descriptor is None:
                return False
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                if attempt + 1 < TRIES:
                    time.sleep(PAUSE)
                continue
            self._descriptor = descriptor
            return True
        return False

    def close(self) -> None:
        """Leave it to itself."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


@contextlib.contextmanager
def attendance() -> Iterator[Attendance]:
    """Let go in the end, however the block ends."""
    made = Attendance()
    try:
        yield made
    finally:
        made.close()


def attended(directory: Path) -> bool | None:
    """Say whether somebody looks after a session; None when that is not known: an older corral made it.

    Args:
        directory: of the session (``StatePaths.session``).
    """
    descriptor = _open(directory)
    if descriptor is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return True if error.errno == errno.EWOULDBLOCK else None
    finally:
        os.close(descriptor)
    return False


def _open(directory: Path) -> int | None:
    try:
        return os.open(directory / FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
