"""The user's terminal or pipes, connected to a container until it ends.

One loop in one thread moves bytes between stdin, the engine's socket, stdout and stderr, and forwards signals
and the size of the terminal. Each direction is read only when what it produced before has been written, so a
slow reader slows the writer down instead of filling memory, and a signal is never stuck behind a full pipe.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from corral import ending, oserrors, terminal
from corral.detachkeys import Matcher
from corral.ending import Ending
from corral.flow import NEVER, Exit, Input, Late, Leaving, Left, Output
from corral.frames import STDERR, STDOUT, FrameDecoder
from corral.screen import Screen
from policy.errors import CorralError, EngineError, EngineGoneError
from policy.records import dataclass

CHUNK = 65536
# A pipe that poll() calls writable takes this much without blocking.
PIPE_CHUNK = 4096
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# After the container ended, this long for the rest of its output (seconds).
DRAIN = 5.0
RESIZE_TRIES, RESIZE_PAUSE = 40, 0.025
# Docker keeps the last output only (policy.container: LogConfig); beyond this its beginning may be gone.
REPLAYED = 8 << 20
WENT_AWAY = "Docker went away; the session goes on if Docker lets it, waiting"
CAME_BACK = "Docker is back, and so is the session"
MISSED = "some of the output meanwhile may be missing"
ENDED = "Docker is back, and the session has ended (without live-restore Docker ends it)"

Handle = Callable[[int, Any], Any]
"""``signal.signal``: sets a handler and returns the former one."""


@dataclass(frozen=True)
class Rejoined:
    """A new stream of a container's input and output.

    ``running``: whether it still runs; else ``wait`` knows how it ended. ``ahead``: what was read of the
    stream already, together with the engine's answer.
    """

    stream: socket.socket
    running: bool
    ahead: bytes = b""


class Container(Protocol):
    """What the loop needs of the container. Every method may raise EngineError."""

    def start(self) -> None:
        """Start it."""

    def wait(self) -> int:
        """Block until it has ended and return its exit code, 128+n when signal n ended it."""

    def rejoin(self, *, replay: bool) -> Rejoined:
        """Block until an engine that went away is back.

        Args:
            replay: begin with all its output so far.

        Raises:
            EngineError: Docker does not come back, or the container is gone.
        """

    def kill(self, name: str) -> None:
        """Send it a signal, for example "SIGTERM"."""

    def resize(self, columns: int, rows: int) -> bool:
        """Set the size of its terminal; False when it has none yet."""


@dataclass(frozen=True)
class Streams:
    """Descriptors of this process, three different ones. ``stdin`` is None when the container gets none."""

    stdin: int | None = 0
    stdout: int = 1
    stderr: int = 2


def attach(
    container: Container,
    connection: socket.socket,
    *,
    streams: Streams = Streams(),  # noqa: B008 - it is frozen
    tty: bool,
    handle: Handle = signal.signal,
    clock: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = lambda _: None,
    leaving: Leaving = NEVER,
    late: Late | None = None,
    screen: Screen | None = None,
) -> int:
    """Start the container, move bytes until it has ended, return its exit code.

    A signal that comes before the container has started ends it, and the result is 128 + its number. When
    the terminal goes away, and that is nothing to leave for, the container is told (SIGHUP), asked (SIGTERM)
    and at last killed.

    Args:
        container: created, not started.
        connection: the engine's attach stream of it, already open, in both directions.
        streams: where input comes from and output goes.
        tty: whether the container has a terminal; then ``streams.stdin`` is one too.
        handle: ``signal.signal``.
        clock: seconds, monotonic.
        say: tells the user what happens to the session.
        leaving: what makes us leave.
        late: it runs already; without: ``screen`` follows what becomes of its terminal.

    Raises:
        Left: the session goes on.
        EngineError: the engine went away and did not come back.
        CorralError: the output could not be written; the container was ended.
    """
    with contextlib.ExitStack() as stack:
        loop = _Loop(container, connection, streams, tty, clock, say, leaving, late, screen)
        stack.callback(loop.close)
        stack.enter_context(_signals(loop.signalled, loop.exit.wake, tty, handle))
        if tty and streams.stdin is not None:
            stack.enter_context(terminal.raw(streams.stdin))
        try:
            return loop.run()
        except Left as left:
            if not left.hung_up:
                loop.restore()
            raise


@contextlib.contextmanager
def _signals(notify: Callable[[int], None], wake: int, tty: bool, handle: Handle) -> Iterator[None]:
    before = {}
    former_wake = -1
    with contextlib.suppress(ValueError):  # not in the main thread
        # Python's handler runs between two instructions; one that comes right before poll() would wait there.
        former_wake = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (*FORWARDED, *((signal.SIGWINCH,) if tty else ())):
        former = handle(number, lambda received, _: notify(received))
        if former is signal.SIG_IGN:
            # nohup's wish stands.
            handle(number, former)
        else:
            before[number] = former
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(former_wake)
        for number, handler in before.items():
            handle(number, signal.SIG_DFL if handler is None else handler)


class _Loop:
    def __init__(
        self,
        container: Container,
        connection: socket.socket,
        streams: Streams,
        tty: bool,
        clock: Callable[[], float],
        say: Callable[[str], None],
        leaving: Leaving,
        late: Late | None,
        screen: Screen | None,
    ) -> None:
        self.container = container
        self.connection = connection
        self.connected: socket.socket | None = None  # after the first, which is the caller's
        self.tty = tty
        self.stdin = streams.stdin
        self.outputs = {
            STDOUT: Output("stdout", streams.stdout),
            STDERR: Output("stderr", streams.stderr),
        }
        self.say = say
        self.input = Input(ended=streams.stdin is None, finished=streams.stdin is None)
        self.rejoined: list[tuple[Rejoined, bool]] = []
        self.decoder, self.open = FrameDecoder(), True  # open: the engine has not closed the stream
        self.exit = Exit()
        self.received, self.ending = list[int](), Ending(clock)
        self.leaving = leaving
        self.keys = Matcher(leaving.keys if tty else ())
        self.late = late or Late()
        self.screen = self.late.screen or screen or Screen()
        self.left: Left | None = None
        self.hung_up = False
        self.waiting = False
        self.unwritten: CorralError | None = None
        # Docker takes a size only once the terminal is there, a moment after start; until then, try again.
        self.size_tries = RESIZE_TRIES if tty else 0
        self.wake_read, self.exit.wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        connection.setblocking(False)

    def close(self) -> None:
        # The waiting thread may still be about to write; that end stays with it.
        os.close(self.wake_read)
        if self.connected is not None:
            self.connected.close()
        if self.exit.done.is_set() or not self.waiting:
            os.close(self.exit.wake)

    def restore(self) -> None:
        """Bring the terminal back from what the program made of it."""
        if self.tty:
            with contextlib.suppress(OSError):
                os.write(self.outputs[STDOUT].descriptor, self.screen.leave())

    def signalled(self, number: int) -> None:
        self.received.append(number)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self.exit.wake, b"x")

    def run(self) -> int:
        early = self._interrupted()
        if early is None:
            self._take(self.late.ahead)
            if self.late.screen is not None:
                self._nudge()
            self.container.start()
            early = self._interrupted()
            if early is not None:
                # The program may not be there yet to hear it, so it is not only asked.
                self._woken()
                self.ending.plan(ending.INTERRUPTED_START)
            self._move()
        if self.left is not None:
            raise self.left
        if self.exit.error is not None:
            raise self.exit.error
        if self.unwritten is not None:
            raise self.unwritten
        if early is not None:
            return 128 + early
        if self.exit.code is None:
            raise EngineError("the container's end was not reported")
        return self.exit.code

    def _interrupted(self) -> int | None:
        """Return the first signal that came so far and asks for an end."""
        ends = (number for number in self.received if number in FORWARDED)
        return next((number for number in ends if number not in self.leaving.signals), None)

    def _move(self) -> None:
        self.waiting = True
        threading.Thread(target=self._wait, daemon=True).start()
        while not self._finished() and self.left is None:
            if self.size_tries:
                self.size_tries = 0 if self._resize() else self.size_tries - 1
            for name in self.ending.due():
                self._send(name)
            self._turn(self._patience())

    def _wait(self) -> None:
        try:
            self.exit.code = self._wait_for_end()
        except Exception as error:
            self.exit.error = error
        self.exit.done.set()
        self._wake()

    def _wait_for_end(self) -> int:
        while True:
            try:
                return self.container.wait()
            except EngineGoneError:
                self.say(WENT_AWAY)
                whole = not self.tty and sum(output.seen for output in self.outputs.values()) < REPLAYED
                found = self.container.rejoin(replay=whole)
                told = CAME_BACK if found.running else ENDED
                self.say(told if whole or (self.tty and found.running) else f"{told}; {MISSED}")
                self.rejoined.append((found, whole))
                self._wake()

    def _rejoin(self, found: Rejoined, whole: bool) -> None:
        """Go on with a new stream of the same container."""
        if self.connected is not None:
            self.connected.close()
        self.connected = self.connection = found.stream
        found.stream.setblocking(False)
        self.open, self.decoder = True, FrameDecoder()
        for output in self.outputs.values():
            output.again = output.seen if whole else 0
        self._take(found.ahead)
        last = self.input
        self.input = Input(last.unsent or last.pending, ended=last.finished, finished=last.finished)
        if last.finished and self.stdin is not None and not self.input.pending:
            self._half_close()
        if self.tty:
            self._nudge()

    def _nudge(self) -> None:
        """Have the program draw its screen: what is on it is the program's to say, when the size changes."""
        columns, rows = terminal.size(self.outputs[STDOUT].descriptor)
        with contextlib.suppress(EngineError):
            self.container.resize(max(columns - 1, 1), rows)
        self.size_tries = RESIZE_TRIES

    def _finished(self) -> bool:
        if not self.exit.done.is_set() or self.rejoined:
            return False
        return not self.open and not any(output.pending for output in self.outputs.values())

    def _patience(self) -> float | None:
        """Return how long to wait for something to happen (seconds), None for as long as it takes."""
        if self.exit.done.is_set():
            return None if any(output.pending for output in self.outputs.values()) else DRAIN
        waits = [self.ending.wait(), RESIZE_PAUSE if self.size_tries else None]
        return min((wait for wait in waits if wait is not None), default=None)

    def _turn(self, timeout: float | None) -> None:
        """Wait until something can be done and do it."""
        ended = self.exit.done.is_set()
        with selectors.PollSelector() as selector:
            selector.register(self.wake_read, selectors.EVENT_READ, self._woken)
            for output in self._writable():
                selector.register(
                    output.descriptor, selectors.EVENT_WRITE, lambda output=output: self._write(output)
                )
            events = self._socket_events()
            if events:
                selector.register(self.connection, events, None)
            if self.stdin is not None and not self.input.ended and not self.input.pending:
                selector.register(self.stdin, selectors.EVENT_READ, self._read_stdin)
            ready = selector.select(timeout)
            if not ready and ended and timeout is not None:
                # The container is gone and its stream stays silent: the engine forgot to close it.
                self._end_of_output()
            for key, mask in ready:
                if key.data is not None:
                    key.data()
                elif key.fileobj is self.connection:
                    # Not the one of before, which this very turn may have replaced.
                    self._socket_ready(mask)

    def _writable(self) -> list[Output]:
        found: dict[int, Output] = {}
        for output in self.outputs.values():
            if output.pending:
                found.setdefault(output.descriptor, output)
        return list(found.values())

    def _socket_events(self) -> int:
        events = 0
        if self.open and not any(output.pending for output in self.outputs.values()):
            events |= selectors.EVENT_READ
        if self.open and self.input.pending:
            events |= selectors.EVENT_WRITE
        return events

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_read, CHUNK)
        while self.rejoined:
            self._rejoin(*self.rejoined.pop(0))
        while self.received:
            self._forward(self.received.pop(0))

    def _forward(self, number: int) -> None:
        if number == signal.SIGWINCH:
            self._resize()
        elif number == signal.SIGHUP:
            self._hang_up()
        elif number in self.leaving.signals:
            self.left = Left(hung_up=False)
        else:
            self._send(signal.Signals(number).name)

    def _send(self, name: str) -> None:
        # The container may have ended this very moment.
        with contextlib.suppress(EngineError):
            self.container.kill(name)

    def _hang_up(self) -> None:
        """The terminal is gone."""
        if signal.SIGHUP in self.leaving.signals:
            self.left = Left(hung_up=True)
        elif not self.hung_up:
            self.hung_up = True
            self._send("SIGHUP")
            self.ending.plan(ending.HANG_UP)

    def _socket_ready(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._write_socket()
        if mask & selectors.EVENT_READ:
            self._read_socket()

    def _read_socket(self) -> None:
        try:
            data = self.connection.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end_of_output()
            return
        self._take(data)

    def _take(self, data: bytes) -> None:
        for stream, part in [(STDOUT, data)] if self.tty else self.decoder.feed(data):
            output = self.outputs[stream]
            fresh, output.again = part[output.again :], max(output.again - len(part), 0)
            output.seen += len(fresh)
            if self.tty:
                self.screen.feed(fresh)
            if not output.broken:
                output.pending += fresh

    def _end_of_output(self) -> None:
        self.open = False
        self.input.drop()

    def _write(self, output: Output) -> None:
        try:
            written = os.write(output.descriptor, output.pending[:PIPE_CHUNK])
        except BlockingIOError:
            return
        except OSError as error:
            self._broken(output, error)
            return
        output.pending = output.pending[written:]

    def _broken(self, output: Output, error: OSError) -> None:
        """Nobody gets the rest, so the container is made to end."""
        output.pending, output.broken = b"", True
        if error.errno == errno.EIO:
            self._hang_up()
            return
        if error.errno != errno.EPIPE:
            self.unwritten = self.unwritten or oserrors.unwritten(output.name, error)
        self._send("SIGTERM")
        self.ending.plan(ending.ASKED)

    def _read_stdin(self) -> None:
        assert self.stdin is not None  # noqa: S101 - registered only then
        try:
            data = os.read(self.stdin, CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self.input.pending, gone = self.keys.feed(data)
            if gone:
                self._write_socket()  # what was typed before them
                self.left = Left(hung_up=False)
            return
        if self.tty:
            # A raw terminal has no end of input but this one.
            self._hang_up()
        self.input.ended = self.input.finished = True
        self._half_close()

    def _write_socket(self) -> None:
        try:
            sent = self.connection.send(self.input.pending)
        except BlockingIOError:
            return
        except OSError:
            # The program closed its stdin, or ended. What it still says is read.
            self.input.drop()
            return
        self.input.pending = self.input.pending[sent:]
        if self.input.finished and not self.input.pending:
            self._half_close()

    def _half_close(self) -> None:
        if not self.input.closed:
            self.input.closed = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_WR)

    def _resize(self) -> bool:
        columns, rows = terminal.size(self.outputs[STDOUT].descriptor)
        if not columns or not rows:
            return True
        try:
            return self.container.resize(columns, rows)
        except EngineError:
            return False
