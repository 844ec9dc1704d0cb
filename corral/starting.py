"""Starting a container that nobody is attached to, and waiting until its gate has let the program in."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from corral.frames import FrameDecoder
from corral.screen import harmless
from policy.errors import CorralError, EngineError

# The last line of the gate (agent_image.files.entrypoint): what comes after it is the program's.
PASSED = b"corral-firewall: egress policy applied"
# Seconds: the gate takes four at most, and a busy machine its time.
PATIENCE = 60.0
# A program that ends within this has not started: a missing one, a wrong option.
EARLY = 1.0
TOLD = 20
# What a user sees of it.
GATE, READY = "gate: closed and reachable as the policy says", "ready: the program runs"


class Starting(Protocol):
    """What is needed of the container. Every method may raise EngineError."""

    def start(self) -> None:
        """Start it."""

    def wait(self) -> int:
        """Block until it has ended and return its exit code."""


class _Watch:
    """What the container says while it starts."""

    def __init__(
        self,
        connection: socket.socket,
        tty: bool,
        show: Callable[[str], None],
        seen: Callable[[bytes], None],
    ) -> None:
        self._connection = connection
        self._decoder = None if tty else FrameDecoder()
        self._show = show
        self._seen = seen
        self._partial = b""
        self.passed = False
        self.ended = False
        self.lines: list[str] = []

    def read(self, timeout: float) -> None:
        """Wait for output for so long, and take it."""
        with selectors.PollSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            if not selector.select(timeout):
                return
        try:
            data = self._connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.ended = not data
        parts = [data] if self._decoder is None else [part for _, part in self._decoder.feed(data)]
        for part in parts:
            self._seen(part)
            self._take(part)

    def _take(self, data: bytes) -> None:
        *whole, self._partial = (self._partial + data)[-65536:].split(b"\n")
        for line in whole:
            text = harmless(line, colour=False).decode("utf-8", "replace").rstrip("\r")
            self.lines = [*self.lines[-TOLD:], text]
            if not self.passed:
                self._show(text)
                self.passed = line.rstrip(b"\r") == PASSED
                # What is told of a program that ends is its own.
                self.lines = [] if self.passed else self.lines


def start(
    container: Starting,
    connection: socket.socket,
    *,
    tty: bool,
    fetched: threading.Event,
    show: Callable[[str], None],
    seen: Callable[[bytes], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
    early: float = EARLY,
    ready: Callable[[Sequence[str]], bool] = lambda _: True,
    step: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext,
) -> None:
    """Start a container and return once its program runs.

    Args:
        container: created, not started.
        connection: the engine's stream of its output, already open.
        tty: whether it has a terminal.
        fetched: set when its secrets are in it.
        show: takes the lines of the gate.
        seen: takes all output.
        clock: seconds, monotonic.
        early: seconds in which a program that ends has not started.
        ready: says by the program's lines so far whether it is what was waited for.
        step: is entered for GATE, then for READY.

    Raises:
        CorralError: it ended, or the gate did not open, or the program did not become ready.
        EngineError: Docker refused.
    """
    connection.setblocking(False)
    watch = _Watch(connection, tty, show, seen)
    until = clock() + PATIENCE
    with step(GATE):
        container.start()
        while not watch.passed:
            _more(container, watch, until - clock(), "the gate did not open")
    with step(READY):
        while not (fetched.is_set() and ready(watch.lines)):
            late = "the program was not ready" if fetched.is_set() else "the gate did not open"
            _more(container, watch, until - clock(), late)
        until = clock() + early
        while (left := until - clock()) > 0:
            watch.read(left)
            if watch.ended:
                raise _ended(container, watch)


def _more(container: Starting, watch: _Watch, left: float, late: str) -> None:
    if watch.ended:
        raise _ended(container, watch)
    if left <= 0:
        raise CorralError(f"{late} within {PATIENCE:g} s", "corral verify says more")
    watch.read(0.05 if watch.passed else 1.0)


def _ended(container: Starting, watch: _Watch) -> CorralError:
    try:
        code: object = container.wait()
    except EngineError:
        code = "unknown"
    if not watch.passed:
        return CorralError("the gate did not open, so nothing was started", "its lines above say why")
    said = "".join(f"\n  | {line}" for line in watch.lines[-TOLD:] if line)
    return CorralError(
        f"the program ended at once (exit code {code}){said}", "corral run -- PROGRAM tries it"
    )
