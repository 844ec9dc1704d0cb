"""A container, an engine's stream, pipes and a terminal, with the test at their other ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import socket
import struct
import termios
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from corral.attach import Rejoined, Streams
from policy.errors import EngineGoneError

PATIENCE = 20


def frame(stream: int, payload: bytes) -> bytes:
    return bytes([stream, 0, 0, 0]) + len(payload).to_bytes(4, "big") + payload


@dataclass
class FakeContainer:
    """Ends when the test says so; records what it was told."""

    on_start: Callable[[], None] = lambda: None
    started: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    told: threading.Condition = field(default_factory=threading.Condition)
    signals: list[str] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    no_terminal_yet: int = 0
    code: int = 0
    error: Exception | None = None
    # Each is set when Docker goes away once more; with the stream that it gives when it is back.
    outages: list[threading.Event] = field(default_factory=list)
    streams: list[tuple[socket.socket, bool] | tuple[socket.socket, bool, bytes]] = field(
        default_factory=list
    )
    replays: list[bool] = field(default_factory=list)

    def start(self) -> None:
        self.on_start()
        self.started.set()

    def wait(self) -> int:
        if self.outages:
            self.outages.pop(0).wait(PATIENCE)
            raise EngineGoneError("Docker went away")
        assert self.ended.wait(PATIENCE), "the container never ended"
        if self.error:
            raise self.error
        return self.code

    def rejoin(self, *, replay: bool) -> Rejoined:
        self.replays.append(replay)
        if not self.streams:
            raise EngineGoneError("Docker does not come back")
        return Rejoined(*self.streams.pop(0))

    def kill(self, name: str) -> None:
        with self.told:
            self.signals.append(name)
            self.told.notify_all()

    def resize(self, columns: int, rows: int) -> bool:
        with self.told:
            if self.no_terminal_yet:
                self.no_terminal_yet -= 1
                return False
            self.sizes.append((columns, rows))
            self.told.notify_all()
            return True

    def end(self, code: int = 0) -> None:
        self.code = code
        self.ended.set()

    def wait_told(self, condition: Callable[[], bool]) -> None:
        with self.told:
            assert self.told.wait_for(condition, PATIENCE)


@dataclass
class Engine:
    """The far end of the attach stream, driven by a thread of the test."""

    far: socket.socket

    def read(self, size: int) -> bytes:
        self.far.settimeout(PATIENCE)
        data = b""
        while len(data) < size:
            part = self.far.recv(size - len(data))
            if not part:
                break
            data += part
        return data

    def read_all(self) -> bytes:
        self.far.settimeout(PATIENCE)
        parts = []
        while part := self.far.recv(65536):
            parts.append(part)
        return b"".join(parts)


@contextlib.contextmanager
def script(action: Callable[[], None]) -> Iterator[list[BaseException]]:
    """Run the engine's part beside the loop; what fails there fails the test."""
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            action()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    yield failures
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert not failures, failures


class Pipes:
    """stdin, stdout and stderr of the command, with the test at the other ends."""

    def __init__(self) -> None:
        self.stdin, self.keyboard = os.pipe()
        self.out, self.stdout = os.pipe()
        self.err, self.stderr = os.pipe()
        self.streams = Streams(self.stdin, self.stdout, self.stderr)
        self._open = {self.stdin, self.keyboard, self.out, self.stdout, self.err, self.stderr}

    def close(self, *descriptors: int) -> None:
        for descriptor in descriptors or tuple(self._open):
            self._open.discard(descriptor)
            os.close(descriptor)

    def finished(self) -> tuple[bytes, bytes]:
        self.close(self.stdout, self.stderr)
        return drain(self.out), drain(self.err)


def drain(descriptor: int) -> bytes:
    parts = []
    while part := os.read(descriptor, 65536):
        parts.append(part)
    return b"".join(parts)


class Tty:
    """A real pseudo-terminal; the test holds the side of the person."""

    def __init__(self) -> None:
        self.person, self.side = pty.openpty()
        self.set_size(100, 30)
        # As in a real process: descriptors of their own for the same terminal.
        self.streams = Streams(self.side, os.dup(self.side), os.dup(self.side))

    def set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.side, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            assert select.select([self.person], [], [], PATIENCE)[0], data
            data += os.read(self.person, size - len(data))
        return data

    def close(self) -> None:
        for descriptor in (self.person, self.side, self.streams.stdout, self.streams.stderr):
            os.close(descriptor)
