"""What python-iptables is told of corral's rules."""

from __future__ import annotations

import pytest

from enforcer.netfilter.legacy import ScriptError, interface_mask, parse
from enforcer.netfilter.skeleton import Skeleton

SKELETON = Skeleton()
RULES = [
    *(rule for chains in (SKELETON.chains4, SKELETON.chains6) for rules in chains.values() for rule in rules),
    *(hook.rule for hook in SKELETON.hooks),
]


def words(text: str) -> list[str]:
    """The words of a rule, put together again from what was parsed."""
    spec = parse(text)
    found = []
    for flag, value in spec.flags.items():
        found += ["!", flag, value[1:]] if value.startswith("!") else [flag, value]
    parts = [("-m", part) for part in spec.matches]
    parts += [("-j", spec.target)] if spec.target.name else []
    for flag, part in parts:
        found += [flag, part.name]
        for name, values in part.options:
            inverted = values[:1] == ["!"]
            found += ["!", f"--{name}", *values[1:]] if inverted else [f"--{name}", *values]
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.tag)
def test_every_rule_of_the_skeleton_is_taken_apart_without_a_loss(rule) -> None:
    text = rule.iptables().replace(" --nflog-prefix corral-denied", "")
    assert words(rule.iptables()) == text.split()


def test_what_no_rule_has_is_an_error_and_not_a_wider_rule() -> None:
    with pytest.raises(ScriptError):
        parse("-i corral-+ --dport 443 -j ACCEPT")
    with pytest.raises(ScriptError):
        parse("-x -j ACCEPT")


@pytest.mark.parametrize(
    ("text", "compared"), [("", 0), ("corral-+", 7), ("!corral-+", 7), ("+", 0), ("eth0", 5), ("!eth0", 5)]
)
def test_every_bit_of_an_interfaces_name_is_compared(text: str, compared: int) -> None:
    assert interface_mask(text) == b"\xff" * compared + bytes(16 - compared)
