"""What the last look at the rules found, for as long as nothing can have changed since.

A look runs five programs. What they read moves only together with things that cost microseconds to ask: the
kernel counts every change of nftables' rules, and the rest is read anew. As long as all of these are what
they were before *and* after the look, another one would find the same. When one of them cannot be told,
everything is read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Recall(Generic[T]):
    """One look, kept together with the mark it was taken at.

    ``mark`` returns what tells whether something changed; None: nobody knows.
    """

    def __init__(self, mark: Callable[[], Hashable | None]) -> None:
        self._mark = mark
        self._kept: tuple[Hashable, T] | None = None

    def distrust(self) -> None:
        """Have the next look taken, whatever the mark says."""
        self._kept = None

    def look(self, read: Callable[[], T]) -> T:
        """Return what ``read`` returns, or returned when the mark was the same."""
        before = self._mark()
        if before is not None and self._kept is not None and self._kept[0] == before:
            return self._kept[1]
        self._kept = None
        found = read()
        # What changed while it was being read is in it or is not.
        if before is not None and self._mark() == before:
            self._kept = (before, found)
        return found
