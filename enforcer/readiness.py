"""Whether a container may start, and why not. Decided from what is known; changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from enforcer import asking, pins
from enforcer.sessions import Session
from enforcer.writerclient import Held
from policy.errors import NotReadyError

Shown = Mapping[str, Mapping[str, tuple[str, ...]]]


class Known(Protocol):
    """What Docker has said; see tracker.Tracker."""

    sessions: dict[str, Session]
    unseen: dict[str, str]
    unfit: dict[str, str]
    lost_reason: str | None


def judge(container: str, known: Known, state: pins.State, shown: Shown) -> dict[str, Any] | None:
    """Return what a container that may start is told; None: it has to wait.

    Args:
        container: its id.
        known: what Docker has.
        state: the names of all.
        shown: container id -> name -> addresses, of those for whom the kernel holds all that is wanted.

    Raises:
        NotReadyError: it may not start as it is.
    """
    session = known.sessions.get(container)
    if session is None:
        if known.lost_reason is not None or container in known.unseen:
            return None
        why = known.unfit.get(container, "it was not looked at")
        raise NotReadyError(
            f"the enforcer does not know this container: {why}", "corral run creates what it accepts"
        )
    if session.problems:
        raise NotReadyError(
            "the container is not what corral would have created: " + "; ".join(session.problems),
            "another program changed it, or a default of the engine did (/etc/docker/daemon.json)",
        )
    ready = pins.readiness(state, container, session.declaration.allow_stale)
    if ready.pending:
        return None
    if ready.failed:
        lines = "\n".join(f"  {name}: {reason}" for name, reason in ready.failed)
        raise NotReadyError(
            f"allowed names without a usable address:\n{lines}",
            "correct the name in corral.yaml or mark it optional: true there; when it is one of the "
            "profile's own: egress.profile_defaults: false",
        )
    if container not in shown:
        return None
    return {
        "names": {name: list(addresses) for name, addresses in shown[container].items()},
        "warnings": [
            *(f"{name}: {reason}" for name, reason in ready.warnings),
            *_narrowed(session, known.sessions.values()),
        ],
    }


def _narrowed(session: Session, sessions: Collection[Session]) -> list[str]:
    if not session.proxied:
        return []
    return asking.narrowed(session, asking.askers(sessions, session.sandbox.id))


def why_not(
    container: str, known: Known, state: pins.State, held: Held | None, problems: Collection[str]
) -> str:
    """Return why a container that waits cannot start yet, in one line."""
    parts = [*problems, *(text for ident, text in known.unseen.items() if ident == container)]
    if held is not None:
        # While the writer finds something wrong with the rules it grants nothing new.
        parts += held.standing
    if container in state.containers:
        pending = sorted(pins.readiness(state, container).pending)
        parts += [f"still resolving {', '.join(pending)}"] if pending else []
    return "; ".join(parts) or "the kernel does not hold all entries yet"
