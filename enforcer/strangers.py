"""Containers on a corral network that corral did not start, and sessions that were connected elsewhere.

No rule grants them anything, but packets are not all they could send: Docker's own resolver asks from the
host, where nobody knows whose question it is. So they are taken off the network as soon as they are seen, at
``create`` when Docker tells early enough, else at ``connect``; ``docs/limits.md`` says how long that takes.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from enforcer.engine import Engine
from enforcer.sessions import Session, Stranger
from policy.errors import EngineError

log = logging.getLogger("corral.enforcer")

NOT_OURS = "corral did not start it"


def networks_of(inspect: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the networks a container is, or will be, attached to."""
    attached = frozenset(((inspect.get("NetworkSettings") or {}).get("Networks") or {}).keys())
    mode = str((inspect.get("HostConfig") or {}).get("NetworkMode", ""))
    return attached | {mode}


def reasons(
    inspect: Mapping[str, Any], ours: Collection[str], sessions: Mapping[str, Session]
) -> dict[str, str]:
    """Return network name -> why this container has to leave it; empty when it may stay. Pure.

    A session leaves every network but its own, anything else leaves each of ``ours``.
    """
    session = sessions.get(str(inspect.get("Id")))
    attached = networks_of(inspect)
    if session is not None:
        extra = attached - {session.sandbox.network, "default", "none", ""}
        return dict.fromkeys(sorted(extra), f"a sandbox is on {session.sandbox.network} alone")
    return dict.fromkeys(sorted(attached & frozenset(ours)), NOT_OURS)


def expel(
    engine: Engine, inspect: Mapping[str, Any], ours: Collection[str], sessions: Mapping[str, Session]
) -> tuple[Stranger, ...]:
    """Take a container off the networks it must not be on, and return what is to be reported about it."""
    ident, name = str(inspect.get("Id")), str(inspect.get("Name", "")).lstrip("/")
    found = []
    for network, why in reasons(inspect, ours, sessions).items():
        try:
            engine.disconnect(network, ident)
            done = "disconnected"
        except EngineError as error:
            done = f"could not be disconnected: {error.message}"
        log.warning("%s on %s: %s; %s", name, network, why, done)
        found.append(Stranger(ident, name, network, (why, done)))
    return tuple(found)
