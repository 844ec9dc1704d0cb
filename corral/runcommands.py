"""``corral run`` and ``corral shell``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from corral import answers
from corral.commands import Accept, _finish, _invocation, _print
from corral.namecommands import app
from corral.oserrors import naming
from policy.errors import ArgumentError

if TYPE_CHECKING:
    from corral.run import Options

__all__ = ["app"]

Name = Annotated[
    str,
    typer.Option(
        "--name",
        metavar="NAME",
        help="What to call the session; CORRAL_SESSION_ID inside.",
        show_default=False,
    ),
]
Session = Annotated[
    str,
    typer.Option("--session-id", metavar="ID", help="Its id: eight hexadecimal digits.", show_default=False),
]
Variables = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        "-e",
        metavar="NAME[=VALUE]",
        help="A variable for the program; NAME alone takes it from your environment, out of process lists.",
        show_default=False,
    ),
]
Workdir = Annotated[
    str,
    typer.Option(
        "--workdir",
        "-w",
        metavar="PATH",
        help="Where it starts: in the project or a mount.",
        show_default=False,
    ),
]
Keys = Annotated[
    str | None,
    typer.Option(
        "--detach-keys",
        metavar="KEYS",
        help="Keys that leave it running, such as ctrl-],ctrl-q; none: there are none.",
        show_default=False,
    ),
]


def _options(name: str, session: str, variables: list[str] | None, workdir: str, keys: str | None) -> Options:
    from corral.run import Options

    return Options(name, session, tuple(variables or ()), workdir, keys)


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND", help="Run this instead of the harness.", show_default=False),
    ] = None,
    variables: Variables = None,
    workdir: Workdir = "",
    name: Name = "",
    session: Session = "",
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return once the program runs, and print the session's id.")
    ] = False,
    resume: Annotated[
        str,
        typer.Option(
            "--resume",
            metavar="SESSION",
            help="Come back to a session that was left, by id or name.",
            show_default=False,
        ),
    ] = "",
    keys: Keys = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --detach: print JSON.")] = False,
    accept: Accept = None,
) -> None:
    """Run the agent in the sandbox; its exit code is corral's.

    At a terminal ctrl-],ctrl-q leaves it running, and so does the end of the terminal.

    \b
    Examples:
      corral run
      corral run -- opencode run "explain this project"
      echo "fix the tests" | corral run -- opencode run
      corral run --detach --name tests -- make test
      corral run --resume tests
    """

    def action() -> int:
        invocation = _invocation(accepted=accept, engine=True)
        from corral import run as on
        from corral import sessions

        options = _options(name, session, variables, workdir, keys)
        if resume and (detach or command or options != on.Options(keys=keys)):
            raise ArgumentError("--resume goes with --detach-keys only", f"corral run --resume {resume[:80]}")
        if as_json and not detach:
            raise ArgumentError("--json is for --detach: else the program has the output", "leave it out")
        with naming(invocation.data):
            if resume:
                return on.resume(invocation, resume, keys)
            if not detach:
                return on.run(invocation, command or (), options)
            found = on.detach(invocation, command or (), options)
        _print(answers.text(sessions.as_json([found])[0]) if as_json else found.session)
        return 0

    _finish(action)


@app.command()
def shell(
    variables: Variables = None,
    workdir: Workdir = "",
    name: Name = "",
    session: Session = "",
    keys: Keys = None,
    accept: Accept = None,
) -> None:
    """Open a shell in a new container of the same sandbox.

    \b
    Examples:
      corral shell
      corral shell --name look --env EDITOR --workdir docs
    """

    def action() -> int:
        invocation = _invocation(quiet=True, accepted=accept, engine=True)
        from corral.run import shell as do_shell

        with naming(invocation.data):
            return do_shell(invocation, _options(name, session, variables, workdir, keys))

    _finish(action)
