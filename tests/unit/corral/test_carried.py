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
CONFIG = ".config/opencode"
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


SILENT = "profile: opencode\n"
NOTHING = "profile: opencode\nprofile_options: {opencode: {from_host: []}}\n"


def test_nothing_is_copied_when_the_policy_says_so(
    loaded_of: Callable[[str], LoadedPolicy], home: Path, paths: StatePaths
) -> None:
    put(home / PART)
    put(home / CONFIG / "opencode.json")
    assert carried.carry(paths, loaded_of(NOTHING), user(home)) == []
    assert carried.managed(loaded_of(NOTHING), user(home)) == carried.Carried()
    assert not paths.home.exists()


def test_a_policy_that_says_nothing_takes_along_what_there_is(
    loaded_of: Callable[[str], LoadedPolicy], home: Path, paths: StatePaths
) -> None:
    loaded = loaded_of(SILENT)
    assert carried.carry(paths, loaded, user(home)) == []
    assert carried.managed(loaded, user(home)) == carried.Carried()
    put(home / PART)
    assert len(carried.carry(paths, loaded, user(home))) == 1
    assert (paths.home / PART).read_text() == LOGIN


def test_of_a_profile_without_such_words_nothing_comes_along(
    loaded_of: Callable[[str], LoadedPolicy], home: Path, paths: StatePaths
) -> None:
    put(home / ".claude" / ".claude.json")
    loaded = loaded_of("profile: claude\n")
    assert carried.carry(paths, loaded, user(home)) == []
    assert carried.managed(loaded, user(home)) == carried.Carried()


def test_the_configuration_comes_along_with_what_lies_below_and_behind_links(
    loaded_of: Callable[[str], LoadedPolicy], home: Path, tmp_path: Path
) -> None:
    put(home / CONFIG / "opencode.json", "{}")
    put(home / CONFIG / "node_modules" / "sdk" / "index.js")
    put(home / CONFIG / "notes").unlink()
    os.mkfifo(home / CONFIG / "notes")
    put(tmp_path / "dotfiles" / "agent" / "review.md", "review")
    (home / CONFIG / "agent").symlink_to(tmp_path / "dotfiles" / "agent")
    (home / CONFIG / "agent" / "again").symlink_to(home / CONFIG)
    (home / CONFIG / "gone").symlink_to(home / "nowhere")
    found = carried.managed(loaded_of(SILENT), user(home))
    assert found.files == {CONFIG: {"opencode.json": b"{}", "agent/review.md": b"review"}}
    assert list(found.copied) == [CONFIG] and "2 files" in found.copied[CONFIG]
    assert len(found.told) == 1 and "notes is no plain file" in found.told[0]


def test_the_users_configuration_directory_counts(
    loaded_of: Callable[[str], LoadedPolicy], home: Path, tmp_path: Path
) -> None:
    put(tmp_path / "elsewhere" / "opencode" / "opencode.json", "{}")
    me = user(home, XDG_CONFIG_HOME=str(tmp_path / "elsewhere"))
    assert carried.managed(loaded_of(SILENT), me).files == {CONFIG: {"opencode.json": b"{}"}}


def test_a_configuration_that_is_asked_for_and_not_there_stops_nothing(
    loaded_of: Callable[[str], LoadedPolicy], home: Path
) -> None:
    found = carried.managed(loaded_of(POLICY.replace("login", "config")), user(home))
    assert found.files == {} and "there is nothing in" in found.told[0]


def _config_in_the_project(home: Path, project: Path) -> None:
    put(project / "opencode" / "opencode.json", "{}")
    (home / ".config").mkdir(exist_ok=True)
    (home / CONFIG).symlink_to(project / "opencode")


def _many_files(home: Path, project: Path) -> None:
    for number in range(carried.MAX_FILES + 1):
        put(home / CONFIG / f"{number}", "")


@pytest.mark.parametrize("arrange", [_config_in_the_project, _many_files])
def test_a_configuration_an_agent_could_have_written_or_without_end_is_refused_or_left_out_and_told(
    loaded_of: Callable[[str], LoadedPolicy], home: Path, project: Path, arrange: Any
) -> None:
    asked = loaded_of(POLICY.replace("login", "config"))
    silent = loaded_of(SILENT)
    # After the policy was looked at: a project with a configuration in it is refused.
    arrange(home, project)
    with pytest.raises(PolicyError):
        carried.managed(asked, user(home))
    found = carried.managed(silent, user(home))
    assert found.files == {} and "not copied" in found.told[0]


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
    loaded, silent = loaded_of(POLICY), loaded_of(SILENT)
    arrange(home, project)
    with pytest.raises(PolicyError):
        carried.carry(paths, loaded, user(home))
    # Where nobody asked for it, it stops nothing.
    (told,) = carried.carry(paths, silent, user(home))
    assert "not copied" in told and "secret" not in told
    assert not (paths.home / PART).exists()
