from __future__ import annotations

import itertools
import socket
from typing import Any

import pytest

from corral.insession import MOST, Unfinished, execute
from policy.errors import EngineError
from tests.unit.corral.fakes import FakeDocker


def frame(text: bytes, stream: int = 1) -> bytes:
    return bytes([stream, 0, 0, 0]) + len(text).to_bytes(4, "big") + text


class Talking(FakeDocker):
    """Says something, and ends the stream or does not."""

    def __init__(self, text: bytes, *, ends: bool) -> None:
        super().__init__()
        ours, self.theirs = socket.socketpair()
        ours.setblocking(False)
        ours.send(text)
        self.held = None if ends else ours
        if ends:
            ours.close()

    def _find(self, ident: str) -> dict[str, Any]:
        return {}

    def exec_start(self, ident: str, socket: bool) -> Any:
        return self.theirs


def run(engine: Talking, **options: Any) -> tuple[str, str, int]:
    return execute(engine, "a", ("/checker", "{}"), user="1000:1000", **{"wait": 20.0, **options})  # type: ignore[arg-type]


def test_both_streams_and_the_code_come_back() -> None:
    engine = Talking(frame(b"one\n") + frame(b"two\n", 2) + frame(b"three\n"), ends=True)
    engine.exec_output = (b"", b"", 3)
    assert run(engine) == ("one\nthree\n", "two\n", 3)
    assert engine.commands == [["/checker", "{}"]]


def test_a_program_that_does_not_end_is_left_after_its_time() -> None:
    engine = Talking(frame(b"one\n"), ends=False)
    ticks = itertools.count(0.0, 15.0)
    with pytest.raises(Unfinished, match="did not end in time"):
        run(engine, clock=lambda: next(ticks))


def test_a_program_that_says_too_much_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corral.insession.MOST", 100)
    assert MOST > 100
    with pytest.raises(Unfinished, match="more than 100 bytes"):
        run(Talking(frame(b"x" * 101), ends=False))


def test_what_is_no_frame_is_an_error() -> None:
    with pytest.raises(EngineError, match="not a frame"):
        run(Talking(b"HTTP/1.1 500 no\r\n", ends=False))
