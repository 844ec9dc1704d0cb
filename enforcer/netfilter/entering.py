"""Become a program in the namespaces of one process, or of none. Standard library only.

``python -I entering.py PID START NETNS -- COMMAND...``, where the numbers are those of ``namespace.Daemon``.
A process id is given again, and the process that got it may be anybody's: the namespaces are held by
descriptors before the process is told to be the one that is meant, and those are entered.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

PROC = "/proc"
SPACES = {"user": "--user", "net": "--net", "mnt": "--mount"}
PROGRAM = "nsenter"
PLACES = "/usr/sbin:/sbin:/usr/bin:/bin"
REFUSED = 1


class NotThere(Exception):
    """The process has ended, or another one has its id."""


def hold(pid: int, start: int, netns: int, proc: str = PROC) -> dict[str, int]:
    """Return descriptors of a process's namespaces, by their names below ``ns``.

    Raises:
        NotThere: it is not the process that started then, in that network namespace.
    """
    held: dict[str, int] = {}
    try:
        # This descriptor stays with the process: when that has ended, nothing can be read through it.
        place = os.open(f"{proc}/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in SPACES:
                held[name] = os.open(f"ns/{name}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=place)
            told = (_started(place), os.fstat(held["net"]).st_ino)
        finally:
            os.close(place)
        if told == (start, netns):
            return held
        problem = "another process has its id by now"
    except (OSError, ValueError, IndexError) as error:
        problem = str(error)
    for descriptor in held.values():
        os.close(descriptor)
    raise NotThere(f"your engine (process {pid}) has ended: {problem}")


def _started(place: int) -> int:
    with open(os.open("stat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=place), "rb") as file:  # noqa: PTH123 - a descriptor
        # The name of the program, in parentheses, may hold anything.
        return int(file.read().rpartition(b")")[2].split()[19])


def command(held: Mapping[str, int], argv: Sequence[str]) -> list[str]:
    """Return the command that enters what is held and becomes ``argv``."""
    spaces = [f"{SPACES[name]}=/proc/self/fd/{descriptor}" for name, descriptor in held.items()]
    return [PROGRAM, "--preserve-credentials", *spaces, "--", *argv]


def main(
    words: Sequence[str],
    environ: Mapping[str, str],
    execute: Callable[[str, list[str]], object] = os.execv,
    proc: str = PROC,
) -> NoReturn:
    """Enter and become."""
    pid, start, netns, _, *argv = words
    program = shutil.which(PROGRAM, path=f"{PLACES}:{environ.get('PATH', '')}")
    if program is None:
        sys.exit(f"{PROGRAM} is not here (package util-linux)")
    try:
        held = hold(int(pid), int(start), int(netns), proc)
    except NotThere as error:
        sys.exit(str(error))
    for descriptor in held.values():
        os.set_inheritable(descriptor, True)
    execute(program, command(held, argv))
    sys.exit(REFUSED)


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
