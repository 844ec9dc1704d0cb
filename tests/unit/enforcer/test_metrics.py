"""The text for Prometheus, read back by a small parser of its format."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enforcer.metrics import Metrics, Now, Timing, counted, render

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"(,|$)')
UNESCAPED = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}

Sample = tuple[str, tuple[tuple[str, str], ...]]


def parsed(text: str) -> tuple[dict[Sample, float], dict[str, str]]:
    """Return samples and the type of each family; fails on what a scraper would refuse."""
    samples: dict[Sample, float] = {}
    types: dict[str, str] = {}
    helped: set[str] = set()
    assert text.endswith("\n")
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("# HELP "):
            name, _, told = line.removeprefix("# HELP ").partition(" ")
            assert NAME.fullmatch(name)
            assert told
            assert name not in helped
            helped.add(name)
            continue
        if line.startswith("# TYPE "):
            name, kind = line.removeprefix("# TYPE ").split(" ")
            assert kind in {"counter", "gauge", "summary"}
            assert name in helped
            assert name not in types
            types[name] = kind
            continue
        match = re.fullmatch(r"([^{ ]+)(?:\{(.*)\})? (\S+)", line)
        assert match, line
        name, labels = match[1], list(LABEL.finditer(match[2] or ""))
        assert "".join(found[0] for found in labels) == (match[2] or ""), line
        family = re.sub("_(sum|count)$", "", name) if name not in types else name
        assert family == list(types)[-1], f"{line}: outside its family"
        if types[family] == "counter":
            assert name.endswith("_total")
        key = (name, tuple((f[1], re.sub(r'\\[\\"n]', lambda m: UNESCAPED[m[0]], f[2])) for f in labels))
        assert key not in samples
        samples[key] = float(match[3])
    assert set(types) == helped
    return samples, types


NOW = Now(
    version="0.1.0",
    docker=True,
    writer=True,
    repairs=3,
    pins=12,
    host_entries=1,
    sessions={"running": 2, "pending": 1},
    names={"OK": 5, "STALE": 1},
    strangers=0,
    denied={"demo-0a0b0c0d": 77},
    asked={"demo-0a0b0c0d": 6},
    lookups={"demo-0a0b0c0d": 4},
    lost=0,
)


def metrics() -> Metrics:
    made = Metrics(refreshes=Counter(answered=9, failed=2), drift=Counter({"jump": 1, "pins": 4}))
    made.reconcile.add(0.25)
    made.reconcile.add(0.5)
    made.connections = 3
    made.writer_errors = 5
    return made


def test_every_number_can_be_read_back() -> None:
    samples, types = parsed(render(metrics(), NOW))
    assert samples["corral_build_info", (("version", "0.1.0"),)] == 1
    assert samples["corral_pins", ()] == 12
    assert samples["corral_sessions", (("state", "running"),)] == 2
    assert samples["corral_refreshes_total", (("result", "failed"),)] == 2
    assert samples["corral_repairs_total", ()] == 3
    assert samples["corral_drift_total", (("part", "pins"),)] == 4
    assert samples["corral_reconcile_seconds_sum", ()] == 0.75
    assert samples["corral_reconcile_seconds_count", ()] == 2
    assert samples["corral_docker_reconnects_total", ()] == 2
    assert samples["corral_writer_errors_total", ()] == 5
    assert samples["corral_denied_packets_total", (("sandbox", "demo-0a0b0c0d"),)] == 77
    assert samples["corral_denied_names_total", (("sandbox", "demo-0a0b0c0d"),)] == 6
    assert samples["corral_dead_resolver_questions_total", (("sandbox", "demo-0a0b0c0d"),)] == 4
    assert types["corral_reconcile_seconds"] == "summary"


def test_the_names_are_an_interface() -> None:
    _, types = parsed(render(Metrics(), NOW))
    assert set(types) == {
        "corral_apply_seconds",
        "corral_build_info",
        "corral_dead_resolver_questions_total",
        "corral_denied_log_lost_total",
        "corral_denied_names_total",
        "corral_denied_packets_total",
        "corral_docker_reconnects_total",
        "corral_docker_up",
        "corral_dials_total",
        "corral_drift_total",
        "corral_host_entries",
        "corral_names",
        "corral_pins",
        "corral_reconcile_seconds",
        "corral_refreshes_total",
        "corral_repairs_total",
        "corral_sessions",
        "corral_strangers",
        "corral_writer_errors_total",
        "corral_writer_up",
    }


def test_without_a_writer_repairs_are_absent_not_zero() -> None:
    samples, _ = parsed(render(Metrics(), replace(NOW, repairs=None, writer=False)))
    assert not any(name == "corral_repairs_total" for name, _ in samples)
    assert samples["corral_writer_up", ()] == 0


def test_the_first_connection_to_docker_is_no_reconnect() -> None:
    for connections, told in ((0, 0), (1, 0), (4, 3)):
        samples, _ = parsed(render(Metrics(connections=connections), NOW))
        assert samples["corral_docker_reconnects_total", ()] == told


@given(st.dictionaries(st.text(), st.integers(0, 10**15)))
def test_no_label_breaks_the_format(values: dict[str, int]) -> None:
    samples, _ = parsed(render(Metrics(), replace(NOW, denied=values)))
    found = {
        labels[0][1]: value
        for (name, labels), value in samples.items()
        if name == "corral_denied_packets_total"
    }
    assert found == values


@pytest.mark.parametrize("line", ["corral_x 1", "# TYPE corral_x counter\ncorral_x 1", 'corral_pins{a="b} 1'])
def test_the_parser_refuses_what_is_no_such_text(line: str) -> None:
    with pytest.raises(AssertionError):
        parsed(f"# HELP corral_pins Pins.\n# TYPE corral_pins gauge\n{line}\n")


def test_states_are_counted() -> None:
    assert counted(["a", "b", "a"]) == {"a": 2, "b": 1}
    timing: Any = Timing()
    timing.add(1.5)
    assert (timing.count, timing.seconds) == (1, 1.5)


def test_the_page_about_them_lists_each() -> None:
    _, types = parsed(render(Metrics(), NOW))
    page = (Path(__file__).parents[3] / "docs" / "observe.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(corral_[a-z_]+)(?:\{[a-z]+\})?`", page)) == set(types)
