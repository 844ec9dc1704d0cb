"""``corral up``: an agent that is always on. Started, watched until its gate has opened, left alone.

What runs already is kept when it was made of the policy and the image of now, and replaced when not. Secrets
are handed over here, so it is always this program that starts a container: by hand, or as the user's unit.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from corral import engine, hooks, network, protect, relaylaunch, sessions, units
from corral.attach import ENDED
from corral.context import Invocation, new_session
from corral.engine import AttachedContainer, base_url
from corral.leftovers import release_proxy, remove, tell
from corral.lifecycle import Prepared, created, ensure_proxy, prepare
from corral.run import COLUMNS, ROWS, look_around, say_what_holds, warn_of_git, watched
from corral.session import Request, Terminal
from corral.sessions import DAEMON, Session
from policy.container import HOST_ALIAS
from policy.errors import CorralError, EnforcerError, EngineError, EngineGoneError, PolicyError
from policy.identity import Sandbox
from policy.revision import revision

TERMINAL = Terminal(tty=True, stdin=True, columns=COLUMNS, rows=ROWS)
COME_BACK, PAUSE = 120.0, 0.5


@dataclass(frozen=True)
class Up:
    """A daemon that runs. ``fresh``: it was started just now. ``names``: name -> published addresses."""

    session: Session
    fresh: bool
    names: Mapping[str, list[str]]
    services: tuple[int, ...]


def refuse_run(invocation: Invocation, what: str) -> None:
    """Refuse a policy whose agent is not always on.

    Raises:
        PolicyError: its mode is run.
    """
    if invocation.loaded.policy.mode != "daemon":
        raise PolicyError(
            f"mode is run: corral {what} is for an agent that is always on",
            "corral run starts a session; or set mode: daemon",
        )


def up(invocation: Invocation, *, foreground: bool = False, environ: Mapping[str, str]) -> Up | int:
    """Bring the daemon up; return it, or with ``foreground`` 1 when it has ended by itself, 0
    when we were asked to end.

    Args:
        invocation: who and where.
        foreground: stay until it ends. An end of ours is its end, too.
        environ: of this process; NOTIFY_SOCKET in it is told when the daemon is ready.

    Raises:
        PolicyError: the policy is invalid, not approved, or not a daemon's.
        CorralError: it did not start; nothing of it is left.
    """
    refuse_run(invocation, "up")
    loaded = invocation.approved
    manager = units.Manager(invocation.user)
    if not foreground:
        units.require_linger(invocation.user.uid)
    with network.locked(invocation.paths.root / "up.lock"), invocation.console.step("up") as whole:
        # Its parts are shown.
        whole.parts()
        found = _ensure(invocation, prepare(invocation))
    if foreground:
        relaylaunch.tell_ready(environ)
        return _stay(invocation, found.session)
    if manager.enabled(loaded.sandbox):
        # From now on the unit looks after it; it finds it running.
        manager.start(loaded.sandbox)
    return found


def _ensure(invocation: Invocation, prepared: Prepared) -> Up:
    """Keep what runs, or replace it."""
    loaded = invocation.approved
    look_around(invocation)
    wanted = sessions.Note("", revision(loaded).sha256, prepared.image)
    every = _daemons(invocation)
    current = [one for one in every if (one.note.policy, one.note.image) == (wanted.policy, wanted.image)]
    running = next((one for one in current if one.state == "running"), None)
    others = [one for one in every if one is not running]
    if running is None:
        return _start(invocation, prepared, others)
    _end(invocation, others)
    ensure_proxy(invocation, prepared, running.session)
    return Up(running, fresh=False, names=_names(invocation, running), services=_services(invocation))


def _end(invocation: Invocation, others: Sequence[Session]) -> None:
    for one in others:
        if one.running:
            invocation.console.tell(f"{one.session} ends: it was started with another policy or image")
        remove(invocation, one)


def _daemons(invocation: Invocation) -> list[Session]:
    every = sessions.all_of(invocation.api, invocation.user.uid, invocation.data)
    mine = [one for one in every if one.sandbox == invocation.loaded.sandbox.id and one.purpose == DAEMON]
    return mine[::-1]


def _start(invocation: Invocation, prepared: Prepared, others: Sequence[Session]) -> Up:
    """Start a new one, and end the others when nothing but its start is left that can fail."""
    loaded, user, console = invocation.approved, invocation.user, invocation.console
    request = Request(DAEMON, loaded.profile.argv("daemon", loaded.options), new_session(), TERMINAL)
    say_what_holds(invocation)
    warn_of_git(invocation)
    with console.step("pre-launch hook", minor=True):
        hooks.pre_launch(loaded, environ=user.environ, home=user.home, session=request.session)
    with (
        protect.reported(
            loaded, invocation.paths, request.session, user.environ, console.warn_block, at_once=False
        ) as watch,
        created(invocation, prepared, request, watch.look) as made,
    ):
        watch.save()
        _end(invocation, others)
        watched(invocation, made)
        watch.leave()
        made.leave()
    session = next((one for one in _daemons(invocation) if one.ident == made.ident), None)
    if session is None:
        raise CorralError("the container is gone, which was started just now", "corral up")
    names = {str(name): list(found) for name, found in dict(made.ready.get("names") or {}).items()}
    return Up(session, fresh=True, names=names, services=_services(invocation))


def _services(invocation: Invocation) -> tuple[int, ...]:
    return tuple(sorted({service.port for service in invocation.loaded.declaration.host_services}))


def _names(invocation: Invocation, session: Session) -> dict[str, list[str]]:
    with contextlib.suppress(EnforcerError):
        for sandbox in invocation.enforcer.status().get("sandboxes") or ():
            for row in sandbox.get("sessions") or ():
                if row.get("session") == session.session:
                    return {str(name["name"]): list(name["addresses"]) for name in row.get("names") or ()}
    return {}


def _stay(invocation: Invocation, session: Session) -> int:
    """Return 1 when the daemon has ended; end it when we have to."""
    container = AttachedContainer(
        invocation.api, base_url(invocation.user.environ), session.ident, stdin=False
    )
    try:
        code = _end_of(invocation, container, session)
    except (SystemExit, KeyboardInterrupt):
        invocation.console.tell("asked to end: the agent ends")
        remove(invocation, session)
        return 0
    invocation.console.tell(f"the agent ended with exit code {code}; corral logs shows what it said")
    with contextlib.suppress(EnforcerError):
        invocation.enforcer.withdraw(session.ident)
    release_proxy(invocation, Sandbox(session.sandbox))
    # Now, and not when the next one starts: it may be started again at once, over what this one left.
    tell(invocation, invocation.paths, session.session)
    return 1


def _end_of(invocation: Invocation, container: AttachedContainer, session: Session) -> int | str:
    while True:
        try:
            return container.wait()
        except EngineGoneError:
            # With live-restore it outlives its engine.
            until = time.monotonic() + COME_BACK
            while True:
                try:
                    with engine.errors("looking for the daemon"):
                        state_ = invocation.api.inspect_container(session.ident)["State"]
                    break
                except EngineGoneError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(PAUSE)
            if not state_["Running"]:
                invocation.console.tell(ENDED)
                return int(state_["ExitCode"])
        except EngineError:
            # It was removed: corral down, or an up that replaces it.
            return "unknown"


def report(found: Up) -> str:
    """Return what ``corral up`` prints: what runs, what it reaches, how it is reached."""
    one = found.session
    lines = [f"{one.sandbox} {'is up' if found.fresh else 'was up already'}: session {one.session}"]
    for name, addresses in sorted(found.names.items()):
        lines.append(f"  reaches {name} ({', '.join(addresses) or 'no address yet'})")
    lines += [f"  reaches {HOST_ALIAS}:{port}" for port in found.services]
    lines += [
        f"  what listens inside on 0.0.0.0 is at {one.address}, for you and root of this host alone",
        "  corral attach opens its terminal, corral logs shows its output, corral down ends it",
    ]
    return "\n".join(lines)


def body(found: Up) -> dict[str, Any]:
    """Return the same for programs."""
    (row,) = sessions.as_json([found.session])
    return {
        **row,
        "fresh": found.fresh,
        "names": dict(found.names),
        "host_services": list(found.services),
    }
