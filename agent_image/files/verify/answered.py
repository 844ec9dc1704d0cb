"""Checks of a sandbox whose permitted names are answered at its gateway, and no others."""

from __future__ import annotations

import functools
import struct

from . import network
from .opened import addresses, dns_outside_closed
from .outcome import Failed, Skipped
from .reach import CLOSED, DNS_PORT, EMBEDDED_DNS, REACHED
from .tasks import together

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .expectations import Answered, Expectations
    from .system import Check, System

REPLACED = (
    "egress.dns is answer: its resolver and its gateway answer names that the policy permits; "
    "dns-answers-only-permitted and dns-outside-closed take its place"
)
# Seconds. A name that is permitted is asked for outside, and opened, before it is answered.
ASKING = 8.0
NXDOMAIN = "NXDOMAIN"


def checks(told: Answered) -> list[tuple[str, Check]]:
    """Return the checks of where names are answered."""
    return [
        ("dns-closed", replaced),
        ("embedded-dns-closed", replaced),
        ("dns-outside-closed", dns_outside_closed),
        ("dns-answers-only-permitted", functools.partial(only_permitted, told)),
        ("dns-answers-permitted", functools.partial(permitted, told)),
    ]


def replaced(_expected: Expectations, _system: System) -> str:
    """Stand for a check that would fail by design, and say why."""
    raise Skipped(REPLACED)


def only_permitted(told: Answered, expected: Expectations, system: System) -> str:
    """A name that exists and is not permitted does not exist in here, whoever is asked and however."""
    name = told.denied
    tries = [
        (server, way, record)
        for server in (EMBEDDED_DNS, expected.gateway)
        for way in ("UDP", "TCP")
        for record in ("A", "AAAA", "TXT")
    ]
    asked = together([functools.partial(_ask, system, name, *how) for how in tries], network.WAIT * 3)
    for index, (server, way, record) in enumerate(tries):
        reply, code, records = asked[index]
        asking = f"{server} on {name} {record} over {way}"
        if reply.kind != "data":
            # Docker's resolver stands in the sandbox, and is what programs ask; the gateway is what it asks.
            if server == EMBEDDED_DNS and record == "A":
                raise Failed(f"{asking}: {reply}, not {NXDOMAIN}")
            continue
        # What it does not do for any name, it may refuse for this one.
        if records or (code != NXDOMAIN and (record == "A" or code not in CLOSED)):
            raise Failed(f"{asking}: {code}, {records} records")
    return f"{name}: {NXDOMAIN}"


def permitted(told: Answered, _expected: Expectations, system: System) -> str:
    """A name that is permitted has addresses, and they can be reached as soon as they are told."""
    if told.permitted is None:
        raise Skipped("no entry of the policy is one name that has to answer")
    name, port = told.permitted
    reply, code, _ = _ask(system, name, EMBEDDED_DNS, "UDP", "A", ASKING)
    if reply.kind != "data" or code != "NOERROR":
        raise Failed(f"{name}: {code if reply.kind == 'data' else reply}")
    found = addresses(network.query(name, "A"), reply.data)
    if not found:
        raise Failed(f"{name} has no address")
    reached = system.tcp(found[0], port)
    if reached.kind not in REACHED:
        raise Failed(f"{name} is {found[0]}, which cannot be reached on {port}: {reached}")
    return f"{name} is {', '.join(found)}: {reached}"


def _ask(
    system: System, name: str, server: str, way: str, record: str, wait: float = network.WAIT
) -> tuple[network.Reply, str, int]:
    """Return what came, the response code and the number of records."""
    message = network.query(name, record)
    if way == "UDP":
        reply = system.udp(server, DNS_PORT, message, wait)
        data = reply.data
    else:
        reply = system.tcp(server, DNS_PORT, struct.pack("!H", len(message)) + message)
        data = reply.data[2:]
    return (reply, *network.answer_of(message, data)) if reply.kind == "data" else (reply, "", 0)
