from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence

import pytest

from corral import starting
from policy.errors import CorralError

GATE = b"corral-firewall: OK: DNS closed\r\ncorral-firewall: egress policy applied\r\n"


class Container:
    def __init__(self, far: socket.socket, *said: bytes, code: int = 0, ends: bool = False) -> None:
        self.far, self.said, self.code, self.ends = far, said, code, ends

    def start(self) -> None:
        for data in self.said:
            self.far.sendall(data)
        if self.ends:
            self.far.close()

    def wait(self) -> int:
        return self.code


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, far = socket.socketpair()
    with ours, far:
        yield ours, far


def start(
    pair: tuple[socket.socket, socket.socket],
    *said: bytes,
    fetched: bool = True,
    tty: bool = True,
    **how: object,
) -> list[str]:
    shown: list[str] = []
    event = threading.Event()
    if fetched:
        event.set()
    given = {key: how.pop(key) for key in ("early", "ready") if key in how}
    container = Container(pair[1], *said, **how)  # type: ignore[arg-type]
    starting.start(container, pair[0], tty=tty, fetched=event, show=shown.append, **given)  # type: ignore[arg-type]
    return shown


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "EARLY", 0.05)
    monkeypatch.setattr(starting, "PATIENCE", 0.3)


def test_the_gate_s_lines_are_shown_and_the_program_s_are_not(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    shown = start(pair, GATE[:20], GATE[20:] + b"\x1b[2Jhello\r\n")
    assert shown == ["corral-firewall: OK: DNS closed", "corral-firewall: egress policy applied"]


def test_without_a_terminal_the_stream_is_in_frames(pair: tuple[socket.socket, socket.socket]) -> None:
    data = GATE.replace(b"\r", b"")
    assert len(start(pair, b"\x02\0\0\0" + len(data).to_bytes(4, "big") + data, tty=False)) == 2


def test_a_gate_that_stays_closed_is_told(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(CorralError, match="the gate did not open, so nothing was started"):
        start(pair, b"corral-firewall: ERROR: x\r\n", ends=True, code=1)


def test_a_program_that_ends_at_once_is_told_with_its_words(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    with pytest.raises(CorralError, match=r"ended at once \(exit code 127\)\n.*there is no program"):
        start(pair, GATE, b"corral-entrypoint: ERROR: there is no program 'x'\r\n", ends=True, code=127)


def test_secrets_that_nobody_fetched_are_waited_for(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(CorralError, match="did not open within"):
        start(pair, GATE, fetched=False)


def test_what_the_program_prints_opens_no_gate(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(CorralError, match="did not open within"):
        start(pair, b"x corral-firewall: egress policy applied\r\n")


def test_what_was_waited_for_may_be_a_line_of_the_program(pair: tuple[socket.socket, socket.socket]) -> None:
    def ready(lines: Sequence[str]) -> bool:
        return "ready" in lines

    start(pair, GATE + b"begun\r\nready\r\n", early=0, ready=ready)
    with pytest.raises(CorralError, match="was not ready within"):
        start(pair, GATE + b"begun\r\n", early=0, ready=ready)
    with pytest.raises(CorralError, match="ended at once"):
        start(pair, GATE + b"begun\r\n", early=0, ready=ready, ends=True)


def test_a_line_of_the_gate_is_none_of_the_program(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(CorralError, match="was not ready within"):
        start(pair, b"ready\r\n" + GATE, early=0, ready=lambda lines: "ready" in lines)
