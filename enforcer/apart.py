"""Containers that corral started without a network of its own: nothing in the kernel is theirs. Pure.

One without a network needs no rule; one on the host's network is fenced by none. Both are told of, neither is
a session. A container that says so and is connected otherwise is judged like any other, and gets nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from policy.connection import APART, HOST
from policy.declaration import LABEL_CONNECTION, LABEL_SANDBOX, LABEL_SERVICE, LABEL_SESSION
from policy.identity import SANDBOX_ID, SESSION_ID


@dataclass(frozen=True)
class Apart:
    """One such container; ``connection`` is one of ``policy.connection.APART``."""

    container: str
    name: str
    sandbox: str
    service: str
    session: str
    connection: str
    running: bool

    def row(self) -> dict[str, Any]:
        """Return it as a row of ``status``."""
        return {
            "container": self.container,
            "name": self.name,
            "sandbox": self.sandbox,
            "service": self.service,
            "session": self.session,
            "connection": self.connection,
            "enforced": self.connection != HOST,
            "state": "running" if self.running else "ready",
        }


def claimed(inspect: Mapping[str, Any]) -> str:
    """Return the connection that a container's label names and its configuration confirms, or nothing."""
    labels = (inspect.get("Config") or {}).get("Labels") or {}
    connection = str(labels.get(LABEL_CONNECTION, ""))
    mode = str((inspect.get("HostConfig") or {}).get("NetworkMode", ""))
    return connection if connection in APART and mode == connection else ""


def parse(inspect: Mapping[str, Any]) -> Apart | None:
    """Read ``GET /containers/<id>/json`` of a declared container; None when it is not of this kind."""
    labels = (inspect.get("Config") or {}).get("Labels") or {}
    connection = claimed(inspect)
    attached = set((inspect.get("NetworkSettings") or {}).get("Networks") or {})
    sandbox, session = str(labels.get(LABEL_SANDBOX, "")), str(labels.get(LABEL_SESSION, ""))
    if not connection or attached - {connection}:
        return None
    if not SANDBOX_ID.fullmatch(sandbox) or not SESSION_ID.fullmatch(session):
        return None
    return Apart(
        container=str(inspect.get("Id")),
        name=str(inspect.get("Name", "")).lstrip("/"),
        sandbox=sandbox,
        service=str(labels.get(LABEL_SERVICE, "")),
        session=session,
        connection=connection,
        running=bool((inspect.get("State") or {}).get("Running")),
    )
