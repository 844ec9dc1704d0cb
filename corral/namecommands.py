"""The commands of ``corral.names``; ``app`` is the command line with them."""

from __future__ import annotations

from typing import Annotated

import typer

from corral import answers
from corral.commands import Json, _finish, _invocation, _print, app
from corral.policycommands import policy_app

__all__ = ["app"]

Sandbox = Annotated[
    str | None,
    typer.Option(
        "--sandbox", metavar="ID", help="Another sandbox than this directory's.", show_default=False
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Accept a public DNS-over-HTTPS endpoint.")]


@app.command()
def refresh(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Only these.", show_default=False)
    ] = None,
    sandbox: Sandbox = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="The names of all your sandboxes.")] = False,
    as_json: Json = False,
) -> None:
    """Resolve the names of running sessions again, now; nothing is restarted, open connections go on.

    Exit 1 when a name that is not optional has no fresh answer.

    \b
    Examples:
      corral refresh
      corral refresh api.example.com
    """

    def action() -> int:
        from corral import apart, targets
        from corral import names as on

        invocation = _invocation()
        hosts = [targets.parse_target(name, force=True).host for name in names or ()]
        if sandbox is None and not everything:
            apart.refuse_names(invocation.loaded)
        ident = None if everything else sandbox or invocation.loaded.sandbox.id
        answer = invocation.enforcer.refresh(ident, hosts)
        _print(answers.text(answer) if as_json else on.told_refresh(answer))
        return int(on.failed(answer))

    _finish(action)


@app.command()
def allow(
    target: Annotated[
        str,
        typer.Argument(
            metavar="HOST[:PORT]",
            help="A name, or in single quotes '*.ZONE' or '^REGEX$'. Port 443 unless one is given.",
        ),
    ],
    ports: Annotated[
        str | None,
        typer.Option(
            "--ports", metavar="PORT,PORT", help="Several ports instead of one.", show_default=False
        ),
    ] = None,
    lasting: Annotated[
        str | None,
        typer.Option(
            "--for", metavar="TIME", help="30m, 1h, 2d; default: until the session ends.", show_default=False
        ),
    ] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Write it into corral.yaml too, which approves it.")
    ] = False,
    force: Force = False,
    sandbox: Sandbox = None,
    as_json: Json = False,
) -> None:
    """Let the running sessions of this sandbox reach a name; nothing is restarted.

    Zones and regular expressions are for sandboxes that have a proxy, or a resolver.

    \b
    Examples:
      corral allow files.example.com --for 1h
      corral allow git.example.com:8443 --save
      corral allow '*.example.com' --ports 443,8443
    """

    def action() -> None:
        from corral import apart, targets
        from corral import names as on
        from policy.errors import ArgumentError

        wanted = targets.parse_target(target, force=force, many=True)
        opened = targets.parse_ports(ports, wanted.port)
        seconds = None if lasting is None else targets.parse_duration(lasting)
        if save and sandbox is not None:
            raise ArgumentError("--save writes this directory's corral.yaml", "leave out --sandbox")
        invocation = _invocation()
        if sandbox is None:
            apart.refuse_names(invocation.loaded)
            if not save:
                on.refuse_many(invocation.loaded, wanted)
        ident = sandbox or invocation.loaded.sandbox.id
        answer = on.allow(invocation, wanted, ident, ports=opened, lasting=seconds, keep=save, force=force)
        _print(answers.text(answer) if as_json else on.told_allow(answer))

    _finish(action)


@app.command()
def deny(
    host: Annotated[
        str,
        typer.Argument(
            metavar="HOST", help="A name, or in single quotes a zone or regular expression of the policy."
        ),
    ],
    save: Annotated[bool, typer.Option("--save", help="Take it out of corral.yaml too.")] = False,
    sandbox: Sandbox = None,
    as_json: Json = False,
) -> None:
    """Take a name from the running sessions of this sandbox until they end; open connections are cut.

    A name below a zone can be taken alone; a zone takes all its names with it.

    \b
    Examples:
      corral deny files.example.com
      corral deny files.example.com --save
      corral deny '*.example.com'
    """

    def action() -> None:
        from corral import apart, targets
        from corral import names as on
        from policy.errors import ArgumentError

        wanted = targets.parse_target(host, force=True, many=True)
        if wanted.port is not None:
            shown = f"'{wanted.host}'" if wanted.many else wanted.host
            raise ArgumentError("a name is denied with all its ports", f"corral deny {shown}")
        if save and sandbox is not None:
            raise ArgumentError("--save writes this directory's corral.yaml", "leave out --sandbox")
        invocation = _invocation()
        if sandbox is None:
            apart.refuse_names(invocation.loaded)
        ident = sandbox or invocation.loaded.sandbox.id
        answer = on.deny(invocation, wanted.host, ident, keep=save)
        _print(answers.text(answer) if as_json else on.told_deny(answer))

    _finish(action)


@policy_app.command()
def check(
    target: Annotated[
        str, typer.Argument(metavar="HOST[:PORT]", help="A name, an address or corral-host; port 443.")
    ],
    sandbox: Sandbox = None,
    as_json: Json = False,
) -> None:
    """Say what would happen to a TCP connection from the sandbox, and why. Exit 1 when it is denied.

    Each running session is judged by what kernel and hosts file hold; without one the name is resolved and
    vetted as a start would. Nothing is changed.

    \b
    Examples:
      corral policy check api.example.com
      corral policy check git.example.com:22 --json
    """

    def action() -> int:
        from corral import names as on
        from corral import targets

        answer = on.check(_invocation(), targets.parse_target(target, force=True, address=True), sandbox)
        _print(answers.text(answer) if as_json else on.told_check(answer))
        return int(not answer["allowed"])

    _finish(action)
