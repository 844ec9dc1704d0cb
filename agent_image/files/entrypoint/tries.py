"""Connections and datagrams over IPv4, many at the same time, each of which ends in a bounded time."""

from __future__ import annotations

import errno
import select
import socket
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Seconds. Longer than the kernel waits before it repeats a lost SYN.
WAIT = 1.2
REACHED = frozenset({"connected", "data", "closed"})
_KINDS = {errno.ECONNREFUSED: "refused", errno.ENETUNREACH: "no-route", errno.ETIMEDOUT: "timeout"}
_SIZE = 65535


class Try:
    """One TCP connection or one UDP datagram, its answer, and what came of it.

    With a payload, it is sent and one answer is read (over TCP one with its length before it, as DNS has it).
    Without, ``linger`` says how many seconds a TCP connection has to last. ``wait`` bounds the whole.

    kind: connected, data, closed (accepted, then ended without a word), refused, no-route, unreachable, or
    timeout; empty until it is over. seconds: how long that took. data: what was received. code: errno or 0.
    """

    def __init__(
        self,
        address: str,
        port: int,
        payload: bytes = b"",
        *,
        udp: bool = False,
        wait: float = WAIT,
        linger: float = 0.0,
    ) -> None:
        self.address, self.port, self.payload = address, port, payload
        self.udp, self.wait, self.linger = udp, wait, linger
        self.kind, self.seconds, self.data, self.code = "", 0.0, b"", 0
        self._connecting = not udp
        self._began = self.until = 0.0

    def __str__(self) -> str:
        name = errno.errorcode.get(self.code, "")
        return f"{self.kind}{f' ({name})' if name else ''} after {self.seconds * 1000:.0f} ms"

    def start(self) -> int:
        """Send the first packet; return the events to wait for."""
        self.connection = socket.socket(socket.AF_INET, socket.SOCK_DGRAM if self.udp else socket.SOCK_STREAM)
        self.connection.setblocking(False)
        self._began = time.monotonic()
        self.until = self._began + self.wait
        code = self.connection.connect_ex((self.address, self.port))
        if code not in {0, errno.EINPROGRESS}:
            self._fail(code)
        elif self.udp:
            self._attempt(self._send)
        return select.POLLOUT if self._connecting else select.POLLIN

    def go_on(self) -> None:
        """Something has happened: take it into account. From now on only what can be read is of interest."""
        if not self._connecting:
            self._attempt(self._receive)
            return
        code = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._fail(code)
            return
        self._connecting = False
        if self.payload:
            self._attempt(self._send)
        elif self.linger:
            self.until = time.monotonic() + self.linger
        else:
            self._end("connected")

    def late(self) -> None:
        """End because time is up."""
        self._end("data" if self.data else "timeout" if self.udp or self._connecting else "connected")

    def _send(self) -> None:
        self.connection.send(self.payload)

    def _receive(self) -> None:
        piece = self.connection.recv(_SIZE)
        self.data += piece
        whole = len(self.data) >= 2 and len(self.data) - 2 >= int.from_bytes(self.data[:2], "big")
        if self.udp or self.linger or not piece or whole:
            self._end("data" if self.data or self.udp else "closed")

    def _attempt(self, act: Callable[[], None]) -> None:
        try:
            act()
        except BlockingIOError:
            pass
        except OSError as problem:
            self._fail(problem.errno or errno.EIO)

    def _fail(self, code: int) -> None:
        self.code = code
        # Who refuses does it with another error: what is reset had been accepted, even if nobody saw it.
        accepted = not self.udp and (not self._connecting or code == errno.ECONNRESET)
        self._end("closed" if accepted else _KINDS.get(code, "unreachable"))

    def _end(self, kind: str) -> None:
        self.kind, self.seconds = kind, time.monotonic() - self._began


def exchange(tries: Sequence[Try]) -> None:
    """Make all tries at the same time; return when each of them is over."""
    poll = select.poll()
    running: dict[int, Try] = {}
    for one in tries:
        events = one.start()
        if one.kind:
            one.connection.close()
        else:
            running[one.connection.fileno()] = one
            poll.register(one.connection, events)
    while running:
        left = min(one.until for one in running.values()) - time.monotonic()
        # Rounded up: a wait that is cut to whole milliseconds would spin.
        for number, _ in poll.poll(max(0, int(left * 1000) + 1)):
            running[number].go_on()
            poll.modify(number, select.POLLIN)
        now = time.monotonic()
        for number, one in list(running.items()):
            if not one.kind and now >= one.until:
                one.late()
            if one.kind:
                poll.unregister(number)
                one.connection.close()
                del running[number]
