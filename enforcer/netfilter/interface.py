"""What the writer needs of a kernel, real or in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from enforcer.netfilter.claims import Link
from enforcer.netfilter.model import NO_LIVES, Element, Entry, Lives, Open
from enforcer.netfilter.plan import Plan, Wanted
from enforcer.netfilter.ports import Fix, Port
from enforcer.netfilter.refusals import Tally
from enforcer.netfilter.skeleton import Skeleton


class KernelError(Exception):
    """The kernel could not be read or written; ``sent`` is what was being written."""

    def __init__(self, text: str, sent: str = "") -> None:
        super().__init__(text)
        self.sent = sent


class Kernel(Protocol):
    """What the writer needs of a kernel. Every method raises KernelError when it cannot do its work."""

    @property
    def driver(self) -> str:
        """Where the decision is: nft, legacy or own."""

    def links(self) -> tuple[Link, ...]:
        """Return corral's bridges with their addresses."""

    def host_addresses(self) -> frozenset[str]:
        """Return every IPv4 address of this host."""

    def ports(self) -> tuple[Port, ...]:
        """Return the links that are a bridge's port or whose other end is in another namespace."""

    def set_ports(self, fixes: Iterable[Fix]) -> None:
        """Isolate ports, put links down or up; one that is gone by now is fine."""

    def audit(self, skeleton: Skeleton, wanted: Wanted | None) -> Plan:
        """Return what differs from the skeleton; see ``plan.plan`` for ``wanted``."""

    def distrust(self) -> None:
        """Have the next audit read everything, also what is known to be unchanged."""

    def filtering(self) -> bool:
        """Tell whether packets between ports of one bridge meet the rules; cheap."""

    def unannounced(self) -> bool:
        """Tell whether something the rules depend on changed without a notification; cheap."""

    def carry_out(self, todo: Plan) -> None:
        """Write the steps of a plan in order; stops at the first that fails."""

    def remove(self, skeleton: Skeleton) -> None:
        """Take everything of ours out; foreign rules stay."""

    def entries(self, name: str) -> dict[Element, Entry]:
        """Return the elements of a set as the kernel holds them."""

    def change(
        self, name: str, put: Mapping[Element, str], drop: Iterable[Element], lives: Lives = NO_LIVES
    ) -> None:
        """Add or renew, then delete elements. Counters of renewed ones are kept; see model.Lives."""

    def denied(self) -> dict[str, int]:
        """Return how many packets of each watched source were denied."""

    def tallies(self) -> list[Tally]:
        """Return what was denied, by destination, as counted since each was logged last."""

    def forget_tallies(self, gone: Iterable[Tally]) -> None:
        """Delete such counts."""

    def watch(self, sources: Iterable[str], forget: Iterable[str]) -> None:
        """Count denied packets of ``sources`` from now on, and of ``forget`` no more."""

    def forget_flows(self, elements: Iterable[Element]) -> None:
        """Delete the conntrack entries of withdrawn elements."""

    def networks(self) -> frozenset[str]:
        """Return the networks of this host's interfaces, as ``opening.attached`` writes them."""

    def opened(self) -> dict[str, Open]:
        """Return the sources that may reach all public addresses.

        One that is only in some of the sets it has to be in has the time HALF, and reaches nothing.
        """

    def open(self, sources: Mapping[str, str]) -> None:
        """Add or renew such sources; the values are comments."""

    def close_sources(self, sources: Iterable[str]) -> None:
        """Delete such sources and the conntrack entries of their flows."""
