"""What a lab left on the machine: its state file, and how every trace of it is found and removed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import execute, network
from .cgroups import Groups
from .execute import LabError, Process
from .layout import Layout, netns_path


class State:
    """Processes by role and notes, on disk after every change: a crash forgets nothing."""

    def __init__(self, lab: Layout) -> None:
        self._path = lab.state
        self.groups = Groups.of(lab.cgroup)

    def get(self, role: str) -> Process | None:
        """The process of that role, dead or alive; None when there never was one."""
        found = self._read()["processes"].get(role)
        return Process(found["pid"], found["start"]) if found else None

    def alive(self, role: str) -> bool:
        process = self.get(role)
        return process is not None and process.alive()

    def processes(self) -> dict[str, Process]:
        return {
            role: Process(found["pid"], found["start"]) for role, found in self._read()["processes"].items()
        }

    def put(self, role: str, process: Process, **notes: str) -> None:
        data = self._read()
        data["processes"][role] = {"pid": process.pid, "start": process.start}
        data["notes"] |= notes
        self._write(data)

    def drop(self, role: str) -> None:
        data = self._read()
        data["processes"].pop(role, None)
        self._write(data)

    def note(self, key: str) -> str:
        return str(self._read()["notes"].get(key, ""))

    def set_notes(self, **notes: str) -> None:
        data = self._read()
        data["notes"] |= notes
        self._write(data)

    def _read(self) -> dict[str, dict[str, Any]]:
        text = execute.read_text(self._path)
        try:
            data: dict[str, dict[str, Any]] = json.loads(text) if text else {}
        except json.JSONDecodeError:
            data = {}
        return {"processes": data.get("processes", {}), "notes": data.get("notes", {})}

    def _write(self, data: dict[str, dict[str, Any]]) -> None:
        staged = self._path.with_suffix(".tmp")
        staged.write_text(json.dumps(data, indent=1))
        staged.replace(self._path)


def mounts_below(directories: list[Path], mountinfo: str) -> list[Path]:
    """Mount points at or below the directories, those mounted last first."""
    found = []
    for line in mountinfo.splitlines():
        point = Path(line.split(" ")[4].encode().decode("unicode_escape"))
        if any(point.is_relative_to(directory) for directory in directories):
            found.append(point)
    return found[::-1]


def overlay_lowers(mountinfo: str) -> set[str]:
    """Lower directories of every overlay mount."""
    found: set[str] = set()
    for line in mountinfo.splitlines():
        options = line.rpartition(" - ")[2].split(" ")[-1].split(",")
        found.update(option[9:] for option in options if option.startswith("lowerdir="))
    return found


@contextlib.contextmanager
def locked(path: Path, what: str, wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold a lock file; the kernel lets go of it however we end.

    When another process holds it: with `wait` that is called once and then we wait, else LabError is raised.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if wait is None:
                file.seek(0)
                raise LabError(
                    f"{what} is in use by process {file.read().strip() or '?'}",
                    "wait for it, or give yours another name: CORRAL_LAB_NAME=other",
                ) from None
            wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def remains(lab: Layout) -> bool:
    """Whether anything of this lab is on the machine."""
    return (
        lab.run.exists()
        or lab.disk.exists()
        or any(root.exists() for root in Groups.of(lab.cgroup).roots())
        or any(network.netns_exists(name) for name in (lab.box_netns, lab.inet_netns))
    )


def sweep(lab: Layout) -> None:
    """Remove every trace of the lab: processes, mounts, namespaces, cgroups, files. Safe to repeat."""
    kill_box(lab)
    _kill_all(lab, None)
    _unmount(lab)
    for name in (lab.box_netns, lab.inet_netns):
        network.remove_netns(name)
    Groups.of(lab.cgroup).remove()
    remove_tree(lab.disk)
    remove_tree(lab.run)


def kill_box(lab: Layout) -> None:
    """Kill everything that belongs to the box, at once, and wait until it is gone."""
    _kill_all(lab, "box")


def _kill_all(lab: Layout, kind: str | None) -> None:
    state = State(lab)
    roles = {"box": {"nspawn", "leader"}}.get(kind or "", set(state.processes()))
    names = [lab.box_netns] if kind == "box" else [lab.box_netns, lab.inet_netns]

    def survivors() -> bool:
        for role, process in state.processes().items():
            if role in roles:
                process.kill()
        for process in processes_in(names):
            process.kill()
        if state.groups.populated(kind):
            return True
        return any(p.alive() for r, p in state.processes().items() if r in roles) or bool(processes_in(names))

    execute.wait_until(lambda: not survivors(), f"the processes of lab {lab.name} end", timeout=20)


def processes_in(netns_names: list[str]) -> list[Process]:
    """Processes whose network namespace is one of the named ones. Ours alone can be in them."""
    wanted = set()
    for name in netns_names:
        with contextlib.suppress(FileNotFoundError):
            stat = netns_path(name).stat()
            wanted.add((stat.st_dev, stat.st_ino))
    home = os.stat("/proc/self/ns/net")
    wanted.discard((home.st_dev, home.st_ino))
    found = []
    for entry in Path("/proc").iterdir() if wanted else ():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                stat = (entry / "ns" / "net").stat()
                if (stat.st_dev, stat.st_ino) in wanted:
                    found.append(Process.of(int(entry.name)))
    return found


def _unmount(lab: Layout) -> None:
    for point in mounts_below([lab.run, lab.disk], Path("/proc/self/mountinfo").read_text()):
        if execute.run([execute.tool("umount"), str(point)], check=False).returncode != 0:
            execute.run([execute.tool("umount"), "--lazy", str(point)], check=False)


def remove_tree(directory: Path) -> None:
    """rm -rf that never leaves the file system, so that a forgotten mount costs nothing."""
    execute.run(["/bin/rm", "-rf", "--one-file-system", str(directory)], timeout=300)
