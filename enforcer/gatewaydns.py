"""Questions for names, as they arrive at the gateways of sandboxes: sockets, limits of each source, messages.

A container's resolver is Docker's, which asks the gateway out of the container's own network namespace; the
kernel leads that question here. What is said to it is decided elsewhere, by the sandbox's policy: see
``opendns`` and ``answering``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import cast

import dns.exception
import dns.flags
import dns.message
import dns.opcode
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

from enforcer.budget import Budget, BusyError, pays
from policy.container import RESOLVER_PORT
from policy.hosts import HostError, parse_host

log = logging.getLogger("corral.enforcer")

LARGEST = 512  # bytes of a question
ADDRESSES = 15  # in one answer: below 512 bytes with the longest name, so no answer is ever truncated
RATE, BURST = 100.0, 200.0  # questions a second of one source
# Of a second of this service, what one source may use to have its names compared with its policy, and what
# name servers say of them read: either may take a tenth of a second for a name that was made to be slow.
SHARE = 0.1
PENDING = 64  # questions of one source that wait for an answer
CONNECTIONS = 16  # of one source
IDLE = 10.0  # seconds
BACKLOG = 64  # connections of one sandbox that wait: they arrive at no higher rate than questions


@dataclass(frozen=True)
class Place:
    """Where questions of one sandbox arrive, and from whom they are answered."""

    bridge: str
    gateway: str
    sources: frozenset[str]


@dataclass(frozen=True)
class Reply:
    """What a question is answered: ``ttl`` in seconds, of ``addresses``."""

    code: dns.rcode.Rcode
    addresses: tuple[str, ...] = ()
    ttl: int = 0


# Given the source and a message with one question: the reply, or what finds it. What is done before that is
# awaited counts against the source.
Decide = Callable[[str, dns.message.Message], Reply | Awaitable[Reply]]


@dataclass
class _Source:
    """What one source may ask still."""

    budget: Budget = field(default_factory=lambda: Budget(RATE, BURST, PENDING))
    connections: int = 0


@dataclass
class _Listener:
    """``index``: the bridge's, which is another one when it was made anew."""

    place: Place
    index: int
    datagrams: asyncio.DatagramTransport
    stream: socket.socket
    task: asyncio.Task[None] | None = None
    arriving: Budget = field(default_factory=lambda: Budget(RATE, BURST, CONNECTIONS))
    clients: set[asyncio.Task[None]] = field(default_factory=set)

    def close(self) -> None:
        self.datagrams.close()
        for task in (*self.clients, *([self.task] if self.task is not None else [])):
            task.cancel()
        if self.task is not None:
            # Before another socket has its number.
            self.task.get_loop().remove_reader(self.stream)
        self.stream.close()


# -- pure


def question_of(wire: bytes) -> dns.message.Message | None:
    """Return a message that asks one question; None for anything else, which gets no answer."""
    if len(wire) > LARGEST:
        return None
    try:
        query = dns.message.from_wire(wire, ignore_trailing=False)
    except (dns.exception.DNSException, ValueError, struct.error):
        return None
    asks = not query.flags & dns.flags.QR and len(query.question) == 1
    return query if asks else None


def kind_of(query: dns.message.Message) -> dns.rdatatype.RdataType | None:
    """Return the type that is asked for; None when it is no plain question about the internet."""
    asked = query.question[0]
    plain = query.opcode() == dns.opcode.QUERY and asked.rdclass == dns.rdataclass.IN
    return asked.rdtype if plain else None


def name_of(query: dns.message.Message) -> str | None:
    """Return the name that is asked about, canonical; None when it is none of a public host."""
    try:
        return parse_host(query.question[0].name.to_text(omit_final_dot=True).lower(), force=True)
    except (HostError, ValueError):
        return None


def response(query: dns.message.Message, reply: Reply) -> bytes:
    """Return the answer as it travels."""
    made = dns.message.make_response(query, recursion_available=True)
    made.set_rcode(reply.code)
    rows = reply.addresses[:ADDRESSES]
    if rows:
        name = query.question[0].name
        rrset = dns.rrset.from_text_list(name, reply.ttl, dns.rdataclass.IN, dns.rdatatype.A, rows)
        made.answer.append(rrset)
    return made.to_wire(max_size=65535)


# -- effects


def bound(kind: socket.SocketKind, place: Place) -> socket.socket:
    """Return a socket at the gateway, for what arrives through its bridge alone.

    Raises:
        OSError: no such bridge or address, or another program has the port.
    """
    sock = socket.socket(socket.AF_INET, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        if kind == socket.SOCK_STREAM:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, place.bridge.encode() + b"\0")
        sock.bind((place.gateway, RESOLVER_PORT))
    except OSError:
        sock.close()
        raise
    return sock


class GatewayDns:
    """Answers at the gateways it is told to follow what ``decide`` says. Runs on one event loop.

    ``make`` and ``index`` find sockets and interfaces.
    """

    def __init__(
        self,
        decide: Decide,
        clock: Callable[[], float],
        make: Callable[[socket.SocketKind, Place], socket.socket] = bound,
        index: Callable[[str], int] = socket.if_nametoindex,
    ) -> None:
        self._decide, self._clock = decide, clock
        self._make, self._index = make, index
        self._listeners: dict[str, _Listener] = {}
        self._sources: dict[str, _Source] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.problems: dict[str, str] = {}

    def serves(self, bridge: str) -> bool:
        """Tell whether questions of a sandbox are answered."""
        return bridge in self._listeners

    async def follow(self, places: Iterable[Place]) -> None:
        """Answer for these, and for nobody else; what cannot be done is in ``problems``."""
        wanted = {place.bridge: place for place in places}
        self.problems = {}
        for bridge, listener in list(self._listeners.items()):
            place = wanted.get(bridge)
            if place is None or place.gateway != listener.place.gateway or self._moved(listener):
                self._listeners.pop(bridge).close()
            else:
                listener.place = place
        known = {source for place in wanted.values() for source in place.sources}
        self._sources = {source: kept for source, kept in self._sources.items() if source in known}
        for bridge, place in wanted.items():
            if bridge in self._listeners:
                continue
            try:
                self._listeners[bridge] = await self._listen(place)
            except OSError as error:
                where = f"{place.gateway}:{RESOLVER_PORT}"
                self.problems[bridge] = f"names cannot be answered at {where}: {error.strerror or error}"

    def _moved(self, listener: _Listener) -> bool:
        try:
            return self._index(listener.place.bridge) != listener.index
        except OSError:
            return True

    async def _listen(self, place: Place) -> _Listener:
        index = self._index(place.bridge)
        loop = asyncio.get_running_loop()
        stream = self._make(socket.SOCK_STREAM, place)
        try:
            stream.listen(BACKLOG)
            datagrams, _ = await loop.create_datagram_endpoint(
                lambda: _Datagrams(self, place.bridge), sock=self._make(socket.SOCK_DGRAM, place)
            )
        except OSError:
            stream.close()
            raise

        listener = _Listener(place, index, datagrams, stream)
        listener.task = loop.create_task(self._accept(listener))
        listener.task.add_done_callback(self._done)
        return listener

    def close(self) -> None:
        """Stop answering."""
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()
        for task in self._tasks:
            task.cancel()

    # -- questions

    def heard(self, bridge: str, wire: bytes, source: str, reply: Callable[[bytes], None]) -> None:
        """Take in a datagram; what is over the limits of its source gets no answer."""
        own = self._source(bridge, source)
        if own is None:
            return
        slot = contextlib.ExitStack()
        try:
            slot.enter_context(own.budget.slot())
        except BusyError:
            return
        if not own.budget.take(self._clock()):
            slot.close()
            return

        async def work() -> None:
            with slot:
                answer = await self._answer(own, source, wire)
                if answer is not None:
                    reply(answer)

        task = asyncio.get_running_loop().create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Whoever may ask must not be able to end the service.
            log.error("a question could not be answered", exc_info=error)

    def _source(self, bridge: str, source: str) -> _Source | None:
        listener = self._listeners.get(bridge)
        if listener is None or source not in listener.place.sources:
            return None
        return self._sources.setdefault(source, _Source())

    async def _accept(self, listener: _Listener) -> None:
        loop = asyncio.get_running_loop()
        while True:
            wait = listener.arriving.reserve(self._clock(), inf)
            if wait:
                await asyncio.sleep(wait)
            try:
                connection, peer = await loop.sock_accept(listener.stream)
            except OSError as error:
                # Out of descriptors, most likely: what there is may end meanwhile.
                log.warning("questions at %s: %s", listener.place.gateway, error)
                await asyncio.sleep(1.0)
                continue
            source = str(peer[0])
            own = self._source(listener.place.bridge, source)
            if own is None or own.connections >= CONNECTIONS:
                connection.close()
                continue
            own.connections += 1
            task = loop.create_task(self._serve(own, source, connection))
            listener.clients.add(task)
            task.add_done_callback(listener.clients.discard)
            task.add_done_callback(partial(_left, own))
            task.add_done_callback(self._done)

    async def _serve(self, own: _Source, source: str, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 12)
        try:
            with contextlib.suppress(TimeoutError, OSError, EOFError, asyncio.IncompleteReadError, BusyError):
                while True:
                    async with asyncio.timeout(IDLE):
                        size = int.from_bytes(await reader.readexactly(2), "big")
                        if size > LARGEST or not own.budget.take(self._clock()):
                            return
                        wire = await reader.readexactly(size)
                        with own.budget.slot():
                            answer = await self._answer(own, source, wire)
                        if answer is None:
                            return
                        writer.write(struct.pack("!H", len(answer)) + answer)
                        await writer.drain()
        finally:
            writer.close()

    async def _answer(self, own: _Source, source: str, wire: bytes) -> bytes | None:
        query = question_of(wire)
        if query is None:
            return None
        pays(lambda spent: own.budget.charge(spent * RATE / SHARE))
        began = self._clock()
        said = self._decide(source, query)
        own.budget.charge((self._clock() - began) * RATE / SHARE)
        return response(query, said if isinstance(said, Reply) else await said)


def _left(own: _Source, _task: asyncio.Task[None]) -> None:
    # Of a task that was cancelled before it began as well.
    own.connections -= 1


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, of: GatewayDns, bridge: str) -> None:
        self._of, self._bridge = of, bridge
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Python 3.11 does not derive its class from that one.
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        transport = self._transport
        if transport is not None:
            self._of.heard(self._bridge, data, addr[0], lambda answer: transport.sendto(answer, addr))
