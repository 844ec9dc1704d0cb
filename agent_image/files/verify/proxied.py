"""Checks of a sandbox that asks its proxy for names: that it is there, denies, and is the only way."""

from __future__ import annotations

import functools
import re

from . import network
from .opened import refused
from .outcome import Failed, Skipped
from .reach import REACHED, hosts
from .tasks import together

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from .expectations import Expectations, Proxy
    from .system import Check, System

ALIAS = "proxy"
# Seconds. What is permitted is resolved and opened before it is connected; a refusal has to ask the service.
ASKING, REFUSING = 12.0, 4.0
MALFORMED, DENIED, NO_METHOD, NOT_REACHED, NOT_RESOLVED = 400, 403, 405, 502, 504
# Of the host and of the proxy itself; a sample.
HOST_PORTS = (22, 80, 8442, 8444)
OWN_PORTS = (8443, 443, 80)
SAMPLE = 8


def checks(proxy: Proxy) -> list[tuple[str, Check]]:
    """Return the checks of a sandbox that has a proxy."""
    return [
        ("proxy-answers", functools.partial(answers, proxy)),
        ("proxy-denies", functools.partial(denies, proxy)),
        ("proxy-permits", functools.partial(permits, proxy)),
        ("proxy-checks-sni", functools.partial(checks_sni, proxy)),
        ("proxy-is-the-only-way", functools.partial(only_way, proxy)),
    ]


def answers(proxy: Proxy, expected: Expectations, system: System) -> str:
    """The proxy is where the hosts file says it is, and something speaks HTTP behind its relay."""
    found = hosts(system).get(ALIAS, [])
    if found != [expected.gateway]:
        raise Failed(f"{ALIAS} is {', '.join(found) or 'unknown'}, not {expected.gateway}")
    reply = _said(proxy, expected, system, b"GET / HTTP/1.1\r\nHost: proxy\r\n\r\n")
    if reply.kind == "closed":
        raise Failed(f"{_where(proxy)}: nothing listens behind its relay, or it hangs up: {reply}")
    if reply.kind != "data":
        raise Failed(f"{_where(proxy)}: {reply}")
    if not network.status_of(reply.data):
        raise Failed(f"{_where(proxy)} does not speak HTTP: {_shown(reply.data)}")
    return f"{_where(proxy)}: {network.status_of(reply.data)}"


def denies(proxy: Proxy, expected: Expectations, system: System) -> str:
    """What it may not be asked for gets its own refusal: another name, an address, a method."""
    tries: list[tuple[bytes, int]] = [
        (_connect(proxy.denied, 443), DENIED),
        (_connect(expected.probe[0], expected.probe[1]), MALFORMED),
        (_connect("[2001:db8::1]", 443), MALFORMED),
        (_connect("127.0.0.1", 22), MALFORMED),
        (_connect(f"{proxy.denied}@{proxy.denied}", 443), MALFORMED),
        (_connect(proxy.denied, 0), MALFORMED),
        (f"GET http://{proxy.denied}/ HTTP/1.1\r\nHost: {proxy.denied}\r\n\r\n".encode(), NO_METHOD),
    ]
    asked = [functools.partial(_said, proxy, expected, system, request) for request, _ in tries]
    replies = together(asked, REFUSING * 2)
    for index, (request, wanted) in enumerate(tries):
        line, reply = request.split(b" HTTP/", 1)[0].decode(), replies[index]
        if reply.kind != "data":
            raise Failed(f"{line}: {reply}, not {wanted}")
        if network.status_of(reply.data) != wanted:
            raise Failed(f"{line}: {_shown(reply.data)}, not {wanted}")
        problem = _odd_body(reply.data, wanted)
        if problem:
            raise Failed(f"{line}: {problem}")
    return f"{len(tries)} requests were refused, each for its own reason"


def _odd_body(answer: bytes, status: int) -> str:
    """Return what is wrong with the text of a refusal: one line of the proxy's own, that repeats nothing."""
    body = answer.partition(b"\r\n\r\n")[2]
    own = re.fullmatch(b"%d [ -~]+ \\(request [0-9a-zA-Z-]+\\)\n" % status, body)
    return "" if own else f"refused in words that are not the proxy's: {_shown(body) or 'none'}"


def permits(proxy: Proxy, expected: Expectations, system: System) -> str:
    """A name of the policy is connected when it is asked for: others are refused because they are others."""
    place, reply, _ = _asked(proxy, expected, system, b"")
    status = network.status_of(reply.data)
    if reply.kind == "data" and status in {NOT_REACHED, NOT_RESOLVED}:
        raise Skipped(f"{place} is permitted, and does not answer now: {_shown(reply.data)}")
    if reply.kind != "data" or status != network.HTTP_OK:
        raise Failed(f"{place}: {_shown(reply.data) if reply.kind == 'data' else reply}")
    return f"{place}: {status}"


def checks_sni(proxy: Proxy, expected: Expectations, system: System) -> str:
    """A TLS connection that names another server than was asked for is closed, and nobody answers it."""
    place, reply, after = _asked(proxy, expected, system, network.client_hello(proxy.denied))
    if after is None:
        raise Skipped(f"{place} was not connected, see proxy-permits: {_shown(reply.data) or reply}")
    if after.kind == "data":
        raise Failed(f"{place}: a connection to it that asks for {proxy.denied} is answered")
    if after.kind != "closed":
        raise Failed(f"{place}: a connection to it that asks for {proxy.denied} is not closed: {after}")
    return f"{place}: asking there for {proxy.denied} ends the connection"


def only_way(proxy: Proxy, expected: Expectations, system: System) -> str:
    """Nothing else of the host, not the proxy's container, and no address that only the proxy may reach."""
    ports = [port for port in HOST_PORTS if port not in expected.host_services]
    # One after the other: the kernel sends few refusals at once to one address.
    for port in ports:
        refused(expected, system, expected.gateway, port)
    for address, port in proxy.only[:SAMPLE]:
        refused(expected, system, address, port)
    if proxy.address:
        tries = [functools.partial(system.tcp, proxy.address, port) for port in OWN_PORTS]
        replies = together(tries, network.WAIT * 2)
        for index, port in enumerate(OWN_PORTS):
            if replies[index].kind in REACHED:
                raise Failed(f"the proxy's container takes connections on {proxy.address}:{port}")
            if replies[index].kind == "no-route":
                raise Failed(f"{proxy.address} has no route, so nothing is proven: {replies[index]}")
    only = ", ".join(address for address, _ in proxy.only[:SAMPLE])
    shut = f"{expected.gateway} ({', '.join(map(str, ports))}), the proxy's container"
    return f"closed: {shut}, {only or 'and the proxy may reach no address now'}"


def _where(proxy: Proxy) -> str:
    return f"{ALIAS}:{proxy.port}"


def _said(proxy: Proxy, expected: Expectations, system: System, request: bytes) -> network.Reply:
    return system.converse(expected.gateway, proxy.port, request, wait=REFUSING)[0]


def _asked(
    proxy: Proxy, expected: Expectations, system: System, then: bytes
) -> tuple[str, network.Reply, network.Reply | None]:
    """Ask for a permitted name; return it, the answer, and what came of what followed."""
    if proxy.permitted is None:
        raise Skipped("no entry of the policy is one name that is reached with TLS")
    name, port = proxy.permitted
    answered = system.converse(expected.gateway, proxy.port, _connect(name, port), then, ASKING)
    return (f"{name}:{port}", *answered)


def _connect(host: str, port: int) -> bytes:
    return f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()


def _shown(data: bytes) -> str:
    lines: Sequence[str] = data[:200].decode("ascii", "replace").splitlines()
    return next(iter(lines), "")
