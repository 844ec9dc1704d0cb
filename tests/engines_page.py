"""docs/engines.md out of the result files: what was run on which engine, and what came of it.

``python -m tests.engines_page`` writes it; ``make test-all`` does so too. A test compares.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "engines.md"
RESULTS = ROOT / "docs" / "results"

INTRODUCTION = """\
# Engines

Made by `make test-all` out of `docs/results/`; nothing here is written by hand but this paragraph and the list at the end. A
row is one run in a box with that engine, a real systemd and an internet of its own ([testing.md](testing.md)): on the first
engine of every test there is, on the others of the system tests of the cases and faults, of those that name engines, and of
what CI runs. What one of these others was not given is in its column "left out" too. A run that says "of an earlier tree" was
of another state of `enforcer/` or `tests/lab/` than the one this page lies beside.

"""
EARLIER = "of an earlier tree"
COLUMNS = (
    "box",
    "engine",
    "system",
    "iptables",
    "systemd",
    "kernel",
    "control groups",
    "passed",
    "failed",
    "left out",
    "tested",
)
SHOWN = """\
A case is what once broke somebody's sandbox, a fault what the fault table ([testing.md](testing.md)) does to a host while a sandbox
floods: ✓ every test of it passed (or the one that this engine can have), – none runs there, for a reason that is below.
"""
OUTCOMES = {"passed": "✓", "skipped": "–", "failed": "failed", None: ""}
DRIVERS = """
## Drivers

Where Docker keeps its rules decides which driver of the netfilter writer is used; the writer finds that out by itself, and
again whenever it changes ([020](decisions/020-a-driver-per-place-of-dockers-chain.md)):

| driver | Docker's rules | needs | shown by |
|---|---|---|---|
| `nft` | iptables on nft (the default of every current distribution) | iptables, nftables, ipset in the kernel | all tests |
| `legacy` | iptables on the legacy tables | also python-iptables: `pipx inject corral python-iptables` | contract tests; a box of Docker 20.10.24 on legacy tables |
| `own` | none (`iptables: false`), or its nftables backend | nftables | contract tests; a stand-in: Docker 26.1.5 with `iptables: false` and the host's own translation. **Not** tested on an engine with that backend |

On a host whose driver is `own`, other containers and the build of an image have what this host's own rules give them.

A rootless engine has the writer in its own namespaces, with the driver `nft`: [rootless.md](rootless.md).
"""
UNSUPPORTED = """
## Not supported

`userns-remap`, Docker Desktop, Colima and other engines in a virtual machine, Docker from snap, engines older than 20.10,
podman. `corral install` and `corral doctor` refuse these with the reason ([doctor.md](doctor.md)).

arm64: platform tarballs and hashes of harnesses are in the lock for both architectures and nothing in the code is for one
of them only; no test was ever run there.
"""


def row(name: str, told: Mapping[str, Any], now: str) -> tuple[str, ...]:
    """Return the cells of one engine's row; ``now`` is the digest of the tree that the page is of."""
    outcomes = told.get("outcomes", {})
    tested = f"{told['date']}, `{str(told['commit'])[:12]}`" + (", in part" if unrun(told) else "")
    tested += "" if told.get("digest") == now else f", {EARLIER}"
    facts = [name, *(str(told.get(column, "")) for column in COLUMNS[1:7])]
    counts = [str(outcomes.get("passed", 0)), str(outcomes.get("failed", 0))]
    counts.append(str(sum(outcomes.get(kind, 0) for kind in ("skipped", "xfailed", "deselected"))))
    return (*facts, *counts, tested)


def unrun(told: Mapping[str, Any]) -> list[str]:
    """Return the files that a run did not come to: they have no outcome."""
    return [piece for piece, part in told.get("pieces", {}).items() if not part["outcomes"]]


def shown(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a table with a row for each case and fault, and what came of its tests on each engine."""
    lines = [f"| | {' | '.join(results)} |", f"|{'---|' * (len(results) + 1)}"]
    for kind, order in (("cases", int), ("faults", str)):
        every: set[str] = {row for told in results.values() for row in told.get(kind, {})}
        for each in sorted(every, key=order):
            cells = [OUTCOMES[told.get(kind, {}).get(each)] for told in results.values()]
            name = f"case {each}" if kind == "cases" else each
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def left_out(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return one line for each reason a test had not to run on an engine, with how many tests it kept away."""
    lines = []
    for name, told in results.items():
        reasons: dict[str, int] = {}
        for reason in told.get("skipped", {}).values():
            reasons[reason] = reasons.get(reason, 0) + 1
        lines += [
            f"* {name}: {count} {'test' if count == 1 else 'tests'} {reason}"
            for reason, count in sorted(reasons.items())
        ]
        if count := told.get("outcomes", {}).get("deselected", 0):
            lines.append(f"* {name}: {count} {'test' if count == 1 else 'tests'} no case, fault or engine's")
    return lines


def failures(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return one line for each test that failed."""
    return [f"* {name}: `{nodeid}`" for name, told in results.items() for nodeid in told.get("failed", ())]


def render(results: Mapping[str, Mapping[str, Any]], now: str) -> str:
    """Return the page.

    Args:
        results: engine name -> its result file, in the order of the table.
        now: see ``row``.
    """
    table = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    table += [f"| {' | '.join(row(name, told, now))} |" for name, told in results.items()]
    parts = [INTRODUCTION + "\n".join(table) + "\n"]
    missing = [f"* {name}: `{piece}`" for name, told in results.items() for piece in unrun(told)]
    for title, lines in (
        ("Failed", failures(results)),
        ("Not run yet", missing),
        ("Cases and faults", [SHOWN, *shown(results)]),
        ("Left out, and why", left_out(results)),
    ):
        if lines:
            parts.append(f"\n## {title}\n\n" + "\n".join(lines) + "\n")
    return "".join([*parts, DRIVERS, UNSUPPORTED])


def read(names: Sequence[str]) -> dict[str, Any]:
    """Return the result files there are, by engine."""
    found = {name: RESULTS / f"{name}.json" for name in names}
    return {name: json.loads(path.read_text()) for name, path in found.items() if path.exists()}


def main() -> int:
    """Write the page."""
    new = PAGE.with_suffix(".new")
    new.write_text(made())
    new.replace(PAGE)
    return 0


def made() -> str:
    """Return the page as it is to be in this tree."""
    # They need this module too.
    from tests import results
    from tests.lab import engines

    names = sorted(engines.ENGINES, key=lambda name: (name != engines.DEFAULT, name))
    return render(read(names), results.digest())


if __name__ == "__main__":
    sys.exit(main())
