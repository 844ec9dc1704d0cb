"""``corral-enforcer``: the loop that joins Docker, names, the writer and the hosts files.

Everything is denied by default; this service only ever adds, and takes away what it added. So the order of
things is safe whatever is lost, doubled or late: unknown containers have no entries, and every pass
recomputes the whole desired state from what Docker reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from enforcer import desired, pins, publishing, readiness, reports
from enforcer.api import Api
from enforcer.changes import LOG, Changes
from enforcer.config import RESOLV_CONF, Config
from enforcer.denials import Denials
from enforcer.dialing import Dialing
from enforcer.doors import Doors
from enforcer.engine import DockerEngine, Engine
from enforcer.host import boot_clock, notify, watch_network
from enforcer.leftovers import Leftovers
from enforcer.lookups import Lookups
from enforcer.metrics import Metrics, Now, counted, render
from enforcer.names import Names
from enforcer.openside import Around, OpenSide
from enforcer.overrides import Store
from enforcer.proxies import Proxies
from enforcer.release import RELEASE
from enforcer.resolver import Resolver, Server
from enforcer.sessions import Network, Owner, Session
from enforcer.tracker import Tracker
from enforcer.watch import Watcher
from enforcer.writerclient import Held, WriterClient, rows_of
from policy import proxying
from policy.errors import EnforcerError, NotReadyError

log = logging.getLogger("corral.enforcer")

RETRY = 0.5  # seconds


class Service:
    """The state of the enforcer; every method that changes it runs on one event loop."""

    def __init__(
        self,
        config: Config,
        owner: Owner,
        writer: WriterClient,
        make_engine: Callable[[], Engine] = DockerEngine,
        resolv_conf: Path = RESOLV_CONF,
        clock: Callable[[], float] = boot_clock,
        wall: Callable[[], float] = time.time,
        make_resolver: Callable[[tuple[Server, ...], Callable[[], float]], Resolver] = Resolver,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.config = config
        self.owner = owner
        self._writer = writer
        self._make_engine = make_engine
        self._clock = clock
        self._end = end
        self._dirty, self._changed = asyncio.Event(), asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self.names = Names(
            config,
            owner.data_home / "enforcer" / "pins.json",
            resolv_conf,
            clock,
            wall,
            spawn=self._spawn,
            moved=self._dirty.set,
            heard=self._notify_all,
            make_resolver=make_resolver,
        )
        self.held: Held | None = None
        # Container id -> name -> addresses, of the sessions that have all that was wanted at the last write.
        self.shown: dict[str, Mapping[str, tuple[str, ...]]] = {}
        self.errors: dict[str, str] = {}
        self._retrying: asyncio.TimerHandle | None = None
        self.applied = -1  # the generation of the pins that the kernel and the hosts files were made from
        store = Store(owner.data_home / "enforcer" / "sessions")
        self.tracker = Tracker(
            config, owner, self.names, self._dirty.set, self._notify_all, store, clock, wall
        )
        self.changes = Changes(self, self.names, self.tracker, clock, self._read)
        book = owner.data_home / "enforcer" / "addresses.json"
        self.denials = Denials(writer, book, self._world, wall, clock, self.tracker.looked)
        names = self.names  # its state is another one after each event
        self.lookups = Lookups(names.ask, clock)
        self.doors = Doors(self.tracker.sessions.get, self._dirty.set, self.until, clock)
        around = Around(
            self.lookups.find,
            lambda text: names.state.vetting.check(text),  # noqa: PLW0108
            self.doors.open,
            self.tracker.sessions.values,
            lambda: self.shown,
        )
        self.open = OpenSide(around, clock, self.denials)
        self.dialing = Dialing(
            self.tracker.sessions.values,
            self.lookups,
            self.doors,
            self.denials,
            lambda text: names.state.vetting.check(text),  # noqa: PLW0108
            clock,
            owner.data_home,
        )
        self.metrics = Metrics(refreshes=self.names.refreshes, dials=self.dialing.results)
        self.proxies = Proxies(
            lambda: self.tracker.engine, owner, self.tracker.sessions.values, self.tracker.looked, clock
        )
        self._leftovers = Leftovers(
            lambda: self.tracker.engine, owner, config.timers.reconcile, self.tracker.looked
        )
        self._loop: asyncio.AbstractEventLoop

    @property
    def satisfied(self) -> frozenset[str]:
        """See changes.Kernel."""
        return frozenset(self.shown)

    def proxied(self, sandbox: str) -> bool:
        """See changes.Kernel."""
        known = self.tracker.sessions.values()
        runs = any(one.proxy and one.running and one.sandbox.id == sandbox for one in known)
        return runs and self.dialing.serves(sandbox)

    # -- life

    async def run(self, socket_path: Path, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set."""
        self.start(asyncio.get_running_loop())
        self._spawn(self.denials.forever())
        self._spawn(self._leftovers.forever())
        self._spawn(self.proxies.forever())
        unwatch = watch_network(self._loop, lambda: self._spawn(self.tracker.network_moved()))
        api = Api(socket_path, self, self._loop)
        watcher = Watcher(self._make_engine, self.connected, self.event, self.lost)
        watcher.start()
        notify("READY=1")
        try:
            await stop.wait()
        finally:
            notify("STOPPING=1")
            watcher.stop()
            unwatch()
            self.open.close()
            self.dialing.close()
            self.lookups.close()
            for task in list(self._tasks):
                task.cancel()
            api.close()
            self.names.save()
            self.denials.save()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Spawn the loops that drive everything but Docker's events and the API."""
        self._loop = loop
        for work in (
            self._apply_forever(),
            self.names.tick_forever(),
            self._reconcile_forever(),
            self._renew_forever(),
            self.doors.forever(),
            self.dialing.forever(self._dirty.set),
            self.tracker.expire_forever(),
        ):
            self._spawn(work)

    def connected(self, engine: Engine) -> None:
        """See watch.Watcher; like the next two, callable from its thread."""
        self.metrics.connections += 1
        self._post(self.tracker.connected(engine))

    def event(self, event: Mapping[str, Any]) -> None:
        """See watch.Watcher."""
        self._post(self.tracker.event(event))
        if event.get("Action") == "die":
            self._loop.call_soon_threadsafe(self._leftovers.ended.set)

    def lost(self, reason: str) -> None:
        """See watch.Watcher."""
        self._post(self.tracker.lost(reason))

    def _post(self, work: Any) -> None:
        self._loop.call_soon_threadsafe(self._spawn, work)

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # An unknown state is not one to go on in: systemd starts us again, everything is rebuilt.
            log.critical("unexpected error, ending", exc_info=error)
            self._loop.call_soon(self._end, 1)

    async def _reconcile_forever(self) -> None:
        while True:
            await asyncio.sleep(self.config.timers.reconcile)
            began = self._clock()
            await self.tracker.reconcile()
            self.metrics.reconcile.add(self._clock() - began)
            await self._look_for_drift()

    async def _look_for_drift(self) -> None:
        """Compare what the kernel holds with what it held after the last write; elements are put back."""
        before = self.held
        try:
            found = await asyncio.to_thread(self._writer.read)
        except EnforcerError:
            # The next write says so.
            self.metrics.writer_errors += 1
            return
        if before is None or self.held is not before:
            return
        self._note_problems(before, found)
        if {row.src for row in before.open} != {row.src for row in found.open}:
            self.metrics.drift["open"] += 1
            self._dirty.set()
        for part, then, now in (("pins", before.pins, found.pins), ("host", before.host, found.host)):
            differing = {(e.src, e.proto, e.port, e.dst) for e in then} ^ {
                (e.src, e.proto, e.port, e.dst) for e in now
            }
            if differing:
                log.warning("%d elements of corral-%s were changed by others", len(differing), part)
                self.metrics.drift[part] += len(differing)
                self._dirty.set()

    def _note_problems(self, before: Held, found: Held) -> None:
        known = set(before.problems)
        self.metrics.drift.update(part for part, text in found.problems if (part, text) not in known)

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(self.config.timers.renew)
            self._dirty.set()

    # -- the kernel and the hosts files

    async def _apply_forever(self) -> None:
        await self.tracker.looked.wait()
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            began = self._clock()
            try:
                await self._apply()
                self.metrics.apply.add(self._clock() - began)
                self.errors.pop("writer", None)
            except EnforcerError as error:
                self.metrics.writer_errors += 1
                if self.errors.get("writer") != error.message:
                    log.error("%s", error.render())
                self.errors["writer"] = error.message
                self.shown = {}
                self.doors.unsure()
                self._retry()
            await self._notify_all()

    def _retry(self) -> None:
        """Apply again in a moment: once, however many reasons there are."""
        if self._retrying is not None:
            self._retrying.cancel()
        self._retrying = self._loop.call_later(RETRY, self._dirty.set)

    async def _apply(self) -> None:
        self.denials.notice()
        first = self.held is None
        if self.held is None:
            self.held = await asyncio.to_thread(self._writer.read)
        # One moment, whatever moves meanwhile: what is published has to come from what the rules come from.
        sessions, state, previous = list(self.tracker.sessions.values()), self.names.state, self.held

        def vet(text: str) -> bool:
            return bool(state.vetting.check(text))

        if first:
            self.doors.adopt(previous.pins, sessions, vet)
        mark, opened = self.doors.wanted(sessions, vet)
        untried = {ident: frozenset(pins.readiness(state, ident).pending) for ident in state.containers}
        kept = desired.keep(previous.pins, sessions, untried, vet)
        rules = desired.desired(sessions, self.tracker.networks.values(), pins.allowed(state), kept, opened)
        # Killed from here on, the next service knows what the kernel may hold and the hosts files may say.
        self.names.save()
        # What leaves a hosts file leaves it before the kernel; what enters it enters the kernel first.
        done, _ = self._publish(sessions, state, rows_of(previous.pins) & rules.pins.keys())
        self.shown = {ident: done[ident] for ident in self.shown.keys() & done.keys()}
        self.held = await asyncio.to_thread(
            self._writer.apply,
            rules.sandbox_rows(),
            [[*row, text] for row, text in rules.pins.items()],
            [[*row, text] for row, text in rules.host.items()],
            rules.lives(self._clock()),
            [[source, text] for source, text in rules.open.items()],
        )
        self._note_problem("dns", await self.open.follow(sessions))
        self._note_problem("dial", self.dialing.follow())
        for text in self.held.refused:
            log.warning("writer: %s", text)
        if self.held.standing:
            # A repair is under way; what could not be added meanwhile is asked for again.
            self._retry()
        self.doors.wrote(mark, rules.pins.keys(), rules.ends, self.held)
        done, failed = self._publish(sessions, state, rows_of(self.held.pins))
        self._note_problem("hosts", "; ".join(failed))
        held, true, serves = self.held, self.open.true, self.dialing.serves
        self.shown = publishing.satisfied(sessions, done, rules, held, true, serves)
        self._renew_used(previous, self.held)
        self._note_problems(previous, self.held)
        if self.names.state.generation != state.generation:
            self._dirty.set()
        self.applied = state.generation

    def _note_problem(self, part: str, text: str) -> None:
        known = self.errors.pop(part, "")
        if text:
            self.errors[part] = text
            self._retry()
        if text not in ("", known):
            log.error("%s", text)

    def _world(self) -> tuple[list[Session], list[Network], pins.State]:
        return list(self.tracker.sessions.values()), list(self.tracker.networks.values()), self.names.state

    def _publish(
        self, sessions: Iterable[Session], state: pins.State, rows: AbstractSet[desired.Row]
    ) -> tuple[dict[str, Mapping[str, tuple[str, ...]]], list[str]]:
        """See publishing.publish: of the sessions that are there still."""
        known = state.containers.keys() & self.tracker.sessions.keys()
        return publishing.publish([one for one in sessions if one.container in known], state, rows)

    def _renew_used(self, previous: Held, held: Held) -> None:
        before = {(e.src, e.dst, e.port): e.packets for e in previous.pins}
        by_address = {session.address: session.container for session in self.tracker.sessions.values()}
        for entry in held.pins:
            moved = entry.packets > before.get((entry.src, entry.dst, entry.port), entry.packets)
            if moved and entry.src in by_address:
                self.names.step(pins.InUse(by_address[entry.src], entry.dst))
                self.doors.used(by_address[entry.src], entry.dst, entry.port)

    # -- the API

    async def _notify_all(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _read(self) -> Held:
        return await asyncio.to_thread(self._writer.read)

    async def until(self, condition: Callable[[], bool], timeout: float) -> bool:
        """See changes.Kernel."""
        end = self._clock() + timeout
        while not condition():
            left = end - self._clock()
            if left <= 0:
                return False
            async with self._changed:
                try:
                    await asyncio.wait_for(self._changed.wait(), min(left, 1.0))
                except TimeoutError:
                    continue
        return True

    async def version(self) -> dict[str, Any]:
        """See api.Backend."""
        try:
            heard: dict[str, Any] | EnforcerError = await asyncio.to_thread(self._writer.hello)
        except EnforcerError as error:
            heard = error
        return reports.version(RELEASE, heard, rootless=self.owner.rootless)

    async def await_ready(self, container: str, timeout: float) -> dict[str, Any]:
        """See api.Backend."""
        until = self._clock() + timeout
        await self.tracker.look(container)
        while True:
            answer = readiness.judge(container, self.tracker, self.names.state, self.shown)
            if answer is not None:
                return answer
            left = until - self._clock()
            if left <= 0:
                known, state = self.tracker, self.names.state
                why = readiness.why_not(container, known, state, self.held, self._problems())
                raise NotReadyError(f"not ready within {timeout:g} s: {why}", LOG)
            async with self._changed:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), min(left, 1.0))
            if container in self.tracker.unseen:
                await self.tracker.look(container)

    def _problems(self) -> list[str]:
        lost = [f"Docker: {self.tracker.lost_reason}"] if self.tracker.lost_reason is not None else []
        refused = reports.refusals(self.held)
        return [*lost, *self.errors.values(), *self.proxies.problems.values(), *refused]

    async def withdraw(self, container: str) -> dict[str, Any]:
        """See api.Backend."""
        await self.tracker.forget(container)
        return {}

    async def status(self) -> dict[str, Any]:
        """See api.Backend."""
        held = self.held
        try:
            # For the report alone: what ``_apply`` compares packet counters with is what it read itself.
            held = await asyncio.to_thread(self._writer.read)
        except EnforcerError as error:
            self.errors["writer"] = error.message
            # What it was is for the next apply to tell; else it would be said until then, however long.
            self._retry()
        await self.denials.poll()
        now = self._clock()
        rows: dict[str, list[dict[str, Any]]] = {}
        for session in self.tracker.sessions.values():
            name = session.network.name if session.network else session.sandbox.network
            row = reports.session_row(session, self._state(session), self.names.state, held, now)
            row["denied"] = self.denials.ledger.of_session(session.container, session.sandbox.id)
            if session.service == proxying.SERVICE:
                row["proxy"] = self._proxy_row(session)
            row["dead_resolver"] = self.denials.lookups(session.container)
            row["opened"] = self.doors.report(session.container)
            rows.setdefault(name, []).append(row)
        return reports.status(
            RELEASE,
            self.config,
            self.tracker.networks.values(),
            rows,
            [row for rows in self.tracker.strangers.values() for row in rows],
            held,
            self._problems(),
            self.tracker.apart.values(),
        )

    def _proxy_row(self, session: Session) -> dict[str, Any]:
        results = self.dialing.counts(session.sandbox.id)
        return {
            "socket": self.dialing.serves(session.sandbox.id),
            "allowed": results.pop("ok", 0),
            "refused": results,
            "open": self.doors.counts().get(session.container, 0),
        }

    def _state(self, session: Session) -> str:
        state = "refused" if session.problems else "running" if session.running else "ready"
        return "pending" if state == "ready" and session.container not in self.satisfied else state

    async def live(self, sandbox: str) -> dict[str, Any]:
        """See api.Backend."""
        held = await asyncio.to_thread(self._writer.read)
        return reports.live(
            held, frozenset(s.address for s in self.tracker.sessions.values() if s.sandbox.id == sandbox)
        )

    async def denied(self, after: int, project: str | None) -> dict[str, Any]:
        """See api.Backend."""
        return await self.denials.report(after, project)

    async def measured(self) -> str:
        """See api.Backend."""
        repairs, held = None, self.held
        try:
            repairs = int((await asyncio.to_thread(self._writer.hello)).get("heals", 0))
        except (EnforcerError, TypeError, ValueError):
            self.metrics.writer_errors += 1
        await self.denials.poll()
        sessions, _, state = self._world()
        return render(
            self.metrics,
            Now(
                version=RELEASE,
                docker=self.tracker.engine is not None,
                writer=repairs is not None,
                repairs=repairs,
                pins=len(held.pins) if held else 0,
                host_entries=len(held.host) if held else 0,
                sessions=counted(self._state(session) for session in sessions),
                names=counted(state.names[name].state.value for name in pins.wanted(state)),
                strangers=sum(map(len, self.tracker.strangers.values())),
                **self.denials.counts(),
            ),
        )
