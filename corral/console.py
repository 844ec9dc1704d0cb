"""What the user sees beside a command's result: steps with times, warnings, colour. All of it on stderr."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TextIO

from corral.going import NARROW, Going, fitted
from corral.plain import terminal_safe

RED, YELLOW, BOLD, RESET = "\033[31m", "\033[33m", "\033[1m", "\033[0m"


def wants_colour(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Say whether to colour: a terminal that is not dumb, and NO_COLOR is not set to anything."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM", "") not in {"", "dumb"}


def paint(text: str, colour: str, enabled: bool) -> str:
    """Return ``text`` in a colour when ``enabled``."""
    return f"{colour}{text}{RESET}" if enabled else text


class Step:
    """A step that goes on.

    ``shown``: whether it is of interest without -v. ``note``: a word about its end.
    """

    def __init__(self, shown: bool, done: Callable[[], None]) -> None:
        self.shown, self.note = shown, ""
        self._done = done

    def parts(self) -> None:
        """From now on its parts are shown while they go on, and it is of interest in any case."""
        self.shown = True
        self._done()


class Console:
    """Progress and warnings of one command.

    Args:
        stream: stderr.
        colour: whether escape sequences may be written.
        progress: whether steps are shown at all.
        verbose: whether details (the lines of a build) are shown too.
        minor: whether minor steps are shown where progress is.
        live: whether the last line can be written anew.
        room: tells how many cells a line about progress may have; 0: as many as it likes.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        colour: bool = False,
        progress: bool = False,
        verbose: bool = False,
        minor: bool = False,
        live: bool = False,
        room: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # With -v there are more lines than anybody could follow a last one below.
        self._going = Going(stream, live=live and progress and not verbose, room=room, clock=clock)
        self._clock = clock
        self._room = room
        self.colour = colour
        self.progress = progress
        self.verbose = verbose
        self.minor = minor

    @contextlib.contextmanager
    def step(self, what: str, *, minor: bool = False) -> Iterator[Step]:
        """Show ``what`` while it goes on, and with the seconds it took when it is done.

        A minor step is for -v only, and for commands that show them all.
        """
        shown, began = self.minor or not minor, self._clock()
        key = self.begin(what, began) if shown else None
        step = Step(shown, lambda: self.end(key))
        try:
            yield step
        finally:
            self.end(key)
        if step.shown or self.verbose:
            self.took(what, self._clock() - began, step.note)

    def begin(self, what: str, began: float) -> int | None:
        """Show at a terminal that something goes on since ``began``, until ``end`` gets the result."""
        return self._going.begin(what, began) if self.progress else None

    def end(self, key: int | None) -> None:
        """Show it no more."""
        if key is not None:
            self._going.end(key)

    def took(self, what: str, seconds: float, note: str = "", *, within: bool = False) -> None:
        """Show a line of progress: what is done, and how long it took; ``within``: a part of something."""
        if self.progress or self.verbose:
            # Rather no word about it than half of what it is about.
            note = note if self.fits(what, seconds, note) else ""
            tail = f" ({seconds:.1f} s{'; ' if note else ''}{note})"
            indent = "  " if within else ""
            self._line(fitted(f"corral: {indent}{what}", tail, self._room() if self.progress else 0))

    def fits(self, what: str, seconds: float, note: str) -> bool:
        """Say whether ``took`` would have room for all of this."""
        room = self._room() if self.progress else 0
        return not room or len(f"corral: {what} ({seconds:.1f} s; {note})") <= max(room, NARROW)

    def say(self, text: str) -> None:
        """Show a line of progress."""
        if self.progress or self.verbose:
            self._line(f"corral: {text}")

    def tell(self, text: str) -> None:
        """Show a line that explains why nothing seems to happen, always."""
        self._line(f"corral: {text}")

    def show(self, text: str) -> None:
        """Show a line without anything before it, always."""
        self._line(text)

    def detail(self, text: str) -> None:
        """Show a line with -v only."""
        if self.verbose:
            self._line(f"  {text}")

    def warn(self, text: str) -> None:
        """Show a warning, always."""
        self._line(f"corral: warning: {text}", YELLOW)

    def warn_block(self, lines: Sequence[str]) -> None:
        """Show a warning of several lines, always; the first says what the others are about."""
        first, *rest = lines
        self.warn(first)
        for line in rest:
            self._line(line, YELLOW)

    def _line(self, text: str, colour: str = "") -> None:
        # Much of it comes from where an agent writes: paths, Docker's explanations, what programs said.
        text = terminal_safe(text)
        if colour:
            text = paint(text, colour, self.colour)
        self._going.line(text)
