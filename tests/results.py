"""``make test-all``: run everything and write what was run on what, for docs/results/."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"


class Counter:
    """A pytest plugin that counts outcomes and notes faults and cases shown."""

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {}
        self.faults: dict[str, str] = {}
        self.cases: dict[int, str] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
        outcome = yield
        report = outcome.get_result()
        if report.when != "call" and not (report.when == "setup" and report.outcome != "passed"):
            return
        self.outcomes[report.outcome] = self.outcomes.get(report.outcome, 0) + 1
        for mark in item.iter_markers("fault"):
            self._note(self.faults, mark.args[0], report.outcome)
        for mark in item.iter_markers("case"):
            self._note(self.cases, mark.args[0], report.outcome)

    @staticmethod
    def _note(table: dict, key: object, outcome: str) -> None:  # type: ignore[type-arg]
        table[key] = outcome if table.get(key, "passed") == "passed" else table[key]


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


def main(words: list[str]) -> int:
    """Run pytest over everything and write the result file."""
    counter = Counter()
    code = pytest.main([*words, "--durations=25", str(ROOT / "tests")], plugins=[counter])
    RESULTS.mkdir(parents=True, exist_ok=True)
    body = {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "engine": "Docker Engine 26.1.5 (Debian 13), nft-backed iptables, systemd",
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "outcomes": counter.outcomes,
        "faults": counter.faults,
        "cases": {str(number): outcome for number, outcome in sorted(counter.cases.items())},
    }
    (RESULTS / "trixie.json").write_text(json.dumps(body, indent=2) + "\n")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
