"""Who runs which command where: what every command begins with, also one that waits for no parser."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from corral import going
from corral.console import Console, wants_colour
from corral.plain import terminal_safe

if TYPE_CHECKING:
    from corral.context import Invocation


class Settings:
    """What the options before the command say."""

    verbose = False


def verbose() -> bool:
    """Say whether details and tracebacks are wanted."""
    return Settings.verbose or bool(os.environ.get("CORRAL_DEBUG"))


def console(*, quiet: bool = False, steps: bool = False) -> Console:
    """Return where this process tells things; ``quiet``: no progress; ``steps``: minor steps too."""
    stream = sys.stderr
    return Console(
        stream,
        colour=wants_colour(stream, os.environ),
        progress=stream.isatty() and not quiet,
        verbose=verbose(),
        minor=steps,
        live=going.rewrites(os.environ),
        room=_room,
    )


def _room() -> int:
    from corral.terminal import STDERR, size

    return going.columns(os.environ, size(STDERR)[0])


def invocation(
    *, quiet: bool = False, accepted: str | None = None, engine: bool = False, steps: bool = False
) -> Invocation:
    """Return who runs which command where.

    Args:
        quiet: no progress.
        accepted: hash of the policy that its user named.
        engine: it is going to need Docker.
        steps: minor steps are shown too.
    """
    from corral.early import begin, service

    # First of all: both answer while the rest is being imported.
    early, served = (begin(os.environ), service(dict(os.environ))) if engine else (None, None)
    from corral.context import Invocation, current_user
    from corral.lifecycle import working_directory
    from corral.terminal import STDERR, STDIN, is_terminal

    asking = ask if is_terminal(STDIN) and is_terminal(STDERR) else None
    told = console(quiet=quiet, steps=steps)
    return Invocation(current_user(os.environ), working_directory(), told, accepted, asking, early, served)


def ask(question: str) -> bool:
    """Put a question to who sits at the terminal; anything but yes is no."""
    sys.stderr.write(terminal_safe(f"corral: {question} [y/N] "))
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in {"y", "yes"}
