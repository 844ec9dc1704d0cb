from __future__ import annotations

from pathlib import Path

import pytest

from corral import attended, sessions, statusfacts, units
from corral.session import User
from corral.sessions import Note
from policy.errors import CorralError
from policy.identity import StatePaths

STATUS = {
    "errors": [],
    "sandboxes": [
        {"sandbox": "demo-0123abcd", "sessions": [{"session": "0a1b2c3d"}, {"session": "../x"}]},
        {"sandbox": "../../etc"},
    ],
}


def made(data: Path, purpose: str) -> attended.Attendance:
    paths = StatePaths(data / "demo-0123abcd")
    paths.session("0a1b2c3d").mkdir(parents=True)
    sessions.write_note(paths, "0a1b2c3d", Note("review", purpose=purpose))
    ours = attended.Attendance()
    ours.begin(paths.session("0a1b2c3d"))
    return ours


@pytest.mark.parametrize("purpose", ["run", "shell", "daemon", ""])
@pytest.mark.parametrize("held", [True, False])
def test_who_looks_after_a_session_is_told_of_those_that_want_somebody(
    tmp_path: Path, user: User, purpose: str, held: bool
) -> None:
    ours = made(tmp_path, purpose)
    if not held:
        ours.close()
    sandbox, odd = statusfacts.added(STATUS, user, tmp_path)["sandboxes"]
    ours.close()
    known, unknown = sandbox["sessions"]
    assert known["called"] == "review"
    assert known["attended"] == (held if purpose in {"run", "shell"} else None)
    # What is no id leads to no file.
    assert unknown == {"session": "../x"} and odd == {"sandbox": "../../etc"}
    assert sandbox["unit"] is None


@pytest.mark.parametrize("answers", [True, False])
def test_systemd_is_asked_about_units_that_there_are(
    tmp_path: Path, user: User, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    def state(_: object, sandbox: object) -> units.State:
        if not answers:
            raise CorralError("no manager")
        return units.State("corral-sandbox-0123abcd.service", True, True, "failed", "dead")

    monkeypatch.setattr(units.Manager, "state", state)
    monkeypatch.setattr(units, "lingers", lambda _: False)
    assert statusfacts.added(STATUS, user, tmp_path)["sandboxes"][0]["unit"] is None
    manager = units.Manager(user)
    manager.directory.mkdir(parents=True)
    (manager.directory / "corral-sandbox-0123abcd.service").touch()
    found = statusfacts.added(STATUS, user, tmp_path)["sandboxes"][0]
    assert found["unit"]["active"] == ("failed" if answers else "unknown")
    assert found["lingers"] is False
