"""What a sandbox whose policy says ``open`` may and may not reach, as rules and ranges. Pure.

Everything of it is in our own nft table, whatever the driver is: the set ``open`` holds the sources, and a
packet of theirs that may pass is given the mark bit just before the rules that decide, which honour it after
their limits. Ranges that are closed for everybody are constants of a rule, which no set's content can take
away. Only what this host's own interfaces have is a set, ``closed``; without it nothing passes, because the
source itself has to be in it: each sandbox's subnet is a network of this host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, collapse_addresses, summarize_address_range
from typing import Any

from enforcer.netfilter.model import ABSOLUTE, NEVER, Element

OPEN, CLOSED = "open", "closed"
OUT, BACK = "open_out", "open_back"
DNS_PORT = 53
RESOLVER_PORT = 10053  # of a sandbox's gateway, where the service answers DNS; nobody but root binds 53
SHUT_PORTS = "{ 53, 853 }"  # DNS elsewhere: names are asked of the service, which vets the answers
_TRANSPORT = "meta l4proto { tcp, udp }"


def never(permitted: Iterable[IPv4Network]) -> tuple[IPv4Network, ...]:
    """Return what is closed for everybody: the writer's table without what root permits."""
    left = list(NEVER)
    for lifted in permitted:
        left = [part for network in left for part in _without(network, lifted)]
    return tuple(collapse_addresses([*left, *ABSOLUTE]))


def _without(network: IPv4Network, lifted: IPv4Network) -> Iterable[IPv4Network]:
    if not network.overlaps(lifted):
        return (network,)
    return network.address_exclude(lifted) if network.supernet_of(lifted) and network != lifted else ()


def attached(addresses: Iterable[IPv4Interface]) -> frozenset[str]:
    """Return the networks that these addresses of interfaces are in, as ``closed`` lists them."""
    return frozenset(str(network) for network in collapse_addresses(a.network for a in addresses))


def listed(elements: Iterable[Any]) -> frozenset[str]:
    """Return the networks that ``nft -j`` lists, in the form of ``attached``."""
    found: list[IPv4Network] = []
    for element in elements:
        match element:
            case {"prefix": {"addr": address, "len": length}}:
                found.append(IPv4Network(f"{address}/{length}"))
            case {"range": [first, last]}:
                found += summarize_address_range(IPv4Address(first), IPv4Address(last))
            case _:
                found.append(IPv4Network(str(element)))
    return frozenset(map(str, collapse_addresses(found)))


def element(source: str, timeout: int, packets: int, comment: str) -> str:
    """Return an element of ``open`` as nft reads it."""
    told = f' comment "{comment}"' if comment else ""
    return f"{source} counter packets {packets} bytes 0 timeout {max(1, timeout)}s{told}"


def rules_out(iface: str, permitted: Iterable[IPv4Network], mark: int) -> list[tuple[str, str]]:
    """Return what a packet from an open source goes through: (match, verdict)."""
    return [
        (f"ip daddr {{ {', '.join(map(str, never(permitted)))} }}", "return"),
        # Other sandboxes, whatever numbers their subnets have.
        (f'oifname "{iface}*"', "return"),
        # The proof that the set below is there.
        (f"ip saddr != @{CLOSED}", "return"),
        (f"ip daddr @{CLOSED}", "return"),
        (f"{_TRANSPORT} th dport != {SHUT_PORTS}", f"meta mark set meta mark | {mark:#x}"),
    ]


def rules_back(permitted: Iterable[IPv4Network], mark: int) -> list[tuple[str, str]]:
    """Return what a packet to an open source goes through: the same, reversed, and replies only."""
    return [
        ("ct direction original", "return"),
        (f"ip saddr {{ {', '.join(map(str, never(permitted)))} }}", "return"),
        (f"ip daddr != @{CLOSED}", "return"),
        (f"ip saddr @{CLOSED}", "return"),
        (
            f"ct state established {_TRANSPORT} th sport != {SHUT_PORTS}",
            f"meta mark set meta mark | {mark:#x}",
        ),
    ]


def question(iface: str, mark: int) -> tuple[str, str]:
    """Return the rule that marks a question to the gateway's port 53; of those, ``asks`` are redirected."""
    what = f"ip daddr @gateways {_TRANSPORT} th dport {DNS_PORT}"
    return f'iifname "{iface}*" {what}', f"meta mark set meta mark | {mark:#x}"


def asks(element: Element) -> bool:
    """Say whether an element for the host lets its source ask for names at port 53 of its gateway.

    It leads from the source to itself, where no packet ever goes through the host: it opens no port, neither
    here nor, while the redirection is missing, of a name server of this host's.
    """
    return element.src == element.dst and element.port == DNS_PORT


def sets(closed: Iterable[str], timeout: int, size: int) -> list[str]:
    """Return the declarations of both sets."""
    body = [
        f"  set {OPEN} {{ type ipv4_addr; size {size}; flags timeout; timeout {timeout}s; counter; }}",
        f"  set {CLOSED} {{",
        "    type ipv4_addr",
        "    flags interval",
    ]
    networks = sorted(closed)
    if networks:
        body.append(f"    elements = {{ {', '.join(networks)} }}")
    return [*body, "  }"]


def fill(table: str, closed: Iterable[str]) -> list[str]:
    """Return the lines that replace the content of ``closed``, for one transaction."""
    lines, networks = [f"flush set inet {table} {CLOSED}"], sorted(closed)
    if networks:
        lines.append(f"add element inet {table} {CLOSED} {{ {', '.join(networks)} }}")
    return lines


def refill(table: str, rows: Mapping[str, tuple[int, int, str]]) -> str:
    """Return the line that fills ``open`` of a new table: source -> (seconds left, packets, comment)."""
    if not rows:
        return ""
    lines = ", ".join(element(source, *row) for source, row in sorted(rows.items()))
    return f"add element inet {table} {OPEN} {{ {lines} }}\n"
