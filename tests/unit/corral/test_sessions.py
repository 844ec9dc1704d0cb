from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from corral import notes, sessions
from corral.sessions import Note, Session, all_of, pick
from policy.errors import ArgumentError, CorralError
from policy.identity import StatePaths
from tests.unit.corral.fakes import FakeDocker

SANDBOX = "demo-0a1b2c3d"


def one(
    session: str, *, state: str = "running", name: str = "", purpose: str = "run", created: float = 0
) -> Session:
    return Session(
        ident="id" + session,
        container=f"corral-{SANDBOX}-main-{session}",
        sandbox=SANDBOX,
        session=session,
        service="main",
        purpose=purpose,
        project="/p",
        state=state,
        status="Up 2 minutes" if state == "running" else "Exited (3) 1 minute ago",
        created=created,
        address="172.16.0.2",
        note=Note(name=name),
    )


A, B = one("aaaaaaaa", name="review"), one("bbbbbbbb")
DEAD = one("dddddddd", state="exited", name="old")


def row(session: str, uid: int, sandbox: str = SANDBOX) -> dict[str, Any]:
    return {
        "Id": f"id-{session}-{uid}",
        "Names": [f"/corral-{sandbox}-main-{session}"],
        "State": "running",
        "Status": "Up",
        "Created": 100,
        "Labels": {
            "io.corral.sandbox": sandbox,
            "io.corral.session": session,
            "io.corral.uid": str(uid),
            "io.corral.purpose": "run",
            "io.corral.project": "/p",
        },
        "NetworkSettings": {"Networks": {f"0-corral-{sandbox}": {"IPAddress": "172.16.0.3"}}},
    }


def test_a_user_sees_own_sessions_with_their_names_and_nobody_else_s(
    docker_engine: FakeDocker, tmp_path: Path
) -> None:
    for made in (
        row("aaaaaaaa", 1000),
        row("bbbbbbbb", 1001),
        row("not-hex!", 1000),
        row("cccccccc", 1000, "Bad"),
    ):
        docker_engine.containers_by_id[made["Id"]] = made
    (tmp_path / SANDBOX / "sessions" / "aaaaaaaa").mkdir(parents=True)
    sessions.write_note(StatePaths(tmp_path / SANDBOX), "aaaaaaaa", Note("review", "p", "i"))
    (found,) = all_of(docker_engine, 1000, tmp_path)  # type: ignore[arg-type]
    assert (found.session, found.name, found.note.policy, found.address) == (
        "aaaaaaaa",
        "review",
        "p",
        "172.16.0.3",
    )


@pytest.mark.parametrize("content", ["", "[]", "{", '{"name": 1}', json.dumps({"name": "x"})])
def test_a_note_that_cannot_be_read_is_empty(tmp_path: Path, content: str) -> None:
    directory = tmp_path / "sessions" / "aaaaaaaa"
    directory.mkdir(parents=True)
    (directory / notes.FILE).write_text(content)
    assert sessions.read_note(StatePaths(tmp_path), "aaaaaaaa") == Note()


def choose(found: list[Session], given: str | None, *, running: bool = True) -> Session:
    return pick(found, given, what="attach to", running=running)


def test_the_only_one_is_meant_and_among_several_one_is_named() -> None:
    assert choose([A, DEAD], None) is A
    assert choose([A, B], "review") is A
    assert choose([A, B], "bbbb") is B
    with pytest.raises(CorralError, match="2 sessions to attach to: review, bbbbbbbb"):
        choose([A, B], None)


def test_one_that_ended_can_be_read_and_not_attached_to() -> None:
    assert choose([DEAD], None, running=False) is DEAD
    assert choose([A, DEAD], "old", running=False) is DEAD
    with pytest.raises(CorralError, match=r"has ended \(Exited \(3\)") as caught:
        choose([A, DEAD], "old")
    assert caught.value.exit_code == 1
    # Without a name the running one is meant.
    assert choose([A, DEAD], None, running=False) is A


@pytest.mark.parametrize("given", [None, "zzzz", "a"])
def test_what_is_not_there_is_said(given: str | None) -> None:
    with pytest.raises(CorralError, match="no session"):
        choose([one("abcdef01", purpose="verify"), one("ffffffff", state="created")], given)


def test_a_name_belongs_to_one_running_session() -> None:
    sessions.free_name([A, DEAD], "old")
    with pytest.raises(CorralError, match="review runs already"):
        sessions.free_name([A], "review")


@pytest.mark.parametrize("text", ["", "-a", "a b", "a/b", "a" * 65, "é", "a\n"])
def test_names_are_simple(text: str) -> None:
    with pytest.raises(ArgumentError):
        sessions.valid_name(text)


def test_the_list_is_one_line_each_and_harmless() -> None:
    text = sessions.render([A, one("bbbbbbbb", state="exited", name="x")], now=7200.0)
    lines = text.splitlines()
    assert len(lines) == 3
    assert "review" in lines[1] and "172.16.0.2" in lines[1] and "2h" in lines[1]
    assert "exited (3)" in lines[2]
    assert sessions.render([], 0.0) == "no sessions"
    assert [r["address"] for r in sessions.as_json([A, DEAD])] == ["172.16.0.2", None]


def test_a_note_is_for_its_owner_alone(tmp_path: Path) -> None:
    directory = tmp_path / "sessions" / "aaaaaaaa"
    directory.mkdir(parents=True, mode=0o700)
    sessions.write_note(StatePaths(tmp_path), "aaaaaaaa", Note("n", "p", "i"))
    assert sessions.read_note(StatePaths(tmp_path), "aaaaaaaa") == Note("n", "p", "i")
    assert os.listdir(directory) == [notes.FILE]
