from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from corral import state
from corral.context import Invocation
from policy import profiles
from policy.container import HOME, Mount
from policy.errors import CorralError, PolicyError
from policy.identity import StatePaths
from policy.profiles import ManagedDir, SeedFile

DIRS = (".local/share/agent", ".cache/agent")
PROFILE = replace(profiles.get("opencode"), state_dirs=DIRS, managed_dirs=())


@pytest.fixture
def paths(tmp_path: Path) -> StatePaths:
    return StatePaths(tmp_path / "data" / "demo-0123abcd")


def test_state_directories_are_made_for_the_user_alone(paths: StatePaths) -> None:
    state.prepare(paths, PROFILE)
    for directory in DIRS:
        found = (paths.home / directory).stat()
        assert stat.S_IMODE(found.st_mode) == 0o700
    state.prepare(paths, PROFILE)


def test_a_seed_is_written_once_and_never_again(paths: StatePaths) -> None:
    seed = SeedFile(".local/share/agent/auth.json", "{}")
    state.prepare(paths, replace(PROFILE, seeds=(seed,)))
    file = paths.home / seed.path
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_text("changed by the agent")
    state.prepare(paths, replace(PROFILE, seeds=(seed,)))
    assert file.read_text() == "changed by the agent"


def test_a_link_the_agent_left_is_not_followed(paths: StatePaths, tmp_path: Path) -> None:
    state.prepare(paths, PROFILE)
    target = tmp_path / "outside"
    target.mkdir()
    os.symlink(target, paths.home / DIRS[0] / "sub")
    with pytest.raises(CorralError, match="cannot use the state directory"):
        state.prepare(paths, replace(PROFILE, seeds=(SeedFile(DIRS[0] + "/sub/file", "x"),)))
    assert list(target.iterdir()) == []


def test_a_dangling_link_is_not_written_through(paths: StatePaths, tmp_path: Path) -> None:
    state.prepare(paths, PROFILE)
    os.symlink(tmp_path / "new", paths.home / DIRS[0] / "file")
    state.prepare(paths, replace(PROFILE, seeds=(SeedFile(DIRS[0] + "/file", "x"),)))
    assert not (tmp_path / "new").exists()


def test_a_session_directory_is_made_once(paths: StatePaths) -> None:
    made = state.create_session(paths, "0a1b2c3d", ())
    assert made == paths.session("0a1b2c3d")
    assert made.is_dir()
    with pytest.raises(CorralError, match="cannot make"):
        state.create_session(paths, "0a1b2c3d", ())
    state.remove_session(paths, "0a1b2c3d")
    assert not made.exists()
    state.remove_session(paths, "0a1b2c3d")


def test_down_removes_the_directories_of_ended_sessions_only(paths: StatePaths) -> None:
    for session in ("00000001", "00000002", "00000003"):
        state.create_session(paths, session, ())
    assert state.remove_sessions(paths, keep=["00000002"]) == 2
    assert [path.name for path in (paths.root / "sessions").iterdir()] == ["00000002"]
    assert state.remove_sessions(StatePaths(paths.root / "none")) == 0


def test_what_covers_shadowed_files_is_empty_and_read_only(paths: StatePaths) -> None:
    state.prepare(paths, PROFILE)
    empty = paths.root / state.EMPTY
    assert empty.read_bytes() == b""
    assert not stat.S_IMODE(empty.stat().st_mode) & 0o222


def test_a_seed_that_could_not_be_written_is_written_next_time(
    paths: StatePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = SeedFile(".local/share/agent/auth.json", "{}")

    def full(descriptor: int, *_: object, **__: object) -> None:
        os.close(descriptor)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(state.os, "fdopen", full)
        with pytest.raises(CorralError, match="No space left") as caught:
            state.prepare(paths, replace(PROFILE, seeds=(seed,)))
    assert "make room" in str(caught.value.hint)
    state.prepare(paths, replace(PROFILE, seeds=(seed,)))
    assert (paths.home / seed.path).read_text() == "{}"


def test_the_sandboxes_of_a_directory_are_found_by_what_they_remember(tmp_path: Path) -> None:
    data, project = tmp_path / "data", tmp_path / "pro\nject"
    assert state.sandboxes_of(data, project) == []
    for ident in ("demo-0123abcd", "other-01234567"):
        state.remember_project(StatePaths(data / ident), project)
    state.remember_project(StatePaths(data / "far-0123abce"), tmp_path / "far")
    state.remember_project(StatePaths(data / "no sandbox"), project)
    assert state.sandboxes_of(data, project) == ["demo-0123abcd", "other-01234567"]
    # An id is short: state that is another directory's is never taken over.
    with pytest.raises(CorralError, match="belongs to the sandbox of"):
        state.remember_project(StatePaths(data / "demo-0123abcd"), tmp_path / "far")
    assert state.sandboxes_of(data, project) == ["demo-0123abcd", "other-01234567"]


def test_mount_points_in_the_home_are_made_before_docker_makes_them_as_root(
    paths: StatePaths, tmp_path: Path
) -> None:
    profile = replace(PROFILE, shadow=(".local/share/agent/.env", ".netrc"))
    state.prepare(paths, profile)
    mounts = [
        Mount("/elsewhere", "/srv/elsewhere"),
        Mount(str(paths.session_home("0a1b2c3d")), HOME),
        Mount(str(paths.home / DIRS[0]), f"{HOME}/{DIRS[0]}"),
        Mount(str(paths.root / state.EMPTY), f"{HOME}/.netrc", read_only=True),
    ]
    home = state.create_session(paths, "0a1b2c3d", mounts) / "home"
    assert sorted(str(path.relative_to(home)) for path in home.rglob("*")) == [
        ".local",
        ".local/share",
        DIRS[0],
        ".netrc",
    ]
    assert (home / ".netrc").read_bytes() == b""
    assert (paths.home / DIRS[0] / ".env").read_bytes() == b""
    assert not (paths.home / ".netrc").exists()


def test_what_the_profile_manages_is_exactly_that(paths: StatePaths) -> None:
    profile = replace(PROFILE, managed_dirs=(ManagedDir(".config/agent", {".gitignore": "", "a": "new"}),))
    state.prepare(paths, profile)
    directory = paths.managed / ".config/agent"
    (directory / "a").write_text("old")
    (directory / "b").write_text("of an earlier version")
    state.prepare(paths, profile)
    assert {path.name: path.read_text() for path in directory.iterdir()} == {".gitignore": "", "a": "new"}


def test_what_comes_along_lies_beside_what_the_profile_manages_and_is_told_once(paths: StatePaths) -> None:
    part = ".config/agent"
    profile = replace(PROFILE, managed_dirs=(ManagedDir(part, {".gitignore": "", "a": "new"}),))
    directory = paths.managed / part

    def held() -> dict[str, str]:
        files = (path for path in directory.rglob("*") if path.is_file())
        return {str(path.relative_to(directory)): path.read_text() for path in files}

    more = {part: {"b/c/d": b"1", "a": b"the user's"}}
    assert state.prepare(paths, profile, carried=more) == [part]
    assert state.prepare(paths, profile, carried=more) == []
    assert held() == {".gitignore": "", "a": "the user's", "b/c/d": "1"}
    assert state.prepare(paths, profile, carried={part: {"b": b"2"}}) == [part]
    assert held() == {".gitignore": "", "a": "new", "b": "2"}
    assert state.prepare(paths, profile) == [part]
    assert held() == {".gitignore": "", "a": "new"}


def test_a_file_of_the_users_has_any_name(paths: StatePaths) -> None:
    part = ".config/agent"
    profile = replace(PROFILE, managed_dirs=(ManagedDir(part, {}),))
    mine = {"a.new": b"1", "a": b"2", "b": b"3"}
    state.prepare(paths, profile, carried={part: mine})
    assert {path.name: path.read_bytes() for path in (paths.managed / part).iterdir()} == mine


def test_a_home_that_the_agent_closed_is_removed(paths: StatePaths, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o755)
    home = state.create_session(paths, "0a1b2c3d", ()) / "home"
    (home / "a" / "b").mkdir(parents=True)
    (home / "a" / "b" / "file").touch()
    (home / "link").symlink_to(outside)
    (home / "a" / "b").chmod(0)
    (home / "a").chmod(0)
    state.remove_session(paths, "0a1b2c3d")
    assert not paths.session("0a1b2c3d").exists()
    assert stat.S_IMODE(outside.stat().st_mode) == 0o755


def test_a_home_of_any_depth_is_removed(paths: StatePaths, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    home = state.create_session(paths, "0a1b2c3d", ()) / "home"
    current = os.open(home, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("directory", dir_fd=current)
        os.symlink(outside, "link", dir_fd=current)
        below = os.open("directory", os.O_RDONLY, dir_fd=current)
        os.close(current)
        current = below
    os.close(current)
    state.remove_session(paths, "0a1b2c3d")
    assert not paths.session("0a1b2c3d").exists()
    assert (outside / "file").exists()


@pytest.mark.parametrize("slug", ["demo", "another"])
def test_a_name_that_was_sought_for_another_projects_numbers_is_refused(
    invocation: Invocation, tmp_path: Path, slug: str
) -> None:
    fresh = Invocation(invocation.user, invocation.cwd, invocation.console)
    sandbox = fresh.loaded.sandbox
    state.remember_project(StatePaths(invocation.data / sandbox.id), fresh.loaded.project)
    assert Invocation(invocation.user, invocation.cwd, invocation.console).loaded.sandbox == sandbox
    (invocation.data / sandbox.id / state.PROJECT).unlink()
    state.remember_project(StatePaths(invocation.data / f"{slug}-{sandbox.token}"), tmp_path / "victim")
    with pytest.raises(PolicyError, match="victim"):
        _ = Invocation(invocation.user, invocation.cwd, invocation.console).loaded
