"""The gate of a container without a network of its own: that it has none, or that nothing is promised."""

from __future__ import annotations

import json
import os
import socket

from .tries import Try, exchange

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NONE, HOST = "none", "host"
LOOPBACK = "lo"
# Name, then what was received and sent.
INTERFACES = "/proc/self/net/dev"
ROUTES = "/proc/self/net/route"
FLAGS = "/sys/class/net/{}/flags"
UP = 1
# What some kernel modules put into every new network namespace. Down, nothing passes them, and putting one up
# takes a capability.
FALLBACKS = frozenset(
    {"erspan0", "gre0", "gretap0", "ip6_vti0", "ip6gre0", "ip6tnl0", "ip_vti0", "sit0", "tunl0"}
)
NOT_ENFORCED = "NOT ENFORCED: this container is on the host's own network; nothing of the fence is in its way"


class Apart:
    """What CORRAL_GATE says of such a container: its connection, and (address, port) that must not answer."""

    def __init__(self, connection: str, probe: tuple[str, int]) -> None:
        self.connection, self.probe = connection, probe


def parse(text: str) -> Apart | None:
    """Return what the variable says; None when it is about a sandbox with a network.

    Raises:
        Exception: it says anything that is not exactly understood.
    """
    body = json.loads(text)
    if not isinstance(body, dict) or "connection" not in body:
        return None
    if set(body) != {"connection", "probe"} or body["connection"] not in (NONE, HOST):
        raise ValueError(f"not a connection with a probe: {body!r}")
    address, port = body["probe"]["address"], body["probe"]["port"]
    socket.inet_pton(socket.AF_INET, address)
    if type(port) is not int or not 0 < port < 65536:
        raise ValueError(f"not a port: {port!r}")
    return Apart(body["connection"], (address, port))


def read(path: str) -> str:
    """Return a file's text."""
    with open(path, encoding="ascii", errors="replace") as file:  # noqa: PTH123 - pathlib costs 10 ms
        return file.read()


def interfaces(text: str) -> list[str]:
    """Return the names in /proc/net/dev: two lines of headings, then a name, a colon and numbers a line."""
    return [line.rpartition(":")[0].strip() for line in text.splitlines()[2:] if ":" in line]


def others(read: Callable[[str], str] = read) -> list[str]:
    """Return the interfaces beside the loopback one that something could pass."""
    found = []
    for name in interfaces(read(INTERFACES)):
        if name == LOOPBACK:
            continue
        down = os.sep not in name and not int(read(FLAGS.format(name)), 16) & UP
        if name not in FALLBACKS or not down:
            found.append(name)
    return found


def routes(text: str) -> int:
    """Return how many routes /proc/net/route has, below its heading."""
    return len([line for line in text.splitlines()[1:] if line.strip()])


def problems(
    policy: Apart,
    read: Callable[[str], str] = read,
    attempt: Callable[[Sequence[Try]], None] = exchange,
) -> list[str]:
    """Return why a container that is to have no network may have one."""
    found = []
    try:
        extra = others(read)
        if LOOPBACK not in interfaces(read(INTERFACES)):
            found.append("there is not even a loopback interface, so nothing is proven")
        if extra:
            found.append(f"not only lo: {', '.join(extra)} — isolation broken")
        if routes(read(ROUTES)):
            found.append("there are routes — isolation broken")
    except (OSError, ValueError) as error:
        found.append(f"the interfaces cannot be read: {error}")
    address, port = policy.probe
    tries = [Try(address, port), Try(address, port, b"corral", udp=True)]
    attempt(tries)
    found += [
        f"{'UDP' if one.udp else 'TCP'} to {address}:{port} does not fail for want of a route: {one}"
        for one in tries
        if one.kind != "no-route"
    ]
    return found


def run(
    policy: Apart,
    say: Callable[[str], None],
    read: Callable[[str], str] = read,
    attempt: Callable[[Sequence[Try]], None] = exchange,
) -> bool:
    """Check what can be checked, say what came of it, return whether the program may start."""
    if policy.connection == HOST:
        say(NOT_ENFORCED)
        return True
    wrong = problems(policy, read, attempt)
    for problem in wrong:
        say(f"ERROR: {problem}")
    if not wrong:
        say("OK: only lo, no route, nothing can be reached")
    return not wrong
