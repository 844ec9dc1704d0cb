"""Result files: each test is counted once, and nothing is left out silently."""

from __future__ import annotations

import types
from typing import Any

import pytest

from tests import results


def item(nodeid: str, **marks: Any) -> Any:
    def iter_markers(name: str) -> list[Any]:
        return [types.SimpleNamespace(args=(marks[name],))] if name in marks else []

    return types.SimpleNamespace(nodeid=nodeid, iter_markers=iter_markers)


def report(when: str, outcome: str, longrepr: Any = None) -> Any:
    told = {"when": when, "outcome": outcome, "longrepr": longrepr}
    return types.SimpleNamespace(**told, failed=outcome == "failed", skipped=outcome == "skipped")


def test_each_test_counts_once_and_failures_and_skips_are_named() -> None:
    counter = results.Counter()
    for when in ("setup", "call", "teardown"):
        counter.note(item("good", case=3), report(when, "passed"))
    counter.note(item("bad", case=3), report("call", "failed"))
    counter.note(item("no set-up", fault="flood"), report("setup", "failed"))
    counter.note(item("other engine", case=5), report("setup", "skipped", ("f", 1, "Skipped: not on sid")))
    counter.note(item("untidy"), report("call", "passed"))
    counter.note(item("untidy"), report("teardown", "failed"))
    told = results.body({"engine": "e"}, counter, "abc", "2000-01-01")
    assert told["outcomes"] == {"passed": 2, "failed": 2, "skipped": 1}
    assert told["failed"] == ["bad", "no set-up", "untidy (its clean-up)"]
    assert told["skipped"] == {"other engine": "not on sid"}
    assert told["cases"] == {"3": "failed", "5": "skipped"}
    assert told["faults"] == {"flood": "failed"}


@pytest.mark.parametrize("first", ["shown", "left out"])
def test_a_case_shown_by_one_test_and_skipped_by_another_is_shown(first: str) -> None:
    counter = results.Counter()
    seen = {
        "shown": report("call", "passed"),
        "left out": report("setup", "skipped", ("f", 1, "Skipped: why")),
    }
    for name in sorted(seen, key=lambda name: name != first):
        counter.note(item(name, case=1), seen[name])
    assert counter.cases == {1: "passed"}


@pytest.mark.parametrize(
    ("codes", "wanted", "expected"),
    [
        ({"trixie": 0, "sid": 0}, [], 0),
        ({"trixie": 0, "sid": 1}, [], 1),
        ({"trixie": 0, "sid": results.NO_BOX}, [], 0),
        ({"trixie": 0, "sid": results.NO_BOX}, ["trixie", "sid"], 1),
        ({"trixie": results.NO_BOX, "sid": 0}, [], 1),
        ({"sid": results.NO_BOX}, [], 1),
    ],
)
def test_a_box_that_does_not_come_up_fails_when_it_was_asked_for(
    codes: dict[str, int], wanted: list[str], expected: int
) -> None:
    assert results.verdict(codes, wanted) == expected


def test_unknown_engines_are_refused() -> None:
    with pytest.raises(SystemExit) as caught:
        results.main(["buster"])
    assert caught.value.code == 2
