"""A sandbox's proxy among the containers that Docker lists: which it is, and who needs it. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from ipaddress import AddressValueError, IPv4Address
from typing import Any

from corral import engine
from corral.subnets import Plan
from policy import proxying
from policy.container import ENTRYPOINT
from policy.declaration import LABEL_EGRESS, LABEL_SCHEMA, LABEL_SERVICE, LABEL_SESSION, SCHEMA, Declaration
from policy.errors import PolicyError
from policy.identity import Sandbox
from policy.records import dataclass

ARGV = (
    proxying.PROGRAM,
    *("--listen", f"0.0.0.0:{proxying.PORT}"),
    *("--dial", f"{proxying.DIAL_TARGET}/{proxying.DIAL_SOCKET}"),
)
# Docker's words for the first seconds.
_YOUNG = re.compile(r"Up (?:Less than a second|[1-9] seconds?)")
RUNNING = frozenset({"running", "paused", "restarting"})


@dataclass(frozen=True)
class Found:
    """The proxy that there is. ``address`` is empty when it is on no network."""

    ident: str
    name: str
    state: str
    image: str
    command: str
    schema: str
    address: str
    status: str = ""

    @property
    def young(self) -> bool:
        """Whether it was started just now: its gate may not have opened yet."""
        return _YOUNG.fullmatch(self.status) is not None


def session_of(sandbox: Sandbox) -> str:
    """Return the id that a sandbox's proxy has where sessions have theirs."""
    return sandbox.token


def of(rows: Iterable[Mapping[str, Any]], sandbox: Sandbox) -> Found | None:
    """Return the proxy among Docker's list entries of a sandbox's containers."""
    for row in rows:
        labels = row.get("Labels") or {}
        if labels.get(LABEL_SERVICE) == proxying.SERVICE:
            endpoints = (row.get("NetworkSettings") or {}).get("Networks") or {}
            return Found(
                ident=str(row["Id"]),
                name=engine.container_name(row),
                state=str(row.get("State", "")),
                image=str(row.get("ImageID", "")),
                command=str(row.get("Command", "")),
                schema=str(labels.get(LABEL_SCHEMA, "")),
                address=str((endpoints.get(sandbox.network) or {}).get("IPAddress") or ""),
                status=str(row.get("Status", "")),
            )
    return None


def serves(found: Found, plan: Plan) -> bool:
    """Say whether it runs, where sessions of this network reach it."""
    try:
        return found.state == "running" and IPv4Address(found.address) in plan.subnet
    except AddressValueError:
        return False


def current(found: Found, image: str) -> bool:
    """Say whether it is what would be made now."""
    wanted = (image, " ".join((ENTRYPOINT, *ARGV)), str(SCHEMA))
    return (found.image, found.command, found.schema) == wanted


def users(rows: Iterable[Mapping[str, Any]], alive: Callable[[str], bool | None], own: str = "") -> list[str]:
    """Return the ids of the sessions that need the proxy: they run, or are about to.

    Args:
        rows: Docker's list entries of the sandbox's containers.
        alive: whether somebody looks after a session; None: that is not known.
        own: a session that does not count.
    """
    return [
        session
        for session, declared in _living(rows, alive)
        if session != own and (declared is None or declared.proxied)
    ]


def serving(rows: Iterable[Mapping[str, Any]], port: int, alive: Callable[[str], bool | None]) -> list[str]:
    """Return the ids of the sessions that reach a service of the host on a port; see ``users``."""
    return [
        session
        for session, declared in _living(rows, alive)
        if declared is not None and any(service.port == port for service in declared.host_services)
    ]


def _living(
    rows: Iterable[Mapping[str, Any]], alive: Callable[[str], bool | None]
) -> Iterator[tuple[str, Declaration | None]]:
    """Yield sessions that run, or are about to, and what they declare; None: another version's."""
    for row in rows:
        labels = row.get("Labels") or {}
        session, now = str(labels.get(LABEL_SESSION, "")), row.get("State")
        if labels.get(LABEL_SERVICE) == proxying.SERVICE:
            continue
        if now in RUNNING or (now == "created" and alive(session) is not False):
            yield session, _declared(str(labels.get(LABEL_EGRESS, "")))


def _declared(label: str) -> Declaration | None:
    try:
        return Declaration.from_label(label)
    except PolicyError:
        return None
