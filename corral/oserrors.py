"""What the operating system refuses, in words: which file, why, and what to do about it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from policy.errors import CorralError

# Errors of writing that Python reports without the name of the file.
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO}


def hint(error: OSError) -> str | None:
    """Return the fix for an error whose cause is outside of corral, None for others."""
    where = shown(error.filename)
    place = where or "the directory"
    return {
        errno.ENOSPC: "make room on that file system: df -h, df -i, docker system df",
        errno.EDQUOT: "your disk quota is used up: quota -s shows it; remove what you do not need",
        errno.EROFS: "that file system is mounted read-only; mount it read-write, or set XDG_DATA_HOME",
        errno.EACCES: f"look who may use it: namei -l {place}",
        errno.EPERM: f"look who may use it: namei -l {place}",
    }.get(error.errno or 0)


def shown(filename: object) -> str:
    """Return a file's name as text, empty when there is none (descriptors tell nothing)."""
    return os.fsdecode(filename) if isinstance(filename, str | bytes | os.PathLike) else ""


def translate(error: OSError) -> CorralError:
    """Return an error that names the file, where one is known."""
    what = shown(error.filename)
    reason = error.strerror or str(error) or type(error).__name__
    return CorralError(f"{what}: {reason}" if what else reason, hint(error))


def unwritten(stream: str, error: OSError) -> CorralError:
    """Return an error that says which of stdout and stderr cannot be written."""
    return CorralError(f"cannot write to {stream}: {error.strerror}", hint(error))


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let errors of the disk that come without a file's name carry this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in DISK:
            error.filename = str(path)
        raise
