"""What Docker has, kept up with its events: sessions, networks, strangers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from ipaddress import ip_network
from typing import Any

from enforcer import apart, pins
from enforcer.config import Config
from enforcer.engine import Engine
from enforcer.host import addresses as host_addresses
from enforcer.host import socket_sources
from enforcer.host import uplinks as host_uplinks
from enforcer.names import Names
from enforcer.overrides import Overrides, Store
from enforcer.sessions import (
    Network,
    Owner,
    Session,
    is_declared,
    mount_sources,
    parse_network,
    parse_session,
)
from enforcer.strangers import Strangers
from enforcer.vetting import Vetting
from policy.declaration import LABEL_UID
from policy.errors import CorralError, EnforcerError, PolicyError

log = logging.getLogger("corral.enforcer")

STAT_TIMEOUT = 2.0
RETRY_FIRST, RETRY_MAX = 1.0, 30.0
ALIVE = frozenset({"created", "running", "paused", "restarting"})
GONE_EVENTS = frozenset({"die", "destroy"})
LOOK_EVENTS = frozenset({"create", "start", "restart", "rename", "update", "unpause"})


class Tracker:
    """Owns ``sessions``, ``networks``, ``apart`` and ``strangers``; tells the pinning engine who wants what.

    What Docker reports is taken in one at a time and in order: a look that began before a container died must
    not add it again afterwards. ``changed`` is called when the desired state may have moved, ``told`` when
    somebody may be waiting. ``looked`` is set once a whole list was processed. ``unseen``: containers that
    Docker did not show when they were looked at last, and what it said instead. ``unfit``: those that are no
    session of this user, and why.
    """

    def __init__(
        self,
        config: Config,
        owner: Owner,
        names: Names,
        changed: Callable[[], None],
        told: Callable[[], Awaitable[None]],
        store: Store,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self.config = config
        self.owner = owner
        self.names = names
        self._changed = changed
        self._told = told
        self._store, self._clock, self._wall = store, clock, wall
        self._overrides: dict[str, Overrides] = {}
        self._unsaved: set[str] = set()
        self._order = asyncio.Lock()
        # Threads of their own: one that hangs in a dead network file system must not keep others waiting.
        self._stats = ThreadPoolExecutor(max_workers=8, thread_name_prefix="stat")
        self.looked = asyncio.Event()
        self.unseen: dict[str, str] = {}
        self.unfit: dict[str, str] = {}
        self.engine: Engine | None = None
        self.lost_reason: str | None = None
        self.sessions: dict[str, Session] = {}
        # What it forgot and Docker did not remove: it may be started again.
        self._away: dict[str, Session] = {}
        self.networks: dict[str, Network] = {}
        self.apart: dict[str, apart.Apart] = {}
        self._subnets: tuple[str, ...] = ()
        self._uplinks: frozenset[tuple[str, ...]] | None = None
        self._watch = Strangers(owner.uid, owner.gid, owner.rootless)
        self.strangers = self._watch.rows

    async def look(self, ident: str) -> None:
        """Take in one container as it is now."""
        async with self._order:
            await self._look(ident)

    async def forget(self, ident: str) -> None:
        """Take away what one container may reach."""
        async with self._order:
            self._forget(ident)

    async def connected(self, engine: Engine) -> None:
        """Docker answers and its events are being followed: look at everything."""
        self.engine = engine
        self.lost_reason = None
        wait = RETRY_FIRST
        while self.engine is engine and not await self.reconcile():
            await asyncio.sleep(wait)
            wait = min(2 * wait, RETRY_MAX)

    async def lost(self, reason: str) -> None:
        """Docker is gone; what stands stays."""
        if self.lost_reason is None:
            log.warning("Docker is gone: %s; what stands stays, nothing is added", reason)
        self.lost_reason = reason
        self.engine = None
        await self._told()

    async def event(self, event: Mapping[str, Any]) -> None:
        """Take in one event."""
        action = str(event.get("Action", "")).partition(":")[0]
        actor = event.get("Actor") or {}
        ident = str(actor.get("ID", ""))
        attributes = actor.get("Attributes") or {}
        async with self._order:
            if event.get("Type") == "network":
                await self._network_event(action, str(attributes.get("container", "")))
            elif action in GONE_EVENTS:
                # The event says enough: an inspect may already find nothing.
                self._forget(ident)
                self._watch.ended(ident)
                if action == "destroy":
                    self._watch.removed(ident)
                    self._drop_overrides(ident)
            elif action == "exec_start":
                await self._watch_exec(ident, str(attributes.get("execID", "")))
            else:
                if attributes.get(LABEL_UID) == str(self.owner.uid) and action in LOOK_EVENTS:
                    await self._look(ident)
                if action in ("create", "start"):
                    await self._watch_stranger(ident)

    async def _network_event(self, action: str, container: str) -> None:
        if action in ("connect", "disconnect") and container in {*self.sessions, *self.apart}:
            await self._look(container)
        if action == "connect":
            await self._watch_stranger(container)
        elif action in ("create", "destroy"):
            try:
                await self._refresh_world()
            except CorralError as error:
                log.error("reading the networks failed: %s", error.message)

    async def reconcile(self) -> bool:
        """Rebuild everything from what Docker reports now; False when Docker did not tell."""
        engine = self.engine
        if engine is None:
            return True
        async with self._order:
            try:
                await self._refresh_world()
                seen = await asyncio.to_thread(engine.identifiers, self.owner.uid)
                for ident in {*self.sessions, *self.unseen, *self.unfit, *self.apart} - set(seen):
                    self._forget(ident)
                for ident in self._away.keys() - set(seen):
                    del self._away[ident]
                for ident in seen:
                    # One container that Docker cannot show must not hide the others; it keeps what it has.
                    await self._look(ident)
                self.looked.set()
                self._changed()
                for ident in await asyncio.to_thread(self._attached, engine):
                    await self._watch_stranger(ident)
                for ident in self._store.containers() - set(seen):
                    if await asyncio.to_thread(engine.container, ident) is None:
                        self._drop_overrides(ident)
            except CorralError as error:
                log.error("full pass failed: %s", error.message)
                return False
        self._changed()
        return True

    async def _refresh_world(self) -> None:
        engine = self.engine
        if engine is None:
            return
        rows = await asyncio.to_thread(engine.networks)
        found = [net for net in (parse_network(row, self.owner.uid) for row in rows) if net is not None]
        self.networks = {net.name: net for net in found}
        own = {str(net.subnet) for net in found}
        self._subnets = tuple(text for row in rows for text in subnets_of(row) if text not in own)
        await self._vet_again()

    async def network_moved(self) -> None:
        """An interface, an address or a route of this host came or went: judge every address anew, now.

        Works without Docker too, with the networks that it had.
        """
        if not self.looked.is_set():
            return
        async with self._order:
            try:
                await self._vet_again()
            except CorralError as error:
                log.error("%s", error.message)

    async def _vet_again(self) -> None:
        vetting = Vetting.of(
            permit=[str(net) for net in self.config.permit_ranges],
            host_addresses=await asyncio.to_thread(host_addresses),
            docker_subnets=self._subnets,
            corral_subnets=[str(net.subnet) for net in self.networks.values()],
        )
        known, self._uplinks = self._uplinks, await asyncio.to_thread(host_uplinks)
        self.names.step(pins.VettingChanged(vetting))
        if known is not None and known != self._uplinks:
            log.info("the host's routes changed: asking for all names again")
            self.names.step(pins.Refresh(discard=True))

    def _attached(self, engine: Engine) -> set[str]:
        found = [engine.network(name) or {} for name in list(self.networks)]
        attached = {ident for inspect in found for ident in inspect.get("Containers") or {}}
        return attached | set(engine.joiners())

    async def _watch_stranger(self, ident: str) -> None:
        engine = self.engine
        if engine is None:
            return
        try:
            gateways = {name: str(net.gateway) for name, net in self.networks.items()}
            await asyncio.to_thread(self._watch.look, engine, ident, list(gateways), gateways)
        except CorralError as error:
            log.error("container %.12s: %s", ident, error.message)

    async def _watch_exec(self, ident: str, exec_id: str) -> None:
        engine, session, without = self.engine, self.sessions.get(ident), self.apart.get(ident)
        if session is not None:
            name, network = session.name, session.sandbox.network
        elif without is not None:
            name, network = without.name, without.connection
        else:
            return
        if engine is None or not exec_id:
            return
        try:
            await asyncio.to_thread(self._watch.executed, engine, ident, name, network, exec_id)
        except CorralError as error:
            log.error("exec %.12s in %s: %s", exec_id, name, error.message)

    async def _look(self, ident: str) -> None:
        engine = self.engine
        if engine is None:
            if ident not in self.sessions and self.lost_reason is None:
                self.unseen[ident] = "Docker was not asked yet"
            return
        try:
            inspect = await asyncio.to_thread(engine.container, ident)
            if inspect is None:
                self._forget(ident)
                self.unfit[ident] = "Docker has no such container"
                return
            await self._take(inspect)
            self.unseen.pop(ident, None)
        except CorralError as error:
            self.unseen[ident] = error.message
            log.error("container %.12s: %s", ident, error.message)
            return
        for exec_id in inspect.get("ExecIDs") or ():
            await self._watch_exec(ident, str(exec_id))

    async def _take(self, inspect: Mapping[str, Any]) -> None:
        ident = str(inspect["Id"])
        labels = (inspect.get("Config") or {}).get("Labels") or {}
        status = (inspect.get("State") or {}).get("Status")
        if not is_declared(labels, self.owner.uid) or status not in ALIVE:
            self._forget(ident)
            own = is_declared(labels, self.owner.uid)
            self.unfit[ident] = f"it is {status}" if own else "its labels do not say that it is a sandbox's"
            return
        without = apart.parse(inspect)
        if without is not None:
            self._forget(ident)
            self.apart[ident] = without
            return
        self.apart.pop(ident, None)
        names = ((inspect.get("NetworkSettings") or {}).get("Networks") or {}).keys()
        if not set(names) <= set(self.networks):
            await self._refresh_world()
        network = next((self.networks[name] for name in names if name in self.networks), None)
        owner = replace(self.owner, sockets=await self._sockets(inspect))
        try:
            session = parse_session(inspect, network, owner)
        except PolicyError as error:
            log.warning("%s", error.message)
            self._forget(ident)
            self.unfit[ident] = error.message
            return
        session = self._overridden(session)
        if self.sessions.get(ident) == session:
            return
        self._set(self._without_twin(session))

    def _set(self, session: Session) -> None:
        self.sessions[session.container] = session
        self.unfit.pop(session.container, None)
        self._away.pop(session.container, None)
        if session.problems:
            log.warning("%s gets nothing: %s", session.name, "; ".join(session.problems))
            self.names.step(pins.Unsubscribe(session.container))
        else:
            stale = session.declaration.allow_stale
            wishes = tuple(pins.Wish(n.host, n.ports, n.optional, stale) for n in session.names)
            self.names.step(pins.Subscribe(session.container, session.address, wishes))
        self._changed()

    def _overridden(self, session: Session) -> Session:
        """Add what its user allowed and denied it; when that cannot be read, a denial may be lost."""
        ident = session.container
        if ident not in self._overrides:
            try:
                found = self._store.load(ident, self._clock(), self._wall())
            except EnforcerError as error:
                return replace(session, problems=(*session.problems, error.message))
            self._overrides[ident] = found or Overrides()
            if found is not None:
                # With what has ended left out and with the time that it is now.
                self._unsaved.add(ident)
                self._save_again()
        return replace(session, overrides=self._overrides[ident].at(self._clock()))

    def known(self, sandbox: str) -> list[Session]:
        """Return all of a sandbox that may have something, now or later: refused and stopped ones too."""
        return [
            session
            for session in (*self.sessions.values(), *self._away.values())
            if session.sandbox.id == sandbox
        ]

    def override(self, ident: str, change: Callable[[Overrides], Overrides]) -> None:
        """Change what a container may reach beside its labels, also while it is refused or stopped.

        Nothing happens to one that is gone, or whose file cannot be read: that one gets nothing.

        Raises:
            EnforcerError: it cannot be kept over a restart. Then nothing was opened; what closes holds.
        """
        before = self._overrides.get(ident)
        if before is None:
            return
        after = change(before)
        if after == before and ident not in self._unsaved:
            return
        session = self.sessions.get(ident) or self._away.get(ident)
        if session is not None and after.opens(before, session.declaration):
            self._store.save(ident, after, self._clock(), self._wall())
            self._unsaved.discard(ident)
            self._keep(ident, after)
        else:
            self._keep(ident, after)
            self._save_closed(ident)

    def _keep(self, ident: str, overrides: Overrides) -> None:
        self._overrides[ident] = overrides
        for sessions in (self.sessions, self._away):
            if ident in sessions:
                sessions[ident] = replace(sessions[ident], overrides=overrides.at(self._clock()))
        session = self.sessions.get(ident)
        if session is not None and not session.problems:
            self._set(session)

    def _save_closed(self, ident: str) -> None:
        """Save what was closed, or leave a file that closes everything until it can be saved."""
        try:
            self._store.save(ident, self._overrides[ident], self._clock(), self._wall())
        except EnforcerError as error:
            self._unsaved.add(ident)
            what = self._store.spoil(ident)
            raise EnforcerError(f"{error.message}; {what}", "make room there; it is tried on") from error
        self._unsaved.discard(ident)

    def _save_again(self) -> None:
        for ident in list(self._unsaved):
            with contextlib.suppress(EnforcerError):
                self._store.save(ident, self._overrides[ident], self._clock(), self._wall())
                self._unsaved.discard(ident)

    def _drop_overrides(self, ident: str) -> None:
        self._overrides.pop(ident, None)
        self._away.pop(ident, None)
        self._unsaved.discard(ident)
        try:
            self._store.drop(ident)
        except OSError as error:
            log.warning("container %.12s: %s", ident, error)

    async def expire_forever(self) -> None:
        """Take back what was allowed for a time that is over."""
        while True:
            await asyncio.sleep(1.0)
            self._save_again()
            for ident, overrides in list(self._overrides.items()):
                left = overrides.at(self._clock())
                if left is not overrides:
                    log.info("container %.12s: what was allowed for a time has ended", ident)
                    self._keep(ident, left)
                    try:
                        # Else the file gives it back after a restart, when the time of day was set back.
                        self._save_closed(ident)
                    except EnforcerError as error:
                        log.error("container %.12s: %s", ident, error.message)

    def _without_twin(self, session: Session) -> Session:
        """Two declarations of one address cannot be told apart: the running one, else the first, has it."""
        if session.problems:
            return session
        for twin in list(self.sessions.values()):
            if twin.address != session.address or twin.container == session.container or twin.problems:
                continue
            if session.running and not twin.running:
                problem = f"address {twin.address} is {session.name}'s, which runs"
                self.sessions[twin.container] = replace(twin, problems=(problem,))
                self.names.step(pins.Unsubscribe(twin.container))
            else:
                problem = f"address {session.address} is already {twin.name}'s"
                return replace(session, problems=(problem,))
        return session

    async def _sockets(self, inspect: Mapping[str, Any]) -> frozenset[str]:
        """Return the mounts that are sockets; those on a file system that does not answer count as such."""
        sources = mount_sources(inspect)
        looking = asyncio.get_running_loop().run_in_executor(self._stats, socket_sources, sources)
        try:
            return await asyncio.wait_for(looking, STAT_TIMEOUT)
        except TimeoutError:
            log.warning("a file system with mounts of %s does not answer", inspect.get("Name"))
            return frozenset(sources)

    def _forget(self, ident: str) -> None:
        self.unseen.pop(ident, None)
        self.unfit.pop(ident, None)
        self.apart.pop(ident, None)
        session = self.sessions.pop(ident, None)
        if session is not None:
            self._away[ident] = session
            self.names.step(pins.Unsubscribe(ident))
            self._changed()


def subnets_of(network: Mapping[str, Any]) -> list[str]:
    """Return a Docker network's subnets, host bits cleared; what does not parse is left out."""
    found = []
    for config in (network.get("IPAM") or {}).get("Config") or []:
        try:
            found.append(str(ip_network(str(config.get("Subnet") or ""), strict=False)))
        except ValueError:
            log.warning("network %s has no usable subnet: %r", network.get("Name"), config)
    return found
