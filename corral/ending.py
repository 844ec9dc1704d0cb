"""When to send which signal to a container that has to end: asked first, killed after a time of grace."""

from __future__ import annotations

from collections.abc import Callable

Steps = tuple[tuple[float, str], ...]
"""(seconds from now, name of a signal)."""

GRACE = 10.0
# An agent that saves its session when the terminal goes away has this long before it is told to end.
HANG_UP: Steps = ((2.0, "SIGTERM"), (2.0 + GRACE, "SIGKILL"))
ASKED: Steps = ((GRACE, "SIGKILL"),)
# Nobody has seen the program work yet, so there is nothing of it to save.
INTERRUPTED_START: Steps = ((3.0, "SIGKILL"),)


class Ending:
    """Signals that are still to be sent.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._planned: list[tuple[float, str]] = []

    def plan(self, steps: Steps) -> None:
        """Add steps. A signal that is planned already is sent at the earlier of the two times, once."""
        now = self._clock()
        for seconds, name in steps:
            times = [time for time, planned in self._planned if planned == name]
            self._planned = [entry for entry in self._planned if entry[1] != name]
            self._planned.append((min([now + seconds, *times]), name))
        self._planned.sort()

    def due(self) -> list[str]:
        """Return the signals whose time has come; they are not returned again."""
        now = self._clock()
        found = [name for time, name in self._planned if time <= now]
        self._planned = [entry for entry in self._planned if entry[0] > now]
        return found

    def wait(self) -> float | None:
        """Return the seconds until the next one, None when there is none."""
        return max(0.0, self._planned[0][0] - self._clock()) if self._planned else None
