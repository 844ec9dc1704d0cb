"""The bridge ports of sandboxes, and links that lead around them. Pure.

Each port of a ``corral-*`` bridge is isolated: the kernel forwards nothing between two such ports, whether or
not packets between ports meet the rules (bridge-nf-call-iptables).

A container that is on a second network has a second link, and what leaves through that one meets no rule for
``corral-*``. Both links lead into one network namespace and the kernel tells which, so the later of the two
is put down: the foreign link of a sandbox that was connected elsewhere, or the port of a foreign container
that was connected to a sandbox's network. Links are numbered as they are made; that is how later is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from enforcer.netfilter.skeleton import IFACE

ISOLATE, DOWN, UP = "isolate", "down", "up"


@dataclass(frozen=True)
class Port:
    """A link of this host. ``bridge`` is the bridge it is a port of, ``netns`` the number that this namespace
    gives to the one its other end lives in; None where there is none. ``up`` is the administrative state."""

    index: int
    name: str
    bridge: str | None
    netns: int | None
    isolated: bool
    up: bool

    @property
    def ours(self) -> bool:
        """Whether it is a port of a sandbox's bridge."""
        return self.bridge is not None and self.bridge.startswith(IFACE)


@dataclass(frozen=True)
class Fix:
    """One thing to do to a port: ``act`` is isolate, down or up; ``text`` says why, for people."""

    port: Port
    act: str
    text: str


def judge(ports: Iterable[Port]) -> tuple[Fix, ...]:
    """Return what has to be done; nothing when every port is as it must be."""
    seen = sorted(ports, key=lambda port: port.index)
    fixes = [
        Fix(port, ISOLATE, f"port {port.name} of {port.bridge} is not isolated")
        for port in seen
        if port.ours and not port.isolated
    ]
    for netns in sorted({port.netns for port in seen if port.ours and port.netns is not None}):
        head, *later = (port for port in seen if port.netns == netns)
        for port in later:
            if port.up and (head.ours or port.ours):
                text = f"{port.name} leads a container of {_where(head)} to {_where(port)}"
                fixes.append(Fix(port, DOWN, text))
        if head.ours and not head.up:
            # It was put down for a link that is gone by now, or by hand.
            fixes.append(Fix(head, UP, f"port {head.name} of {head.bridge} is down"))
    return tuple(fixes)


def _where(port: Port) -> str:
    return port.bridge or "no bridge"
