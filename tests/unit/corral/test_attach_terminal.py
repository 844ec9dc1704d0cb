"""A real terminal between the user and the container: keys, sizes, and how it is left."""

from __future__ import annotations

import os
import pty
import signal
import socket
import termios
from collections.abc import Iterator

import pytest

from corral.attach import Streams, attach
from policy.errors import EngineError
from tests.unit.corral.attach_doubles import PATIENCE, Engine, FakeContainer, Tty, script

from .test_attach import pipes, wire

__all__ = ["pipes", "wire"]


@pytest.fixture
def terminal() -> Iterator[Tty]:
    made = Tty()
    yield made
    made.close()


def test_every_key_reaches_the_container_and_the_terminal_is_restored(
    wire: tuple[socket.socket, Engine], terminal: Tty
) -> None:
    near, engine = wire
    container = FakeContainer()
    before = termios.tcgetattr(terminal.side)
    keys = bytes(range(256))

    def play() -> None:
        container.started.wait(PATIENCE)
        os.write(terminal.person, keys)
        # Ctrl-C, Ctrl-Z, Ctrl-D, Ctrl-P, Ctrl-S, carriage return: none of them is the terminal's own now.
        assert engine.read(256) == keys
        engine.far.sendall(b"raw\x1b[0m\n")
        assert terminal.read(8) == b"raw\x1b[0m\n"
        engine.far.close()
        container.end(9)

    with script(play):
        assert attach(container, near, streams=terminal.streams, tty=True) == 9
    assert termios.tcgetattr(terminal.side) == before


def test_the_size_is_set_as_soon_as_the_terminal_is_there_and_follows(
    wire: tuple[socket.socket, Engine], terminal: Tty
) -> None:
    near, engine = wire
    container = FakeContainer(no_terminal_yet=3)

    def play() -> None:
        container.wait_told(lambda: container.sizes == [(100, 30)])
        terminal.set_size(132, 43)
        os.kill(os.getpid(), signal.SIGWINCH)
        container.wait_told(lambda: container.sizes[-1] == (132, 43))
        engine.far.close()
        container.end()

    with script(play):
        attach(container, near, streams=terminal.streams, tty=True)


def test_the_terminal_is_restored_when_the_engine_goes_away(
    wire: tuple[socket.socket, Engine], terminal: Tty
) -> None:
    near, engine = wire
    before = termios.tcgetattr(terminal.side)
    container = FakeContainer(error=EngineError("gone"))

    def play() -> None:
        container.started.wait(PATIENCE)
        engine.far.close()
        container.end()

    with script(play), pytest.raises(EngineError):
        attach(container, near, streams=terminal.streams, tty=True)
    assert termios.tcgetattr(terminal.side) == before


def test_a_terminal_that_hung_up_ends_the_input_only(wire: tuple[socket.socket, Engine]) -> None:
    near, engine = wire
    person, side = pty.openpty()
    other = os.dup(side)
    container = FakeContainer()

    def play() -> None:
        container.started.wait(PATIENCE)
        os.close(person)
        assert engine.read_all() == b""
        container.end(129)
        engine.far.close()

    try:
        with script(play):
            assert attach(container, near, streams=Streams(side, other, other), tty=True) == 129
    finally:
        os.close(side)
        os.close(other)
