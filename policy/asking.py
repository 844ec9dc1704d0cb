"""Whether a name may be asked for: of the sandbox's proxy, or of who answers DNS. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from policy.declaration import Pattern
from policy.patterns import declared
from policy.records import dataclass


@dataclass(frozen=True)
class Terms:
    """How a name may be reached: see ``policy.declaration.Pattern``."""

    protocol: Literal["tls", "tcp"] = "tls"
    sni: bool = True


def matching(patterns: Iterable[Pattern], name: str) -> list[Pattern]:
    """Return the patterns that mean a name, in their order.

    Args:
        patterns: of a declaration.
        name: from `policy.hosts.canonical_wire_name`.
    """
    return [pattern for pattern in patterns if declared(pattern.host).matches(name)]


def ports(patterns: Iterable[Pattern], name: str) -> tuple[int, ...]:
    """Return the ports a name may be asked for on, sorted; none: it may not be."""
    return tuple(sorted({port for pattern in matching(patterns, name) for port in pattern.ports}))


def terms(patterns: Iterable[Pattern], name: str, port: int) -> Terms | None:
    """Return how a name may be asked for on a port, None when it may not be.

    Each pattern allows what it says; so one that is taken away never allows more, whatever else is there.
    """
    found = [pattern for pattern in matching(patterns, name) if port in pattern.ports]
    if not found:
        return None
    return loosest(Terms(pattern.protocol, pattern.sni) for pattern in found)


def loosest(wishes: Iterable[Terms]) -> Terms:
    """Return the most that one of several, and at least one, allows: of the patterns that mean a name."""
    every = list(wishes)
    if any(one.protocol == "tcp" for one in every):
        return Terms("tcp")
    return Terms("tls", all(one.sni for one in every))


def strictest(wishes: Iterable[Terms]) -> Terms:
    """Return what several, and at least one, agree to: entries for one host, or sessions with one proxy."""
    every = list(wishes)
    if all(one.protocol == "tcp" for one in every):
        return Terms("tcp", any(one.sni for one in every))
    # With tcp, what passes is not looked at: a ClientHello without a name would pass, too.
    return Terms("tls", any(one.sni and one.protocol == "tls" for one in every))
