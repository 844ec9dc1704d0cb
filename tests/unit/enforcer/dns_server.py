"""A real DNS server on loopback, UDP and TCP on one port, that answers from a script."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from types import TracebackType
from typing import cast

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

from enforcer.resolver import Server

# A script gets the query and whether it came over TCP; None is silence, bytes are sent as they are.
Script = Callable[[dns.message.Message, bool], dns.message.Message | bytes | None]


def reply(
    query: dns.message.Message,
    *records: str,
    rcode: dns.rcode.Rcode = dns.rcode.NOERROR,
    truncated: bool = False,
) -> dns.message.Message:
    """Answer ``query`` with records like ``"api.example 60 A 203.0.113.1"``."""
    response = dns.message.make_response(query)
    response.set_rcode(rcode)
    if truncated:
        response.flags |= dns.flags.TC
    for record in records:
        owner, ttl, kind, data = record.split()
        absolute = data if kind == "A" else data + "."
        # One set per record, so that nothing is merged, sorted or dropped before it reaches the wire.
        response.answer.append(dns.rrset.from_text(owner + ".", int(ttl), "IN", kind, absolute))
    return response


class DnsServer:
    """An async context manager; ``queries`` lists (name, "udp" or "tcp") as they came."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.queries: list[tuple[str, str]] = []
        self.messages: list[dns.message.Message] = []
        self.port = 0

    @property
    def address(self) -> Server:
        return Server("127.0.0.1", self.port)

    def answer(self, wire: bytes, tcp: bool) -> bytes | None:
        query = dns.message.from_wire(wire)
        self.messages.append(query)
        self.queries.append((query.question[0].name.to_text(), "tcp" if tcp else "udp"))
        response = self.script(query, tcp)
        if response is None or isinstance(response, bytes):
            return response
        return response.to_wire(max_size=65535)

    async def __aenter__(self) -> DnsServer:
        stream, datagrams = _pair()
        self.port = stream.getsockname()[1]
        self._tcp = await asyncio.start_server(self._serve, sock=stream)
        loop = asyncio.get_running_loop()
        self._udp, _ = await loop.create_datagram_endpoint(lambda: _Datagrams(self), sock=datagrams)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._udp.close()
        self._tcp.close()
        await self._tcp.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            (size,) = struct.unpack("!H", await reader.readexactly(2))
            wire = self.answer(await reader.readexactly(size), tcp=True)
            if wire is not None:
                writer.write(struct.pack("!H", len(wire)) + wire)
                await writer.drain()
        except (OSError, EOFError):
            pass
        finally:
            writer.close()


def _pair() -> tuple[socket.socket, socket.socket]:
    """Return a TCP and a UDP socket bound to one free port of loopback."""
    for _ in range(50):
        stream = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        stream.setblocking(False)
        datagrams.setblocking(False)
        try:
            stream.bind(("127.0.0.1", 0))
            datagrams.bind(stream.getsockname())
        except OSError:
            stream.close()
            datagrams.close()
        else:
            return stream, datagrams
    raise RuntimeError("no port is free for both TCP and UDP")


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, server: DnsServer) -> None:
        self.server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        wire = self.server.answer(data, tcp=False)
        if wire is not None:
            self.transport.sendto(wire, addr)
