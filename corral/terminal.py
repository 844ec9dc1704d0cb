"""The user's terminal: is there one, how large is it, raw mode and back."""

from __future__ import annotations

import contextlib
import os
import termios
import tty
from collections.abc import Iterator

STDIN, STDOUT, STDERR = 0, 1, 2


def is_terminal(descriptor: int) -> bool:
    """Say whether an open descriptor is a terminal; a closed one is not."""
    try:
        return os.isatty(descriptor)
    except OSError:
        return False


def is_open(descriptor: int) -> bool:
    """Say whether a descriptor is open."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def size(descriptor: int) -> tuple[int, int]:
    """Return (columns, rows); (0, 0) when unknown."""
    try:
        found = os.get_terminal_size(descriptor)
    except OSError:
        return 0, 0
    return found.columns, found.lines


@contextlib.contextmanager
def raw(descriptor: int) -> Iterator[None]:
    """Put a terminal into raw mode (each key goes to the container) and back, whatever happens in between."""
    before = termios.tcgetattr(descriptor)
    try:
        tty.setraw(descriptor, termios.TCSADRAIN)
        yield
    finally:
        # The terminal may be gone (hang-up): there is nothing left to restore.
        with contextlib.suppress(termios.error):
            # Not TCSAFLUSH: keys typed ahead belong to the shell.
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
