"""Tells of connections that were reset, or whose other side has ended, while nobody reads them.

Backpressure means not reading, and who does not read does not learn that the other side is gone. The kernel
says so all the same: an epoll that waits for no data is still told of errors, and of an end.
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
    """Watches sockets for resets and ends, in a loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._called: dict[int, tuple[Callable[[], None], Callable[[], object]]] = {}
        loop.add_reader(self._epoll.fileno(), self._look)

    def watch(
        self, sock: socket.socket, call: Callable[[], None], ended: Callable[[], object] = bool
    ) -> None:
        """Have ``call`` called when the connection is reset, once, until ``forget``.

        ``ended`` is called when the other side sends nothing more, perhaps several times; of what it sent
        before, some may be unread.
        """
        self._epoll.register(sock.fileno(), select.EPOLLET | select.EPOLLRDHUP)
        self._called[sock.fileno()] = (call, ended)

    def forget(self, sock: socket.socket) -> None:
        """Watch a socket no more; to be called before it is closed. Nothing happens the second time."""
        descriptor = sock.fileno()
        if self._called.pop(descriptor, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(descriptor)

    def _look(self) -> None:
        for descriptor, events in self._epoll.poll(0, _AT_ONCE):
            called = self._called.get(descriptor)
            # Both directions at their end is a hang-up too, and nothing to be told.
            if called is not None and events & select.EPOLLERR:
                called[0]()
            elif called is not None and events & select.EPOLLRDHUP:
                called[1]()

    def close(self) -> None:
        """Watch nothing any more."""
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
