"""``corral run`` and ``corral shell``: one session, from nothing to nothing, with the agent's exit code."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence
from dataclasses import field
from pathlib import Path

from corral import (
    apart,
    detachkeys,
    gitdirs,
    hooks,
    joining,
    leftovers,
    protect,
    room,
    screens,
    sessions,
    starting,
    startplace,
    terminal,
    variables,
)
from corral.attach import Streams, attach
from corral.context import Invocation, new_session
from corral.engine import AttachedContainer, base_url
from corral.flow import NEVER, Leaving, Left
from corral.joining import keys_of
from corral.lifecycle import Created, created, prepare
from corral.screen import Screen
from corral.session import SHELL, Request, Terminal, command, fixed
from corral.sessions import Session
from policy.connection import OWN
from policy.errors import ArgumentError, CorralError, PolicyError
from policy.records import dataclass
from policy.revision import revision

# Of a terminal that nobody looks at: what programs expect.
COLUMNS, ROWS = 120, 40


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


@dataclass(frozen=True)
class Options:
    """What the user says about one session.

    ``name`` and ``session``: what to call it, and its id. ``variables``: NAME=VALUE or NAME each.
    ``workdir``: where it starts. ``keys``: those that leave it.
    """

    name: str = ""
    session: str = ""
    variables: Sequence[str] = field(default=(), repr=False)
    workdir: str = ""
    keys: str | None = None


NO_OPTIONS = Options()


def run(invocation: Invocation, given: Sequence[str], options: Options = NO_OPTIONS) -> int:
    """Run the harness, or the given command, in a new session; return its exit code."""
    _refuse_daemon(invocation)
    asked = request(invocation, "run", command(invocation.approved, given), options, detect_terminal())
    return _session(invocation, asked, options.keys)


def shell(invocation: Invocation, options: Options = NO_OPTIONS) -> int:
    """Run a shell in a new session of the same sandbox; return its exit code."""
    return _session(invocation, request(invocation, "shell", SHELL, options, detect_terminal()), options.keys)


def detach(invocation: Invocation, given: Sequence[str], options: Options = NO_OPTIONS) -> Session:
    """Start the harness, or the given command, and leave it running with a terminal that waits.

    Raises:
        PolicyError: the policy.
        ArgumentError: an option.
        CorralError: it did not start, or ended at once; nothing of it is left.
    """
    _refuse_daemon(invocation)
    loaded = invocation.approved
    if loaded.connection != OWN:
        raise ArgumentError(
            f"--detach is not there with egress.mode: {loaded.policy.egress.mode}",
            "it is by the gate's word about the fence that corral knows that the program runs",
        )
    asked = request(invocation, "run", command(loaded, given), options, _waiting_terminal())
    with _made(invocation, asked) as (session, watch):
        with invocation.console.step("start"):
            watched(invocation, session)
        watch.leave()
        session.leave()
    every = sessions.all_of(invocation.api, invocation.user.uid, invocation.data)
    found = next((one for one in every if one.ident == session.ident), None)
    if found is None:
        raise CorralError("the container is gone, which was started just now", "corral run --detach")
    return found


def _waiting_terminal() -> Terminal:
    """Return a terminal that nobody looks at yet: of our size when we have one."""
    columns, rows = terminal.size(terminal.STDERR)
    return Terminal(tty=True, stdin=True, columns=columns or COLUMNS, rows=rows or ROWS)


def _refuse_daemon(invocation: Invocation) -> None:
    if invocation.approved.policy.mode != "run":
        raise PolicyError(
            "mode is daemon: the agent of this sandbox is always on",
            "corral up starts it, corral attach opens its terminal; corral shell opens a shell beside it",
        )


def request(
    invocation: Invocation, purpose: str, argv: tuple[str, ...], options: Options, attached: Terminal
) -> Request:
    """Return what is to be started.

    Raises:
        ArgumentError: an option is no name, id, variable or place.
        CorralError: the name or the id is taken.
    """
    loaded, user = invocation.approved, invocation.user
    variables_ = variables.chosen(options.variables, user.environ, fixed(loaded))
    start = startplace.chosen(loaded, invocation.cwd, user.home, options.workdir) if options.workdir else None
    if options.name:
        sessions.valid_name(options.name)
    if options.session:
        sessions.valid_id(options.session)
        if options.session == loaded.sandbox.token:
            raise ArgumentError(
                f"the id {options.session} is that of the sandbox's proxy", "choose another id"
            )
    if options.name or options.session:
        every = sessions.all_of(invocation.api, user.uid, invocation.data)
        if options.name:
            sessions.free_name((one for one in every if one.sandbox == loaded.sandbox.id), options.name)
        if options.session:
            sessions.free_id(every, options.session)
    detachkeys.parse(keys_of(invocation, options.keys))
    session = options.session or new_session()
    return Request(purpose, argv, session, attached, options.name, start, variables_)


def _session(invocation: Invocation, asked: Request, keys: str | None) -> int:
    with _made(invocation, asked) as (session, watch):
        code = connect_and_run(invocation, session, asked, watch, keys)
        # Before its home is removed, which makes room.
        problem = room.full(_written(invocation, asked.session))
        if problem is not None:
            invocation.console.warn("; ".join(problem))
        return code


@contextlib.contextmanager
def _made(invocation: Invocation, asked: Request) -> Iterator[tuple[Created, protect.Watch]]:
    """Make the container of a session; remove it in the end, and say what it changed, unless it was left."""
    say_where(invocation)
    say_what_holds(invocation)
    prepared = prepare(invocation)
    look_around(invocation)
    warn_of_git(invocation)
    user = invocation.user
    with invocation.console.step("pre-launch hook", minor=True):
        hooks.pre_launch(invocation.approved, environ=user.environ, home=user.home, session=asked.session)
    with (
        protect.reported(
            invocation.approved,
            invocation.paths,
            asked.session,
            user.environ,
            invocation.console.warn_block,
            at_once=False,
        ) as watch,
        created(invocation, prepared, asked, watch.look) as session,
    ):
        # Also when we are killed, somebody can tell.
        watch.save()
        yield session, watch


def look_around(invocation: Invocation) -> None:
    """Remove what is left of sessions that nobody looks after, and say which go on under another policy."""
    loaded = invocation.approved
    every = sessions.all_of(invocation.api, invocation.user.uid, invocation.data)
    mine = [one for one in every if one.sandbox == loaded.sandbox.id]
    leftovers.sweep(invocation, mine)
    if not loaded.declaration.proxied:
        # Of a policy of before, whose sessions may all have been killed.
        leftovers.release_proxy(invocation, loaded.sandbox)
    notice = sessions.other_policy(mine, revision(loaded).sha256)
    if notice:
        invocation.console.tell(notice)


def watched(invocation: Invocation, made: Created) -> None:
    """Start a container without input of ours, show what its gate says, return when its program runs."""
    container = AttachedContainer(invocation.api, base_url(invocation.user.environ), made.ident, stdin=False)
    screen = Screen()
    keeper = screens.Keeper(invocation.paths.session(made.spec.session), screen)
    with contextlib.closing(container), contextlib.closing(container.connect()) as connection:
        starting.start(
            container,
            connection,
            tty=made.spec.tty,
            fetched=made.fetched,
            show=invocation.console.show,
            seen=screen.feed,
            step=lambda what: invocation.console.step(what, minor=True),
        )
    keeper.save()


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


def connect_and_run(
    invocation: Invocation, session: Created, asked: Request, watch: protect.Watch, keys: str | None
) -> int:
    """Start a created container with this process's streams; return the exit code.

    At a terminal it can be left by keys (0), and ``run`` goes on when the terminal goes away (129).
    """
    attached = asked.terminal
    leaving = NEVER
    if attached.tty:
        # A shell ends with its terminal, as everywhere.
        signals = frozenset({signal.SIGHUP} if asked.purpose == "run" else ())
        leaving = Leaving(detachkeys.parse(keys_of(invocation, keys)), signals)
    url = base_url(invocation.user.environ)
    container = AttachedContainer(invocation.api, url, session.ident, stdin=attached.stdin)
    with contextlib.closing(container), contextlib.closing(container.connect()) as connection:
        streams = Streams(stdin=terminal.STDIN if attached.stdin else None)
        # A raw terminal does not go back to the first column by itself.
        end = "\r" if attached.tty else ""
        tell = invocation.console.tell
        screen = Screen()
        keeper = screens.Keeper(invocation.paths.session(asked.session), screen)
        try:
            return attach(
                container,
                connection,
                streams=streams,
                tty=attached.tty,
                say=lambda text: tell(text + end),
                leaving=leaving,
                screen=screen,
            )
        except Left as left:
            keeper.save()
            return _left(invocation, session, asked, watch, hung_up=left.hung_up)


def _written(invocation: Invocation, session: str) -> list[Path]:
    """Return where a session writes."""
    paths = invocation.paths
    mounted = (Path(mount.source) for mount in invocation.approved.mounts if not mount.read_only)
    return [*mounted, paths.home, paths.session_home(session)]


def _left(
    invocation: Invocation, session: Created, asked: Request, watch: protect.Watch, *, hung_up: bool
) -> int:
    code = 128 + signal.SIGHUP if hung_up else 0
    tell = invocation.console.tell
    if not session.fetched.is_set():
        tell("left before the program had started, so it ends")
        raise SystemExit(code)
    name = asked.name or asked.session
    tell(f"left {name}, which goes on: corral run --resume {name}")
    watch.leave()
    session.leave()
    return code


def resume(invocation: Invocation, given: str, keys: str | None = None) -> int:
    """Be to a session that was left what ``run`` was; return its exit code.

    Raises:
        ArgumentError: its agent is always on, or it is a session of verify's.
        CorralError: there is none of that name that runs.
    """
    found = joining.choose(invocation, given, None, "resume", running=True)
    if found.purpose not in sessions.LEAVABLE:
        raise ArgumentError(f"{found.name} was not started by corral run", f"corral attach {found.name}")
    return joining.join(invocation, found, keys, signals=frozenset({signal.SIGHUP}))
