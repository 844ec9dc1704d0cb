"""Proxies that nobody needs any more are removed, and one that ended while it is needed is started again.

``corral run`` does the former when the last session ends. Killed, it cannot. Whoever starts a session holds
``USE`` from before it looks for the proxy until its own end, and ``LOCK`` while it makes one: both are asked
here without waiting, so nothing is taken away from under a session that is about to be.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enforcer.engine import Engine
from enforcer.sessions import Owner, Session, is_declared
from policy import holding, proxying
from policy.declaration import LABEL_PURPOSE, LABEL_SANDBOX, LABEL_SERVICE, LABEL_SESSION
from policy.errors import CorralError
from policy.identity import SANDBOX_ID, SESSION_ID, Sandbox, StatePaths

log = logging.getLogger("corral.enforcer")

LOOK = 2.0  # seconds, like the others
IDLE = 10.0  # without a session that needs it
ENDED_EVERY = 60.0  # between looks for ended ones that nobody needs
TRIES, WITHIN = 3, 600.0  # starts of one that ends again
ENDED = frozenset({"exited", "dead"})


@dataclass(frozen=True)
class Ended:
    """A proxy that does not run."""

    container: str
    sandbox: str


def ended(inspect: Mapping[str, Any], uid: int) -> Ended | None:
    """Return the proxy that an ended container was; None for any other."""
    labels = (inspect.get("Config") or {}).get("Labels") or {}
    sandbox, session = str(labels.get(LABEL_SANDBOX)), str(labels.get(LABEL_SESSION))
    known = (
        is_declared(labels, uid)
        and (inspect.get("State") or {}).get("Status") in ENDED
        and labels.get(LABEL_PURPOSE) == proxying.PURPOSE
        and labels.get(LABEL_SERVICE) == proxying.SERVICE
        and SANDBOX_ID.fullmatch(sandbox)
        and SESSION_ID.fullmatch(session)
        and inspect.get("Name") == f"/{Sandbox(sandbox).container(proxying.SERVICE, session)}"
    )
    return Ended(str(inspect.get("Id")), sandbox) if known else None


@contextmanager
def alone(root: Path) -> Iterator[bool]:
    """Say whether nobody makes, removes or is about to use a sandbox's proxy, and keep it so."""
    with holding.idle(root / proxying.LOCK) as free, holding.idle(root / proxying.USE) as unused:
        yield free and unused


class Proxies:
    """``engine`` returns the one that answers now, ``sessions`` those that live.

    ``looked``: they are known.
    """

    def __init__(
        self,
        engine: Callable[[], Engine | None],
        owner: Owner,
        sessions: Callable[[], Collection[Session]],
        looked: asyncio.Event,
        clock: Callable[[], float],
    ) -> None:
        self._engine, self._uid, self._data = engine, owner.uid, owner.data_home
        self._sessions, self._looked, self._clock = sessions, looked, clock
        self._idle: dict[str, float] = {}
        self._starts: dict[str, list[float]] = {}
        self._searched = clock()
        self.problems: dict[str, str] = {}

    async def forever(self) -> None:
        """Look every other second; it costs nothing while there is no proxy."""
        await self._looked.wait()
        while True:
            await asyncio.sleep(LOOK)
            try:
                await self.look()
            except CorralError as error:
                log.error("looking after proxies failed: %s", error.message)

    async def look(self) -> None:
        """Do once what there is to do.

        Raises:
            EngineError: Docker does not answer.
        """
        engine, now = self._engine(), self._clock()
        if engine is None:
            return
        sessions = list(self._sessions())
        needed = {one.sandbox.id for one in sessions if one.proxied and self._lives(one)}
        running = {one.sandbox.id: one.container for one in sessions if one.service == proxying.SERVICE}
        missing = needed - running.keys()
        self.problems = {box: text for box, text in self.problems.items() if box in missing}
        idle = {box: self._idle.get(box, now) for box in running.keys() - needed}
        self._idle = idle
        for box, since in idle.items():
            if now - since >= IDLE:
                await asyncio.to_thread(self._remove, engine, Ended(running[box], box))
        if missing or now - self._searched >= ENDED_EVERY:
            self._searched = now
            for found in await asyncio.to_thread(self._ended, engine):
                if found.sandbox in missing:
                    await self._again(engine, found, now)
                elif found.sandbox not in needed:
                    await asyncio.to_thread(self._remove, engine, found)

    def _lives(self, session: Session) -> bool:
        if session.running:
            return True
        # One that was made and that nobody will start any more.
        with holding.unheld(StatePaths(self._data / session.sandbox.id).session(session.session)) as left:
            return not left

    def _ended(self, engine: Engine) -> list[Ended]:
        inspects = [engine.container(ident) for ident in engine.ended(self._uid)]
        rows = [ended(inspect, self._uid) for inspect in inspects if inspect is not None]
        return [row for row in rows if row is not None]

    async def _again(self, engine: Engine, found: Ended, now: float) -> None:
        recent = {ident: [at for at in times if now - at < WITHIN] for ident, times in self._starts.items()}
        self._starts = {ident: times for ident, times in recent.items() if times}
        tried = self._starts.get(found.container, [])
        if len(tried) >= TRIES:
            self.problems[found.sandbox] = (
                f"the proxy of {found.sandbox} ended {TRIES} times in ten minutes: its sessions reach no name"
                f" through it; what it said: docker logs {found.container[:12]}"
            )
            return
        if await asyncio.to_thread(self._start, engine, found):
            self._starts[found.container] = [*tried, now]

    def _start(self, engine: Engine, found: Ended) -> bool:
        # Who makes another one has the lock; who only uses it waits for this one.
        with holding.idle(self._data / found.sandbox / proxying.LOCK) as free:
            if free:
                log.warning("the proxy of %s had ended and is needed: started again", found.sandbox)
                engine.start(found.container)
        return free

    def _remove(self, engine: Engine, found: Ended) -> None:
        with alone(StatePaths(self._data / found.sandbox).root) as free:
            if free:
                engine.stop(found.container)
                engine.remove(found.container)
                log.info("the proxy of %s had no session left: removed", found.sandbox)
