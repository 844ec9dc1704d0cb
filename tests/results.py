"""``make test-all``: run everything and write what was run on what, for docs/results/.

The default engine gets every test. The others get the system tests that are about what an engine could change:
those of the cases and faults, those that name engines, and what CI runs.
Most system tests wait most of the time, so two lanes, each with a lab of its own, work through the files.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import os
import queue
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import engines_page
from tests.lab import Lab, LabError, engines
from tests.lab.facts import describe

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
NO_BOX = 77
"""Exit code of one engine's run when its box does not come up; none of pytest's own."""
LANES = "CORRAL_LANES"
PIECE_LIMIT = 3600
"""Seconds after which one file's tests are ended and count as failed."""
FRESHNESS = "tests/unit/test_results_are_fresh.py"
"""It asks for the file that a run writes in the end, so a run leaves it out."""
SELECTED = "case or fault or engine or smoke or representative"
"""Marks of what runs on engines other than the default."""
STARTS, STARTS_IN_FULL = "CORRAL_STARTS", "100"
"""How often a container starts with a flood, in the tests that count packets before the policy."""
MADE = ("docs/results", "docs/engines.md")
"""What a run writes itself."""
TESTED = ("enforcer", "tests/lab")
"""What a result file stands for: after a change there it is an earlier tree's."""
GRACE = datetime.timedelta(days=7)
"""How long what a result file stands for may change before everything has to be run again."""


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
        self.seconds: dict[str, float] = {}

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Count what a choice by marks left out."""
        self.outcomes["deselected"] = self.outcomes.get("deselected", 0) + len(items)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
        outcome = yield
        self.note(item, outcome.get_result())

    def note(self, item: pytest.Item, report: pytest.TestReport) -> None:
        """Count a test once: by its call, by a set-up that did not pass, by a clean-up that failed after it."""
        self.seconds[item.nodeid] = self.seconds.get(item.nodeid, 0.0) + getattr(report, "duration", 0.0)
        if report.when == "teardown" and report.failed:
            self.failed.append(f"{item.nodeid} (its clean-up)")
        if report.when != "call" and not (report.when == "setup" and report.outcome != "passed"):
            return
        expected = getattr(report, "wasxfail", None) if report.skipped else None
        outcome = report.outcome if expected is None else "xfailed"
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if report.failed:
            self.failed.append(item.nodeid)
        if expected is not None:
            self.skipped[item.nodeid] = f"known to fail: {str(expected).removeprefix('reason: ')}"
        elif report.skipped:
            told = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skipped[item.nodeid] = told.removeprefix("Skipped: ")
        for mark in item.iter_markers("fault"):
            self._note(self.faults, mark.args[0], report.outcome)
        for mark in item.iter_markers("case"):
            self._note(self.cases, mark.args[0], report.outcome)

    def told(self) -> dict[str, Any]:
        """Return what was counted, as JSON."""
        return {
            "outcomes": self.outcomes,
            "faults": self.faults,
            "cases": {str(number): outcome for number, outcome in self.cases.items()},
            "failed": self.failed,
            "skipped": self.skipped,
            "seconds": self.seconds,
        }

    def take(self, told: Mapping[str, Any]) -> None:
        """Add what another counter told."""
        for outcome, count in told["outcomes"].items():
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + count
        for fault, outcome in told["faults"].items():
            self._note(self.faults, fault, outcome)
        for number, outcome in told["cases"].items():
            self._note(self.cases, int(number), outcome)
        self.failed += told["failed"]
        self.skipped |= told["skipped"]
        self.seconds |= told["seconds"]

    @staticmethod
    def _note(table: dict, key: object, outcome: str) -> None:  # type: ignore[type-arg]
        table[key] = max(outcome, table.get(key, outcome), key=_WEIGHT.index)


def commit() -> str:
    """Return the commit that was tested, marked when the tree differs from it."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    dirty = subprocess.run(
        ["git", "status", "--porcelain", "--", *(f":!{path}" for path in MADE)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return head.stdout.strip() + ("-dirty" if dirty.stdout.strip() else "")


def last_change(root: Path = ROOT, folders: Sequence[str] = TESTED) -> datetime.date:
    """Return when ``folders`` were changed last: by a commit, or today when a tree is no clone."""
    command = ["git", "log", "-1", "--format=%cs", "--", *folders]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout.strip()
    return datetime.date.fromisoformat(found) if found else datetime.datetime.now(datetime.UTC).date()


def digest(root: Path = ROOT, folders: Sequence[str] = TESTED) -> str:
    """Return the SHA-256 of every file's path and content in ``folders``, caches of Python aside."""
    total = hashlib.sha256()
    files = (file for folder in folders for file in (root / folder).rglob("*") if file.is_file())
    for file in sorted(file for file in files if "__pycache__" not in file.parts):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        total.update(f"{content}  {file.relative_to(root).as_posix()}\n".encode())
    return total.hexdigest()


def why_stale(told: Mapping[str, Any], now: str, changed: datetime.date) -> str | None:
    """Return why a result file says too little of a tree, None when it says enough.

    Args:
        told: the file.
        now: the tree's digest.
        changed: when what the digest is of was changed last.
    """
    # Not red at once: who may not land what works loses it. The page says of which tree a run was, and how whole.
    recent = abs(changed - datetime.date.fromisoformat(str(told.get("date")))) <= GRACE
    if told.get("digest") != now and not recent:
        return f"{' or '.join(TESTED)} changed since commit {str(told.get('commit'))[:12]} was tested"
    if str(told.get("commit")).endswith("-dirty"):
        return "what was tested is no commit"
    missing = [piece for piece, part in told.get("pieces", {}).items() if not part["outcomes"]]
    if missing and not recent:
        return f"not run: {', '.join(missing)}"
    if told.get("failed") or not told.get("outcomes", {}).get("passed"):
        return f"not everything passed: {', '.join(told.get('failed') or ['no test ran'])}"
    return None


def compact(told: Mapping[str, Any], tested: str) -> dict[str, Any]:
    """Return what a result file keeps of one piece: what was counted in it, and on which commit."""
    return {"commit": tested, **told, "seconds": round(sum(told["seconds"].values()))}


def chosen(engine: str, words: Sequence[str]) -> list[str]:
    """Return the words for pytest on an engine; a choice among ``words`` comes last, and so counts."""
    return list(words) if engine == engines.DEFAULT else ["-m", SELECTED, *words]


def body(
    facts: Mapping[str, str], parts: Mapping[str, Mapping[str, Any]], tested: str, date: str
) -> dict[str, Any]:
    """What a result file says: ``parts`` (piece -> ``compact``) and their sum."""
    total = Counter()
    for part in parts.values():
        total.take({**part, "seconds": {}})
    return {
        "commit": tested,
        "digest": digest(),
        "date": date,
        **facts,
        "outcomes": total.outcomes,
        "faults": dict(sorted(total.faults.items())),
        "cases": {str(number): outcome for number, outcome in sorted(total.cases.items())},
        "failed": sorted(total.failed),
        "skipped": dict(sorted(total.skipped.items())),
        "pieces": dict(sorted(parts.items())),
    }


def unfinished(told: Mapping[str, Any], now: str) -> list[str]:
    """Return the pieces of a result file that have to be run (again) so that everything passed.

    What a run that was cut off did not come to has no outcome.

    Raises:
        ValueError: what was tested changed since, so that all of it has to.
    """
    if told.get("digest") != now:
        raise ValueError(f"{' or '.join(TESTED)} changed since: run everything")
    return [piece for piece, part in told["pieces"].items() if part["failed"] or not part["outcomes"]]


def pieces(engine: str, known: Mapping[str, float]) -> list[str]:
    """Return what a lane runs in one go, the longest first as far as an earlier run tells (piece -> seconds)."""
    system = [file.relative_to(ROOT).as_posix() for file in (ROOT / "tests" / "system").glob("test_*.py")]
    others = ["tests/unit", "tests/contract"] if engine == engines.DEFAULT else []
    return sorted((*others, *system), key=lambda piece: (-known.get(piece, float("inf")), piece))


def known(engine: str) -> dict[str, float]:
    """Return how long each piece took (seconds), as far as the files of that engine or the default one tell."""
    files = (RESULTS / f"{name}.json" for name in (engines.DEFAULT, engine))
    told = (json.loads(file.read_text()).get("pieces", {}) for file in files if file.exists())
    return {piece: part["seconds"] for parts in told for piece, part in parts.items() if part["seconds"]}


def run_piece(words: list[str], out: Path) -> int:
    """Run pytest on some files and write what was counted to ``out``. Returns pytest's exit code."""
    counter = Counter()
    code = int(pytest.main(words, plugins=[counter]))
    out.write_text(json.dumps(counter.told()))
    # A file that has nothing for this engine is no failure.
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code


class Lanes:
    """Works through pieces, ``names`` labs at a time, and gathers what they counted."""

    def __init__(
        self,
        names: Sequence[str],
        words: Sequence[str],
        scratch: Path,
        ended: Callable[[Mapping[str, dict[str, Any]]], object] = lambda parts: None,
    ) -> None:
        self.names, self.words, self.scratch, self.ended = names, words, scratch, ended
        self.counter = Counter()
        self.parts: dict[str, dict[str, Any]] = {}
        self._said = threading.Lock()

    def run(self, wanted: Iterable[str]) -> int:
        """Run all of them and return 0 when each passed."""
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        for piece in wanted:
            waiting.put(piece)
        codes: list[int] = []

        def lane(name: str) -> None:
            with contextlib.suppress(queue.Empty):
                while True:
                    codes.append(self._one(name, waiting.get_nowait()))

        threads = [threading.Thread(target=lane, args=(name,)) for name in self.names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return int(any(codes))

    def _one(self, lab: str, piece: str) -> int:
        out = self.scratch / f"{piece.replace('/', '-')}.json"
        command = [
            sys.executable,
            "-m",
            "tests.results",
            "--piece",
            str(out),
            f"--pytest={shlex.join(self.words)}",
        ]
        log = self.scratch / f"{piece.replace('/', '-')}.log"
        self._say(f"--- {piece} begins in lab {lab}")
        began = time.monotonic()
        with log.open("w") as file:
            try:
                code = subprocess.run(
                    [*command, piece],
                    cwd=ROOT,
                    env={**os.environ, "CORRAL_LAB_NAME": lab},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=PIECE_LIMIT,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                code = 1
        text = log.read_text(errors="replace").strip()
        shown = text if code else text.rpartition("\n")[2]
        told = json.loads(out.read_text()) if out.exists() else Counter().told()
        if code and not told["failed"]:
            told["failed"].append(f"{piece} (did not end by itself, or not well: exit code {code})")
        with self._said:
            self.counter.take(told)
            self.parts[piece] = told
            self.ended(self.parts)
        self._say(f"--- {piece} ended with {code} after {time.monotonic() - began:.0f} s\n{shown}")
        return code

    def _say(self, text: str) -> None:
        with self._said:
            print(text, flush=True)


def run_one(engine: str, words: list[str], again: bool = False) -> int:
    """Run pytest on one engine and write its result file. Returns 0 or 1, or NO_BOX.

    ``again``: only what did not pass in the file that is there; the rest of it stays.
    """
    os.environ[engines.VARIABLE] = engine
    keep = os.environ.get("CORRAL_LAB_KEEP")
    os.environ.setdefault(STARTS, STARTS_IN_FULL)
    os.environ["CORRAL_LAB_KEEP"] = "1"  # the tests use the box that told the facts
    path = RESULTS / f"{engine}.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    parts: dict[str, Any] = before.get("pieces", {})
    wanted = pieces(engine, known(engine))
    if again:
        try:
            rest = unfinished(before, digest())
            wanted = [piece for piece in wanted if piece in rest or piece not in parts]
        except ValueError as error:
            print(f"{engine}: {error}", file=sys.stderr)
            return 1
    try:
        with Lab.up() as lab:
            facts, name = describe(lab.box), lab.name
    except LabError as error:
        print(f"{engine}: its box does not come up on this machine\n{error}", file=sys.stderr)
        return NO_BOX
    count = int(os.environ.get(LANES) or min(2, os.cpu_count() or 1))
    names = [name, *(f"{name}{number}" for number in range(2, count + 1))]
    tested = commit()
    # What was not run yet stands there without an outcome, so that a run that is cut off goes on with --again.
    kept = (parts if again else {}) | {piece: compact(Counter().told(), tested) for piece in wanted}

    def note(done: Mapping[str, dict[str, Any]]) -> None:
        write(path, facts, kept | {piece: compact(told, tested) for piece, told in done.items()}, tested)
        # Beside it at each moment: a test compares them, and runs here too.
        engines_page.main()

    try:
        with tempfile.TemporaryDirectory(prefix="corral-results-") as scratch:
            lanes = Lanes(names, chosen(engine, words), Path(scratch), note)
            lanes.run(wanted)
    finally:
        if keep != "1":
            for each in names:
                Lab.named(each).down()
    slow = sorted(lanes.counter.seconds.items(), key=lambda row: -row[1])[:25]
    print("\n".join(["slowest:", *(f"{spent:7.1f} s  {nodeid}" for nodeid, spent in slow)]))
    note(lanes.parts)
    return say(path)


def write(path: Path, facts: Mapping[str, str], parts: Mapping[str, Any], tested: str) -> None:
    """Write a result file, in one step."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    told = body(facts, parts, tested, datetime.datetime.now(datetime.UTC).date().isoformat())
    new = path.with_suffix(".new")
    new.write_text(json.dumps(told, indent=2) + "\n")
    new.replace(path)


def say(path: Path) -> int:
    """Say what a result file says. Returns 0 when everything passed."""
    told = json.loads(path.read_text())
    print(f"{path.stem}: {', '.join(f'{count} {what}' for what, count in told['outcomes'].items())}")
    print("\n".join(f"FAILED {nodeid}" for nodeid in told["failed"]))
    return int(bool(told["failed"]))


def verdict(codes: dict[str, int], wanted: list[str]) -> int:
    """0 when every engine's tests passed; a box that does not come up counts when it was asked for by name."""
    missing = [engine for engine, code in codes.items() if code == NO_BOX]
    failed = [engine for engine, code in codes.items() if code not in (0, NO_BOX)]
    return int(bool(failed or set(missing) & {*wanted, engines.DEFAULT} or len(missing) == len(codes)))


def main(words: list[str] | None = None) -> int:
    """Run the engines one after the other, each in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m tests.results", description=__doc__)
    parser.add_argument("--one", metavar="ENGINE", help=argparse.SUPPRESS)
    parser.add_argument("--piece", metavar="FILE", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--pytest", default="", help="words for pytest")
    parser.add_argument("--again", action="store_true", help="only what did not pass the last time")
    parser.add_argument("engines", nargs="*", help="default: all, those that do not boot here are named")
    options = parser.parse_args(words)
    if options.piece:
        return run_piece(
            [*shlex.split(options.pytest), f"--ignore={FRESHNESS}", *options.engines], options.piece
        )
    if options.one:
        return run_one(options.one, shlex.split(options.pytest), options.again)
    for engine in options.engines:
        if engine not in engines.ENGINES:
            parser.error(f"{engine} is none of {', '.join(engines.ENGINES)}")
    wanted = options.engines or sorted(engines.ENGINES, key=lambda name: name != engines.DEFAULT)
    codes = {}
    for engine in wanted:
        print(f"=== {engine}", flush=True)
        command = [sys.executable, "-m", "tests.results", "--one", engine, f"--pytest={options.pytest}"]
        command += ["--again"] if options.again else []
        codes[engine] = subprocess.run(command, cwd=ROOT, check=False).returncode
    engines_page.main()
    said = {0: "passed", NO_BOX: "does not come up on this machine"}
    for engine, code in codes.items():
        print(f"{engine}: {said.get(code, f'failed (exit code {code})')}")
    return verdict(codes, options.engines)


if __name__ == "__main__":
    sys.exit(main())
