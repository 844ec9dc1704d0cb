"""docs/ruleset.md is what a running host's kernel holds."""

from __future__ import annotations

import dataclasses

import pytest

from .flooding import standing
from .host import EVERY_ENGINE, Host, until
from .ruleset_page import PAGE, REGENERATE, Chain, read, render, unexplained


@EVERY_ENGINE
@pytest.mark.representative
def test_the_page_of_rules_is_what_the_kernel_holds(host: Host) -> None:
    host.project("page").inside("true")
    until(standing(host), 20, "the rules stand")
    ruleset = read(host.box, host.engine.entering())
    assert unexplained(ruleset) == []
    assert PAGE.read_text() == render(ruleset), f"docs/ruleset.md is not what the kernel holds: {REGENERATE}"
    # A rule that nobody explained is found, and so is a reason for a rule that is gone.
    first, *rest = ruleset.chains
    more = Chain(first.key, first.hook, (*first.rules, "-j RETURN"))
    assert unexplained(dataclasses.replace(ruleset, chains=(more, *rest))) == [f"{first.key}: -j RETURN"]
    less = Chain(first.key, first.hook, first.rules[1:])
    assert unexplained(dataclasses.replace(ruleset, chains=(less, *rest))) == [
        f"{first.key}: not in the kernel: {first.rules[0]}"
    ]
