"""Running things at the same time, none of which can hold up the others."""

from __future__ import annotations

import threading
import time

from .outcome import Failed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    T = TypeVar("T")


def together(tasks: Sequence[Callable[[], T]], wait: float, late: T | None = None) -> list[T]:
    """Run all tasks at once and return their results in order.

    A task that is not done after ``wait`` seconds is left behind: its result is ``late``, or Failed is raised
    when there is none. What a task raises is raised here.
    """
    results: dict[int, T] = {}
    raised: dict[int, Exception] = {}

    def work(index: int) -> None:
        try:
            results[index] = tasks[index]()
        except Exception as problem:
            raised[index] = problem

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(len(tasks))]
    for thread in threads:
        thread.start()
    until = time.monotonic() + wait
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    for index in sorted(raised):
        raise raised[index]
    found = []
    for index in range(len(tasks)):
        result = results.get(index, late)
        if result is None:
            raise Failed(f"{len(tasks) - len(results)} of {len(tasks)} tries did not end in time")
        found.append(result)
    return found
