"""``corral down``: end everything of a directory's sandboxes, whatever its policy says now; state stays."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral import attended, engine, leftovers, network, relay, state, units
from corral.context import Invocation
from policy import proxying
from policy.declaration import LABEL_SANDBOX, LABEL_SERVICE, LABEL_SESSION
from policy.errors import ArgumentError, CorralError, EnforcerError, EngineError, PolicyError
from policy.identity import BRIDGE_PREFIX, SANDBOX_ID, Sandbox, StatePaths, sandbox_for, state_paths
from policy.loader import find

# Seconds a container has to end by itself before it is killed.
GRACE = 10


@dataclass(frozen=True)
class Removed:
    """What was removed: names of containers, how many relays, whether the network, who else was on it."""

    containers: tuple[str, ...] = ()
    relays: int = 0
    network: bool = False
    disconnected: tuple[str, ...] = ()
    # A unit that starts its agent again at the next boot.
    unit: str = ""


def report(removed: Mapping[str, Removed]) -> str:
    """Return what ``corral down`` prints: a line for each sandbox that had something to remove."""
    busy = {ident: found for ident, found in removed.items() if found != Removed(unit=found.unit)}
    if not busy:
        units_left = "".join(f"\n{again(found.unit)}" for found in removed.values() if found.unit)
        return f"{', '.join(removed)}: nothing to do{units_left}"
    return "\n".join(summary(ident, found) for ident, found in busy.items())


def summary(sandbox: str, removed: Removed) -> str:
    """Return the line of one sandbox."""
    parts = []
    if removed.containers:
        parts.append(_count(len(removed.containers), "container"))
    if removed.relays:
        parts.append(_count(removed.relays, "relay"))
    if removed.network:
        parts.append("its network")
    text = f"{sandbox}: removed {', '.join(parts)}; its state is kept"
    if removed.disconnected:
        text += f"; disconnected from its network: {', '.join(removed.disconnected)}"
    return f"{text}\n{again(removed.unit)}" if removed.unit else text


def again(unit: str) -> str:
    """Return what is said of a unit that stays enabled."""
    return f"  {unit} starts its agent again with the machine; to end that: corral disable"


def _count(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number} {what}s"


def down(invocation: Invocation, given: str | None = None) -> dict[str, Removed]:
    """Stop and remove the containers, the relays and the networks of this directory's sandboxes.

    There is more than one after the policy's ``name`` was changed. The policy need not be valid.

    Args:
        invocation: who and where.
        given: id of the only sandbox to look at, from whatever directory.

    Returns:
        what was removed, by sandbox id.

    Raises:
        ArgumentError: what is given is no id.
        PolicyError: which sandbox it is cannot be said.
        EngineError: Docker refused; what was removed before stays removed.
    """
    found = [chosen(given)] if given is not None else of_directory(invocation)
    return {sandbox.id: _remove(invocation, sandbox) for sandbox in found}


def chosen(given: str) -> Sandbox:
    """Return the sandbox with this id, or with the network of this name.

    Raises:
        ArgumentError: it is no id.
    """
    try:
        return Sandbox(given.removeprefix(BRIDGE_PREFIX))
    except ValueError as error:
        raise ArgumentError(
            f"{given[:80]!r} is not the id of a sandbox, which is a name and eight hex digits",
            "corral status lists them",
        ) from error


def of_directory(invocation: Invocation) -> list[Sandbox]:
    """Return every sandbox that this user has or had in the project of the working directory.

    Raises:
        PolicyError: there is no policy here, and no sandbox either.
    """
    try:
        project = Path(os.path.realpath(find(invocation.cwd).parent))
    except PolicyError:
        # The policy was removed; its sandboxes may be there all the same.
        for directory in (invocation.cwd, *invocation.cwd.parents):
            known = _known(invocation, directory)
            if known:
                return [Sandbox(ident) for ident in sorted(known)]
        raise
    found = _known(invocation, project) | {sandbox_for(invocation.user.uid, project, project.name).id}
    with contextlib.suppress(PolicyError):
        found.add(invocation.loaded.sandbox.id)
    return [Sandbox(ident) for ident in sorted(found)]


def _known(invocation: Invocation, project: Path) -> set[str]:
    """Return the ids of sandboxes of a directory that left a trace: a container, or state."""
    entries: list[dict[str, Any]] = []
    # Without Docker there is nothing to remove; removing says so.
    with contextlib.suppress(EngineError):
        entries = engine.project_containers(invocation.api, str(project), invocation.user.uid)
    labels = {str((entry.get("Labels") or {}).get(LABEL_SANDBOX)) for entry in entries}
    return {ident for ident in labels if SANDBOX_ID.fullmatch(ident)} | set(
        state.sandboxes_of(invocation.data, project)
    )


def _remove(invocation: Invocation, sandbox: Sandbox) -> Removed:
    console = invocation.console
    paths = state_paths(invocation.user.home, dict(invocation.user.environ), sandbox)
    unit, ended = _unit(invocation, sandbox)
    with console.step(f"containers of {sandbox.id}", minor=True):
        containers = (*ended, *_containers(invocation, sandbox))
    relays = 0
    try:
        manager = relay.Manager(relay.environment(invocation.user.environ, invocation.user.uid))
        relays = manager.stop_all(sandbox)
    except CorralError as error:
        # Without a user manager no relay can run either.
        console.detail(error.message)
    with console.step(f"network of {sandbox.id}", minor=True):
        strangers = network.remove(invocation.api, sandbox, invocation.user.uid)
    _sessions(invocation, sandbox, paths)
    return Removed(containers, relays, strangers is not None, tuple(strangers or ()), unit)


def _unit(invocation: Invocation, sandbox: Sandbox) -> tuple[str, tuple[str, ...]]:
    """Stop what would start the agent again.

    Returns:
        its name when it will at the next boot, and the containers that ended with it.
    """
    manager = units.Manager(invocation.user)
    if not manager.file(sandbox).exists():
        return "", ()
    before = _names(invocation, sandbox)
    with invocation.console.step(f"unit of {sandbox.id}", minor=True):
        manager.stop(sandbox)
    manager.tidy(sandbox)
    ended = tuple(sorted(before - _names(invocation, sandbox)))
    return (units.unit_of(sandbox) if manager.enabled(sandbox) else ""), ended


def _names(invocation: Invocation, sandbox: Sandbox) -> set[str]:
    rows = engine.sandbox_containers(invocation.api, sandbox.id, invocation.user.uid)
    return {engine.container_name(row) for row in rows}


def _containers(invocation: Invocation, sandbox: Sandbox) -> tuple[str, ...]:
    from docker.errors import NotFound

    names = []
    found = engine.sandbox_containers(invocation.api, sandbox.id, invocation.user.uid)
    # Whoever ends in order may have something to say to the world until then.
    for entry in sorted(found, key=_is_proxy):
        name = engine.container_name(entry)
        with engine.errors(f"stopping {name}"), contextlib.suppress(NotFound):
            invocation.api.stop(entry["Id"], timeout=GRACE)
        engine.remove_container(invocation.api, entry["Id"])
        with contextlib.suppress(EnforcerError):
            invocation.enforcer.withdraw(entry["Id"])
        names.append(name)
    return tuple(names)


def _is_proxy(entry: Mapping[str, Any]) -> bool:
    return (entry.get("Labels") or {}).get(LABEL_SERVICE) == proxying.SERVICE


def _sessions(invocation: Invocation, sandbox: Sandbox, paths: StatePaths) -> None:
    """Remove what sessions left behind, but not of one that started meanwhile."""
    alive = engine.sandbox_containers(invocation.api, sandbox.id, invocation.user.uid)
    keep = [str((entry.get("Labels") or {}).get(LABEL_SESSION)) for entry in alive]
    for session in state.sessions_of(paths):
        # One that somebody looks after is told by who does.
        if session not in keep and attended.attended(paths.session(session)) is False:
            leftovers.tell(invocation, paths, session)
    state.remove_sessions(paths, keep=keep)
