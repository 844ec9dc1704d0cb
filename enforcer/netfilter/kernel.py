"""The real kernel: the same interface as ``fake.FakeKernel``."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyroute2.netlink.exceptions import NetlinkError

from enforcer.netfilter import flows, opening, owntable, process, rtnl
from enforcer.netfilter.claims import Link
from enforcer.netfilter.detect import LEGACY, NFT, OWN, Choice
from enforcer.netfilter.hold import FREE, HELD, NO, PLAIN, PROBE, TableHold
from enforcer.netfilter.interface import Kernel, KernelError
from enforcer.netfilter.ipsets import SetError, Sets
from enforcer.netfilter.look import NATIVE_TABLE, Detector, Seen, frozen
from enforcer.netfilter.model import HALF, NO_LIVES, Element, Entry, Lives, Open
from enforcer.netfilter.nftsets import TableSets
from enforcer.netfilter.opening import OPEN
from enforcer.netfilter.opensets import OpenSets
from enforcer.netfilter.plan import SET_TYPES, Observed, Plan, Step, Wanted, plan, removal, together
from enforcer.netfilter.ports import DOWN, ISOLATE, Fix, Port
from enforcer.netfilter.process import Run, ToolError
from enforcer.netfilter.recall import Recall
from enforcer.netfilter.refusals import Tally
from enforcer.netfilter.shape import Shape, shape
from enforcer.netfilter.skeleton import DENIED, HOST, IFACE, PINS, SEEN, TABLE, Skeleton
from enforcer.netfilter.tables import LegacyTables, NftTables, Tables

__all__ = ["Kernel", "KernelError", "RealKernel"]

log = logging.getLogger("corral.netfilter")

BRIDGE_FILTER = Path("/proc/sys/net/bridge")
PROGRAMS = ("nft", "iptables-nft", "ip6tables-nft", "iptables-nft-restore", "ip6tables-nft-restore")


class RealKernel:
    """netfilter of the network namespace the process lives in.

    With ``hold`` it keeps our nft table to itself, so that a flush by others passes it over. ``driver`` is
    where the decision is, unless ``detector`` finds that out at each look.
    """

    def __init__(
        self,
        run: Run = process.run,
        bridge_filter: Path = BRIDGE_FILTER,
        hold: bool = False,
        driver: str = NFT,
        detector: Detector | None = None,
        tables: Mapping[str, Tables] | None = None,
    ) -> None:
        self._run = run
        self._holding = hold
        self._can_hold = False
        self._hold = TableHold(TABLE)
        self._bridge_filter = bridge_filter
        self._tables = tables or {NFT: NftTables(run), LEGACY: LegacyTables(run)}
        self._ipsets = Sets()
        self._nftsets = TableSets(lambda: self._hold.socket)
        self._opens = OpenSets(self._ipsets, self._nftsets, lambda: self.driver != OWN)
        self._rtnl = rtnl.Links()
        self._fixed = Choice(driver, "")
        self._detector = detector
        self._active: str | None = None if detector else driver
        self._recall: Recall[Observed] = Recall(self._mark)

    def close(self) -> None:
        """Close netlink sockets."""
        self._ipsets.close()
        self._nftsets.close()
        self._rtnl.close()
        self._hold.release()

    @property
    def driver(self) -> str:
        """See Kernel."""
        return self._active or self._fixed.driver

    @property
    def _sets(self) -> Sets | TableSets:
        return self._nftsets if self.driver == OWN else self._ipsets

    def networks(self) -> frozenset[str]:
        """See Kernel."""
        return opening.attached(address for link in self._links() for address in link.addresses)

    def opened(self) -> dict[str, Open]:
        """See Kernel."""
        return self._opens.rows()

    def open(self, sources: Mapping[str, str]) -> None:
        """See Kernel."""
        self._opens.put(sources)

    def close_sources(self, sources: Iterable[str]) -> None:
        """See Kernel."""
        self._opens.drop(sources)

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
            return self._rtnl.links()
        except OSError as error:
            raise KernelError(f"reading interfaces: {error}") from error

    def distrust(self) -> None:
        """See Kernel."""
        self._recall.distrust()

    def observe(self) -> Observed:
        """Read everything the skeleton consists of, or return what was read when it was as it is now."""
        return self._recall.look(self._read)

    def _mark(self) -> Hashable | None:
        """Return what is another value when ``_read`` would find something else, None when that is unknown.

        It has everything that is read there, what the programs print through the number of nftables' changes.
        """
        try:
            return (
                self._nftsets.generation(),
                self._detector.mark() if self._detector is not None else self._legacy_mark(),
                tuple(self._ipsets.kind(name) for name in SET_TYPES),
                self.networks(),
                self._filters(),
                (self._hold.held, self._can_hold, self._active),
                # Nothing new is granted where what would mend the rules is missing.
                tuple(process.identity(program) for program in PROGRAMS),
            )
        except (SetError, KernelError, ToolError, OSError):
            return None

    def _legacy_mark(self) -> Hashable:
        return frozen(self._tables[LEGACY].read()) if self._fixed.driver == LEGACY else None

    def _read(self) -> Observed:
        flags = self._flags()
        listed = frozenset(flags)
        try:
            if self._detector is not None:
                seen = self._detector.look(listed, self._native_chains)
            else:
                seen = Seen(self._fixed)
            driver = seen.choice.driver
            tables = dict(seen.tables)
            if driver != OWN and driver not in tables:
                tables[driver] = self._tables[driver].read()
            kinds = self._kinds(driver)
        except ToolError as error:
            raise KernelError(str(error), error.sent) from error
        except (SetError, OSError) as error:
            raise KernelError(str(error)) from error
        table, hold = self._backstop(flags.get(("inet", TABLE)), driver)
        if self._active is None and {owntable.SETS[PINS], owntable.SETS[HOST]} <= table.sets:
            # An earlier writer decided in the table: what is allowed is in there, whatever is needed now.
            self._active = OWN
        return Observed(
            tables=tables.pop(driver, {}),
            backstop=table.chains,
            gateways=table.gateways,
            owners=table.owners,
            sets=kinds,
            table_sets=table.sets,
            closed=table.closed,
            attached=self.networks(),
            bridge_filter=self._filters(),
            dormant=frozenset(f"{family} {name}" for (family, name), f in flags.items() if "dormant" in f),
            hold=hold,
            choice=seen.choice,
            active=self._active,
            others=tables,
        )

    def _kinds(self, driver: str) -> dict[str, str]:
        try:
            kinds = {name: self._ipsets.kind(name) for name in SET_TYPES}
        except SetError:
            if driver != OWN:
                raise
            # That one does without ipset, which this kernel may not have.
            return {}
        return {name: kind for name, kind in kinds.items() if kind is not None}

    def _flags(self) -> dict[tuple[str, str], frozenset[str]]:
        # Listing all tables first tells a missing table from a failing tool without reading messages.
        try:
            return self._nftsets.tables()
        except SetError as error:
            raise KernelError(str(error)) from error

    def _rows(self, *words: str) -> list[dict[str, Any]]:
        """Return what ``nft -j`` lists."""
        text = self._exec("nft", "-j", *words)
        try:
            rows: list[dict[str, Any]] = json.loads(text)["nftables"]
        except (ValueError, KeyError, TypeError) as error:
            raise KernelError(f"nft -j {' '.join(words)}: its answer is not understood: {error!r}") from error
        return rows

    def _native_chains(self) -> list[str]:
        rows = self._rows("-t", "list", "table", *NATIVE_TABLE)
        return [str(row["chain"]["name"]) for row in rows if "chain" in row]

    def _filters(self) -> tuple[int | None, int | None]:
        return self._read_filter("iptables"), self._read_filter("ip6tables")

    def _read_filter(self, name: str) -> int | None:
        try:
            return int((self._bridge_filter / f"bridge-nf-call-{name}").read_text())
        except (OSError, ValueError):
            return None

    def _backstop(self, flags: frozenset[str] | None, driver: str) -> tuple[Shape, str]:
        if flags is None:
            return Shape(), self._how_held(())
        if "dormant" in flags:
            return self._asleep(), self._how_held(flags)
        # The sets of a table that decides can be large: they are read when somebody asks for them.
        terse = ("-t",) if driver == OWN else ()
        found = shape(self._rows(*terse, "list", "table", "inet", TABLE))
        if terse and {"gateways", "owners"} <= found.sets:
            try:
                gateways, owners = self._nftsets.claims()
            except SetError as error:
                raise KernelError(str(error)) from error
            found = replace(found, gateways=gateways, owners=owners)
        if terse and opening.CLOSED in found.sets:
            rows = self._rows("list", "set", "inet", TABLE, opening.CLOSED)
            found = replace(found, closed=shape(rows).closed)
        return found, self._how_held(flags)

    def _asleep(self) -> Shape:
        """Return our dormant table, which ``nft -j`` may fail at: without chains, since none is called."""
        there = set()
        claims: tuple[frozenset[str], frozenset[tuple[str, int]]] = (frozenset(), frozenset())
        try:
            for name in (*owntable.SETS.values(), "gateways", "owners"):
                if self._nftsets.has(name):
                    there.add(name)
            if {"gateways", "owners"} <= there:
                claims = self._nftsets.claims()
        except SetError as error:
            raise KernelError(str(error)) from error
        return Shape({}, *claims, frozenset(there))

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
        todo = plan(skeleton, self.observe(), wanted)
        if not todo.steps and todo.choice is not None:
            self._decided(todo.choice)
        return todo

    def filtering(self) -> bool:
        """See Kernel."""
        return self._filters() == (1, 1)

    def unannounced(self) -> bool:
        """See Kernel."""
        try:
            return self._detector is not None and self._detector.unannounced()
        except (OSError, ToolError):
            # The audit that follows says what it is.
            return True

    def carry_out(self, todo: Plan) -> None:
        """See Kernel."""
        self.distrust()
        for several in together(todo.steps):
            step = several[0]
            if step.kind == "nft":
                self._nft(step.text)
            elif step.kind == "hold":
                self._take()
            elif step.kind == "sets":
                self._create(step.text)
            elif step.kind == "destroy":
                self._destroy(step.text)
            elif step.kind == "driver":
                self._move(step.text)
            elif step.kind == "iptables":
                self._restore(several)
            elif step.kind == "new-chain":
                # Docker may create the chain in the same instant; either is fine.
                with contextlib.suppress(OSError, ToolError):
                    self._tables[step.variant].new_chain(step.text)
            elif step.kind == "sysctl":
                self._enable_filter(step.text)
        if todo.choice is not None:
            self._decided(todo.choice)

    def _decided(self, choice: Choice) -> None:
        self._active = choice.driver
        if self._detector is None or (choice.driver, choice.settled) == (
            self._detector.current,
            self._detector.settled,
        ):
            return
        log.info("the rules are in %s: %s", choice.driver, choice.why)
        try:
            self._detector.decided(choice)
        except OSError as error:
            # After a restart it is found out anew.
            log.error("what was decided cannot be kept: %s", error)

    def _move(self, driver: str) -> None:
        """Use the sets of another driver, filled with what those in use hold."""
        old, before = self._sets, self.driver
        self._active = driver
        # A new table of our own was filled when it was made.
        if before == OWN and driver != OWN:
            for name in (PINS, HOST):
                try:
                    held = old.entries(name)
                    lives = {element: max(1, entry.timeout) for element, entry in held.items()}
                    self._sets.put(name, {e: entry.comment for e, entry in held.items()}, lives)
                except SetError as error:
                    # With a table that somebody deleted, what it allowed is gone too.
                    if not error.missing:
                        raise KernelError(str(error)) from error

    def _nft(self, script: str) -> None:
        if f"set {owntable.SETS[PINS]} {{" in script:
            script += self._contents()
        if f"set {OPEN} {{" in script:
            held = [row for row in self.opened().values() if row.timeout != HALF]
            script += opening.refill(TABLE, {r.src: (r.timeout, r.packets, r.comment) for r in held})
        # A program of its own cannot change a table that this process holds.
        self._hold.release()
        try:
            self._exec("nft", "-f", "-", stdin=script)
        finally:
            if self._holding and self._can_hold:
                self._take()

    def _contents(self) -> str:
        """Return what fills a new table with what the sets in use hold, for the same transaction."""
        text = ""
        for name in (PINS, HOST):
            # Missing sets are why it is made.
            with contextlib.suppress(SetError):
                lines = [owntable.element(entry) for entry in self._sets.entries(name).values()]
                text += owntable.elements_script(name, lines)
        return text

    def _take(self) -> None:
        try:
            self._hold.take()
        except OSError as error:
            # The rules stand; only a flush of all of them would now take ours along until they are mended.
            log.error("table inet %s cannot be held: %s", TABLE, error)

    def _create(self, name: str) -> None:
        try:
            self._ipsets.create(name, SET_TYPES[name])
        except SetError as error:
            raise KernelError(str(error)) from error

    def _destroy(self, name: str) -> None:
        try:
            self._ipsets.destroy(name)
        except SetError as error:
            raise KernelError(str(error)) from error

    def _restore(self, steps: Sequence[Step]) -> None:
        variant = steps[0].variant
        try:
            self._tables[variant].restore([(step.family, step.text) for step in steps])
        except ToolError as error:
            raise KernelError(str(error), error.sent) from error
        except OSError as error:
            raise KernelError(f"writing the {variant} tables: {error}", steps[0].text) from error

    def _enable_filter(self, name: str) -> None:
        try:
            (self._bridge_filter / name).write_text("1\n")
        except OSError as error:
            # The next audit still finds it; the writer grants nothing until it is 1.
            log.error("setting %s: %s (is the module br_netfilter loaded?)", name, error)

    def remove(self, skeleton: Skeleton) -> None:
        """See Kernel."""
        self.distrust()
        for step in removal(skeleton, self.observe()):
            if step.kind == "iptables":
                self._restore([step])
            elif step.kind == "sets":
                self._destroy(step.text)
            else:
                self._hold.release()
                self._exec("nft", "-f", "-", stdin=step.text)

    def entries(self, name: str) -> dict[Element, Entry]:
        """See Kernel."""
        try:
            return self._sets.entries(name)
        except SetError as error:
            raise KernelError(str(error)) from error

    def change(
        self, name: str, put: Mapping[Element, str], drop: Iterable[Element], lives: Lives = NO_LIVES
    ) -> None:
        """See Kernel."""
        try:
            self._sets.put(name, put, lives)
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
        try:
            flows.forget(elements)
        except (NetlinkError, OSError) as error:
            raise KernelError(f"deleting conntrack entries: {error}") from error
