"""``make bench``: measure in the lab and write docs/results/bench.json."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.lab import Lab
from tests.lab.facts import describe
from tests.results import RESULTS, commit
from tests.system.host import install

from .statistics import summary

HERE = Path(__file__).parent


def heal(lab: Lab, count: int) -> dict[str, Any]:
    """How long the kernel goes without a rule of ours that somebody took away; the aim is a p99 of 100 ms."""
    program = (HERE / "healwatch.py").read_text()
    done = install(lab).run(["python3", "-", str(count)], user="root", input=program, timeout=60 + 5 * count)
    told = json.loads(done.stdout)
    tool = summary(told.pop("tool"))
    kinds = {what: summary(seconds) for what, seconds in told.items()}
    ratios = {what: round(row["p99_ms"] / tool["p50_ms"], 1) for what, row in kinds.items()}
    return {"aim": "p99 of 100 ms", **kinds, "one listing by iptables": tool, "p99 / listing": ratios}


BENCHMARKS: dict[str, Callable[[Lab, int], dict[str, Any]]] = {"heal": heal}


def main() -> int:
    """Run what was asked for, print it, and keep what the others measured before."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, []], help="default: all")
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args()
    path = RESULTS / "bench.json"
    told = json.loads(path.read_text()) if path.exists() else {}
    with Lab.up() as lab:
        facts = describe(lab.box)
        for name in options.names or BENCHMARKS:
            told[name] = {
                "commit": commit(),
                **facts,
                "count": options.count,
                **BENCHMARKS[name](lab, options.count),
            }
            print(json.dumps({name: told[name]}, indent=2), flush=True)
    path.write_text(json.dumps(told, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
