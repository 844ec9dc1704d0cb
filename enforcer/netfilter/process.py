"""The one place in the writer that runs programs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

SEARCH = ("/usr/sbin", "/sbin", "/usr/bin", "/bin")
TIMEOUT = 20.0

Run = Callable[[Sequence[str], str | None], str]


@dataclass
class ToolError(Exception):
    """A program is missing, failed, or did not end in time. ``sent`` is what it was given on stdin."""

    argv: tuple[str, ...]
    reason: str
    sent: str = ""

    def __str__(self) -> str:
        return f"{' '.join(self.argv)}: {self.reason}"


def find(program: str) -> str:
    """Return the absolute path of ``program`` in the system directories; PATH is not consulted.

    An absolute path is returned as it is.
    """
    if program.startswith("/"):
        return program
    for directory in SEARCH:
        candidate = f"{directory}/{program}"
        if os.access(candidate, os.X_OK):
            return candidate
    raise ToolError((program,), f"not found in {', '.join(SEARCH)}")


def identity(program: str) -> tuple[str, int, int, int] | None:
    """Return what is another value once ``program`` is another one; None: it is missing."""
    try:
        path = find(program)
        found = Path(path).stat()
    except (ToolError, OSError):
        return None
    return path, found.st_dev, found.st_ino, found.st_mtime_ns


def run(argv: Sequence[str], stdin: str | None = None) -> str:
    """Run a program to its end and return its standard output.

    Raises:
        ToolError: it is missing, ended non-zero (its stderr is the reason), or took over 20 s.
    """
    command = (find(argv[0]), *argv[1:])
    try:
        done = subprocess.run(
            command,
            input=stdin if stdin is not None else "",
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
            env={"LC_ALL": "C", "PATH": ":".join(SEARCH)},
            cwd="/",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolError(command, str(error), stdin or "") from error
    if done.returncode != 0:
        reason = done.stderr.strip() or f"exit status {done.returncode}"
        raise ToolError(command, reason, stdin or "")
    return done.stdout
