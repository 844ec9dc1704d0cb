"""Checks of a sandbox that reaches all public addresses: what stays closed to it, and that names work."""

from __future__ import annotations

import socket
import struct

from . import network
from .outcome import Failed, Skipped
from .reach import DNS_PORT, EMBEDDED_DNS, REACHED, not_refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .expectations import Expectations
    from .system import Check, System

PORTS = (22, 80, 443, 2375, 8080)
HTTPS = 443
REPLACED = (
    "egress.mode is open: its own resolver and its gateway answer names, as the enforcer vets them; "
    "dns-outside-closed and public-name take its place"
)


def replaced(_expected: Expectations, _system: System) -> str:
    """Stand for a check that would fail by design, and say why."""
    raise Skipped(REPLACED)


def closed_address(address: str) -> Check:
    """Return a check that an address is refused at once over TCP, and nothing comes back over UDP."""

    def check(expected: Expectations, system: System) -> str:
        return refused(expected, system, address, HTTPS)

    return check


def refused(expected: Expectations, system: System, address: str, port: int) -> str:
    """Return how the fence refuses an address; raise Failed when it does not."""
    reply = system.tcp(address, port)
    if reply.kind in REACHED:
        raise Failed(f"{address}:{port} is reachable")
    if problem := not_refused(reply):
        raise Failed(f"{address}:{port} {problem}")
    datagram = system.udp(address, port, network.query(expected.outside_name, "A"))
    if datagram.kind in REACHED:
        raise Failed(f"{address}:{port} answers over UDP")
    return f"TCP: {reply}, UDP: {datagram}"


def host_closed(expected: Expectations, system: System) -> str:
    """The host takes no connection but for its services."""
    ports = [port for port in PORTS if port not in expected.host_services]
    return "; ".join(refused(expected, system, expected.gateway, port) for port in ports[:2])


def dns_outside_closed(expected: Expectations, system: System) -> str:
    """Nobody else answers DNS, so that every answer is one that was vetted."""
    servers = [
        server
        for server in dict.fromkeys((*expected.resolvers, expected.probe[0]))
        if server != expected.gateway
    ]
    return "; ".join(refused(expected, system, server, DNS_PORT) for server in servers[:4])


def public_name(expected: Expectations, system: System) -> str:
    """A public name has an address, over UDP and TCP, and is reachable there."""
    name = expected.outside_name
    found: list[str] = []
    for way in ("UDP", "TCP"):
        message = network.query(name, "A")
        framed = struct.pack("!H", len(message)) + message
        asked = system.udp if way == "UDP" else system.tcp
        reply = asked(EMBEDDED_DNS, DNS_PORT, message if way == "UDP" else framed)
        if reply.kind != "data":
            raise Failed(f"{EMBEDDED_DNS} does not answer over {way}: {reply}")
        data = reply.data if way == "UDP" else reply.data[2:]
        code, _ = network.answer_of(message, data)
        if code == "NXDOMAIN":
            raise Skipped(f"{name} does not exist for this host")
        found = addresses(message, data)
        if code != "NOERROR" or not found:
            raise Failed(f"{name} over {way}: {code}, {len(found)} addresses")
    reply = system.tcp(found[0], HTTPS)
    if reply.kind not in REACHED:
        raise Failed(f"{name} is {found[0]}, which does not answer on {HTTPS}: {reply}")
    return f"{name} is {', '.join(found)}: {reply}"


def addresses(asked: bytes, data: bytes) -> list[str]:
    """Return the IPv4 addresses of an answer whose records begin after the question as it was asked."""
    at, found = len(asked), []
    while at + 12 <= len(data):
        # The owner is a pointer to the question, or spelt out.
        while data[at] and data[at] < 0xC0:
            at += 1 + data[at]
        at += 2 if data[at] >= 0xC0 else 1
        kind, _, _, size = struct.unpack_from("!HHIH", data, at)
        if kind == 1 and size == 4:
            found.append(socket.inet_ntoa(data[at + 10 : at + 14]))
        at += 10 + size
    return found
