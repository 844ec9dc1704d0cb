"""docs/ruleset.md: every rule that corral has in the kernel, read from the kernel, with the reason for each.

::

    .venv/bin/python -m tests.system.ruleset_page NAME   # writes the page from the running lab NAME

A rule is looked up by its chain and its text as the kernel prints it, without comment and counters: a rule that
changes needs its reason thought about again.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.lab import Box, Lab

PAGE = Path(__file__).parents[2] / "docs" / "ruleset.md"
REGENERATE = "CORRAL_LAB_KEEP=1 make lab; .venv/bin/python -m tests.system.ruleset_page main"

LISTING = """\
echo @ filter; iptables -S; echo @ nat; iptables -t nat -S; echo @ filter6; ip6tables -S
echo @ nft; nft list table inet corral
echo @ sets; for set in $(ipset list -n | grep ^corral- | sort); do ipset list -t $set; done
"""

BITS, ZERO = "0x1000/0x1000", "meta mark & 0x00001000 == 0x00000000"
REPLY = "-m conntrack --ctstate ESTABLISHED --ctdir REPLY"
LIMIT = "-m hashlimit --hashlimit-upto {} --hashlimit-mode srcip --hashlimit-name {} --hashlimit-htable-expire 10000"
ABOVE = "-m hashlimit --hashlimit-above 100/sec --hashlimit-burst 2048 --hashlimit-mode srcip --hashlimit-name corral-new --hashlimit-htable-expire 10000"
NEVER = "0.0.0.0/8, 10.0.0.0/8, 100.64.0.0/10, 127.0.0.0/8, 168.63.129.16, 169.254.0.0/16, 172.16.0.0/12, 192.0.0.0/24, 192.88.99.0/24, 192.168.0.0/16, 198.18.0.0/15, 224.0.0.0/3"
CLOSED = [text if "/" in text else f"{text}/32" for text in NEVER.split(", ")]
OPEN_PORTS = "meta l4proto {{ tcp, udp }} th {} != {{ 53, 853 }}"
MINE, THEIRS = 'iifname "corral-*"', 'oifname "corral-*"'

CHAINS = {
    "filter DOCKER-USER": "Docker leads every forwarded packet through this chain first. Ours stand at its top.",
    "filter INPUT": "Packets to an address of the host itself never see `DOCKER-USER`.",
    "filter CORRAL-OUT": "What a sandbox sends to anywhere but the host.",
    "filter CORRAL-IN": "What is on its way to a sandbox.",
    "filter CORRAL-OPEN": "What an open sandbox sends; `RETURN` leaves it refused like anybody's.",
    "filter CORRAL-BACK": "What comes back to it.",
    "filter CORRAL-HOST": "What a sandbox sends to the host.",
    "filter CORRAL-PASS": "The one way through.",
    "filter CORRAL-DENY": "The one way to be refused: counted, logged, and told at once.",
    "filter CORRAL-LOG": "One line of `corral denied`.",
    "nat POSTROUTING": "Networks of sandboxes have no masquerade of Docker's.",
    "nat PREROUTING": "Where sandboxes ask for names that may.",
    "filter6 INPUT": "Sandboxes have no IPv6. Should a bridge get some, nothing of it is answered.",
    "filter6 FORWARD": "The same for what is forwarded; Docker has no IPv6 chain of the user's on every version.",
    "filter6 CORRAL-DENY6": "Refused and not only dropped, so that programs fall back to IPv4 at once.",
    "nft open_out": "What a sandbox with `egress.mode: open` sends: `return` leaves it without the bit, refused like anybody's.",
    "nft open_back": "What comes back to it.",
    "nft anti_spoof": "Before connection tracking.",
    "nft question": "After connection tracking, before addresses are rewritten.",
    "nft forward_clear": "Just before iptables: nobody arrives with the bit.",
    "nft input_clear": "The same for packets to the host.",
    "nft forward_backstop": "Just after iptables: who does not have the bit by now did not pass.",
    "nft input_backstop": "The same for packets to the host.",
    "nft output_owner": "What programs on the host send to sandboxes.",
}  # fmt: skip

REASONS: dict[str, dict[str, str]] = {
    "filter DOCKER-USER": {
        "-i corral-+ -j CORRAL-OUT": "Decided before Docker's own rules, which accept whatever comes from a bridge.",
        "-o corral-+ -j CORRAL-IN": "Docker accepts replies to any flow it knows; only those of allowed flows are to arrive.",
    },
    "filter INPUT": {
        "-i corral-+ -j CORRAL-HOST": "Without it every service of the host on 0.0.0.0 would be reachable at the gateway's address.",
    },
    "filter CORRAL-OUT": {
        "-m conntrack --ctstate DNAT -j CORRAL-DENY": "A port that another container publishes would lead around the set: its address is rewritten before this chain sees it.",
        "-m conntrack --ctstate NEW -m connlimit --connlimit-above 2048 --connlimit-mask 32 --connlimit-saddr -j CORRAL-DENY": "One sandbox cannot fill the host's table of connections.",
        f"-m conntrack --ctstate NEW {ABOVE} -j CORRAL-DENY": "Connections that ended are not counted by the rule above and stay in that table for two minutes: a hundred new ones a second after a burst, no more.",
        "-m set --match-set corral-pins src,dst,dst -j CORRAL-PASS": "Source, port and destination are what a policy allows. Each packet has to match, established or not, so that withdrawing the element cuts the flow.",
        f"{REPLY} -m set --match-set corral-pins dst,src,src -j CORRAL-PASS": "Replies of a flow that was opened towards this container, while the set holds the reversed element.",
        "-m set --match-set corral-open src -j CORRAL-OPEN": "A sandbox with `egress.mode: open`, by an element that the writer holds. The limits above hold for it too.",
        "-j CORRAL-DENY": "Anything else.",
    },
    "filter CORRAL-IN": {
        "-p icmp -m conntrack --ctstate RELATED --ctdir REPLY -j CORRAL-PASS": "\"Fragmentation needed\" and \"port unreachable\" about a flow that exists: without them large transfers through narrow links hang.",
        f"{REPLY} -m set --match-set corral-pins dst,src,src -j CORRAL-PASS": "Replies, while the element that let the question out is still there: a withdrawn UDP flow receives nothing more.",
        f"{REPLY} -m set --match-set corral-open dst -j CORRAL-BACK": "Replies to such a one.",
        "-j DROP": "Nobody opens a connection to a sandbox. Dropped, not refused: the sender is not ours to talk to.",
    },
    "filter CORRAL-OPEN": {
        **{f"-d {network} -j RETURN": "Closed for everybody: a constant here as in `open_out`, so that whoever sets the bit opens none of it." for network in CLOSED},
        "-o corral-+ -j RETURN": "Other sandboxes.",
        f"-m mark --mark {BITS} -j CORRAL-PASS": "`open_out` has found it open a moment ago. For a source that is in no set the bit says nothing, and without that table nobody sets it.",
    },
    "filter CORRAL-BACK": {
        **{f"-s {network} -j RETURN": "The same, reversed." for network in CLOSED},
        f"-m mark --mark {BITS} -j CORRAL-PASS": "`open_back` has found it a reply to an open sandbox.",
    },
    "filter CORRAL-HOST": {
        "-m set --match-set corral-host src,dst,dst -j CORRAL-PASS": "A host service that the policy names: this container, this port, its own gateway.",
        f"{REPLY} -j CORRAL-PASS": "Replies to what the host itself opened towards the sandbox.",
        "-j CORRAL-DENY": "All other ports and addresses of the host.",
    },
    "filter CORRAL-PASS": {
        f"-j MARK --set-xmark {BITS}": "The bit that the backstop asks for: an accept by somebody else's rule does not set it.",
        "-j ACCEPT": "Decided.",
    },
    "filter CORRAL-DENY": {
        "-m set --match-set corral-denied src": "No target: looking the source up in the set counts the packet there.",
        f"-m set ! --match-set corral-seen src,dst,dst {LIMIT.format('20/sec --hashlimit-burst 50', 'corral-log')} -j CORRAL-LOG": "A destination that was logged within the last minute is only counted, and each sandbox has a rate of its own: one that floods hides neither its other attempts nor those of others.",
        f"-m conntrack --ctstate DNAT {LIMIT.format('500/sec --hashlimit-burst 500', 'corral-rej')} -j REJECT --reject-with icmp-admin-prohibited": "A published port of another container: a reset would come from the rewritten address and be ignored; an ICMP error is written back to the address that was asked.",
        f"-p tcp {LIMIT.format('500/sec --hashlimit-burst 500', 'corral-rst')} -j REJECT --reject-with tcp-reset": "TCP hears \"refused\" within a millisecond instead of waiting for a time-out; limited, so that a flood is not answered with another.",
        f"! -p tcp {LIMIT.format('500/sec --hashlimit-burst 500', 'corral-rej')} -j REJECT --reject-with icmp-admin-prohibited": "The same for everything that is not TCP.",
        "-j DROP": "What is over the limit.",
    },
    "filter CORRAL-LOG": {
        "-j NFLOG --nflog-prefix corral-denied --nflog-group 4010": "To the service, over netlink: the kernel's own log stays clean.",
        "-j SET --add-set corral-seen src,dst,dst --timeout 60": "Remembered for a minute; see the second rule of CORRAL-DENY.",
    },
    "nat POSTROUTING": {
        f"! -o corral-+ -m mark --mark {BITS} -j MASQUERADE": "Only what passed gets the host's address; what did not would leave with one that nobody answers.",
    },
    "nat PREROUTING": {
        f"-i corral-+ -p udp -m udp --dport 53 -m set --match-set corral-host src,dst,src -m mark --mark {BITS} -j REDIRECT --to-ports 10053": "Docker's resolver in the container asks port 53, which no ordinary user's service can bind. `question` marked it; who may ask has an element that leads from itself to itself, and so opens no port.",
        f"-i corral-+ -p tcp -m tcp --dport 53 -m set --match-set corral-host src,dst,src -m mark --mark {BITS} -j REDIRECT --to-ports 10053": "The same over TCP.",
    },
    "filter6 INPUT": {
        "-i corral-+ -j CORRAL-DENY6": "Link-local addresses of the host included.",
    },
    "filter6 FORWARD": {
        "-i corral-+ -j CORRAL-DENY6": "Nothing of IPv6 leaves a sandbox.",
        "-o corral-+ -j CORRAL-DENY6": "Nothing of IPv6 reaches one.",
    },
    "filter6 CORRAL-DENY6": {
        "-j REJECT --reject-with icmp6-adm-prohibited": "Told at once.",
        "-j DROP": "What cannot be told.",
    },
    "nft anti_spoof": {
        f"{MINE} meta nfproto ipv6 drop": "The second lock on IPv6, which does not depend on ip6tables.",
        f"{MINE} ip saddr 0.0.0.0 drop": "It passes the check of the reverse path below.",
        f"{MINE} fib daddr type {{ broadcast, multicast }} drop": "They pass it as well, and would be heard by the host's services.",
        f"{MINE} fib saddr . iif oif 0 drop": "The source has to be reachable through the bridge the packet came from: an address identifies a sandbox and cannot be borrowed.",
    },
    "nft question": {
        f"{MINE} meta mark set meta mark & 0xffffefff": "Whatever restored a packet mark by now.",
        f"{MINE} ip daddr @gateways meta l4proto {{ tcp, udp }} th dport 53 meta mark set meta mark | 0x00001000": "A question for a name: `PREROUTING` leads it to the service if its source may ask. The bit is cleared again before `INPUT`.",
    },
    "nft open_out": {
        f"ip daddr {{ {NEVER} }} return": "Closed for everybody, as a constant: there is no set whose loss could open them.",
        'oifname "corral-*" return': "Other sandboxes, whatever numbers their subnets have.",
        "ip saddr != @closed return": "The proof that the next rule's set is there: each sandbox's own subnet is in it. An empty set opens nothing.",
        "ip daddr @closed return": "The networks that this host is attached to, Docker's among them.",
        f"{OPEN_PORTS.format('dport')} meta mark set meta mark | 0x00001000": "All other TCP and UDP. DNS elsewhere is closed: names are answered by the service, which vets them.",
    },
    "nft open_back": {
        "ct direction original return": "Nobody opens a connection to a sandbox.",
        f"ip saddr {{ {NEVER} }} return": "The same as on the way out, reversed, so that what is closed meanwhile is heard no more.",
        "ip daddr != @closed return": "As above.",
        "ip saddr @closed return": "As above.",
        f"ct state established {OPEN_PORTS.format('sport')} meta mark set meta mark | 0x00001000": "Replies.",
    },
    "nft forward_clear": {
        f"{MINE} meta mark set meta mark & 0xffffefff": "A host that restores packet marks from connection tracking would hand our bit to anyone.",
        f"{THEIRS} meta mark set meta mark & 0xffffefff": "The same on the way in.",
        f"{MINE} ip saddr @open jump open_out": "Only sources that the writer put there for their bridge's owner, each for an hour at most.",
        f"{THEIRS} ip daddr @open jump open_back": "The same on the way in.",
    },
    "nft input_clear": {
        f"{MINE} meta mark set meta mark & 0xffffefff": "The same towards the host.",
    },
    "nft forward_backstop": {
        f"{MINE} {ZERO} drop": "Holds when `DOCKER-USER` does not: flushed, jumped over, or below Docker's own accepts while Docker restarts.",
        f"{THEIRS} {ZERO} drop": "The same on the way in.",
    },
    "nft input_backstop": {
        f"{MINE} {ZERO} drop": "Holds when somebody accepts everything at the top of `INPUT`.",
        'iifname != "lo" iifname != "corral-*" ip daddr @gateways drop': "An address is no boundary: other bridges and the uplink reach a gateway's address too, and the relays behind it are for one sandbox.",
    },
    "nft output_owner": {
        f"{THEIRS} ct state new meta skuid != 0 oifname . meta skuid != @owners drop": "Another user of this host cannot use what listens in somebody's sandbox.",
        f"{THEIRS} meta nfproto ipv6 drop": "Nothing of IPv6 to a sandbox, from the host either.",
    },
}  # fmt: skip

SETS = {
    "corral-pins": "What may be reached: source, protocol and port, destination. One element for each address a name resolved to.",
    "corral-host": "Host services: source, port, gateway.",
    "corral-denied": "The sources of sandboxes; its counters are the packets each was denied.",
    "corral-open": "Sources that may reach all public addresses; they have to be in `open` as well.",
    "corral-seen": "Destinations that were logged within the last minute.",
    "open": "Sources that may reach all public addresses (`egress.mode: open`).",
    "closed": "The networks of this host's own interfaces, which the writer reads itself. Never empty while a sandbox exists.",
    "gateways": "The gateway addresses of sandboxes.",
    "owners": "Bridge and the uid that may connect to sandboxes on it, beside root.",
}  # fmt: skip

INTRO = """\
# The rules, one by one

Read from a running host by `tests/system/test_ruleset_page.py`, which fails when this page is not what the kernel
holds. Do not edit it: reasons are in `tests/system/ruleset_page.py`. They are the same rules for one sandbox or a
thousand; what changes are the elements of the sets. Comments (`corral:` and a hash, by which corral recognises its
rules) and counters are left out.

Rules of iptables come first, as `iptables -S` prints them, in foreign chains only those that are corral's. Passing
through all of it looks like this:

    prerouting (raw)      anti_spoof
    prerouting (dstnat)   question, PREROUTING
    forward (filter - 1)  forward_clear         input (filter - 1)   input_clear
    forward (filter)      FORWARD: DOCKER-USER  input (filter)       INPUT: CORRAL-HOST
                            CORRAL-OUT, CORRAL-IN
    forward (filter + 10) forward_backstop      input (filter + 10)  input_backstop
    postrouting (srcnat)  POSTROUTING           output (filter)      output_owner
"""


@dataclass(frozen=True)
class Chain:
    """``key`` is the table and the chain; ``hook`` is empty for chains that are jumped to."""

    key: str
    hook: str
    rules: tuple[str, ...]


@dataclass(frozen=True)
class Ruleset:
    """Everything corral has in a kernel, normalised. ``sets`` maps names to what they are made of."""

    chains: tuple[Chain, ...]
    sets: Mapping[str, str]


def parse(listing: str) -> Ruleset:
    """Read the output of ``LISTING``. Pure."""
    sections: dict[str, list[str]] = {}
    for line in listing.splitlines():
        if line.startswith("@ "):
            sections[line[2:]] = []
        else:
            sections[list(sections)[-1]].append(line)
    chains: list[Chain] = []
    for table in ("filter", "nat", "filter6"):
        chains += _iptables(table, sections[table])
    nft, sets = _nft(sections["nft"])
    return Ruleset(tuple(chains + nft), sets | _ipsets(sections["sets"]))


def _iptables(table: str, lines: Iterable[str]) -> list[Chain]:
    found: dict[str, list[str]] = {}
    for line in lines:
        word, _, rest = line.partition(" ")
        name, _, rule = rest.partition(" ")
        own = name.startswith("CORRAL-")
        if word == "-N" and own:
            found.setdefault(name, [])
        elif word == "-A" and (own or re.search(r'--comment "?corral:', rule)):
            text = re.sub(r'\s*-m comment --comment "?corral:[0-9a-f]{12}"?', "", rule).strip()
            found.setdefault(name, []).append(text)
    ordered = [key.partition(" ")[2] for key in CHAINS if key.startswith(f"{table} ")]
    names = [name for name in ordered if name in found] + sorted(set(found) - set(ordered))
    return [Chain(f"{table} {name}", "", tuple(found[name])) for name in names]


def _nft(lines: Iterable[str]) -> tuple[list[Chain], dict[str, str]]:
    chains: list[Chain] = []
    sets: dict[str, str] = {}
    name, hook, rules = "", "", list[str]()
    kind = ""
    for line in (raw.strip() for raw in lines):
        if match := re.fullmatch(r"(chain|set) (\w+) \{", line):
            kind, name = match.groups()
            hook, rules = "", []
        elif line == "}" and kind == "chain":
            chains.append(Chain(f"nft {name}", hook, tuple(rules)))
            kind = ""
        elif line == "}":
            kind = ""
        elif kind == "chain" and line.startswith("type "):
            hook = line
        elif kind == "chain" and line:
            text = re.sub(r' comment "corral:[0-9a-f]{12}"', "", line)
            rules.append(re.sub(r" counter packets \d+ bytes \d+", "", text))
        elif kind == "set" and line.startswith("type"):
            sets[name] = line
    return chains, sets


def _ipsets(lines: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    name = kind = ""
    for line in lines:
        word, _, rest = line.partition(": ")
        if word == "Name":
            name = rest
        elif word == "Type":
            kind = rest
        elif word == "Header":
            # Grows with the content, or is drawn at random.
            text = re.sub(r" (hashsize \d+|bucketsize \d+|initval 0x[0-9a-f]+)", "", rest)
            found[name] = f"{kind} {text}"
    return found


def unexplained(ruleset: Ruleset) -> list[str]:
    """Return the rules, chains and sets that no reason is given for, and reasons for what is not there."""
    found = []
    for chain in ruleset.chains:
        if chain.key not in CHAINS:
            found.append(f"{chain.key}: a chain without a sentence in CHAINS")
        reasons = REASONS.get(chain.key, {})
        found += [f"{chain.key}: {rule}" for rule in chain.rules if rule not in reasons]
        found += [f"{chain.key}: not in the kernel: {rule}" for rule in reasons if rule not in chain.rules]
    found += [f"not in the kernel: {key}" for key in CHAINS if key not in {c.key for c in ruleset.chains}]
    found += [f"set {name}" for name in ruleset.sets.keys() ^ SETS.keys()]
    return found


def render(ruleset: Ruleset) -> str:
    """Return the page. Raises ValueError when a rule has no reason."""
    missing = unexplained(ruleset)
    if missing:
        raise ValueError("no reason in tests/system/ruleset_page.py for:\n" + "\n".join(missing))
    heads = {
        "filter": "iptables, filter",
        "nat": "iptables, nat",
        "filter6": "ip6tables, filter",
        "nft": "nftables, table inet corral",
    }
    lines = [INTRO]
    last = ""
    for chain in ruleset.chains:
        table, _, name = chain.key.partition(" ")
        if table != last:
            lines.append(f"## {heads[table]}\n")
            if table == "nft":
                lines.append(
                    "Held by the writer (`flags owner, persist`) where kernel and nft know how: nobody else can "
                    "flush it;\nsee [017](decisions/017-the-writer-holds-its-table.md).\n"
                )
            last = table
        lines.append(f"### {name}\n\n{CHAINS[chain.key]}\n")
        if chain.hook:
            lines.append(f"`{chain.hook}`\n")
        lines.append("| | rule | why |\n|---|---|---|")
        lines += [
            f"| {number} | `{rule}` | {REASONS[chain.key][rule]} |"
            for number, rule in enumerate(chain.rules, 1)
        ]
        lines.append("")
    lines.append("## Sets\n\n| set | made of | what |\n|---|---|---|")
    lines += [f"| `{name}` | `{ruleset.sets[name]}` | {SETS[name]} |" for name in SETS]
    return "\n".join(lines) + "\n"


def read(box: Box, entering: Sequence[str] = ()) -> Ruleset:
    """Return what a box's kernel holds now; ``entering`` are words that lead into another network of it."""
    return parse(box.run([*entering, "bash", "-ec", LISTING], user="root").stdout)


if __name__ == "__main__":
    PAGE.write_text(render(read(Lab.attach(sys.argv[1] if len(sys.argv) > 1 else None).box)))
    print(f"written: {PAGE}")
