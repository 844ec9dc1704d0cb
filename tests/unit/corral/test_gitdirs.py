from __future__ import annotations

import io
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from corral import run
from corral.context import Invocation
from corral.gitdirs import missing


def git(directory: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", *identity, *words], cwd=directory, check=True, capture_output=True, timeout=30)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    made = tmp_path / "main"
    made.mkdir()
    git(made, "init", "-q")
    git(made, "commit", "-q", "--allow-empty", "-m", "first")
    return made


def test_the_repository_of_a_worktree_is_named_unless_it_is_mounted(repository: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    git(repository, "worktree", "add", "-q", str(tree))
    assert missing([tree], [tree]) == [(tree, repository / ".git")]
    assert missing([tree], [tree, repository / ".git"]) == []
    assert missing([tree], [tree, repository]) == []


def test_ordinary_trees_and_strange_files_are_no_problem(repository: Path, tmp_path: Path) -> None:
    assert missing([repository, tmp_path], [repository, tmp_path]) == []
    odd = tmp_path / "odd"
    odd.mkdir()
    for text in (b"\xff\xfe", b"", b"gitdir:", b"something: else"):
        (odd / ".git").write_bytes(text)
        assert missing([odd], [odd]) == []


def test_a_link_and_a_relative_path_lead_outside_too(repository: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.mkdir()
    (link / ".git").symlink_to(repository / ".git")
    assert missing([link], [link]) == [(link, repository / ".git")]
    module = repository / "module"
    module.mkdir()
    (repository / ".git" / "modules" / "m").mkdir(parents=True)
    (module / ".git").write_text("gitdir: ../.git/modules/m\n")
    assert missing([module], [module]) == [(module, repository / ".git" / "modules" / "m")]
    assert missing([module], [repository]) == []


def test_run_warns_about_the_project_and_what_it_mounts(
    invocation: Invocation, repository: Path, tmp_path: Path, said: io.StringIO
) -> None:
    tree = tmp_path / "tree"
    git(repository, "worktree", "add", "-q", str(tree))
    run.warn_of_git(invocation)
    assert said.getvalue() == ""
    invocation.__dict__["loaded"] = invocation.__dict__["approved"] = replace(invocation.loaded, rw=(tree,))
    run.warn_of_git(invocation)
    assert f"git does not work in {tree}" in said.getvalue()
    assert f"{repository}/.git" in said.getvalue() and "mounts.rw" in said.getvalue()


def test_what_an_agent_wrote_into_the_file_is_told_without_commanding_the_terminal(
    invocation: Invocation, tmp_path: Path, said: io.StringIO
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / ".git").write_text("gitdir: /nowhere/\x1b]0;title\x07\x1b[2J\n")
    invocation.__dict__["loaded"] = invocation.__dict__["approved"] = replace(invocation.loaded, rw=(tree,))
    run.warn_of_git(invocation)
    assert f"git does not work in {tree}" in said.getvalue()
    assert "\x1b" not in said.getvalue() and "\x07" not in said.getvalue()
