"""Leaving a session that goes on, by keys, by signals, because the terminal is gone; and coming to one that runs."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator

import pytest

from corral import detachkeys
from corral.attach import FORWARDED, attach
from corral.flow import Late, Leaving, Left
from corral.screen import Screen
from tests.unit.corral.attach_doubles import PATIENCE, Engine, FakeContainer, Pipes, Tty, script

from .test_attach import pipes, wire

__all__ = ["pipes", "wire"]

KEYS = detachkeys.parse("ctrl-],ctrl-q")
ANY = Leaving(KEYS, frozenset(FORWARDED))


@pytest.fixture
def terminal() -> Iterator[Tty]:
    made = Tty()
    yield made
    made.close()


def test_the_keys_leave_the_container_running_and_the_terminal_as_it_was(
    wire: tuple[socket.socket, Engine], terminal: Tty
) -> None:
    near, engine = wire
    container = FakeContainer()

    def play() -> None:
        container.started.wait(PATIENCE)
        engine.far.sendall(b"\x1b[?1049h\x1b[?1000hfull")
        assert terminal.read(20) == b"\x1b[?1049h\x1b[?1000hfull"
        os.write(terminal.person, b"ls\x10\x1d\x11")
        assert engine.read(3) == b"ls\x10"
        undone = b"\x1b[0m\x1b[?1000l\x1b[?1049l"
        assert terminal.read(len(undone)) == undone

    with script(play), pytest.raises(Left) as left:
        attach(container, near, streams=terminal.streams, tty=True, leaving=ANY)
    assert not left.value.hung_up
    assert container.signals == []
    container.end()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_us_and_not_the_session(
    wire: tuple[socket.socket, Engine], pipes: Pipes, name: str
) -> None:
    near, _ = wire
    container = FakeContainer()

    def play() -> None:
        container.started.wait(PATIENCE)
        os.kill(os.getpid(), getattr(signal, name))

    with script(play), pytest.raises(Left) as left:
        attach(container, near, streams=pipes.streams, tty=False, leaving=ANY)
    assert left.value.hung_up == (name == "SIGHUP")
    assert container.signals == []
    container.end()


def test_only_what_is_said_leaves(wire: tuple[socket.socket, Engine], pipes: Pipes) -> None:
    """The owner of a session leaves when the terminal goes, and passes on all else."""
    near, engine = wire
    container = FakeContainer()

    def play() -> None:
        container.started.wait(PATIENCE)
        os.kill(os.getpid(), signal.SIGTERM)
        container.wait_told(lambda: container.signals == ["SIGTERM"])
        engine.far.close()
        container.end(143)

    leaving = Leaving((), frozenset({signal.SIGHUP}))
    with script(play):
        assert attach(container, near, streams=pipes.streams, tty=False, leaving=leaving) == 143


def test_a_late_comer_is_shown_what_came_with_the_answer_and_has_the_screen_drawn(
    wire: tuple[socket.socket, Engine], terminal: Tty
) -> None:
    near, engine = wire
    container, screen = FakeContainer(), Screen()
    screen.feed(b"\x1b[?1049h")

    def play() -> None:
        # A size that differs by a column makes the program draw; then the real one.
        container.wait_told(lambda: container.sizes == [(99, 30), (100, 30)])
        assert terminal.read(5) == b"ahead"
        engine.far.close()
        container.end(3)

    with script(play):
        late = Late(b"ahead", screen)
        assert attach(container, near, streams=terminal.streams, tty=True, leaving=ANY, late=late) == 3
