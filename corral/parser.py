"""How the command line is read and explained: typer's commands, with corral's order, help and errors.

Only what typer offers in all its versions is relied on: some have Click beside them, some a copy within.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from corral import invoking
from policy.errors import ArgumentError

# Commands in the order in which people meet them.
GROUPS = (
    ("Set up", ("install", "doctor", "init", "policy", "build", "schema", "completion", "version")),
    ("Run", ("run", "shell", "attach", "up", "enable", "disable")),
    ("Look", ("status", "ps", "logs", "inspect", "denied", "verify", "render", "df", "metrics")),
    ("Change", ("allow", "deny", "refresh", "revert")),
    ("Tidy", ("down", "prune", "uninstall")),
)
# What any error of the parser is; its class is where no name leads to in every version.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
# Characters of a word that is told again.
LONGEST = 80


def verbose_option() -> Any:
    """Return the option -v as a command has it, beside the one before the command."""
    app = typer.Typer(add_completion=False)

    @app.command()
    def _(
        verbose: Annotated[
            bool, typer.Option("--verbose", "-v", help="Show details, and tracebacks.")
        ] = False,
    ) -> None: ...

    option = next(one for one in typer.main.get_command(app).params if one.name == "verbose")
    option.expose_value = False
    option.callback = _be_verbose
    return option


def _be_verbose(_: Any, __: Any, value: Any) -> Any:
    if value:
        invoking.Settings.verbose = True
    return value


def usage(pieces: list[str]) -> list[str]:
    """Return the pieces of a usage line as manuals have them: SHA, not {SHA}."""
    found = [re.sub(r"^\{([^{}|]*)\}$", r"\1", piece) for piece in pieces]
    return [re.sub(r"^\[(-- \w+)\](?:\.\.\.)?$", r"[\1...]", piece) for piece in found]


class Command(TyperCommand):
    """A command that takes -v, too, and whose help has no types of Python's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(verbose_option())

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return what follows the command in its usage line."""
        return usage(super().collect_usage_pieces(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write what it takes."""
        _write_rows(self, ctx, formatter)


class Group(TyperGroup):
    """Commands in the order of ``GROUPS``, with their first sentence whole."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if all(one.name != "verbose" for one in self.params):
            self.params.append(verbose_option())

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of commands, hidden ones too."""
        order = [name for _, names in GROUPS for name in names]
        known = {name: place for place, name in enumerate(order)}
        return sorted(super().list_commands(ctx), key=lambda name: known.get(name, len(order)))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write what it takes, and the commands."""
        _write_rows(self, ctx, formatter)
        for title, rows in self.sections(ctx):
            with formatter.section(title):
                formatter.write_dl(rows)

    def sections(self, ctx: Any) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        """Yield titles, with the names of commands and what they do."""
        found = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = {name: sentence(one.help or "") for name, one in found.items() if one and not one.hidden}
        for title, names in GROUPS:
            chosen = [(name, rows.pop(name)) for name in names if name in rows and ctx.parent is None]
            if chosen:
                yield title, chosen
        if rows:
            yield "Commands", list(rows.items())


class App(typer.Typer):
    """A command line of such commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=Group, no_args_is_help=True, rich_markup_mode=None, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        """See typer."""
        return super().command(name, cls=Command, **options)


def sentence(text: str) -> str:
    """Return the first sentence of a help text, up to what qualifies it."""
    first = re.split(r"\n\s*\n", text.strip())[0]
    return re.split(r"[.;](?:\s|$)", " ".join(first.split()))[0] + "."


def record(parameter: Any, context: Any) -> tuple[str, str] | None:
    """Return (name, meaning) of an argument or option as the help has it, None for a hidden one."""
    found = parameter.get_help_record(context)
    if found is None:
        return None
    name, meaning = (" ".join(part.split()) for part in found)
    if getattr(parameter, "param_type_name", "") == "argument":
        # What a thing is called says what it is; <str> and <list[str]> are a programmer's words.
        name = re.sub(r"\s*<[^<>]*>$", "", name)
    return name, meaning


def _write_rows(command: Any, context: Any, formatter: Any) -> None:
    kinds: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for parameter in command.get_params(context):
        row = record(parameter, context)
        if row is not None:
            argument = getattr(parameter, "param_type_name", "") == "argument"
            kinds["Arguments" if argument else "Options"].append(row)
    for title, rows in kinds.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)


def refused(error: Any, meant: str) -> ArgumentError:
    """Return an error of the parser as one of corral's: what is wrong, how it is written, where help is.

    ``meant``: the command, for errors that do not say where they arose.
    """
    what = re.sub(rf"\S{{{LONGEST},}}", lambda found: found[0][:LONGEST] + "…", error.format_message())
    what = (what[:1].lower() + what[1:]).rstrip(".")
    context = getattr(error, "ctx", None)
    if context is None:
        return ArgumentError(what, f"{meant} --help")
    usage = " ".join(context.get_usage().split())
    return ArgumentError(f"{what}\n  {usage[:1].lower()}{usage[1:]}", f"{context.command_path} --help")


def _meant(command: Any, arguments: list[str]) -> str:
    path = ["corral"]
    for word in arguments:
        below = getattr(command, "commands", {}).get(word)
        if below is not None:
            command = below
            path.append(word)
    return " ".join(path)


def parse(app: typer.Typer, arguments: list[str]) -> int:
    """Do what the arguments say and return the exit code.

    Raises:
        ArgumentError: they say nothing that can be done.
    """
    root = typer.main.get_command(app)
    try:
        code = root(arguments, prog_name="corral", standalone_mode=False)
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            # Not a mistake to be told of: the help, where messages are.
            error.show()  # type: ignore[attr-defined]
            return 2
        raise refused(error, _meant(root, arguments)) from error
    except typer.Abort:
        return 130
    return code if isinstance(code, int) else 0
