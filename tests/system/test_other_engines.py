"""What a fence is for, on engines other than the one that the rest of the tests has: the few tests marked smoke."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab import engines

ROOT = Path(__file__).parents[2]
OTHERS = ("bookworm", "sid", "rootless")
# Each of them boots a box and builds an image of its own.
LIMIT = 1200

pytestmark = pytest.mark.engine("trixie", reason="it brings up the labs of the other engines")


@pytest.mark.representative
@pytest.mark.parametrize("engine", OTHERS)
def test_the_fence_stands_on_another_engine(engine: str) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ |= {
        engines.VARIABLE: engine,
        "CORRAL_LAB_NAME": f"other-{engine}",
        "CORRAL_STARTS": os.environ.get("CORRAL_STARTS") or "10",
    }
    environ.pop("CORRAL_LAB_KEEP", None)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "smoke", "-p", "no:cacheprovider", "tests/system"]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    print(done.stdout[-20_000:], done.stderr[-5_000:])
    assert done.returncode == 0
    counts = done.stdout.strip().splitlines()[-1]
    assert " passed" in counts and "failed" not in counts, counts
