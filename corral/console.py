"""What the user sees beside a command's result: steps with times, warnings, colour. All of it on stderr."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TextIO

from corral.plain import terminal_safe

RED, YELLOW, BOLD, RESET = "\033[31m", "\033[33m", "\033[1m", "\033[0m"


def wants_colour(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Say whether to colour: a terminal that is not dumb, and NO_COLOR is not set to anything."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM", "") not in {"", "dumb"}


def paint(text: str, colour: str, enabled: bool) -> str:
    """Return ``text`` in a colour when ``enabled``."""
    return f"{colour}{text}{RESET}" if enabled else text


class Console:
    """Progress and warnings of one command.

    Args:
        stream: stderr.
        colour: whether escape sequences may be written.
        progress: whether steps are shown at all.
        verbose: whether details (the lines of a build) are shown too.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        colour: bool = False,
        progress: bool = False,
        verbose: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._clock = clock
        self.colour = colour
        self.progress = progress
        self.verbose = verbose

    @contextlib.contextmanager
    def step(self, what: str, *, minor: bool = False) -> Iterator[None]:
        """Show ``what`` with the seconds it took, when it is done. A minor step is for -v only."""
        began = self._clock()
        yield
        if self.verbose or (self.progress and not minor):
            self._line(f"corral: {what} ({self._clock() - began:.1f} s)")

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
        # A reader that went away must not end a session.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text + "\n")
            self._stream.flush()
