"""What may be asked for by name, of a sandbox's proxy or of the answerer: policies to a verdict. Pure.

A proxy does not know which session speaks to it. What it may be asked for is therefore what every living
session that can reach it allows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from enforcer.denied import VERIFY
from enforcer.sessions import Session
from policy.asking import Terms, loosest, strictest
from policy.declaration import Pattern as Entry
from policy.hosts import HostError
from policy.patterns import Exact, Pattern, Regex, Zone, parse_pattern


@dataclass(frozen=True, slots=True)
class Permit:
    """A name may be had on a port; see ``policy.declaration.Pattern``. ``until``: when that ends.

    ``entry`` is what allows it, as it is written.
    """

    protocol: Literal["tls", "tcp"]
    sni: bool
    until: float
    entry: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A name may not be had, in one line of ASCII."""

    text: str


@lru_cache(maxsize=4096)
def parsed(text: str) -> Pattern | None:
    """Return an entry's meaning; None, which matches nothing, for one that no policy may have."""
    try:
        # Whether a public resolver is meant was asked of whoever wrote it.
        return parse_pattern(text, force=True)
    except HostError:
        return None


@lru_cache(maxsize=32768)
def matches(text: str, name: str) -> bool:
    """Tell whether an entry means a name from ``policy.hosts.canonical_wire_name``."""
    pattern = parsed(text)
    return pattern is not None and pattern.matches(name)


def entries(session: Session, name: str) -> list[tuple[Entry, float]]:
    """Return the entries of one session that mean a name, and when each ends."""
    taken = session.overrides.taken(name)
    return [
        (entry, until)
        for entry, until in session.overrides.asked(session.declaration)
        if (entry.exact or not taken) and matches(entry.host, name)
    ]


def own(session: Session, name: str, port: int) -> Permit | Refused:
    """Judge by one session alone."""
    found = entries(session, name)
    fit = [(entry, until) for entry, until in found if port in entry.ports]
    if not fit:
        where = f"{session.service} {session.session}"
        if found:
            ports = ", ".join(map(str, sorted({port for entry, _ in found for port in entry.ports})))
            return Refused(f"{name} is allowed on port {ports} of session {where}, not on {port}")
        if session.overrides.taken(name):
            return Refused(f"corral deny took {name} back from session {where}")
        return Refused(f"{name} is not in the policy of session {where}")
    # One that names it is shown before one that stands for many.
    said = [entry for entry, _ in fit if entry.exact] or [entry for entry, _ in fit]
    terms = loosest(Terms(entry.protocol, entry.sni) for entry, _ in fit)
    return Permit(terms.protocol, terms.sni, until=max(until for _, until in fit), entry=said[0].host)


def askers(sessions: Iterable[Session], sandbox: str) -> list[Session]:
    """Return the sessions that can reach the proxy of a sandbox, and whose policies it is asked by.

    What ``corral verify`` starts is not among them while there are others: it looks, and takes nothing away.
    """
    found = [session for session in sessions if session.sandbox.id == sandbox and session.proxied]
    return [session for session in found if session.purpose != VERIFY] or found


def judge(sessions: Collection[Session], name: str, port: int) -> Permit | Refused:
    """Judge for a proxy that all of ``sessions`` can reach: each has to allow it."""
    if not sessions:
        return Refused("no session of this sandbox may ask its proxy")
    permits = []
    for session in sessions:
        found = own(session, name, port)
        if isinstance(found, Refused):
            return found
        permits.append(found)
    terms = strictest(Terms(permit.protocol, permit.sni) for permit in permits)
    until = min(permit.until for permit in permits)
    return Permit(terms.protocol, terms.sni, until, permits[0].entry)


def ports(session: Session, name: str) -> tuple[int, ...]:
    """Return on which ports the answerer may open a name for a session; none: it may not."""
    if not session.answered:
        return ()
    return tuple(sorted({port for entry, _ in entries(session, name) for port in entry.ports}))


# By container: who judged, and what they said of a name on a port.
Memory = dict[str, tuple[tuple[Session, ...], dict[tuple[str, int], float | None]]]


def permission(
    sessions: Collection[Session], memory: Memory | None = None
) -> Callable[[Session], Callable[[str, int], float | None]]:
    """Return what tells when the permission of a container for a name on a port ends; None: it has none.

    The answers hold for these sessions as they are. ``memory`` keeps what was asked for the next time, when
    the same are judged by: a container may have thousands of names open, and each is asked about each time.
    """
    kept: Memory = {} if memory is None else memory
    last = dict(kept)
    kept.clear()
    speakers: dict[str, list[Session]] = {}

    def of(session: Session) -> Callable[[str, int], float | None]:
        if session.proxy:
            box = session.sandbox.id
            judges = speakers.setdefault(box, askers(sessions, box))
        else:
            judges = [session] if session.answered else []
        before, said = last.get(session.container, ((), {}))
        if before != tuple(judges):
            said = {}
        known: dict[tuple[str, int], float | None] = {}
        _, known = kept.setdefault(session.container, (tuple(judges), known))

        def until(name: str, port: int) -> float | None:
            key = (name, port)
            if key in said:
                known[key] = said[key]
            elif key not in known:
                found = judge(judges, name, port)
                known[key] = found.until if isinstance(found, Permit) else None
            return known[key]

        return until

    return of


def narrowed(session: Session, others: Iterable[Session]) -> list[str]:
    """Return, as warnings, what a session declares and cannot ask for because of others that live."""
    found = []
    for entry, _ in session.overrides.asked(session.declaration):
        for port in entry.ports:
            for other in others:
                if other.container != session.container and not _covered(entry.host, port, other):
                    found.append(
                        f"{entry.host}: port {port} is closed while session {other.session} of this sandbox "
                        "runs, whose policy does not allow it: they share a proxy"
                    )
                    break
    return list(dict.fromkeys(found))


def _covered(text: str, port: int, other: Session) -> bool:
    pattern = parsed(text)
    if isinstance(pattern, Exact):
        return isinstance(own(other, pattern.name, port), Permit)
    for entry, _ in other.overrides.asked(other.declaration):
        if port not in entry.ports:
            continue
        wide = parsed(entry.host)
        if entry.host == text or (isinstance(wide, Zone) and _below(pattern, wide.suffix)):
            return True
    return False


def _below(pattern: Pattern | None, suffix: str) -> bool:
    if isinstance(pattern, Zone):
        return pattern.suffix == suffix or pattern.suffix.endswith("." + suffix)
    # What matches an expression lies below its tail, and has a label more.
    return isinstance(pattern, Regex) and (pattern.tail == suffix or pattern.tail.endswith("." + suffix))


__all__ = [
    "Permit",
    "Refused",
    "askers",
    "entries",
    "judge",
    "matches",
    "narrowed",
    "own",
    "parsed",
    "permission",
    "ports",
]
