"""Whether what is mounted is what was looked at: a path may lead elsewhere by the time Docker mounts it."""

from __future__ import annotations

import json
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

VARIABLE = "CORRAL_MOUNTS"


def parse(text: str) -> list[tuple[str, int, int]]:
    """Return (path, device, inode) of every mount of the policy, from JSON.

    Raises:
        Exception: it says nothing, or anything that is not exactly understood.
    """
    rows = json.loads(text)
    if not isinstance(rows, list):
        raise ValueError("not a list")
    found = []
    for path, device, inode in rows:
        if not isinstance(path, str) or type(device) is not int or type(inode) is not int:
            raise ValueError(f"not a path with its device and inode: {path!r}")
        found.append((path, device, inode))
    return found


def changed(
    expected: list[tuple[str, int, int]], stat: Callable[[str], os.stat_result] = os.lstat
) -> list[str]:
    """Return the paths at which something else is mounted than what was looked at on the host."""
    found = []
    for path, device, inode in expected:
        try:
            seen = stat(path)
        except OSError:
            found.append(path)
            continue
        if (seen.st_dev, seen.st_ino) != (device, inode):
            found.append(path)
    return found
