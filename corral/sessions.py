"""The sessions there are: found in Docker by their labels, and what was noted about each when it was made."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral import attended, engine
from corral.notes import LEAVABLE, Note, read_note, write_note
from corral.plain import cleaned, columns
from policy import proxying
from policy.declaration import (
    LABEL_PROJECT,
    LABEL_PURPOSE,
    LABEL_SANDBOX,
    LABEL_SERVICE,
    LABEL_SESSION,
    LABEL_UID,
)
from policy.errors import ArgumentError, CorralError
from policy.identity import SANDBOX_ID, SESSION_ID, Sandbox, StatePaths
from policy.records import dataclass

if TYPE_CHECKING:
    from docker.api.client import APIClient

# Also what is defined where less is imported.
__all__ = ["LEAVABLE", "Note", "read_note", "write_note"]

DAEMON = "daemon"
VERIFY = "verify"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
HEADER = ("SANDBOX", "SESSION", "NAME", "KIND", "STATE", "ADDRESS", "AGE", "PROJECT")
HEADLINE = "no sessions"


NO_NOTE = Note()


@dataclass(frozen=True)
class Session:
    """A container of a sandbox. ``created`` is wall time; ``status`` is Docker's own words.

    ``attended``: whether somebody's corral looks after it, None when that is not known.
    """

    ident: str
    container: str
    sandbox: str
    session: str
    service: str
    purpose: str
    project: str
    state: str
    status: str
    created: float
    address: str
    note: Note = NO_NOTE
    attended: bool | None = None

    @property
    def left(self) -> bool:
        """Whether it is somebody's session, runs, and nobody's corral looks after it."""
        return self.running and self.purpose in LEAVABLE and self.attended is False

    @property
    def leftover(self) -> bool:
        """Whether it has ended, or never began, and nobody will remove it. What is not known is none."""
        ended = self.state in {"exited", "created", "dead"} and self.attended is False
        return ended and self.purpose != DAEMON and not self.note.keep

    @property
    def running(self) -> bool:
        """Whether a program runs in it."""
        return self.state in {"running", "paused", "restarting"}

    @property
    def name(self) -> str:
        """What its user calls it."""
        return self.note.name or self.session


def valid_name(text: str) -> str:
    """Return a name for a session.

    Raises:
        ArgumentError: it is none.
    """
    if not NAME.fullmatch(text):
        raise ArgumentError(
            f"{text[:80]!r} is no name for a session",
            "use letters, digits, '.', '_' and '-' (at most 64, the first a letter or digit)",
        )
    return text


def all_of(api: APIClient, uid: int, data: Path) -> list[Session]:
    """Return every session of a user, oldest first. The proxies of sandboxes are none.

    Args:
        api: the engine.
        uid: the user.
        data: where the sandboxes have their files.

    Raises:
        EngineError: Docker does not answer.
    """
    return [one for one in _every(api, uid, data) if one.service != proxying.SERVICE]


def proxies(api: APIClient, uid: int, data: Path) -> list[Session]:
    """Return the proxies of a user's sandboxes, as if they were sessions; see ``all_of``."""
    return [one for one in _every(api, uid, data) if one.service == proxying.SERVICE]


def _every(api: APIClient, uid: int, data: Path) -> list[Session]:
    with engine.errors("listing containers"):
        rows = api.containers(all=True, filters={"label": [f"{LABEL_UID}={uid}", LABEL_SANDBOX]})
    return sorted(_sessions(rows, data), key=lambda found: (found.created, found.session))


def _sessions(rows: Iterable[Mapping[str, Any]], data: Path) -> Iterable[Session]:
    for row in rows:
        labels = row.get("Labels") or {}
        sandbox, session = str(labels.get(LABEL_SANDBOX)), str(labels.get(LABEL_SESSION))
        if SANDBOX_ID.fullmatch(sandbox) and SESSION_ID.fullmatch(session):
            yield Session(
                ident=str(row["Id"]),
                container=engine.container_name(row),
                sandbox=sandbox,
                session=session,
                service=str(labels.get(LABEL_SERVICE, "")),
                purpose=str(labels.get(LABEL_PURPOSE, "")),
                project=str(labels.get(LABEL_PROJECT, "")),
                state=str(row.get("State", "")),
                status=str(row.get("Status", "")),
                created=float(row.get("Created") or 0),
                address=_address(row, Sandbox(sandbox).network),
                note=read_note(StatePaths(data / sandbox), session),
                attended=attended.attended(StatePaths(data / sandbox).session(session)),
            )


def _address(row: Mapping[str, Any], network: str) -> str:
    endpoint = ((row.get("NetworkSettings") or {}).get("Networks") or {}).get(network) or {}
    return str(endpoint.get("IPAddress") or (endpoint.get("IPAMConfig") or {}).get("IPv4Address") or "")


def pick(found: Sequence[Session], given: str | None, *, what: str, running: bool) -> Session:
    """Return the session that is meant: the one of that id or name, or the only one there is.

    Args:
        found: those to choose from.
        given: id, its beginning, or name; None: whichever there is.
        what: what is done, for messages: "attach to".
        running: only those that run are meant.

    Raises:
        CorralError: none fits, or several do.
    """
    able = [one for one in found if one.purpose != VERIFY and (one.running or not running)]
    if given is None:
        chosen = [one for one in able if one.running] or able[-1:]
    else:
        named = [one for one in able if given in (one.session, one.note.name)]
        chosen = named or [one for one in able if len(given) >= 4 and one.session.startswith(given)]
        if len(chosen) > 1:
            # A name may be used again when the session before has ended.
            chosen = [one for one in chosen if one.running] or chosen[-1:]
    if len(chosen) == 1:
        return chosen[0]
    if chosen:
        listed = ", ".join(one.name for one in chosen)
        raise CorralError(f"there are {len(chosen)} sessions to {what}: {listed}", "name one of them")
    if given is not None:
        stopped = [one for one in found if given in (one.session, one.note.name)]
        if stopped:
            raise CorralError(
                f"the session {given} has ended ({stopped[-1].status})", "corral logs shows its output"
            )
        raise CorralError(f"there is no session {given[:80]!r} here", "corral ps lists all of them")
    raise CorralError(
        f"there is no session here to {what}", "corral ps lists all; corral run or corral up start one"
    )


def free_name(found: Iterable[Session], name: str) -> None:
    """Refuse a name that a running session has.

    Raises:
        CorralError: it is taken.
    """
    taken = next((one for one in found if one.running and name in (one.note.name, one.session)), None)
    if taken is not None:
        raise CorralError(f"the session {name} runs already", f"corral attach {name}, or choose another name")


def valid_id(text: str) -> str:
    """Return an id for a session.

    Raises:
        ArgumentError: it is none.
    """
    if not SESSION_ID.fullmatch(text):
        raise ArgumentError(
            f"{text[:80]!r} is no id of a session",
            "an id is eight hexadecimal digits (0-9, a-f); what another program calls it goes into --name",
        )
    return text


def free_id(found: Iterable[Session], ident: str) -> None:
    """Refuse an id that a session of any sandbox has or had, as long as something of it is there.

    Raises:
        CorralError: it is taken.
    """
    taken = next((one for one in found if one.session == ident), None)
    if taken is not None:
        what = "runs already" if taken.running else "has ended, and its container is there"
        raise CorralError(f"the session {ident} {what}", "choose another id, or leave out --session-id")


def other_policy(found: Iterable[Session], policy: str) -> str:
    """Return what is to be said of sessions that run under another policy than this hash's; maybe nothing."""
    names = [
        one.name
        for one in found
        if one.running and one.purpose in LEAVABLE and one.note.policy not in {"", policy}
    ]
    if not names:
        return ""
    verbs = ("was", "keeps") if len(names) == 1 else ("were", "keep")
    listed = ", ".join(names)
    return f"the policy changed: {listed} {verbs[0]} started under the one of before, and {verbs[1]} to it"


def as_json(found: Iterable[Session]) -> list[dict[str, Any]]:
    """Return rows for programs."""
    return [
        {
            "sandbox": one.sandbox,
            "session": one.session,
            "name": one.name,
            "purpose": one.purpose,
            "service": one.service,
            "state": one.state,
            "status": one.status,
            "created": one.created,
            "address": one.address if one.running else None,
            "container": one.container,
            "project": one.project,
            "attended": one.attended if one.purpose != DAEMON else None,
        }
        for one in found
    ]


def render(found: Sequence[Session], now: float) -> str:
    """Return the text of ``corral ps``, without a final newline."""
    if not found:
        return HEADLINE
    rows = [
        (
            one.sandbox,
            one.session,
            one.note.name or "-",
            one.purpose,
            _told(one),
            one.address if one.running and one.address else "-",
            age(now - one.created),
            one.project,
        )
        for one in found
    ]
    return "\n".join(columns([HEADER, *(tuple(map(str, cleaned(list(row)))) for row in rows)]))


def _told(one: Session) -> str:
    if one.left:
        return f"{one.state}, left"
    return one.state if one.running else one.status.lower() or one.state


def age(seconds: float) -> str:
    """Return a length of time in its largest fitting unit."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"
