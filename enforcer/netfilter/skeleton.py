"""The constant rules, as text. Pure.

They have the same size for one sandbox or a thousand: what changes is the content of the sets. Every rule
carries a hash of its chain, position and text in its comment; that hash is how the rule is recognised later,
so nobody has to parse a rule. ``docs/ruleset.md`` explains each line.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from ipaddress import IPv4Network

from enforcer.netfilter import opening
from enforcer.netfilter.hold import FLAGS

IFACE = "corral-"
TABLE = "corral"

PINS = "corral-pins"
HOST = "corral-host"
DENIED = "corral-denied"
SEEN = "corral-seen"
OPENED = "corral-open"

OUT, IN, PASS, INPUT, DENY = "CORRAL-OUT", "CORRAL-IN", "CORRAL-PASS", "CORRAL-HOST", "CORRAL-DENY"
DENY6 = "CORRAL-DENY6"
OPEN_OUT, OPEN_BACK = "CORRAL-OPEN", "CORRAL-BACK"
LOG = "CORRAL-LOG"
DOCKER_USER = "DOCKER-USER"

TIMEOUT = 3600  # seconds an element lives without renewal: a dead service decays to closed
MAXELEM = 1048576  # the default of 65,536 is reached
NEW_PER_SECOND = 100  # new flows of one source, after a burst of flows_per_source
SEEN_FOR = 60  # seconds a destination is counted instead of logged
SEEN_MAX = 65536  # with that many, what comes on top is logged at the limited rate and not counted

COMMENT = re.compile(r"\bcorral:[0-9a-f]{12}\b")


@dataclass(frozen=True)
class Rule:
    """One rule of one chain: ``spec`` is iptables or nft syntax without the comment."""

    chain: str
    spec: str
    target: str
    tag: str

    def iptables(self) -> str:
        """Return the rule's text after ``-A CHAIN``."""
        return " ".join(part for part in (self.spec, f"-m comment --comment {self.tag}", self.target) if part)

    def nft(self) -> str:
        """Return the rule's line inside an nft chain."""
        return f'{self.spec} {self.target} comment "{self.tag}"'.strip()


@dataclass(frozen=True)
class Hook:
    """One rule of ours in a foreign chain, at a 1-based position of its own."""

    family: int  # 4 or 6
    table: str
    rule: Rule
    position: int


def rules(chain: str, lines: list[tuple[str, str]]) -> tuple[Rule, ...]:
    """Return the rules of a chain, tagged by their text and place."""
    made = []
    for index, (spec, target) in enumerate(lines):
        digest = hashlib.sha256(f"{chain}\0{index}\0{spec}\0{target}".encode()).hexdigest()[:12]
        made.append(Rule(chain, spec, target, f"corral:{digest}"))
    return tuple(made)


@dataclass(frozen=True)
class Chain:
    """An nft chain of our own table; one without ``hook`` is only jumped to."""

    name: str
    hook: str
    priority: str
    rules: tuple[Rule, ...]
    kind: str = "filter"

    @property
    def shape(self) -> tuple[str, ...]:
        """The chain as it is compared: type, hook, priority, policy, and the tags of its rules."""
        hooked = f"{self.kind} {self.hook} {self.priority} accept" if self.hook else ""
        return (hooked, *(rule.tag for rule in self.rules))


@dataclass(frozen=True)
class Skeleton:
    """All rules for a configuration.

    ``mark`` is one bit of the packet mark that no foreign rule uses; ``nflog_group`` receives denied packets;
    ``flows_per_source`` bounds the connections one container can have open at a time; ``permitted`` are the
    ranges that root lifts.
    """

    mark: int = 0x1000
    nflog_group: int = 4010
    flows_per_source: int = 2048
    permitted: tuple[IPv4Network, ...] = ()

    def __post_init__(self) -> None:
        if self.mark <= 0 or self.mark >= 1 << 32 or self.mark & (self.mark - 1):
            raise ValueError(f"mark must be one bit of 32, not {self.mark:#x}")

    @cached_property
    def chains4(self) -> dict[str, tuple[Rule, ...]]:
        """Our own chains of the IPv4 filter table."""
        bits = f"{self.mark:#x}/{self.mark:#x}"
        reply = "-m conntrack --ctstate ESTABLISHED --ctdir REPLY"
        too_many = (
            f"-m conntrack --ctstate NEW -m connlimit --connlimit-above {self.flows_per_source} "
            "--connlimit-mask 32 --connlimit-saddr"
        )
        per_source = "--hashlimit-mode srcip --hashlimit-htable-expire 10000"
        closed = opening.never(self.permitted)
        return {
            PASS: rules(
                PASS,
                [
                    ("", f"-j MARK --set-xmark {bits}"),
                    ("", "-j ACCEPT"),
                ],
            ),
            LOG: rules(
                LOG,
                [
                    ("", f"-j NFLOG --nflog-group {self.nflog_group} --nflog-prefix corral-denied"),
                    ("", f"-j SET --add-set {SEEN} src,dst,dst --timeout {SEEN_FOR}"),
                ],
            ),
            DENY: rules(
                DENY,
                [
                    # No target: the match alone counts what this container was denied.
                    (f"-m set --match-set {DENIED} src", ""),
                    # A destination that was logged is only counted for a while: a flood to one address must
                    # not use up the rate at which this container's other attempts are logged.
                    (
                        f"-m set ! --match-set {SEEN} src,dst,dst "
                        f"-m hashlimit --hashlimit-name corral-log {per_source} "
                        "--hashlimit-upto 20/sec --hashlimit-burst 50",
                        f"-j {LOG}",
                    ),
                    # The kernel sends a reset about a rewritten address straight to the bridge's port, under
                    # an address nobody asked; an ICMP error is written back like any reply.
                    (
                        f"-m conntrack --ctstate DNAT -m hashlimit --hashlimit-name corral-rej {per_source} "
                        "--hashlimit-upto 500/sec --hashlimit-burst 500",
                        "-j REJECT --reject-with icmp-admin-prohibited",
                    ),
                    (
                        f"-p tcp -m hashlimit --hashlimit-name corral-rst {per_source} "
                        "--hashlimit-upto 500/sec --hashlimit-burst 500",
                        "-j REJECT --reject-with tcp-reset",
                    ),
                    (
                        f"! -p tcp -m hashlimit --hashlimit-name corral-rej {per_source} "
                        "--hashlimit-upto 500/sec --hashlimit-burst 500",
                        "-j REJECT --reject-with icmp-admin-prohibited",
                    ),
                    ("", "-j DROP"),
                ],
            ),
            OPEN_OUT: rules(
                OPEN_OUT,
                [
                    *((f"-d {network}", "-j RETURN") for network in closed),
                    (f"-o {IFACE}+", "-j RETURN"),
                    # Our own table has looked at it just before (see opening.py). The bit alone says nothing:
                    # whoever sets it elsewhere opens nothing for a source that is in no set.
                    (f"-m mark --mark {bits}", f"-j {PASS}"),
                ],
            ),
            OPEN_BACK: rules(
                OPEN_BACK,
                [
                    *((f"-s {network}", "-j RETURN") for network in closed),
                    (f"-m mark --mark {bits}", f"-j {PASS}"),
                ],
            ),
            OUT: rules(
                OUT,
                [
                    # A port that another container publishes is not a way around the set.
                    ("-m conntrack --ctstate DNAT", f"-j {DENY}"),
                    (too_many, f"-j {DENY}"),
                    # Connections that ended are not counted above, and stay in the table for two minutes.
                    (
                        f"-m conntrack --ctstate NEW -m hashlimit --hashlimit-name corral-new {per_source} "
                        f"--hashlimit-above {NEW_PER_SECOND}/sec --hashlimit-burst {self.flows_per_source}",
                        f"-j {DENY}",
                    ),
                    # No shortcut for established flows: each packet must match the set, so withdrawing an
                    # element cuts the flow, and a flow older than the rules does not live on.
                    (f"-m set --match-set {PINS} src,dst,dst", f"-j {PASS}"),
                    (f"{reply} -m set --match-set {PINS} dst,src,src", f"-j {PASS}"),
                    (f"-m set --match-set {OPENED} src", f"-j {OPEN_OUT}"),
                    ("", f"-j {DENY}"),
                ],
            ),
            IN: rules(
                IN,
                [
                    # port-unreachable and fragmentation-needed must come back.
                    ("-p icmp -m conntrack --ctstate RELATED --ctdir REPLY", f"-j {PASS}"),
                    (f"{reply} -m set --match-set {PINS} dst,src,src", f"-j {PASS}"),
                    (f"{reply} -m set --match-set {OPENED} dst", f"-j {OPEN_BACK}"),
                    ("", "-j DROP"),
                ],
            ),
            INPUT: rules(
                INPUT,
                [
                    (f"-m set --match-set {HOST} src,dst,dst", f"-j {PASS}"),
                    (reply, f"-j {PASS}"),
                    ("", f"-j {DENY}"),
                ],
            ),
        }

    @cached_property
    def chains6(self) -> dict[str, tuple[Rule, ...]]:
        """Our own chains of the IPv6 filter table: nothing of v6 is half-handled."""
        refuse = [("", "-j REJECT --reject-with icmp6-adm-prohibited"), ("", "-j DROP")]
        return {DENY6: rules(DENY6, refuse)}

    @cached_property
    def hooks(self) -> tuple[Hook, ...]:
        """Our rules in foreign chains, in the order of their positions."""
        bits = f"{self.mark:#x}/{self.mark:#x}"
        user = rules(DOCKER_USER, [(f"-i {IFACE}+", f"-j {OUT}"), (f"-o {IFACE}+", f"-j {IN}")])
        host = rules("INPUT", [(f"-i {IFACE}+", f"-j {INPUT}")])
        nat = rules("POSTROUTING", [(f"! -o {IFACE}+ -m mark --mark {bits}", "-j MASQUERADE")])
        asked = f"--dport {opening.DNS_PORT} -m set --match-set {HOST} src,dst,src -m mark --mark {bits}"
        resolver = rules(
            "PREROUTING",
            [
                (
                    f"-i {IFACE}+ -p {proto} -m {proto} {asked}",
                    f"-j REDIRECT --to-ports {opening.RESOLVER_PORT}",
                )
                for proto in ("udp", "tcp")
            ],
        )
        forward6 = rules("FORWARD", [(f"-i {IFACE}+", f"-j {DENY6}"), (f"-o {IFACE}+", f"-j {DENY6}")])
        input6 = rules("INPUT", [(f"-i {IFACE}+", f"-j {DENY6}")])
        return (
            Hook(4, "filter", user[0], 1),
            Hook(4, "filter", user[1], 2),
            Hook(4, "filter", host[0], 1),
            Hook(4, "nat", nat[0], 1),
            Hook(4, "nat", resolver[0], 1),
            Hook(4, "nat", resolver[1], 2),
            Hook(6, "filter", forward6[0], 1),
            Hook(6, "filter", forward6[1], 2),
            Hook(6, "filter", input6[0], 1),
        )

    @cached_property
    def backstop(self) -> tuple[Chain, ...]:
        """Base chains of our own nft table: they stand when DOCKER-USER does not."""
        mine, theirs = f'iifname "{IFACE}*"', f'oifname "{IFACE}*"'
        keep = f"{0xFFFFFFFF ^ self.mark:#x}"
        unmarked = f"meta mark & {self.mark:#x} == 0"
        clear = f"meta mark set meta mark & {keep}"

        def chain(name: str, hook: str, priority: str, lines: list[tuple[str, str]]) -> Chain:
            return Chain(name, hook, priority, rules(name, lines))

        return (
            Chain(
                opening.OUT, "", "", rules(opening.OUT, opening.rules_out(IFACE, self.permitted, self.mark))
            ),
            Chain(opening.BACK, "", "", rules(opening.BACK, opening.rules_back(self.permitted, self.mark))),
            chain(
                "anti_spoof",
                "prerouting",
                "raw",
                [
                    (f"{mine} meta nfproto ipv6", "counter drop"),
                    # The next two pass the reverse-path check.
                    (f"{mine} ip saddr 0.0.0.0", "counter drop"),
                    (f"{mine} fib daddr type {{ broadcast, multicast }}", "counter drop"),
                    (f"{mine} fib saddr . iif oif 0", "counter drop"),
                ],
            ),
            # After whatever restores packet marks from connection tracking, and before the address changes.
            chain(
                "question", "prerouting", "dstnat - 1", [(mine, clear), opening.question(IFACE, self.mark)]
            ),
            # A host that restores the packet mark from conntrack would hand our bit to anyone.
            chain(
                "forward_clear",
                "forward",
                "filter - 1",
                [
                    (mine, clear),
                    (theirs, clear),
                    (f"{mine} ip saddr @{opening.OPEN}", f"jump {opening.OUT}"),
                    (f"{theirs} ip daddr @{opening.OPEN}", f"jump {opening.BACK}"),
                ],
            ),
            chain("input_clear", "input", "filter - 1", [(mine, clear)]),
            chain(
                "forward_backstop",
                "forward",
                "filter + 10",
                [(f"{mine} {unmarked}", "counter drop"), (f"{theirs} {unmarked}", "counter drop")],
            ),
            chain(
                "input_backstop",
                "input",
                "filter + 10",
                [
                    (f"{mine} {unmarked}", "counter drop"),
                    # A gateway address is no boundary by itself: other bridges and the uplink reach it too.
                    (f'iifname != "lo" iifname != "{IFACE}*" ip daddr @gateways', "counter drop"),
                ],
            ),
            chain(
                "output_owner",
                "output",
                "filter",
                [
                    (
                        f"{theirs} ct state new meta skuid != 0 oifname . meta skuid != @owners",
                        "counter drop",
                    ),
                    (f"{theirs} meta nfproto ipv6", "counter drop"),
                ],
            ),
        )

    def nft_script(
        self,
        gateways: frozenset[str],
        owners: frozenset[tuple[str, int]],
        holdable: bool = False,
        chains: Sequence[Chain] | None = None,
        sets: Sequence[str] = (),
        closed: frozenset[str] = frozenset(),
    ) -> str:
        """Return one nft transaction that replaces our table, with what its sets about this host are to hold.

        ``holdable``: the writer can hold the new table (see ``hold.py``), kernel and nft know how.
        ``chains`` (default: the backstop) and ``sets`` (declarations) are what else is in it.
        """
        if holdable:
            lines = [f"destroy table inet {TABLE}", f"table inet {TABLE} {{", f"  {FLAGS}"]
        else:
            lines = [f"table inet {TABLE} {{ }}", f"delete table inet {TABLE}", f"table inet {TABLE} {{"]
        lines += _nft_set("gateways", "type ipv4_addr", sorted(gateways))
        lines += _nft_set(
            "owners", "typeof meta oifname . meta skuid", [f'"{i}" . {u}' for i, u in sorted(owners)]
        )
        lines += opening.sets(closed, TIMEOUT, MAXELEM)
        lines += sets
        for chain in self.backstop if chains is None else chains:
            lines.append(f"  chain {chain.name} {{")
            if chain.hook:
                kind = f"type {chain.kind} hook {chain.hook}"
                lines.append(f"    {kind} priority {chain.priority}; policy accept;")
            lines += [f"    {rule.nft()}" for rule in chain.rules]
            lines.append("  }")
        lines.append("}")
        return "\n".join(lines) + "\n"

    @cached_property
    def digest(self) -> str:
        """A hash over every rule: two writers with the same digest load the same skeleton."""
        own = [rule for chains in (self.chains4, self.chains6) for rules in chains.values() for rule in rules]
        own += [hook.rule for hook in self.hooks]
        own += [rule for chain in self.backstop for rule in chain.rules]
        return hashlib.sha256("\n".join(rule.tag for rule in own).encode()).hexdigest()[:16]


def _nft_set(name: str, kind: str, elements: list[str]) -> list[str]:
    body = [f"  set {name} {{", f"    {kind}"]
    if elements:
        body.append(f"    elements = {{ {', '.join(elements)} }}")
    return [*body, "  }"]
