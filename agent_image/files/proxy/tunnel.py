"""Carries bytes both ways until both directions have ended, one is reset, or nothing moves for too long.

What one side does not take is not read from the other: at most one piece waits in each direction.
"""

from __future__ import annotations

import asyncio
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .streams import Stream

IDLE = 900.0

ENDED, RESET, IDLED = "ended", "reset", "idle"

# How much is read at once: much is quicker. Where much waits already, little, and memory has a bound.
PIECE = 1 << 18
SMALL_PIECE = 1 << 14
MUCH = 1 << 23

# One for all connections: what is not sent at once is copied.
_BUFFER = memoryview(bytearray(PIECE))


class _Way:
    """One direction: from one socket into another."""

    # Of all directions of all tunnels: bytes that were read and not taken yet.
    waiting = 0

    def __init__(self, tunnel: Tunnel, source: Stream, sink: Stream) -> None:
        self.moved = 0
        self.over = False
        self._tunnel = tunnel
        self._loop = tunnel.loop
        self._stream = source
        self._source = source.sock
        self._sink = sink.sock
        self._pending: memoryview | None = None
        self._writing = False
        self._at_end = False

    def begin(self, first: bytes) -> None:
        """Carry on after ``first``, which was read already."""
        if first:
            self._deliver(memoryview(first))
        else:
            self._read_on()

    def stop(self) -> None:
        """Leave the sockets alone."""
        self._read_no_more()
        if self._writing:
            self._loop.remove_writer(self._sink)
        self._writing = False
        self._wait(None)

    def _wait(self, pending: memoryview | None) -> None:
        before = len(self._pending) if self._pending is not None else 0
        _Way.waiting += (len(pending) if pending is not None else 0) - before
        self._pending = pending

    def _read_on(self) -> None:
        if not self._stream.reading:
            self._stream.reading = True
            self._loop.add_reader(self._source, self._readable)

    def _read_no_more(self) -> None:
        if self._stream.reading:
            self._stream.reading = False
            self._loop.remove_reader(self._source)

    def _readable(self) -> None:
        try:
            size = self._source.recv_into(_BUFFER, PIECE if _Way.waiting < MUCH else SMALL_PIECE)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._tunnel.finish(RESET)
            return
        self._tunnel.moving()
        if size:
            self._deliver(_BUFFER[:size])
            return
        self._read_no_more()
        self._at_end = True
        self._end()

    def _deliver(self, data: memoryview) -> None:
        try:
            sent = self._sink.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self._tunnel.finish(RESET)
            return
        self.moved += sent
        if sent == len(data):
            self._wait(None)
            if self._writing:
                self._loop.remove_writer(self._sink)
                self._writing = False
            if self._at_end:
                self._end()
            else:
                self._read_on()
            return
        if self._stream.gone:
            # Whoever is not read again would never be missed.
            self._tunnel.finish(RESET)
            return
        # A piece of the shared buffer has to be copied; of our own copy, a piece is enough.
        self._wait(memoryview(bytes(data[sent:])) if self._pending is None else data[sent:])
        self._read_no_more()
        if not self._writing:
            self._writing = True
            self._loop.add_writer(self._sink, self._writable)

    def _writable(self) -> None:
        self._tunnel.moving()
        if self._pending is not None:
            self._deliver(self._pending)

    def _end(self) -> None:
        try:
            self._sink.shutdown(socket.SHUT_WR)
        except OSError:
            self._tunnel.finish(RESET)
            return
        self.over = True
        self._tunnel.one_is_over()


class Tunnel:
    """Between two connections. Whoever made it closes them: it only says how it ended."""

    def __init__(self, client: Stream, server: Stream, idle: float = IDLE) -> None:
        self.loop = asyncio.get_running_loop()
        self._idle = idle
        self._ended: asyncio.Future[str] = self.loop.create_future()
        self.up = _Way(self, client, server)
        self.down = _Way(self, server, client)
        self._last = self.loop.time()
        self._timer = self.loop.call_at(self._last + idle, self._look)

    async def run(self, up: bytes = b"") -> str:
        """Carry ``up``, which the client sent already, and all that follows; return ENDED, RESET or IDLED."""
        try:
            self.down.begin(b"")
            self.up.begin(up)
            return await self._ended
        finally:
            self._timer.cancel()
            self.up.stop()
            self.down.stop()

    def moving(self) -> None:
        """Note that something moved."""
        self._last = self.loop.time()

    def one_is_over(self) -> None:
        """End it when the other direction is over too."""
        if self.up.over and self.down.over:
            self.finish(ENDED)

    def finish(self, how: str) -> None:
        """End it, now."""
        if not self._ended.done():
            self._ended.set_result(how)
            self.up.stop()
            self.down.stop()

    def _look(self) -> None:
        due = self._last + self._idle
        if self.loop.time() >= due:
            self.finish(IDLED)
        else:
            self._timer = self.loop.call_at(due, self._look)
