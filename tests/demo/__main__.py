"""Run the demo; exit 1 when anything is not as it should be. CORRAL_LAB_KEEP=1 leaves the lab up."""

from __future__ import annotations

import sys
import time

from tests.demo.scenario import play, render
from tests.lab import Lab, LabError


def main() -> int:
    """Bring the lab up, play, print the table."""
    started = time.monotonic()

    def say(line: str) -> None:
        print(line, flush=True)

    try:
        say("the lab: a fresh Debian with Docker, and a small internet (minutes when nothing is cached)")
        with Lab.up() as lab:
            say(f"  lab: {time.monotonic() - started:.1f} s")
            rows = play(lab, say)
    except LabError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    print(f"\n{render(rows)}\n")
    good = all(row.good for row in rows)
    print(f"{'everything is as it should be' if good else 'NOT everything is as it should be'}"
          f" ({time.monotonic() - started:.0f} s)")  # fmt: skip
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
