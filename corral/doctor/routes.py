"""Which way packets to an address of a sandbox would go, from rules and routes. Pure.

The backstop drops a sandbox's packet when its source address does not lie behind the sandbox's bridge (that
is how a source cannot be forged); a route or rule that leads elsewhere makes that check drop everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network

from corral.doctor.records import Routing, Row
from corral.subnets import SHORTEST_ROUTE

MAIN, LOCAL = "main", "local"
_SELECTORS = frozenset({"iif", "oif", "tos", "ipproto", "sport", "dport", "uid_start", "l3mdev"})
_IGNORED = frozenset({"multicast", "broadcast", "local"})


def network(row: Row) -> IPv4Network | None:
    """Return a route's destination."""
    text = str(row.get("dst", ""))
    try:
        return IPv4Network("0.0.0.0/0" if text == "default" else text, strict=False)
    except ValueError:
        return None


def overlapping(routing: Routing, *, shadowing: bool) -> list[str]:
    """Return the routes of table main that overlap a sandbox's network and belong to another interface.

    ``shadowing`` chooses those at least as specific as the sandbox's own route, else the wider ones.
    """
    found = []
    for bridge, subnet in routing.bridges.items():
        for row in routing.routes:
            target = network(row)
            if target is None or row.get("table", MAIN) != MAIN or row.get("type", "") in _IGNORED:
                continue
            if row.get("dev") == bridge or not target.overlaps(subnet) or target.prefixlen < SHORTEST_ROUTE:
                continue
            if (target.prefixlen >= subnet.prefixlen) is shadowing:
                way = row.get("dev") or row.get("type", "nowhere")
                found.append(f"{target} by {way} overlaps {subnet} of {bridge}")
    return found


def detours(routing: Routing, planned: Iterable[IPv4Network]) -> list[str]:
    """Return where addresses of sandboxes lead before table main is asked.

    Args:
        routing: what there is; the kernel's own answers count where there are sandboxes' networks.
        planned: where the next sandbox's network comes from, for a host that has none yet.
    """
    if routing.bridges:
        shadowed = " ".join(overlapping(routing, shadowing=True))
        return [
            f"{routing.bridges[bridge]} of {bridge} is looked for {_way(row)}"
            for bridge, row in routing.lookups.items()
            if row.get("dev") != bridge and f"of {bridge}" not in shadowed
        ]
    for subnet in planned:
        way = first_answer(routing.rules, routing.routes, subnet.network_address + 2)
        return [f"{subnet} would be looked for {way}"] if way else []
    return []


def _way(row: Row) -> str:
    table = f" in table {row['table']}" if row.get("table") not in (None, MAIN) else ""
    return f"at {row.get('dev') or row.get('type', 'nowhere')}{table}"


def first_answer(rules: Sequence[Row], routes: Sequence[Row], address: IPv4Address) -> str:
    """Return what answers for an address before table main; empty when main is asked first."""
    for rule in sorted(rules, key=lambda row: int(row.get("priority", 0))):
        if not _matches(rule, address):
            continue
        table = str(rule.get("table", ""))
        if table == MAIN:
            return ""
        if rule.get("action") in ("unreachable", "blackhole", "prohibit"):
            return f"nowhere: rule {rule.get('priority')} is {rule['action']}"
        if table and table != LOCAL:
            best = _best(routes, table, address)
            if best is not None and best.get("type") != "throw":
                way = best.get("dev") or best.get("type")
                return f"at {way} in table {table} (rule {rule.get('priority')})"
    return ""


def _matches(rule: Row, address: IPv4Address) -> bool:
    """A packet without a mark whose other address is not known: rules that ask for more are passed over."""
    if _SELECTORS & rule.keys() or rule.get("src", "all") != "all":
        return False
    if "fwmark" in rule:
        return "not" in rule
    if "dst" in rule:
        length = rule.get("dstlen", 32)
        return (address in IPv4Network(f"{rule['dst']}/{length}", strict=False)) is ("not" not in rule)
    return "not" not in rule


def _best(routes: Sequence[Mapping[str, object]], table: str, address: IPv4Address) -> Row | None:
    fitting = [
        (target.prefixlen, index)
        for index, row in enumerate(routes)
        if str(row.get("table", MAIN)) == table and (target := network(row)) is not None and address in target
    ]
    return routes[max(fitting, key=lambda pair: (pair[0], -pair[1]))[1]] if fitting else None
