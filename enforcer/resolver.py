"""One name to its IPv4 addresses, asked of the host's name servers over asyncio.

What comes back is checked for being an answer to our question (id, question, from the server asked) and for
lying on the name's own CNAME chain; which addresses a name may open is not decided here.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address

import dns.asyncquery
import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.query
import dns.rcode
import dns.rdataclass
import dns.rdatatype

from enforcer.pinmodel import Answer, Failure, FailureKind, address_order
from policy.hosts import parse_host

__all__ = ["Answer", "Failure", "Limits", "Resolver", "Server", "exchange", "system_servers"]

EDNS_PAYLOAD = 1232
LARGEST = 8192  # bytes of an answer over TCP or TLS: 500 addresses
TRUSTED = 300.0  # seconds; to read the host's certificates takes a tenth of one
DNS_PORT, DOT_PORT = 53, 853
_TLS = "tls://"
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_BRACKETED = re.compile(r"\[([^\]]+)\](?::(\d{1,5}))?")
_V4_WITH_PORT = re.compile(r"([0-9.]+):(\d{1,5})")


@dataclass(frozen=True)
class Server:
    """A name server: IPv4 or IPv6 address (a zone index is kept), port.

    ``tls`` is the name in its certificate: it is asked over TLS (RFC 7858) and in no other way.
    """

    address: str
    port: int = 53
    tls: str | None = None

    @classmethod
    def parse(cls, text: str) -> Server:
        """Read ``192.0.2.1``, ``192.0.2.1:5353``, ``2001:db8::1``, ``[2001:db8::1]:5353``, or any of these as
        ``tls://192.0.2.1#dns.example``.

        Raises:
            ValueError: anything else.
        """
        if text.startswith(_TLS):
            where, _, name = text.removeprefix(_TLS).partition("#")
            server = cls.parse(where)
            if parse_host(name, force=True) != name:
                raise ValueError(f"{text!r} has no name of a certificate")
            return cls(server.address, DOT_PORT if server.port == DNS_PORT else server.port, name)
        match = _BRACKETED.fullmatch(text) or _V4_WITH_PORT.fullmatch(text)
        host, port = (match[1], int(match[2] or DNS_PORT)) if match else (text, DNS_PORT)
        address = ip_address(host)
        if not 0 < port < 65536:
            raise ValueError(f"{text!r} has no valid port")
        return cls(str(address), port)

    def __str__(self) -> str:
        if self.tls is not None:
            port = DNS_PORT if self.port == DOT_PORT else self.port
            return f"{_TLS}{Server(self.address, port)}#{self.tls}"
        if self.port == DNS_PORT:
            return self.address
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


@dataclass(frozen=True)
class Limits:
    """Seconds, and counts. A query is tried ``tries`` times, and at least once at each server."""

    per_try: float = 2.0
    tries: int = 3
    total: float = 6.0
    hops: int = 8


Exchange = Callable[[dns.message.Message, Server, float], Awaitable[dns.message.Message]]


async def exchange(query: dns.message.Message, server: Server, timeout: float) -> dns.message.Message:
    """Send one query over UDP, and over TCP when the answer is truncated, or over TLS; at most ``timeout`` s.

    Datagrams that are no answer to the query, or from elsewhere, are ignored and waiting goes on.

    Raises:
        TimeoutError, OSError, dns.exception.DNSException
    """
    async with asyncio.timeout(timeout):
        if server.tls is not None:
            return await _stream(query, server)
        try:
            return await dns.asyncquery.udp(
                query,
                server.address,
                port=server.port,
                ignore_unexpected=True,
                ignore_errors=True,
                raise_on_truncation=True,
            )
        except dns.message.Truncated:
            return await _stream(query, server)


async def _stream(query: dns.message.Message, server: Server) -> dns.message.Message:
    """Ask over TCP or TLS; an answer of 64 KiB takes half a second to parse, so it is not read at all."""
    since = int(asyncio.get_running_loop().time() // TRUSTED)
    context = _trust(since, os.environ.get("SSL_CERT_FILE")) if server.tls is not None else None
    reader, writer = await asyncio.open_connection(
        server.address, server.port, ssl=context, server_hostname=server.tls
    )
    try:
        wire = query.to_wire()
        writer.write(len(wire).to_bytes(2, "big") + wire)
        size = int.from_bytes(await reader.readexactly(2), "big")
        if size > LARGEST:
            raise dns.exception.TooBig
        response = dns.message.from_wire(await reader.readexactly(size))
        if not query.is_response(response):
            raise dns.query.BadResponse
        return response
    finally:
        writer.close()


@lru_cache(maxsize=1)
def _trust(_since: int, _file: str | None) -> ssl.SSLContext:
    return ssl.create_default_context()


class _FailedError(Exception):
    def __init__(self, kind: FailureKind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


class Resolver:
    """Resolves names; safe to call for many names at once.

    ``servers`` may be assigned at any time and holds from the next query on. ``clock`` gives the time that
    goes into ``Answer.at``. ``query`` sends one message to one server, see ``exchange``.
    """

    def __init__(
        self,
        servers: tuple[Server, ...],
        clock: Callable[[], float],
        query: Exchange = exchange,
        limits: Limits | None = None,
    ) -> None:
        self.servers = servers
        self._clock = clock
        self._query = query
        self._limits = limits or Limits()

    async def resolve(self, name: str) -> Answer | Failure:
        """Resolve ``name`` (lower case, no final dot, absolute). Whatever the network does is a Failure."""
        last: list[_FailedError] = []
        try:
            async with asyncio.timeout(self._limits.total):
                addresses, ttl = await self._chase(_absolute(name), last)
        except TimeoutError:
            heard = last[-1] if last else None
            detail = f"no answer within {self._limits.total:g} s"
            if heard is not None and heard.kind != "timeout":
                return Failure(name, heard.kind, f"{heard.detail}; {detail}")
            return Failure(name, "timeout", f"{detail} from {self._names_of_servers()}")
        except _FailedError as error:
            return Failure(name, error.kind, error.detail)
        return Answer(name, addresses, ttl, self._clock())

    def _names_of_servers(self) -> str:
        return ", ".join(str(server) for server in self.servers)

    async def _chase(self, name: dns.name.Name, last: list[_FailedError]) -> tuple[tuple[str, ...], int]:
        """Follow the chain from ``name``, asking again wherever an answer stops before an address."""
        chain = [name]
        ttls: list[int] = []
        while True:
            response = await self._ask(chain[-1], last)
            asked = len(chain)
            addresses = self._walk(response, chain, ttls)
            if response.rcode() == dns.rcode.NXDOMAIN:
                raise _FailedError("nxdomain", f"{_shown(chain[-1])} does not exist")
            if addresses:
                return addresses, min(ttls)
            if len(chain) == asked:
                raise _FailedError("empty", f"{_shown(chain[-1])} has no IPv4 address")

    def _walk(
        self, response: dns.message.Message, chain: list[dns.name.Name], ttls: list[int]
    ) -> tuple[str, ...]:
        """Extend ``chain`` by the CNAMEs of one response; return the addresses at its end, if there are any.

        Records of any other owner are not looked at.
        """
        while True:
            owner = chain[-1]
            found = response.get_rrset(dns.message.ANSWER, owner, dns.rdataclass.IN, dns.rdatatype.A)
            if found is not None and len(found):
                ttls.append(found.ttl)
                return tuple(sorted({record.address for record in found}, key=address_order))
            alias = response.get_rrset(dns.message.ANSWER, owner, dns.rdataclass.IN, dns.rdatatype.CNAME)
            if alias is None or not len(alias):
                return ()
            target = alias[0].target
            if target in chain:
                raise _FailedError("loop", f"CNAME of {_shown(owner)} leads back to {_shown(target)}")
            if len(chain) > self._limits.hops:
                raise _FailedError("loop", f"more than {self._limits.hops} CNAMEs from {_shown(chain[0])}")
            ttls.append(alias.ttl)
            chain.append(target)

    async def _ask(self, name: dns.name.Name, last: list[_FailedError]) -> dns.message.Message:
        """Return the first usable response (NOERROR or NXDOMAIN), taking the servers in turn."""
        servers = self.servers
        if not servers:
            raise _FailedError("network", "no name server is configured")
        failures: list[_FailedError] = []
        for attempt in range(max(self._limits.tries, len(servers))):
            server = servers[attempt % len(servers)]
            try:
                return await self._ask_server(name, server)
            except _FailedError as error:
                failures.append(error)
                last.append(error)
        # A server that said something tells more than one that said nothing.
        raise next((error for error in reversed(failures) if error.kind != "timeout"), failures[-1])

    async def _ask_server(self, name: dns.name.Name, server: Server) -> dns.message.Message:
        response = await self._send(name, server, edns=True)
        if response.rcode() in (dns.rcode.FORMERR, dns.rcode.NOTIMP):
            # A server from before EDNS.
            response = await self._send(name, server, edns=False)
        rcode = response.rcode()
        if rcode in (dns.rcode.NOERROR, dns.rcode.NXDOMAIN) and not response.flags & dns.flags.TC:
            return response
        kind: FailureKind = "refused" if rcode == dns.rcode.REFUSED else "servfail"
        what = "a truncated answer" if response.flags & dns.flags.TC else dns.rcode.to_text(rcode)
        raise _FailedError(kind, f"{server} answered {what} for {_shown(name)}")

    async def _send(self, name: dns.name.Name, server: Server, edns: bool) -> dns.message.Message:
        query = dns.message.make_query(name, dns.rdatatype.A)
        if edns:
            query.use_edns(0, payload=EDNS_PAYLOAD)
        try:
            return await self._query(query, server, self._limits.per_try)
        except (TimeoutError, dns.exception.Timeout) as error:
            raise _FailedError("timeout", f"{server} did not answer for {_shown(name)}") from error
        except (OSError, EOFError) as error:
            raise _FailedError("network", f"{server}: {error or type(error).__name__}") from error
        except dns.exception.DNSException as error:
            raise _FailedError("servfail", f"{server} answered garbage: {type(error).__name__}") from error


def system_servers(text: str) -> tuple[Server, ...]:
    """Return the servers of a resolv.conf, in order, each once; 127.0.0.1 when it names none, as in glibc.

    Only ``nameserver`` lines count: names are absolute here, so search lists and options have no meaning.
    Lines that do not parse are skipped.
    """
    servers: dict[Server, None] = {}
    for line in text.splitlines():
        words = re.split(r"[#;]", line, maxsplit=1)[0].split()
        if len(words) >= 2 and words[0] == "nameserver":
            try:
                servers[Server.parse(words[1])] = None
            except ValueError:
                continue
    return tuple(servers) or (Server("127.0.0.1"),)


def _absolute(name: str) -> dns.name.Name:
    labels = name.split(".")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise _FailedError("refused", f"{name!r} is not a DNS name")
    return dns.name.Name([label.encode("ascii") for label in labels] + [b""])


def _shown(name: dns.name.Name) -> str:
    return name.to_text(omit_final_dot=True)
