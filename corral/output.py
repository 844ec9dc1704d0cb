"""A command's result on stdout."""

from __future__ import annotations

import sys


def print_text(text: str) -> None:
    """Write text and a newline.

    Raises:
        BrokenPipeError: somebody has read enough.
        CorralError: it could not be written.
    """
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        from corral.oserrors import unwritten

        raise unwritten("stdout", error) from error
