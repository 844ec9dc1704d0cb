from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from policy.limits import default_memory, parse_memory
from policy.schema import Limits, Policy


@pytest.mark.parametrize(
    ("text", "size"),
    [("512m", 512 << 20), ("8g", 8 << 30), ("1.5 GiB", 3 << 29), ("2T", 2 << 40), ("131072K", 128 << 20)],
)
def test_an_amount_of_memory_has_a_unit(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "8", "8gg", "-1g", "1e3g", "64m", "9999999t", "8 g b", "٨g"])
def test_what_is_no_amount_of_memory_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"memory|128m|machine"):
        parse_memory(text)
    with pytest.raises(ValidationError):
        Limits(memory=text)


def test_the_default_leaves_a_quarter_of_the_memory_to_the_host() -> None:
    assert default_memory(8 << 30) == 6 << 30
    assert default_memory(1 << 20) == 128 << 20


@pytest.mark.parametrize(
    "limits",
    [
        {"pids": 1},
        {"pids": "100"},
        {"memory": 8},
        {"cpus": 0},
        {"cpus": "2"},
        {"cpus": True},
        {"cpus": float("nan")},
        {"cpus": float("inf")},
        {"best_effort": "yes"},
        {"swap": "1g"},
    ],
    ids=str,
)
def test_limits_that_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Policy.model_validate({"profile": "opencode", "limits": limits})


def test_a_fraction_of_a_processor_is_kept_to_a_hundredth() -> None:
    assert Limits(cpus=0.29).container(1 << 30).nano_cpus == 290_000_000
    assert Limits(cpus=2).container(1 << 30).nano_cpus == 2 * 10**9
