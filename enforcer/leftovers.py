"""Containers that do not run and that no command line looks after any more: they are removed.

``corral run`` removes its own container. Killed, it cannot, and what it leaves is found here by its labels
and its name. That goes for one that was made and never started, too: as long as it is there, others of its
sandbox may ask for no more than it might.
Kept are those that their user wants to look at (``keep: true``), those that somebody left
running and may want to read, and agents that are always on: `corral logs` reads them, `corral up`, `down` and
`prune` take them away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from enforcer.engine import Engine
from enforcer.sessions import Owner, is_declared
from policy import holding
from policy.declaration import LABEL_PURPOSE, LABEL_SANDBOX, LABEL_SERVICE, LABEL_SESSION
from policy.errors import CorralError
from policy.identity import SANDBOX_ID, SESSION_ID, Sandbox, StatePaths

log = logging.getLogger("corral.enforcer")

ENDED, CREATED = frozenset({"exited", "dead"}), "created"
PURPOSES = frozenset({"run", "shell", "verify"})
SERVICE = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
# Seconds in which the command line of a session that has ended usually removes it itself.
PAUSE = 2.0


def directory_of(inspect: Mapping[str, Any], uid: int, data: Path) -> Path | None:
    """Return the directory of the session that a container was; None when it is none that may be removed.

    Args:
        inspect: what Docker says of it.
        uid: whose sessions are meant.
        data: where that user's sandboxes have their files.
    """
    labels = (inspect.get("Config") or {}).get("Labels") or {}
    sandbox, session = str(labels.get(LABEL_SANDBOX)), str(labels.get(LABEL_SESSION))
    service = str(labels.get(LABEL_SERVICE))
    state = (inspect.get("State") or {}).get("Status")
    if not (
        is_declared(labels, uid)
        and (state in ENDED or state == CREATED)
        and labels.get(LABEL_PURPOSE) in PURPOSES
        and SANDBOX_ID.fullmatch(sandbox)
        and SESSION_ID.fullmatch(session)
        and SERVICE.fullmatch(service)
        and inspect.get("Name") == f"/{Sandbox(sandbox).container(service, session)}"
    ):
        return None
    found = StatePaths(data / sandbox).session(session)
    if state == CREATED and not found.is_dir():
        # Its command line would have made it, and held it, before the container.
        return None
    return None if any((found / mark).exists() for mark in (holding.KEPT, holding.LEFT)) else found


class Leftovers:
    """``engine`` returns the one that answers now; ``every`` is in seconds, for looks without an event."""

    def __init__(
        self, engine: Callable[[], Engine | None], owner: Owner, every: float, looked: asyncio.Event
    ) -> None:
        self._engine, self._uid, self._data = engine, owner.uid, owner.data_home
        self._every, self._looked = every, looked
        self.ended = asyncio.Event()

    async def forever(self) -> None:
        """Look when a container has ended, and now and then."""
        await self._looked.wait()
        while True:
            self.ended.clear()
            await self.sweep()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), self._every)
                await asyncio.sleep(PAUSE)

    async def sweep(self) -> None:
        """Remove what is left."""
        engine = self._engine()
        if engine is None:
            return
        try:
            for ident in await asyncio.to_thread(partial(engine.ended, self._uid, or_created=True)):
                await asyncio.to_thread(self._remove, engine, ident)
        except CorralError as error:
            log.error("looking for what was left behind failed: %s", error.message)

    def _remove(self, engine: Engine, ident: str) -> None:
        inspect = engine.container(ident)
        directory = None if inspect is None else directory_of(inspect, self._uid, self._data)
        if inspect is None or directory is None:
            return
        with holding.unheld(directory) as free:
            if free:
                engine.remove(ident)
                how = "was never started" if inspect["State"]["Status"] == CREATED else "had ended"
                log.info("%s %s and its corral was gone: removed", str(inspect["Name"]).lstrip("/"), how)
