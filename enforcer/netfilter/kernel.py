"""The real kernel: the same interface as ``fake.FakeKernel``."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import socket
from collections.abc import Collection, Iterable, Mapping
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Any, Protocol

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.nfnetlink.nfctsocket import NFCTAttrTuple, NFCTSocket

from enforcer.netfilter import process, rtnl
from enforcer.netfilter.claims import Link
from enforcer.netfilter.hold import FREE, HELD, NO, PLAIN, PROBE, TableHold
from enforcer.netfilter.ipsets import SetError, Sets
from enforcer.netfilter.model import PROTOCOLS, Element, Entry
from enforcer.netfilter.plan import SET_TYPES, Observed, Plan, Wanted, parse_save, plan, removal
from enforcer.netfilter.ports import DOWN, ISOLATE, Fix, Port
from enforcer.netfilter.process import Run, ToolError
from enforcer.netfilter.refusals import Tally
from enforcer.netfilter.skeleton import DENIED, IFACE, SEEN, TABLE, Skeleton

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

    def ports(self) -> tuple[Port, ...]:
        """Return the links that are a bridge's port or whose other end is in another namespace."""

    def set_ports(self, fixes: Iterable[Fix]) -> None:
        """Isolate ports, put links down or up; one that is gone by now is fine."""

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

    def tallies(self) -> list[Tally]:
        """Return what was denied, by destination, as counted since each was logged last."""

    def forget_tallies(self, gone: Iterable[Tally]) -> None:
        """Delete such counts."""

    def watch(self, sources: Iterable[str], forget: Iterable[str]) -> None:
        """Count denied packets of ``sources`` from now on, and of ``forget`` no more."""

    def forget_flows(self, elements: Iterable[Element]) -> None:
        """Delete the conntrack entries of withdrawn elements."""


class RealKernel:
    """netfilter of the network namespace the process lives in.

    With ``hold`` it keeps our nft table to itself, so that a flush by others passes it over.
    """

    def __init__(
        self, run: Run = process.run, bridge_filter: Path = BRIDGE_FILTER, hold: bool = False
    ) -> None:
        self._run = run
        self._holding = hold
        self._can_hold = False
        self._hold = TableHold(TABLE)
        self._bridge_filter = bridge_filter
        self._sets = Sets()
        self._rtnl = rtnl.Links()

    def close(self) -> None:
        """Close netlink sockets."""
        self._sets.close()
        self._rtnl.close()
        self._hold.release()

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

    def ports(self) -> tuple[Port, ...]:
        """See Kernel."""
        try:
            return self._rtnl.ports()
        except OSError as error:
            raise KernelError(f"reading interfaces: {error}") from error

    def set_ports(self, fixes: Iterable[Fix]) -> None:
        """See Kernel."""
        for fix in fixes:
            try:
                if fix.act == ISOLATE:
                    self._rtnl.isolate(fix.port.index)
                else:
                    self._rtnl.set_up(fix.port.index, fix.act != DOWN)
            except OSError as error:
                # Its container may be gone by now, or it left the bridge: the next look tells.
                if not rtnl.gone(error):
                    raise KernelError(f"changing {fix.port.name}: {error}") from error

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
        backstop, gateways, owners, hold = self._backstop()
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
            hold=hold,
        )

    def _read_filter(self, name: str) -> int | None:
        try:
            return int((self._bridge_filter / f"bridge-nf-call-{name}").read_text())
        except (OSError, ValueError):
            return None

    def _backstop(
        self,
    ) -> tuple[dict[str, tuple[str, ...]] | None, frozenset[str], frozenset[tuple[str, int]], str]:
        # Listing all tables first tells a missing table from a failing tool without reading messages.
        tables = json.loads(self._exec("nft", "-j", "list", "tables"))["nftables"]
        if not any(
            row.get("table", {}).get("name") == TABLE and row["table"]["family"] == "inet" for row in tables
        ):
            return None, frozenset(), frozenset(), self._how_held(())
        rows = json.loads(self._exec("nft", "-j", "list", "table", "inet", TABLE))["nftables"]
        chains: dict[str, list[str]] = {}
        gateways: frozenset[str] = frozenset()
        owners: frozenset[tuple[str, int]] = frozenset()
        hold = NO
        for row in rows:
            if "table" in row:
                flags = row["table"].get("flags", ())
                hold = self._how_held((flags,) if isinstance(flags, str) else flags)
            elif "chain" in row:
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
        return {name: tuple(parts) for name, parts in chains.items()}, gateways, owners, hold

    def _how_held(self, flags: Iterable[str]) -> str:
        if "persist" in flags:
            self._can_hold = True
            return HELD if self._hold.held or not self._holding else FREE
        if not self._can_hold:
            # Asked again each time: nft may have failed for a reason that passes.
            with contextlib.suppress(KernelError):
                self._exec("nft", "-c", "-f", "-", stdin=PROBE)
                self._can_hold = True
        return PLAIN if self._can_hold else NO

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
                self._nft(step.text)
            elif step.kind == "hold":
                self._take()
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

    def _nft(self, script: str) -> None:
        # A program of its own cannot change a table that this process holds.
        self._hold.release()
        try:
            self._exec("nft", "-f", "-", stdin=script)
        finally:
            if self._holding and self._can_hold:
                self._take()

    def _take(self) -> None:
        try:
            self._hold.take()
        except OSError as error:
            # The rules stand; only a flush of all of them would now take ours along until they are mended.
            log.error("table inet %s cannot be held: %s", TABLE, error)

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
                self._hold.release()
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

    def tallies(self) -> list[Tally]:
        """See Kernel."""
        try:
            return self._sets.tallies(SEEN)
        except SetError as error:
            raise KernelError(str(error)) from error

    def forget_tallies(self, gone: Iterable[Tally]) -> None:
        """See Kernel."""
        try:
            self._sets.drop_tallies(SEEN, gone)
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

    def forget_flows(self, elements: Iterable[Element]) -> None:
        """See Kernel."""
        gone = {(e.src, PROTOCOLS[e.proto], e.port, e.dst) for e in elements}
        if not gone:
            return
        try:
            with contextlib.closing(NFCTSocket()) as conntrack:
                try:
                    for key in sorted(gone):
                        _delete_flows(conntrack, key)
                except NetlinkError as error:
                    if error.code != errno.EINVAL:
                        raise
                    # Before Linux 6.8 the kernel deletes by complete tuples only.
                    _delete_one_by_one(conntrack, gone)
        except (NetlinkError, OSError) as error:
            raise KernelError(f"deleting conntrack entries: {error}") from error


def _uid(value: Any) -> int:
    if isinstance(value, int):
        return value
    # nft prints the name of a user it knows.
    import pwd

    return pwd.getpwnam(str(value)).pw_uid


def _delete_flows(conntrack: NFCTSocket, key: tuple[str, int, int, str]) -> None:
    source, proto, port, destination = key
    flows = NFCTAttrTuple(saddr=source, daddr=destination, proto=proto, dport=port)
    flows.attrs()  # fills in the flags
    only = {"attrs": [["CTA_FILTER_ORIG_FLAGS", flows.flags]]}
    conntrack.entry("del", tuple_orig=flows, cta_filter=only)


def _delete_one_by_one(conntrack: NFCTSocket, gone: Collection[tuple[str, int, int, str]]) -> None:
    # The kernel picks the flows of one source, few against the whole table, before they are parsed.
    for source in sorted({key[0] for key in gone}):
        for flow in list(conntrack.dump(tuple_orig=NFCTAttrTuple(saddr=source))):
            original = _tuple(flow)
            if original is not None and _key(original) in gone:
                # A flow that ended by itself in between is as good as deleted.
                with contextlib.suppress(NetlinkError):
                    conntrack.entry("del", tuple_orig=original)


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
