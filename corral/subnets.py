"""Which subnet a sandbox gets, and which address in it a session gets. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from policy.errors import EngineError
from policy.records import dataclass

# The first is outside Docker's own default pools.
DEFAULT_RANGES = ("172.16.0.0/16", "10.213.0.0/16", "192.168.128.0/17")
PREFIX = 26
STRANGERS_PREFIX = 28
# A route shorter than this is a default route in disguise (a VPN that takes 0.0.0.0/1 and 128.0.0.0/1).
SHORTEST_ROUTE = 8
# These never collide with a subnet of unicast addresses in a way that matters.
_IGNORED_ROUTES = frozenset({"multicast", "broadcast"})


@dataclass(frozen=True)
class Taken:
    """A range that is in use on this host, and by whom."""

    network: IPv4Network
    by: str


@dataclass(frozen=True)
class Plan:
    """A sandbox's subnet: the gateway is its first address, Docker's automatic addresses its top quarter."""

    subnet: IPv4Network

    @property
    def gateway(self) -> IPv4Address:
        """The bridge's own address."""
        return self.subnet.network_address + 1

    @property
    def strangers(self) -> IPv4Network:
        """Where Docker takes addresses from that nobody asked for."""
        return list(self.subnet.subnets(new_prefix=STRANGERS_PREFIX))[-1]

    @property
    def addresses(self) -> list[IPv4Address]:
        """What sessions may get, in the order they get it."""
        gateway, strangers = self.gateway, self.strangers
        return [host for host in self.subnet.hosts() if host != gateway and host not in strangers]


def plan_for(network: Mapping[str, Any]) -> Plan | None:
    """Return the plan an existing Docker network follows (its inspect), None when it cannot be corral's."""
    config = ((network.get("IPAM") or {}).get("Config")) or []
    if len(config) != 1:
        return None
    try:
        plan = Plan(IPv4Network(str(config[0].get("Subnet"))))
    except ValueError:
        return None
    given = (config[0].get("Gateway"), config[0].get("IPRange"))
    if plan.subnet.prefixlen != PREFIX or given != (str(plan.gateway), str(plan.strangers)):
        return None
    return plan


def choose(ranges: Sequence[IPv4Network], taken: Iterable[Taken]) -> Plan:
    """Return the first free /26 of the ranges, in their order.

    Raises:
        EngineError: there is none; the message says what is in the way of each range.
    """
    used = list(taken)
    for candidate in ranges:
        if candidate.prefixlen > PREFIX:
            continue
        inside = [row for row in used if row.network.overlaps(candidate)]
        for subnet in candidate.subnets(new_prefix=PREFIX):
            if not any(row.network.overlaps(subnet) for row in inside):
                return Plan(subnet)
    raise EngineError(
        "\n".join(["no free subnet for this sandbox:", *(_in_the_way(one, used) for one in ranges)]),
        'name a free range in ~/.config/corral/enforcer.toml: subnet_range = "10.66.0.0/16"',
    )


def _in_the_way(candidate: IPv4Network, used: Sequence[Taken]) -> str:
    if candidate.prefixlen > PREFIX:
        return f"  {candidate} is smaller than a /{PREFIX}"
    rows = sorted(
        (row for row in used if row.network.overlaps(candidate)), key=lambda row: row.network.prefixlen
    )
    named = ", ".join(f"{row.network} ({row.by})" for row in rows[:3])
    more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
    return f"  {candidate} overlaps {named}{more}"


def taken_by_networks(networks: Iterable[Mapping[str, Any]]) -> list[Taken]:
    """Return the IPv4 subnets of Docker's networks (their inspects)."""
    found = []
    for network in networks:
        for config in ((network.get("IPAM") or {}).get("Config")) or []:
            subnet = _network(config.get("Subnet"))
            if subnet is not None:
                found.append(Taken(subnet, f"Docker network {network.get('Name')}"))
    return found


def taken_by_routes(routes_json: str) -> list[Taken]:
    """Return what this host already routes, or owns, from ``ip -j -4 route show table all``.

    Default routes are left out; blackholes and the like are not: they were put there on purpose.
    """
    found = []
    for route in json.loads(routes_json or "[]"):
        network = _network(route.get("dst"))
        kind = route.get("type", "unicast")
        if network is None or network.prefixlen < SHORTEST_ROUTE or kind in _IGNORED_ROUTES:
            continue
        device = route.get("dev") or kind
        what = "address" if kind == "local" else "route"
        found.append(Taken(network, f"{what} of {device}"))
    return found


def taken_by_resolvers(resolv_conf: str) -> list[Taken]:
    """Return the DNS servers of this host: a subnet over one of them would cut the host off from it."""
    found = []
    for line in resolv_conf.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == "nameserver":
            network = _network(words[1])
            if network is not None:
                found.append(Taken(network, "DNS server"))
    return found


def _network(text: object) -> IPv4Network | None:
    try:
        return IPv4Network(str(text), strict=False)
    except ValueError:
        return None


def addresses_in_use(containers: Iterable[Mapping[str, Any]], network: str) -> set[IPv4Address]:
    """Return the addresses that containers (list entries) hold or were promised on a network.

    A container that does not run holds the address it was created with.
    """
    found: set[IPv4Address] = set()
    for container in containers:
        endpoints = (container.get("NetworkSettings") or {}).get("Networks") or {}
        endpoint = endpoints.get(network) or {}
        promised = (endpoint.get("IPAMConfig") or {}).get("IPv4Address")
        for text in (promised, endpoint.get("IPAddress")):
            if text:
                found.add(IPv4Address(text))
    return found


def allocate(plan: Plan, used: Iterable[IPv4Address], last: str = "") -> IPv4Address:
    """Return the next free address for a session, the lowest when all have had their turn.

    The kernel tells one address of few refusals a second (ICMP), and a gate waits 0.3 s for those that do not
    come. So a session does not get the address of the one before it.

    Args:
        plan: the network.
        used: what containers hold.
        last: the address that was given last; anything else is none.

    Raises:
        EngineError: every address is held by a container.
    """
    held = set(used)
    order = [str(address) for address in plan.addresses]
    turn = order.index(last) + 1 if last in order else 0
    for address in (*plan.addresses[turn:], *plan.addresses[:turn]):
        if address not in held:
            return address
    raise EngineError(
        f"all {len(plan.addresses)} addresses of this sandbox's network {plan.subnet} are in use",
        "end some of its sessions; corral down removes leftovers",
    )
