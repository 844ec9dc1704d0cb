"""``corral attach``: the user's terminal on a session that runs already."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

from corral import attended, detachkeys, engine, leftovers, screens, sessions, state, terminal
from corral.attach import FORWARDED, Streams, attach
from corral.context import Invocation
from corral.engine import AttachedContainer, base_url
from corral.flow import Late, Leaving, Left
from corral.screen import Screen, harmless, lines_again
from corral.sessions import Session
from policy import profiles
from policy.errors import CorralError
from policy.identity import StatePaths
from policy.records import dataclass
from policy.revision import revision

# Whatever ends us, it is not the session's end.
SIGNALS = frozenset({*FORWARDED})


class Joined(AttachedContainer):
    """A container that runs already."""

    def start(self) -> None:
        """See corral.attach.Container; there is nothing to start."""


@dataclass(frozen=True)
class Shape:
    """How a container was made: with a terminal, with an input."""

    tty: bool
    stdin: bool


def shape(invocation: Invocation, session: Session) -> Shape:
    """Ask Docker how a session was made.

    Raises:
        EngineError: Docker refuses.
    """
    with engine.errors("looking at the session"):
        config = invocation.api.inspect_container(session.ident).get("Config") or {}
    return Shape(bool(config.get("Tty")), bool(config.get("OpenStdin")))


def keys_of(invocation: Invocation, given: str | None) -> str:
    """Return which keys detach: the option, the environment, else what suits the policy's harness."""
    profile = profiles.Profile.detach_keys
    with contextlib.suppress(CorralError):
        profile = invocation.loaded.profile.detach_keys
    return detachkeys.chosen(given, invocation.user.environ, profile)


def join(
    invocation: Invocation,
    session: Session,
    given: str | None = None,
    *,
    signals: frozenset[int] = SIGNALS,
) -> int:
    """Attach to a session until it ends or is left; return its exit code, 0 when it was left.

    Without a terminal on our side its output is shown and nothing is typed. A session that nobody looks after
    is looked after from now on: when it ends, nothing of it is left.

    Args:
        invocation: who and where.
        session: a running one.
        given: keys that detach.
        signals: those that make us leave; others are sent on to it.

    Raises:
        ArgumentError: the keys are none.
        EngineError, CorralError: Docker refuses, or the output cannot be written.
    """
    paths = StatePaths(invocation.data / session.sandbox)
    directory = paths.session(session.session)
    say_policy(invocation, session)
    with attended.attendance() as ours:
        ours.take(directory)
        try:
            code = _joined(invocation, session, given, signals, directory)
        except Left as left:
            if ours.held and session.purpose in sessions.LEAVABLE:
                # Also one whose corral was killed: from now on it is somebody's wish that it goes on.
                state.mark_left(paths, session.session)
            if left.hung_up:
                return 128 + signal.SIGHUP
            invocation.console.tell(f"left {session.name}, which goes on: corral attach {session.name}")
            return 0
        # Who started it, and is still there, removes it.
        if session.purpose in sessions.LEAVABLE and (ours.held or ours.take(directory)):
            leftovers.finish(invocation, session)
        return code


def say_policy(invocation: Invocation, session: Session) -> None:
    """Say when a session was started under another policy than that of now."""
    with contextlib.suppress(CorralError):
        loaded = invocation.loaded
        if loaded.sandbox.id != session.sandbox or not session.note.policy:
            return
        if session.note.policy != revision(loaded).sha256:
            invocation.console.tell(
                f"the policy changed since {session.name} was started; it keeps to the one of then"
            )


def _joined(
    invocation: Invocation, session: Session, given: str | None, signals: frozenset[int], directory: Path
) -> int:
    keys = keys_of(invocation, given)
    made = shape(invocation, session)
    ours = terminal.is_terminal(terminal.STDIN) and terminal.is_terminal(terminal.STDOUT)
    leaving = Leaving(detachkeys.parse(keys), signals if made.tty and ours else SIGNALS)
    typed = made.stdin and (ours if made.tty else not terminal.is_terminal(terminal.STDIN))
    tell = invocation.console.tell
    if made.tty and ours and leaving.keys:
        tell(f"attached to {session.name}; {keys} leaves it running")
    container = Joined(invocation.api, base_url(invocation.user.environ), session.ident, stdin=typed)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(container))
        connection = stack.enter_context(contextlib.closing(container.connect()))
        if made.tty and typed:
            # Before anything is shown that is answered: a terminal that is not raw keeps Ctrl-Q to itself.
            stack.enter_context(terminal.raw(terminal.STDIN))
        ahead = engine.read_ahead(container.held)
        screen = again(invocation, session) if made.tty and ours else None
        keeper = screens.Keeper(directory, screen) if screen is not None else None
        try:
            return attach(
                container,
                connection,
                streams=Streams(stdin=terminal.STDIN if typed else None),
                tty=made.tty,
                # Whoever changed the terminal's mode gets the line breaks it needs.
                say=lambda text: tell(text + ("\r" if made.tty and typed else "")),
                leaving=leaving,
                late=Late(ahead, screen),
            )
        except Left:
            if keeper is not None:
                keeper.save()
            raise


def again(invocation: Invocation, session: Session) -> Screen:
    """Bring our terminal to the state the program has its own in, and show the last lines.

    What was noted is true up to its time; a line that the log had later may have begun before, but whatever
    it says of a mode is what was said of it last.
    """
    found = screens.noted(StatePaths(invocation.data / session.sandbox), session.session)
    screen, since = found or (Screen(), 0.0)
    with engine.errors("reading the session's output"):
        output = bytes(invocation.api.logs(session.ident, stdout=True, stderr=True))
        later = output
        if since:
            later = bytes(invocation.api.logs(session.ident, stdout=True, stderr=True, since=since))
    unended = screen.tail
    screen.feed(later)
    if screen.full:
        show(screen.enter())
    else:
        show(screen.enter() + lines_again(output) + (b"" if later else harmless(unended)))
    return screen


def show(data: bytes) -> None:
    """Write to the terminal, before the loop does."""
    if data:
        sys.stdout.flush()
        while data:
            data = data[os.write(terminal.STDOUT, data) :]


def choose(
    invocation: Invocation, given: str | None, sandbox: str | None, what: str, *, running: bool
) -> Session:
    """Return the session of this directory, or of a sandbox, that is meant.

    Raises:
        PolicyError: there is no policy and no sandbox here.
        CorralError: there is none, or there are several.
    """
    idents = _idents(invocation, sandbox)
    every = sessions.all_of(invocation.api, invocation.user.uid, invocation.data)
    return sessions.pick([one for one in every if one.sandbox in idents], given, what=what, running=running)


def choose_proxy(invocation: Invocation, sandbox: str | None) -> Session:
    """Return the proxy of this directory's sandbox, or of one that is named, as if it were a session.

    Raises:
        PolicyError: there is no policy and no sandbox here.
        CorralError: there is none, or there are several.
    """
    idents = _idents(invocation, sandbox)
    every = sessions.proxies(invocation.api, invocation.user.uid, invocation.data)
    found = [one for one in every if one.sandbox in idents]
    if len(found) == 1:
        return found[0]
    if found:
        listed = ", ".join(one.sandbox for one in found)
        raise CorralError(f"there are {len(found)} proxies here: those of {listed}", "name one: --sandbox ID")
    raise CorralError(
        "there is no proxy here", "it is there while a session runs whose policy has zones or regexes"
    )


def _idents(invocation: Invocation, sandbox: str | None) -> set[str]:
    from corral.down import chosen, of_directory

    return {chosen(sandbox).id} if sandbox else {one.id for one in of_directory(invocation)}
