"""The network namespace of a user's own (rootless) engine: which process made it, and entering it.

Who came first is told by a record that the guard (``guard.py``) leaves before it becomes dockerd: the process
keeps its id and its start time, so a daemon that the guard did not start, or another one after a restart, can
never be taken for the one whose namespace has the rules.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from enforcer.netfilter import entering

PROC = Path("/proc")
PID_FILE = "docker.pid"
RECORD = "corral/engine.json"
SOCKET = "corral/netfilter.sock"
CLAIMS = "corral/claims.json"
# Who owns the user namespace is 0 in there.
OWNER = 0


class NotGuarded(Exception):
    """No engine of the user's runs, or the rules were not there before it."""


@dataclass(frozen=True)
class Daemon:
    """One life of a dockerd. ``start`` is in clock ticks since boot, ``netns`` the inode of its namespace."""

    pid: int
    start: int
    netns: int


def start_time(pid: int, proc: Path = PROC) -> int:
    """Return when a process started, in clock ticks since boot; its id together with it is never given again.

    Raises:
        OSError, ValueError: there is no such process.
    """
    text = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    # The name of the program, in parentheses, may hold anything.
    return int(text.rpartition(")")[2].split()[19])


def netns(pid: int | str, proc: Path = PROC) -> int:
    """Return the inode of the network namespace that a process is in.

    Raises:
        OSError: there is no such process, or it is another user's.
    """
    return (proc / str(pid) / "ns" / "net").stat().st_ino


def describe(pid: int | str, proc: Path = PROC) -> Daemon:
    """Return what a process is, as a daemon.

    Raises:
        OSError, ValueError: there is no such process.
    """
    number = int((proc / "self").readlink().name) if pid == "self" else int(pid)
    return Daemon(number, start_time(number, proc), netns(number, proc))


def record(runtime: Path, daemon: Daemon) -> None:
    """Say that the rules stood in the daemon's namespace before it was dockerd.

    Raises:
        OSError: it cannot be written.
    """
    path = runtime / RECORD
    path.parent.mkdir(mode=0o700, exist_ok=True)
    partial = path.with_suffix(".new")
    partial.write_text(json.dumps(asdict(daemon)))
    partial.replace(path)


def running(runtime: Path, proc: Path = PROC) -> Daemon | None:
    """Return the user's engine as it runs now, guarded or not; None when none runs."""
    try:
        return describe(int((runtime / PID_FILE).read_text()), proc)
    except (OSError, ValueError, IndexError):
        return None


def find(runtime: Path, proc: Path = PROC) -> Daemon:
    """Return the user's engine, in whose namespace the rules came first.

    Raises:
        NotGuarded: none runs, or it was not started by the guard.
    """
    found = running(runtime, proc)
    if found is None:
        raise NotGuarded(f"your engine does not run ({runtime / PID_FILE} names no process)")
    try:
        known = Daemon(**json.loads((runtime / RECORD).read_text()))
    except (OSError, ValueError, TypeError):
        known = None
    if known != found:
        raise NotGuarded(
            "your engine was started without corral's rules: containers may have run before they were loaded"
        )
    return found


def enter(daemon: Daemon) -> tuple[str, ...]:
    """Return the beginning of a command that runs in the daemon's namespaces, as their owner.

    It fails when the daemon has ended by then, whoever has its process id.
    """
    numbers = (str(daemon.pid), str(daemon.start), str(daemon.netns))
    return (sys.executable, "-I", "-S", entering.__file__, *numbers, "--")


def runtime_directory(environ: Mapping[str, str]) -> Path:
    """Return the user's runtime directory. Inside the user namespace the uid says nothing about it.

    Raises:
        NotGuarded: XDG_RUNTIME_DIR is not set.
    """
    base = environ.get("XDG_RUNTIME_DIR", "")
    if not base.startswith("/"):
        raise NotGuarded("XDG_RUNTIME_DIR is not set")
    return Path(base)
