"""Whether the files that guard the start are out of the agent's reach: by owner, by mode, and by trying."""

from __future__ import annotations

import os
import stat
import threading

from .attempts import TRIES
from .outcome import Failed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .expectations import Expectations
    from .system import Check, System

GUARDS = (
    "/usr/local/bin/corral-entrypoint",
    "/usr/local/bin/corral-verify",
    "/usr/local/bin/corral-proxy",
    "/etc/hosts",
    "/etc/hostname",
    "/etc/resolv.conf",
)
# Written on the host by the user's own service, so what keeps the agent from it is the mount.
PUBLISHED = frozenset({"/etc/hosts"})
# Tries that succeed move things for a moment: one after the other, or each could meet the other's.
_TRYING = threading.Lock()


def root_owned(path: str) -> Check:
    """Return a check that a path is root's and that no try of the agent's to change or cover it succeeds."""

    def check(_: Expectations, system: System) -> str:
        owner, mode = system.owner(path), system.mode(path)
        read_only = bool(system.flags(path) & os.ST_RDONLY)
        if owner != 0 and not (path in PUBLISHED and read_only):
            raise Failed(f"belongs to uid {owner}")
        mine = str(owner) in system.status().get("Uid", "").split()
        if mine and not read_only:
            raise Failed(f"belongs to the agent (uid {owner} in here), and is not mounted read-only")
        if owner == 0 and not mine and mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
            raise Failed(f"is root's, but its mode {mode:04o} lets others write")
        done = [*_succeeded(system, path), *_covered(system, path)]
        if done:
            raise Failed(f"can be {', '.join(done)}")
        # Where a rootless engine calls its user 0, root's files are the agent's own: the mount protects them.
        whose = "root's" if owner == 0 and not mine else "mounted read-only"
        return f"{whose}; {len(TRIES)} ways to change it and two to mount over it were refused"

    return check


def _succeeded(system: System, path: str) -> list[str]:
    done = []
    with _TRYING:
        for way in TRIES:
            try:
                left = system.attempt(way, path)
            except OSError:
                continue
            done.append(f"{way} ({left})" if left else way)
    return done


def _covered(system: System, path: str) -> list[str]:
    found = system.mount_over(path)
    ways = {"here": "mounted over", "there": "mounted over in namespaces of its own"}
    return [told for way, told in ways.items() if found[way]]
