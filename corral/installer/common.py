"""What both programs for root share. Stdlib only: it travels over stdin to the system's Python.

Nothing here executes, imports or reads code from a path that a non-root user can write.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import pwd
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from policy import versions

SEARCH = ("/usr/sbin", "/sbin", "/usr/bin", "/bin")
UNITS = ("corral-skeleton.service", "corral-netfilter.socket", "corral-netfilter.service")
MANIFEST = "manifest.json"
PARTIAL = ".corral-new"

Run = Callable[[Sequence[str], "str | None"], str]


class StopError(Exception):
    """The program cannot go on; the text is JSON with ``message`` and ``hint``."""


def fail(message: str, fix: str) -> NoReturn:
    raise StopError(json.dumps({"message": message, "hint": fix}))


def run(argv: Sequence[str], stdin: str | None = None) -> str:
    """Run a program of the system to its end and return what it printed; StopError when it failed."""
    environ = {"PATH": ":".join(SEARCH), "LC_ALL": "C"}
    try:
        done = subprocess.run(
            list(argv), input=stdin or "", capture_output=True, text=True, env=environ, check=False
        )
    except OSError as error:
        fail(f"{argv[0]} cannot be run: {error.strerror}", "look whether its package is installed")
    if done.returncode != 0:
        fail(f"{' '.join(argv)} failed: {done.stderr.strip()}", "journalctl -xe")
    return done.stdout


class Places:
    """Where the system part lives. ``top`` is / but in tests."""

    def __init__(self, top: str = "/") -> None:
        root = pathlib.Path(top)
        self.top = root
        self.code = root / "opt/corral"
        self.units = root / "etc/systemd/system"
        self.modules = root / "etc/modules-load.d/corral.conf"
        self.settings = root / "etc/corral"
        self.records = root / "var/lib/corral"
        self.users = self.records / "users"
        self.before = self.records / "chains-before.json"
        self.runtime = root / "run/corral"
        self.claims = root / "run/corral-netfilter"
        self.private_claims = root / "run/private/corral-netfilter"
        self.lock = root / "run/corral-install.lock"


def installed(places: Places) -> versions.Part | None:
    """Return what the system units run, None when they run nothing that is there.

    Code that no unit names is what an installation that was cut off left behind: it does not count.
    """
    for unit in reversed(UNITS):
        try:
            text = (places.units / unit).read_text()
        except OSError:
            continue
        for name in re.findall(r"/opt/corral/([^/\s]+)/", text):
            directory = places.code / name
            if directory.is_dir():
                return _manifest(directory)
    return None


def _manifest(directory: pathlib.Path) -> versions.Part:
    release = directory.name.rpartition("-")[0]
    try:
        body = json.loads((directory / MANIFEST).read_text())
    except (OSError, ValueError):
        body = None
    found = versions.parse("the installed corral", body if isinstance(body, dict) else {})
    return found if found.release else versions.Part(found.name, release or None, found.schemas)


def users(places: Places) -> dict[int, str]:
    """Return who installed corral on this machine and still has an account, by uid."""
    found = {}
    try:
        names = [path.name for path in places.users.iterdir()]
    except OSError:
        return {}
    for name in names:
        with contextlib.suppress(ValueError, KeyError):
            found[int(name)] = pwd.getpwuid(int(name)).pw_name
    return found


def traces(places: Places) -> list[pathlib.Path]:
    """Return every path of the system part that exists; what is cut off or half removed too."""
    found = [
        places.code,
        places.modules,
        places.records,
        places.runtime,
        places.claims,
        places.private_claims,
    ]
    found.append(places.modules.with_name(places.modules.name + PARTIAL))
    for unit in UNITS:
        found += [places.units / unit, places.units / (unit + PARTIAL), places.units / f"{unit}.d"]
        with contextlib.suppress(OSError):
            found += places.units.glob(f"*.wants/{unit}")
            found += places.units.glob(f"*.requires/{unit}")
    present = []
    for path in found:
        # lexists: a link to a unit that is gone is a trace as well.
        with contextlib.suppress(OSError):
            if os.path.lexists(path):
                present.append(path)
    return present


def only_root_writes(path: pathlib.Path) -> pathlib.Path | None:
    """Return the first part of a path that someone else than root could replace, or None."""
    for part in (path, *path.parents):
        found = os.lstat(part)
        if stat.S_ISLNK(found.st_mode):
            target = pathlib.Path(os.path.realpath(part))
            if found.st_uid != 0:
                return part
            worse = only_root_writes(target)
            if worse:
                return worse
            continue
        if found.st_uid != 0 or (found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX):
            return part
    return None


@contextlib.contextmanager
def locked(places: Places) -> Iterator[None]:
    """Hold the lock of everything that changes the system part; its file goes with it."""
    while True:
        descriptor = os.open(places.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            if os.fstat(descriptor).st_ino == places.lock.stat().st_ino:
                break
        except FileNotFoundError:
            pass
        # Whoever held it before us removed the file.
        os.close(descriptor)
    try:
        yield
    finally:
        places.lock.unlink()
        os.close(descriptor)


def main(work: Callable[[dict[str, Any]], dict[str, Any]], payload: dict[str, Any]) -> int:
    """Run one of the programs: its result is the last line of stdout, its failure the last line of stderr."""
    if os.geteuid() != 0:
        print(json.dumps({"message": "this step needs root", "hint": "run it with sudo"}), file=sys.stderr)
        return 1
    try:
        print(json.dumps(work(payload)))
    except StopError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        told = {
            "message": f"{error.filename or 'the system'}: {error.strerror}",
            "hint": "look at it as root",
        }
        print(json.dumps(told), file=sys.stderr)
        return 1
    return 0
