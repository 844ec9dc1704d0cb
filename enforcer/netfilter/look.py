"""Reading what ``detect`` decides by. Cheap where all is as it was: only what could matter is looked at."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from enforcer.netfilter import detect, tables, xtlegacy
from enforcer.netfilter.detect import LEGACY, NFT, OWN, Choice, Facts, Rules
from enforcer.netfilter.plan import Lines
from enforcer.netfilter.process import SEARCH
from enforcer.netfilter.skeleton import DOCKER_USER, IFACE

# Chains that only Docker makes (DOCKER-USER is made by corral too).
DOCKER_CHAINS = frozenset(
    {
        "DOCKER",
        "DOCKER-CT",
        "DOCKER-BRIDGE",
        "DOCKER-FORWARD",
        "DOCKER-INTERNAL",
        "DOCKER-ISOLATION-STAGE-1",
        "DOCKER-ISOLATION-STAGE-2",
    }
)
NATIVE_TABLE = ("ip", "docker-bridges")
DOCKER_BRIDGE = "docker0"

Tables = Mapping[tuple[int, str], Lines]


@dataclass(frozen=True)
class Seen:
    """What one look found: the choice, and the contents of both iptables as far as they were looked at."""

    choice: Choice
    tables: Mapping[str, Tables] = field(default_factory=dict)


def traces(found: Tables) -> Rules:
    """Return Docker's traces in one of the two iptables. Pure."""
    filter4, nat4 = found.get((4, "filter"), {}), found.get((4, "nat"), {})
    forward = filter4.get("FORWARD", [])
    named = set()
    for chain, lines in filter4.items():
        if chain == "FORWARD" or chain.startswith("DOCKER"):
            for line in lines:
                named |= set(_interfaces(line))
    return Rules(
        docker=not DOCKER_CHAINS.isdisjoint(filter4) or "DOCKER" in nat4,
        hooked=any(_leads(line, DOCKER_USER) for line in forward),
        named=frozenset(named),
    )


def _interfaces(line: str) -> Iterable[str]:
    words = line.split()
    return (name for flag, name in itertools.pairwise(words) if flag in ("-i", "-o"))


def _leads(line: str, chain: str) -> bool:
    words = line.split()
    return any(flag in ("-j", "-g") and name == chain for flag, name in itertools.pairwise(words))


def frozen(found: Tables) -> Hashable:
    """Return the rules of tables as a value to compare."""
    return tuple(
        (key, tuple((name, *rules) for name, rules in lines.items())) for key, lines in found.items()
    )


def native(chains: Iterable[str]) -> Rules:
    """Return Docker's traces in the chains of its own nftables table. Pure."""
    names = list(chains)
    named = frozenset(name.partition("__")[2] for name in names if "__" in name)
    return Rules(docker=bool(names), hooked=bool(names), named=named)


def bridges() -> frozenset[str]:
    """Return the interfaces of this namespace that only an engine makes."""
    names = (name for _, name in socket.if_nameindex())
    return frozenset(name for name in names if name == DOCKER_BRIDGE or name.startswith(IFACE))


def alternative(search: Iterable[str] = SEARCH) -> str:
    """Return what the host's ``iptables`` is: nft, legacy, or empty."""
    for directory in search:
        path = f"{directory}/iptables"
        if os.path.lexists(path):
            name = Path(os.path.realpath(path)).name
            return LEGACY if "legacy" in name else NFT if "nft" in name else ""
    return ""


def usable(search: Iterable[str] = SEARCH) -> frozenset[str]:
    """Return the drivers whose tools are here; nft itself is needed by all."""
    found = {OWN}
    if any(os.access(f"{directory}/iptables-nft-restore", os.X_OK) for directory in search):
        found.add(NFT)
    if tables.legacy_usable():
        found.add(LEGACY)
    return frozenset(found)


@dataclass
class Detector:
    """Looks, decides, and remembers what was decided.

    ``remember`` is a file that outlives the writer; without ``keep`` it is only read.
    """

    nft: tables.Tables
    legacy: tables.Tables
    remember: Path | None = None
    keep: bool = True
    bridges: Callable[[], frozenset[str]] = bridges
    alternative: Callable[[], str] = alternative
    usable: Callable[[], frozenset[str]] = usable
    legacy_present: Callable[[], bool] = lambda: xtlegacy.present(4, "filter")
    current: str | None = None
    settled: bool = False
    _glance: object = None
    _legacy_read: bool = False

    def __post_init__(self) -> None:
        if self.remember is not None and self.remember.exists():
            self.current, _, settled = self.remember.read_text().strip().partition(" ")
            self.settled = settled == "settled"
            if self.current not in detect.DRIVERS:
                self.current, self.settled = None, False

    def look(self, listed: frozenset[tuple[str, str]], chains: Callable[[], Iterable[str]]) -> Seen:
        """Read the host and decide.

        Args:
            listed: (family, name) of every nft table.
            chains: returns the names of the chains of Docker's own nftables table, when there is one.
        """
        self._glance = self.glance()
        found: dict[str, Tables] = {}
        here, other, can = self.bridges(), self.alternative(), self.usable()
        nft = legacy = owned = detect.NOTHING
        # A program that is missing is an error of its own where the tables are in use already.
        if {("ip", "filter"), ("ip", "nat"), ("ip6", "filter")} & listed or self.current == NFT:
            found[NFT] = self.nft.read()
            nft = traces(found[NFT])
        if NATIVE_TABLE in listed:
            owned = native(chains())
        # The kernel makes a legacy table when it is asked for: only where one could matter.
        unexplained = here - nft.named - owned.named
        self._legacy_read = (bool(unexplained) or LEGACY in (other, self.current)) and self.legacy_present()
        if self._legacy_read:
            found[LEGACY] = self.legacy.read()
            legacy = traces(found[LEGACY])
        facts = Facts(nft, legacy, owned, here, other, can)
        return Seen(detect.choose(facts, self.current, self.settled), found)

    def decided(self, choice: Choice) -> None:
        """Remember what is in force now."""
        self.current, self.settled = choice.driver, choice.settled
        if self.remember is not None and self.keep:
            partial = self.remember.with_suffix(".new")
            partial.write_text(f"{choice.driver}{' settled' if choice.settled else ''}\n")
            partial.replace(self.remember)

    def unannounced(self) -> bool:
        """Tell whether something changed since the last look that no notification tells."""
        return self.glance() != self._glance

    def mark(self) -> Hashable:
        """Return what is another value when ``look`` would find something else outside nftables.

        It reads legacy tables only where the last look did: the kernel makes those that are asked for.
        """
        legacy = frozen(self.legacy.read()) if self._legacy_read else None
        where = (self.bridges(), self.alternative(), self.usable(), self.legacy_present())
        return legacy, where, self.current, self.settled

    def glance(self) -> object:
        """Return what is compared for that."""
        legacy = self.legacy.read() if self.current == LEGACY else None
        return legacy, None if self.settled else self.bridges()
