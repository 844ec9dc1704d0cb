from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corral import joining, screens
from corral.screen import TAIL, Screen
from corral.screens import FILE, Keeper, noted
from policy.identity import StatePaths

from .test_sessions import A


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def paths(tmp_path: Path) -> StatePaths:
    made = StatePaths(tmp_path / A.sandbox)
    made.session(A.session).mkdir(parents=True)
    return made


def test_what_lasts_is_noted_when_it_changes_and_the_rest_when_somebody_leaves(paths: StatePaths) -> None:
    clock, screen = Clock(), Screen()
    keeper = Keeper(paths.session(A.session), screen, clock)
    screen.feed(b"text, and \x1b[1mcolours\x1b[?25l\x1b[?25h")
    assert noted(paths, A.session) is None
    screen.feed(b"\x1b[?1049h\x1b[?1000h\x1b[>5u")
    found = noted(paths, A.session)
    assert found is not None
    assert (found[0].enter(), found[1]) == (screen.enter(), 1000.0)
    # Not more often than now and then.
    screen.feed(b"\x1b[?2004h")
    assert b"2004" not in noted(paths, A.session)[0].enter()  # type: ignore[index]
    clock.now += 1
    screen.feed(b"\x1b[?1h and a line that\nhas not ended: ")
    keeper.save()
    again = noted(paths, A.session)
    assert again is not None
    assert again[0].enter() == screen.enter() and b"2004" in again[0].enter()
    assert again[0].tail == b"has not ended: "
    # A clock that was set back keeps nobody from noting.
    clock.now -= 500
    screen.feed(b"\x1b[?1l")
    assert b"[?1h" not in noted(paths, A.session)[0].enter()  # type: ignore[index]


def test_a_line_that_does_not_end_is_kept_in_part() -> None:
    screen = Screen()
    for _ in range(3):
        screen.feed(b"x" * TAIL)
    screen.feed(b"end")
    assert len(screen.tail) == TAIL and screen.tail.endswith(b"xend")
    screen.feed(b"\n")
    assert screen.tail == b""


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        "{}",
        '{"time": 1, "modes": [], "keyboards": [], "other_keys": 0, "keypad": false, "tail": ""}',
        '{"time": 1, "modes": {}, "keyboards": [], "other_keys": 0, "keypad": false, "tail": "?"}',
        # Docker takes none of these times.
        *(
            f'{{"time": {time}, "modes": {{}}, "keyboards": [], "other_keys": 0, "keypad": false, "tail": ""}}'
            for time in ("0", "-1", "NaN", "Infinity")
        ),
    ],
)
def test_a_note_that_somebody_damaged_is_none(paths: StatePaths, body: str) -> None:
    (paths.session(A.session) / FILE).write_text(body)
    assert noted(paths, A.session) is None


def test_a_note_says_no_more_than_a_program_could(paths: StatePaths) -> None:
    body = {"time": 1, "modes": {"5": True, "1049": True}, "keyboards": [10**9] * 99, "other_keys": 10**9}
    text = json.dumps({**body, "keypad": 1, "tail": ""})
    (paths.session(A.session) / FILE).write_text(text)
    found = noted(paths, A.session)
    assert found is not None and found[0].modes == {1049: True} and len(found[0].keyboards) == 16


def test_a_full_disk_stops_nobody(tmp_path: Path) -> None:
    screen = Screen()
    Keeper(tmp_path / "missing", screen)
    screen.feed(b"\x1b[?1049h")


class Log:
    """Docker's log: lines that have ended, with their time."""

    def __init__(self, *rows: tuple[float, bytes]) -> None:
        self.rows = rows

    def logs(self, _: str, *, stdout: bool, stderr: bool, since: float = 0) -> bytes:
        assert stdout and stderr
        return b"".join(line for when, line in self.rows if when >= since)


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        # Nothing since: the note alone, with the line that has not ended.
        (Log((900, b"old line\n")), b"old line\nname? "),
        # That line has ended since.
        (Log((900, b"old line\n"), (1100, b"name? joe\n")), b"old line\nname? joe\n"),
        # The program went to a screen of its own; the line it began before says so at its end only.
        (Log((900, b"old line\n"), (1100, b"name? \x1b[?1049h\x1b[?1000h\n")), b"\x1b[?1049h\x1b[?1000h"),
    ],
)
def test_who_comes_later_goes_on_from_the_note(
    paths: StatePaths, monkeypatch: pytest.MonkeyPatch, log: Log, expected: bytes
) -> None:
    shown: list[bytes] = []
    monkeypatch.setattr(joining, "show", shown.append)
    screen = Screen()
    screen.feed(b"old line\nname? ")
    Keeper(paths.session(A.session), screen, Clock()).save()
    invocation: Any = SimpleNamespace(api=log, data=paths.root.parent)
    joining.again(invocation, A)
    assert b"".join(shown) == expected


def test_without_a_note_the_log_is_all_there_is(paths: StatePaths, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[bytes] = []
    monkeypatch.setattr(joining, "show", shown.append)
    invocation: Any = SimpleNamespace(api=Log((1, b"\x1b[?1049h\n")), data=paths.root.parent)
    assert joining.again(invocation, A).full
    assert shown == [b"\x1b[?1049h"]
    assert screens.noted(paths, A.session) is None
