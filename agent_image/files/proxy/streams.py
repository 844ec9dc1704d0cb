"""A TCP connection of which we read and write the bytes ourselves.

asyncio's transports are not used here: they read ahead, and cannot tell the end of one direction, or a reset,
to the other side as it happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct

from .waiting import Expired, within

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CHUNK = 1 << 16
CONNECT_WITHIN = 5.0
CONNECT_WITHIN_ALL = 10.0
# What was taken back is refused by a reset, and only who sends is told: a tunnel whose client waits for the
# server sends nothing of its own. A server that is away for some minutes loses no tunnel by it.
ASKED_AFTER, ASKED_EVERY, UNANSWERED = 5, 5, 60

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Stream:
    """One connection; ``sock`` does not block. One task at a time waits for it.

    ``reading``: somebody is woken by what comes, a reset too. ``gone``: it was reset.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.reading = False
        self.gone = False
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def recv(self) -> bytes:
        """Return what has come, empty at the end. Raises OSError: the connection was reset."""
        while True:
            try:
                return self.sock.recv(CHUNK)
            except (BlockingIOError, InterruptedError):
                self.reading = True
                try:
                    await ready(self.sock, reading=True)
                finally:
                    self.reading = False

    async def send(self, data: bytes) -> None:
        """Send all of it. Raises OSError: the connection was reset."""
        left = memoryview(data)
        while left:
            try:
                left = left[self.sock.send(left) :]
            except (BlockingIOError, InterruptedError):
                await ready(self.sock, reading=False)

    def end(self) -> None:
        """Say that nothing more will be sent."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close it; what was sent still arrives. Nothing happens the second time."""
        self.sock.close()

    def abort(self) -> None:
        """Close it with a reset: the other side must not take what it has for the whole."""
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.sock.close()


async def ready(sock: socket.socket, reading: bool) -> None:
    """Wait until a socket can be read, or written."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    descriptor = sock.fileno()
    add, remove = (loop.add_reader, loop.remove_reader) if reading else (loop.add_writer, loop.remove_writer)
    add(descriptor, _wake, future)
    try:
        await future
    finally:
        remove(descriptor)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def connect(addresses: Sequence[str], port: int, opened: Callable[[Stream], None]) -> Stream:
    """Return a connection to the first of these IPv4 addresses that takes one.

    ``opened`` is given it before anything is awaited again: a task that is cancelled in between leaves it to
    whom it was given.

    Raises:
        OSError: none of them does within ``CONNECT_WITHIN_ALL``; why the last one did not.
    """
    clock = asyncio.get_running_loop().time
    end = clock() + CONNECT_WITHIN_ALL
    last: OSError = OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))
    for address in addresses:
        seconds = min(CONNECT_WITHIN, end - clock())
        if seconds <= 0:
            break
        try:
            return await _connected(address, port, seconds, opened)
        except OSError as error:
            last = error
    raise last


async def _connected(address: str, port: int, seconds: float, opened: Callable[[Stream], None]) -> Stream:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        code = sock.connect_ex((address, port))
        if code == errno.EINPROGRESS:
            await _writable(sock, seconds)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        _keep_asking(sock)
        stream = Stream(sock)
        opened(stream)
    except BaseException:
        sock.close()
        raise
    return stream


def _keep_asking(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ASKED_AFTER)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASKED_EVERY)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, UNANSWERED)


async def _writable(sock: socket.socket, seconds: float) -> None:
    try:
        with within(seconds):
            await ready(sock, reading=False)
    except Expired as error:
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from error
