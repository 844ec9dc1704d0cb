"""Which driver a host needs: decided by where Docker's own chain is hooked. Pure.

``nft`` and ``legacy`` are the two iptables, ``own`` puts the whole decision into our own nft table: for
Docker's native nftables backend, and for an engine that writes no rules. Whatever is chosen denies by
default, so a wrong choice can only close.
"""

from __future__ import annotations

from dataclasses import dataclass

NFT, LEGACY, OWN = "nft", "legacy", "own"
NATIVE = "native"
DRIVERS = (NFT, LEGACY, OWN)

LEGACY_FIX = (
    "install corral with its extra (pipx install 'corral[legacy]'; it is compiled: sudo apt install gcc "
    "python3-dev), then: corral install"
)


@dataclass(frozen=True)
class Rules:
    """Docker's traces in one kernel ruleset.

    ``docker``: chains that only Docker makes. ``hooked``: forwarded packets are led through DOCKER-USER (with
    the native backend: through Docker's tables). ``named``: the interfaces its rules name.
    """

    docker: bool = False
    hooked: bool = False
    named: frozenset[str] = frozenset()


NOTHING = Rules()


@dataclass(frozen=True)
class Facts:
    """What was read of the host.

    ``bridges``: interfaces that only an engine makes. ``alternative``: what the host's ``iptables`` is (nft,
    legacy, empty when neither). ``usable``: drivers whose tools are here.
    """

    nft: Rules = NOTHING
    legacy: Rules = NOTHING
    native: Rules = NOTHING
    bridges: frozenset[str] = frozenset()
    alternative: str = ""
    usable: frozenset[str] = frozenset(DRIVERS)


@dataclass(frozen=True)
class Choice:
    """The driver to use, and why. ``problem``: nothing may be granted, and what to do about it.

    ``settled``: Docker's rules were seen, so that their absence later on is somebody's doing and no other
    engine.
    """

    driver: str
    why: str
    problem: str = ""
    settled: bool = False


def choose(facts: Facts, current: str | None = None, settled: bool = False) -> Choice:
    """Return the driver for a host.

    Args:
        facts: what was read now.
        current: the driver in use, None at the start.
        settled: whether ``current`` was chosen by Docker's rules and not for want of them.
    """
    found = {NFT: facts.nft, LEGACY: facts.legacy, NATIVE: facts.native}
    hooked = [name for name, rules in found.items() if rules.hooked]
    if hooked:
        return _hooked(facts, found, hooked, current)
    left = [name for name, rules in found.items() if rules.docker]
    if left:
        # Somebody took Docker's jump away: its chains still tell which one it writes to.
        name = _preferred(left, facts, current)
        return _usable(facts, name, f"Docker's chains are in {_where(name)}, and nothing leads to them", True)
    return _nobody(facts, current, settled)


def _hooked(facts: Facts, found: dict[str, Rules], hooked: list[str], current: str | None) -> Choice:
    most = max(len(found[name].named & facts.bridges) for name in hooked)
    best = [name for name in hooked if len(found[name].named & facts.bridges) == most]
    name = _preferred(best, facts, current)
    choice = _usable(facts, name, f"Docker's chain is hooked in {_where(name)}", True)
    stale = [other for other in (NFT, LEGACY) if other in hooked and other != name]
    unknown = sorted(facts.bridges - found[stale[0]].named) if stale else []
    if choice.problem or not stale or not unknown:
        return choice
    tool = f"iptables-{stale[0]}"
    return Choice(
        choice.driver,
        choice.why,
        f"Docker's rules are in {_where(name)}, and older ones of it in {_where(stale[0])} drop what they "
        f"do not know ({', '.join(unknown[:3])}): take those away (sudo {tool} -P FORWARD ACCEPT; "
        f"sudo {tool} -F FORWARD) or restart this host",
        settled=True,
    )


def _preferred(names: list[str], facts: Facts, current: str | None) -> str:
    """Of several that are as good: what Docker would write to now, then what is in use."""
    for wanted in (facts.alternative, NATIVE if current == OWN else current, NFT, LEGACY):
        if wanted in names:
            return str(wanted)
    return names[0]


def _nobody(facts: Facts, current: str | None, settled: bool) -> Choice:
    """Docker has no rules anywhere: it did not start yet, it writes none, or somebody flushed them."""
    if settled and current in (NFT, LEGACY):
        return _usable(facts, current, f"Docker's chain was hooked in {_where(current)}", True)
    if facts.bridges or current == OWN:
        return _usable(facts, OWN, "Docker has bridges here and no rules")
    if facts.alternative == LEGACY and LEGACY in facts.usable:
        return Choice(LEGACY, "iptables is the legacy variant, and Docker has no rules yet")
    if NFT in facts.usable:
        return Choice(NFT, "Docker has no rules yet")
    return _usable(facts, OWN, "there is no iptables, and Docker has no rules yet")


def _usable(facts: Facts, name: str, why: str, settled: bool = False) -> Choice:
    driver = OWN if name == NATIVE else name
    # Without nft, or without iptables where Docker uses it, each call fails and names the program.
    if driver != LEGACY or LEGACY in facts.usable:
        return Choice(driver, why, settled=settled)
    # The table denies everything by itself; nothing is granted while there is a problem.
    return Choice(OWN, why, f"{why}, and what corral needs for those is not here: {LEGACY_FIX}", settled)


def _where(name: str) -> str:
    return {
        NFT: "nft's tables",
        LEGACY: "the legacy tables",
        NATIVE: "tables of its own (its nftables backend)",
        OWN: "no tables",
    }[name]
