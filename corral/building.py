"""A build as its user sees it: its steps as they happen, and in the end what was cached."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from agent_image.steps import BEGAN, CACHED, FAILED, Event, Steps
from corral.console import Console, Step

# Seconds: what would be shown as 0.0 s is not shown.
NOTHING = 0.05


def summary(cached: Sequence[str], steps: int, fits: Callable[[str], bool]) -> str:
    """Return what the line about the whole build says of its cache.

    Args:
        cached: titles of the steps that were.
        steps: how many there were.
        fits: whether there is room for all of it.
    """
    if not cached:
        return "nothing cached"
    if len(cached) == steps:
        return f"all {steps} steps cached"
    named = f"cached: {', '.join(dict.fromkeys(cached))}"
    return named if fits(named) else f"{len(cached)} of {steps} steps cached"


class Building:
    """A context manager around one build that shows what ``line`` is told.

    Args:
        console: where.
        step: the build as a whole.
        clock: seconds, monotonic.
    """

    def __init__(self, console: Console, step: Step, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._step, self._clock = console, step, clock
        self._steps = Steps(clock)
        self._began = clock()
        self._going: dict[int, int | None] = {}
        self._ended: dict[int, Event] = {}
        step.parts()

    def __enter__(self) -> Building:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Interrupted, no step has failed.
        if error is None or isinstance(error, Exception):
            self._show(self._steps.finish(failed=error is not None))
        for key in self._going.values():
            self._console.end(key)
        steps = [event for event in self._ended.values() if not event.step.minor]
        cached = [event.step.title for event in steps if event.what == CACHED]
        took = self._clock() - self._began
        self._step.note = summary(cached, len(steps), lambda note: self._console.fits("image", took, note))

    def line(self, line: str) -> None:
        """Take a line that the builder printed."""
        self._console.detail(line)
        self._show(self._steps.line(line))

    def _show(self, events: Sequence[Event]) -> None:
        for event in events:
            self._one(event)

    def _one(self, event: Event) -> None:
        console, step = self._console, event.step
        if event.what == BEGAN:
            if not step.minor:
                self._going[event.key] = console.begin(step.title, self._clock())
            return
        console.end(self._going.pop(event.key, None))
        # What went on after its end is one step all the same.
        self._ended[event.key] = event
        if event.what == FAILED:
            console.took(f"{step.title} failed", event.seconds, within=True)
        elif event.what != CACHED and self._interesting(event):
            console.took(step.title, event.seconds, within=True)
        elif console.verbose and event.what == CACHED:
            console.say(f"  {step.title} (cached)")

    def _interesting(self, event: Event) -> bool:
        return self._console.verbose or (not event.step.minor and event.seconds >= NOTHING)
