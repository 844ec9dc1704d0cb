"""A command's result on stdout."""

from __future__ import annotations

import sys

from corral.plain import terminal_safe


def print_text(text: str) -> None:
    """Write text and a newline; nothing of it but colours commands a terminal.

    Raises:
        BrokenPipeError: somebody has read enough.
        CorralError: it could not be written.
    """
    try:
        sys.stdout.write(terminal_safe(text, colour=True) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        from corral.oserrors import unwritten

        raise unwritten("stdout", error) from error
