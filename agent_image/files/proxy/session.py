"""One client's connection, from its first byte to its last.

CONNECT, the enforcer's word, a connection to what it gave, 200, the ClientHello, the server's answer to it;
only then is anything carried that is not looked at. Until then nothing but a hello with the right name goes
out.
"""

from __future__ import annotations

import asyncio
import contextlib

from . import answers, authority, dialer, hello, records, serverhello, streams, tunnel
from .head import BadHead, HeadReader
from .waiting import Expired, within

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from typing import Any

    from .hangup import Hangups
    from .journal import Journal
    from .streams import Stream

HEAD_WITHIN = 10.0
HELLO_WITHIN = 10.0
ANSWER_WITHIN = tunnel.IDLE
# After the client's end, for a server that has not answered its hello: no handshake comes of it any more.
GONE_WITHIN = 30.0
# After a refusal: how long and how much more is taken, so that what was said is not lost in a reset.
LINGER_WITHIN = 1.0
LINGER_BYTES = 1 << 18

MISMATCH, NO_SNI, SECOND = "sni-mismatch", "no-sni", "second-hello"
NO_HELLO, SERVER_NOT_TLS = "no-hello", "server-not-tls"
# What the client did, and its user wants to know. The enforcer has the same list.
TOLD = frozenset({MISMATCH, NO_SNI, SECOND, hello.NOT_TLS, hello.BAD_HELLO})
_BEFORE_SECOND = (records.CHANGE_CIPHER_SPEC, records.ALERT)
_LONGEST_TEXT = 300


class Refusal(Exception):
    """The client is told ``status``; ``why`` is for the log."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.why = why


class Closed(Exception):
    """An allowed connection is closed; ``reason`` is one word, ``why`` is for the log."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason
        self.why = why


class Means:
    """What a session acts with."""

    def __init__(
        self,
        journal: Journal,
        enforcer: dialer.Dialer,
        hangups: Hangups,
        connect: Callable[
            [Sequence[str], int, Callable[[Stream], None]], Awaitable[Stream]
        ] = streams.connect,
    ) -> None:
        self.journal = journal
        self.enforcer = enforcer
        self.hangups = hangups
        self.connect = connect


def check_name(said: hello.Hello, name: str, needed: bool) -> None:
    """Raise Closed unless a hello says ``name``, or nothing where that is not ``needed``."""
    if said.name is None:
        if needed:
            raise Closed(NO_SNI, "a ClientHello without a name")
        return
    try:
        same = authority.canonical(said.name) == name
    except authority.BadName:
        same = False
    if not same:
        raise Closed(MISMATCH, "a ClientHello with another name than CONNECT")


class Session:
    """Serves one client. ``ident`` stands in the log and in what the client is told."""

    def __init__(self, client: Stream, ident: str, means: Means) -> None:
        self._client = client
        self._ident = ident
        self._means = means
        self._server: Stream | None = None
        self._tunnel: tunnel.Tunnel | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cut = False
        self._leaving: asyncio.TimerHandle | None = None
        self._name = ""
        self._port = 0
        self._up = 0
        self._down = 0

    async def serve(self) -> None:
        """Do all of it, and leave nothing open. Raises nothing but CancelledError."""
        self._task = asyncio.current_task()
        self._means.hangups.watch(self._client.sock, lambda: self._hang_up(self._client), self._has_ended)
        try:
            await self._served()
        except Closed as error:
            self._abort()
            self._told("closed", reason=error.reason, why=error.why)
            await self._tell(error.reason)
        except (OSError, Expired) as error:
            self._told("reset", why=str(error))
        except asyncio.CancelledError:
            if not self._cut:
                raise
            self._told("reset", why="by its other side")
        finally:
            self._abort()

    async def _served(self) -> None:
        try:
            granted, rest = await self._requested()
        except Refusal as error:
            event = "denied" if error.status == 403 else "refused"
            self._means.journal.count(f"status_{error.status}")
            self._told(event, status=error.status, why=error.why[:_LONGEST_TEXT])
            await say(self._client, error.status, self._ident)
            self._close()
            return
        if self._server is not None:
            await self._carry(self._server, granted, rest)

    def _hang_up(self, stream: Stream) -> None:
        stream.gone = True
        if stream.reading:
            # Who reads gets what came before the reset, and then the reset.
            return
        if self._tunnel is not None:
            self._tunnel.finish(tunnel.RESET)
        elif self._task is not None:
            self._cut = True
            self._task.cancel()

    def _has_ended(self) -> None:
        # Nobody reads the client while the server is to answer, so its end is seen in no other way.
        if self._leaving is None:
            self._leaving = asyncio.get_running_loop().call_later(GONE_WITHIN, self._is_gone)

    def _is_gone(self) -> None:
        if self._tunnel is None and self._task is not None:
            self._cut = True
            self._task.cancel()

    # What is asked for.

    async def _requested(self) -> tuple[dialer.Granted, bytes]:
        """Read the request and do it, up to 200; return what came behind it too. Raises Refusal, OSError."""
        reader = await self._head()
        if reader.method != "CONNECT":
            raise Refusal(405, f"method {reader.method}")
        try:
            self._name, self._port = authority.parse(reader.target)
        except authority.BadName as error:
            raise Refusal(400, str(error)) from error
        try:
            answer = await self._means.enforcer.dial(self._name, self._port)
        except dialer.Unavailable as error:
            raise Refusal(503, f"the enforcer does not answer: {error}") from error
        if isinstance(answer, dialer.Refused):
            raise Refusal(answers.KINDS.get(answer.kind, 503), answer.text)
        try:
            await self._means.connect(answer.addresses, self._port, self._opened)
        except OSError as error:
            raise Refusal(502, str(error)) from error
        return answer, reader.rest

    async def _head(self) -> HeadReader:
        reader = HeadReader()
        try:
            with within(HEAD_WITHIN):
                while True:
                    data = await self._client.recv()
                    if not data:
                        raise ConnectionResetError("no request")
                    if reader.feed(data):
                        return reader
        except BadHead as error:
            raise Refusal(400, str(error)) from error
        except Expired as error:
            raise Refusal(408, "no request in time") from error

    def _opened(self, server: Stream) -> None:
        self._server = server
        self._means.hangups.watch(server.sock, lambda: self._hang_up(server))

    # What is allowed.

    async def _carry(self, server: Stream, granted: dialer.Granted, rest: bytes) -> None:
        """Say 200 and carry. Raises Closed, OSError, Expired."""
        with within(HELLO_WITHIN):
            await self._client.send(answers.ESTABLISHED)
        self._told("allowed")
        how = tunnel.ENDED
        checked = rest if granted.protocol == "tcp" else await self._checked(server, granted, rest)
        if checked is not None:
            self._tunnel = tunnel.Tunnel(self._client, server)
            how = await self._tunnel.run(checked)
            self._up += self._tunnel.up.moved
            self._down += self._tunnel.down.moved
        if how == tunnel.ENDED:
            self._close()
        else:
            self._abort()
        self._told(how)

    async def _checked(self, server: Stream, granted: dialer.Granted, rest: bytes) -> bytes | None:
        """Pass on a hello, and the one the server asks for again; return what the client sent behind it.

        None: the server has ended it.
        """
        first, reader = await self._hello(hello.HelloReader(), rest)
        check_name(first, self._name, granted.sni)
        await self._pass(server, bytes(reader.raw))
        wanted = await self._server_answer(server)
        if wanted is None:
            return None
        if wanted == serverhello.ON:
            return reader.rest
        skipped = (*_BEFORE_SECOND, *((records.APPLICATION_DATA,) if first.early else ()))
        try:
            second, again = await self._hello(hello.HelloReader(skipped), reader.rest)
            check_name(second, self._name, first.name is not None)
        except Closed as error:
            reason = error.reason if error.reason == NO_HELLO else SECOND
            raise Closed(reason, error.why) from error
        if (second.name is None) != (first.name is None):
            raise Closed(SECOND, "a second ClientHello with a name, after one without")
        await self._pass(server, bytes(again.raw))
        return again.rest

    async def _hello(self, reader: hello.HelloReader, data: bytes) -> tuple[hello.Hello, hello.HelloReader]:
        try:
            with within(HELLO_WITHIN):
                while True:
                    found = reader.feed(data) if data else None
                    if found:
                        return found, reader
                    data = await self._client.recv()
                    if not data:
                        raise ConnectionResetError("no hello")
        except hello.BadHello as error:
            raise Closed(error.reason, str(error)) from error
        except Expired as error:
            raise Closed(NO_HELLO, "no ClientHello in time") from error

    async def _pass(self, server: Stream, data: bytes) -> None:
        with within(ANSWER_WITHIN):
            await server.send(data)
        self._up += len(data)

    async def _server_answer(self, server: Stream) -> str | None:
        """Carry what the server sends until it is certain what it wants; None: it has ended."""
        reader = serverhello.ServerReader()
        while True:
            with within(ANSWER_WITHIN):
                data = await server.recv()
                await self._client.send(data)
            self._down += len(data)
            if not data:
                return None
            try:
                wanted = reader.feed(data)
            except records.NotTls as error:
                raise Closed(SERVER_NOT_TLS, f"the server's answer is not TLS: {error}") from error
            if wanted:
                return wanted

    # How it ends.

    async def _tell(self, reason: str) -> None:
        if reason in TOLD:
            try:
                await self._means.enforcer.tell(self._name, self._port, reason)
            except dialer.Unavailable:
                self._means.journal.count("untold")

    def _told(self, event: str, **fields: object) -> None:
        moved = {"up": self._up, "down": self._down} if self._up or self._down else {}
        for way, size in moved.items():
            self._means.journal.count(f"bytes_{way}", size)
        where = {"name": self._name, "port": self._port} if self._name else {}
        self._means.journal.event(event, id=self._ident, **where, **fields, **moved)

    def _both(self) -> list[Stream]:
        found = [self._client] if self._server is None else [self._client, self._server]
        for stream in found:
            self._means.hangups.forget(stream.sock)
        if self._leaving is not None:
            self._leaving.cancel()
        return found

    def _close(self) -> None:
        for stream in self._both():
            stream.close()

    def _abort(self) -> None:
        for stream in self._both():
            stream.abort()


async def say(client: Stream, status: int, ident: str) -> None:
    """Answer with ``status``, and take what is still coming for a moment, so that the answer is not lost."""
    with contextlib.suppress(OSError, Expired), within(LINGER_WITHIN):
        await client.send(answers.render(status, ident))
        client.end()
        left = LINGER_BYTES
        while left > 0:
            data = await client.recv()
            if not data:
                return
            left -= len(data)
