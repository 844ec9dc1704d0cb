"""A limit in time for what a task awaits inside a ``with``. asyncio has one since Python 3.11 only."""

from __future__ import annotations

import asyncio

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Expired(Exception):
    """It took too long."""


class within:  # noqa: N801 - reads as a word of the sentence
    """Cancel what the current task awaits after so many seconds of the loop's clock; raises Expired then.

    Not one in another: of two that are over at the same moment, the outer one would be lost.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._expired = False
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> within:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("outside of a task")
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._expire, task)
        return self

    def _expire(self, task: asyncio.Task[Any]) -> None:
        self._expired = True
        task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._expired and kind is asyncio.CancelledError:
            raise Expired(f"{self._seconds:g} s") from error
