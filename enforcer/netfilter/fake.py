"""A kernel in memory that behaves: the unit tests' stand-in for ``kernel.RealKernel``.

One contract suite runs on both, so this one cannot drift. It refuses what the kernel refuses (a jump to a
missing chain, a set that is not there, deleting a line that does not exist), applies a restore all or
nothing, expires elements with the injected clock, and can be told to fail at its n-th call.
"""

from __future__ import annotations

import copy
import itertools
import re
import shlex
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from enforcer.netfilter import opening
from enforcer.netfilter.claims import Link
from enforcer.netfilter.kernel import KernelError
from enforcer.netfilter.model import NO_LIVES, Element, Entry, Lives, Open
from enforcer.netfilter.plan import SET_TYPES, Observed, Plan, Step, Wanted, plan, removal
from enforcer.netfilter.ports import DOWN, ISOLATE, Fix, Port
from enforcer.netfilter.refusals import Tally
from enforcer.netfilter.skeleton import DENIED, IFACE, SEEN, TIMEOUT, Skeleton

BUILTIN = {"filter": ("INPUT", "FORWARD", "OUTPUT"), "nat": ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING")}
BUILTIN_TARGETS = {"ACCEPT", "DROP", "RETURN", "REJECT", "MARK", "MASQUERADE", "NFLOG", "SET", "REDIRECT"}

Table = dict[str, list[str]]


class FakeKernel:
    """netfilter in memory. ``clock`` returns seconds; a test edits the attributes like a foreign tool."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.driver = "nft"
        self.tables: dict[tuple[int, str], Table] = {
            (family, table): {chain: [] for chain in BUILTIN[table]}
            for family, table in ((4, "filter"), (4, "nat"), (6, "filter"))
        }
        self.backstop: dict[str, tuple[str, ...]] | None = None
        self.gateways: frozenset[str] = frozenset()
        self.owners: frozenset[tuple[str, int]] = frozenset()
        self.closed: frozenset[str] = frozenset()
        self.open_sources: dict[str, tuple[float, int, str]] = {}
        self.sets: dict[str, dict[Element, tuple[float, int, str]]] = {}
        self.sources: dict[str, int] | None = None
        self.dormant: frozenset[str] = frozenset()
        self.bridge_filter: tuple[int | None, int | None] = (1, 1)
        self.bridge_filter_stuck = False
        self.interfaces: list[Link] = []
        self.attached: dict[int, Port] = {}
        self.addresses: frozenset[str] = frozenset({"127.0.0.1"})
        self.flows: set[Element] = set()
        self.counted: list[Tally] = []
        self.fail_at: int | None = None
        self.calls = 0

    def _call(self) -> None:
        self.calls += 1
        if self.fail_at is not None and self.calls == self.fail_at:
            raise KernelError(f"injected failure of call {self.calls}")

    def links(self) -> tuple[Link, ...]:
        """See Kernel."""
        self._call()
        return tuple(link for link in self.interfaces if link.name.startswith(IFACE))

    def host_addresses(self) -> frozenset[str]:
        """See Kernel."""
        self._call()
        return self.addresses | {str(a.ip) for link in self.interfaces for a in link.addresses}

    def ports(self) -> tuple[Port, ...]:
        """See Kernel."""
        self._call()
        return tuple(self.attached.values())

    def set_ports(self, fixes: Iterable[Fix]) -> None:
        """See Kernel."""
        self._call()
        for fix in fixes:
            port = self.attached.get(fix.port.index)
            if port is None:
                continue
            if fix.act == ISOLATE:
                self.attached[port.index] = replace(port, isolated=port.bridge is not None)
            else:
                self.attached[port.index] = replace(port, up=fix.act != DOWN)

    def observe(self) -> Observed:
        """Return a snapshot of everything."""
        kinds = {name: SET_TYPES[name] for name in self.sets}
        if self.sources is not None:
            kinds[DENIED] = SET_TYPES[DENIED]
        return Observed(
            copy.deepcopy(self.tables),
            self.backstop,
            self.gateways,
            self.owners,
            kinds,
            closed=self.closed,
            attached=self._networks(),
            bridge_filter=self.bridge_filter,
            dormant=self.dormant,
        )

    def audit(self, skeleton: Skeleton, wanted: Wanted | None) -> Plan:
        """See Kernel."""
        self._call()
        return plan(skeleton, self.observe(), wanted)

    def distrust(self) -> None:
        """See Kernel."""

    def filtering(self) -> bool:
        """See Kernel."""
        return self.bridge_filter == (1, 1)

    def unannounced(self) -> bool:
        """See Kernel."""
        return False

    def carry_out(self, todo: Plan) -> None:
        """See Kernel."""
        for step in todo.steps:
            self._call()
            if step.kind == "nft":
                self._nft(step.text)
            elif step.kind == "sets":
                self._create(step.text)
            elif step.kind == "iptables":
                self._restore(step)
            elif step.kind == "new-chain":
                self.tables[(4, "filter")].setdefault(step.text, [])
            elif step.kind == "sysctl":
                self.bridge_filter = self.bridge_filter if self.bridge_filter_stuck else (1, 1)

    def _create(self, name: str) -> None:
        if name == DENIED:
            self.sources = {} if self.sources is None else self.sources
        else:
            self.sets.setdefault(name, {})

    def _nft(self, script: str) -> None:
        if script.startswith("delete table"):
            self.backstop, self.gateways, self.owners = None, frozenset(), frozenset()
            self.closed, self.open_sources = frozenset(), {}
            return
        if not script.startswith("flush set"):
            chains: dict[str, tuple[str, ...]] = {}
            for name, body in re.findall(r"^  chain (\w+) \{\n(.*?)^  \}", script, re.MULTILINE | re.DOTALL):
                hooked = re.findall(r"type (\w+) hook (\w+) priority ([^;]+); policy (\w+);", body)
                where = " ".join(hooked[0]) if hooked else ""
                chains[name] = (where, *re.findall(r'comment "([^"]+)"', body))
            # The table's elements come along into a new one.
            self.open_sources = {} if self.backstop is None else self.open_sources
            self.backstop, self.dormant = chains, frozenset()
        elif self.backstop is None:
            raise KernelError("No such file or directory", script)
        self.gateways = frozenset(
            re.findall(r"(?<![\w.])\d+\.\d+\.\d+\.\d+(?![\w.])", _elements(script, "gateways"))
        )
        self.closed = frozenset(re.findall(r"[\d.]+/\d+", _elements(script, opening.CLOSED)))
        owners = re.findall(r'"([^"]+)" \. (\d+)', _elements(script, "owners"))
        self.owners = frozenset((bridge, int(uid)) for bridge, uid in owners)

    def _restore(self, step: Step) -> None:
        name = step.text.splitlines()[0].removeprefix("*")
        table = copy.deepcopy(self.tables[(step.family, name)])
        for line in step.text.splitlines()[1:]:
            if line == "COMMIT":
                break
            if line.startswith(":"):
                table[line[1:].split()[0]] = []
                continue
            verb, chain, *rest = line.split(" ", 2)
            self._apply(table, verb, chain, rest[0] if rest else "", line)
        self.tables[(step.family, name)] = table

    def _apply(self, table: Table, verb: str, chain: str, text: str, line: str) -> None:
        if chain not in table:
            raise KernelError(f"chain {chain} does not exist", line)
        if verb == "-A":
            self._check(table, text)
            table[chain].append(text)
        elif verb == "-I":
            position, _, text = text.partition(" ")
            self._check(table, text)
            if int(position) > len(table[chain]) + 1:
                raise KernelError("index of insertion too big", line)
            table[chain].insert(int(position) - 1, text)
        elif verb == "-D":
            if text not in table[chain]:
                raise KernelError("Bad rule (does a matching rule exist in that chain?)", line)
            table[chain].remove(text)
        elif verb == "-F":
            table[chain].clear()
        elif verb == "-X":
            if any(f"-j {chain}" in rule for rules in table.values() for rule in rules):
                raise KernelError(f"chain {chain} is in use", line)
            del table[chain]

    def _check(self, table: Table, text: str) -> None:
        words = shlex.split(text)
        for flag, value in itertools.pairwise(words):
            if flag == "-j" and value not in table and value not in BUILTIN_TARGETS:
                raise KernelError(f"chain {value} does not exist", text)
            if flag in ("--match-set", "--add-set") and value not in self.observe().sets:
                raise KernelError(f"set {value} does not exist", text)

    def remove(self, skeleton: Skeleton) -> None:
        """See Kernel."""
        for step in removal(skeleton, self.observe()):
            self._call()
            if step.kind == "iptables":
                self._restore(step)
            elif step.kind == "sets":
                if step.text == DENIED:
                    self.sources = None
                else:
                    del self.sets[step.text]
            else:
                self._nft(step.text)

    def _living(self, name: str) -> dict[Element, tuple[float, int, str]]:
        if name not in self.sets:
            raise KernelError(f"set {name} does not exist")
        now = self.clock()
        self.sets[name] = {e: row for e, row in self.sets[name].items() if row[0] > now}
        return self.sets[name]

    def entries(self, name: str) -> dict[Element, Entry]:
        """See Kernel."""
        self._call()
        now = self.clock()
        return {
            element: Entry(element, int(until - now), packets, comment)
            for element, (until, packets, comment) in self._living(name).items()
        }

    def change(
        self, name: str, put: Mapping[Element, str], drop: Iterable[Element], lives: Lives = NO_LIVES
    ) -> None:
        """See Kernel."""
        content = self._living(name)
        for element, comment in put.items():
            self._call()
            packets = content[element][1] if element in content else 0
            content[element] = (self.clock() + min(lives.get(element, TIMEOUT), TIMEOUT), packets, comment)
        for element in drop:
            self._call()
            content.pop(element, None)

    def denied(self) -> dict[str, int]:
        """See Kernel."""
        self._call()
        if self.sources is None:
            raise KernelError(f"set {DENIED} does not exist")
        return dict(self.sources)

    def tallies(self) -> list[Tally]:
        """See Kernel."""
        self._call()
        if SEEN not in self.sets:
            raise KernelError(f"set {SEEN} does not exist")
        return list(self.counted)

    def forget_tallies(self, gone: Iterable[Tally]) -> None:
        """See Kernel."""
        self._call()
        dropped = set(gone)
        self.counted = [tally for tally in self.counted if tally not in dropped]

    def watch(self, sources: Iterable[str], forget: Iterable[str]) -> None:
        """See Kernel."""
        if self.sources is None:
            raise KernelError(f"set {DENIED} does not exist")
        for source in sources:
            self.sources.setdefault(source, 0)
        for source in forget:
            self.sources.pop(source, None)

    def _networks(self) -> frozenset[str]:
        return opening.attached(address for link in self.interfaces for address in link.addresses)

    def networks(self) -> frozenset[str]:
        """See Kernel."""
        self._call()
        return self._networks()

    def _living_sources(self) -> dict[str, tuple[float, int, str]]:
        if self.backstop is None:
            raise KernelError(f"set {opening.OPEN} does not exist")
        now = self.clock()
        self.open_sources = {src: row for src, row in self.open_sources.items() if row[0] > now}
        return self.open_sources

    def opened(self) -> dict[str, Open]:
        """See Kernel."""
        self._call()
        if self.backstop is None:
            return {}
        now = self.clock()
        return {
            src: Open(src, int(until - now), packets, text)
            for src, (until, packets, text) in self._living_sources().items()
        }

    def open(self, sources: Mapping[str, str]) -> None:
        """See Kernel."""
        for source, comment in sources.items():
            self._call()
            content = self._living_sources()
            packets = content[source][1] if source in content else 0
            content[source] = (self.clock() + TIMEOUT, packets, comment)

    def close_sources(self, sources: Iterable[str]) -> None:
        """See Kernel."""
        for source in sources:
            self._call()
            # With a table that somebody deleted, what it allowed is gone too.
            self.open_sources = {} if self.backstop is None else self._living_sources()
            self.open_sources.pop(source, None)
            self.flows = {flow for flow in self.flows if flow.src != source}

    def forget_flows(self, elements: Iterable[Element]) -> None:
        """See Kernel."""
        self._call()
        self.flows -= set(elements)


def _elements(script: str, name: str) -> str:
    found = re.search(rf"set {name} \{{[^}}]*?elements = \{{([^}}]*)\}}", script, re.DOTALL)
    found = found or re.search(rf"add element inet \w+ {name} \{{([^}}]*)\}}", script)
    return found.group(1) if found else ""
