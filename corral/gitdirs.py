"""Git directories that a sandbox does not see: of a linked worktree or a submodule, Git is dead inside."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path


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
        if entry.is_file():
            text = entry.read_text(encoding="utf-8", errors="surrogateescape")
            kind, _, path = text.partition(":")
            if kind != "gitdir" or not path.strip():
                return None
            return _common(_real(tree / path.strip()))
        return _real(entry) if entry.is_symlink() else None
    except (OSError, ValueError):
        return None


def _common(directory: Path) -> Path:
    """Return the repository's own directory; that of a linked worktree is a part of it."""
    try:
        text = (directory / "commondir").read_text(encoding="utf-8", errors="surrogateescape").strip()
    except OSError:
        return directory
    return _real(directory / text)


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))
