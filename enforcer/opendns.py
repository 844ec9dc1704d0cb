"""DNS for sandboxes whose policy says ``open``: asked at the gateway of their bridge, every answer vetted.

A container's resolver is Docker's, which asks the gateway out of the container's own network namespace; the
kernel leads that question here. Only questions for the addresses of a name are answered: other types would
not be vetted, and none of them is needed to connect. CNAMEs are followed here and not shown, so nobody has a
reason to ask for a name that leads on to elsewhere. What cannot be prevented is that the names asked for are
seen by the servers that answer for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import cast

import dns.exception
import dns.flags
import dns.message
import dns.opcode
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

from enforcer.pinmodel import Answer, Failure
from enforcer.vetting import Verdict
from policy.container import RESOLVER_PORT
from policy.hosts import HostError, parse_host

log = logging.getLogger("corral.enforcer")

LARGEST = 512  # bytes of a question
ADDRESSES = 15  # in one answer: below 512 bytes with the longest name, so no answer is ever truncated
LONGEST_TTL = 300  # seconds
FAILURE_TTL = 5.0
REMEMBERED = 2048  # names
RATE, BURST = 100.0, 200.0  # questions a second of one source
PENDING = 64  # questions of one source that wait for an answer
CONNECTIONS = 16  # of one source
IDLE = 10.0  # seconds

Result = Answer | Failure


@dataclass(frozen=True)
class Place:
    """Where questions of one sandbox arrive, and from whom they are answered."""

    bridge: str
    gateway: str
    sources: frozenset[str]


@dataclass(frozen=True)
class Refusal:
    """An address in the answer for ``name`` that vetting refused; it was left out."""

    source: str
    name: str
    address: str
    reason: str


@dataclass
class _Budget:
    """What one source may ask still."""

    tokens: float = BURST
    at: float = 0.0
    pending: int = 0
    connections: int = 0

    def take(self, now: float) -> bool:
        self.tokens = min(BURST, self.tokens + RATE * max(0.0, now - self.at))
        self.at = now
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


@dataclass
class _Listener:
    """``index``: the bridge's, which is another one when it was made anew."""

    place: Place
    index: int
    datagrams: asyncio.DatagramTransport
    streams: asyncio.Server
    clients: set[asyncio.StreamWriter] = field(default_factory=set)

    def close(self) -> None:
        self.datagrams.close()
        self.streams.close()
        for client in list(self.clients):
            client.close()


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


def name_of(query: dns.message.Message) -> str | None:
    """Return the name whose IPv4 addresses are asked for, canonical; None when it is another question."""
    asked = query.question[0]
    if asked.rdtype != dns.rdatatype.A or asked.rdclass != dns.rdataclass.IN:
        return None
    try:
        return parse_host(asked.name.to_text(omit_final_dot=True).lower(), force=True)
    except (HostError, ValueError):
        return None


def refused_kind(query: dns.message.Message) -> dns.rcode.Rcode | None:
    """Return the response code of a question that nobody is asked; None when its name is to be resolved."""
    asked = query.question[0]
    if query.opcode() != dns.opcode.QUERY or asked.rdclass != dns.rdataclass.IN:
        return dns.rcode.NOTIMP
    if asked.rdtype == dns.rdatatype.AAAA:
        # There is no IPv6 in a sandbox: the name has no such address, whatever it is.
        return dns.rcode.NOERROR
    if asked.rdtype != dns.rdatatype.A:
        return dns.rcode.NOTIMP
    # Single labels, addresses and names of local zones are not public names.
    return None if name_of(query) is not None else dns.rcode.NXDOMAIN


def response(
    query: dns.message.Message, code: dns.rcode.Rcode, addresses: Iterable[str] = (), ttl: int = 0
) -> bytes:
    """Return the answer as it travels."""
    made = dns.message.make_response(query, recursion_available=True)
    made.set_rcode(code)
    rows = list(addresses)[:ADDRESSES]
    if rows:
        name = query.question[0].name
        made.answer.append(dns.rrset.from_text_list(name, ttl, dns.rdataclass.IN, dns.rdatatype.A, rows))
    return made.to_wire(max_size=65535)


def judge(
    result: Result, vet: Callable[[str], Verdict]
) -> tuple[dns.rcode.Rcode, list[str], list[tuple[str, str]]]:
    """Return the response code, the addresses that may be told, and (address, reason) of the others."""
    if isinstance(result, Failure):
        codes = {"nxdomain": dns.rcode.NXDOMAIN, "empty": dns.rcode.NOERROR}
        return codes.get(result.kind, dns.rcode.SERVFAIL), [], []
    verdicts = [(address, vet(address)) for address in result.addresses]
    good = [address for address, verdict in verdicts if verdict]
    bad = [(address, verdict.reason) for address, verdict in verdicts if not verdict]
    # A name with refused addresses only does not exist here: programs give up at once.
    return (dns.rcode.NOERROR if good else dns.rcode.NXDOMAIN), good, bad


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


class OpenDns:
    """Answers at the gateways it is told to follow. Runs on one event loop.

    ``ask`` resolves a name, ``vet`` judges an address, ``told`` hears of each refusal and ``known`` of each
    name with the addresses that were told. ``make`` and ``index`` find sockets and interfaces.
    """

    def __init__(
        self,
        ask: Callable[[str], Awaitable[Result]],
        vet: Callable[[str], Verdict],
        clock: Callable[[], float],
        told: Callable[[Refusal], None],
        known: Callable[[str, list[str]], None] = lambda _name, _addresses: None,
        make: Callable[[socket.SocketKind, Place], socket.socket] = bound,
        index: Callable[[str], int] = socket.if_nametoindex,
    ) -> None:
        self._ask, self._vet, self._clock, self._told, self._known = ask, vet, clock, told, known
        self._make, self._index = make, index
        self._listeners: dict[str, _Listener] = {}
        self._budgets: dict[str, _Budget] = {}
        self._answers: OrderedDict[str, tuple[float, Result]] = OrderedDict()
        self._asking: dict[str, asyncio.Task[Result]] = {}
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
        sources = {source for place in wanted.values() for source in place.sources}
        self._budgets = {source: budget for source, budget in self._budgets.items() if source in sources}
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
            datagrams, _ = await loop.create_datagram_endpoint(
                lambda: _Datagrams(self, place.bridge), sock=self._make(socket.SOCK_DGRAM, place)
            )
        except OSError:
            stream.close()
            raise

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._serve(place.bridge, reader, writer)

        return _Listener(
            place, index, datagrams, await asyncio.start_server(serve, sock=stream, limit=1 << 12)
        )

    def close(self) -> None:
        """Stop answering."""
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()
        for task in (*self._tasks, *self._asking.values()):
            task.cancel()

    # -- questions

    def heard(self, bridge: str, wire: bytes, source: str, reply: Callable[[bytes], None]) -> None:
        """Take in a datagram; what is over the limits of its source gets no answer."""
        budget = self._budget(bridge, source)
        if budget is None or budget.pending >= PENDING or not budget.take(self._clock()):
            return
        budget.pending += 1

        async def work() -> None:
            try:
                answer = await self._answer(source, wire)
                if answer is not None:
                    reply(answer)
            finally:
                budget.pending -= 1

        task = asyncio.get_running_loop().create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Whoever may ask must not be able to end the service.
            log.error("a question could not be answered", exc_info=error)

    def _budget(self, bridge: str, source: str) -> _Budget | None:
        listener = self._listeners.get(bridge)
        if listener is None or source not in listener.place.sources:
            return None
        return self._budgets.setdefault(source, _Budget(at=self._clock()))

    async def _serve(self, bridge: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        source = str(peer[0]) if peer else ""
        budget, listener = self._budget(bridge, source), self._listeners.get(bridge)
        if budget is None or listener is None or budget.connections >= CONNECTIONS:
            writer.close()
            return
        budget.connections += 1
        listener.clients.add(writer)
        try:
            with contextlib.suppress(TimeoutError, OSError, EOFError, asyncio.IncompleteReadError):
                while True:
                    async with asyncio.timeout(IDLE):
                        size = int.from_bytes(await reader.readexactly(2), "big")
                        if size > LARGEST or not budget.take(self._clock()):
                            return
                        answer = await self._answer(source, await reader.readexactly(size))
                        if answer is None:
                            return
                        writer.write(struct.pack("!H", len(answer)) + answer)
                        await writer.drain()
        finally:
            budget.connections -= 1
            listener.clients.discard(writer)
            writer.close()

    async def _answer(self, source: str, wire: bytes) -> bytes | None:
        query = question_of(wire)
        if query is None:
            return None
        code = refused_kind(query)
        name = name_of(query)
        if code is not None or name is None:
            return response(query, dns.rcode.NXDOMAIN if code is None else code)
        result, left = await self._resolved(name)
        # Judged each time: what was asked a minute ago may be this host's by now.
        code, good, bad = judge(result, self._vet)
        for address, reason in bad:
            self._told(Refusal(source, name, address, reason))
        if good:
            self._known(name, good)
        return response(query, code, good, left)

    async def _resolved(self, name: str) -> tuple[Result, int]:
        """Return what is known about a name, and for how many seconds that may be kept."""
        kept = self._answers.get(name)
        if kept is not None and kept[0] > self._clock():
            return kept[1], int(kept[0] - self._clock())
        task = self._asking.get(name)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._find(name))
            self._asking[name] = task
        result = await asyncio.shield(task)
        until = self._answers.get(name, (0.0, result))[0]
        return result, max(0, int(until - self._clock()))

    async def _find(self, name: str) -> Result:
        try:
            result = await self._ask(name)
        finally:
            self._asking.pop(name, None)
        life = FAILURE_TTL if isinstance(result, Failure) else float(min(result.ttl, LONGEST_TTL))
        self._answers.pop(name, None)
        self._answers[name] = (self._clock() + life, result)
        while len(self._answers) > REMEMBERED:
            self._answers.popitem(last=False)
        return result


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, of: OpenDns, bridge: str) -> None:
        self._of, self._bridge = of, bridge
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Python 3.11 does not derive its class from that one.
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        transport = self._transport
        if transport is not None:
            self._of.heard(self._bridge, data, addr[0], lambda answer: transport.sendto(answer, addr))
