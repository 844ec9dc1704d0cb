"""Whether there is room for a build, asked before it begins: a full disk in its middle fails in odd words."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from corral.engine import errors
from corral.existing import look
from policy.errors import CorralError

if TYPE_CHECKING:
    from docker.api.client import APIClient

# What an image takes that was never built: Debian, the packages of a profile, its harness, and a build's
# leftovers; the files it is made from are small.
FIRST_IMAGE, CONTEXT = 1_000_000_000, 64_000_000
INODES = 20_000
# Below it nothing of use can be written.
LEAST = 1 << 16


def room_for(
    engine_root: Path | None,
    data: Path,
    present: int | None,
    statvfs: Callable[[Path], os.statvfs_result] = os.statvfs,
) -> tuple[str, str] | None:
    """Return why a build would not find room, and the fix; None when it would, or nobody can tell.

    Args:
        engine_root: where the engine keeps its layers; None: not on this machine's file systems.
        data: where sandboxes have their files.
        present: size of the image that is there already; None: none is.
        statvfs: asks for a file system.
    """
    from corral.usage import human

    need = FIRST_IMAGE if present is None else max(present, FIRST_IMAGE // 3)
    for path, wanted in ((engine_root, need), (data, CONTEXT)):
        place = (
            next((one for one in (path, *path.parents) if one.exists()), None) if path is not None else None
        )
        if place is None:
            continue
        try:
            found = statvfs(place)
        except OSError:
            continue
        free = found.f_bavail * found.f_frsize
        if free < wanted:
            what = f"{human(free)} are free at {path}, and the build needs about {human(wanted)}"
        elif found.f_files and found.f_favail < INODES:
            what = f"{found.f_favail} files can still be made at {path}, and the build makes about {INODES}"
        else:
            continue
        return what, "make room: corral df, corral prune --images, docker builder prune, docker image prune"
    return None


def full(
    places: Iterable[Path], statvfs: Callable[[Path], os.statvfs_result] = os.statvfs
) -> tuple[str, str] | None:
    """Return that a session can write no more, and the fix; None when there is room, or nobody can tell.

    Harnesses have odd words for it, or none.

    Args:
        places: directories that the session writes to.
        statvfs: asks for a file system.
    """
    for place in places:
        try:
            found = statvfs(place)
        except OSError:
            continue
        if found.f_bavail * found.f_frsize < LEAST:
            what = "is full"
        elif found.f_files and not found.f_favail:
            what = "can hold no more files"
        else:
            continue
        return (
            f"the disk of {place} {what}: what the session did last may be lost, or the reason of its end",
            "make room: corral df, corral prune",
        )
    return None


def insist(api: APIClient, tag: str, data: Path) -> None:
    """Refuse a build for which there is no room.

    Args:
        api: the engine, of this machine.
        tag: the image that would be replaced.
        data: where sandboxes have their files.

    Raises:
        CorralError: there is none.
        EngineError: Docker does not answer.
    """
    with errors("asking Docker where its files are"):
        root = str(api.info().get("DockerRootDir") or "")
    image = look(api, tag)
    present = int(image.get("Size") or 0) if image else None
    problem = room_for(Path(root) if root.startswith("/") else None, data, present)
    if problem is not None:
        raise CorralError(f"there is no room to build {tag}: {problem[0]}", problem[1])
