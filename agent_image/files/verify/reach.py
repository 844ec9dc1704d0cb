"""Checks of what the agent reaches over the network."""

from __future__ import annotations

import functools
import struct

from . import network
from .outcome import Failed
from .tasks import together

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from .expectations import Expectations
    from .system import Check, System

    Asked = tuple[str, str, str]  # server, UDP or TCP, record type

HOST_ALIAS = "corral-host"
EMBEDDED_DNS = "127.0.0.11"
DNS_PORT = 53
MAX_SERVERS = 8
REJECT_WITHIN = 1.0
# What a resolver says that has learnt nothing about the name. After NXDOMAIN, somebody has been asked.
CLOSED = frozenset({"FORMERR", "SERVFAIL", "NOTIMP", "REFUSED"})
REACHED = frozenset({"connected", "data", "closed"})
# Seconds. A relay accepts at once, and closes again when nothing listens behind it.
LINGER = 0.3
PEER_PORTS = (8080, 8081, 8443, 8765, 443)
IPV6_CONF = "/proc/sys/net/ipv6/conf"
IPV6_ADDRESSES = "/proc/net/if_inet6"


def unlisted_host_blocked(expected: Expectations, system: System) -> str:
    """An address that no policy allows is refused at once over TCP, and nothing comes back over UDP."""
    address, port = expected.probe
    reply = system.tcp(address, port)
    if reply.kind in REACHED:
        raise Failed(f"{address}:{port} is reachable")
    if problem := not_refused(reply):
        raise Failed(f"{address}:{port} {problem}")
    datagram = system.udp(address, port, network.query(expected.outside_name, "A"))
    if datagram.kind in REACHED:
        raise Failed(f"{address}:{port} answers over UDP")
    return f"TCP: {reply}, UDP: {datagram}"


def not_refused(reply: network.Reply) -> str:
    """Return why a reply to a connection is not the fence's refusal, or nothing.

    The fence answers with a reset, at once. Any router on the way may say that it knows no way.
    """
    if reply.kind == "no-route":
        return f"has no route, so nothing is proven: {reply}"
    if reply.kind == "unreachable":
        return f"is not refused by the fence but unreachable behind it, so nothing is proven: {reply}"
    if reply.kind != "refused" or reply.seconds > REJECT_WITHIN:
        return f"is not refused but left waiting: {reply}"
    return ""


def dns_closed(expected: Expectations, system: System) -> str:
    """Nobody answers DNS: the gateway, an outside address, the host's resolvers, and the container's."""
    known = [expected.gateway, expected.probe[0], *expected.resolvers, *_nameservers(system)]
    servers = [server for server in dict.fromkeys(known) if server != EMBEDDED_DNS][:MAX_SERVERS]
    replies = _ask_all(system, servers, expected.outside_name)
    for (server, way, record), reply, _ in replies:
        if reply.kind == "data":
            raise Failed(f"{server} answers a query for {record} over {way}")
        if reply.kind in REACHED:
            raise Failed(f"{server} accepts connections on port {DNS_PORT}")
    # Silence alone proves nothing: perhaps none of them is there, or answers DNS to anybody.
    outside = expected.probe[0]
    tries = [reply for (server, way, _), reply, _ in replies if (server, way) == (outside, "TCP")]
    problems = [not_refused(reply) for reply in tries]
    if all(problems):
        raise Failed(f"nobody answers, yet {outside}:{DNS_PORT} {problems[0]}")
    return f"no answer from {', '.join(servers)}; {outside}:{DNS_PORT} is refused"


def embedded_dns_closed(expected: Expectations, system: System) -> str:
    """Docker's own resolver, which asks from the host's network, finds nobody to ask."""
    codes = set()
    for (_, way, record), reply, asked in _ask_all(system, [EMBEDDED_DNS], expected.outside_name):
        if reply.kind == "data":
            code, answers = network.answer_of(asked, reply.data[2:] if way == "TCP" else reply.data)
            if answers or code not in CLOSED:
                raise Failed(f"{expected.outside_name} {record} over {way}: {code}, {answers} records")
            codes.add(code)
    return ", ".join(sorted(codes)) or "no answer"


def _nameservers(system: System) -> list[str]:
    try:
        lines = [line.split() for line in system.read("/etc/resolv.conf").splitlines()]
    except OSError:
        return []
    return [words[1] for words in lines if len(words) > 1 and words[0] == "nameserver" and "." in words[1]]


def _ask_all(system: System, servers: Sequence[str], name: str) -> list[tuple[Asked, network.Reply, bytes]]:
    """Ask every server for every record type over UDP and TCP, at the same time."""

    def ask(how: Asked) -> tuple[Asked, network.Reply, bytes]:
        server, way, record = how
        message = network.query(name, record)
        if way == "UDP":
            return how, system.udp(server, DNS_PORT, message), message
        return how, system.tcp(server, DNS_PORT, struct.pack("!H", len(message)) + message), message

    kinds = [(way, record) for way in ("UDP", "TCP") for record in network.RECORD_TYPES]
    tasks = [functools.partial(ask, (server, *kind)) for server in servers for kind in kinds]
    return together(tasks, network.WAIT * 2)


def host_service(port: int) -> Check:
    """Return a check that a service of the host is reachable under its name, which is the gateway's."""

    def check(expected: Expectations, system: System) -> str:
        found = hosts(system).get(HOST_ALIAS, [])
        if found != [expected.gateway]:
            raise Failed(f"{HOST_ALIAS} is {', '.join(found) or 'unknown'}, not {expected.gateway}")
        reply = system.tcp(expected.gateway, port, linger=LINGER)
        if reply.kind == "closed":
            raise Failed(f"nothing listens on 127.0.0.1:{port} of the host, or it hangs up at once: {reply}")
        if reply.kind not in REACHED:
            raise Failed(f"{HOST_ALIAS}:{port}: {reply}")
        return str(reply)

    return check


def peer_unreachable(address: str) -> Check:
    """Return a check that another sandbox's container takes no connection on a sample of ports."""

    def check(_: Expectations, system: System) -> str:
        tries = [functools.partial(system.tcp, address, port) for port in PEER_PORTS]
        replies = dict(zip(PEER_PORTS, together(tries, network.WAIT * 2)))  # noqa: B905 - Python 3.9
        for port, reply in replies.items():
            if reply.kind in REACHED:
                raise Failed(f"{address}:{port} is reachable")
            if reply.kind == "no-route":
                raise Failed(f"{address}:{port} has no route, so nothing is proven: {reply}")
        return f"{address}: " + ", ".join(f"{port} {reply.kind}" for port, reply in replies.items())

    return check


def pinned_name(name: str) -> Check:
    """Return a check that the hosts file has exactly the addresses that are allowed for the name."""

    def check(expected: Expectations, system: System) -> str:
        found = sorted(hosts(system).get(name.lower(), []))
        if found != expected.names[name]:
            wanted = ", ".join(expected.names[name]) or "absent"
            raise Failed(f"is {', '.join(found) or 'absent'}, not {wanted}")
        return ", ".join(found) or "absent"

    return check


def hosts(system: System) -> dict[str, list[str]]:
    """Return name -> addresses of /etc/hosts; the C library's resolver could hang and is not asked."""
    found: dict[str, list[str]] = {}
    for line in system.read("/etc/hosts").splitlines():
        words = line.partition("#")[0].split()
        for name in words[1:]:
            known = found.setdefault(name.lower(), [])
            if words[0] not in known:
                known.append(words[0])
    return found


def ipv6_disabled(_: Expectations, system: System) -> str:
    """IPv6 is off for every interface there is or will be, or not in the kernel at all."""
    interfaces = system.listing(IPV6_CONF)
    if not interfaces:
        return "the kernel has no IPv6"
    for name in interfaces:
        if system.read(f"{IPV6_CONF}/{name}/disable_ipv6").strip() != "1":
            raise Failed(f"on for {name}")
    return f"off for {', '.join(interfaces)}"


def no_ipv6_address(_: Expectations, system: System) -> str:
    """No interface has an IPv6 address, the loopback interface included: off means off there as well."""
    if not system.there(IPV6_ADDRESSES):
        return "the kernel has no IPv6"
    lines = [line.split() for line in system.read(IPV6_ADDRESSES).splitlines() if line.strip()]
    if lines:
        raise Failed(", ".join(f"{words[-1]} has {words[0]}" for words in lines))
    return "none"
