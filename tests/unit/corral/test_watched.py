"""What an agent does so that a session's changes are not seen, and what is looked at besides the obvious."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from corral import gitdirs, gitplaces, looking, protect, trees, watched
from corral.watched import Finding
from policy import profiles
from tests.unit.corral.test_protect import CONFIG, SESSION, Session, repository, session

__all__ = ["session"]
Changed = Callable[..., list[Finding]]
NOWHERE: Mapping[str, str] = {"GIT_CONFIG_SYSTEM": "/dev/null"}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    made = tmp_path / "tree"
    repository(made)
    return made


@pytest.fixture
def git(project: Path) -> Path:
    return repository(project)


def changes(
    tree: Path, act: Callable[[], object], environ: Mapping[str, str] = NOWHERE, search: tuple[str, ...] = ()
) -> dict[str, str]:
    """Return what is told about each path, relative to the tree."""
    before = watched.snapshot([str(tree)], search, environ)
    act()
    after = watched.snapshot([str(tree)], search, environ)
    return {
        os.path.relpath(finding.path, tree): finding.what
        for finding in watched.compare(before, after, search)
    }


def closable(tree: Path, environ: Mapping[str, str] = NOWHERE) -> list[str]:
    return [os.path.relpath(path, tree) for path in watched.closable([str(tree)], environ)]


def deep(top: Path, levels: int) -> None:
    current = os.open(top, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=current)
        below = os.open("d", os.O_RDONLY, dir_fd=current)
        os.close(current)
        current = below
    os.close(current)


def test_heaps_of_directories_hide_nothing_and_are_told(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "MAX_LISTING", 20)
    monkeypatch.setattr(looking, "MAX_MOUNT", 60)
    modules = [repository(tree / ".git" / "modules", name) for name in ("a", "x")]

    def heap() -> None:
        for number in range(100):
            (modules[0] / "hooks" / f"{number}").mkdir()
        (modules[1] / "hooks" / "pre-commit").write_text("evil\n")
        (tree / ".envrc").write_text("evil\n")
        (tree / ".husky").mkdir()
        (tree / ".husky" / "pre-push").write_text("evil\n")

    found = changes(tree, heap)
    assert found[".envrc"] == "new"
    assert found[".git/modules/x/hooks/pre-commit"] == "new"
    assert found[".husky/pre-push"] == "new"
    assert "more than 20 entries" in found[".git/modules/a/hooks"]


def test_what_was_cut_is_not_compared_as_if_it_were_whole(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        (tree / ".git" / "hooks" / f"h{number}").touch()
    monkeypatch.setattr(looking, "MAX_LISTING", 10)

    def more() -> None:
        for number in range(30):
            (tree / ".git" / "hooks" / f"n{number}").touch()

    found = changes(tree, more)
    assert list(found) == [".git/hooks"]
    assert "could be looked at" in found[".git/hooks"]


def test_what_is_spent_on_one_mount_is_not_missing_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "MAX_MOUNT", 10)
    both = [tmp_path / "a", tmp_path / "b"]
    for part in both:
        repository(part)
    before = watched.snapshot(list(map(str, both)), (), NOWHERE)
    for number in range(50):
        (both[0] / ".git" / "hooks" / f"{number}").touch()
    (both[1] / ".git" / "hooks" / "pre-commit").touch()
    found = watched.compare(before, watched.snapshot(list(map(str, both)), (), NOWHERE), ())
    assert [finding.what for finding in found if finding.path.startswith(str(both[1]))] == ["new"]
    assert any(finding.told_only for finding in found)


def test_more_places_than_can_be_named_are_told_as_one(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "MAX_CUT", 3)
    monkeypatch.setattr(looking, "MAX_LISTING", 2)

    def heap() -> None:
        for name in map(str, range(2)):
            for inner in map(str, range(2)):
                for file in map(str, range(5)):
                    (tree / ".idea" / name / inner).mkdir(parents=True, exist_ok=True)
                    (tree / ".idea" / name / inner / file).touch()

    found = changes(tree, heap)
    assert found["."] == "there is more that could not be looked at"


def test_too_many_submodules_are_told(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gitplaces, "MAX_MODULES", 3)
    found = changes(tree, lambda: [repository(tree / ".git" / "modules", f"m{n}") for n in range(5)])
    assert "more than 3 Git directories" in found[".git/modules"]


@pytest.mark.parametrize("where", [".git/modules", ".opencode", ".husky"])
def test_depth_is_told_and_breaks_nothing(tree: Path, where: str) -> None:
    (tree / where).mkdir()

    def bury() -> None:
        deep(tree / where, 1200)
        (tree / ".envrc").touch()

    try:
        found = changes(tree, bury)
    finally:
        trees.remove(tree)  # what removes the test's directory would not come to its end
    assert found.pop(".envrc") == "new"
    assert [what for path, what in found.items() if path.startswith(f"{where}/d/d/")] == [
        "more than 16 levels deep; not looked at"
    ]


def test_a_chain_of_links_breaks_nothing(tree: Path) -> None:
    def chain() -> None:
        for number in range(2000):
            (tree / f"l{number}").symlink_to(f"l{number + 1}")
        (tree / ".git" / "config").write_text(CONFIG + "hooksPath = l0\n[include]\npath = ../l0\n")
        (tree / ".gitfile").touch()

    assert ".git/config" in changes(tree, chain)
    (tree / "odd").mkdir()
    (tree / "odd" / ".git").symlink_to(tree / "l0")
    assert gitdirs.missing([tree / "odd"], [tree / "odd"]) is not None


def test_large_files_are_not_read_but_seen(tree: Path) -> None:
    (tree / ".envrc").write_text("x")
    with (tree / ".npmrc").open("wb") as file:
        file.truncate(1 << 40)
    os.utime(tree / ".npmrc", ns=(0, 1))

    def write() -> None:
        with (tree / ".envrc").open("wb") as file:
            file.truncate(8 << 40)
        with (tree / ".npmrc").open("r+b") as file:
            file.write(b"x")
        os.utime(tree / ".npmrc", ns=(0, 1))  # the time of change stays what it is

    assert changes(tree, lambda: None) == {}
    assert changes(tree, write) == {
        ".envrc": "changed, and too large to be compared",
        ".npmrc": "changed, and too large to be compared",
    }


@pytest.mark.parametrize("name", ["commondir", "HEAD"])
def test_a_git_directory_full_of_pipes_holds_nobody_up(tmp_path: Path, name: str) -> None:
    (tmp_path / "x").mkdir()
    os.mkfifo(tmp_path / "x" / name)
    (tmp_path / ".git").write_text("gitdir: x\n")
    assert gitdirs.missing([tmp_path], [tmp_path]) == []
    (tmp_path / ".git").unlink()
    os.mkfifo(tmp_path / ".git")
    assert gitdirs.missing([tmp_path], [tmp_path]) == []
    (tmp_path / ".git").unlink()
    with (tmp_path / ".git").open("wb") as file:
        file.write(b"gitdir: /")
        file.truncate(8 << 40)
    assert gitdirs.missing([tmp_path], [tmp_path]) == []


def test_what_a_linked_worktree_says_is_watched(tree: Path) -> None:
    linked = tree / ".git" / "worktrees" / "w"
    linked.mkdir(parents=True)
    (linked / "commondir").write_text("../..\n")

    def write() -> None:
        (linked / "commondir").write_text("/evil\n")
        (linked / "gitdir").write_text("/evil/.git\n")
        (linked / "config.worktree").write_text("[core]\nfsmonitor = evil\n")

    assert changes(tree, write) == {
        ".git/worktrees/w/commondir": "changed",
        ".git/worktrees/w/gitdir": "new",
        ".git/worktrees/w/config.worktree": "keys that may make Git run something",
    }


def test_included_files_are_watched_and_what_they_include(tree: Path) -> None:
    (tree / ".git" / "config").write_text(CONFIG + '[includeIf "gitdir:x"]\npath = ../tools/one\n')
    (tree / "tools").mkdir()
    (tree / "tools" / "one").write_text(f"[include]\npath = two\npath = {tree}/tools/one\npath = ~/three\n")
    (tree / "tools" / "two").write_text("[user]\nname = a\n")
    environ = {**NOWHERE, "HOME": str(tree)}
    assert changes(tree, lambda: (tree / "tools" / "two").write_text("[user]\nname = b\n"), environ) == {}

    def write() -> None:
        (tree / "tools" / "two").write_text("[core]\npager = evil\n")
        (tree / "three").write_text("[core]\neditor = evil\n")

    what = "keys that may make Git run something"
    assert changes(tree, write, environ) == {"tools/two": what, "three": what}


def test_many_included_files_are_told(tree: Path) -> None:
    lines = "".join(f"path = x{number}\n" for number in range(100))
    (tree / ".git" / "config").write_text(CONFIG + "[include]\n" + lines)
    assert ".git/config/include" in changes(tree, lambda: None)


def test_hooks_of_a_submodule_are_relative_to_its_working_tree(tree: Path) -> None:
    module = repository(tree / ".git" / "modules", "x")
    (module / "config").write_text("[core]\nworktree = ../../../lib/x\nhooksPath = ci\n")
    (tree / "lib" / "x" / "ci").mkdir(parents=True)
    (tree / "ci").mkdir()
    assert closable(tree) == [".git/hooks", ".git/modules/x/hooks", "lib/x/ci"]


def test_hooks_where_the_users_own_configuration_says_are_closed(tree: Path, tmp_path: Path) -> None:
    for name in ("own", "home"):
        (tree / name).mkdir()
    (tmp_path / ".gitconfig").write_text("[include]\npath = more\n")
    (tmp_path / "more").write_text("[core]\nhooksPath = own\n")
    assert closable(tree, {**NOWHERE, "HOME": str(tmp_path)}) == [".git/hooks", "own"]
    (tree / ".git" / "config").write_text("[core]\nhooksPath = ~/tree/home\n")
    assert closable(tree, {**NOWHERE, "HOME": str(tmp_path)}) == [".git/hooks", "home", "own"]


def test_all_of_husky_is_closed(tree: Path) -> None:
    (tree / ".husky" / "_").mkdir(parents=True)
    (tree / ".git" / "config").write_text("[core]\nhooksPath = .husky/_\n")
    assert closable(tree) == [".git/hooks", ".husky"]


def test_hooks_behind_a_link_are_told_and_stop_nothing(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "outside" / "hooks").mkdir(parents=True)
    (tree / "link").symlink_to(tmp_path / "outside")
    (tree / ".git" / "config").write_text("[core]\nhooksPath = link/hooks\n")
    assert closable(tree) == [".git/hooks"]
    assert changes(tree, lambda: None) == {
        "link/hooks": "core.hooksPath leads through a link; it is not read-only inside"
    }


def test_passwords_in_settings_of_package_managers_are_not_shown(session: Session, project: Path) -> None:
    (project / ".npmrc").write_text("//npm.example.com/:_authToken=s3cr3t\n")
    told = session(lambda: (project / ".npmrc").write_text("registry=https://evil.example.com\n"))
    assert "s3cr3t" not in told
    assert "+registry=https://evil.example.com" in told


def test_when_it_cannot_be_found_out_what_changed_what_there_was_is_kept(
    session: Session, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / ".envrc").write_text("mine\n")

    def fail() -> None:
        (project / ".envrc").write_text("evil\n")
        monkeypatch.setattr(watched, "compare", lambda *_: (_ for _ in ()).throw(RecursionError("deep")))

    told = session(fail)
    assert "could not be found out (RecursionError: deep)" in told
    assert f"corral revert {SESSION}" in told
    session.revert()
    assert (project / ".envrc").read_text() == "mine\n"


def test_what_could_only_be_told_is_not_offered_to_be_put_back(
    session: Session, git: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gitplaces, "MAX_MODULES", 1)
    told = session(lambda: [repository(git / "modules", f"m{n}") for n in range(3)])
    assert "more than 1 Git directories" in told
    assert "revert" not in told


@pytest.mark.parametrize("name", profiles.names())
def test_each_profile_names_what_its_harness_executes_below_a_project(name: str) -> None:
    own = profiles.get(name).project_files
    # Nobody but its user knows what a generic one is.
    assert own or profiles.get(name).install is None
    assert all(not part.startswith("/") and ".." not in part for part in own)
    assert set(own) <= set(watched.project_files())


def test_nothing_that_is_piled_up_pushes_what_is_known_by_name_out_of_a_report(
    session: Session, project: Path
) -> None:
    def pile() -> None:
        for number in range(300):
            place = project / ".devcontainer" / f"d{number:03}"
            place.mkdir(parents=True)
            (place / ".envrc").write_text("x\n")
        (project / ".vscode").mkdir()
        (project / ".vscode" / "tasks.json").write_text("a program\n")
        (project / ".git" / "config").write_text("[core]\n\tfsmonitor = a program\n")

    told = session(pile).splitlines()
    assert "lines" not in told[0] and any("more" in line for line in told)
    assert f"  {project}/.vscode/tasks.json: new" in told[:10]
    assert any("core.fsmonitor" in line for line in told[:10])


# What would take hours is told in a moment; nothing here is that slow.
@pytest.fixture
def at_once() -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError("it takes too long")

    former = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 20)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, former)


@pytest.mark.usefixtures("at_once")
def test_a_line_made_to_take_long_holds_nobody_up(session: Session, project: Path) -> None:
    told = session(lambda: (project / ".npmrc").write_text("key" * (looking.MAX_CONTENT // 3)))
    assert f"  {project}/.npmrc: new" in told.splitlines()
    assert max(map(len, told.splitlines())) < 500


@pytest.mark.usefixtures("at_once")
def test_texts_made_to_take_long_to_compare_hold_nobody_up(session: Session, project: Path) -> None:
    letters = [chr(0x21 + number // 90) + chr(0x21 + number % 90) for number in range(110)]

    def text(mark: str) -> str:
        lines, seed = [], 1
        for size in range(390, 0, -1):
            for _ in range(size):
                seed = seed * 1103515245 + 12345 & 0x7FFFFFFF
                lines.append(letters[seed % len(letters)])
            lines.append(f"{mark}{size}")
        return "\n".join(lines)

    (project / ".envrc").write_text(text("-"))
    assert len(text("+")) < looking.MAX_CONTENT
    told = session(lambda: (project / ".envrc").write_text(text("+"))).splitlines()
    assert f"  {project}/.envrc: changed" in told
    assert "    --390" in told and any("lines more" in line for line in told)


def test_what_is_only_counted_is_told_all_the_same(
    session: Session, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "COMPARED", 0)
    (project / ".envrc").write_text("a\nb\nb\n")
    told = session(lambda: (project / ".envrc").write_text("b\nc\na\n")).splitlines()
    assert [line for line in told if line.startswith("    ")] == ["    -b", "    +c"]
    told = session(lambda: (project / ".envrc").write_text("a\nc\nb\n")).splitlines()
    assert "    the same lines in another order" in told


def test_what_follows_the_first_word_for_a_password_is_not_shown(session: Session, project: Path) -> None:
    (project / ".npmrc").write_text("//npm.example.com/:_authToken=s3cr3t:key=v\nregistry=x\n")
    told = session((project / ".npmrc").unlink)
    assert "s3cr3t" not in told and "key=v" not in told and "-registry=x" in told


def modules(tree: Path, number: int) -> None:
    for name in range(number):
        repository(tree / ".git" / "modules", f"m{name}")
        config = "[a]\n" + "b=c\n" * (looking.MAX_CONTENT // 4 - 1)
        (tree / ".git" / "modules" / f"m{name}" / "config").write_text(config)


@pytest.mark.usefixtures("at_once")
def test_heaps_of_configuration_hold_nobody_up_and_are_told(tree: Path) -> None:
    before = watched.snapshot([str(tree)], (), NOWHERE)
    modules(tree, 12)
    found = watched.compare(before, watched.snapshot([str(tree)], (), NOWHERE), ())
    told = {(os.path.relpath(one.path, tree), one.what) for one in found}
    cut = "more configuration of Git's than is read; not all could be looked at"
    # Understood, or told as any other file is.
    assert (".git/modules/m0/config", "keys that may make Git run something") in told
    assert {(".git/modules/m9/config", cut), (".git/modules/m9/config", "new")} <= told


def test_what_is_not_understood_any_more_of_a_configuration_is_told_as_a_file(
    session: Session, git: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "MAX_CONFIGS", 10)
    told = session(lambda: (git / "config").write_text(CONFIG + "\tfsmonitor = a program\n"))
    assert f"  {git}/config: changed" in told.splitlines() and "fsmonitor = a program" in told


@pytest.mark.parametrize("directory", [".git", ".git/worktrees/w"])
def test_programs_that_a_rebase_would_run_are_told(tree: Path, directory: str) -> None:
    (tree / directory).mkdir(parents=True, exist_ok=True)

    def act() -> None:
        (tree / directory / "rebase-merge").mkdir()
        (tree / directory / "rebase-merge" / "git-rebase-todo").write_text("exec a program\n")

    assert changes(tree, act) == {f"{directory}/rebase-merge/git-rebase-todo": "new"}


def test_a_report_is_not_longer_than_somebody_reads(session: Session, git: Path) -> None:
    def act() -> None:
        for number in range(60):
            module = repository(git / "modules", f"m{number}")
            (module / "config").write_text("[a]\n" + "".join(f"\tb{key} = c\n" for key in range(40)))

    told = session(act).splitlines()
    assert len(told) < 500
    assert sum(line.startswith("    ") for line in told) == protect.DETAILS
    assert sum("/config: keys that may" in line for line in told) == 60
    assert "  what is different in the others is not shown here" in told
