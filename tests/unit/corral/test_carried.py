from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from corral import carried
from corral.session import User
from policy.errors import PolicyError
from policy.identity import StatePaths
from policy.loader import LoadedPolicy

POLICY = "profile: opencode\nprofile_options: {opencode: {from_host: [login]}}\n"
PART = ".local/share/opencode/auth.json"
LOGIN = '{"openrouter": {"key": "sk-1"}}\n'


@pytest.fixture
def paths(tmp_path: Path) -> StatePaths:
    return StatePaths(tmp_path / "state")


def user(home: Path, **environ: str) -> User:
    return User(os.getuid(), os.getgid(), home, environ)


def put(file: Path, text: str = LOGIN) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_a_login_is_copied_once_and_said(
    loaded_of: Callable[[str], LoadedPolicy], home: Path, paths: StatePaths
) -> None:
    put(home / PART)
    told = carried.carry(paths, loaded_of(POLICY), user(home))
    copy = paths.home / PART
    assert copy.read_text() == LOGIN
    assert copy.stat().st_mode & 0o777 == 0o600
    assert len(told) == 1 and "the agent can read it" in told[0] and "sk-1" not in told[0]
    copy.write_text("a login of the sandbox's own")
    assert carried.carry(paths, loaded_of(POLICY), user(home)) == []
    assert copy.read_text() == "a login of the sandbox's own"


def test_nothing_is_copied_that_the_policy_does_not_name(
    loaded_of: Callable[[str], LoadedPolicy], home: Path, paths: StatePaths
) -> None:
    put(home / PART)
    assert carried.carry(paths, loaded_of("profile: opencode\n"), user(home)) == []
    assert not paths.home.exists()


def test_a_login_that_is_not_there_stops_nothing(
    loaded_of: Callable[[str], LoadedPolicy], home: Path, paths: StatePaths
) -> None:
    (told,) = carried.carry(paths, loaded_of(POLICY), user(home))
    assert "log in on this host first" in told


def test_the_users_data_directory_counts(
    loaded_of: Callable[[str], LoadedPolicy], home: Path, paths: StatePaths, tmp_path: Path
) -> None:
    put(tmp_path / "elsewhere" / "opencode" / "auth.json")
    carried.carry(paths, loaded_of(POLICY), user(home, XDG_DATA_HOME=str(tmp_path / "elsewhere")))
    assert (paths.home / PART).read_text() == LOGIN


def _planted(home: Path, project: Path) -> None:
    put(project / "key", "secret")
    put(home / PART).unlink()
    (home / PART).symlink_to(project / "key")


def _through_the_project(home: Path, project: Path) -> None:
    (home / ".local" / "share").mkdir(parents=True)
    put(project / "opencode" / "auth.json")
    (home / ".local" / "share" / "opencode").symlink_to(project / "opencode")


def _pipe(home: Path, project: Path) -> None:
    put(home / PART).unlink()
    os.mkfifo(home / PART)


def _large(home: Path, project: Path) -> None:
    put(home / PART, "x" * (carried.MAX_SIZE + 1))


def _not_text(home: Path, project: Path) -> None:
    put(home / PART).write_bytes(b"\xff")


@pytest.mark.parametrize("arrange", [_planted, _through_the_project, _pipe, _large, _not_text])
def test_what_is_not_plainly_the_users_own_is_refused(
    loaded_of: Callable[[str], LoadedPolicy], home: Path, project: Path, paths: StatePaths, arrange: Any
) -> None:
    loaded = loaded_of(POLICY)
    arrange(home, project)
    with pytest.raises(PolicyError):
        carried.carry(paths, loaded, user(home))
    assert not (paths.home / PART).exists()
