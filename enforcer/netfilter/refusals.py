"""What was refused, kept for whoever may know of it. Pure.

A record belongs to the claim that covers both the interface a packet came in by and its source, at the moment
it came; nobody else is ever told. Each user's records have numbers of their own, so that they can be asked
for again, and so that one user cannot count another's. Memory is bounded: a bridge keeps its latest records,
and a user with many bridges loses the oldest of the busiest one first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from enforcer.netfilter.claims import Claim, Claims
from enforcer.netfilter.model import DeniedRequest
from enforcer.netfilter.nflog import Packet

PER_BRIDGE = 1024
PER_USER = 8192
PER_ANSWER = 2048


@dataclass(frozen=True)
class Tally:
    """Packets to one destination of one source, from the one that was logged last on.

    ``timeout``: seconds until it is logged again; larger than before means that counting began anew.
    """

    src: str
    proto: int
    port: int
    dst: str
    packets: int
    timeout: int

    def row(self) -> list[object]:
        """Return the tally as it travels in JSON."""
        return [self.src, self.proto, self.port, self.dst, self.packets, self.timeout]


@dataclass
class _User:
    issued: int = 0
    rings: dict[tuple[str, int], deque[tuple[int, float, Packet]]] = field(default_factory=dict)


class Refusals:
    """The latest refused packets of each user. ``epoch`` tells one life of the writer from another."""

    def __init__(self, epoch: str) -> None:
        self.epoch = epoch
        self._users: dict[int, _User] = {}

    def add(self, packets: Iterable[Packet], claims: Claims, wall: float) -> None:
        """Keep packets that came in by a claimed bridge from an address of its subnet; ``wall``: now."""
        by_index = {claim.index: claim for claim in claims.values()}
        for packet in packets:
            claim = by_index.get(packet.interface)
            if claim is not None and claim.covers(packet.src):
                self._keep(claim, packet, wall)

    def _keep(self, claim: Claim, packet: Packet, wall: float) -> None:
        user = self._users.setdefault(claim.uid, _User())
        ring = user.rings.setdefault((claim.bridge, claim.index), deque(maxlen=PER_BRIDGE))
        user.issued += 1
        ring.append((user.issued, wall, packet))
        if sum(map(len, user.rings.values())) > PER_USER:
            max(user.rings.values(), key=len).popleft()

    def prune(self, claims: Claims) -> None:
        """Forget what belongs to bridges that are gone, or somebody else's by now."""
        living = {(claim.uid, claim.bridge, claim.index) for claim in claims.values()}
        for uid, user in self._users.items():
            user.rings = {key: ring for key, ring in user.rings.items() if (uid, *key) in living}

    def since(self, uid: int, request: DeniedRequest) -> dict[str, Any]:
        """Return records of a user that came after those it has, oldest first, and where to go on.

        ``lost`` counts those that came in between and are not kept any more.
        """
        user = self._users.get(uid, _User())
        after = min(request.after, user.issued) if request.epoch == self.epoch else 0
        found = sorted(
            (row for ring in user.rings.values() for row in ring if row[0] > after), key=lambda row: row[0]
        )[:PER_ANSWER]
        reached = found[-1][0] if len(found) == PER_ANSWER else user.issued
        return {
            "epoch": self.epoch,
            "next": reached,
            "lost": reached - after - len(found),
            "records": [
                [number, wall, packet.src, packet.proto, packet.port, packet.dst]
                for number, wall, packet in found
            ],
        }
