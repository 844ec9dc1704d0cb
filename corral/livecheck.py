"""The checks that only the host can make: policy, hosts file and kernel, element by element. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from corral import proxychecks
from corral.checks import Check
from policy import proxying
from policy.container import HOST_ALIAS, resolver_rows
from policy.declaration import ANSWER, OPEN, Declaration

Row = tuple[str, str, int, str]
"""A kernel element: source, protocol, port, destination."""


@dataclass(frozen=True)
class Sight:
    """One container as three sides see it.

    Args:
        declaration: what its labels say it may reach.
        address, gateway: its own and the host's on its network; ``hostname`` is its own name.
        hosts: name -> addresses in its hosts file.
        published, lingering: name -> addresses in the enforcer's account: what the hosts file should say, and
            what stays allowed beside it for flows that are open.
        pins, host: kernel elements with this source.
        open: whether the kernel lets it reach all public addresses.
        opened: what was opened for it because it asked for a name, in the enforcer's account.
    """

    declaration: Declaration
    address: str
    gateway: str
    hostname: str
    hosts: Mapping[str, Sequence[str]]
    published: Mapping[str, Sequence[str]]
    lingering: Mapping[str, Sequence[str]]
    pins: frozenset[Row]
    host: frozenset[Row]
    open: bool = False
    opened: Sequence[proxychecks.Opened] = ()


def live_rules(sight: Sight) -> list[str]:
    """Compare policy, hosts file and kernel element by element; return every difference."""
    found: list[str] = []
    expected: set[Row] = set()
    lingering: set[Row] = set()
    for name in sight.declaration.names:
        addresses = sight.hosts.get(name.host, ())
        if not addresses and not name.optional:
            found.append(f"{name.host}: the hosts file has no address for it")
        if sorted(addresses) != sorted(sight.published.get(name.host, ())):
            told = ", ".join(sight.published.get(name.host, ())) or "nothing"
            found.append(
                f"{name.host}: the hosts file says {', '.join(addresses) or 'nothing'}, the enforcer {told}"
            )
        for port in name.ports:
            expected |= {(sight.address, "tcp", port, address) for address in addresses}
            lingering |= {(sight.address, "tcp", port, a) for a in sight.lingering.get(name.host, ())}
            found += [
                f"{name.host}: the kernel does not allow {address}:{port}"
                for address in addresses
                if (sight.address, "tcp", port, address) not in sight.pins
            ]
    asked, problems = _asked_for(sight)
    found += [
        f"the kernel allows {_row(row)}, which no name has"
        for row in sorted(sight.pins - expected - lingering - asked)
    ]
    found += problems
    found += _hosts_differences(sight)
    services = {
        (sight.address, "tcp", service.port, sight.gateway): f"host service {service.name}"
        for service in sight.declaration.host_services
    }
    if sight.declaration.proxied:
        services[sight.address, "tcp", proxying.PORT, sight.gateway] = "the sandbox's proxy"
    opened = sight.declaration.mode == OPEN
    if sight.declaration.answered:
        services |= dict.fromkeys(resolver_rows(sight.address, sight.gateway), "dns")
    if opened != sight.open:
        found.append(
            "egress.mode is open, and the kernel does not hold it"
            if opened
            else "the kernel lets it reach all public addresses, and egress.mode is not open"
        )
    for row, service in services.items():
        if row not in sight.host:
            found.append(f"{service}: the kernel does not allow {_row(row)}")
    found += [
        f"the kernel allows {_row(row)} of this host, which no service is"
        for row in sorted(sight.host - set(services))
    ]
    return found


def _asked_for(sight: Sight) -> tuple[set[Row], list[str]]:
    """Return what may be open because names were asked for, and what is so and should not be."""
    if sight.declaration.dns != ANSWER:
        return set(), []
    rows = {(sight.address, "tcp", one.port, one.address): one for one in sight.opened}
    patterns = sight.declaration.patterns
    problems = [proxychecks.not_permitted(patterns, rows[row]) for row in sorted(rows.keys() & sight.pins)]
    return set(rows), [problem for problem in problems if problem]


def _row(row: Row) -> str:
    _, proto, port, destination = row
    return f"{destination}:{port}" if proto == "tcp" else f"{destination}:{port}/{proto}"


def _hosts_differences(sight: Sight) -> list[str]:
    fixed = {"localhost": ["127.0.0.1"], sight.hostname: [sight.address], HOST_ALIAS: [sight.gateway]}
    if sight.declaration.proxied:
        fixed[proxying.ALIAS] = [sight.gateway]
    found = []
    for name, addresses in fixed.items():
        told = list(sight.hosts.get(name, ()))
        if told != addresses:
            found.append(f"the hosts file says {', '.join(told) or 'nothing'} for {name}, not {addresses[0]}")
    known = {name.host for name in sight.declaration.names} | set(fixed)
    found += [
        f"the hosts file has {name}, which the policy has not" for name in sorted(set(sight.hosts) - known)
    ]
    return found


def skeleton_checks(skeleton: Mapping[str, Any]) -> list[Check]:
    """Return ``skeleton-in-path`` and ``backstop`` for the enforcer's account of the constant rules."""
    problems = "; ".join(map(str, skeleton.get("problems") or ()))
    parts = {"jump": "the jumps from Docker's chain", "input": "the way into this host", "ipv6": "IPv6"}
    broken = [what for part, what in parts.items() if not skeleton.get(part)]
    backstop = bool(skeleton.get("backstop"))
    if problems and backstop and not broken:
        # Whatever else the writer finds, such as a bridge that leads around the rules.
        broken = ["what leads packets to the rules"]
    return [
        Check(
            "skeleton-in-path",
            "fail" if broken else "ok",
            f"not as it must be: {', '.join(broken)}{f' ({problems})' if problems else ''}" if broken else "",
        ),
        Check(
            "backstop",
            "ok" if backstop else "fail",
            "" if backstop else problems or "nothing drops what Docker's own rules would let through",
        ),
    ]
