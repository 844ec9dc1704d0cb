"""Who runs which command where: what every command begins with, also one that waits for no parser."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

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


def console(*, quiet: bool = False) -> Console:
    """Return where this process tells things; ``quiet``: no progress."""
    stream = sys.stderr
    return Console(
        stream,
        colour=wants_colour(stream, os.environ),
        progress=stream.isatty() and not quiet,
        verbose=verbose(),
    )


def invocation(*, quiet: bool = False, accepted: str | None = None, engine: bool = False) -> Invocation:
    """Return who runs which command where; ``engine``: it is going to need Docker."""
    from corral.early import begin, service

    # First of all: both answer while the rest is being imported.
    early, served = (begin(os.environ), service(dict(os.environ))) if engine else (None, None)
    from corral.context import Invocation, current_user
    from corral.lifecycle import working_directory
    from corral.terminal import STDERR, STDIN, is_terminal

    asking = ask if is_terminal(STDIN) and is_terminal(STDERR) else None
    return Invocation(
        current_user(os.environ), working_directory(), console(quiet=quiet), accepted, asking, early, served
    )


def ask(question: str) -> bool:
    """Put a question to who sits at the terminal; anything but yes is no."""
    sys.stderr.write(terminal_safe(f"corral: {question} [y/N] "))
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in {"y", "yes"}
