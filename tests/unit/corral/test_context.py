from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from corral import __version__, context, process
from corral.context import Invocation, check_same, check_versions, current_user, parse_git_identity, time_zone
from corral.membership import Membership
from policy import versions
from policy.errors import CorralError, EnforcerError
from tests.unit.corral.fakes import FakeEnforcer


def test_home_is_taken_from_the_account_when_unset() -> None:
    account = pwd.getpwuid(os.geteuid())
    assert str(current_user({}).home) == account.pw_dir
    assert str(current_user({"HOME": "/elsewhere"}).home) == "/elsewhere"
    assert current_user({}).gid == account.pw_gid


def test_a_user_without_account_and_home_is_refused() -> None:
    with pytest.raises(CorralError, match="home directory"):
        current_user({}, uid=2**31 - 5)


def test_the_time_zone_is_a_name(tmp_path: Path) -> None:
    link = tmp_path / "localtime"
    link.symlink_to("/usr/share/zoneinfo/Europe/Berlin")
    assert time_zone({}, link) == "Europe/Berlin"
    assert time_zone({"TZ": ":America/New_York"}, link) == "America/New_York"
    assert time_zone({}, tmp_path / "none") == ""
    (tmp_path / "plain").write_bytes(b"TZif")
    assert time_zone({}, tmp_path / "plain") == ""


def test_the_last_git_value_counts_and_strange_ones_do_not() -> None:
    output = "user.name\nFirst\0user.name\nSecond\0user.email\na@example.com\0user.signingkey\nX\0"
    assert parse_git_identity(output) == {"name": "Second", "email": "a@example.com"}
    assert parse_git_identity("user.name\nline\nbreak\0user.email\0") == {}


def test_a_host_without_git_has_no_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> process.Completed:
        raise process.ProgramError("git is not installed")

    monkeypatch.setattr(context.process, "run", missing)
    assert context.git_identity({}) == {}


def test_versions_must_fit_and_the_writer_be_reachable() -> None:
    member = Membership(1000, "agnes", 999, member=True)
    good = FakeEnforcer().version_answer
    check_versions(good, member)
    with pytest.raises(EnforcerError, match=r"corral is version .*, but the enforcer is 9\.9") as caught:
        check_versions({**good, "version": "9.9"}, member)
    assert "corral install" in str(caught.value.hint)
    with pytest.raises(EnforcerError, match="api schema 1 and unknown"):
        check_versions({"version": __version__, "writer": good["writer"]}, member)
    with pytest.raises(EnforcerError, match=r"but the netfilter writer is 0\.0\.1") as caught:
        check_versions({**good, "writer": {**good["writer"], "version": "0.0.1"}}, member)
    assert caught.value.hint == "run: corral install"
    denied = {"reachable": False, "error": "no permission for /run/x"}
    with pytest.raises(EnforcerError, match="cannot reach the netfilter writer") as caught:
        check_versions({**good, "writer": denied}, member)
    assert "systemctl restart user@1000.service" in str(caught.value.hint)
    # Another version, or no writer at all, is a difference for those who need it only.
    check_same({**good, "writer": denied})


def test_state_of_a_newer_version_is_refused_before_anything_is_written(
    invocation: Invocation, home: Path
) -> None:
    data = home / ".local" / "share" / "corral"
    data.mkdir(parents=True)
    (data / versions.STATE_FILE).write_text('{"version": "9.9", "schemas": {"state": 99}}')
    for look in (lambda: invocation.data, lambda: invocation.paths):
        with pytest.raises(CorralError, match=r"written by corral 9\.9 \(state schema 99\)"):
            look()
    assert [path.name for path in data.iterdir()] == [versions.STATE_FILE]


def test_who_writes_state_says_so(invocation: Invocation, home: Path) -> None:
    assert invocation.paths.root.parent == home / ".local" / "share" / "corral"
    found = versions.read_state(invocation.data)
    assert found is not None
    assert (found.release, found.schemas) == (__version__, {versions.STATE: versions.SCHEMAS[versions.STATE]})


def test_another_user_s_runtime_directory_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"HOME": "/elsewhere", "XDG_RUNTIME_DIR": str(tmp_path)}
    uid = os.stat(tmp_path).st_uid
    assert current_user(environ, uid).environ["XDG_RUNTIME_DIR"] == str(tmp_path)
    assert current_user(environ, uid + 1).environ["XDG_RUNTIME_DIR"] == f"/run/user/{uid + 1}"
    assert current_user({"HOME": "/elsewhere"}, 1234).environ["XDG_RUNTIME_DIR"] == "/run/user/1234"


def test_session_ids_are_eight_hex_digits_and_differ() -> None:
    found = {context.new_session() for _ in range(50)}
    assert len(found) == 50
    assert all(len(one) == 8 and int(one, 16) >= 0 for one in found)


def test_the_version_is_the_project_s() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    assert project["project"]["version"] == __version__
