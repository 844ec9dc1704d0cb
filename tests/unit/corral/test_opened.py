"""What is said of a policy that lets names be answered, before anything is made."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from corral import opened
from policy.errors import CorralError
from policy.loader import LoadedPolicy

Loaded = Callable[[str], LoadedPolicy]


def warned(loaded: LoadedPolicy, *, rootless: bool = False) -> list[str]:
    told: list[str] = []
    opened.warn(loaded, told.append, rootless=rootless)
    return told


def test_an_open_policy_is_warned_of_and_no_other(loaded_of: Loaded) -> None:
    assert warned(loaded_of("profile: opencode\negress: {mode: open}\n")) == [opened.WARNING]
    for egress in ("{mode: proxy}", "{dns: answer}", "{allow: ['*.example.com']}"):
        assert warned(loaded_of(f"profile: opencode\negress: {egress}\n")) == []


@pytest.mark.parametrize(
    ("egress", "key"), [("{mode: open}", "egress.mode: open"), ("{dns: answer}", "egress.dns")]
)
def test_with_a_rootless_engine_no_names_are_answered(loaded_of: Loaded, egress: str, key: str) -> None:
    with pytest.raises(CorralError, match=f"{key}.* needs an engine of the system"):
        warned(loaded_of(f"profile: opencode\negress: {egress}\n"), rootless=True)


def test_with_a_rootless_engine_a_proxy_can_be_had(loaded_of: Loaded) -> None:
    assert warned(loaded_of("profile: opencode\negress: {mode: proxy}\n"), rootless=True) == []
