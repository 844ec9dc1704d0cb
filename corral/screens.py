"""What was made of a session's terminal, kept beside its files: Docker's log has a line when it has ended.

A program that fills the screen may end none for long. Who watches a session notes what it sees, and who
comes later goes on from there with what the log has had since.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

from corral.screen import Screen
from policy import savedfile
from policy.identity import StatePaths

FILE = "screen.json"
# Seconds between two notes; the last one is made when somebody leaves.
PAUSE = 0.2


class Keeper:
    """Follows a screen and notes what lasts. What the disk refuses is not noted, and stops nobody.

    Args:
        directory: of the session; no container sees it.
        screen: what is followed.
        clock: wall time, as Docker's stamps are.
    """

    def __init__(self, directory: Path, screen: Screen, clock: Callable[[], float] = time.time) -> None:
        self._file, self._screen, self._clock = directory / FILE, screen, clock
        self._last = 0.0
        screen.changed = self._changed

    def _changed(self) -> None:
        if not 0 <= self._clock() - self._last < PAUSE:
            self.save()

    def save(self) -> None:
        """Note what it is now."""
        self._last = self._clock()
        partial = self._file.with_suffix(".new")
        with contextlib.suppress(OSError):
            partial.write_text(json.dumps({"time": self._last, **self._screen.body()}), encoding="ascii")
            partial.replace(self._file)


def noted(paths: StatePaths, session: str) -> tuple[Screen, float] | None:
    """Return the last that was noted of a session, and when (wall time); None when nothing was."""
    try:
        body = savedfile.value(paths.session(session) / FILE)
        noted_at = float(body["time"])
        # Docker is asked for what came later, and takes no other time.
        if not 1 <= noted_at < math.inf:
            return None
        return Screen.of(body), noted_at
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
