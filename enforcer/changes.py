"""Requests that change or question what running sessions may reach: allow, deny, refresh, check.

An answer is given when the kernel and the hosts files were read back, or the reason why not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from enforcer import asking, hostsfile, pins, verdicts
from enforcer.names import Names
from enforcer.overrides import LONGEST, MAX_PORTS, Overrides, asks, is_pattern
from enforcer.sessions import Session
from enforcer.tracker import Tracker
from enforcer.writerclient import Held
from policy import proxying
from policy.declaration import PROXY, Declaration
from policy.errors import CorralError, EnforcerError, NotReadyError
from policy.hosts import HostError, is_address, parse_host
from policy.patterns import Zone, parse_pattern

log = logging.getLogger("corral.enforcer")

# Seconds: a resolution takes at most 6, and the kernel is written after it.
PATIENCE = 12.0
DNS_PORTS = frozenset({53, 853})
LOG = "journalctl --user -u corral-enforcer"


class Kernel(Protocol):
    """What the service knows about what it wrote."""

    held: Held | None
    applied: int

    @property
    def satisfied(self) -> frozenset[str]:
        """The containers that have all that was wanted for them when the kernel was last written."""

    def proxied(self, sandbox: str) -> bool:
        """Tell whether a sandbox has a proxy that can ask for names."""

    async def until(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait until a condition holds, looking whenever something moved; False: not in time."""


class Changes:
    """See the module. Everything runs on the service's loop; one request changes things at a time."""

    def __init__(
        self, kernel: Kernel, names: Names, tracker: Tracker, clock: Callable[[], float],
        read: Callable[[], Awaitable[Held]],
    ) -> None:  # fmt: skip
        self._kernel = kernel
        self._names = names
        self._tracker = tracker
        self._clock = clock
        self._read = read
        self._one = asyncio.Lock()

    async def allow(
        self, sandbox: str, host: str, ports: tuple[int, ...], seconds: float | None, force: bool
    ) -> dict[str, Any]:
        """Let the running sessions of a sandbox reach a name, until they end or for ``seconds``.

        A zone or an expression, and any name in mode proxy, may be asked for from then on, and nothing is
        resolved before it is.

        Raises:
            NotReadyError: the name has no usable address; nothing was changed.
            EnforcerError: no session, nobody who could be asked, a name or port that no policy may have, or
                the kernel was not written.
        """
        name = _entry(host, force)
        if not ports or len(ports) > MAX_PORTS or any(not 0 < p < 65536 or p in DNS_PORTS for p in ports):
            raise EnforcerError("a port that no policy may open")
        if seconds is not None and not 0 < seconds <= LONGEST:
            raise EnforcerError(f"a time of {seconds} s", f"at most {LONGEST / 86400:.0f} days")
        async with self._one:
            sessions = _able(self._sessions(sandbox), name)
            pinned = [session for session in sessions if _pins(session, name)]
            until = None if seconds is None else self._clock() + seconds
            before = {session.container: session.overrides for session in sessions}
            try:
                for session in sessions:
                    grant = Overrides.allow if session in pinned else Overrides.allow_asking
                    self._tracker.override(session.container, partial(_grant, grant, name, ports, until))
                await self._settled(sessions, [name])
                failed = self._failure(pinned, name) if pinned else None
                if failed is not None:
                    raise NotReadyError(
                        f"{name} is not allowed: it has no usable address ({failed})", "correct the name"
                    )
            except BaseException as error:
                # No waiting here: whoever cancels this, nobody can cancel that.
                unkept = self._override_all({ident: partial(_back, old) for ident, old in before.items()})
                if unkept and isinstance(error, CorralError):
                    raise EnforcerError("\n".join([error.message, *unkept]), error.hint) from error
                raise
            return {
                "host": name,
                "ports": list(ports),
                "seconds": seconds,
                "sessions": self._rows(sessions, name),
            }

    async def deny(self, sandbox: str, host: str) -> dict[str, Any]:
        """Take a name from the running sessions of a sandbox until they end; open connections are cut.

        Raises:
            EnforcerError: no session has the name, or the kernel was not written.
        """
        name = _entry(host, force=True)
        async with self._one:
            known = [s for s in self._tracker.known(sandbox) if s.service != proxying.SERVICE]
            meant = {s.container: text for s in known if (text := _had(s, name)) is not None}
            sessions = [session for session in known if session.container in meant]
            if not known:
                raise EnforcerError(f"no session of {sandbox} is running", "corral run starts one")
            if not sessions:
                _refuse_open(known)
                raise EnforcerError(f"no running session of {sandbox} may reach {name}", "see: corral status")
            failed = self._override_all(
                {s.container: partial(_deny, s.declaration, meant[s.container]) for s in sessions}
            )
            try:
                await self._settled(sessions, [])
            except EnforcerError as error:
                failed.append(error.message)
            if failed:
                raise EnforcerError("\n".join(failed), LOG)
            _refuse_open(known)
            return {"host": name, "sessions": [_session(session) for session in sessions]}

    def _override_all(self, changes: Mapping[str, Callable[[Overrides], Overrides]]) -> list[str]:
        """Close in every container, whatever fails in one; return what could not be kept and why."""
        failed = []
        for ident, change in changes.items():
            try:
                self._tracker.override(ident, change)
            except EnforcerError as error:
                log.error("container %.12s: %s", ident, error.message)
                failed.append(error.message)
        return failed

    async def refresh(self, sandbox: str | None, hosts: Iterable[str]) -> dict[str, Any]:
        """Ask for names again, now, and bring kernel and hosts files up to the answers.

        Args:
            sandbox: whose names; None: of all this user's sandboxes.
            hosts: only these; none: every name.

        Raises:
            EnforcerError: no such session or name, or not done in time.
        """
        wanted = {_name(host, force=True) for host in hosts}
        sessions = self._sessions(sandbox)
        known = {name.host for session in sessions for name in session.names}
        if unknown := wanted - known:
            raise EnforcerError(
                f"no running session may reach {', '.join(sorted(unknown))}", "see: corral status"
            )
        chosen = sorted(wanted or known)
        before = {name: self._names.state.names.get(name) for name in chosen}
        self._names.step(pins.Refresh(tuple(chosen), discard=True))
        asked = {name: record.attempts for name, record in before.items() if record is not None}
        done = await self._kernel.until(lambda: self._attempted(asked), PATIENCE)
        await self._written(sessions)
        rows = []
        for name in chosen:
            record, old = self._names.state.names.get(name), before[name]
            if record is not None:
                rows.append(
                    {
                        "name": name,
                        "state": record.state.value,
                        "before": list(old.latest) if old is not None else [],
                        "addresses": list(record.latest),
                        "error": record.error,
                        "optional": all(
                            own.optional for session in sessions for own in session.names if own.host == name
                        ),
                    }
                )
        if not done:
            raise EnforcerError("not every name was answered for in time", LOG)
        return {"names": rows, "sessions": [_session(session) for session in sessions]}

    async def check(self, sandbox: str, host: str, port: int, ask: bool) -> dict[str, Any]:
        """Say what would happen to a connection from each running session, and change nothing.

        ``ask``: resolve and vet the name too, as if it were allowed.

        Raises:
            EnforcerError: not a name nor an address; the kernel cannot be read.
        """
        known = list(self._tracker.sessions.values())
        found = [s for s in known if s.sandbox.id == sandbox and s.service != proxying.SERVICE]
        askers = tuple(asking.askers(known, sandbox))
        held = await self._read()
        state = self._names.state
        rows = []
        for session in found:
            sight = verdicts.Sight(
                session,
                tuple(entry for entry in held.pins if entry.src == session.address),
                tuple(entry for entry in held.host if entry.src == session.address),
                hostsfile.read(session.hosts_file),
                any(row.src == session.address for row in held.open),
                askers,
                self._kernel.proxied(sandbox),
            )
            verdict = verdicts.judge(sight, state, host, port)
            rows.append(
                {
                    **_session(session),
                    "allowed": verdict.allowed,
                    "reason": verdict.reason,
                    "addresses": list(verdict.addresses),
                    "seconds": self._left(session, host, port),
                }
            )
        answer: dict[str, Any] = {"host": host, "port": port, "sessions": rows}
        if ask and not is_address(host):
            heard = verdicts.resolution(await self._names.ask(_name(host, force=True)), state.vetting)
            answer["resolution"] = {
                "addresses": list(heard.addresses),
                "refused": dict(heard.refused),
                "error": heard.error,
            }
        return answer

    def _left(self, session: Session, host: str, port: int) -> float | None:
        until = session.overrides.ends(host, session.declaration).get(port)
        return None if until is None else max(0.0, until - self._clock())

    def _sessions(self, sandbox: str | None) -> list[Session]:
        found = [
            session
            for session in self._tracker.sessions.values()
            if not session.problems
            and sandbox in (None, session.sandbox.id)
            and session.service != proxying.SERVICE
        ]
        if not found:
            where = f"of {sandbox} " if sandbox else ""
            raise EnforcerError(f"no session {where}is running", "corral run starts one")
        return found

    async def _settled(self, sessions: list[Session], hosts: list[str]) -> None:
        """Wait until these names were asked for every session and what followed was read back."""

        def asked() -> bool:
            return not any(
                set(hosts) & self._names.pending(session.container)
                for session in sessions
                if session.container in self._names.state.containers
            )

        await self._kernel.until(asked, PATIENCE)
        await self._written(sessions)

    async def _written(self, sessions: list[Session]) -> None:
        generation = self._names.state.generation

        def written() -> bool:
            alive = {s.container for s in sessions} & self._names.state.containers.keys()
            ready = {c for c in alive if not self._names.pending(c)}
            return self._kernel.applied >= generation and ready <= self._kernel.satisfied

        if not await self._kernel.until(written, PATIENCE):
            raise EnforcerError("the kernel does not hold it yet; it is tried on", "see: corral status")

    def _attempted(self, asked: dict[str, int]) -> bool:
        names = self._names.state.names
        return all(name not in names or names[name].attempts > count for name, count in asked.items())

    def _failure(self, sessions: list[Session], name: str) -> str | None:
        published = pins.published(self._names.state)
        alive = [session.container for session in sessions if session.container in published]
        if not alive:
            return "its session ended"
        if all(published[container].get(name) for container in alive):
            return None
        record = self._names.state.names.get(name)
        return (record.error if record is not None else None) or "no address"

    def _rows(self, sessions: list[Session], name: str) -> list[dict[str, Any]]:
        published = pins.published(self._names.state)
        return [
            {**_session(session), "addresses": list(published.get(session.container, {}).get(name, ()))}
            for session in sessions
        ]


def _refuse_open(sessions: Iterable[Session]) -> None:
    if any(session.open for session in sessions):
        raise EnforcerError(
            "egress.mode is open: it reaches all public addresses, and there is no list of names to change",
            "set egress.mode: allowlist, and run it again",
        )


def _able(sessions: list[Session], name: str) -> list[Session]:
    """Return the sessions that an entry can be added to.

    Raises:
        EnforcerError: there is none.
    """
    _refuse_open(sessions)
    if not is_pattern(name):
        return sessions
    able = [session for session in sessions if asks(session.declaration)]
    if not able:
        raise EnforcerError(
            f"{name} stands for many names, and no running session has a proxy that is asked for them",
            "add it to egress.allow in corral.yaml and start a new session; or allow the names one by one",
        )
    return able


def _pins(session: Session, name: str) -> bool:
    return session.declaration.mode != PROXY and not is_pattern(name)


def _grant(
    how: Callable[[Overrides, str, tuple[int, ...], float | None], Overrides],
    name: str,
    ports: tuple[int, ...],
    until: float | None,
    now: Overrides,
) -> Overrides:
    return how(now, name, ports, until)


def _had(session: Session, name: str) -> str | None:
    """Return what a session may reach or ask for and is to lose, as it is written there."""
    asked = [entry.host for entry, _ in session.overrides.asked(session.declaration)]
    if is_pattern(name):
        return next((text for text in asked if asking.parsed(text) == asking.parsed(name)), None)
    return name if any(own.host == name for own in session.names) or asking.entries(session, name) else None


def _deny(declaration: Declaration, name: str, now: Overrides) -> Overrides:
    asked = [entry.host for entry, _ in now.asked(declaration) if entry.host != name]
    many = not is_pattern(name) and any(asking.matches(text, name) for text in asked)
    return now.deny(name, declaration, matched=many)


def _back(old: Overrides, now: Overrides) -> Overrides:
    # Its place in the hosts file stays taken: nothing there ever moves.
    return replace(old, listed=now.listed)


def _session(session: Session) -> dict[str, Any]:
    return {
        "container": session.container,
        "sandbox": session.sandbox.id,
        "service": session.service,
        "session": session.session,
    }


def _entry(text: str, force: bool) -> str:
    """Return an entry of an allowlist: a name in its one form, or what stands for many as it is written."""
    if not is_pattern(text):
        return _name(text, force)
    try:
        pattern = parse_pattern(text, force=force)
    except HostError as error:
        raise EnforcerError(f"{text!r} cannot be allowed: {error.what}", error.fix) from error
    return f"*.{pattern.suffix}" if isinstance(pattern, Zone) else text


def _name(host: str, force: bool) -> str:
    try:
        return parse_host(host, force=force)
    except HostError as error:
        raise EnforcerError(f"{host!r} cannot be allowed: {error.what}", error.fix) from error
