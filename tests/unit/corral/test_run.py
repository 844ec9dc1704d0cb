from __future__ import annotations

import contextlib
import io
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corral import protect, run, terminal
from corral.context import Invocation
from corral.flow import NEVER, Leaving, Left
from corral.session import Request, Terminal, User
from corral.sessions import Note, Session
from policy.errors import ArgumentError, CorralError, PolicyError
from policy.loader import LoadedPolicy

from .test_sessions import A, B


@contextlib.contextmanager
def made_up(invocation: Invocation, _: object, request: Request, *__: object) -> Iterator[Any]:
    """A session of which nothing is made but its directory."""
    invocation.paths.session(request.session).mkdir(parents=True)
    yield SimpleNamespace(ident="x", fetched=threading.Event(), leave=lambda: None)


@pytest.mark.parametrize(
    ("stdin", "stdout", "expected"),
    [
        ("terminal", "terminal", Terminal(tty=True, stdin=True, columns=100, rows=30)),
        # Its keys would go to a program that waits for the end of its input.
        ("terminal", "pipe", Terminal()),
        ("pipe", "terminal", Terminal(stdin=True)),
        ("pipe", "pipe", Terminal(stdin=True)),
        ("closed", "terminal", Terminal()),
        ("closed", "pipe", Terminal()),
    ],
)
def test_a_terminal_is_one_on_both_sides(
    monkeypatch: pytest.MonkeyPatch, stdin: str, stdout: str, expected: Terminal
) -> None:
    kinds = {0: stdin, 1: stdout}
    monkeypatch.setattr(terminal, "is_terminal", lambda fd: kinds[fd] == "terminal")
    monkeypatch.setattr(terminal, "is_open", lambda fd: kinds[fd] != "closed")
    monkeypatch.setattr(terminal, "size", lambda fd: (100, 30))
    assert run.detect_terminal() == expected


def test_a_daemon_s_policy_has_no_sessions(invocation: Invocation) -> None:
    loaded = invocation.loaded
    policy = loaded.policy.model_copy(update={"mode": "daemon"})
    invocation.__dict__["loaded"] = invocation.__dict__["approved"] = replace(loaded, policy=policy)
    with pytest.raises(PolicyError, match="mode is daemon") as caught:
        run.run(invocation, ["true"])
    assert caught.value.exit_code == 2
    assert caught.value.hint is not None and "corral up" in caught.value.hint


@pytest.mark.parametrize("command", ["run", "shell"])
def test_both_kinds_of_session_say_when_git_does_not_work(
    invocation: Invocation, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    warned: list[Invocation] = []
    monkeypatch.setattr(run, "prepare", lambda _: None)
    monkeypatch.setattr(run, "created", made_up)
    monkeypatch.setattr(run, "connect_and_run", lambda *_: 5)
    monkeypatch.setattr(run, "warn_of_git", warned.append)
    assert (run.run(invocation, ["true"]) if command == "run" else run.shell(invocation)) == 5
    assert warned == [invocation]


@pytest.mark.parametrize("command", ["run", "shell"])
def test_a_full_disk_is_said_at_the_end_of_a_session_and_its_exit_code_is_kept(
    invocation: Invocation, monkeypatch: pytest.MonkeyPatch, said: io.StringIO, command: str
) -> None:
    asked: list[list[Path]] = []
    monkeypatch.setattr(run, "prepare", lambda _: None)
    monkeypatch.setattr(run, "created", made_up)
    monkeypatch.setattr(run, "connect_and_run", lambda *_: 5)
    monkeypatch.setattr(run.room, "full", lambda places: asked.append(places) or ("it is full", "make room"))
    assert (run.run(invocation, ["true"]) if command == "run" else run.shell(invocation)) == 5
    assert "it is full; make room" in said.getvalue()
    # Where the session writes: the project, what the harness keeps, its home.
    (places,) = asked
    assert [invocation.loaded.project, invocation.paths.home] == places[:2] and len(places) == 3


@pytest.mark.parametrize("command", ["run", "shell"])
@pytest.mark.parametrize("approvals", ["ask", "auto", "off", None])
def test_that_approvals_add_no_isolation_is_said(
    invocation: Invocation,
    monkeypatch: pytest.MonkeyPatch,
    said: io.StringIO,
    command: str,
    approvals: str | None,
) -> None:
    monkeypatch.setattr(run, "prepare", lambda _: None)
    monkeypatch.setattr(run, "created", made_up)
    monkeypatch.setattr(run, "connect_and_run", lambda *_: 0)
    loaded = invocation.loaded
    policy = loaded.policy.model_copy(update={"approvals": approvals})
    invocation.__dict__["approved"] = replace(loaded, policy=policy)
    assert (run.run(invocation, ["true"]) if command == "run" else run.shell(invocation)) == 0
    told = f"approvals: {approvals} is the harness's own switch; the fence is the same"
    assert (told in said.getvalue()) == (approvals is not None)


def test_from_a_directory_below_it_is_said_that_the_whole_project_is_mounted(
    invocation: Invocation, user: User, said: io.StringIO
) -> None:
    run.say_where(invocation)
    assert said.getvalue() == ""
    project = invocation.loaded.project
    below = Invocation(user, project / "src", invocation.console)
    below.__dict__["approved"] = invocation.loaded
    run.say_where(below)
    assert said.getvalue() == (
        f"corral: the policy is {project}/corral.yaml, so all of {project} is mounted read-write\n"
    )


@pytest.mark.parametrize("command", ["run", "shell"])
def test_a_session_has_the_name_it_is_given_unless_another_one_runs_by_it(
    invocation: Invocation, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    requests: list[Request] = []

    def created(
        invocation: Invocation, prepared: object, request: Request, *_: object
    ) -> contextlib.AbstractContextManager[Any]:
        requests.append(request)
        return made_up(invocation, prepared, request)

    monkeypatch.setattr(run, "prepare", lambda _: None)
    monkeypatch.setattr(run, "created", created)
    monkeypatch.setattr(run, "connect_and_run", lambda *_: 0)
    mine = replace(A, sandbox=invocation.loaded.sandbox.id)
    monkeypatch.setattr(run.sessions, "all_of", lambda *_: [mine, replace(B, note=Note("theirs"))])

    def go(name: str) -> int:
        if command == "run":
            return run.run(invocation, ["true"], run.Options(name=name))
        return run.shell(invocation, run.Options(name=name))

    assert go("fresh") == 0
    # A name of another sandbox's.
    assert go("theirs") == 0
    assert [request.name for request in requests] == ["fresh", "theirs"]
    with pytest.raises(CorralError, match="review runs already"):
        go("review")
    with pytest.raises(ArgumentError, match="is no name for a session"):
        go("a b")


class Attached:
    """What attach() does: end with a code, or be left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, outcome: object) -> None:
        self.outcome, self.leaving = outcome, NEVER
        monkeypatch.setattr(run, "attach", self)
        monkeypatch.setattr(run, "base_url", lambda _: "unix:///x")
        monkeypatch.setattr(run.AttachedContainer, "connect", lambda _: io.BytesIO())
        monkeypatch.setattr(run, "prepare", lambda _: None)
        monkeypatch.setattr(run, "created", self._created)
        self.left: list[str] = []
        self.fetched = threading.Event()
        self.fetched.set()

    @contextlib.contextmanager
    def _created(self, invocation: Invocation, _: object, request: Request, *__: object) -> Iterator[Any]:
        invocation.paths.session(request.session).mkdir(parents=True)
        leave = lambda: self.left.append(request.session)  # noqa: E731
        yield SimpleNamespace(ident="x", fetched=self.fetched, leave=leave)

    def __call__(self, *_: object, leaving: Leaving, **__: object) -> int:
        self.leaving = leaving
        if isinstance(self.outcome, Exception):
            raise self.outcome
        assert isinstance(self.outcome, int)
        return self.outcome


TTY = Terminal(tty=True, stdin=True, columns=80, rows=24)


@pytest.mark.parametrize(
    ("command", "attached", "signals", "keys"),
    [
        # An agent survives its terminal; a shell does not, and pipes have no keys.
        ("run", TTY, {signal.SIGHUP}, True),
        ("shell", TTY, set(), True),
        ("run", Terminal(stdin=True), set(), False),
    ],
)
def test_what_leaves_a_session(
    invocation: Invocation,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    attached: Terminal,
    signals: set[int],
    keys: bool,
) -> None:
    made = Attached(monkeypatch, 7)
    monkeypatch.setattr(run, "detect_terminal", lambda: attached)
    assert (run.run(invocation, ["true"]) if command == "run" else run.shell(invocation)) == 7
    assert (made.leaving.signals, bool(made.leaving.keys)) == (signals, keys)
    if keys:
        # Not Docker's own.
        assert b"\x10" not in {key[0] for key in made.leaving.keys}
        run.run(invocation, ["true"], run.Options(keys="ctrl-a,d"))
        assert [key[0] for key in made.leaving.keys] == [b"\x01", b"d"]
        run.run(invocation, ["true"], run.Options(keys="none"))
        assert made.leaving.keys == ()


@pytest.mark.parametrize(("hung_up", "code"), [(True, 129), (False, 0)])
def test_one_that_is_left_goes_on_and_is_told_about_by_another(
    invocation: Invocation, monkeypatch: pytest.MonkeyPatch, said: io.StringIO, hung_up: bool, code: int
) -> None:
    made = Attached(monkeypatch, Left(hung_up=hung_up))
    monkeypatch.setattr(run, "detect_terminal", lambda: TTY)
    options = run.Options(name="review", session="0a1b2c3d")
    assert run.run(invocation, ["true"], options) == code
    assert made.left == ["0a1b2c3d"]
    assert "corral run --resume review" in said.getvalue()
    assert (invocation.paths.session("0a1b2c3d") / protect.BEFORE).exists()


def test_one_whose_secrets_were_not_fetched_yet_ends_when_it_is_left(
    invocation: Invocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Attached(monkeypatch, Left(hung_up=True))
    made.fetched.clear()
    monkeypatch.setattr(run, "detect_terminal", lambda: TTY)
    # Like any failure: a container that runs is removed even when ended ones are kept.
    with pytest.raises(SystemExit) as caught:
        run.run(invocation, ["true"])
    assert caught.value.code == 129
    assert made.left == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (run.Options(session="0A1B2C3D"), "is no id"),
        (run.Options(session="0a1b2c3"), "is no id"),
        (run.Options(session="../../x"), "is no id"),
        (run.Options(variables=["HOME=/x"]), "where programs keep"),
        (run.Options(workdir="/etc"), "not in the sandbox"),
        (run.Options(keys="ctrl-p-q"), "is no key"),
    ],
)
@pytest.mark.parametrize("command", ["run", "shell", "detach"])
def test_options_that_are_none_create_nothing(
    invocation: Invocation, monkeypatch: pytest.MonkeyPatch, command: str, options: run.Options, told: str
) -> None:
    monkeypatch.setattr(run, "prepare", lambda _: pytest.fail("it was begun"))
    with pytest.raises(ArgumentError, match=told) as caught:
        if command == "shell":
            run.shell(invocation, options)
        else:
            getattr(run, command)(invocation, ["true"], options)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("state", "told"), [("running", "runs already"), ("exited", "has ended")])
def test_an_id_is_used_once_by_any_sandbox(
    invocation: Invocation, monkeypatch: pytest.MonkeyPatch, state: str, told: str
) -> None:
    monkeypatch.setattr(run.sessions, "all_of", lambda *_: [replace(A, state=state)])
    monkeypatch.setattr(run, "prepare", lambda _: pytest.fail("it was begun"))
    with pytest.raises(CorralError, match=told) as caught:
        run.run(invocation, ["true"], run.Options(session=A.session))
    assert caught.value.exit_code == 1


def test_sessions_of_another_policy_are_said_to_keep_it(
    invocation: Invocation, monkeypatch: pytest.MonkeyPatch, said: io.StringIO
) -> None:
    mine = replace(A, sandbox=invocation.loaded.sandbox.id, note=Note("review", "another"))
    ended, same = replace(mine, state="exited", session="cccccccc"), replace(mine, note=Note("", ""))
    monkeypatch.setattr(
        run.sessions, "all_of", lambda *_: [mine, ended, same, replace(B, note=Note("", "z"))]
    )
    run.look_around(invocation)
    assert said.getvalue() == (
        "corral: the policy changed: review was started under the one of before, and keep to it\n"
    ).replace("keep to", "keeps to")


def test_what_egress_does_not_fence_cannot_be_detached(
    invocation: Invocation, loaded_of: Callable[[str], LoadedPolicy]
) -> None:
    loaded = loaded_of("profile: opencode\negress: {mode: none}\n")
    invocation.__dict__.update(loaded=loaded, approved=loaded)
    with pytest.raises(ArgumentError, match=r"--detach is not there with egress\.mode: none"):
        run.detach(invocation, ["true"])


def test_resume_is_for_sessions_of_run(invocation: Invocation, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[tuple[str, object]] = []

    def join(_: object, session: Session, keys: str | None, *, signals: frozenset[int]) -> int:
        joined.append((session.session, signals))
        return 3

    monkeypatch.setattr(run.joining, "join", join)
    monkeypatch.setattr(run.joining, "choose", lambda *_, **__: A)
    assert run.resume(invocation, "review") == 3
    # What is typed and what is sent goes to the program, as in run.
    assert joined == [(A.session, frozenset({signal.SIGHUP}))]
    monkeypatch.setattr(run.joining, "choose", lambda *_, **__: replace(A, purpose="daemon"))
    with pytest.raises(ArgumentError, match="was not started by corral run"):
        run.resume(invocation, "review")
