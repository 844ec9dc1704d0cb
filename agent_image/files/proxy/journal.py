"""What the proxy tells: a line of JSON for an event, and counters. Nothing of what passes, and no header.

Lines are limited, because a sandbox decides how many there are; what is not written is counted.
"""

from __future__ import annotations

import json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

BURST = 500
PER_SECOND = 50.0
# Below PIPE_BUF: a pipe takes it whole or not at all.
LONGEST = 1024


class Journal:
    """``write`` takes a line of ASCII with its end; ``clock`` only grows, ``wall`` is of 1970; seconds."""

    def __init__(
        self, write: Callable[[bytes], None], clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        self.counts: dict[str, int] = {}
        self._write = write
        self._clock = clock
        self._wall = wall
        self._left = float(BURST)
        self._seen = clock()
        self._told: dict[str, int] = {}

    def count(self, what: str, by: int = 1) -> None:
        """Add to a counter."""
        self.counts[what] = self.counts.get(what, 0) + by

    def event(self, event: str, **fields: object) -> None:
        """Count an event and write its line, unless there were too many."""
        self.count(event)
        now = self._clock()
        self._left = min(float(BURST), self._left + (now - self._seen) * PER_SECOND)
        self._seen = now
        if self._left < 1:
            self.count("unwritten")
            return
        self._left -= 1
        self.line(event, **fields)

    def line(self, event: str, **fields: object) -> None:
        """Write a line, whatever the limits; a line that nobody takes is counted."""
        body = {"time": round(self._wall(), 3), "event": event, **fields}
        text = json.dumps(body, separators=(",", ":"))
        try:
            if len(text) >= LONGEST:
                raise ValueError("too long a line")
            self._write(text.encode("ascii") + b"\n")
        except (OSError, ValueError):
            self.count("unwritten")

    def counters(self, active: int) -> None:
        """Write all counters and how many clients are served now, if any of it changed since."""
        now = {**self.counts, "active": active}
        if now != self._told:
            self._told = now
            self.line("counters", counts=now)
