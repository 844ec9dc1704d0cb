"""Control groups: where this machine has its controllers, the groups of a lab, and what a box does with them.

An engine's limits are real only where the engine finds controllers. A machine that has them in cgroup 2
passes them on. One that has them in cgroup 1 cannot: a controller is in one of the two. There the box is
either hybrid (its systemd and its engine use cgroup 1) or split (systemd has cgroup 2 without controllers,
the engine sees cgroup 1).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from . import execute
from .engines import Engine
from .execute import LabError

LIMITS = ("cpu", "memory", "pids")
"""Controllers without which an engine discards limits."""

_FLAGS = ("rw", "ro", "clone_children", "noprefix", "xattr", "seclabel", "release_agent=", "favordynmods")
_MOUNT_OPTIONS = "nosuid,nodev,noexec"


class Arrangement(Enum):
    """What systemd and the engine of a box see below /sys/fs/cgroup."""

    UNIFIED = "unified"
    HYBRID = "hybrid"
    SPLIT = "split"


@dataclass(frozen=True)
class Hierarchy:
    """One mounted hierarchy; `controllers` is empty for cgroup 2 and may be one `name=…` in cgroup 1."""

    mount: Path
    controllers: tuple[str, ...] = ()

    @property
    def options(self) -> str:
        """The mount options that name it."""
        return ",".join(self.controllers)


def hierarchies(mountinfo: str) -> list[Hierarchy]:
    """Every hierarchy once, where it is mounted first; from the text of /proc/self/mountinfo."""
    found: dict[tuple[str, ...], Hierarchy] = {}
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, rest = after.partition(" ")
        if kind in ("cgroup", "cgroup2"):
            named = [] if kind == "cgroup2" else rest.split(" ")[-1].split(",")
            controllers = tuple(option for option in named if not option.startswith(_FLAGS))
            mount = Path(before.split(" ")[4].encode().decode("unicode_escape"))
            found.setdefault(controllers, Hierarchy(mount, controllers))
    return list(found.values())


def arrangement(engine: Engine, found: Iterable[Hierarchy]) -> Arrangement:
    """How a box of that engine is arranged on a machine with these hierarchies."""
    in_cgroup1 = {controller for hierarchy in found for controller in hierarchy.controllers}
    if not in_cgroup1.issuperset(LIMITS):
        return Arrangement.UNIFIED
    return Arrangement.HYBRID if engine.cgroup1 else Arrangement.SPLIT


@dataclass(frozen=True)
class Groups:
    """The groups of one lab: the same path below every hierarchy that the machine has mounted."""

    path: str
    hierarchies: tuple[Hierarchy, ...]

    @classmethod
    def of(cls, path: str) -> Groups:
        return cls(path, tuple(hierarchies(Path("/proc/self/mountinfo").read_text())))

    def unified(self) -> Path | None:
        """The lab's group in cgroup 2; None on a machine without it. It may not exist."""
        return next((h.mount / self.path for h in self.hierarchies if not h.controllers), None)

    def roots(self) -> list[Path]:
        """The lab's group in every hierarchy; each may not exist."""
        return [hierarchy.mount / self.path for hierarchy in self.hierarchies]

    def make(self, kind: str) -> list[Path]:
        """The groups `kind` of the lab, one in each hierarchy, made when missing."""
        made = []
        for hierarchy in self.hierarchies:
            group = hierarchy.mount / self.path / kind
            group.mkdir(parents=True, exist_ok=True)
            if not hierarchy.controllers:
                _delegate(hierarchy.mount / self.path)
            elif "cpuset" in hierarchy.controllers:
                _open_cpuset(hierarchy.mount, group)
            made.append(group)
        return made

    def visitors(self, kind: str) -> list[Path]:
        """Where a process belongs that enters the box from outside: below the root the box sees."""
        found = []
        for hierarchy in self.hierarchies:
            group = hierarchy.mount / self.path / kind
            if (group / "payload").is_dir():
                group = group / "payload" / "lab-visitors"
                group.mkdir(exist_ok=True)
            if group.is_dir():
                found.append(group)
        return found

    def clear(self, kind: str) -> None:
        """Remove what a dead box left below its groups, so that the next one starts with empty ones."""
        for root in self.roots():
            for child in children(root / kind):
                remove(child)

    def remove(self) -> None:
        """Remove every group of the lab; its processes are dead already."""
        for root in self.roots():
            remove(root)
            with contextlib.suppress(OSError):  # other labs may be in it
                root.parent.rmdir()

    def populated(self, kind: str | None) -> bool:
        """Kill whoever is in the groups `kind` (or in any of the lab); whether somebody was."""
        somebody = False
        for hierarchy in self.hierarchies:
            group = hierarchy.mount / self.path / (kind or "")
            if hierarchy.controllers:
                somebody |= "pids" in hierarchy.controllers and kill_members(group)
            elif group.exists():
                with contextlib.suppress(OSError):
                    (group / "cgroup.kill").write_text("1")
                somebody |= "populated 1" in execute.read_text(group / "cgroup.events")
        return somebody


def children(group: Path) -> list[Path]:
    """Groups right below one."""
    return [entry for entry in group.iterdir() if entry.is_dir()] if group.is_dir() else []


def kill_members(group: Path) -> bool:
    """Kill the processes of a group of cgroup 1 and of those below it; whether there was one."""
    killed = False
    for directory, _, _ in os.walk(group):
        for pid in execute.read_text(Path(directory) / "cgroup.procs").split():
            with contextlib.suppress(ProcessLookupError):
                execute.Process.of(int(pid)).kill()
                killed = True
    return killed


def remove(root: Path, timeout: float = 10) -> None:
    """Remove a group and everything below it. The dead are in it until they are reaped, hence the patience.

    A group that somebody still lives in stays.
    """

    def gone() -> bool:
        for directory, _, _ in os.walk(root, topdown=False):
            with contextlib.suppress(OSError):
                Path(directory).rmdir()
        return not root.exists()

    with contextlib.suppress(LabError):
        execute.wait_until(gone, f"{root} is empty", timeout)


def _delegate(root: Path) -> None:
    """Pass on every controller the machine has in cgroup 2 down to `root`."""
    for group in (root.parent, root):
        for controller in execute.read_text(group / "cgroup.controllers").split():
            with contextlib.suppress(OSError):
                (group / "cgroup.subtree_control").write_text(f"+{controller}")


def _open_cpuset(mount: Path, group: Path) -> None:
    """A new cpuset has neither a processor nor memory, and takes no process: give each level its parent's."""
    levels = [level for level in (group, *group.parents) if level != mount and level.is_relative_to(mount)]
    for level in reversed(levels):
        for resource in ("cpuset.cpus", "cpuset.mems"):
            if not execute.read_text(level / resource).strip():
                (level / resource).write_text((level.parent / resource).read_text())


def writable_script() -> str:
    """For PID 1 of a hybrid box: nspawn mounts the controllers read-only, a host has them writable."""
    return f"""
for controller in /sys/fs/cgroup/*/; do
    mount -o remount,bind,rw,{_MOUNT_OPTIONS} "${{controller%/}}"
done
"""


def engine_script(found: Iterable[Hierarchy]) -> str:
    """Becomes the daemon it is given, with cgroup 1 in /sys/fs/cgroup for it and its children alone.

    Every other mount stays shared with the box both ways: what an engine mounts is seen there, as on a host.
    """
    mounts = []
    for hierarchy in found:
        controllers = [name for name in hierarchy.controllers if not name.startswith("name=")]
        if controllers:
            point = f"/sys/fs/cgroup/{hierarchy.options}"
            mounts.append(f"mkdir {point}")
            mounts.append(f"mount -t cgroup -o {hierarchy.options},{_MOUNT_OPTIONS} cgroup {point}")
            if len(controllers) > 1:
                mounts += [f"ln -s {hierarchy.options} /sys/fs/cgroup/{name}" for name in controllers]
    lines = "\n".join(mounts)
    return f"""#!/bin/sh
exec unshare --mount --propagation unchanged /bin/sh -e -c '
mount --make-private /sys/fs/cgroup
mount -t tmpfs -o mode=755,size=1m,{_MOUNT_OPTIONS} cgroup1 /sys/fs/cgroup
{lines}
mount -o remount,ro /sys/fs/cgroup
exec "$@"' cgroup1 "$@"
"""


def wrapped_unit(unit: str, script: str, *arguments: str) -> str:
    """A drop-in that starts the unit's daemon through `script`. Raises LabError when there is no daemon."""
    for line in unit.splitlines():
        name, _, command = line.partition("=")
        if name == "ExecStart" and command.startswith("/"):
            words = " ".join((script, command, *arguments))
            called = command.split()[0].rpartition("/")[2]
            return f"[Service]\nSyslogIdentifier={called}\nExecStart=\nExecStart={words}\n"
    raise LabError("the unit has no ExecStart to wrap")
