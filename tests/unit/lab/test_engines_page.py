"""What docs/engines.md claims was run is what the result files say."""

from __future__ import annotations

from typing import Any

from tests import engines_page

RESULT: dict[str, Any] = {
    "commit": "0123456789abcdef",
    "date": "2000-01-01",
    "digest": "now",
    "engine": "Docker Engine 1",
    "system": "Debian",
    "iptables": "nft",
    "systemd": "1",
    "kernel": "6",
    "control groups": "unified",
    "outcomes": {"passed": 7, "failed": 1, "skipped": 2},
    "failed": ["tests/system/test_x.py::test_y"],
    "skipped": {"a": "not on sid: why", "b": "not on sid: why"},
}


def test_a_row_has_the_versions_the_counts_and_the_commit() -> None:
    page = engines_page.render({"sid": RESULT}, "now")
    assert (
        "| sid | Docker Engine 1 | Debian | nft | 1 | 6 | unified | 7 | 1 | 2 | 2000-01-01, `0123456789ab` |"
        in page
    )


def test_failures_and_reasons_are_never_left_out() -> None:
    page = engines_page.render({"sid": RESULT}, "now")
    assert "* sid: `tests/system/test_x.py::test_y`" in page
    assert "* sid: 2 tests not on sid: why" in page
    assert "## Failed" not in engines_page.render({"sid": {**RESULT, "failed": []}}, "now")


def test_each_case_and_fault_says_what_came_of_it_on_each_engine() -> None:
    other = {**RESULT, "cases": {"10": "passed", "2": "failed"}, "faults": {"reboot": "passed"}}
    lines = engines_page.shown({"sid": {**RESULT, "cases": {"2": "skipped"}}, "trixie": other})
    assert lines == [
        "| | sid | trixie |",
        "|---|---|---|",
        "| case 2 | – | failed |",
        "| case 10 |  | ✓ |",
        "| reboot |  | ✓ |",
    ]


def test_a_run_that_was_cut_off_is_called_that() -> None:
    page = engines_page.render(
        {"sid": {**RESULT, "pieces": {"tests/system/test_z.py": {"outcomes": {}}}}}, "now"
    )
    assert "`0123456789ab`, in part |" in page
    assert "## Not run yet\n\n* sid: `tests/system/test_z.py`" in page


def test_the_page_is_made_of_the_result_files() -> None:
    assert engines_page.PAGE.read_text() == engines_page.made(), "run: python -m tests.engines_page"


def test_a_run_of_another_state_of_the_service_is_called_that() -> None:
    line = "2000-01-01, `0123456789ab`, of an earlier tree |"
    assert line in engines_page.render({"sid": RESULT}, "later")
    assert line not in engines_page.render({"sid": RESULT}, "now")
