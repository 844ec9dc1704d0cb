"""Commands about what sandboxes leave and use on this host; ``app`` is the command line with them."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from corral import answers
from corral.commands import Json, _ask, _console, _finish, _invocation, _nobody, _print, _say
from corral.namecommands import app
from corral.oserrors import naming

__all__ = ["app"]

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@app.command()
def prune(
    running: Annotated[
        bool,
        typer.Option(
            "--running", help="End all your sessions that run, too; agents that are always on stay."
        ),
    ] = False,
    images: Annotated[
        bool, typer.Option("--images", help="Remove images that no policy makes any more, too.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, remove nothing.")] = False,
    yes: Yes = False,
    as_json: Json = False,
    unattended: Annotated[bool, typer.Option("--unattended", hidden=True)] = False,
) -> None:
    """Remove what ended sandboxes left: containers, relays, networks, files of sessions. State stays.

    What runs stays, and so does what is not yours. It takes eight seconds at most; exit 1 when something
    could not be removed. --running asks before it ends anything; where nobody can be asked it needs --yes.

    \b
    Examples:
      corral prune --dry-run
      corral prune --images
      corral prune --running --yes
    """

    def action() -> int:
        from corral import __version__, protect, pruned
        from corral import prune as on
        from corral.context import current_user
        from corral.engine import connect
        from enforcer.client import Client, socket_path
        from policy import versions
        from policy.errors import ArgumentError, CorralError
        from policy.identity import StatePaths, data_home

        if unattended and (running or images):
            raise ArgumentError(
                "--unattended, which the host service's start uses, removes neither what runs nor images",
                "leave it out",
            )
        user = current_user(os.environ)
        data = data_home(user.home, dict(user.environ))
        versions.check_state(data, __version__)
        console = _console()

        def ended(paths: StatePaths, session: str) -> None:
            try:
                protect.told_later(paths, session, user.environ, console.warn_block)
            except CorralError as error:
                console.warn(error.message)

        asked = _ask if sys.stdin.isatty() and sys.stderr.isatty() else _nobody
        with naming(data):
            found = on.prune(
                user,
                data,
                connect,
                Client(socket_path(user.environ), timeout=2),
                running=running,
                images=images,
                unattended=unattended,
                dry_run=dry_run,
                tell=_say if as_json else _print,
                ask=None if yes else asked,
                ended=ended,
            )
        text = answers.text(found.body()) if as_json else pruned.render(found, quiet=unattended)
        if text:
            _print(text)
        return int(bool(found.left))

    _finish(action)


@app.command()
def inspect(
    session: Annotated[
        str | None,
        typer.Argument(
            metavar="SESSION",
            help="Its id or name; default: the one that runs here, else the last that ended.",
            show_default=False,
        ),
    ] = None,
    lines: Annotated[str, typer.Option("--tail", metavar="LINES", help="How many of its last lines.")] = "20",
    sandbox: Annotated[
        str | None,
        typer.Option(
            "--sandbox", metavar="ID", help="Of this sandbox, from whatever directory.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what a session was started with, how it ended, and its last lines; keep: true lets it stay.

    Values of its environment are not shown, and secrets of the policy's env_file are replaced.

    \b
    Examples:
      corral inspect
      corral inspect review --tail 100 --json
    """

    def action() -> None:
        from corral import inspection as on
        from corral import joining, targets

        count = targets.parse_count("--tail", lines)
        invocation = _invocation()
        found = joining.choose(invocation, session, sandbox, "inspect", running=False)
        body = on.inspect(invocation, found, count)
        _print(answers.text(body) if as_json else on.render(body))

    _finish(action)


@app.command()
def df(as_json: Json = False) -> None:
    """Show what your sandboxes take on the disk: images, state, workspaces, sessions, build files, logs.

    \b
    Examples:
      corral df
      corral df --json
    """

    def action() -> None:
        from corral import usage as on
        from corral.context import current_user
        from corral.engine import connect
        from policy.identity import data_home

        user = current_user(os.environ)
        data = data_home(user.home, dict(user.environ))
        found = on.report(user, data, lambda: connect(user.environ))
        _print(answers.text(on.body(found)) if as_json else on.render(found))

    _finish(action)


@app.command()
def completion(
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="The shell that you use.")],
) -> None:
    """Print what makes a shell complete corral's commands, options, sessions, sandboxes and hosts.

    \b
    Examples:
      corral completion bash >~/.local/share/bash-completion/completions/corral
      corral completion zsh >~/.zfunc/_corral
      corral completion fish >~/.config/fish/completions/corral.fish
    """

    def action() -> None:
        from corral.completion import SCRIPTS, SHELLS
        from policy.errors import ArgumentError

        if shell not in SCRIPTS:
            raise ArgumentError(
                f"{shell[:80]!r} is no shell that corral knows", f"one of {', '.join(SHELLS)}"
            )
        _print(SCRIPTS[shell].rstrip("\n"))

    _finish(action)


@app.command(hidden=True)
def complete(shell: str, position: int, words: list[str]) -> None:
    """Print what the word at a position could become, for a shell's script."""

    def action() -> None:
        from corral.completing import lookup
        from corral.completion import candidates, told

        root = typer.main.get_command(app)
        text = told(candidates(root, words[: position + 1], lookup), shell)
        if text:
            _print(text)

    _finish(action)
