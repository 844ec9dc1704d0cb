"""The command line as the user sees it. Each command imports what it needs when it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from corral import __version__, answers, invoking
from corral.console import wants_colour
from corral.oserrors import naming
from corral.output import print_text
from corral.parser import App

app = App(
    name="corral",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Accept = Annotated[
    str | None,
    typer.Option(
        "--accept-policy",
        metavar="SHA",
        help="Approve the policy if this is its hash (corral policy diff prints it).",
        show_default=False,
    ),
]


_console, _invocation, _ask = invoking.console, invoking.invocation, invoking.ask


def _nobody(_: str) -> bool:
    """Answer where nobody can be asked."""
    from policy.errors import CorralError

    raise CorralError("nothing was removed: nobody can be asked here", "add --yes")


def _finish(action: Callable[[], int | None]) -> None:
    """Run a command's body; its number is the exit code."""
    try:
        code = action()
    except KeyboardInterrupt:
        # Said here, because versions of typer differ in what they make of it.
        raise typer.Exit(130) from None
    raise typer.Exit(code or 0)


_print = print_text


def _say(text: str) -> None:
    """Tell something beside a command's JSON."""
    _console().tell(text)


def _version(wanted: bool) -> None:
    if wanted:
        _print(f"corral {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show details, and tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run AI coding agents in containers, inside a fence you can prove.

    \b
    Examples:
      corral init --profile opencode
      corral run
      corral status
    """
    invoking.Settings.verbose = verbose


@app.command()
def install(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, do nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Install the host service. Once per machine; says what it does with sudo, and why.

    Without a terminal it goes on unasked, as what sets up machines needs it.

    \b
    Examples:
      corral install
      corral install --dry-run
    """

    def action() -> None:
        from corral.install import install as do_install

        do_install(echo=_print, dry_run=dry_run, assume_yes=yes)

    _finish(action)


@app.command()
def uninstall(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would go and stay, do nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="End running sandboxes first; look for rules without files too.")
    ] = False,
    purge: Annotated[bool, typer.Option("--purge", help="Remove state and configuration as well.")] = False,
    as_json: Json = False,
) -> None:
    """Take corral off this host: sandboxes, services, rules. Your state stays unless --purge.

    Other users of this machine keep theirs.

    \b
    Examples:
      corral uninstall --dry-run
      corral uninstall --force --purge
    """

    def action() -> None:
        from corral.engine import connect
        from corral.uninstall import Uninstall
        from corral.uninstall import uninstall as do_uninstall
        from corral.user import current_user

        user = current_user(os.environ)
        command = Uninstall(user, lambda: connect(user.environ), echo=_print if not as_json else _say)
        do_uninstall(
            command,
            echo=_print,
            dry_run=dry_run,
            as_json=as_json,
            assume_yes=yes,
            force=force,
            purge_state=purge,
        )

    _finish(action)


@app.command()
def init(
    profile: Annotated[
        str, typer.Option("--profile", metavar="NAME", help="The harness to run.")
    ] = "opencode",
) -> None:
    """Write a corral.yaml to start from into this directory.

    \b
    Examples:
      corral init
      corral init --profile generic
    """

    def action() -> None:
        from corral.init import init as do_init

        file = do_init(_invocation(), profile)
        _print(f"wrote {file} and approved it as it is; read it, then: corral run")

    _finish(action)


@app.command()
def build(
    force: Annotated[bool, typer.Option("--force", help="Build although nothing changed.")] = False,
    accept: Accept = None,
) -> None:
    """Build the sandbox's image, if what goes into it changed.

    A build has the network of the engine: the sandbox's rules are not for it.

    \b
    Examples:
      corral build
      corral build --force -v
    """

    def action() -> None:
        from corral.build import build as do_build

        invocation = _invocation(accepted=accept, engine=True)
        with naming(invocation.data):
            built = do_build(invocation, force=force)
        _print(built)

    _finish(action)


@app.command()
def verify(
    as_json: Json = False,
    explain: Annotated[
        str | None,
        typer.Option("--explain", metavar="CHECK", help="Say what a check proves, and what to do."),
    ] = None,
    accept: Accept = None,
) -> None:
    """Prove the policy from inside a container and from the kernel's side; exit 1 when anything is off.

    \b
    Examples:
      corral verify
      corral verify --explain no-sudo
    """

    def action() -> int:
        if explain is not None:
            from corral import checkdocs

            doc = checkdocs.find(explain)
            _print(answers.text(checkdocs.body(doc)) if as_json else checkdocs.explain(doc))
            return 0
        from corral import checks
        from corral.verify import verify as do_verify

        invocation = _invocation(accepted=accept, engine=True)
        with naming(invocation.data):
            found = do_verify(invocation)
        body = checks.body(invocation.loaded.sandbox.id, found)
        _print(answers.text(body) if as_json else checks.report(found))
        return checks.exit_code(found)

    _finish(action)


@app.command()
def status(as_json: Json = False) -> None:
    """Show every sandbox of this user: sessions, names, addresses, problems.

    \b
    Examples:
      corral status
      corral status --json
    """
    from corral import quick

    _finish(lambda: quick.status(as_json=as_json))


@app.command()
def denied(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until interrupted.")] = False,
    as_json: Json = False,
    every: Annotated[
        bool, typer.Option("--all", "-a", help="All your sandboxes, and what corral itself tried.")
    ] = False,
) -> None:
    """Show what sandboxes of this directory tried and the fence refused.

    With --follow a line is printed whenever something is refused; its count is the one so far.

    \b
    Examples:
      corral denied
      corral denied --all --json
      corral denied --follow
    """

    def action() -> None:
        from corral import denied as view
        from corral.lifecycle import working_directory
        from corral.reading import reading
        from corral.user import current_user
        from enforcer.client import Client, socket_path

        client = Client(socket_path(current_user(os.environ).environ))
        project = None if every else str(working_directory())
        terminal = sys.stdout.isatty()
        if follow:
            with reading():
                view.follow(
                    lambda after: client.denied(after, project),
                    _print,
                    _console().tell,
                    view.reader_left(sys.stdout),
                    as_json=as_json,
                    checks=every,
                )
            return
        with reading():
            found = client.denied(0, project)
        if as_json:
            _print(answers.text(view.selected(found, checks=every)))
            return
        colour = wants_colour(sys.stdout, os.environ)
        text = view.render(found, checks=every, chatty=terminal, colour=colour)
        if text:
            _print(text)

    _finish(action)


@app.command()
def metrics(as_json: Json = False) -> None:
    """Print the counters of the host service, as Prometheus reads them.

    \b
    Examples:
      corral metrics
      corral metrics >~/corral.prom
    """

    def action() -> None:
        from corral import counters
        from corral.reading import reading
        from corral.user import current_user
        from enforcer.client import Client, socket_path

        with reading():
            told = Client(socket_path(current_user(os.environ).environ)).metrics()
        _print(answers.text(counters.body(told)) if as_json else told.rstrip("\n"))

    _finish(action)


@app.command()
def down(
    sandbox: Annotated[
        str | None,
        typer.Argument(
            metavar="SANDBOX", help="Id of a sandbox; default: all of this directory.", show_default=False
        ),
    ] = None,
    purge: Annotated[
        bool,
        typer.Option("--purge", help="Remove its state, workspace, approval and image too; asks."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --purge: do not ask.")] = False,
) -> None:
    """End everything of this project's sandbox: containers, relays, network. Its state is kept.

    The policy need not be valid, and sandboxes that the directory had under another name go too.

    \b
    Examples:
      corral down
      corral down myproject-0123abcd
      corral down --purge
    """

    def action() -> None:
        from corral.down import down as do_down
        from corral.down import report

        invocation = _invocation(engine=True)
        if not purge:
            _print(report(do_down(invocation, sandbox)))
            return
        from corral.purge import purge as do_purge

        ask = None if yes else invocation.ask or _nobody
        for name in do_purge(invocation, sandbox, ask=ask, tell=_print):
            _print(f"removed {name}")

    _finish(action)


@app.command()
def doctor(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID", help="Make these checks only, as COR-020.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what is wrong with this host, why, and how it is put right; exit 1 when anything is broken.

    It changes nothing and works with nothing installed.

    \b
    Examples:
      corral doctor
      corral doctor COR-020 --json
    """

    def action() -> int:
        from corral.doctor import diagnosis
        from corral.doctor.effects import Host

        try:
            checks = diagnosis.select(ids or ())
        except LookupError as error:
            raise typer.BadParameter(str(error)) from error
        results = diagnosis.diagnose(Host.here(os.environ), checks)
        colour = wants_colour(sys.stdout, os.environ)
        _print(
            answers.text(diagnosis.body(results))
            if as_json
            else diagnosis.render(results, every=bool(ids), colour=colour)
        )
        return diagnosis.exit_code(results)

    _finish(action)


@app.command()
def version(as_json: Json = False) -> None:
    """Print the versions of corral and of the host service.

    \b
    Examples:
      corral version
      corral version --json
    """

    def action() -> None:
        from corral.user import current_user
        from enforcer.client import Client, socket_path
        from policy.errors import EnforcerError

        try:
            enforcer = Client(socket_path(current_user(os.environ).environ), timeout=5).version()
        except EnforcerError:
            enforcer = None
        if as_json:
            _print(answers.text({"version": __version__, "enforcer": enforcer}))
            return
        told = "not running" if enforcer is None else str(enforcer.get("version"))
        lines = [f"corral {__version__}", f"enforcer {told}"]
        if enforcer is not None:
            writer = enforcer.get("writer") or {}
            lines.append(f"writer {writer.get('version') or 'not reachable'}")
        _print("\n".join(lines))

    _finish(action)
