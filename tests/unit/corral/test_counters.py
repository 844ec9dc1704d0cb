"""The service's counters for programs, from the text that Prometheus reads."""

from __future__ import annotations

import pytest

from corral import counters
from enforcer import metrics
from policy.errors import EnforcerError


def page(**changes: object) -> str:
    now = {
        "version": 'a"b\\c\nd, e="f"',
        "docker": True,
        "writer": True,
        "repairs": 2,
        "pins": 3,
        "host_entries": 0,
        "sessions": {"running": 1, "ready": 2},
        "names": {},
        "strangers": 0,
        "denied": {"demo-0a0b0c0d": 40},
        "asked": {},
        "lookups": {},
        "lost": 0,
    }
    found = metrics.Metrics()
    found.apply.add(0.25)
    return metrics.render(found, metrics.Now(**{**now, **changes}))  # type: ignore[arg-type]


def test_every_sample_is_told_with_its_family_labels_and_number() -> None:
    text = page()
    families = {row["name"]: row for row in counters.body(text)["metrics"]}
    assert sum(len(row["samples"]) for row in families.values()) == sum(
        not line.startswith("#") for line in text.splitlines()
    )
    assert families["corral_pins"] == {
        "name": "corral_pins",
        "type": "gauge",
        "help": "Elements that let a session reach an address.",
        "samples": [{"name": "corral_pins", "labels": {}, "value": 3}],
    }
    assert families["corral_names"]["samples"] == []
    assert [(one["labels"], one["value"]) for one in families["corral_sessions"]["samples"]] == [
        ({"state": "ready"}, 2),
        ({"state": "running"}, 1),
    ]
    timing = families["corral_apply_seconds"]
    assert [(one["name"], one["value"]) for one in timing["samples"]] == [
        ("corral_apply_seconds_sum", 0.25),
        ("corral_apply_seconds_count", 1),
    ]
    # As the service spelled it.
    (built,) = families["corral_build_info"]["samples"]
    assert built["labels"] == {"version": 'a"b\\c\nd, e="f"'}


@pytest.mark.parametrize("line", ["a", "a b", 'a{b="c} 1', "a{b=1} 1", "1 2 3", "{} 1"])
def test_what_is_none_of_the_format_is_an_error_that_shows_it(line: str) -> None:
    with pytest.raises(EnforcerError, match="not understood"):
        counters.body(f"# TYPE a gauge\n{line}\n")


def test_a_sample_without_a_family_is_an_error() -> None:
    with pytest.raises(EnforcerError, match="not understood"):
        counters.body("a 1\n")
