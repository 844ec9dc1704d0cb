"""Commands about sessions that go on without the terminal they were started from."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from corral import answers
from corral.commands import Accept, Json, _console, _finish, _invocation, _print
from corral.console import wants_colour
from corral.oserrors import naming
from corral.runcommands import Keys
from corral.tidycommands import app

__all__ = ["app"]

SessionId = Annotated[
    str | None,
    typer.Argument(
        metavar="SESSION", help="Its id or name; default: the one that runs here.", show_default=False
    ),
]
Sandbox = Annotated[
    str | None,
    typer.Option(
        "--sandbox", metavar="ID", help="Of this sandbox, from whatever directory.", show_default=False
    ),
]


@app.command()
def up(
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay until the agent ends, and end it with us.")
    ] = False,
    as_json: Json = False,
    accept: Accept = None,
) -> None:
    """Start the agent of a policy with mode: daemon, and wait until it runs. What runs already is kept.

    An agent that was started with another policy or image is replaced. Secrets are handed over at each start.

    \b
    Examples:
      corral up
      corral up --foreground
    """

    def action() -> int:
        from corral import up as on

        invocation = _invocation(accepted=accept, engine=True, steps=True)
        with naming(invocation.data):
            found = on.up(invocation, foreground=foreground, environ=os.environ)
        if isinstance(found, int):
            return found
        _print(answers.text(on.body(found)) if as_json else on.report(found))
        return 0

    _finish(action)


@app.command()
def attach(session: SessionId = None, keys: Keys = None, sandbox: Sandbox = None) -> None:
    """Put this terminal on a running session; the keys ctrl-],ctrl-q leave it running.

    What the program made of its terminal is made of this one. CORRAL_DETACH_KEYS sets other keys.

    \b
    Examples:
      corral attach
      corral attach review --detach-keys ctrl-@,d
    """

    def action() -> int:
        from corral import joining

        invocation = _invocation(engine=True)
        with naming(invocation.data):
            found = joining.choose(invocation, session, sandbox, "attach to", running=True)
            return joining.join(invocation, found, keys)

    _finish(action)


@app.command()
def logs(
    session: Annotated[
        str | None,
        typer.Argument(
            metavar="SESSION",
            help="Its id or name; default: the one that runs here, else the last that ended.",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the session ends.")] = False,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="TIME", help="10m, 2h, or an ISO 8601 time.", show_default=False),
    ] = None,
    tail: Annotated[
        str | None,
        typer.Option("--tail", metavar="LINES", help="The last so many lines.", show_default=False),
    ] = None,
    sandbox: Sandbox = None,
    proxy: Annotated[
        bool, typer.Option("--proxy", help="Of the sandbox's proxy: what it was asked for, and its answers.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what a session printed, of one that has ended too. What would command your terminal is left out.

    \b
    Examples:
      corral logs --follow --since 10m
      corral logs --proxy --tail 20
    """

    def action() -> None:
        import time

        from corral import joining, targets
        from corral import logs as on
        from policy.errors import ArgumentError

        start = None if since is None else on.since(since, time.time())
        count = None if tail is None else targets.parse_count("--tail", tail)
        invocation = _invocation(engine=True)
        if proxy and session is not None:
            raise ArgumentError("a sandbox has one proxy for all its sessions", "corral logs --proxy")
        found = (
            joining.choose_proxy(invocation, sandbox)
            if proxy
            else joining.choose(invocation, session, sandbox, "read", running=False)
        )
        pieces = on.read(invocation, found, follow=follow, start=start, tail=count, stamps=as_json)
        colour = wants_colour(sys.stdout, os.environ)
        on.print_logs(pieces, found, _print, as_json=as_json, colour=colour)

    _finish(action)


@app.command()
def ps(
    here: Annotated[bool, typer.Option("--here", help="Of this directory's sandboxes only.")] = False,
    as_json: Json = False,
) -> None:
    """List the sessions of all your sandboxes, those that have ended too. Needs no policy.

    \b
    Examples:
      corral ps
      corral ps --here --json
    """

    def action() -> None:
        import time

        from corral import sessions
        from corral.down import of_directory

        invocation = _invocation(engine=True)
        found = sessions.all_of(invocation.api, invocation.user.uid, invocation.data)
        if here:
            own = {sandbox.id for sandbox in of_directory(invocation)}
            found = [one for one in found if one.sandbox in own]
        body = {"sessions": sessions.as_json(found)}
        _print(answers.text(body) if as_json else sessions.render(found, time.time()))

    _finish(action)


@app.command()
def enable(as_json: Json = False, accept: Accept = None) -> None:
    """Bring this sandbox's agent up, and have it come back with the machine: a unit of your systemd.

    It is started again when it ends. An invalid or unapproved policy starts nothing, and is not tried again.

    \b
    Examples:
      corral enable
      corral enable --json
    """

    def action() -> None:
        from corral import enable as on

        invocation = _invocation(accepted=accept)
        found = on.enable(invocation, _console().warn)
        _print(answers.text(on.body(found)) if as_json else on.told(found))

    _finish(action)


@app.command()
def disable(as_json: Json = False) -> None:
    """Take this sandbox's agent out of the boot. What runs goes on until corral down.

    \b
    Examples:
      corral disable
      corral disable --json
    """

    def action() -> None:
        from corral import enable as on

        found = on.disable(_invocation())
        _print(answers.text({"disabled": found}) if as_json else on.told_disabled(found))

    _finish(action)
