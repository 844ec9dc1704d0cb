"""Accepts clients: so many at a time, and those that are too many are told so."""

from __future__ import annotations

import asyncio
import os
import socket

from . import session
from .streams import Stream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

MOST = 256
# Of those that are too many, how many are told; the others are closed.
MOST_TOLD = 64
AT_ONCE = 64
# When there is no descriptor left, waiting is all that helps.
PAUSE = 0.5


class Server:
    """Serves what connects to ``listening``, a socket that does not block."""

    def __init__(self, listening: socket.socket, means: session.Means, most: int = MOST) -> None:
        self._listening = listening
        self._means = means
        self._most = most
        self._served: set[asyncio.Task[Any]] = set()
        self._told: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        # Of this process and this connection; a number alone would come again after a restart.
        self._run = os.urandom(3).hex()
        self._number = 0
        self._accepting()

    @property
    def active(self) -> int:
        """How many clients are served."""
        return len(self._served)

    def _accepting(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                sock, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                self._means.journal.count("unaccepted")
                self._loop.remove_reader(self._listening)
                self._pause = self._loop.call_later(PAUSE, self._accepting)
                return
            self._take(sock)

    def _take(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._number += 1
        ident = f"{self._run}-{self._number}"
        self._means.journal.count("connections")
        try:
            client = Stream(sock)
        except OSError:
            sock.close()
            return
        if len(self._served) < self._most:
            self._start(self._served, session.Session(client, ident, self._means).serve())
            return
        self._means.journal.count("status_503")
        self._means.journal.event("refused", id=ident, status=503, why="too many connections")
        if len(self._told) < MOST_TOLD:
            self._start(self._told, _say_busy(client, ident))
        else:
            client.close()

    def _start(self, group: set[asyncio.Task[Any]], work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        group.add(task)
        task.add_done_callback(group.discard)

    async def close(self) -> None:
        """Accept no more, and end all that is going on. Nothing happens the second time."""
        if self._pause is not None:
            self._pause.cancel()
        if self._listening.fileno() >= 0:
            self._loop.remove_reader(self._listening)
            self._listening.close()
        going_on = [*self._served, *self._told]
        for task in going_on:
            task.cancel()
        await asyncio.gather(*going_on, return_exceptions=True)


async def _say_busy(client: Stream, ident: str) -> None:
    try:
        await session.say(client, 503, ident)
    finally:
        client.close()
