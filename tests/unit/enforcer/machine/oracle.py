"""What may be open, worked out from what happened outside the service and from nothing that is in it.

An upper bound, element by element. The time that the design grants counts only while everything works: a
service, a writer or a Docker that is away changes nothing (what stands stays).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from enforcer.netfilter.model import Element
from policy.declaration import Declaration
from tests.unit.enforcer.machine.docker import Box
from tests.unit.enforcer.machine.world import RECONCILE, Zone

GOOD = tuple(f"203.0.113.{number}" for number in range(1, 8))
LINGER, TTL_MIN, TTL_MAX, DAY = 600.0, 60, 86400, 86400.0
# A full pass, and what the pass itself takes with slow answers.
NOTICED = RECONCILE + 3
# An event that was handed over, while everything works.
PROMPT = 2.0
# A query under way expires nothing; none takes longer than 5 s here.
SLACK = 8.0
# The state is saved once a minute: a restart may forget that much of what had passed.
FORGOTTEN = 65.0


@dataclass
class Truth:
    """One container as it really is. ``until``: up to when (in healthy seconds) its past may still show."""

    ident: str
    box: Box
    address: str
    hosts: Path
    declaration: Declaration
    compliant: bool
    alive: bool = True
    running: bool = False
    moved: bool = False  # on another network too
    twin: bool = False  # another one had the same address at the same time
    until: float = float("-inf")

    @property
    def deserving(self) -> bool:
        return self.compliant and self.alive and not self.moved


@dataclass
class Name:
    """``left``: seconds each address may still stand, by the latest answer that held it."""

    state: str = "NEW"
    left: dict[str, float] = field(default_factory=dict)
    last_seen: dict[str, float] = field(default_factory=dict)
    latest: tuple[str, ...] = ()
    answered_at: float = 0.0
    absent: int = 0
    absent_since: float = 0.0
    over: float = 0.0


class Oracle:
    """``healthy``: seconds in which service, writer and Docker all worked."""

    def __init__(self) -> None:
        self.healthy = 0.0
        self.skips: list[tuple[float, float]] = []
        self.clock = 0.0
        self.truths: dict[str, Truth] = {}
        self.names: dict[str, Name] = {}
        self.leases: dict[tuple[str, str], float] = {}
        # Destinations that have become forbidden, and elements that others wrote: when.
        self.forbidden: dict[str, float] = {}
        self.foreign: dict[Element, float] = {}

    def passed(self, seconds: float, healthy: bool, ran: bool = True) -> None:
        """Let time pass; ``ran``: processes could run in it, else addresses age and nobody takes notice."""
        self.clock += seconds
        if not healthy:
            return
        if ran:
            self.healthy += seconds
        else:
            self.skips.append((self.healthy, seconds))
            for key, until in self.leases.items():
                left = min(until, self.healthy + NOTICED + SLACK)
                self.leases[key] = max(until - seconds, left)
        for name in self.names.values():
            if name.state == "STALE":
                # Time stands still for its addresses, until nobody could be asked for a day.
                over = self.clock - name.answered_at >= DAY and ran
                name.over = name.over + seconds if over else name.over
                name.state = "GONE" if name.over > SLACK else name.state
                continue
            for address, left in name.left.items():
                # What ran out while nothing could run has to go once something can.
                name.left[address] = left - seconds if ran else max(left - seconds, min(left, 0.0))

    def restarted(self) -> None:
        """The service was killed: what it saved comes back as not asked for since.

        What it was about to take notice of, the next one takes notice of from the beginning.
        """
        again = self.healthy + PROMPT
        for truth in self.truths.values():
            if truth.until > self.healthy:
                truth.until = max(truth.until, again)
        for element, until in self.foreign.items():
            if until > self.healthy:
                self.foreign[element] = max(until, again)
        forgotten = FORGOTTEN + sum(
            seconds for at, seconds in self.skips if at > self.healthy - FORGOTTEN - SLACK
        )
        for name in self.names.values():
            name.state = "STALE" if name.state == "OK" else name.state
            name.absent = 0
            for address in name.left:
                name.left[address] += forgotten
        for key in self.leases:
            self.leases[key] += forgotten

    def heard(self, host: str, kind: str, zone: Zone, now: float) -> None:
        """DNS answered the service; ``now`` is within the time that is about to pass."""
        name = self.names.setdefault(host, Name())
        if kind == "ok" and zone.addresses:
            good = tuple(a for a in zone.addresses if a in GOOD)
            name.absent, name.over = 0, 0.0
            name.state = "OK" if good else "REFUSED"
            if good:
                name.latest, name.answered_at = good, now
            for address in good:
                time = max(TTL_MIN, min(zone.ttl, TTL_MAX)) + LINGER + (now - self.clock)
                name.left[address] = max(time, name.left.get(address, 0.0))
                name.last_seen[address] = now
            return
        if name.state == "OK":
            name.state = "STALE"
        if kind in ("ok", "nxdomain", "empty"):
            name.absent_since = name.absent_since if name.absent else now
            name.absent += 1
            if name.absent >= 3 and now - name.absent_since >= 600:
                name.state = "GONE"

    def changed(self, truth: Truth, told: bool) -> None:
        """Call before a container changes: its past may show until the service knows.

        ``told``: it is told at once, and nothing stands in the way; else the next full pass sees it.
        """
        if truth.deserving:
            truth.until = self.healthy + (PROMPT if told else NOTICED)

    def used(self, element: Element) -> None:
        """Packets of a container went to this destination; noticed within a pass, good for ten minutes."""
        self.leases[(element.src, element.dst)] = self.healthy + NOTICED + LINGER + SLACK

    def shows(self, truth: Truth) -> bool:
        """Whether elements of this container may be seen now."""
        return truth.deserving or self.healthy < truth.until

    def address_may_stand(self, source: str, host: str, address: str) -> bool:
        """Whether a name may still open an address for a container with that source."""
        if address not in GOOD or self.healthy > self.forbidden.get(address, float("inf")) + NOTICED:
            return False
        name = self.names.get(host)
        if name is None or address not in name.left:
            return False
        if name.left[address] > -SLACK:
            return True
        leased = self.leases.get((source, address), float("-inf"))
        return self.healthy < leased and self.clock < name.last_seen[address] + DAY + SLACK + FORGOTTEN

    def why_not(self, element: Element) -> str | None:
        """Return why an element must not be in the kernel, None when it may."""
        if self.healthy < self.foreign.get(element, float("-inf")):
            return None
        if element.proto != "tcp":
            return "no policy has such a protocol"
        seen = [t for t in self.truths.values() if t.address == element.src and self.shows(t)]
        if not seen:
            return "no container that may have anything has this address"
        for truth in seen:
            for name in truth.declaration.names:
                if element.port in name.ports and self.address_may_stand(element.src, name.host, element.dst):
                    return None
        return f"no name of {[t.ident for t in seen]} opens it"

    def why_not_host(self, element: Element) -> str | None:
        """The same for a service of the host."""
        if self.healthy < self.foreign.get(element, float("-inf")):
            return None
        for truth in self.truths.values():
            ports = {service.port for service in truth.declaration.host_services}
            same = (truth.address, truth.box.gateway) == (element.src, element.dst)
            if same and element.port in ports and self.shows(truth):
                return None
        return "no policy names this service"

    def forget_the_past(self) -> None:
        """Drop what can no longer show."""
        gone = [i for i, t in self.truths.items() if not t.alive and self.healthy >= t.until]
        for ident in gone:
            del self.truths[ident]
