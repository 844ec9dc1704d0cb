"""From what the kernel holds to what has to be written. Pure.

Only two operations touch iptables: *replace a chain* of our own, and *insert a hook* into a foreign chain. A
foreign chain is never declared (that would flush it) and a foreign line is never rewritten: the lines that
are deleted are our own, word for word as the kernel printed them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from enforcer.netfilter import opening, owntable
from enforcer.netfilter.detect import NFT, OWN, Choice
from enforcer.netfilter.hold import FREE, NO, PLAIN
from enforcer.netfilter.skeleton import (
    COMMENT,
    DENIED,
    DOCKER_USER,
    HOST,
    OPENED,
    PINS,
    SEEN,
    TABLE,
    Hook,
    Rule,
    Skeleton,
)

SET_TYPES = {
    PINS: "hash:ip,port,ip",
    HOST: "hash:ip,port,ip",
    DENIED: "hash:ip",
    OPENED: "hash:ip",
    SEEN: "hash:ip,port,ip",
}

Lines = Mapping[str, list[str]]
NFT_CHOICE = Choice(NFT, "")
IPTABLES = frozenset({"ip filter", "ip nat", "ip6 filter"})
OUR_TABLE = f"inet {TABLE}"


Wanted = tuple[frozenset[str], frozenset[tuple[str, int]]]


@dataclass(frozen=True)
class Observed:
    """What the kernel holds.

    ``tables`` maps (family, table) to chain -> rule lines as ``-S`` prints them after ``-A CHAIN``; a chain
    without rules is an empty list, a missing chain is absent. ``backstop`` maps the chains of our nft table
    to their hook line and tags, None when there is no table. ``sets`` maps our ipsets to their types,
    ``table_sets`` are the sets of our table. ``closed`` is what its set of that name holds, ``attached`` what
    it has to hold: the networks of this host's interfaces.
    ``bridge_filter`` is bridge-nf-call-iptables and -ip6tables, None where the file does not exist.
    ``dormant`` are the tables, as "family name", that stand and whose chains the kernel calls for no packet.
    ``hold`` is how our nft table is protected from a flush by others; see ``hold.py``. ``choice`` is the
    driver this host needs, whose ``tables`` these are, and ``active`` the one whose sets are in use, None at
    the start; ``others`` are the tables of the other iptables, as far as they were looked at.
    """

    tables: Mapping[tuple[int, str], Lines]
    backstop: Mapping[str, tuple[str, ...]] | None
    gateways: frozenset[str] = frozenset()
    owners: frozenset[tuple[str, int]] = frozenset()
    sets: Mapping[str, str] = field(default_factory=dict)
    table_sets: frozenset[str] = frozenset()
    closed: frozenset[str] = frozenset()
    attached: frozenset[str] = frozenset()
    bridge_filter: tuple[int | None, int | None] = (1, 1)
    dormant: frozenset[str] = frozenset()
    hold: str = NO
    choice: Choice = NFT_CHOICE
    active: str | None = None
    others: Mapping[str, Mapping[tuple[int, str], Lines]] = field(default_factory=dict)


@dataclass(frozen=True)
class Problem:
    """One difference between the skeleton and the kernel.

    ``part`` is jump, chains, input, nat, ipv6, backstop, claims, hold, sets, bridge-filter, port, driver,
    remains or hook; the last one (Docker's FORWARD chain does not lead through DOCKER-USER first, or a table
    of iptables is dormant) is Docker's or root's to mend; the backstop holds.
    """

    part: str
    text: str
    healable: bool = True


@dataclass(frozen=True)
class Step:
    """One thing to write: kind is nft, hold, sets, iptables, new-chain, sysctl, driver or destroy.

    ``driver``: from here on the sets of the driver ``text`` are used, and get what the others hold.
    ``variant``: which of the two iptables.
    """

    kind: str
    text: str
    family: int = 4
    part: str = ""
    variant: str = NFT


@dataclass(frozen=True)
class Plan:
    """The problems found and the steps that mend them, deny first. ``choice`` is in force after them."""

    problems: tuple[Problem, ...]
    steps: tuple[Step, ...]
    choice: Choice | None = None


def parse_save(text: str) -> dict[str, list[str]]:
    """Split the output of ``iptables -S`` into chains; rules stay opaque text."""
    chains: dict[str, list[str]] = {}
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        name, _, rule = rest.partition(" ")
        if word in ("-P", "-N"):
            chains.setdefault(name, [])
        elif word == "-A":
            chains.setdefault(name, []).append(rule)
    return chains


def together(steps: Iterable[Step]) -> list[list[Step]]:
    """Group what one call can write: neighbouring scripts for the same tables."""
    found: list[list[Step]] = []
    for step in steps:
        last = found[-1][0] if found else None
        if last and step.kind == last.kind == "iptables" and step.variant == last.variant:
            found[-1].append(step)
        else:
            found.append([step])
    return found


def tag_of(line: str) -> str | None:
    """Return our hash out of a rule line, None for a foreign rule."""
    found = COMMENT.search(line)
    return found.group(0) if found else None


def plan(skeleton: Skeleton, seen: Observed, wanted: Wanted | None) -> Plan:
    """Compare and return what is wrong and how to mend it; nothing wrong gives an empty plan.

    ``wanted`` is the content of our table's two sets; None keeps what is there (the boot-time run does not
    know the claims of a writer that may be running).
    """
    gateways, owners = wanted if wanted is not None else (seen.gateways, seen.owners)
    own = seen.choice.driver == OWN
    problems: list[Problem] = []
    steps: list[Step] = []
    if seen.choice.problem:
        problems.append(Problem("driver", seen.choice.problem, healable=False))
    moving = seen.active is not None and seen.active != seen.choice.driver
    if moving:
        problems.append(Problem("driver", f"the rules move to another place: {seen.choice.why}"))

    table = _table(skeleton, seen, gateways, owners, problems)
    # A table that decides still does until the new rules stand.
    decides = "forward_decision" in (seen.backstop or {}) and OUR_TABLE not in seen.dormant
    later = moving and decides and not own
    if not later:
        steps += table
    if not own:
        _sets(seen, problems, steps)
    if moving:
        steps.append(Step("driver", seen.choice.driver, part="driver"))
    if not own:
        _iptables(skeleton, seen, problems, steps)
    if later:
        steps += table
    _remains(skeleton, seen, problems, steps)

    for value, name in zip(seen.bridge_filter, ("iptables", "ip6tables"), strict=True):
        if value != 1:
            problems.append(Problem("bridge-filter", f"bridge-nf-call-{name} is {value}, not 1"))
            steps.append(Step("sysctl", f"bridge-nf-call-{name}", part="bridge-filter"))
    return Plan(tuple(problems), tuple(steps), seen.choice)


def _table(
    skeleton: Skeleton,
    seen: Observed,
    gateways: frozenset[str],
    owners: frozenset[tuple[str, int]],
    problems: list[Problem],
) -> list[Step]:
    """Compare our own nft table; with the driver ``own`` it decides as well."""
    own = seen.choice.driver == OWN
    chains = (*owntable.chains(skeleton), *skeleton.backstop) if own else skeleton.backstop
    expected = {chain.name: chain.shape for chain in chains}
    missing = [name for name in owntable.SETS.values() if own and name not in seen.table_sets]
    steps = []
    asleep = OUR_TABLE in seen.dormant
    if asleep or seen.backstop is None or dict(seen.backstop) != expected or missing or seen.hold == PLAIN:
        what = "differs: it is dormant" if asleep else "is missing" if seen.backstop is None else "differs"
        problems.append(Problem("backstop", f"table inet {TABLE} {what}"))
        holdable = seen.hold != NO
        if own:
            script = owntable.script(skeleton, gateways, owners, holdable, seen.attached)
        else:
            script = skeleton.nft_script(gateways, owners, holdable=holdable, closed=seen.attached)
        steps.append(Step("nft", script, part="backstop"))
    elif (seen.gateways, seen.owners, seen.closed) != (gateways, owners, seen.attached):
        problems.append(Problem("claims", f"the sets of table inet {TABLE} differ"))
        steps.append(Step("nft", _fill(gateways, owners, seen.attached), part="claims"))
    if seen.hold == FREE:
        # Whether taking it worked, only the next look tells: it is never reported as mended.
        problems.append(Problem("hold", f"table inet {TABLE} is not held", healable=False))
        steps.append(Step("hold", TABLE, part="hold"))
    return steps


def _sets(seen: Observed, problems: list[Problem], steps: list[Step]) -> None:
    for name, kind in SET_TYPES.items():
        have = seen.sets.get(name)
        if have is None:
            problems.append(Problem("sets", f"set {name} is missing"))
            steps.append(Step("sets", name, part="sets"))
        elif have != kind:
            problems.append(Problem("sets", f"set {name} is {have}, not {kind}: not ours", healable=False))


def _iptables(skeleton: Skeleton, seen: Observed, problems: list[Problem], steps: list[Step]) -> None:
    variant = seen.choice.driver
    filter4 = seen.tables.get((4, "filter"), {})
    made: list[Step] = []
    _chains(4, skeleton.chains4, filter4, problems, made)
    if DOCKER_USER not in filter4:
        problems.append(Problem("jump", f"chain {DOCKER_USER} is missing"))
        made.append(Step("new-chain", DOCKER_USER, part="jump"))
    _chains(6, skeleton.chains6, seen.tables.get((6, "filter"), {}), problems, made)
    _hooks(skeleton, seen, problems, made)
    steps += [replace(step, variant=variant) for step in made]

    forward = filter4.get("FORWARD", [])
    if not forward or f"-j {DOCKER_USER}" not in forward[0]:
        problems.append(Problem("hook", f"FORWARD does not lead through {DOCKER_USER} first", healable=False))
    if variant == NFT:
        # Foreign, and closed while it sleeps: the backstop drops what nobody marked.
        for name in sorted(seen.dormant & IPTABLES):
            fix = f"sudo nft add table {name}"
            problems.append(
                Problem("hook", f"table {name} is dormant: its rules do nothing ({fix})", healable=False)
            )


def _remains(skeleton: Skeleton, seen: Observed, problems: list[Problem], steps: list[Step]) -> None:
    """What an earlier driver left: it goes last, when all that replaces it stands."""
    for variant, tables in seen.others.items():
        gone = _taken_out(skeleton, tables, variant)
        if gone:
            problems.append(Problem("remains", f"rules of corral are left in the {variant} tables"))
            steps += [replace(step, part="remains") for step in gone]
    left = [name for name in SET_TYPES if name in seen.sets] if seen.choice.driver == OWN else []
    if left:
        problems.append(Problem("remains", f"sets are left: {', '.join(left)}"))
        steps += [Step("destroy", name, part="remains") for name in left]


def _fill(gateways: frozenset[str], owners: frozenset[tuple[str, int]], closed: frozenset[str]) -> str:
    lines = [f"flush set inet {TABLE} gateways", f"flush set inet {TABLE} owners"]
    if gateways:
        lines.append(f"add element inet {TABLE} gateways {{ {', '.join(sorted(gateways))} }}")
    if owners:
        body = ", ".join(f'"{bridge}" . {uid}' for bridge, uid in sorted(owners))
        lines.append(f"add element inet {TABLE} owners {{ {body} }}")
    lines += opening.fill(TABLE, closed)
    return "\n".join(lines) + "\n"


def _chains(
    family: int,
    wanted: Mapping[str, tuple[Rule, ...]],
    seen: Lines,
    problems: list[Problem],
    steps: list[Step],
) -> None:
    wrong = [
        name
        for name, rules in wanted.items()
        if [tag_of(line) for line in seen.get(name, [])] != _tags(rules, seen, name)
    ]
    if not wrong:
        return
    problems.append(Problem("chains" if family == 4 else "ipv6", f"{', '.join(wrong)} (IPv{family}) differ"))
    # All of our chains in one transaction: a chain is only named once it exists.
    lines = ["*filter", *(f":{name} - [0:0]" for name in wanted)]
    lines += [f"-A {name} {rule.iptables()}" for name, rules in wanted.items() for rule in rules]
    steps.append(
        Step("iptables", "\n".join([*lines, "COMMIT", ""]), family, "chains" if family == 4 else "ipv6")
    )


def _tags(rules: tuple[Rule, ...], seen: Lines, name: str) -> list[str | None] | None:
    # A chain that does not exist equals nothing, not even an empty list.
    return [rule.tag for rule in rules] if name in seen else None


def _part(hook: Hook) -> str:
    if hook.family == 6:
        return "ipv6"
    return {"DOCKER-USER": "jump", "INPUT": "input", "POSTROUTING": "nat", "PREROUTING": "nat"}[
        hook.rule.chain
    ]


def _hooks(skeleton: Skeleton, seen: Observed, problems: list[Problem], steps: list[Step]) -> None:
    grouped: dict[tuple[int, str, str], list[Hook]] = {}
    for hook in skeleton.hooks:
        grouped.setdefault((hook.family, hook.table, hook.rule.chain), []).append(hook)
    for (family, table, chain), hooks in grouped.items():
        lines = seen.tables.get((family, table), {}).get(chain, [])
        wanted = [hook.rule.tag for hook in hooks]
        ours = [line for line in lines if tag_of(line) is not None]
        # Where our masquerade stands among foreign rules does not matter; a filter hook must come first.
        in_place = [tag_of(line) for line in (ours if table == "nat" else lines[: len(wanted)])]
        if in_place == wanted and len(ours) == len(wanted):
            continue
        part = _part(hooks[0])
        problems.append(Problem(part, f"{chain} (IPv{family} {table}) lacks our rules at its top"))
        text = [f"*{table}", *(f"-D {chain} {line}" for line in ours)]
        text += [f"-I {chain} {hook.position} {hook.rule.iptables()}" for hook in hooks]
        steps.append(Step("iptables", "\n".join([*text, "COMMIT", ""]), family, part))


def removal(skeleton: Skeleton, seen: Observed) -> tuple[Step, ...]:
    """Return the steps that take every rule and chain of ours out and leave foreign ones as they are."""
    steps = _taken_out(skeleton, seen.tables, seen.choice.driver)
    for variant, tables in seen.others.items():
        steps += _taken_out(skeleton, tables, variant)
    steps += [Step("sets", name) for name in SET_TYPES if name in seen.sets]
    if seen.backstop is not None:
        steps.append(Step("nft", f"delete table inet {TABLE}\n"))
    return tuple(steps)


def _taken_out(skeleton: Skeleton, tables: Mapping[tuple[int, str], Lines], variant: str) -> list[Step]:
    steps: list[Step] = []
    own = {4: skeleton.chains4, 6: skeleton.chains6}
    for (family, table), chains in tables.items():
        lines = [
            f"-D {chain} {line}"
            for chain, rules in chains.items()
            if not chain.startswith("CORRAL-")
            for line in rules
            if tag_of(line) is not None
        ]
        present = [name for name in own[family] if table == "filter" and name in chains]
        lines += [f"-F {name}" for name in present] + [f"-X {name}" for name in present]
        if lines:
            text = "\n".join([f"*{table}", *lines, "COMMIT", ""])
            steps.append(Step("iptables", text, family, variant=variant))
    return steps
