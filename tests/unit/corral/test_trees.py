from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from corral import trees


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was read of which directories, in order."""
    found: list[object] = []
    scandir = os.scandir

    def counted(directory: Any) -> Any:
        found.append(directory)
        return scandir(directory)

    monkeypatch.setattr(os, "scandir", counted)
    return found


@pytest.mark.parametrize(("noted", "most"), [(1_000_000, 310), (0, 320)])
def test_a_directory_is_not_read_again_for_each_that_is_in_it(
    tmp_path: Path, reads: list[object], monkeypatch: pytest.MonkeyPatch, noted: int, most: int
) -> None:
    monkeypatch.setattr(trees, "NOTED", noted, raising=False)
    tree = tmp_path / "tree"
    for number in range(300):
        (tree / str(number)).mkdir(parents=True)
        (tree / f"file{number}").touch()
    trees.remove(tree)
    assert not tree.exists()
    assert len(reads) <= most


def test_what_cannot_be_removed_stays_and_the_rest_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "tree"
    for name in ("a/b/c", "a/d", "e"):
        (tree / name).mkdir(parents=True)
        (tree / name / "file").touch()
    unlink = os.unlink

    def refuse(path: Any, *, dir_fd: int | None = None) -> None:
        if path == "file" and os.readlink(f"/proc/self/fd/{dir_fd}").endswith("/a/b/c"):
            raise PermissionError(1, "not permitted", path)
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", refuse)
    trees.remove(tree)
    assert sorted(str(path.relative_to(tree)) for path in tree.rglob("*")) == [
        "a", "a/b", "a/b/c", "a/b/c/file",
    ]  # fmt: skip
