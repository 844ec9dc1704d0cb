"""Commands that do not wait for the parser of the command line: to import it takes as long as they do."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence


def status(*, as_json: bool) -> None:
    """Print what the host service says of this user's sandboxes, and what is known beside it.

    Raises:
        CorralError: the service does not answer, or is another version's.
    """
    from corral import answers
    from corral.console import wants_colour
    from corral.output import print_text
    from corral.reading import reading
    from corral.status import render
    from corral.statusfacts import added
    from corral.user import check_same, current_user
    from enforcer.client import Client, socket_path
    from policy.identity import data_home

    user = current_user(os.environ)
    client = Client(socket_path(user.environ))
    with reading():
        check_same(client.version())
        told = client.status()
    found = added(told, user, data_home(user.home, dict(user.environ)))
    colour = wants_colour(sys.stdout, os.environ)
    print_text(answers.text(found) if as_json else render(found, colour=colour))


def run(given: Sequence[str]) -> int:
    """Run the harness, or the given command, as it is run without any option; return its exit code."""
    from corral.invoking import invocation

    asked = invocation(engine=True)
    from corral.oserrors import naming
    from corral.run import NO_OPTIONS
    from corral.run import run as do_run

    with naming(asked.data):
        return do_run(asked, given, NO_OPTIONS)


def shell() -> int:
    """Open a shell without any option; return its exit code."""
    from corral.invoking import invocation

    asked = invocation(quiet=True, engine=True)
    from corral.oserrors import naming
    from corral.run import NO_OPTIONS
    from corral.run import shell as do_shell

    with naming(asked.data):
        return do_shell(asked, NO_OPTIONS)


def command(arguments: Sequence[str]) -> Callable[[], int | None] | None:
    """Return what these arguments ask for when no parser is needed to say it; its number is the exit code."""
    if list(arguments) == ["status"]:
        return lambda: status(as_json=False)
    if list(arguments) == ["status", "--json"]:
        return lambda: status(as_json=True)
    if list(arguments) == ["shell"]:
        return shell
    if list(arguments[:1]) == ["run"]:
        rest = list(arguments[1:])
        # The first word that is no option begins the command, in which all words are its own.
        if rest[:1] == ["--"]:
            return lambda: run(rest[1:])
        if all(not word.startswith("-") for word in rest[:1]):
            return lambda: run(rest)
    return None
