from __future__ import annotations

import contextlib
import io
from dataclasses import replace

import pytest

from corral import run, terminal
from corral.context import Invocation
from corral.session import Request, Terminal, User
from corral.sessions import Note
from policy.errors import CorralError, PolicyError

from .test_sessions import A, B


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
    monkeypatch.setattr(run, "created", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(run, "connect_and_run", lambda *_: 5)
    monkeypatch.setattr(run, "warn_of_git", warned.append)
    assert (run.run(invocation, ["true"]) if command == "run" else run.shell(invocation)) == 5
    assert warned == [invocation]


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
    monkeypatch.setattr(run, "created", lambda *_: contextlib.nullcontext())
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
    made: list[Request] = []

    def created(_: object, __: object, request: Request) -> contextlib.AbstractContextManager[None]:
        made.append(request)
        return contextlib.nullcontext()

    monkeypatch.setattr(run, "prepare", lambda _: None)
    monkeypatch.setattr(run, "created", created)
    monkeypatch.setattr(run, "connect_and_run", lambda *_: 0)
    mine = replace(A, sandbox=invocation.loaded.sandbox.id)
    monkeypatch.setattr(run.sessions, "all_of", lambda *_: [mine, replace(B, note=Note("theirs"))])

    def go(name: str) -> int:
        if command == "run":
            return run.run(invocation, ["true"], name=name)
        return run.shell(invocation, name=name)

    assert go("fresh") == 0
    # A name of another sandbox's.
    assert go("theirs") == 0
    assert [request.name for request in made] == ["fresh", "theirs"]
    with pytest.raises(CorralError, match="review runs already"):
        go("review")
    with pytest.raises(PolicyError, match="is no name for a session"):
        go("a b")
