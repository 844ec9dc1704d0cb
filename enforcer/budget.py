"""How much one source may ask of this service: a token bucket, and what is under way."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
Charge = Callable[[float], object]  # takes seconds of this service

# For whom the current task works; the tasks that it makes work for the same one.
_payer: ContextVar[Charge | None] = ContextVar("payer", default=None)


class BusyError(Exception):
    """A source has as much under way as it may have."""


@dataclass
class Budget:
    """What one source may ask still: ``rate`` a second, ``burst`` at once, ``most`` under way.

    ``now`` is the caller's clock in seconds; one that goes back gives nothing.
    """

    rate: float
    burst: float
    most: int
    pending: int = 0
    _tokens: float = field(init=False)
    _at: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._tokens = self.burst

    def take(self, now: float) -> bool:
        """Take one, if there is one now."""
        return self.reserve(now, 0.0) is not None

    def reserve(self, now: float, patience: float) -> float | None:
        """Take one, out of the future if need be; return the seconds to wait for it.

        None, and nothing is taken, when that is more than ``patience``.
        """
        if self._at is not None:
            self._tokens = min(self.burst, self._tokens + self.rate * max(0.0, now - self._at))
        self._at = now if self._at is None else max(now, self._at)
        wait = max(0.0, 1.0 - self._tokens) / self.rate
        if wait > patience:
            return None
        self._tokens -= 1.0
        return wait

    def charge(self, amount: float) -> None:
        """Take what was used already, however much is left: what is over is waited for."""
        self._tokens -= max(0.0, amount)

    @contextlib.contextmanager
    def slot(self) -> Iterator[None]:
        """Be one of those under way.

        Raises:
            BusyError: there are as many as may be.
        """
        if self.pending >= self.most:
            raise BusyError
        self.pending += 1
        try:
            yield
        finally:
            self.pending -= 1


def pays(charge: Charge) -> None:
    """Have what the current task and those it makes later spend in ``Metered`` charged like this."""
    _payer.set(charge)


class Metered(Awaitable[T]):
    """Awaits the same, and charges the time that it keeps the loop from others; waiting costs nothing."""

    def __init__(self, of: Awaitable[T], clock: Callable[[], float]) -> None:
        self._of, self._clock = of, clock

    def __await__(self) -> Generator[Any, Any, T]:
        steps, charge = self._of.__await__(), _payer.get()
        go: Callable[[], Any] = partial(next, steps)
        while True:
            began = self._clock()
            try:
                waits = go()
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                if charge is not None:
                    charge(self._clock() - began)
            try:
                yield waits
                go = partial(next, steps)
            except BaseException as error:
                go = partial(steps.throw, error)
