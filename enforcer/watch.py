"""Docker's events, without trusting that they are complete.

Subscribe, list, process: the stream is open before ``connected`` is called, so whatever happens after the
list was taken arrives as an event. Docker's ring holds 256 events and the SDK ends quietly when the daemon
dies: each end is followed by a new subscription and a full pass.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from enforcer.engine import Engine
from policy.errors import CorralError

log = logging.getLogger("corral.enforcer")

RETRY = 0.5


class Watcher:
    """A thread that calls ``connected(engine)``, then ``event(event)`` for each, then ``lost(reason)``."""

    def __init__(
        self,
        make: Callable[[], Engine],
        connected: Callable[[Engine], None],
        event: Callable[[Mapping[str, Any]], None],
        lost: Callable[[str], None],
    ) -> None:
        self._make = make
        self._connected = connected
        self._event = event
        self._lost = lost
        self._stop = threading.Event()
        self._engine: Engine | None = None
        self._thread = threading.Thread(target=self._run, name="docker-events", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; does not wait for it."""
        self._stop.set()
        if self._engine is not None:
            self._engine.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            reason = "the event stream ended"
            try:
                self._engine = self._make()
                events = self._engine.subscribe()
                self._connected(self._engine)
                for event in events:
                    self._event(event)
            except CorralError as error:
                reason = error.message
            if not self._stop.is_set():
                self._lost(reason)
            self._stop.wait(RETRY)
