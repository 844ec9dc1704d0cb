"""An event loop whose time is a number: nothing waits, and nothing runs in another thread."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from asyncio import events
from collections.abc import Callable
from typing import Any


class _Outside:
    """Something that happens in another process, so it still does when this one is killed."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act

    def __call__(self) -> None:
        self.act()


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs what is due and moves its clock to the next timer; work for threads runs on the loop itself.

    ``latency`` seconds lie between the call of such work and its result; the work is done half way, so other
    things happen between a question and its answer.
    """

    def __init__(self, now: float, latency: float = 0.0) -> None:
        super().__init__()
        self.now = now
        self.latency = latency
        self._selector = self
        self._graves: list[Any] = []
        self.set_exception_handler(lambda _loop, _context: None)

    def time(self) -> float:
        return self.now

    def run_for(self, seconds: float) -> None:
        """Run everything that is due within the next ``seconds``, each at its own time."""
        self._run_until(self.now + seconds)

    def abandon(self) -> None:
        """Forget everything that was under way, as the kernel does with a killed process.

        It is kept until ``bury``: a coroutine that is collected runs its last lines, a killed process none.
        """
        tasks = [task for task in asyncio.all_tasks(self) if task not in self._graves]
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        due = [h for h in self._ready if isinstance(h._callback, _Outside)]
        later = [h for h in self._scheduled if isinstance(h._callback, _Outside)]
        self._graves += [*tasks, *(h for h in (*self._ready, *self._scheduled) if h not in (*due, *later))]
        self._ready.clear()
        self._ready.extend(due)
        self._scheduled = later
        heapq.heapify(self._scheduled)

    def bury(self) -> None:
        """Close the loop with all that was abandoned on it; nothing runs any more."""
        self.abandon()
        self.call_soon = lambda *_words, **_options: None  # type: ignore[method-assign,assignment,return-value]
        # What the last lines of a coroutine want to wait for does not come.
        events._set_running_loop(self)
        for grave in self._graves:
            words = [grave.get_coro()] if isinstance(grave, asyncio.Task) else grave._args or ()
            for coroutine in filter(asyncio.iscoroutine, words):
                for _ in range(3):
                    with contextlib.suppress(Exception):
                        coroutine.close()
        events._set_running_loop(None)
        self._graves.clear()
        self.close()

    def outside(self, delay: float, act: Callable[[], None]) -> asyncio.TimerHandle:
        """Have another process do something after ``delay`` seconds."""
        return self.call_later(delay, _Outside(act))

    def _run_until(self, end: float) -> None:
        events._set_running_loop(self)
        try:
            while True:
                if self._ready:
                    self._run_once()
                elif self._scheduled and self._scheduled[0]._when <= end:
                    self.now = max(self.now, self._scheduled[0]._when)
                    self._run_once()
                else:
                    break
        finally:
            events._set_running_loop(None)
        self.now = max(self.now, end)

    # -- what BaseEventLoop asks of a selector loop

    def select(self, _timeout: float | None) -> list[Any]:
        return []

    def _process_events(self, _events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def run_in_executor(self, _executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()

        def work() -> None:
            try:
                result, error = func(*args), None
            except Exception as caught:
                result, error = None, caught
            self.call_later(self.latency / 2, answer, result, error)

        def answer(result: Any, error: Exception | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_later(self.latency / 2, work)
        return future
