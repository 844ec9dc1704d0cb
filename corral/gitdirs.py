"""Git directories that a sandbox does not see: of a linked worktree or a submodule, Git is dead inside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from corral.looking import real, text_of

# Bytes: more is no path.
MAX_TEXT = 65536


def missing(directories: Iterable[Path], mounted: Sequence[Path]) -> list[tuple[Path, Path]]:
    """Return (working tree, the Git directory it needs) for each that lies outside of the mounts.

    Args:
        directories: mounted read-write; each may be a working tree.
        mounted: everything mounted; absolute, without symbolic links.
    """
    found = []
    for directory in directories:
        needed = _outside(directory)
        if needed is not None and not any(needed.is_relative_to(mount) for mount in mounted):
            found.append((directory, needed))
    return found


def warnings(found: Iterable[tuple[Path, Path]]) -> list[str]:
    """Return what the user is told."""
    return [
        f"git does not work in {tree}: its Git directory {needed} is not mounted; list it in mounts.rw "
        "(then the agent can change all of that repository, its hooks too)"
        for tree, needed in found
    ]


def _outside(tree: Path) -> Path | None:
    """Return the directory that a working tree's ``.git`` leads to, None when it is an ordinary one."""
    entry = tree / ".git"
    try:
        if not entry.is_symlink() and not entry.is_file():
            return None
        place = _real(entry)
        if place.is_dir():
            return place
        kind, _, path = (text_of(place, MAX_TEXT) or "").partition(":")
        if kind != "gitdir" or not path.strip():
            return None
        return _common(_real(tree / path.strip()))
    except (OSError, ValueError):
        return None


def _common(directory: Path) -> Path:
    """Return the repository's own directory; that of a linked worktree is a part of it."""
    text = text_of(directory / "commondir", MAX_TEXT)
    return directory if text is None else _real(directory / text.strip())


def _real(path: Path) -> Path:
    return Path(real(str(path)))
