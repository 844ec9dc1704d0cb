"""Who owns which bridge. Pure.

A claim binds a uid to an interface (name and index) and the subnet that interface really has. The first claim
holds while the link lives; elements are taken only for sources inside the caller's own claims.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from typing import Any

from enforcer.netfilter import opening
from enforcer.netfilter.model import Element, SandboxRequest, refuse_destination

PREFIXES = range(16, 30)  # lengths of a sandbox's subnet


@dataclass(frozen=True)
class Link:
    """An interface as the kernel has it."""

    name: str
    index: int
    addresses: tuple[IPv4Interface, ...]


@dataclass(frozen=True)
class Claim:
    """One bridge of one user."""

    uid: int
    bridge: str
    index: int
    subnet: IPv4Network
    gateway: IPv4Address

    @property
    def bare(self) -> bool:
        """Whether its subnet is none for a sandbox: its gateway is closed to others, and nothing granted."""
        return self.subnet.prefixlen not in PREFIXES

    def covers(self, source: str) -> bool:
        """Tell whether an address is one of its sandbox's."""
        return not self.bare and IPv4Address(source) in self.subnet


Claims = Mapping[str, Claim]


def living(claims: Claims, links: Iterable[Link]) -> dict[str, Claim]:
    """Return the claims whose link still exists with the same index and still has the gateway's address."""
    present = {link.name: link for link in links}
    kept = {}
    for bridge, claim in claims.items():
        link = present.get(bridge)
        if link is not None and link.index == claim.index and _has(link, claim.subnet, claim.gateway):
            kept[bridge] = claim
    return kept


def _has(link: Link, subnet: IPv4Network, gateway: IPv4Address) -> bool:
    return any(address.ip == gateway and address.network == subnet for address in link.addresses)


def admit(
    claims: Claims, links: Iterable[Link], uid: int, wanted: Iterable[SandboxRequest]
) -> tuple[dict[str, Claim], list[str]]:
    """Add the bridges that ``uid`` asks for to the living claims.

    A bridge with a subnet that is none for a sandbox is claimed, bare, and refused: what is wrong with one
    network takes nothing from the others.

    Returns:
        The new claims, and one sentence for each bridge that was refused.
    """
    present = {link.name: link for link in links}
    result = living(claims, present.values())
    refused = []
    for box in wanted:
        link, held = present.get(box.bridge), result.get(box.bridge)
        claim = Claim(uid, box.bridge, link.index if link is not None else 0, box.subnet, box.gateway)
        overlap = next((other for other in result.values() if _overlap(claim, other)), None)
        if link is None:
            refused.append(f"{box.bridge}: no such interface")
        elif not _has(link, box.subnet, box.gateway):
            refused.append(f"{box.bridge}: the interface does not have {box.gateway} in {box.subnet}")
        elif held is not None and held.uid != uid:
            refused.append(f"{box.bridge}: belongs to uid {held.uid}")
        elif overlap is not None:
            refused.append(f"{box.bridge}: {box.subnet} overlaps {overlap.bridge} of uid {overlap.uid}")
        else:
            result[box.bridge] = claim
            if claim.bare:
                sizes = f"/{PREFIXES[0]} to /{PREFIXES[-1]}"
                what = f"{box.subnet} is no subnet for a sandbox ({sizes})"
                refused.append(f"{box.bridge}: {what}: nothing is granted there")
    return result, refused


def _overlap(one: Claim, other: Claim) -> bool:
    # A bare claim has no sources that anybody could mistake for another's.
    return one.bridge != other.bridge and not (one.bare or other.bare) and one.subnet.overlaps(other.subnet)


def owner_of(claims: Claims, source: str) -> Claim | None:
    """Return the claim whose sandbox has ``source``."""
    return next((claim for claim in claims.values() if claim.covers(source)), None)


def vet(
    claims: Claims,
    uid: int,
    pins: Mapping[Element, str],
    host: Mapping[Element, str],
    permitted: tuple[IPv4Network, ...],
    own_addresses: frozenset[str],
) -> tuple[dict[Element, str], dict[Element, str], list[str]]:
    """Split what a caller wants into what it may have and why the rest was refused.

    ``own_addresses`` are the addresses of this host: a pin never leads to one.
    """
    refused: list[str] = []
    good_pins: dict[Element, str] = {}
    for element, comment in pins.items():
        problem = source_problem(claims, uid, element.src) or refuse_destination(element, permitted)
        if problem is None and element.dst in own_addresses:
            problem = f"destination {element.dst} is an address of this host"
        if problem is None and any(IPv4Address(element.dst) in claim.subnet for claim in claims.values()):
            problem = f"destination {element.dst} is inside a sandbox"
        if problem is None:
            good_pins[element] = comment
        else:
            refused.append(problem)
    good_host: dict[Element, str] = {}
    for element, comment in host.items():
        problem = source_problem(claims, uid, element.src)
        if problem is None:
            claim = owner_of(claims, element.src)
            if claim is not None and (element.dst == str(claim.gateway) or opening.asks(element)):
                good_host[element] = comment
                continue
            problem = f"{element.dst} is not the gateway of {element.src}"
        refused.append(problem)
    return good_pins, good_host, refused


def source_problem(claims: Claims, uid: int, source: str) -> str | None:
    """Return why nothing can be granted to ``source`` for this caller, or None."""
    claim = owner_of(claims, source)
    if claim is None:
        return f"source {source} is in no claimed subnet"
    if claim.uid != uid:
        return f"source {source} belongs to {claim.bridge} of uid {claim.uid}"
    edges = (claim.subnet.network_address, claim.subnet.broadcast_address, claim.gateway)
    return f"source {source} is not a container's" if IPv4Address(source) in edges else None


def vet_open(claims: Claims, uid: int, wanted: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Split the sources that a caller wants open into what it may have and why the rest was refused."""
    problems = {source: source_problem(claims, uid, source) for source in wanted}
    good = {source: comment for source, comment in wanted.items() if problems[source] is None}
    return good, [problem for problem in problems.values() if problem is not None]


def to_rows(claims: Claims) -> list[dict[str, Any]]:
    """Return the claims as JSON-able rows, for the writer's own restart."""
    return [
        {
            "uid": c.uid,
            "bridge": c.bridge,
            "index": c.index,
            "subnet": str(c.subnet),
            "gateway": str(c.gateway),
        }
        for c in claims.values()
    ]


def from_rows(rows: Any) -> dict[str, Claim]:
    """Parse what ``to_rows`` wrote; anything odd is dropped, because a lost claim only closes."""
    claims = {}
    for row in rows if isinstance(rows, list) else []:
        try:
            claim = Claim(
                int(row["uid"]),
                str(row["bridge"]),
                int(row["index"]),
                IPv4Network(row["subnet"]),
                IPv4Address(row["gateway"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
        claims[claim.bridge] = claim
    return claims
