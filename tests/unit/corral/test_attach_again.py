"""Docker goes away in the middle of a session and comes back, with the session or without."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from corral import attach as module
from corral.attach import attach
from policy.errors import EngineGoneError
from tests.unit.corral.attach_doubles import Engine, FakeContainer, Pipes, Tty, drain, frame, script


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    made = Pipes()
    yield made
    made.close()


@pytest.fixture
def wires() -> Iterator[tuple[socket.socket, Engine, socket.socket, Engine]]:
    near, far = socket.socketpair()
    again, again_far = socket.socketpair()
    with near, far, again, again_far:
        yield near, Engine(far), again, Engine(again_far)


def test_output_goes_on_without_a_gap_and_nothing_twice(
    wires: tuple[socket.socket, Engine, socket.socket, Engine], pipes: Pipes
) -> None:
    near, first, again, second = wires
    outage = threading.Event()
    container = FakeContainer(outages=[outage], streams=[(again, True)])
    said: list[str] = []

    def play() -> None:
        first.far.sendall(frame(1, b"one ") + frame(2, b"err ") + frame(1, b"two "))
        assert os.read(pipes.out, 64)
        first.far.close()
        outage.set()
        # Docker has all of it from the beginning, cut in other pieces, and what came meanwhile.
        second.far.sendall(frame(1, b"one two three ") + frame(2, b"err more ") + frame(1, b"four"))
        second.far.close()
        container.end(7)

    with script(play):
        assert attach(container, near, streams=pipes.streams, tty=False, say=said.append) == 7
    out, err = pipes.finished()
    assert (out.removeprefix(b"two "), err) == (b"three four", b"err more ")
    assert said == [module.WENT_AWAY, module.CAME_BACK]
    assert container.replays == [True]


def test_what_was_read_together_with_the_answer_comes_first(
    wires: tuple[socket.socket, Engine, socket.socket, Engine], pipes: Pipes
) -> None:
    near, first, again, second = wires
    outage = threading.Event()
    whole = frame(1, b"one two three ")
    container = FakeContainer(outages=[outage], streams=[(again, True, whole[:11])])

    def play() -> None:
        first.far.sendall(frame(1, b"one "))
        assert os.read(pipes.out, 64)
        first.far.close()
        outage.set()
        second.far.sendall(whole[11:] + frame(1, b"four"))
        second.far.close()
        container.end(7)

    with script(play):
        assert attach(container, near, streams=pipes.streams, tty=False, say=lambda _: None) == 7
    assert pipes.finished()[0] == b"two three four"


def test_input_goes_to_the_new_stream_and_an_end_that_was_told_is_told_again(
    wires: tuple[socket.socket, Engine, socket.socket, Engine], pipes: Pipes
) -> None:
    near, first, again, second = wires
    outage = threading.Event()
    container = FakeContainer(outages=[outage], streams=[(again, True)])

    def play() -> None:
        os.write(pipes.keyboard, b"before")
        assert first.read(6) == b"before"
        first.far.close()
        outage.set()
        os.write(pipes.keyboard, b"after")
        pipes.close(pipes.keyboard)
        assert second.read_all() == b"after"
        second.far.close()
        container.end()

    with script(play):
        assert attach(container, near, streams=pipes.streams, tty=False) == 0


def test_beyond_what_docker_keeps_it_is_said_that_output_may_be_missing(
    wires: tuple[socket.socket, Engine, socket.socket, Engine],
    pipes: Pipes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "REPLAYED", 2)
    near, first, again, second = wires
    outage = threading.Event()
    container = FakeContainer(outages=[outage], streams=[(again, True)])
    said: list[str] = []

    def play() -> None:
        first.far.sendall(frame(1, b"one "))
        assert os.read(pipes.out, 64) == b"one "
        first.far.close()
        outage.set()
        second.far.sendall(frame(1, b"three"))
        second.far.close()
        container.end()

    with script(play):
        assert attach(container, near, streams=pipes.streams, tty=False, say=said.append) == 0
    assert pipes.finished()[0] == b"three"
    assert container.replays == [False]
    assert module.MISSED in said[-1]


def test_a_session_that_docker_ended_meanwhile_is_told_with_its_last_words_and_exit_code(
    wires: tuple[socket.socket, Engine, socket.socket, Engine], pipes: Pipes
) -> None:
    near, first, again, second = wires
    outage = threading.Event()
    outage.set()
    container = FakeContainer(outages=[outage], streams=[(again, False)])
    container.end(143)
    first.far.close()
    second.far.sendall(frame(1, b"last words"))
    second.far.close()
    said: list[str] = []
    assert attach(container, near, streams=pipes.streams, tty=False, say=said.append) == 143
    assert said[-1] == module.ENDED
    assert pipes.finished()[0] == b"last words"


def test_an_engine_that_does_not_come_back_is_an_error(
    wires: tuple[socket.socket, Engine, socket.socket, Engine], pipes: Pipes
) -> None:
    near, first, _, _ = wires
    outage = threading.Event()
    outage.set()
    first.far.close()
    with pytest.raises(EngineGoneError, match="does not come back"):
        attach(FakeContainer(outages=[outage]), near, streams=pipes.streams, tty=False)


def test_a_terminal_gets_a_new_size_so_that_the_program_draws_anew(
    wires: tuple[socket.socket, Engine, socket.socket, Engine],
) -> None:
    near, first, again, second = wires
    outage = threading.Event()
    container = FakeContainer(outages=[outage], streams=[(again, True)])
    tty = Tty()

    def play() -> None:
        container.wait_told(lambda: container.sizes == [(100, 30)])
        first.far.close()
        outage.set()
        container.wait_told(lambda: container.sizes == [(100, 30), (99, 30), (100, 30)])
        second.far.sendall(b"drawn")
        assert tty.read(5) == b"drawn"
        second.far.close()
        container.end()

    try:
        with script(play):
            assert attach(container, near, streams=tty.streams, tty=True) == 0
    finally:
        tty.close()
    assert container.replays == [False]


def test_docker_may_go_away_more_than_once(pipes: Pipes) -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    outages = [threading.Event(), threading.Event()]
    container = FakeContainer(outages=list(outages), streams=[(pairs[1][0], True), (pairs[2][0], True)])

    def play() -> None:
        text = b""
        for (_, far), outage, word in zip(pairs, [*outages, None], (b"a", b"b", b"c"), strict=True):
            text += word
            far.sendall(frame(1, text))
            assert os.read(pipes.out, 1) == word
            far.close()
            if outage is not None:
                outage.set()
        container.end()

    with script(play):
        assert attach(container, pairs[0][0], streams=pipes.streams, tty=False) == 0
    assert drain_all(pipes) == b""
    pairs[0][0].close()


def drain_all(pipes: Pipes) -> bytes:
    pipes.close(pipes.stdout)
    return drain(pipes.out)
