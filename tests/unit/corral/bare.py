"""A Python of its own that runs this tree's code for a user who has nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def python(home: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code with these arguments; it must end with 0."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env={"HOME": str(home), "XDG_RUNTIME_DIR": str(home), "PATH": "/usr/bin:/bin"},
        check=True,
        timeout=60,
        cwd=Path(__file__).parents[3],
    )
