"""What Docker has, kept up with its events: sessions, networks, strangers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from ipaddress import ip_network
from typing import Any

from enforcer import pins
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
    """Owns ``sessions``, ``networks`` and ``strangers``; tells the pinning engine who wants which names.

    What Docker reports is taken in one at a time and in order: a look that began before a container died must
    not add it again afterwards. ``changed`` is called when the desired state may have moved, ``told`` when
    somebody may be waiting. ``looked`` is set once a whole list was processed. ``unseen``: containers that
    Docker did not show when they were looked at last, and what it said instead.
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
        self._order = asyncio.Lock()
        # Threads of their own: one that hangs in a dead network file system must not keep others waiting.
        self._stats = ThreadPoolExecutor(max_workers=8, thread_name_prefix="stat")
        self.looked = asyncio.Event()
        self.unseen: dict[str, str] = {}
        self.engine: Engine | None = None
        self.lost_reason: str | None = None
        self.sessions: dict[str, Session] = {}
        self.networks: dict[str, Network] = {}
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
        if action in ("connect", "disconnect") and container in self.sessions:
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
                for ident in {*self.sessions, *self.unseen} - set(seen):
                    self._forget(ident)
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
        engine, session = self.engine, self.sessions.get(ident)
        if engine is None or session is None or not exec_id:
            return
        try:
            await asyncio.to_thread(
                self._watch.executed, engine, ident, session.name, session.sandbox.network, exec_id
            )
        except CorralError as error:
            log.error("exec %.12s in %s: %s", exec_id, session.name, error.message)

    async def _look(self, ident: str) -> None:
        engine = self.engine
        if engine is None:
            return
        try:
            try:
                inspect = await asyncio.to_thread(engine.container, ident)
            except CorralError as error:
                self.unseen[ident] = error.message
                raise
            self.unseen.pop(ident, None)
            if inspect is None:
                self._forget(ident)
                return
            await self._take(inspect)
            for exec_id in inspect.get("ExecIDs") or ():
                await self._watch_exec(ident, str(exec_id))
        except CorralError as error:
            log.error("container %.12s: %s", ident, error.message)

    async def _take(self, inspect: Mapping[str, Any]) -> None:
        ident = str(inspect["Id"])
        labels = (inspect.get("Config") or {}).get("Labels") or {}
        if not is_declared(labels, self.owner.uid) or (inspect.get("State") or {}).get("Status") not in ALIVE:
            self._forget(ident)
            return
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
            return
        session = self._overridden(session)
        if self.sessions.get(ident) == session:
            return
        self._set(self._without_twin(session))

    def _set(self, session: Session) -> None:
        self.sessions[session.container] = session
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
        return replace(session, overrides=self._overrides[ident].at(self._clock()))

    async def override(self, ident: str, change: Callable[[Session], Overrides]) -> None:
        """Change what a running session may reach beside its labels; nothing when it has ended.

        Raises:
            EnforcerError: it cannot be kept over a restart. Then nothing was opened; what closes holds, as
                long as this process lives.
        """
        async with self._order:
            session = self.sessions.get(ident)
            if session is None or session.problems:
                return
            before = {(name.host, port) for name in session.names for port in name.ports}
            changed = replace(session, overrides=change(session))
            opened = {(name.host, port) for name in changed.names for port in name.ports} - before
            if not opened:
                self._keep(changed)
            self._store.save(ident, changed.overrides, self._clock(), self._wall())
            if opened:
                self._keep(changed)

    def _keep(self, session: Session) -> None:
        self._overrides[session.container] = session.overrides
        self._set(session)

    def _drop_overrides(self, ident: str) -> None:
        self._overrides.pop(ident, None)
        try:
            self._store.drop(ident)
        except OSError as error:
            log.warning("container %.12s: %s", ident, error)

    async def expire_forever(self) -> None:
        """Take back what was allowed for a time that is over."""
        while True:
            await asyncio.sleep(1.0)
            for session in list(self.sessions.values()):
                left = session.overrides.at(self._clock())
                if left is not session.overrides and not session.problems:
                    log.info("%s: what was allowed for a time has ended", session.name)
                    self._keep(replace(session, overrides=left))

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
        if self.sessions.pop(ident, None) is not None:
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
