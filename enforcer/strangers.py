"""What reaches into a sandbox or its network without being a session that corral started.

No rule grants it anything, but packets are not all it could send: Docker's own resolver asks from the host,
where nobody knows whose question it is. So a container on a corral network is taken off it as soon as it is
seen, at ``create`` when Docker tells early enough, else at ``connect``; a session is taken off every network
but its own. Where the engine's resolver goes on to ask for a container that has no network any more, that
container is stopped too. A container that joined the network namespace of a session has that session's
reach without being one: it cannot be taken off, so it is stopped. A ``docker exec`` as another user cannot
be stopped; it is inside the fence, and reported. ``docs/limits.md`` says how long each takes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from enforcer import apart
from enforcer.engine import Engine
from enforcer.sessions import Stranger, is_declared
from policy.container import DEAD_RESOLVER, user
from policy.declaration import LABEL_SANDBOX
from policy.errors import EngineError
from policy.identity import NETWORK_PREFIX

log = logging.getLogger("corral.enforcer")

NOT_OURS = "corral did not start it"
LIVE_DNS = "its resolver is Docker's own, which asks from the host"
INSIDE = "it is inside the sandbox's fence"
GOES_ON = "its engine's resolver would go on to ask the host's for it"
# The first release of each line of Docker that asks nobody for a container without a way out
# (CVE-2024-29018); other lines below the last never got it.
QUIET = {(23, 0): 11, (25, 0): 5}
QUIET_SINCE = 26
JOINS = "container:"
CHAIN = 8  # containers that join one another, at most
EXECS = 16  # reported for one session


def joined(inspect: Mapping[str, Any]) -> str | None:
    """Return the container whose network namespace this one shares, None for one of its own."""
    mode = str((inspect.get("HostConfig") or {}).get("NetworkMode", ""))
    return mode.removeprefix(JOINS) if mode.startswith(JOINS) else None


def networks_of(inspect: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the networks a container is, or will be, attached to."""
    attached = frozenset(((inspect.get("NetworkSettings") or {}).get("Networks") or {}).keys())
    mode = str((inspect.get("HostConfig") or {}).get("NetworkMode", ""))
    return attached if mode.startswith(JOINS) else attached | {mode}


def reasons(
    inspect: Mapping[str, Any],
    ours: Collection[str],
    uid: int,
    gateways: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Return network name -> why this container has to leave it; empty when it may stay. Pure.

    What declares itself as a session of ``uid`` leaves every network but its own, whatever its state: between
    ``die`` and ``start`` of a restart it is no session yet. Anything else leaves each of ``ours``. A resolver
    may be the gateway of its own network, ``gateways``, which is asked from the container's own namespace.
    """
    attached = networks_of(inspect)
    labels = (inspect.get("Config") or {}).get("Labels") or {}
    if not is_declared(labels, uid):
        return dict.fromkeys(sorted(attached & frozenset(ours)), NOT_OURS)
    own = NETWORK_PREFIX + labels[LABEL_SANDBOX]
    # The host's network cannot be left, and a container that its user put there is not to leave it.
    extra = attached - {own, "default", "none", "", apart.claimed(inspect)}
    found = dict.fromkeys(sorted(extra), f"a sandbox is on {own} alone")
    asked = (inspect.get("HostConfig") or {}).get("Dns")
    if own in attached and asked != [DEAD_RESOLVER] and not (asked and asked == [gateways.get(own)]):
        found[own] = LIVE_DNS
    return found


def goes_on_to_ask(version: str) -> bool:
    """Tell whether an engine's resolver asks the host's for a container that is on no network. Pure.

    An engine that does not say what it is may do so.
    """
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if found is None:
        return True
    major, minor, patch = (int(part or 0) for part in found.groups())
    return major < QUIET_SINCE and patch < QUIET.get((major, minor), patch + 1)


def exec_problem(details: Mapping[str, Any], users: Collection[str]) -> str | None:
    """Return what a ``docker exec`` is when it is not one of the session's own user. Pure.

    ``users`` are the ways to name that user; none given means the container's.
    """
    config = details.get("ProcessConfig") or {}
    user, privileged = str(config.get("user") or ""), bool(config.get("privileged"))
    if not privileged and (not user or user in users):
        return None
    who = f" as {user}" if user else ""
    return f"docker exec{' --privileged' if privileged else ''}{who}: corral did not start it"


@dataclass
class Strangers:
    """``rows`` is what is reported: container id, or exec id, -> its rows."""

    uid: int
    gid: int
    rootless: bool = False

    def __post_init__(self) -> None:
        self.rows: dict[str, tuple[Stranger, ...]] = {}
        self._stopped: set[str] = set()

    def look(
        self,
        engine: Engine,
        ident: str,
        ours: Collection[str],
        gateways: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Look at one container and take it away from where it must not be.

        ``ours`` are the names of this user's sandbox networks, ``gateways`` their gateways.

        Raises:
            EngineError: Docker does not say what the container is.
        """
        inspect = engine.container(ident)
        if inspect is None:
            return
        was_stopped = ident in self._stopped or joined(inspect) is not None
        if was_stopped and ident in self.rows and not _runs(inspect):
            # It was stopped a moment ago; this is an event from before.
            return
        found = self._joiner(engine, inspect, ours) or self._attached(engine, inspect, ours, gateways)
        if found:
            self.rows[ident] = found

    def _attached(
        self, engine: Engine, inspect: Mapping[str, Any], ours: Collection[str], gateways: Mapping[str, str]
    ) -> tuple[Stranger, ...]:
        ident, name = _identity(inspect)
        done = [
            (network, why, _try("disconnected", partial(engine.disconnect, network, ident)))
            for network, why in reasons(inspect, ours, self.uid, gateways).items()
        ]
        more = self._silence(engine, ident) if done else ""
        for network, why, what in done:
            log.warning("%s on %s: %s; %s%s", name, network, why, what, more)
        return tuple(Stranger(ident, name, network, (why, what + more)) for network, why, what in done)

    def _silence(self, engine: Engine, ident: str) -> str:
        """Stop a container that was left without a network, where that does not end its questions.

        One with another network asks by that one's leave, as before it came; it goes on.
        """
        if not goes_on_to_ask(engine.version):
            return ""
        try:
            inspect = engine.container(ident)
        except EngineError as error:
            return f", and could not be looked at again: {error.message}"
        if inspect is None or not _runs(inspect):
            return ""
        if (inspect.get("NetworkSettings") or {}).get("Networks"):
            return ""
        self._stopped.add(ident)
        return f", and {_try('stopped', partial(engine.stop, ident))}: {GOES_ON}"

    def _joiner(
        self, engine: Engine, inspect: Mapping[str, Any], ours: Collection[str]
    ) -> tuple[Stranger, ...]:
        host: Mapping[str, Any] | None = inspect
        for _ in range(CHAIN):
            target = joined(host or {})
            if target is None:
                break
            host = engine.container(target)
        if host is None or host is inspect:
            return ()
        network = next(iter(sorted(networks_of(host) & frozenset(ours))), None)
        if network is None:
            return ()
        ident, name = _identity(inspect)
        why = f"it shares the network of {_identity(host)[1]}, and {NOT_OURS}"
        done = _try("stopped", partial(engine.stop, ident)) if _runs(inspect) else "not running"
        log.warning("%s on %s: %s; %s", name, network, why, done)
        return (Stranger(ident, name, network, (why, done)),)

    def executed(self, engine: Engine, ident: str, name: str, network: str, exec_id: str) -> None:
        """Look at one ``docker exec`` in a session.

        Raises:
            EngineError: Docker does not say what it is.
        """
        both = user(self.uid, self.gid, rootless=self.rootless)
        own = (both.partition(":")[0], both)
        details = engine.exec(exec_id)
        why = exec_problem(details, own) if details is not None else None
        if why is None or exec_id in self.rows:
            return
        log.warning("%s on %s: %s; %s", name, network, why, INSIDE)
        self.rows[exec_id] = (Stranger(ident, name, network, (why, INSIDE)),)
        earlier = [key for key, rows in self.rows.items() if key != ident and rows[0].container == ident]
        for key in earlier[:-EXECS]:
            del self.rows[key]

    def ended(self, ident: str) -> None:
        """A container ended: what ran in it did too."""
        for key in [key for key, rows in self.rows.items() if key != ident and rows[0].container == ident]:
            del self.rows[key]

    def removed(self, ident: str) -> None:
        """A container is no more."""
        self.ended(ident)
        self._stopped.discard(ident)
        self.rows.pop(ident, None)


def _identity(inspect: Mapping[str, Any]) -> tuple[str, str]:
    return str(inspect.get("Id")), str(inspect.get("Name", "")).lstrip("/")


def _runs(inspect: Mapping[str, Any]) -> bool:
    return bool((inspect.get("State") or {}).get("Running"))


def _try(done: str, act: Callable[[], None]) -> str:
    try:
        act()
    except EngineError as error:
        return f"could not be {done}: {error.message}"
    return done
