"""What the writer accepts and answers: typed tuples, validated again field by field. Pure.

Nothing here trusts the enforcer: it parses DNS answers and Docker events, the writer must not be able to be
talked into more than elements for the caller's own bridges.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import AddressValueError, IPv4Address, IPv4Network
from types import MappingProxyType
from typing import Any

PROTOCOL_VERSION = 2
BRIDGE = re.compile(r"corral-[0-9a-f]{8}")
COMMENT = re.compile(r"[A-Za-z0-9_. :/-]{0,200}")
PROTOCOLS = {"tcp": 6, "udp": 17}

MAX_REQUEST = 8 << 20  # bytes
MAX_SANDBOXES = 1024
MAX_PER_SOURCE = 1024
MAX_ELEMENTS = 65536
MAX_SOURCES = 16384

# What no element may ever lead to, whoever asks. Documentation ranges are absent on purpose: they lead
# nowhere, and a lab lives in them.
NEVER = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "168.63.129.16/32",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
)
# These stay closed even where the root-owned configuration permits a range around them: what leads to this
# host, to its link, or to a cloud's metadata.
ABSOLUTE = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",
        "100.100.100.200/32",
        "127.0.0.0/8",
        "168.63.129.16/32",
        "169.254.0.0/16",
        "192.0.0.192/32",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
)


class Refused(Exception):
    """A request or a part of it is not acceptable; the text goes back to the caller."""


@dataclass(frozen=True, order=True)
class Element:
    """One permission: packets of ``proto`` from ``src`` to ``port`` of ``dst``; addresses are IPv4 text."""

    src: str
    proto: str
    port: int
    dst: str

    def row(self) -> list[object]:
        """Return the element as it travels in JSON."""
        return [self.src, self.proto, self.port, self.dst]


# Seconds that elements live without renewal, of those that live shorter than others.
Lives = Mapping[Element, int]
NO_LIVES: Lives = MappingProxyType({})


@dataclass(frozen=True)
class Entry:
    """An element as the kernel holds it; ``timeout`` is the rest of its life in seconds."""

    element: Element
    timeout: int
    packets: int
    comment: str

    def row(self) -> list[object]:
        """Return the entry as it travels in JSON."""
        return [*self.element.row(), self.timeout, self.packets, self.comment]


HALF = -1


@dataclass(frozen=True)
class Open:
    """A source that may reach all public addresses, as the kernel holds it; see ``Entry``."""

    src: str
    timeout: int
    packets: int
    comment: str

    def row(self) -> list[object]:
        """Return it as it travels in JSON."""
        return [self.src, self.timeout, self.packets, self.comment]


@dataclass(frozen=True)
class SandboxRequest:
    """A bridge that the caller says is its own."""

    bridge: str
    subnet: IPv4Network
    gateway: IPv4Address


@dataclass(frozen=True)
class DeniedRequest:
    """What a caller has of the records of one life of the writer, and whose packets it wants counted."""

    epoch: str
    after: int
    sources: frozenset[str]
    tallies: bool


@dataclass(frozen=True)
class ApplyRequest:
    """The full desired state of one caller. The comments are shown to people, never interpreted.

    ``lives``: seconds after which some pins are to be gone by themselves, unless they are asked for again.
    """

    sandboxes: tuple[SandboxRequest, ...]
    pins: dict[Element, str]
    host: dict[Element, str]
    lives: dict[Element, int] = field(default_factory=dict)
    open: dict[str, str] = field(default_factory=dict)


def _address(value: Any, what: str) -> IPv4Address:
    if not isinstance(value, str):
        raise Refused(f"{what} is not a string")
    try:
        address = IPv4Address(value)
    except AddressValueError as error:
        raise Refused(f"{what}: {error}") from None
    return address


def _sandbox(row: Any) -> SandboxRequest:
    if not isinstance(row, dict) or set(row) != {"bridge", "subnet", "gateway"}:
        raise Refused("a sandbox is an object of bridge, subnet and gateway")
    bridge, subnet = row["bridge"], row["subnet"]
    if not isinstance(bridge, str) or not BRIDGE.fullmatch(bridge):
        raise Refused("bridge must be named corral-<8 hex digits>")
    if not isinstance(subnet, str):
        raise Refused("subnet is not a string")
    try:
        network = IPv4Network(subnet)
    except ValueError as error:
        raise Refused(f"subnet: {error}") from None
    return SandboxRequest(bridge, network, _address(row["gateway"], "gateway"))


def parse_elements(rows: Any, what: str) -> dict[Element, str]:
    """Return typed elements with their comments.

    Raises:
        Refused: not a list of ``[src, proto, port, dst, comment]``, or over the limits.
    """
    if not isinstance(rows, list) or len(rows) > MAX_ELEMENTS:
        raise Refused(f"{what} must be a list of at most {MAX_ELEMENTS} elements")
    elements: dict[Element, str] = {}
    per_source: dict[str, int] = {}
    for row in rows:
        if not isinstance(row, list) or len(row) != 5:
            raise Refused(f"{what}: an element is [src, proto, port, dst, comment]")
        src, proto, port, dst, comment = row
        if (
            not isinstance(proto, str)
            or proto not in PROTOCOLS
            or isinstance(port, bool)
            or not isinstance(port, int)
        ):
            raise Refused(f"{what}: protocol must be tcp or udp and port a number")
        if not 1 <= port <= 65535:
            raise Refused(f"{what}: port {port} is outside 1-65535")
        if not isinstance(comment, str) or not COMMENT.fullmatch(comment):
            raise Refused(f"{what}: a comment is at most 200 plain characters")
        element = Element(str(_address(src, "source")), proto, port, str(_address(dst, "destination")))
        elements[element] = comment
        per_source[element.src] = per_source.get(element.src, 0) + 1
        if per_source[element.src] > MAX_PER_SOURCE:
            raise Refused(f"{what}: more than {MAX_PER_SOURCE} elements for {element.src}")
    return elements


def parse_lives(rows: Any, pins: Mapping[Element, str]) -> dict[Element, int]:
    """Return the seconds that some of ``pins`` have.

    Raises:
        Refused: not a list of ``[src, proto, port, dst, seconds]``, or no such pin.
    """
    if not isinstance(rows, list) or len(rows) > MAX_ELEMENTS:
        raise Refused(f"lives must be a list of at most {MAX_ELEMENTS} elements")
    lives: dict[Element, int] = {}
    for row in rows:
        if not isinstance(row, list) or len(row) != 5 or not all(type(part) in (str, int) for part in row):
            raise Refused("lives: an element is [src, proto, port, dst, seconds]")
        element, seconds = Element(*row[:4]), row[4]
        if element not in pins:
            raise Refused("lives: an element that is not among the pins")
        if type(seconds) is not int or seconds < 1:
            raise Refused("lives: seconds must be a number above 0")
        lives[element] = seconds
    return lives


def parse_open(rows: Any) -> dict[str, str]:
    """Return the sources that are to reach all public addresses, with their comments.

    Raises:
        Refused: not a list of ``[src, comment]``, or over the limit.
    """
    if not isinstance(rows, list) or len(rows) > MAX_SOURCES:
        raise Refused(f"open must be a list of at most {MAX_SOURCES} sources")
    found: dict[str, str] = {}
    for row in rows:
        if not isinstance(row, list) or len(row) != 2:
            raise Refused("open: a source is [src, comment]")
        src, comment = row
        if not isinstance(comment, str) or not COMMENT.fullmatch(comment):
            raise Refused("open: a comment is at most 200 plain characters")
        found[str(_address(src, "source"))] = comment
    return found


def parse_apply(body: dict[str, Any]) -> ApplyRequest:
    """Validate the body of an ``apply`` request.

    Raises:
        Refused: any field has another type, shape or range than expected, or is unknown.
    """
    if set(body) - {"lives", "open"} != {"v", "op", "sandboxes", "pins", "host"}:
        raise Refused("apply takes exactly sandboxes, pins and host, and perhaps lives and open")
    rows = body["sandboxes"]
    if not isinstance(rows, list) or len(rows) > MAX_SANDBOXES:
        raise Refused(f"sandboxes must be a list of at most {MAX_SANDBOXES}")
    sandboxes = tuple(_sandbox(row) for row in rows)
    if len({box.bridge for box in sandboxes}) != len(sandboxes):
        raise Refused("a bridge is named twice")
    pins, host = parse_elements(body["pins"], "pins"), parse_elements(body["host"], "host")
    lives, opened = parse_lives(body.get("lives", []), pins), parse_open(body.get("open", []))
    return ApplyRequest(sandboxes, pins, host, lives, opened)


def parse_denied(body: dict[str, Any]) -> DeniedRequest:
    """Validate the body of a ``denied`` request.

    Raises:
        Refused: any field has another type, shape or range than expected, or is unknown.
    """
    if set(body) != {"v", "op", "epoch", "after", "sources", "tallies"}:
        raise Refused("denied takes exactly epoch, after, sources and tallies")
    epoch, after, sources, tallies = (body[key] for key in ("epoch", "after", "sources", "tallies"))
    if not isinstance(epoch, str) or isinstance(after, bool) or not isinstance(after, int) or after < 0:
        raise Refused("denied: epoch is a string and after a number")
    if not isinstance(tallies, bool):
        raise Refused("denied: tallies is true or false")
    if not isinstance(sources, list) or len(sources) > MAX_SOURCES:
        raise Refused(f"denied: sources must be a list of at most {MAX_SOURCES}")
    return DeniedRequest(epoch, after, frozenset(str(_address(src, "source")) for src in sources), tallies)


def refuse_destination(element: Element, permitted: Iterable[IPv4Network]) -> str | None:
    """Return why ``element`` may not lead to its destination, or None when it may."""
    address = IPv4Address(element.dst)
    hit = next((net for net in NEVER if address in net), None)
    if hit is None:
        return None
    if any(address in net for net in ABSOLUTE) or not any(address in net for net in permitted):
        return f"destination {address} is inside {hit}"
    return None
