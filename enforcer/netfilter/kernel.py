"""The real kernel: the same interface as ``fake.FakeKernel``."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
from collections.abc import Iterable, Mapping
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Any, Protocol

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.nfnetlink.nfctsocket import NFCTAttrTuple, NFCTSocket

from enforcer.netfilter import process
from enforcer.netfilter.claims import Link
from enforcer.netfilter.ipsets import SetError, Sets
from enforcer.netfilter.model import PROTOCOLS, Element, Entry
from enforcer.netfilter.plan import SET_TYPES, Observed, Plan, Wanted, parse_save, plan, removal
from enforcer.netfilter.process import Run, ToolError
from enforcer.netfilter.skeleton import DENIED, IFACE, TABLE, Skeleton

log = logging.getLogger("corral.netfilter")

BRIDGE_FILTER = Path("/proc/sys/net/bridge")
PRIORITIES = {-300: "raw", -1: "filter - 1", 0: "filter", 10: "filter + 10"}


class KernelError(Exception):
    """The kernel could not be read or written; ``sent`` is what was being written."""

    def __init__(self, text: str, sent: str = "") -> None:
        super().__init__(text)
        self.sent = sent


class Kernel(Protocol):
    """What the writer needs of a kernel. Every method raises KernelError when it cannot do its work."""

    def links(self) -> tuple[Link, ...]:
        """Return corral's bridges with their addresses."""

    def host_addresses(self) -> frozenset[str]:
        """Return every IPv4 address of this host."""

    def audit(self, skeleton: Skeleton, wanted: Wanted | None) -> Plan:
        """Return what differs from the skeleton; see ``plan.plan`` for ``wanted``."""

    def filtering(self) -> bool:
        """Tell whether packets between ports of one bridge meet the rules; cheap."""

    def carry_out(self, todo: Plan) -> None:
        """Write the steps of a plan in order; stops at the first that fails."""

    def remove(self, skeleton: Skeleton) -> None:
        """Take everything of ours out; foreign rules stay."""

    def entries(self, name: str) -> dict[Element, Entry]:
        """Return the elements of a set as the kernel holds them."""

    def change(self, name: str, put: Mapping[Element, str], drop: Iterable[Element]) -> None:
        """Add or renew, then delete elements. Counters of renewed ones are kept."""

    def denied(self) -> dict[str, int]:
        """Return how many packets of each watched source were denied."""

    def watch(self, sources: Iterable[str], forget: Iterable[str]) -> None:
        """Count denied packets of ``sources`` from now on, and of ``forget`` no more."""

    def forget_flows(self, elements: Iterable[Element]) -> int:
        """Delete the conntrack entries of withdrawn elements; returns how many."""


class RealKernel:
    """netfilter of the network namespace the process lives in."""

    def __init__(self, run: Run = process.run, bridge_filter: Path = BRIDGE_FILTER) -> None:
        self._run = run
        self._bridge_filter = bridge_filter
        self._sets = Sets()

    def close(self) -> None:
        """Close netlink sockets."""
        self._sets.close()

    def _exec(self, *argv: str, stdin: str | None = None) -> str:
        try:
            return self._run(argv, stdin)
        except ToolError as error:
            raise KernelError(str(error), error.sent) from error

    def links(self) -> tuple[Link, ...]:
        """See Kernel."""
        return tuple(link for link in self._links() if link.name.startswith(IFACE))

    def host_addresses(self) -> frozenset[str]:
        """See Kernel."""
        return frozenset(str(address.ip) for link in self._links() for address in link.addresses)

    def _links(self) -> list[Link]:
        try:
            with IPRoute() as route:
                addresses: dict[int, list[IPv4Interface]] = {}
                for row in route.get_addr(family=socket.AF_INET):
                    text = row.get_attr("IFA_LOCAL") or row.get_attr("IFA_ADDRESS")
                    addresses.setdefault(row["index"], []).append(IPv4Interface(f"{text}/{row['prefixlen']}"))
                return [
                    Link(row.get_attr("IFLA_IFNAME"), row["index"], tuple(addresses.get(row["index"], ())))
                    for row in route.get_links()
                ]
        except (NetlinkError, OSError) as error:
            raise KernelError(f"reading interfaces: {error}") from error

    def observe(self) -> Observed:
        """Read everything the skeleton consists of."""
        try:
            kinds = {name: self._sets.kind(name) for name in SET_TYPES}
        except SetError as error:
            raise KernelError(str(error)) from error
        backstop, gateways, owners = self._backstop()
        return Observed(
            tables={
                (4, "filter"): parse_save(self._exec("iptables-nft", "-S")),
                (4, "nat"): parse_save(self._exec("iptables-nft", "-t", "nat", "-S")),
                (6, "filter"): parse_save(self._exec("ip6tables-nft", "-S")),
            },
            backstop=backstop,
            gateways=gateways,
            owners=owners,
            sets={name: kind for name, kind in kinds.items() if kind is not None},
            bridge_filter=(self._read_filter("iptables"), self._read_filter("ip6tables")),
        )

    def _read_filter(self, name: str) -> int | None:
        try:
            return int((self._bridge_filter / f"bridge-nf-call-{name}").read_text())
        except (OSError, ValueError):
            return None

    def _backstop(
        self,
    ) -> tuple[dict[str, tuple[str, ...]] | None, frozenset[str], frozenset[tuple[str, int]]]:
        # Listing all tables first tells a missing table from a failing tool without reading messages.
        tables = json.loads(self._exec("nft", "-j", "list", "tables"))["nftables"]
        if not any(
            row.get("table", {}).get("name") == TABLE and row["table"]["family"] == "inet" for row in tables
        ):
            return None, frozenset(), frozenset()
        rows = json.loads(self._exec("nft", "-j", "list", "table", "inet", TABLE))["nftables"]
        chains: dict[str, list[str]] = {}
        gateways: frozenset[str] = frozenset()
        owners: frozenset[tuple[str, int]] = frozenset()
        for row in rows:
            if "chain" in row:
                chain = row["chain"]
                priority = chain.get("prio")
                chains[chain["name"]] = [f"{chain.get('hook')} {PRIORITIES.get(priority, priority)}"]
            elif "rule" in row:
                chains[row["rule"]["chain"]].append(str(row["rule"].get("comment", "")))
            elif "set" in row:
                elements: list[Any] = row["set"].get("elem", [])
                if row["set"]["name"] == "gateways":
                    gateways = frozenset(elements)
                elif row["set"]["name"] == "owners":
                    owners = frozenset((e["concat"][0], _uid(e["concat"][1])) for e in elements)
        return {name: tuple(parts) for name, parts in chains.items()}, gateways, owners

    def audit(self, skeleton: Skeleton, wanted: Wanted | None) -> Plan:
        """See Kernel."""
        return plan(skeleton, self.observe(), wanted)

    def filtering(self) -> bool:
        """See Kernel."""
        return self._read_filter("iptables") == 1 and self._read_filter("ip6tables") == 1

    def carry_out(self, todo: Plan) -> None:
        """See Kernel."""
        for step in todo.steps:
            if step.kind == "nft":
                self._exec("nft", "-f", "-", stdin=step.text)
            elif step.kind == "sets":
                self._create(step.text)
            elif step.kind == "iptables":
                self._restore(step.family, step.text)
            elif step.kind == "new-chain":
                # Docker may create the chain in the same instant; either is fine.
                with contextlib.suppress(KernelError):
                    self._exec("iptables-nft", "-w", "-N", step.text)
            elif step.kind == "sysctl":
                self._enable_filter(step.text)

    def _create(self, name: str) -> None:
        try:
            self._sets.create(name, SET_TYPES[name])
        except SetError as error:
            raise KernelError(str(error)) from error

    def _restore(self, family: int, text: str) -> None:
        tool = "iptables-nft-restore" if family == 4 else "ip6tables-nft-restore"
        self._exec(tool, "--noflush", "-w", stdin=text)

    def _enable_filter(self, name: str) -> None:
        try:
            (self._bridge_filter / name).write_text("1\n")
        except OSError as error:
            # The next audit still finds it; the writer grants nothing until it is 1.
            log.error("setting %s: %s (is the module br_netfilter loaded?)", name, error)

    def remove(self, skeleton: Skeleton) -> None:
        """See Kernel."""
        for step in removal(skeleton, self.observe()):
            if step.kind == "iptables":
                self._restore(step.family, step.text)
            elif step.kind == "sets":
                try:
                    self._sets.destroy(step.text)
                except SetError as error:
                    raise KernelError(str(error)) from error
            else:
                self._exec("nft", "-f", "-", stdin=step.text)

    def entries(self, name: str) -> dict[Element, Entry]:
        """See Kernel."""
        try:
            return self._sets.entries(name)
        except SetError as error:
            raise KernelError(str(error)) from error

    def change(self, name: str, put: Mapping[Element, str], drop: Iterable[Element]) -> None:
        """See Kernel."""
        try:
            self._sets.put(name, put)
            self._sets.drop(name, drop)
        except SetError as error:
            raise KernelError(str(error)) from error

    def denied(self) -> dict[str, int]:
        """See Kernel."""
        try:
            return self._sets.sources(DENIED)
        except SetError as error:
            raise KernelError(str(error)) from error

    def watch(self, sources: Iterable[str], forget: Iterable[str]) -> None:
        """See Kernel."""
        try:
            for source in sources:
                self._sets.put_source(DENIED, source)
            for source in forget:
                self._sets.drop_source(DENIED, source)
        except SetError as error:
            raise KernelError(str(error)) from error

    def forget_flows(self, elements: Iterable[Element]) -> int:
        """See Kernel."""
        gone = {(e.src, PROTOCOLS[e.proto], e.port, e.dst) for e in elements}
        if not gone:
            return 0
        count = 0
        try:
            with contextlib.closing(NFCTSocket()) as conntrack:
                for flow in list(conntrack.dump()):
                    original = _tuple(flow)
                    if original is None or _key(original) not in gone:
                        continue
                    # A flow that ended by itself in between is as good as deleted.
                    with contextlib.suppress(NetlinkError):
                        conntrack.entry("del", tuple_orig=original)
                        count += 1
        except (NetlinkError, OSError) as error:
            raise KernelError(f"deleting conntrack entries: {error}") from error
        return count


def _uid(value: Any) -> int:
    if isinstance(value, int):
        return value
    # nft prints the name of a user it knows.
    import pwd

    return pwd.getpwnam(str(value)).pw_uid


def _key(flow: NFCTAttrTuple) -> tuple[str, int, int, str]:
    return (flow.saddr, flow.proto, flow.dport, flow.daddr)


def _tuple(flow: Any) -> NFCTAttrTuple | None:
    original = flow.get_attr("CTA_TUPLE_ORIG")
    addresses, protocol = original.get_attr("CTA_TUPLE_IP"), original.get_attr("CTA_TUPLE_PROTO")
    number = protocol.get_attr("CTA_PROTO_NUM")
    if number not in PROTOCOLS.values():
        return None
    return NFCTAttrTuple(
        saddr=addresses.get_attr("CTA_IP_V4_SRC"),
        daddr=addresses.get_attr("CTA_IP_V4_DST"),
        proto=number,
        sport=protocol.get_attr("CTA_PROTO_SRC_PORT"),
        dport=protocol.get_attr("CTA_PROTO_DST_PORT"),
    )
