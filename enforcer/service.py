"""``corral-enforcer``: the loop that joins Docker, names, the writer and the hosts files.

Everything is denied by default; this service only ever adds, and takes away what it added. So the order of
things is safe whatever is lost, doubled or late: unknown containers have no entries, and every pass
recomputes the whole desired state from what Docker reports.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

from enforcer import desired, hostsfile, pins, reports
from enforcer.api import Api
from enforcer.config import RESOLV_CONF, Config
from enforcer.engine import DockerEngine, Engine
from enforcer.host import notify
from enforcer.names import Names
from enforcer.sessions import (
    Owner,
    Session,
)
from enforcer.tracker import Tracker
from enforcer.watch import Watcher
from enforcer.writerclient import Held, WriterClient
from policy.errors import EnforcerError, NotReadyError

log = logging.getLogger("corral.enforcer")

ALIVE = frozenset({"created", "running", "paused", "restarting"})
GONE_EVENTS = frozenset({"die", "destroy"})
LOOK_EVENTS = frozenset({"create", "start", "restart", "rename", "update", "unpause"})


def boot_clock() -> float:
    """Return seconds since boot, suspend included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


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
    ) -> None:
        self.config = config
        self.owner = owner
        self._writer = writer
        self._make_engine = make_engine
        self._clock = clock
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
        )
        self.held: Held | None = None
        self.satisfied: frozenset[str] = frozenset()
        self.errors: dict[str, str] = {}
        self.tracker = Tracker(config, owner, self.names, self._dirty.set, self._notify_all)
        self._loop: asyncio.AbstractEventLoop

    # -- life

    async def run(self, socket_path: Path, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set."""
        self._loop = asyncio.get_running_loop()
        api = Api(socket_path, self, self._loop)
        watcher = Watcher(
            self._make_engine,
            lambda engine: self._post(self.tracker.connected(engine)),
            lambda event: self._post(self.tracker.event(event)),
            lambda reason: self._post(self.tracker.lost(reason)),
        )
        watcher.start()
        for work in (
            self._apply_forever(),
            self.names.tick_forever(),
            self._reconcile_forever(),
            self._renew_forever(),
        ):
            self._spawn(work)
        notify("READY=1")
        try:
            await stop.wait()
        finally:
            notify("STOPPING=1")
            watcher.stop()
            for task in list(self._tasks):
                task.cancel()
            api.close()
            self.names.save()

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
            self._loop.call_soon(os._exit, 1)

    async def _reconcile_forever(self) -> None:
        while True:
            await asyncio.sleep(self.config.timers.reconcile)
            await self.tracker.reconcile()

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
            try:
                await self._apply()
                self.errors.pop("writer", None)
            except EnforcerError as error:
                if self.errors.get("writer") != error.message:
                    log.error("%s", error.render())
                self.errors["writer"] = error.message
                self.satisfied = frozenset()
                self._loop.call_later(0.5, self._dirty.set)
            await self._notify_all()

    async def _apply(self) -> None:
        sessions = list(self.tracker.sessions.values())
        if self.held is None:
            self.held = await asyncio.to_thread(self._writer.read)
        # What leaves a hosts file leaves it before the kernel; what enters it enters the kernel first.
        self._publish(sessions, self.held)
        kept = desired.keep(self.held.pins, sessions, self.names.untried(), self._vet)
        networks = self.tracker.networks.values()
        rules = desired.desired(sessions, networks, pins.allowed(self.names.state), kept)
        generation, previous = self.names.state.generation, self.held
        self.held = await asyncio.to_thread(
            self._writer.apply,
            rules.sandbox_rows(),
            [[*row, text] for row, text in rules.pins.items()],
            [[*row, text] for row, text in rules.host.items()],
        )
        for text in self.held.refused:
            log.warning("writer: %s", text)
        if any(part != "hook" for part, _ in self.held.problems):
            # A repair is under way; what could not be added meanwhile is asked for again.
            self._loop.call_later(0.5, self._dirty.set)
        published = self._publish(sessions, self.held)
        host_rows = {(e.src, e.proto, e.port, e.dst) for e in self.held.host}
        self.satisfied = frozenset(
            session.container
            for session in sessions
            if session.container in published
            and {row for row in rules.host if row[0] == session.address} <= host_rows
        )
        self._renew_used(previous, self.held)
        if self.names.state.generation != generation:
            self._dirty.set()
        self.names.save()

    def _vet(self, address: str) -> bool:
        return bool(self.names.state.vetting.check(address))

    def _publish(self, sessions: Iterable[Session], held: Held) -> set[str]:
        """Bring the hosts files up to what the kernel holds; return the containers that have all of it."""
        known = self.names.state.containers.keys() & self.tracker.sessions.keys()
        good = [session for session in sessions if session.container in known]
        wanted = pins.published(self.names.state)
        actual = pins.published(self.names.state, desired.live(held.pins, good))
        done = set()
        for session in good:
            if self.names.pending(session.container):
                # After a restart: what stands is better than what is not known yet.
                continue
            try:
                hostsfile.publish(
                    session.hosts_file, desired.hosts_content(session, actual.get(session.container, {}))
                )
            except (EnforcerError, ValueError) as error:
                log.error("%s: %s", session.name, error)
                continue
            if actual.get(session.container) == wanted.get(session.container):
                done.add(session.container)
        return done

    def _renew_used(self, previous: Held, held: Held) -> None:
        before = {(e.src, e.dst, e.port): e.packets for e in previous.pins}
        by_address = {session.address: session.container for session in self.tracker.sessions.values()}
        for entry in held.pins:
            moved = entry.packets > before.get((entry.src, entry.dst, entry.port), entry.packets)
            if moved and entry.src in by_address:
                self.names.step(pins.InUse(by_address[entry.src], entry.dst))

    # -- the API

    async def _notify_all(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def version(self) -> dict[str, Any]:
        """See api.Backend."""
        try:
            hello = await asyncio.to_thread(self._writer.hello)
            writer = {"reachable": True, "version": hello["version"], "skeleton": hello["skeleton"]}
        except EnforcerError as error:
            writer = {"reachable": False, "version": None, "error": error.message, "hint": error.hint}
        return {"version": package_version("corral"), "api": reports.API_VERSION, "writer": writer}

    async def await_ready(self, container: str, timeout: float) -> dict[str, Any]:
        """See api.Backend."""
        until = self._clock() + timeout
        await self.tracker.look(container)
        while True:
            answer = self._readiness(container)
            if answer is not None:
                return answer
            left = until - self._clock()
            if left <= 0:
                raise NotReadyError(self._why_not(container, timeout), "journalctl --user -u corral-enforcer")
            async with self._changed:
                try:
                    await asyncio.wait_for(self._changed.wait(), min(left, 1.0))
                except TimeoutError:
                    continue

    def _readiness(self, container: str) -> dict[str, Any] | None:
        session = self.tracker.sessions.get(container)
        if session is None:
            if self.tracker.lost_reason is not None:
                return None
            raise NotReadyError(
                "the enforcer does not know this container", "corral run creates what it accepts"
            )
        if session.problems:
            raise NotReadyError(
                "the container is not what corral would have created: " + "; ".join(session.problems),
                "another program changed it, or a default of the engine did (/etc/docker/daemon.json)",
            )
        ready = pins.readiness(self.names.state, container)
        if ready.pending:
            return None
        if ready.failed:
            lines = "\n".join(f"  {name}: {reason}" for name, reason in ready.failed)
            raise NotReadyError(
                f"allowed names without a usable address:\n{lines}",
                "correct the name in corral.yaml or mark it optional: true there; when it is one of the "
                "profile's own: egress.profile_defaults: false",
            )
        if container not in self.satisfied:
            return None
        names = pins.published(self.names.state)[container]
        return {
            "names": {name: list(addresses) for name, addresses in names.items()},
            "warnings": [f"{name}: {reason}" for name, reason in ready.warnings],
        }

    def _why_not(self, container: str, timeout: float) -> str:
        parts = self._problems()
        if container in self.names.state.containers:
            pending = sorted(self.names.pending(container))
            parts += [f"still resolving {', '.join(pending)}"] if pending else []
        reason = "; ".join(parts) or "the kernel does not hold all entries yet"
        return f"not ready within {timeout:g} s: {reason}"

    def _problems(self) -> list[str]:
        lost = [f"Docker: {self.tracker.lost_reason}"] if self.tracker.lost_reason is not None else []
        return [*lost, *self.errors.values()]

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
        now = self._clock()
        rows: dict[str, list[dict[str, Any]]] = {}
        for session in self.tracker.sessions.values():
            name = session.network.name if session.network else session.sandbox.network
            state = "refused" if session.problems else "running" if session.running else "ready"
            if state == "ready" and session.container not in self.satisfied:
                state = "pending"
            row = reports.session_row(session, state, self.names.state, held, now)
            rows.setdefault(name, []).append(row)
        return reports.status(
            package_version("corral"),
            self.config,
            self.tracker.networks.values(),
            rows,
            [row for rows in self.tracker.strangers.values() for row in rows],
            held,
            self._problems(),
        )

    async def live(self, sandbox: str) -> dict[str, Any]:
        """See api.Backend."""
        held = await asyncio.to_thread(self._writer.read)
        return reports.live(
            held, frozenset(s.address for s in self.tracker.sessions.values() if s.sandbox.id == sandbox)
        )
