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
from enforcer.sessions import Stranger, is_declared
from policy.container import DEAD_RESOLVER
from policy.declaration import LABEL_SANDBOX
from policy.errors import EngineError
from policy.identity import BRIDGE_PREFIX

log = logging.getLogger("corral.enforcer")

NOT_OURS = "corral did not start it"
LIVE_DNS = "its resolver is Docker's own, which asks from the host"


def networks_of(inspect: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the networks a container is, or will be, attached to."""
    attached = frozenset(((inspect.get("NetworkSettings") or {}).get("Networks") or {}).keys())
    mode = str((inspect.get("HostConfig") or {}).get("NetworkMode", ""))
    return attached | {mode}


def reasons(inspect: Mapping[str, Any], ours: Collection[str], uid: int) -> dict[str, str]:
    """Return network name -> why this container has to leave it; empty when it may stay. Pure.

    What declares itself as a session of ``uid`` leaves every network but its own, whatever its state: between
    ``die`` and ``start`` of a restart it is no session yet. Anything else leaves each of ``ours``.
    """
    attached = networks_of(inspect)
    labels = (inspect.get("Config") or {}).get("Labels") or {}
    if not is_declared(labels, uid):
        return dict.fromkeys(sorted(attached & frozenset(ours)), NOT_OURS)
    own = BRIDGE_PREFIX + labels[LABEL_SANDBOX]
    extra = attached - {own, "default", "none", ""}
    found = dict.fromkeys(sorted(extra), f"a sandbox is on {own} alone")
    if (inspect.get("HostConfig") or {}).get("Dns") != [DEAD_RESOLVER]:
        found[own] = LIVE_DNS
    return found


def expel(
    engine: Engine, inspect: Mapping[str, Any], ours: Collection[str], uid: int
) -> tuple[Stranger, ...]:
    """Take a container off the networks it must not be on, and return what is to be reported about it."""
    ident, name = str(inspect.get("Id")), str(inspect.get("Name", "")).lstrip("/")
    found = []
    for network, why in reasons(inspect, ours, uid).items():
        try:
            engine.disconnect(network, ident)
            done = "disconnected"
        except EngineError as error:
            done = f"could not be disconnected: {error.message}"
        log.warning("%s on %s: %s; %s", name, network, why, done)
        found.append(Stranger(ident, name, network, (why, done)))
    return tuple(found)
