"""What goes on at this moment, shown at a terminal while it does.

A terminal whose last line can be written anew has it there, with seconds that go on. Any other is told once
of what takes longer than a second.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from corral.later import begin
from corral.plain import terminal_safe, width

# Cells: no text is cut to less, and a terminal that has not so many breaks it.
NARROW = 40
EVERY = 1.0
ERASE = "\r\x1b[K"
_PREFIX = "corral: "


def rewrites(environ: Mapping[str, str]) -> bool:
    """Say whether the last line of a terminal can be written anew."""
    return environ.get("TERM", "") not in {"", "dumb"}


def columns(environ: Mapping[str, str], actual: int) -> int:
    """Return how many cells a line may have; 0: as many as it likes.

    Args:
        environ: COLUMNS in it is obeyed, where that is less than there is.
        actual: what the terminal says, 0 when it does not.
    """
    wanted = environ.get("COLUMNS", "")
    asked = int(wanted) if wanted.isascii() and wanted.isdigit() else 0
    return min(filter(None, (asked, actual)), default=0)


def fitted(text: str, tail: str, room: int) -> str:
    """Return a line of ``text`` and ``tail``, the former cut to what there is room for; 0: all of it."""
    line = text + tail
    limit = max(room, NARROW)
    if not room or width(line) <= limit:
        return line
    left = limit - width(tail) - 3
    kept = "".join(
        char for char, end in zip(text, itertools.accumulate(map(width, text)), strict=True) if end <= left
    )
    return f"{kept.rstrip()}...{tail}"


def shown(going: Sequence[tuple[str, float]], room: int) -> str:
    """Return the line about what goes on: (what, seconds) each."""
    *others, (what, seconds) = going
    before = ", ".join(f"{other} {took:.0f} s" for other, took in others)
    return fitted(f"{_PREFIX}{before + ', ' if before else ''}{what}", f" {seconds:.0f} s", room)


class _One:
    def __init__(self, what: str, began: float) -> None:
        self.what, self.began = what, began
        self.told = False


class Going:
    """What goes on, in one stream, whose other lines are written through it.

    Args:
        stream: stderr.
        live: whether its last line can be written anew.
        room: tells how many cells a line may have; 0: as many as it likes.
        clock: seconds, monotonic.
    """

    def __init__(
        self, stream: TextIO, *, live: bool, room: Callable[[], int], clock: Callable[[], float]
    ) -> None:
        self._stream, self._live, self._room, self._clock = stream, live, room, clock
        self._lock = threading.RLock()
        self._going: dict[int, _One] = {}
        self._keys = itertools.count()
        self._drawn = False
        self._stopped = threading.Event()

    def begin(self, what: str, began: float) -> int:
        """Show it until ``end`` is called with what this returns; ``began``: when, by the clock."""
        with self._lock:
            key = next(self._keys)
            first = not self._going
            self._going[key] = _One(terminal_safe(what), began)
            self._draw()
            if first:
                stopped = self._stopped = threading.Event()
                begin(lambda: self._tick(stopped))
            return key

    def end(self, key: int) -> None:
        """Show it no more."""
        with self._lock:
            self._going.pop(key, None)
            if not self._going:
                self._stopped.set()
            self._draw()

    def line(self, text: str) -> None:
        """Write a whole line, above what goes on."""
        with self._lock:
            self._erase()
            self._write(text + "\n")
            self._draw()

    def tick(self) -> None:
        """Show the seconds of now; where that cannot be, what has not been shown yet."""
        with self._lock:
            if self._live_now():
                self._draw()
                return
            for one in self._going.values():
                if not one.told and self._clock() - one.began >= EVERY:
                    one.told = True
                    self._write(fitted(f"{_PREFIX}  {one.what}", " ...", self._room()) + "\n")

    def _tick(self, stopped: threading.Event) -> None:
        while not stopped.wait(EVERY):
            self.tick()

    def _live_now(self) -> bool:
        # A line that is broken cannot be written anew.
        return self._live and self._room() > NARROW

    def _draw(self) -> None:
        self._erase()
        if self._going and self._live_now():
            now = self._clock()
            rows = [(one.what, now - one.began) for one in self._going.values()]
            # In the last cell some terminals break the line.
            self._drawn = True
            self._write(shown(rows, self._room() - 1))

    def _erase(self) -> None:
        if self._drawn:
            self._drawn = False
            self._write(ERASE)

    def _write(self, text: str) -> None:
        # A reader that went away must not end a session.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()
