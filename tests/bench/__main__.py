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
from tests.system.host import PYTHON, Project, install

from .images import images
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


POLICY = """\
profile: opencode
limits: {best_effort: true}
egress: {profile_defaults: false, allow: [allowed1.corral.example]}
"""


# What a start without an option imports (tests/unit/corral/test_start.py).
IMPORTED = (
    "corral.cli",
    "corral.run",
    "agent_image.builder",
    "agent_image.runner",
    "enforcer.config",
    "enforcer.hostsfile",
)


def start(lab: Lab, count: int) -> dict[str, Any]:
    """How long commands take to begin, beside what they cannot be faster than."""
    box = install(lab)
    project = Project(box, f"{box.home}/Projects/bench")
    project.policy(POLICY)
    project.inside("true", timeout=600)
    image = box.run(["docker", "images", "-q", "corral/*"]).stdout.split()[0]
    programs = {
        "python -c pass": [PYTHON, "-c", "pass"],
        "corral --version": ["corral", "--version"],
        "corral status": ["corral", "status"],
        # Of corral run, what is not waiting for others.
        "imports of corral run": [PYTHON, "-c", f"import {', '.join(IMPORTED)}"],
        "docker run --rm IMAGE true": ["docker", "run", "--rm", "--entrypoint", "true", image],
        "corral run -- true": ["corral", "run", "--", "true"],
    }
    script = (HERE / "startwatch.py").read_text()
    told = json.loads(
        box.run(
            ["python3", "-", str(count), json.dumps(programs)],
            cwd=project.path,
            input=script,
            timeout=60 + 10 * count,
        ).stdout
    )
    project.end()
    rows = {name: summary(seconds) for name, seconds in told.items()}
    bare, docker = rows["python -c pass"]["p50_ms"], rows["docker run --rm IMAGE true"]["p50_ms"]
    return {
        "aim": "--version 60 ms over python, status 150 ms, run 1.15 of docker run",
        **rows,
        "--version - python": round(rows["corral --version"]["p50_ms"] - bare, 1),
        "run / docker run": round(rows["corral run -- true"]["p50_ms"] / docker, 2),
    }


BENCHMARKS: dict[str, Callable[[Lab, int], dict[str, Any]]] = {"heal": heal, "start": start, "images": images}


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
