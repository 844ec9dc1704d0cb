"""Sessions whose corral went away: what has ended is removed by the next start, what runs never is."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from corral import attended, engine, protect, state
from corral.context import Invocation
from corral.engine import base_url
from corral.sessions import Session
from policy.errors import CorralError, EnforcerError
from policy.identity import SESSION_ID, Sandbox, StatePaths

GRACE = 10
_CODE = re.compile(r"Exited \((\d+)\)")


def remove(invocation: Invocation, session: Session) -> None:
    """End a session and remove everything of it; what it changed of files the host executes is told.

    Raises:
        EngineError: Docker cannot.
    """
    from docker.errors import NotFound

    with engine.errors(f"stopping {session.container}"), contextlib.suppress(NotFound):
        if session.running:
            invocation.api.stop(session.ident, timeout=GRACE)
    engine.remove_container(invocation.api, session.ident)
    with contextlib.suppress(EnforcerError):
        invocation.enforcer.withdraw(session.ident)
    paths = StatePaths(invocation.data / session.sandbox)
    tell(invocation, paths, session.session)
    state.remove_session(paths, session.session)
    release_proxy(invocation, Sandbox(session.sandbox))


def release_proxy(invocation: Invocation, sandbox: Sandbox) -> None:
    """Remove a sandbox's proxy if it has one that no session needs any more; a failure is told."""
    # Most sandboxes have none, and need not know how.
    if not StatePaths(invocation.data / sandbox.id).session(sandbox.token).exists():
        return
    from corral import proxying

    try:
        proxying.release(invocation, sandbox)
    except CorralError as error:
        invocation.console.warn(error.message)


def finish(invocation: Invocation, session: Session) -> None:
    """Do what the corral of a session would have done at its end.

    Raises:
        EngineError: Docker cannot.
    """
    if not session.note.keep:
        remove(invocation, session)
        return
    with contextlib.suppress(EnforcerError):
        invocation.enforcer.withdraw(session.ident)
    release_proxy(invocation, Sandbox(session.sandbox))
    tell(invocation, StatePaths(invocation.data / session.sandbox), session.session)
    invocation.console.tell(
        f"kept: {session.container} (corral inspect, corral logs); corral down removes it"
    )


def tell(invocation: Invocation, paths: StatePaths, session: str) -> None:
    """Say what a session changed that was left to itself, and has ended."""
    try:
        protect.told_later(paths, session, invocation.user.environ, invocation.console.warn_block)
    except CorralError as error:
        invocation.console.warn(error.message)


def sweep(invocation: Invocation, found: Sequence[Session]) -> list[str]:
    """Remove what is left of sessions of one sandbox that nobody looks after; return their ids.

    Each has its lock taken first, so nobody comes to it meanwhile. A failure is told and stands in nobody's
    way.

    Args:
        invocation: who and where.
        found: the sessions of the invocation's sandbox.
    """
    paths = StatePaths(invocation.data / invocation.loaded.sandbox.id)
    removed = []
    for one in found:
        if one.leftover:
            with attended.attendance() as ours:
                if not ours.take(paths.session(one.session)):
                    continue
                restarted = " when Docker was restarted" if ended_with_engine(invocation, one) else ""
                invocation.console.tell(
                    f"{one.name} {how(one)}{restarted} and nobody looked after it: removed"
                )
                try:
                    remove(invocation, one)
                except CorralError as error:
                    invocation.console.warn(error.message)
                    continue
                removed.append(one.session)
    known = {one.session for one in found}
    for directory in orphans(paths, known):
        with attended.attendance() as ours:
            if ours.take(directory):
                # The enforcer has removed its container already, or its corral came no further.
                tell(invocation, paths, directory.name)
                state.remove_session(paths, directory.name)
                removed.append(directory.name)
    return removed


def how(session: Session) -> str:
    """Return how a session came to its end, in words."""
    code = _CODE.search(session.status)
    return f"ended with exit code {code[1]}" if code else "did not start"


def ended_with_engine(invocation: Invocation, session: Session) -> bool:
    """Say whether a session ended right before this engine was started: without live-restore it ends them."""
    with contextlib.suppress(CorralError):
        return engine.ended_with_engine(invocation.api, base_url(invocation.user.environ), session.ident)
    return False


def orphans(paths: StatePaths, known: Iterable[str]) -> list[Path]:
    """Return the directories of sessions that have no container, and that nobody looks after."""
    with contextlib.suppress(OSError):
        return [
            directory
            for directory in sorted((paths.root / "sessions").iterdir())
            if SESSION_ID.fullmatch(directory.name)
            and directory.name not in set(known)
            and attended.attended(directory) is False
        ]
    return []
