"""Where a session's program starts: ``corral run --workdir``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from policy.container import WORKSPACE
from policy.errors import ArgumentError
from policy.loader import LoadedPolicy

HINT = "name a directory of the project or of a mount"


def chosen(loaded: LoadedPolicy, cwd: Path, home: Path, text: str) -> Path:
    """Return the directory that is meant, without links.

    Args:
        loaded: says what is mounted.
        cwd: what a relative path begins at.
        home: what ``~/`` is.
        text: as the user gave it.

    Raises:
        ArgumentError: it is no directory, or nothing that the session sees.
    """
    if loaded.workspace and text.rstrip("/") == WORKSPACE:
        return Path(WORKSPACE)
    if not text or not text.isprintable():
        raise ArgumentError(f"--workdir {text[:80]!r} is no path", HINT)
    given = home / text[2:] if text.startswith("~/") else cwd / text
    found = Path(os.path.realpath(given))
    if not found.is_dir():
        raise ArgumentError(f"--workdir {text[:80]!r}: there is no such directory", HINT)
    if not any(found.is_relative_to(place) for place in reachable(loaded)):
        raise ArgumentError(f"--workdir {text[:80]}: {found} is not in the sandbox", HINT)
    return found


def reachable(loaded: LoadedPolicy) -> Sequence[Path]:
    """Return the directories of this host that a session sees under their own paths."""
    return [Path(mount.target) for mount in loaded.mounts if mount.source == mount.target]
