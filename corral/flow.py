"""Where the bytes of a session are between its two ends."""

from __future__ import annotations

import threading
from dataclasses import field

from corral.screen import Screen
from policy.records import dataclass


@dataclass
class Output:
    """Bytes on their way to a descriptor; after its reader went away they are dropped."""

    name: str
    descriptor: int
    pending: bytes = b""
    broken: bool = False
    # Bytes that came so far, and how many of those come a second time and are dropped.
    seen: int = 0
    again: int = 0


@dataclass
class Input:
    """Bytes on their way to the container."""

    pending: bytes = b""
    ended: bool = False
    closed: bool = False
    # The user's side has ended, not only the container's.
    finished: bool = False
    # What a stream did not take any more; the next one may.
    unsent: bytes = b""

    def drop(self) -> None:
        """Take no more: there is nobody to give it to."""
        self.unsent = self.unsent or self.pending
        self.ended, self.pending = True, b""


@dataclass
class Exit:
    """How the container ended; ``wake`` is written to when it has."""

    code: int | None = None
    error: Exception | None = None
    wake: int = -1
    done: threading.Event = field(default_factory=threading.Event)


class Left(Exception):
    """The session goes on without us. ``hung_up``: the terminal is gone, nobody wished it."""

    def __init__(self, *, hung_up: bool) -> None:
        super().__init__("the session was left")
        self.hung_up = hung_up


@dataclass(frozen=True)
class Leaving:
    """What makes us leave a session instead of ending it.

    ``keys``: typed at a terminal. ``signals``: sent to this process; SIGHUP is the terminal's end, too.
    """

    keys: tuple[tuple[bytes, ...], ...] = ()
    signals: frozenset[int] = frozenset()


NEVER = Leaving()


@dataclass(frozen=True)
class Late:
    """That we come to a session that runs already.

    ``ahead``: what was read of its stream together with the engine's answer. ``screen``: what the program has
    made of its terminal; None: it is not shown on one.
    """

    ahead: bytes = b""
    screen: Screen | None = None
