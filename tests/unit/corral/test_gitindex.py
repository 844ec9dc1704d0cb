"""Repositories inside of a repository: found in the index that Git itself writes, in each of its shapes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from corral import gitplaces, looking, watched
from corral.gitindex import gitlinks
from tests.unit.corral.test_watched import NOWHERE, changes

COMMAND = "core.fsmonitor"


def git(directory: Path, *words: str) -> str:
    own = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", f"{COMMAND}=false"]
    environ = {**os.environ, "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(
        ["git", *own, *words], cwd=directory, env=environ, check=True, capture_output=True, timeout=30
    )
    return done.stdout.decode().strip()


def made(directory: Path, *options: str) -> Path:
    directory.mkdir(exist_ok=True)
    git(directory, "init", "-q", *options)
    git(directory, "commit", "-q", "--allow-empty", "-m", "first")
    return directory


@pytest.fixture
def outer(tmp_path: Path) -> Path:
    return made(tmp_path / "outer")


def inner(outer: Path, name: str = "lib") -> None:
    """What an agent does: a repository in the tree, which the outer one's index names."""
    made(outer / name)
    git(outer / name, "config", COMMAND, "a program")
    git(
        outer,
        "update-index",
        "--add",
        "--cacheinfo",
        f"160000,{git(outer / name, 'rev-parse', 'HEAD')},{name}",
    )


@pytest.mark.parametrize("shape", ["2", "3", "4", "split", "long"])
def test_paths_are_read_from_each_shape_of_an_index(outer: Path, shape: str) -> None:
    name = "lib" if shape != "long" else "/".join(["d" * 200] * 22)
    for number in range(20):
        (outer / f"l{number}").write_text(str(number))
    git(outer, "add", ".")
    head = git(outer, "rev-parse", "HEAD")
    git(outer, "update-index", "--add", "--cacheinfo", f"160000,{head},{name}")
    if shape == "3":
        git(outer, "update-index", "--skip-worktree", "l3")
    elif shape == "split":
        git(outer, "update-index", "--split-index")
    elif shape != "long":
        git(outer, "update-index", "--index-version", shape)
    files = [outer / ".git" / "index", *(outer / ".git").glob("sharedindex.*")]
    found = [path for file in files for path in gitlinks(file.read_bytes())]
    assert found == [name.encode()]


def test_an_index_of_long_hashes_is_read(tmp_path: Path) -> None:
    outer = made(tmp_path / "outer", "--object-format=sha256")
    head = git(outer, "rev-parse", "HEAD")
    git(outer, "update-index", "--add", "--cacheinfo", f"160000,{head},lib")
    assert gitlinks((outer / ".git" / "index").read_bytes(), 32) == [b"lib"]
    (outer / "lib").mkdir()
    assert "lib/.git/config" in changes(
        outer, lambda: made(outer / "lib") and git(outer / "lib", "config", COMMAND, "x")
    )


@pytest.mark.parametrize(
    "data",
    [b"", b"DIRC", b"x" * 200, b"DIRC\0\0\0\x09\0\0\0\0", b"DIRC\0\0\0\x02\xff\xff\xff\xff" + b"\0" * 300,
     b"DIRC\0\0\0\x04\0\0\0\x01" + b"\0" * 62 + b"\xff" * 90],
)  # fmt: skip
def test_what_is_no_index_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"index|end"):
        gitlinks(data)


def test_a_repository_that_git_status_would_go_into_is_told(outer: Path) -> None:
    assert changes(outer, lambda: inner(outer)) == {"lib/.git/config": "keys that may make Git run something"}


def test_one_inside_of_that_one_is_told_too(outer: Path) -> None:
    def act() -> None:
        inner(outer)
        inner(outer / "lib", "deeper")

    assert "lib/deeper/.git/config" in changes(outer, act)


def test_one_that_its_file_leads_to_elsewhere_in_the_tree_is_told(outer: Path) -> None:
    def act() -> None:
        inner(outer)
        (outer / "lib" / ".git").rename(outer / "away")
        (outer / "lib" / ".git").write_text("gitdir: ../away\n")

    assert "away/config" in changes(outer, act)


def test_one_of_a_linked_worktree_is_told(outer: Path) -> None:
    git(outer, "worktree", "add", "-q", "linked")

    def act() -> None:
        made(outer / "linked" / "lib")
        git(outer / "linked" / "lib", "config", COMMAND, "x")
        head = git(outer, "rev-parse", "HEAD")
        git(outer / "linked", "update-index", "--add", "--cacheinfo", f"160000,{head},lib")

    assert "linked/lib/.git/config" in changes(outer, act)


def test_hooks_of_one_that_is_there_are_closed(outer: Path) -> None:
    inner(outer)
    assert str(outer / "lib" / ".git" / "hooks") in watched.closable([str(outer)], NOWHERE)


def test_the_rest_of_a_git_directory_is_looked_at_where_it_was_moved(outer: Path) -> None:
    def act() -> None:
        git_ = outer / ".git"
        (git_ / "c").mkdir()
        for part in ("objects", "refs", "config"):
            (git_ / part).rename(git_ / "c" / part)
        (git_ / "commondir").write_text("c\n")
        git(outer, "config", "-f", ".git/c/config", COMMAND, "a program")

    assert changes(outer, act)[".git/c/config"] == "keys that may make Git run something"


@pytest.mark.parametrize("kind", ["link", "pipe", "garbage", "large"])
def test_an_index_that_cannot_be_read_is_told(
    outer: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = outer / ".git" / "index"

    def act() -> None:
        inner(outer)
        if kind == "link":
            index.rename(outer / "elsewhere")
            index.symlink_to(outer / "elsewhere")
        elif kind == "pipe":
            index.unlink()
            os.mkfifo(index)
        elif kind == "garbage":
            index.write_bytes(b"no index")
        else:
            monkeypatch.setattr(looking, "MAX_INDEXES", 64)

    told = changes(outer, act)[".git/index"]
    assert "nobody knows which submodules" in told


def test_more_of_them_than_are_looked_at_are_told(outer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gitplaces, "MAX_MODULES", 2)

    def act() -> None:
        for name in ("one", "two", "three"):
            inner(outer, name)

    assert any("not all could be looked at" in what for what in changes(outer, act).values())


def test_all_indexes_of_a_mount_have_one_limit(outer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner(outer)
    inner(outer, "other")
    size = max((outer / part / ".git" / "index").stat().st_size for part in ("", "lib", "other"))
    monkeypatch.setattr(looking, "MAX_INDEXES", size + 16)
    cut = watched.snapshot([str(outer)], (), NOWHERE).cut
    assert [Path(place).name for place in cut] == ["index", "index"]


def test_a_linked_worktree_gets_no_directory_of_hooks_that_git_does_not_know(
    outer: Path, tmp_path: Path
) -> None:
    git(outer, "worktree", "add", "-q", str(tmp_path / "linked"))
    trees = [str(outer), str(tmp_path / "linked")]
    assert watched.hook_directories(trees, NOWHERE) == [f"{outer}/.git/hooks"]
