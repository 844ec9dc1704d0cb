"""``corral down``: end everything of a sandbox; its state stays."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from corral import engine, network, relay, state
from corral.context import Invocation
from policy.errors import CorralError, EnforcerError
from policy.identity import Sandbox, StatePaths

# Seconds a container has to end by itself before it is killed.
GRACE = 10


@dataclass(frozen=True)
class Removed:
    """What was removed: names of containers, how many relays, whether the network, who else was on it."""

    containers: tuple[str, ...] = ()
    relays: int = 0
    network: bool = False
    disconnected: tuple[str, ...] = ()


def summary(sandbox: str, removed: Removed) -> str:
    """Return what ``corral down`` prints."""
    parts = []
    if removed.containers:
        parts.append(_count(len(removed.containers), "container"))
    if removed.relays:
        parts.append(_count(removed.relays, "relay"))
    if removed.network:
        parts.append("its network")
    if not parts:
        return f"{sandbox}: nothing to do"
    text = f"{sandbox}: removed {', '.join(parts)}; its state is kept"
    if removed.disconnected:
        text += f"; disconnected from its network: {', '.join(removed.disconnected)}"
    return text


def _count(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number} {what}s"


def down(invocation: Invocation) -> Removed:
    """Stop and remove the containers, the relays and the network of the project's sandbox.

    Raises:
        PolicyError: which sandbox it is cannot be said.
        EngineError: Docker refused; what was removed before stays removed.
    """
    sandbox, paths, console = invocation.loaded.sandbox, invocation.paths, invocation.console
    with console.step("containers"):
        containers = _containers(invocation, sandbox)
    relays = 0
    try:
        manager = relay.Manager(relay.environment(invocation.user.environ, invocation.user.uid))
        relays = manager.stop_all(sandbox)
    except CorralError as error:
        # Without a user manager no relay can run either.
        console.detail(error.message)
    with console.step("network"):
        strangers = network.remove(invocation.api, sandbox, invocation.user.uid)
    _sessions(invocation, sandbox, paths)
    return Removed(containers, relays, strangers is not None, tuple(strangers or ()))


def _containers(invocation: Invocation, sandbox: Sandbox) -> tuple[str, ...]:
    from docker.errors import NotFound

    names = []
    for entry in engine.sandbox_containers(invocation.api, sandbox.id, invocation.user.uid):
        name = engine.container_name(entry)
        with engine.errors(f"stopping {name}"), contextlib.suppress(NotFound):
            invocation.api.stop(entry["Id"], timeout=GRACE)
        engine.remove_container(invocation.api, entry["Id"])
        with contextlib.suppress(EnforcerError):
            invocation.enforcer.withdraw(entry["Id"])
        names.append(name)
    return tuple(names)


def _sessions(invocation: Invocation, sandbox: Sandbox, paths: StatePaths) -> None:
    """Remove what sessions left behind, but not of one that started meanwhile."""
    from policy.declaration import LABEL_SESSION

    alive = engine.sandbox_containers(invocation.api, sandbox.id, invocation.user.uid)
    state.remove_sessions(
        paths, keep=[str((entry.get("Labels") or {}).get(LABEL_SESSION)) for entry in alive]
    )
