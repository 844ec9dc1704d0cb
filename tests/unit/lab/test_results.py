"""Result files: each test is counted once, and nothing is left out silently."""

from __future__ import annotations

import contextlib
import datetime
import json
import types
from pathlib import Path
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
    told = results.body({"engine": "e"}, {"x": results.compact(counter.told(), "abc")}, "abc", "2000-01-01")
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


def test_what_is_known_to_fail_is_neither_passed_nor_just_left_out() -> None:
    counter = results.Counter()
    seen = report("call", "skipped")
    seen.wasxfail = "reason: a hole"
    counter.note(item("known"), seen)
    assert counter.outcomes == {"xfailed": 1}
    assert counter.skipped == {"known": "known to fail: a hole"}


def test_what_the_lanes_counted_adds_up() -> None:
    parts = []
    for nodeid, outcome in (("a.py::one", "passed"), ("b.py::two", "failed"), ("b.py::three", "passed")):
        counter = results.Counter()
        counter.note(item(nodeid, case=3, fault="flood"), report("call", outcome))
        parts.append(json.loads(json.dumps(counter.told())))
    kept = {f"piece {number}": results.compact(part, "abc") for number, part in enumerate(parts)}
    told = results.body({}, kept, "abc", "2000-01-01")
    assert told["outcomes"] == {"passed": 2, "failed": 1}
    assert (told["cases"], told["faults"]) == ({"3": "failed"}, {"flood": "failed"})
    assert told["failed"] == ["b.py::two"]


def test_each_file_is_in_exactly_one_piece_and_the_longest_begins() -> None:
    known = dict.fromkeys(results.pieces("trixie", {}), 1.0)
    known |= {"tests/system/test_gate.py": 300.0, "tests/unit": 9.0}
    found = results.pieces("trixie", known)
    assert found[:2] == ["tests/system/test_gate.py", "tests/unit"]
    assert len(found) == len(set(found))
    system = {file.name for file in (results.ROOT / "tests" / "system").glob("test_*.py")}
    assert {Path(piece).name for piece in found} == system | {"unit", "contract"}
    assert {Path(piece).name for piece in results.pieces("sid", known)} == system
    # What no run has timed yet may take long.
    del known["tests/system/test_build.py"]
    assert results.pieces("trixie", known)[0] == "tests/system/test_build.py"


def test_only_what_did_not_pass_is_run_again_and_only_for_the_same_tree() -> None:
    counted = results.Counter()
    counted.note(item("good"), report("call", "passed"))
    good = counted.told()
    bad = results.Counter().told() | {"failed": ["b.py::two"], "outcomes": {"failed": 1}}
    parts = {"a.py": good, "b.py": bad, "c.py": results.Counter().told()}
    told = results.body({}, {name: results.compact(part, "abc") for name, part in parts.items()}, "abc", "")
    assert results.unfinished(told, told["digest"]) == ["b.py", "c.py"]
    with pytest.raises(ValueError, match="run everything"):
        results.unfinished(told, "other")


PART = {"a.py": {"outcomes": {"passed": 1}}, "b.py": {"outcomes": {}}}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"digest": "other"}, "changed since commit abc"),
        ({"digest": "other", "date": "2000-01-02"}, None),
        ({"commit": "abc-dirty"}, "no commit"),
        ({"failed": ["test_a"]}, "test_a"),
        ({"outcomes": {"skipped": 3}}, "no test ran"),
        ({"pieces": PART}, "not run: b.py"),
        ({"pieces": PART, "date": "2000-01-02"}, None),
        ({"digest": "other", "date": "2000-01-02", "failed": ["test_a"]}, "test_a"),
    ],
)
def test_a_result_file_speaks_for_one_tree_in_which_all_passed_and_for_a_week_of_changes(
    change: dict[str, Any], why: str | None
) -> None:
    told = {"digest": "d", "commit": "abc", "date": "2000-01-01", "failed": [], "outcomes": {"passed": 1}}
    found = results.why_stale(told | change, "d", datetime.date(2000, 1, 9))
    assert found is None if why is None else why in str(found)


def test_the_digest_moves_with_content_and_names_and_not_with_caches(tmp_path: Path) -> None:
    file = tmp_path / "enforcer" / "a.py"
    file.parent.mkdir()
    file.write_text("one")
    before = results.digest(tmp_path)
    (file.parent / "__pycache__").mkdir()
    (file.parent / "__pycache__" / "a.pyc").write_text("x")
    assert results.digest(tmp_path) == before
    file.write_text("two")
    assert results.digest(tmp_path) != before
    file.write_text("one")
    file.rename(file.with_name("b.py"))
    assert results.digest(tmp_path) != before


def test_other_engines_are_given_what_is_marked_for_them_and_the_rest_is_counted(tmp_path: Path) -> None:
    test = tmp_path / "test_x.py"
    test.write_text(
        "import pytest\n@pytest.mark.case(1)\ndef test_case(): pass\n"
        "@pytest.mark.fault('x')\ndef test_fault(): pass\ndef test_plain(): pass\n"
    )
    counted = {}
    for engine, words in (("trixie", []), ("sid", []), ("bookworm", ["-m", "case"])):
        lanes = results.Lanes(["one"], results.chosen(engine, words), tmp_path / engine)
        lanes.scratch.mkdir()
        assert lanes.run([str(test)]) == 0
        counted[engine] = lanes.counter.outcomes
    assert counted["trixie"] == {"passed": 3}
    assert counted["sid"] == {"passed": 2, "deselected": 1}
    assert counted["bookworm"] == {"passed": 1, "deselected": 2}


def test_a_run_that_is_cut_off_loses_nothing_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three pieces ends the run as a power cut would; --again runs what is left and what is new."""
    box = types.SimpleNamespace(box=None, name="lab")
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "Lab", types.SimpleNamespace(up=lambda: contextlib.nullcontext(box)))
    monkeypatch.setattr(results, "describe", lambda box: {"engine": "E"})
    monkeypatch.setattr(results, "commit", lambda: "abc")
    shown: list[str] = []
    monkeypatch.setattr(
        results.engines_page, "main", lambda: shown.append((tmp_path / "sid.json").read_text())
    )
    for name, value in (("CORRAL_LAB_KEEP", "1"), (results.LANES, "1"), (results.engines.VARIABLE, "sid")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(results.STARTS, "1")
    found, ran = ["a.py", "b.py", "c.py"], []

    class Cut(BaseException):
        pass

    def run(lanes: results.Lanes, wanted: list[str]) -> int:
        for piece in wanted:
            if piece == "b.py" and "b.py" not in ran:
                ran.append(piece)
                raise Cut
            ran.append(piece)
            lanes.parts[piece] = results.Counter().told() | {"outcomes": {"passed": 1}}
            lanes.ended(lanes.parts)
        return 0

    monkeypatch.setattr(results, "pieces", lambda engine, known: list(found))
    monkeypatch.setattr(results.Lanes, "run", run)
    with pytest.raises(Cut):
        results.run_one("sid", [])
    told = json.loads((tmp_path / "sid.json").read_text())
    assert told["outcomes"] == {"passed": 1}
    assert results.why_stale(told, results.digest(), datetime.date(2000, 1, 1)) == "not run: b.py, c.py"
    found.append("d.py")
    assert results.run_one("sid", [], again=True) == 0
    assert shown[-1] == (tmp_path / "sid.json").read_text()
    assert ran == ["a.py", "b.py", "b.py", "c.py", "d.py"]
    told = json.loads((tmp_path / "sid.json").read_text())
    assert (told["outcomes"], results.why_stale(told, results.digest(), datetime.date(2000, 1, 1))) == (
        {"passed": 4},
        None,
    )


def test_a_piece_that_fails_or_never_ends_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = tmp_path / "test_x.py"
    test.write_text(
        "import time\ndef test_good(): pass\ndef test_bad(): assert 0\ndef test_long(): time.sleep(60)\n"
    )
    monkeypatch.setattr(results, "PIECE_LIMIT", 20)
    lanes = results.Lanes(["one", "two"], ["-k", "good or bad"], tmp_path)
    assert lanes.run([str(test)]) == 1
    assert lanes.counter.outcomes == {"passed": 1, "failed": 1, "deselected": 1}
    monkeypatch.setattr(results, "PIECE_LIMIT", 3)
    lanes = results.Lanes(["one"], ["-k", "long"], tmp_path / "other")
    lanes.scratch.mkdir()
    assert lanes.run([str(test)]) == 1
    assert "did not end" in lanes.counter.failed[0]
