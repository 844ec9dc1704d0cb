"""How large each profile's image is, how long it takes to make, and how long to see that nothing has changed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from policy import profiles
from tests.lab import Box, Lab
from tests.system.host import Project, install

from .statistics import summary

HERE = Path(__file__).parent
POLICY = """\
profile: {profile}
limits: {{best_effort: true}}
egress: {{profile_defaults: false, allow: [allowed1.corral.example]}}
"""
# Looking again is quick; more of it says nothing more.
MOST = 20


def images(lab: Lab, count: int) -> dict[str, Any]:
    """Each profile's image: made from nothing but the base and the registries, then asked for again."""
    box = install(lab)
    rows = {}
    for name in profiles.names():
        # generic is what its user's lines make of it.
        if profiles.get(name).install is not None:
            rows[name] = _one(box, name, min(count, MOST))
            print(json.dumps({name: rows[name]}), flush=True)
    return {
        "aim": "again: less than 1 s",
        "base_mb": _size(box, "debian:bookworm-slim"),
        **rows,
        "all with shared layers_mb": _shared(box),
    }


def _one(box: Box, name: str, count: int) -> dict[str, Any]:
    project = Project(box, f"{box.home}/Projects/bench-{name}")
    project.policy(POLICY.format(profile=name))
    # Nothing of an earlier build.
    box.run(["docker", "builder", "prune", "-af"], timeout=300)
    began = time.monotonic()
    project.corral("build", timeout=1200)
    seconds = time.monotonic() - began
    argv = json.dumps({"again": ["corral", "build"]})
    script = (HERE / "startwatch.py").read_text()
    told = box.run(
        ["python3", "-", str(count), argv], cwd=project.path, input=script, timeout=60 + 10 * count
    ).stdout
    tag = project.corral("build").stdout.split()[0]
    row: dict[str, Any] = {
        "build_s": round(seconds, 1),
        "size_mb": _size(box, tag),
        "again": summary(json.loads(told)["again"]),
    }
    row["again / build"] = round(row["again"]["p50_ms"] / 1000 / seconds, 4)
    project.end()
    return row


def _size(box: Box, image: str) -> int:
    return round(int(box.run(["docker", "image", "inspect", "-f", "{{.Size}}", image]).stdout) / 10**6)


def _shared(box: Box) -> float:
    """Return what all images take together, as Docker counts them."""
    rows = box.run(["docker", "system", "df", "--format", "{{.Type}}\t{{.Size}}"]).stdout.splitlines()
    return megabytes(next(row.partition("\t")[2] for row in rows if row.startswith("Images")))


def megabytes(text: str) -> float:
    """Read a size as Docker prints it: "1.234GB". Raises ValueError."""
    for unit, factor in (("GB", 1000.0), ("MB", 1.0), ("kB", 0.001)):
        if text.endswith(unit):
            return round(float(text.removesuffix(unit)) * factor, 1)
    raise ValueError(f"no size of Docker's: {text}")
