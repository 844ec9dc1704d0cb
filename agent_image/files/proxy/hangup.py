"""Tells of connections that were reset while nobody reads them.

Backpressure means not reading, and who does not read does not learn that the other side is gone. The kernel
says so all the same: an epoll that waits for nothing is still told of errors.
"""

from __future__ import annotations

import contextlib
import select
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

_AT_ONCE = 256


class Hangups:
    """Watches sockets for resets, in a loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._called: dict[int, Callable[[], None]] = {}
        loop.add_reader(self._epoll.fileno(), self._look)

    def watch(self, sock: socket.socket, call: Callable[[], None]) -> None:
        """Have ``call`` called when the connection is reset, once, until ``forget``."""
        self._epoll.register(sock.fileno(), select.EPOLLET)
        self._called[sock.fileno()] = call

    def forget(self, sock: socket.socket) -> None:
        """Watch a socket no more; to be called before it is closed. Nothing happens the second time."""
        descriptor = sock.fileno()
        if self._called.pop(descriptor, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(descriptor)

    def _look(self) -> None:
        for descriptor, events in self._epoll.poll(0, _AT_ONCE):
            # Both directions at their end is a hang-up too, and nothing to be told.
            call = self._called.get(descriptor) if events & select.EPOLLERR else None
            if call is not None:
                call()

    def close(self) -> None:
        """Watch nothing any more."""
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
