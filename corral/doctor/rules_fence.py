"""COR-020 to COR-039: the rules in the kernel, and where they hang. Pure.

The writer alone can read them; what it finds wrong comes as text, which is recognised here by its subject.
"""

from __future__ import annotations

from corral.doctor.model import Found, Severity
from corral.doctor.records import Programs, Skeleton, Sysctls, Tables
from corral.doctor.table import check

BROKEN, ADVICE = Severity.BROKEN, Severity.ADVICE
HEALS = "journalctl -u corral-netfilter says what it tried; sudo systemctl restart corral-netfilter"
HOOK = "FORWARD does not lead through"
BACKSTOP = "table inet corral"
FILTER = "bridge-nf-call-"
V6 = "(IPv6"
NOT_OURS = "not ours"
UNFIT = "what corral needs for those is not here"
STALE = "and older ones of it in"
IP6TABLES = "ip6tables-nft"


def kind(problem: str) -> str:
    """Return what a problem of the writer is about: hook, backstop, filter, ipv6, driver, set or rules."""
    subjects = (
        (HOOK, "hook"),
        (UNFIT, "driver"),
        (STALE, "driver"),
        (BACKSTOP, "backstop"),
        (FILTER, "filter"),
        (V6, "ipv6"),
        (NOT_OURS, "set"),
    )
    return next((name for needle, name in subjects if needle in problem), "rules")


def _of(skeleton: Skeleton, wanted: str) -> str:
    return "; ".join(text for text in skeleton.problems if kind(text) == wanted)


@check(
    "COR-020",
    "packets do not meet Docker's chain DOCKER-USER first",
    BROKEN,
    Skeleton,
    probe="The first rule of FORWARD, read by the netfilter writer.",
    cause="Somebody removed Docker's jump or put a rule before it (a firewall that was reloaded after Docker "
    "started). The backstop holds: nothing leaves, allowed names included.",
    fix="sudo systemctl restart docker",
    note="Staged in a system test.",
)
def hook(skeleton: Skeleton) -> Found | None:
    """See the table."""
    text = _of(skeleton, "hook")
    return Found(text) if text else None


@check(
    "COR-021",
    "corral's own rules do not stand",
    BROKEN,
    Skeleton,
    probe="Every chain, jump and set of corral, read and compared by the netfilter writer.",
    cause="Another program changes them as fast as they are mended, or they cannot be written.",
    fix=HEALS,
)
def rules(skeleton: Skeleton) -> Found | None:
    """See the table."""
    text = _of(skeleton, "rules")
    return Found(text) if text else None


@check(
    "COR-022",
    "the backstop is missing",
    BROKEN,
    Skeleton,
    probe="`table inet corral`, read and compared by the netfilter writer.",
    cause="Another program removes it (nft flush ruleset) as fast as it is mended, or nft does not work.",
    fix=HEALS,
    note="Tested on the writer's own words. A writer that cannot put it back at its start is COR-051, "
    "staged in "
    "a system test.",
)
def backstop(skeleton: Skeleton) -> Found | None:
    """See the table."""
    text = _of(skeleton, "backstop")
    return Found(text) if text else None


@check(
    "COR-023",
    "packets between containers of one bridge pass by the rules",
    BROKEN,
    Sysctls,
    probe="net.bridge.bridge-nf-call-iptables and -ip6tables.",
    cause="br_netfilter is not loaded, or somebody switched it off. The writer switches it on within a "
    "second "
    "and grants nothing meanwhile.",
    fix="sudo modprobe br_netfilter; sudo sysctl -w net.bridge.bridge-nf-call-iptables=1 "
    "net.bridge.bridge-nf-call-ip6tables=1; look for the file in /etc/sysctl.d that sets 0",
    note="Staged in a system test.",
)
def bridge_filter(sysctls: Sysctls) -> Found | None:
    """See the table."""
    values = {"iptables": sysctls.bridge4, "ip6tables": sysctls.bridge6}
    wrong = [
        f"net.bridge.{FILTER}{name} " + ("does not exist" if value is None else f"is {value}")
        for name, value in values.items()
        if value != 1
    ]
    return Found("; ".join(wrong)) if wrong else None


@check(
    "COR-024",
    "Docker's rules are in the other iptables",
    BROKEN,
    Skeleton,
    probe="Where Docker's chains are hooked: nft's tables, the legacy ones, or its own; read by the writer.",
    cause="Docker keeps its rules in the legacy tables and the part of corral that writes there is not "
    "installed; or an engine that was switched left rules in the other tables, which drop what they do not "
    "know. Nothing leaves a sandbox, allowed names included.",
    fix="pipx inject corral python-iptables, then: corral install; or "
    "sudo update-alternatives --set iptables /usr/sbin/iptables-nft, the same for ip6tables, and restart "
    "this host (the legacy tables keep Docker's rules until then)",
    note="Both kinds are staged on real kernels, the first with a real engine in a system test.",
)
def variant(skeleton: Skeleton) -> Found | None:
    """See the table."""
    text = _of(skeleton, "driver")
    return Found(text) if text else None


@check(
    "COR-025",
    "Docker will move to the other iptables",
    ADVICE,
    Skeleton,
    Tables,
    probe="The variant of the program iptables, and in which of the two Docker's chain is hooked.",
    cause="iptables became the other variant after Docker started. All is well until Docker starts the next "
    "time; then it has rules in both, and the older ones drop what they do not know.",
    fix="sudo update-alternatives --set iptables /usr/sbin/iptables-VARIANT, the same for ip6tables",
    note="Staged in a system test.",
)
def variant_soon(skeleton: Skeleton, tables: Tables) -> Found | None:
    """See the table."""
    here = {"nft": "nf_tables", "legacy": "legacy"}.get(skeleton.driver, "")
    if not here or not tables.variant or tables.variant == here:
        return None
    names = {"nf_tables": "nft's", "legacy": "the legacy"}
    wanted = "iptables-nft" if here == "nf_tables" else "iptables-legacy"
    return Found(
        f"iptables is {names[tables.variant]} variant, and Docker's rules are in {names[here]} tables",
        f"sudo update-alternatives --set iptables /usr/sbin/{wanted}; "
        f"sudo update-alternatives --set ip6tables /usr/sbin/{wanted.replace('ip', 'ip6', 1)}",
    )


@check(
    "COR-026",
    "IPv6 of sandboxes is not refused",
    BROKEN,
    Skeleton,
    probe="corral's chain and hooks of ip6tables, read by the netfilter writer.",
    cause="Sandboxes have no IPv6, and ip6tables refuses it once more; that refusal cannot be put in place. "
    "The backstop drops it too.",
    fix=HEALS,
)
def ipv6(skeleton: Skeleton) -> Found | None:
    """See the table."""
    text = _of(skeleton, "ipv6")
    return Found(text) if text else None


@check(
    "COR-027",
    "a set of corral's name belongs to somebody else",
    BROKEN,
    Skeleton,
    probe="Types of the sets corral-pins, corral-host and corral-denied.",
    cause="Another program made a set of that name; corral does not touch what is not its own.",
    fix="sudo ipset list -n; sudo ipset destroy NAME",
)
def foreign_set(skeleton: Skeleton) -> Found | None:
    """See the table."""
    text = _of(skeleton, "set")
    return Found(text) if text else None


@check(
    "COR-028",
    "IPv6 is active, and there is no ip6tables",
    BROKEN,
    Programs,
    Sysctls,
    probe="The program ip6tables-nft, and net.ipv6.conf.all.disable_ipv6.",
    cause="The writer cannot refuse IPv6 of sandboxes, nor read the rules that do, and grants nothing.",
    fix="sudo apt install iptables; sudo systemctl restart corral-netfilter",
    note="Tested on recorded facts only.",
)
def no_ip6tables(programs: Programs, sysctls: Sysctls) -> Found | None:
    """See the table."""
    if IP6TABLES not in programs.missing or sysctls.ipv6_off != 0:
        return None
    return Found(f"{IP6TABLES} is not installed, and net.ipv6.conf.all.disable_ipv6 is 0")
