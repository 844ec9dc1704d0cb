"""The whole decision inside our own nft table, for hosts without a chain DOCKER-USER. Pure.

Chain by chain it says what ``Skeleton.chains4`` says in iptables. In nftables an accept ends a base chain and
not the packet's way: what another table drops stays dropped, and what another table accepts is decided here
all the same, so nothing of Docker's has to be hooked or asked.
"""

from __future__ import annotations

from enforcer.netfilter import opening
from enforcer.netfilter.model import COMMENT, Entry
from enforcer.netfilter.skeleton import (
    DENIED,
    HOST,
    IFACE,
    MAXELEM,
    NEW_PER_SECOND,
    PINS,
    SEEN,
    SEEN_FOR,
    SEEN_MAX,
    TABLE,
    TIMEOUT,
    Chain,
    Skeleton,
    rules,
)

SETS = {PINS: "pins", HOST: "host", DENIED: "denied", SEEN: "seen"}
"""The sets of the table that stand for the ipsets of those names."""

FLOW = "ipv4_addr . inet_proto . inet_service . ipv4_addr"
NAT = frozenset({"srcnat", "dstnat"})
LIMITED = 65536  # sources with a limit of their own
PASSING, RECORD, REFUSE, OUT, IN, INPUT = (
    "passing",
    "record",
    "refuse",
    "sandbox_out",
    "sandbox_in",
    "sandbox_host",
)

_THERE = "ip saddr . meta l4proto . th dport . ip daddr"
_ASKS = "ip saddr . meta l4proto . th dport . ip saddr"
_BACK = "ip daddr . meta l4proto . th sport . ip saddr"
# The first two bytes of an ICMP message are its type and code, where other protocols have a port.
_ICMP = "ip saddr . meta l4proto . th sport . ip daddr"
_PORTS = "meta l4proto { tcp, udp }"
_REPLY = "ct state established ct direction reply"


def sets() -> list[str]:
    """Return the declarations of the table's sets, beside those of claims."""
    timed = f"timeout {TIMEOUT}s; counter;"
    return [
        f"  set {SETS[PINS]} {{ type {FLOW}; size {MAXELEM}; flags timeout; {timed} }}",
        f"  set {SETS[HOST]} {{ type {FLOW}; size {MAXELEM}; flags timeout; {timed} }}",
        f"  set {SETS[DENIED]} {{ type ipv4_addr; size {MAXELEM}; flags timeout; {timed} }}",
        f"  set {SETS[SEEN]} {{ type {FLOW}; size {SEEN_MAX}; flags dynamic,timeout; {timed} }}",
        *(
            f"  set {name} {{ type ipv4_addr; size {LIMITED}; flags dynamic,timeout; timeout 10s; }}"
            for name in ("rate_log", "rate_new", "rate_reset", "rate_reject")
        ),
        f"  set flows {{ type ipv4_addr; size {LIMITED}; flags dynamic; }}",
    ]


def _limit(name: str, rate: str) -> str:
    return f"update @{name} {{ ip saddr limit rate {rate} packets }}"


def chains(skeleton: Skeleton) -> tuple[Chain, ...]:
    """Return the chains that decide, beside those of ``Skeleton.backstop``."""
    mark = f"{skeleton.mark:#x}"
    mine, theirs = f'iifname "{IFACE}*"', f'oifname "{IFACE}*"'

    def chain(name: str, lines: list[tuple[str, str]], hook: str = "", priority: str = "") -> Chain:
        return Chain(name, hook, priority, rules(name, lines), "nat" if priority in NAT else "filter")

    admin = "reject with icmpx type admin-prohibited"
    marked = f"meta mark & {mark} != 0"
    # The bit alone says nothing.
    going, coming = f"ip saddr @{opening.OPEN} {marked}", f"ip daddr @{opening.OPEN} {marked}"
    asked = f"{mine} {marked} {_PORTS} th dport {opening.DNS_PORT} {_ASKS} @{SETS[HOST]}"
    return (
        chain(PASSING, [("", f"meta mark set meta mark | {mark}"), ("", "accept")]),
        chain(
            RECORD,
            [
                # A destination that was logged is only counted for a while.
                (f"{_PORTS} {_THERE} @{SETS[SEEN]}", "return"),
                (f"meta l4proto icmp {_ICMP} @{SETS[SEEN]}", "return"),
                (_limit("rate_log", "over 20/second burst 50"), "return"),
                ("", f'log prefix "corral-denied" group {skeleton.nflog_group}'),
                (_PORTS, f"add @{SETS[SEEN]} {{ {_THERE} timeout {SEEN_FOR}s }}"),
                ("meta l4proto icmp", f"add @{SETS[SEEN]} {{ {_ICMP} timeout {SEEN_FOR}s }}"),
            ],
        ),
        chain(
            REFUSE,
            [
                # No verdict: the match alone counts what this container was denied.
                (f"ip saddr @{SETS[DENIED]}", ""),
                ("", f"jump {RECORD}"),
                # A reset about a rewritten address would be sent under an address nobody asked.
                (f"ct status dnat {_limit('rate_reject', '500/second burst 500')}", admin),
                (
                    f"meta l4proto tcp {_limit('rate_reset', '500/second burst 500')}",
                    "reject with tcp reset",
                ),
                (f"meta l4proto != tcp {_limit('rate_reject', '500/second burst 500')}", admin),
                ("", "drop"),
            ],
        ),
        chain(
            OUT,
            [
                ("ct status dnat", f"goto {REFUSE}"),
                (
                    f"ct state new add @flows {{ ip saddr ct count over {skeleton.flows_per_source} }}",
                    f"goto {REFUSE}",
                ),
                (
                    "ct state new "
                    + _limit("rate_new", f"over {NEW_PER_SECOND}/second burst {skeleton.flows_per_source}"),
                    f"goto {REFUSE}",
                ),
                # No shortcut for established flows: withdrawing an element cuts the flow.
                (f"{_THERE} @{SETS[PINS]}", f"goto {PASSING}"),
                (f"{_REPLY} {_BACK} @{SETS[PINS]}", f"goto {PASSING}"),
                (going, f"goto {PASSING}"),
                ("", f"goto {REFUSE}"),
            ],
        ),
        chain(
            IN,
            [
                ("meta l4proto icmp ct state related ct direction reply", f"goto {PASSING}"),
                (f"{_REPLY} {_BACK} @{SETS[PINS]}", f"goto {PASSING}"),
                (coming, f"goto {PASSING}"),
                ("", "drop"),
            ],
        ),
        chain(
            INPUT,
            [
                (f"{_THERE} @{SETS[HOST]}", f"goto {PASSING}"),
                (_REPLY, f"goto {PASSING}"),
                ("", f"goto {REFUSE}"),
            ],
        ),
        chain("forward_decision", [(mine, f"goto {OUT}"), (theirs, f"goto {IN}")], "forward", "filter"),
        chain("input_decision", [(mine, f"goto {INPUT}")], "input", "filter"),
        chain(
            "destination_nat",
            [(asked, f"redirect to :{opening.RESOLVER_PORT}")],
            "prerouting",
            "dstnat",
        ),
        chain(
            "source_nat",
            [(f'oifname != "{IFACE}*" meta mark & {mark} != 0', "masquerade")],
            "postrouting",
            "srcnat",
        ),
    )


def script(
    skeleton: Skeleton,
    gateways: frozenset[str],
    owners: frozenset[tuple[str, int]],
    holdable: bool,
    closed: frozenset[str] = frozenset(),
) -> str:
    """Return one nft transaction that puts the table there, decision and backstop."""
    all_chains = (*chains(skeleton), *skeleton.backstop)
    return skeleton.nft_script(gateways, owners, holdable, all_chains, sets(), closed)


def elements_script(name: str, lines: list[str]) -> str:
    """Return the lines that fill a set of the table, for the same transaction."""
    if not lines:
        return ""
    return f"add element inet {TABLE} {SETS[name]} {{ {', '.join(lines)} }}\n"


def element(entry: Entry) -> str:
    """Return an element of ``pins`` or ``host`` as nft reads it."""
    e = entry.element
    comment = f' comment "{entry.comment}"' if entry.comment and COMMENT.fullmatch(entry.comment) else ""
    key = f"{e.src} . {e.proto} . {e.port} . {e.dst}"
    return f"{key} counter packets {entry.packets} bytes 0 timeout {max(1, entry.timeout)}s{comment}"
