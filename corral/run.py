"""``corral run`` and ``corral shell``: one session, from nothing to nothing, with the agent's exit code."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from corral import apart, gitdirs, hooks, protect, sessions, terminal
from corral.attach import Streams, attach
from corral.context import Invocation, new_session
from corral.engine import AttachedContainer, base_url
from corral.lifecycle import Created, created, prepare
from corral.session import SHELL, Request, Terminal, command
from policy.errors import PolicyError


def detect_terminal() -> Terminal:
    """Return what this process is attached to.

    A terminal only when both input and output are one. A terminal whose output goes elsewhere is no input
    either: a program that reads its input to the end would wait for keys nobody types.
    """
    reads, writes = terminal.is_terminal(terminal.STDIN), terminal.is_terminal(terminal.STDOUT)
    if reads and writes:
        columns, rows = terminal.size(terminal.STDOUT)
        return Terminal(tty=True, stdin=True, columns=columns, rows=rows)
    return Terminal(stdin=terminal.is_open(terminal.STDIN) and not reads)


def run(invocation: Invocation, given: Sequence[str], *, name: str = "") -> int:
    """Run the harness, or the given command, in a new session; return its exit code."""
    return _session(invocation, "run", command(invocation.approved, given), name)


def shell(invocation: Invocation, *, name: str = "") -> int:
    """Run a shell in a new session of the same sandbox; return its exit code."""
    return _session(invocation, "shell", SHELL, name)


def _session(invocation: Invocation, purpose: str, argv: tuple[str, ...], name: str) -> int:
    if purpose == "run" and invocation.approved.policy.mode != "run":
        raise PolicyError(
            "mode is daemon: the agent of this sandbox is always on",
            "corral up starts it, corral attach opens its terminal; corral shell opens a shell beside it",
        )
    if name:
        sessions.valid_name(name)
        every = sessions.all_of(invocation.api, invocation.user.uid, invocation.data)
        sessions.free_name((one for one in every if one.sandbox == invocation.approved.sandbox.id), name)
    request = Request(purpose, argv, new_session(), detect_terminal(), name)
    say_where(invocation)
    say_what_holds(invocation)
    prepared = prepare(invocation)
    warn_of_git(invocation)
    user = invocation.user
    with invocation.console.step("pre-launch hook", minor=True):
        hooks.pre_launch(invocation.approved, environ=user.environ, home=user.home, session=request.session)
    with (
        protect.reported(
            invocation.approved,
            invocation.paths,
            request.session,
            user.environ,
            invocation.console.warn_block,
        ),
        created(invocation, prepared, request) as session,
    ):
        return connect_and_run(invocation, session, request.terminal)


def say_where(invocation: Invocation) -> None:
    """Say what is mounted when that is more than the directory the user is in."""
    loaded = invocation.approved
    if invocation.cwd != loaded.project:
        access = "read-only" if loaded.workspace else "read-write"
        invocation.console.tell(
            f"the policy is {loaded.path}, so all of {loaded.project} is mounted {access}"
        )


def say_what_holds(invocation: Invocation) -> None:
    """Say what of the policy is no fence."""
    unfenced = apart.warning(invocation.approved)
    if unfenced:
        invocation.console.warn_block(unfenced)
    approvals = invocation.approved.policy.approvals
    if approvals is not None:
        invocation.console.tell(
            f"approvals: {approvals} is the harness's own switch; the fence is the same with each of them"
        )


def warn_of_git(invocation: Invocation) -> None:
    """Say which working trees the agent can use without Git only."""
    loaded = invocation.loaded
    trees = (loaded.project, *loaded.rw)
    for warning in gitdirs.warnings(gitdirs.missing(trees, (*trees, *loaded.ro))):
        invocation.console.warn(warning)


def connect_and_run(invocation: Invocation, session: Created, attached: Terminal) -> int:
    """Start a created container with this process's streams; return the exit code."""
    url = base_url(invocation.user.environ)
    container = AttachedContainer(invocation.api, url, session.ident, stdin=attached.stdin)
    with contextlib.closing(container), contextlib.closing(container.connect()) as connection:
        streams = Streams(stdin=terminal.STDIN if attached.stdin else None)
        # A raw terminal does not go back to the first column by itself.
        end = "\r" if attached.tty else ""
        tell = invocation.console.tell
        return attach(
            container, connection, streams=streams, tty=attached.tty, say=lambda text: tell(text + end)
        )
