"""The one place of the command line that runs programs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from policy.errors import CorralError
from policy.records import dataclass

# Before the user's own, which may have a project's directories in it (an activated environment), where an
# agent that runs at this moment writes; and because an ordinary user's PATH lacks some of them on Debian.
SYSTEM_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
SHOWN_LINES = 10


class ProgramError(CorralError):
    """A program is missing, failed, or took too long."""


@dataclass(frozen=True)
class Completed:
    """A program that ended; ``stdout`` and ``stderr`` are text."""

    argv: tuple[str, ...]
    code: int
    stdout: str
    stderr: str


def find(program: str, environ: Mapping[str, str], hint: str | None = None) -> str:
    """Return the absolute path of a program.

    Raises:
        ProgramError: it is not installed.
    """
    directories = [part for part in environ.get("PATH", "").split(os.pathsep) if part.startswith("/")]
    path = shutil.which(program, path=os.pathsep.join((*SYSTEM_PATH, *directories)))
    if path is None:
        raise ProgramError(f"{program} is not installed on this host", hint)
    return path


def run(
    argv: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str = "",
    timeout: float = 30,
    check: bool = True,
    hint: str | None = None,
) -> Completed:
    """Run a program to its end and return what it printed, in English.

    Args:
        argv: the program (a name or an absolute path) and its arguments; no shell is involved.
        environ: the user's environment (default: this process's); LC_ALL is replaced.
        cwd: where it runs (default: where this process does).
        stdin: what the program reads; it never gets a terminal.
        timeout: seconds, after which it is killed.
        check: whether an exit code other than 0 is an error.
        hint: the fix to show when it is.

    Raises:
        ProgramError: missing, late, or (with ``check``) failed; the message has the end of its stderr.
    """
    environ = os.environ if environ is None else environ
    command = (find(argv[0], environ, hint), *argv[1:])
    try:
        done = subprocess.run(
            command,
            input=stdin.encode(),
            capture_output=True,
            timeout=timeout,
            env={**environ, "LC_ALL": "C"},
            cwd=cwd,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise ProgramError(f"{_shown(argv)} did not end within {timeout:g} s", hint) from late
    except OSError as error:
        raise ProgramError(f"cannot run {command[0]}: {error.strerror}", hint) from error
    result = Completed(tuple(argv), done.returncode, _text(done.stdout), _text(done.stderr))
    if check and result.code != 0:
        raise ProgramError(
            "\n".join([f"{_shown(argv)} failed with exit code {result.code}", *_tail(result)]), hint
        )
    return result


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _tail(result: Completed) -> list[str]:
    lines = (result.stderr.strip() or result.stdout.strip()).splitlines()
    return [f"  | {line}" for line in lines[-SHOWN_LINES:]]


def _shown(argv: Sequence[str]) -> str:
    text = " ".join(argv)
    return text if len(text) <= 200 else f"{text[:200]}..."
