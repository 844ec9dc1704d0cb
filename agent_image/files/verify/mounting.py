"""Mounting over a path, tried in a process of its own: a user namespace is for a single thread to make."""

from __future__ import annotations

import ctypes
import json
import os
import sys

# Nothing else of the checker is loaded: it is done once for each file.
CODE = "import sys; sys.path.insert(0, {!r}); from verify import mounting; mounting.main()"
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_BIND = 0x1000
MNT_DETACH = 2
PR_SET_DUMPABLE = 4


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _called(result: int) -> bool:
    """Say whether a call into the C library succeeded."""
    return result == 0


def mounted(libc: ctypes.CDLL, path: str) -> bool:
    """Say whether the path could be mounted over itself; it is taken away again."""
    name = os.fsencode(path)
    if not _called(libc.mount(name, name, None, ctypes.c_ulong(MS_BIND), None)):
        return False
    libc.umount2(name, MNT_DETACH)
    return True


def isolated(libc: ctypes.CDLL) -> bool:
    """Say whether this process got user and mount namespaces of its own."""
    return _called(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS))


def attempt(path: str) -> dict[str, bool]:
    """Return what succeeded: ``here``, mounting; ``namespaces``, getting some; ``there``, mounting in them.

    An empty path only asks for the namespaces.
    """
    libc = _libc()
    here = bool(path) and mounted(libc, path)
    namespaces = isolated(libc)
    return {
        "here": here,
        "namespaces": namespaces,
        "there": bool(path) and namespaces and mounted(libc, path),
    }


def undumpable() -> None:
    """Keep other processes of the same user from reading and writing this one's memory and output."""
    _libc().prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def main() -> None:
    """Print what ``attempt`` returns for the argument."""
    sys.stdout.write(json.dumps(attempt(sys.argv[1])) + "\n")
