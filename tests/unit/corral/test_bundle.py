"""What root runs is one text; everything it imports has to be in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from corral.installer import bundle

ROOT = Path(bundle.__file__).parent
MAINS = sorted(
    f"corral.installer.{path.stem}" for path in ROOT.glob("*.py") if "\ndef main(" in path.read_text()
)


@pytest.mark.parametrize("module", MAINS)
def test_a_program_for_root_loads_with_nothing_of_corral_around_it(module: str, tmp_path: Path) -> None:
    loading, _, _ = bundle.program(module, {}).rpartition("\nsys.exit(")
    done = subprocess.run(
        [sys.executable, "-I", "-"], input=loading, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_there_are_programs_for_root() -> None:
    assert MAINS
