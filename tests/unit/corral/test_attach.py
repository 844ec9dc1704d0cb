"""The loop between a terminal or pipes and a container; the engine's side is a socket pair."""

from __future__ import annotations

import fcntl
import itertools
import os
import pty
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from corral import attach as module
from corral.attach import Streams, attach
from policy.errors import CorralError, EngineError
from tests.unit.corral.attach_doubles import PATIENCE, Engine, FakeContainer, Pipes, drain, frame, script


@pytest.fixture
def wire() -> Iterator[tuple[socket.socket, Engine]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, Engine(far)


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    made = Pipes()
    yield made
    made.close()


def test_stdout_and_stderr_are_told_apart_and_the_exit_code_comes_through(
    wire: tuple[socket.socket, Engine], pipes: Pipes
) -> None:
    near, engine = wire
    container = FakeContainer()

    def play() -> None:
        container.started.wait(PATIENCE)
        engine.far.sendall(frame(1, b"out") + frame(2, b"err") + frame(1, b"more"))
        engine.far.close()
        container.end(42)

    with script(play):
        assert attach(container, near, streams=pipes.streams, tty=False) == 42
    assert pipes.finished() == (b"outmore", b"err")


def test_input_arrives_and_its_end_is_a_half_close(wire: tuple[socket.socket, Engine], pipes: Pipes) -> None:
    near, engine = wire
    container = FakeContainer()
    os.write(pipes.keyboard, b"question")
    pipes.close(pipes.keyboard)

    def play() -> None:
        # Reading to the end works only when the other side has said that there is no more.
        question = engine.read_all()
        engine.far.sendall(frame(1, b"answer to " + question))
        engine.far.close()
        container.end()

    with script(play):
        assert attach(container, near, streams=pipes.streams, tty=False) == 0
    assert pipes.finished() == (b"answer to question", b"")


def test_a_large_input_and_a_large_output_do_not_block_each_other(
    wire: tuple[socket.socket, Engine], pipes: Pipes
) -> None:
    near, engine = wire
    container = FakeContainer()
    size = 3_000_000
    got: list[bytes] = []

    def keyboard() -> None:
        left = memoryview(b"i" * size)
        while left:
            left = left[os.write(pipes.keyboard, left) :]
        pipes.close(pipes.keyboard)

    def reader() -> None:
        while len(b"".join(got)) < size:
            part = os.read(pipes.out, 65536)
            got.append(part)

    def play() -> None:
        # Everything is written before anything is read: only a loop that moves both ways gets through.
        for _ in range(size // 10_000):
            engine.far.sendall(frame(1, b"o" * 10_000))
        assert engine.read_all() == b"i" * size
        engine.far.close()
        container.end()

    helpers = [threading.Thread(target=work, daemon=True) for work in (keyboard, reader)]
    for helper in helpers:
        helper.start()
    with script(play):
        assert attach(container, near, streams=pipes.streams, tty=False) == 0
    for helper in helpers:
        helper.join(PATIENCE)
    assert b"".join(got) == b"o" * size


def test_output_that_nobody_reads_yet_is_not_lost_when_the_container_ends(
    wire: tuple[socket.socket, Engine], pipes: Pipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, engine = wire
    monkeypatch.setattr(module, "DRAIN", 0.01)
    container = FakeContainer()
    fcntl.fcntl(pipes.stdout, fcntl.F_SETPIPE_SZ, 4096)
    result: list[int] = []
    loop = threading.Thread(
        target=lambda: result.append(
            attach(container, near, streams=pipes.streams, tty=False, handle=lambda *_: signal.SIG_DFL)
        ),
        daemon=True,
    )
    loop.start()
    engine.far.sendall(frame(1, b"x" * 100_000))
    engine.far.close()
    container.end(3)
    loop.join(0.2)
    assert loop.is_alive()
    got = b""
    while len(got) < 100_000:
        got += os.read(pipes.out, 1000)
    loop.join(PATIENCE)
    assert result == [3]
    assert got == b"x" * 100_000


def test_a_program_that_closed_its_output_is_waited_for(
    wire: tuple[socket.socket, Engine], pipes: Pipes
) -> None:
    near, engine = wire
    container = FakeContainer()

    def play() -> None:
        container.started.wait(PATIENCE)
        engine.far.close()
        # It still takes signals after that.
        os.kill(os.getpid(), signal.SIGINT)
        container.wait_told(lambda: container.signals == ["SIGINT"])
        container.end(7)

    with script(play):
        assert attach(container, near, streams=pipes.streams, tty=False) == 7


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"])
def test_signals_go_to_the_container_and_the_handlers_come_back(
    wire: tuple[socket.socket, Engine], pipes: Pipes, name: str
) -> None:
    near, engine = wire
    container = FakeContainer()
    number = signal.Signals[name]
    before = signal.signal(number, lambda *_: None)
    mine = signal.getsignal(number)

    def play() -> None:
        container.started.wait(PATIENCE)
        os.kill(os.getpid(), number)
        container.wait_told(lambda: container.signals == [name])
        engine.far.close()
        container.end(128 + number)

    try:
        with script(play):
            assert attach(container, near, streams=pipes.streams, tty=False) == 128 + number
        assert signal.getsignal(number) is mine
    finally:
        signal.signal(number, before)


def test_a_signal_that_another_thread_receives_is_forwarded_too(
    wire: tuple[socket.socket, Engine], pipes: Pipes
) -> None:
    near, engine = wire
    container = FakeContainer()

    def play() -> None:
        engine.far.sendall(frame(1, b"x"))
        os.read(pipes.out, 1)
        # It does not interrupt the poll() that the loop is in.
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        container.wait_told(lambda: container.signals == ["SIGTERM"])
        engine.far.close()
        container.end()

    with script(play):
        attach(container, near, streams=pipes.streams, tty=False)


def test_an_ignored_hang_up_stays_ignored(wire: tuple[socket.socket, Engine], pipes: Pipes) -> None:
    near, engine = wire
    container = FakeContainer()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def play() -> None:
        container.started.wait(PATIENCE)
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        container.wait_told(lambda: "SIGTERM" in container.signals)
        engine.far.close()
        container.end()

    try:
        with script(play):
            attach(container, near, streams=pipes.streams, tty=False)
        assert container.signals == ["SIGTERM"]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_is_forwarded_although_nobody_reads_the_output(
    wire: tuple[socket.socket, Engine], pipes: Pipes
) -> None:
    near, engine = wire
    container = FakeContainer()
    fcntl.fcntl(pipes.stdout, fcntl.F_SETPIPE_SZ, 4096)

    def play() -> None:
        container.started.wait(PATIENCE)
        engine.far.sendall(frame(1, b"x" * 50_000))
        assert select.select([pipes.out], [], [], PATIENCE)[0]
        os.kill(os.getpid(), signal.SIGTERM)
        container.wait_told(lambda: container.signals == ["SIGTERM"])
        engine.far.close()
        container.end()
        while len(os.read(pipes.out, 65536)) > 0:
            if not select.select([pipes.out], [], [], 0.3)[0]:
                break

    with script(play):
        attach(container, near, streams=pipes.streams, tty=False)


def test_a_reader_that_went_away_ends_the_container(wire: tuple[socket.socket, Engine], pipes: Pipes) -> None:
    near, engine = wire
    container = FakeContainer()
    pipes.close(pipes.out)

    def play() -> None:
        engine.far.sendall(frame(1, b"unwanted"))
        container.wait_told(lambda: container.signals == ["SIGTERM"])
        # What still comes is dropped, and does not ask again.
        engine.far.sendall(frame(1, b"more") + frame(2, b"last words"))
        engine.far.close()
        container.end(143)

    with script(play):
        assert attach(container, near, streams=pipes.streams, tty=False) == 143
    pipes.close(pipes.stderr)
    assert drain(pipes.err) == b"last words"
    assert container.signals == ["SIGTERM"]


def test_an_engine_that_goes_away_is_an_error(wire: tuple[socket.socket, Engine], pipes: Pipes) -> None:
    near, engine = wire
    container = FakeContainer(error=EngineError("waiting failed"))
    container.end()
    engine.far.close()
    with pytest.raises(EngineError, match="waiting failed"):
        attach(container, near, streams=pipes.streams, tty=False)


def test_a_stream_that_the_engine_forgets_to_close_does_not_hold_the_end(
    wire: tuple[socket.socket, Engine], pipes: Pipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, _ = wire
    monkeypatch.setattr(module, "DRAIN", 0.05)
    container = FakeContainer()
    container.end(5)
    assert attach(container, near, streams=pipes.streams, tty=False) == 5


def test_a_container_that_does_not_start_leaves_everything_as_it_was(
    wire: tuple[socket.socket, Engine], pipes: Pipes
) -> None:
    def refuse() -> None:
        raise EngineError("starting the container failed")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(EngineError):
        attach(FakeContainer(on_start=refuse), wire[0], streams=pipes.streams, tty=False)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("stream", [1, 2])
def test_output_that_cannot_be_written_ends_the_container_and_is_an_error(
    wire: tuple[socket.socket, Engine], pipes: Pipes, stream: int
) -> None:
    near, engine = wire
    container = FakeContainer()
    full = os.open("/dev/full", os.O_WRONLY)
    streams = Streams(
        pipes.stdin, full if stream == 1 else pipes.stdout, full if stream == 2 else pipes.stderr
    )

    def play() -> None:
        engine.far.sendall(frame(stream, b"lost"))
        container.wait_told(lambda: container.signals == ["SIGTERM"])
        engine.far.close()
        container.end(0)

    name = {1: "stdout", 2: "stderr"}[stream]
    try:
        with (
            script(play),
            pytest.raises(CorralError, match=f"cannot write to {name}: No space left") as caught,
        ):
            attach(container, near, streams=streams, tty=False)
    finally:
        os.close(full)
    assert "make room" in str(caught.value.hint)


def hurrying() -> Callable[[], float]:
    """A clock on which every time of grace is over when it is looked at again."""
    now = itertools.count(0.0, 1000.0)
    return lambda: next(now)


def test_a_signal_during_the_start_is_not_lost_and_decides_the_exit_code(
    wire: tuple[socket.socket, Engine], pipes: Pipes
) -> None:
    near, engine = wire
    # The program is not there yet when the signal is forwarded, so it ignores it.
    container = FakeContainer(on_start=lambda: os.kill(os.getpid(), signal.SIGINT))

    def play() -> None:
        container.wait_told(lambda: container.signals == ["SIGINT", "SIGKILL"])
        engine.far.close()
        container.end(137)

    with script(play):
        code = attach(container, near, streams=pipes.streams, tty=False, clock=hurrying())
    assert code == 128 + signal.SIGINT


def test_a_signal_before_the_start_means_that_nothing_is_started(
    wire: tuple[socket.socket, Engine], pipes: Pipes
) -> None:
    container = FakeContainer()

    def handle(number: int, handler: object) -> object:
        if number == signal.SIGTERM and callable(handler):
            handler(number, None)
        return signal.SIG_DFL

    assert attach(container, wire[0], streams=pipes.streams, tty=False, handle=handle) == 143
    assert not container.started.is_set()


@pytest.mark.parametrize("how", ["signal", "terminal"])
def test_a_container_that_ignores_the_hang_up_is_asked_and_then_killed(
    wire: tuple[socket.socket, Engine], how: str
) -> None:
    near, engine = wire
    person, side = pty.openpty()
    other = os.dup(side)
    container = FakeContainer()

    def play() -> None:
        container.started.wait(PATIENCE)
        if how == "signal":
            os.kill(os.getpid(), signal.SIGHUP)
        else:
            os.close(person)
        container.wait_told(lambda: container.signals == ["SIGHUP", "SIGTERM", "SIGKILL"])
        engine.far.close()
        container.end(137)

    try:
        with script(play):
            streams = Streams(side, other, other)
            assert attach(container, near, streams=streams, tty=True, clock=hurrying()) == 137
    finally:
        os.close(side)
        os.close(other)
        if how == "signal":
            os.close(person)


def test_a_container_that_ends_when_asked_is_not_killed(
    wire: tuple[socket.socket, Engine], pipes: Pipes
) -> None:
    near, engine = wire
    container = FakeContainer()

    def play() -> None:
        container.started.wait(PATIENCE)
        os.kill(os.getpid(), signal.SIGHUP)
        container.wait_told(lambda: container.signals == ["SIGHUP"])
        engine.far.close()
        container.end(129)

    with script(play):
        assert attach(container, near, streams=pipes.streams, tty=False, clock=lambda: 0.0) == 129
    assert container.signals == ["SIGHUP"]


def test_a_container_that_ignores_that_its_reader_went_away_is_killed(
    wire: tuple[socket.socket, Engine], pipes: Pipes
) -> None:
    near, engine = wire
    container = FakeContainer()
    pipes.close(pipes.out)

    def play() -> None:
        engine.far.sendall(frame(1, b"unwanted"))
        container.wait_told(lambda: container.signals == ["SIGTERM", "SIGKILL"])
        engine.far.close()
        container.end(137)

    with script(play):
        assert attach(container, near, streams=pipes.streams, tty=False, clock=hurrying()) == 137
