"""Sandboxes without a network of their own: what is told of them, and what the host can see. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from corral.checks import Check
from policy.connection import HOST, NONE
from policy.errors import PolicyError
from policy.loader import LoadedPolicy

NOT_ENFORCED = (
    "NOT ENFORCED: egress.mode is host, so this container is on this host's own network",
    "  it reaches every address, every service on 127.0.0.1, and abstract unix sockets of this host",
    "  (a display, a session bus), and others can reach what it listens on; no rule is in its way",
    "  files, capabilities, limits and secrets are as the policy has them",
)
_REASONS = {
    NONE: "egress.mode is none: the container has no network that rules could be about",
    HOST: "egress.mode is host, NOT ENFORCED: no rule of the kernel's is about this container",
}
# What the host sees of a container that has a network of its own.
HOST_CHECKS = ("live-rules", "skeleton-in-path", "backstop")
HOSTS = "127.0.0.1 localhost\n127.0.0.1 {}\n"


def warning(loaded: LoadedPolicy) -> tuple[str, ...]:
    """Return what has to be said at every start; nothing for most policies."""
    if loaded.connection != HOST:
        return ()
    if not loaded.policy.egress.allow:
        return NOT_ENFORCED
    return (*NOT_ENFORCED, "  egress.allow has no effect: everything is allowed")


def refuse_names(loaded: LoadedPolicy) -> None:
    """Refuse to change what a sandbox without a network of its own may reach.

    Raises:
        PolicyError: it has none.
    """
    if loaded.connection == NONE:
        raise PolicyError(
            "egress.mode is none: there is no network to reach anything by", "set egress.mode: allowlist"
        )
    if loaded.connection == HOST:
        raise PolicyError(
            "egress.mode is host: nothing is enforced, so there is nothing to allow, deny or refresh",
            "set egress.mode: allowlist",
        )


def verdict(loaded: LoadedPolicy) -> tuple[bool, str] | None:
    """Return whether every connection is allowed or none, and why; None when names decide."""
    return {
        NONE: (False, "egress.mode is none: there is no network"),
        HOST: (True, "NOT ENFORCED: egress.mode is host, so whatever this host reaches is reached"),
    }.get(loaded.connection)


def host_side(inspect: Mapping[str, Any], connection: str, session: str = "") -> list[Check]:
    """Return what the host sees of such a container.

    Args:
        inspect: Docker's account of it.
        connection: what its policy says, one of ``policy.connection.APART``.
        session: see ``Check``.
    """
    reason = _REASONS[connection]
    names = HOST_CHECKS[:1] if session else HOST_CHECKS
    found = [Check(name, "skip", reason, session) for name in names]
    if connection == HOST:
        return [Check("no-network", "skip", reason, session), *found]
    mode = str((inspect.get("HostConfig") or {}).get("NetworkMode"))
    extra = set((inspect.get("NetworkSettings") or {}).get("Networks") or {}) - {NONE}
    wrong = [f"Docker gave it the network mode {mode}"] if mode != NONE else []
    wrong += [f"Docker attached it to {', '.join(sorted(extra))}"] if extra else []
    return [Check("no-network", "fail" if wrong else "ok", "; ".join(wrong), session), *found]


def ready(connection: str) -> Check:
    """Return ``session-ready`` for a container that nobody has to make anything true for."""
    return Check("session-ready", "skip", _REASONS[connection])
