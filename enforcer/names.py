"""The pinning engine at work: its state, the resolver, the clock that drives it, the file it survives in."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from enforcer import pins
from enforcer.config import Config
from enforcer.journal import FIELDS
from enforcer.resolver import Resolver, Server, system_servers
from enforcer.vetting import Vetting
from policy import savedfile

log = logging.getLogger("corral.enforcer")

# Seconds without a look at the clock (the machine slept, or this process was stopped) after which every name
# is asked for before anything expires.
RESUMED = 30.0
SAVE_EVERY = 60.0


class Names:
    """Owns ``state``. Runs on one event loop.

    ``spawn`` starts a coroutine there; ``moved`` is called when allowed or published may have moved,
    ``heard`` after each result of a query. ``clock`` is monotonic and counts suspend, ``wall`` is for
    the saved file.
    """

    def __init__(
        self,
        config: Config,
        store: Path,
        resolv_conf: Path,
        clock: Callable[[], float],
        wall: Callable[[], float],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        moved: Callable[[], None],
        heard: Callable[[], Coroutine[Any, Any, None]],
        make_resolver: Callable[[tuple[Server, ...], Callable[[], float]], Resolver] = Resolver,
    ) -> None:
        self._config = config
        self._store = store
        self._resolv_conf = resolv_conf
        self._resolv_seen: tuple[int, ...] | None = None
        self._resolv_error = ""
        self._clock = clock
        self._wall = wall
        self._spawn = spawn
        self._moved = moved
        self._heard = heard
        self._looked = clock()
        self._saved_generation = -1
        self._resolver = make_resolver(tuple(Server.parse(text) for text in config.dns.servers), clock)
        self.refreshes: Counter[str] = Counter()
        self.state = self._restored()

    def step(self, event: pins.Event) -> None:
        """Apply one event and start what follows from it."""
        now = self._clock()
        gap, self._looked = now - self._looked, now
        if gap > RESUMED:
            log.info("%.0f s went by unseen: asking for all names again", gap)
            self.step(pins.Refresh(discard=True))
        before = self.state.generation
        self.state, actions = pins.step(self.state, event, self._clock(), random.random)
        for action in actions:
            if isinstance(action, pins.Query):
                self._spawn(self._resolve(action))
            else:
                level = logging.WARNING if action.alarm else logging.INFO
                fields = {
                    "CORRAL_EVENT": action.kind,
                    "CORRAL_NAME": action.name,
                    "CORRAL_DETAIL": action.detail,
                    "CORRAL_ALARM": str(int(action.alarm)),
                }
                text = "name %s: %s: %s"
                log.log(level, text, action.name, action.kind, action.detail, extra={FIELDS: fields})
        if any(isinstance(action, pins.Notice) for action in actions):
            # A name that is no longer renewed ends by the times of its last answer, after a restart too.
            self.save(always=True)
        if self.state.generation != before:
            self._moved()

    async def tick_forever(self) -> None:
        """Let time pass for the engine."""
        saved = self._clock()
        while True:
            due = pins.next_due(self.state)
            await asyncio.sleep(1.0 if due is None else min(max(due - self._clock(), 0.05), 1.0))
            self._watch_resolv_conf()
            self.step(pins.Tick())
            if self._clock() - saved > SAVE_EVERY:
                # Equal answers renew an address without moving anything: that has to survive too.
                saved = self._clock()
                self.save(always=True)

    async def _resolve(self, query: pins.Query) -> None:
        self._watch_resolv_conf()
        result = await self._resolver.resolve(query.name)
        self.refreshes["answered" if isinstance(result, pins.Answer) else "failed"] += 1
        if isinstance(result, pins.Answer):
            self.step(pins.Answered(result, query.token))
        else:
            self.step(pins.Failed(result, query.token))
        await self._heard()

    async def ask(self, name: str) -> pins.Answer | pins.Failure:
        """Resolve a name for somebody who wants to know; nothing follows from the answer."""
        self._watch_resolv_conf()
        return await self._resolver.resolve(name)

    def _watch_resolv_conf(self) -> None:
        if self._config.dns.servers:
            return
        try:
            found = self._resolv_conf.stat()
            mark = (found.st_ino, found.st_mtime_ns, found.st_size)
            if mark == self._resolv_seen:
                return
            servers = system_servers(self._resolv_conf.read_text(errors="replace"))
            known, self._resolv_seen = self._resolv_seen, mark
            changed = servers != self._resolver.servers
            self._resolver.servers = servers
            if known is not None and changed:
                log.info("the host's resolver changed: %s", ", ".join(map(str, servers)))
                asyncio.get_running_loop().call_soon(self.step, pins.Refresh(discard=True))
            self._resolv_error = ""
        except OSError as error:
            if self._resolv_error != str(error):
                log.error("%s: %s", self._resolv_conf, error)
            self._resolv_error = str(error)

    def pending(self, container: str) -> frozenset[str]:
        """Return the names of a container that were not asked since it was seen."""
        return frozenset(pins.readiness(self.state, container).pending)

    def _restored(self) -> pins.State:
        try:
            saved = savedfile.value(self._store)
            return pins.restore(saved, self._clock(), self._wall(), self._vetting())
        except FileNotFoundError:
            return pins.State(vetting=self._vetting())
        except (OSError, ValueError) as error:
            log.warning("saved pins are not used: %s", error)
            return pins.State(vetting=self._vetting())

    def _vetting(self) -> Vetting:
        # Until the host and Docker were looked at; what they refuse is taken out then.
        return Vetting.of(permit=[str(net) for net in self._config.permit_ranges])

    def save(self, always: bool = False) -> None:
        """Write the state for the next start, when it moved."""
        if self._saved_generation == self.state.generation and not always:
            return
        try:
            self._store.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            partial = self._store.with_suffix(".new")
            partial.write_text(json.dumps(pins.save(self.state, self._clock(), self._wall())))
            partial.replace(self._store)
            self._saved_generation = self.state.generation
        except OSError as error:
            log.warning("pins cannot be saved: %s", error)
