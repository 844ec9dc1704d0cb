"""``make test-all``: run everything and write what was run on what, for docs/results/.

The default engine gets every test; the others get the system tests, for nothing else depends on the engine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Lab, LabError, engines
from tests.lab.facts import describe

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
NO_BOX = 77
"""Exit code of one engine's run when its box does not come up; none of pytest's own."""


_WEIGHT = ("skipped", "passed", "failed")
"""Of several tests that show the same thing, the heaviest outcome is told."""


class Counter:
    """A pytest plugin that counts outcomes and notes faults and cases shown, failures and what was left out."""

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {}
        self.faults: dict[str, str] = {}
        self.cases: dict[int, str] = {}
        self.failed: list[str] = []
        self.skipped: dict[str, str] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
        outcome = yield
        self.note(item, outcome.get_result())

    def note(self, item: pytest.Item, report: pytest.TestReport) -> None:
        """Count a test once: by its call, by a set-up that did not pass, by a clean-up that failed after it."""
        if report.when == "teardown" and report.failed:
            self.failed.append(f"{item.nodeid} (its clean-up)")
        if report.when != "call" and not (report.when == "setup" and report.outcome != "passed"):
            return
        self.outcomes[report.outcome] = self.outcomes.get(report.outcome, 0) + 1
        if report.failed:
            self.failed.append(item.nodeid)
        if report.skipped:
            told = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skipped[item.nodeid] = told.removeprefix("Skipped: ")
        for mark in item.iter_markers("fault"):
            self._note(self.faults, mark.args[0], report.outcome)
        for mark in item.iter_markers("case"):
            self._note(self.cases, mark.args[0], report.outcome)

    @staticmethod
    def _note(table: dict, key: object, outcome: str) -> None:  # type: ignore[type-arg]
        table[key] = max(outcome, table.get(key, outcome), key=_WEIGHT.index)


def commit() -> str:
    """Return the commit that was tested, marked when the tree differs from it."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    dirty = subprocess.run(
        ["git", "status", "--porcelain", "--", ":!docs/results"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return head.stdout.strip() + ("-dirty" if dirty.stdout.strip() else "")


def body(facts: dict[str, str], counter: Counter, tested: str, date: str) -> dict[str, Any]:
    """What a result file says."""
    return {
        "commit": tested,
        "date": date,
        **facts,
        "outcomes": counter.outcomes,
        "faults": counter.faults,
        "cases": {str(number): outcome for number, outcome in sorted(counter.cases.items())},
        "failed": counter.failed,
        "skipped": counter.skipped,
    }


def run_one(engine: str, words: list[str]) -> int:
    """Run pytest on one engine and write its result file. Returns pytest's exit code, or NO_BOX."""
    os.environ[engines.VARIABLE] = engine
    keep = os.environ.get("CORRAL_LAB_KEEP")
    os.environ["CORRAL_LAB_KEEP"] = "1"  # the tests use the box that told the facts
    try:
        with Lab.up() as lab:
            facts, name = describe(lab.box), lab.name
    except LabError as error:
        print(f"{engine}: its box does not come up on this machine\n{error}", file=sys.stderr)
        return NO_BOX
    counter = Counter()
    what = ROOT / "tests" if engine == engines.DEFAULT else ROOT / "tests" / "system"
    try:
        code = int(pytest.main([*words, "--durations=25", str(what)], plugins=[counter]))
    finally:
        if keep != "1":
            Lab.named(name).down()
    RESULTS.mkdir(parents=True, exist_ok=True)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    told = body(facts, counter, commit(), today)
    (RESULTS / f"{engine}.json").write_text(json.dumps(told, indent=2) + "\n")
    return code


def verdict(codes: dict[str, int], wanted: list[str]) -> int:
    """0 when every engine's tests passed; a box that does not come up counts when it was asked for by name."""
    missing = [engine for engine, code in codes.items() if code == NO_BOX]
    failed = [engine for engine, code in codes.items() if code not in (0, NO_BOX)]
    return int(bool(failed or set(missing) & {*wanted, engines.DEFAULT} or len(missing) == len(codes)))


def main(words: list[str] | None = None) -> int:
    """Run the engines one after the other, each in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m tests.results", description=__doc__)
    parser.add_argument("--one", metavar="ENGINE", help=argparse.SUPPRESS)
    parser.add_argument("--pytest", default="", help="words for pytest")
    parser.add_argument("engines", nargs="*", help="default: all, those that do not boot here are named")
    options = parser.parse_args(words)
    if options.one:
        return run_one(options.one, options.pytest.split())
    for engine in options.engines:
        if engine not in engines.ENGINES:
            parser.error(f"{engine} is none of {', '.join(engines.ENGINES)}")
    chosen = options.engines or sorted(engines.ENGINES, key=lambda name: name != engines.DEFAULT)
    codes = {}
    for engine in chosen:
        print(f"=== {engine}", flush=True)
        command = [sys.executable, "-m", "tests.results", "--one", engine, f"--pytest={options.pytest}"]
        codes[engine] = subprocess.run(command, cwd=ROOT, check=False).returncode
    said = {0: "passed", NO_BOX: "does not come up on this machine"}
    for engine, code in codes.items():
        print(f"{engine}: {said.get(code, f'failed (exit code {code})')}")
    return verdict(codes, options.engines)


if __name__ == "__main__":
    sys.exit(main())
