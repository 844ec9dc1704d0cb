"""Running a program as root through sudo, or where a user is root without being it, over stdin."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from corral import process
from policy.errors import InstallError

SYSTEM_PYTHON = "/usr/bin/python3"
PATIENCE = 180.0


def as_root(program: str, environ: Mapping[str, str], again: str) -> dict[str, Any]:
    """Run a program as root with the system's Python and return what it answered.

    Args:
        program: its text, see ``bundle``.
        environ: the user's environment.
        again: the command to repeat in a terminal when sudo needs one.

    Raises:
        InstallError: sudo refused, or the program stopped; with its own words.
    """
    prefix = ["sudo"] if sys.stdin.isatty() else ["sudo", "-n"]
    try:
        return _run([*prefix, "--"], program, environ, again, "with sudo")
    except process.ProgramError as error:
        raise InstallError(
            f"sudo cannot be run: {error.message}", "install sudo, or ask an administrator"
        ) from error


def inside(entering: Sequence[str], program: str, environ: Mapping[str, str], again: str) -> dict[str, Any]:
    """Run a program in the namespaces of the user's own engine, as their owner; like ``as_root`` otherwise.

    Args:
        entering: the beginning of a command that runs in there.
        program, environ, again: see ``as_root``.
    """
    try:
        return _run(entering, program, environ, again, "in your engine's namespaces")
    except process.ProgramError as error:
        raise InstallError(f"your engine's namespaces cannot be entered: {error.message}", again) from error


def _run(
    prefix: Sequence[str], program: str, environ: Mapping[str, str], again: str, how: str
) -> dict[str, Any]:
    done = process.run(
        [*prefix, SYSTEM_PYTHON, "-I", "-"],
        environ=environ,
        stdin=program,
        timeout=PATIENCE,
        check=False,
    )
    if done.code != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        try:
            told = json.loads(last)
            raise InstallError(str(told["message"]), str(told["hint"]))
        except (ValueError, KeyError, TypeError):
            raise InstallError(f"the step {how} failed: {last}", f"run it in a terminal: {again}") from None
    try:
        answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise InstallError(f"the step {how} ended without an answer", f"again: {again}") from error
    return answer
