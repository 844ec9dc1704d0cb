"""Who comes to a session that runs: looks after it when nobody does, and else lets its owner."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from corral import attended, joining, leftovers
from corral.context import Invocation
from corral.flow import Left
from corral.sessions import Note, Session
from policy import holding

from .test_sessions import A


class Joining:
    """A session of which ``outcome`` comes."""

    def __init__(self, invocation: Invocation, monkeypatch: pytest.MonkeyPatch) -> None:
        self.invocation = invocation
        self.outcome: object = 4
        self.session = replace(A, sandbox=invocation.loaded.sandbox.id)
        self.directory: Path = invocation.paths.session(A.session)
        self.directory.mkdir(parents=True)
        self.finished: list[Session] = []
        monkeypatch.setattr(joining, "_joined", self._joined)
        monkeypatch.setattr(leftovers, "finish", lambda _, session: self.finished.append(session))
        self.seen: bool | None = None

    def _joined(self, *_: object) -> int:
        self.seen = attended.attended(self.directory)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        assert isinstance(self.outcome, int)
        return self.outcome

    def join(self) -> int:
        return joining.join(self.invocation, self.session)


@pytest.fixture
def joined(invocation: Invocation, monkeypatch: pytest.MonkeyPatch) -> Joining:
    return Joining(invocation, monkeypatch)


@pytest.fixture
def owner(joined: Joining) -> attended.Attendance:
    ours = attended.Attendance()
    ours.begin(joined.directory)
    return ours


def test_one_that_nobody_has_is_looked_after_and_finished(
    joined: Joining, owner: attended.Attendance
) -> None:
    owner.close()
    assert joined.join() == 4
    assert joined.seen is True
    assert joined.finished == [joined.session]
    assert attended.attended(joined.directory) is False


@pytest.mark.parametrize(("hung_up", "code"), [(True, 129), (False, 0)])
def test_one_that_is_left_again_is_nobody_s_again(
    joined: Joining, owner: attended.Attendance, said: io.StringIO, hung_up: bool, code: int
) -> None:
    owner.close()
    joined.outcome = Left(hung_up=hung_up)
    assert joined.join() == code
    assert joined.finished == []
    assert attended.attended(joined.directory) is False
    # Its output is for who comes back, also when it ends meanwhile.
    assert (joined.directory / holding.LEFT).exists()


def test_who_started_it_finishes_it(joined: Joining, owner: attended.Attendance) -> None:
    assert joined.join() == 4
    assert joined.finished == []
    owner.close()


def test_an_agent_that_is_always_on_is_not_removed_by_who_saw_it_end(
    joined: Joining, owner: attended.Attendance
) -> None:
    owner.close()
    joined.session = replace(joined.session, purpose="daemon")
    joined.join()
    assert joined.finished == []


@pytest.mark.parametrize(("policy", "told"), [("another", True), ("", False)])
def test_another_policy_than_that_of_now_is_said(
    joined: Joining, owner: attended.Attendance, said: io.StringIO, policy: str, told: bool
) -> None:
    owner.close()
    joined.session = replace(joined.session, note=Note("review", policy))
    joined.join()
    assert ("the policy changed since review was started" in said.getvalue()) == told
