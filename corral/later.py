"""Work that a thread does while this one goes on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


def begin(work: Callable[[], object]) -> threading.Thread:
    """Start a thread that ends with the program; signals are the main one's to handle."""
    thread = threading.Thread(target=work, daemon=True)
    # It inherits the mask.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return thread


class Later(Generic[T]):
    """The result of something that has been begun."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._thread = begin(self._do)

    def _do(self) -> None:
        try:
            self._found.append(self._work())
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        """Wait for it, and return or raise what it returned or raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found[0]
