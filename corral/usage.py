"""How much of this host's disks sandboxes use: ``corral df``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral import inventory, state
from corral.engine import errors
from corral.plain import cleaned, columns
from policy.errors import EngineError
from policy.identity import SANDBOX_ID, StatePaths

if TYPE_CHECKING:
    from docker.api.client import APIClient

    from corral.session import User

# Entries of one part of a sandbox that are counted; what an agent piles up must not keep anybody waiting.
MOST = 1_000_000
# Characters of paths that are held meanwhile.
HELD = 64 << 20
UNITS = ("B", "kB", "MB", "GB", "TB")
HEADER = ("SANDBOX", "IMAGE", "OWN", "STATE", "WORKSPACE", "SESSIONS", "BUILD", "LOGS", "PROJECT")


@dataclass(frozen=True)
class Image:
    """A sandbox's images, all together: their size as the engine says it, and what no other image shares."""

    size: int = 0
    own: int = 0
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Usage:
    """One sandbox, in bytes on the disk. ``partly``: not all could be counted; it is at least this."""

    sandbox: str
    project: str = ""
    image: Image | None = None
    state: int = 0
    workspace: int = 0
    sessions: int = 0
    build: int = 0
    logs: int = 0
    partly: bool = False

    @property
    def files(self) -> int:
        """Everything but the image."""
        return self.state + self.workspace + self.sessions + self.build + self.logs


@dataclass(frozen=True)
class Free:
    """Room on the file system of a path, in bytes, for those who are not root."""

    path: str
    free: int
    size: int


@dataclass(frozen=True)
class Report:
    """Everything. ``layers`` is what all images of the engine take together, corral's and others'."""

    sandboxes: tuple[Usage, ...] = ()
    other: int = 0
    layers: int | None = None
    places: tuple[Free, ...] = ()
    docker: str | None = None
    total: Mapping[str, int] = field(default_factory=dict)


def size_of(path: Path, most: int = MOST) -> tuple[int, bool]:
    """Return how many bytes a tree takes on the disk, and whether all of it was counted.

    No link is followed, a file with several names counts once, another file system is not entered.
    """
    total, counted, whole = 0, 0, True
    seen: set[tuple[int, int]] = set()
    todo = [str(path)]
    device: int | None = None
    held = len(todo[0])
    while todo:
        place = todo.pop()
        held -= len(place)
        try:
            found = os.lstat(place)
            device = found.st_dev if device is None else device
            if found.st_dev != device:
                continue
            counted += 1
            key = (found.st_dev, found.st_ino)
            if found.st_nlink == 1 or key not in seen:
                total += found.st_blocks * 512
            if found.st_nlink > 1:
                seen.add(key)
            if _is_directory(found):
                with os.scandir(place) as entries:
                    for entry in entries:
                        # Of what is in one directory, too: all of it would be held before any is counted.
                        if counted + len(todo) >= most or held >= HELD:
                            whole = False
                            break
                        todo.append(entry.path)
                        held += len(entry.path)
        except FileNotFoundError:
            continue
        except OSError:
            whole = False
    return total, whole


def _is_directory(found: os.stat_result) -> bool:
    import stat

    return stat.S_ISDIR(found.st_mode)


def of_sandbox(root: Path, image: Image | None) -> Usage:
    """Return what one sandbox uses; ``root`` is where it has its files."""
    paths = StatePaths(root)
    parts = {
        "state": (paths.home, paths.managed),
        "workspace": (paths.workspace,),
        "sessions": (root / "sessions",),
        "build": (paths.build,),
        "logs": (root / "build.log",),
    }
    sums, whole = {}, True
    for name, places in parts.items():
        found = [size_of(place) for place in places]
        sums[name] = sum(size for size, _ in found)
        whole = whole and all(good for _, good in found)
    try:
        project = str(state.project_of(paths))
    except OSError:
        project = ""
    return Usage(root.name, project, image, **sums, partly=not whole)


def free_at(path: Path) -> Free | None:
    """Return the room on the file system of a path, or of what is above it; None when it cannot be told."""
    for place in (path, *path.parents):
        try:
            found = os.statvfs(place)
        except FileNotFoundError:
            continue
        except OSError:
            return None
        return Free(str(path), found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)
    return None


def images_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, Image]:
    """Return the images of each sandbox, from the engine's account of its disk."""
    found: dict[str, Image] = {}
    for row in rows:
        labels = row.get("Labels") or {}
        image = inventory.Image(
            str(row.get("Id")), inventory.tags_of(row), str(labels.get(inventory.LABEL_IMAGE, ""))
        )
        own = max(int(row.get("Size") or 0) - max(int(row.get("SharedSize") or 0), 0), 0)
        for sandbox in image.sandboxes:
            before = found.get(sandbox, Image())
            size = before.size + int(row.get("Size") or 0)
            found[sandbox] = Image(size, before.own + own, (*before.names, *image.names))
    return found


def report(user: User, data: Path, connect: Callable[[], APIClient]) -> Report:
    """Look at everything. Without Docker the files are there all the same.

    Args:
        user: whose sandboxes.
        data: where they have their files.
        connect: returns the engine's client, or raises EngineError.
    """
    images: dict[str, Image] | None = None
    layers, silent, root = None, None, None
    try:
        api = connect()
        with errors("asking Docker for its disk"):
            usage = api.df()
            root = str(api.info().get("DockerRootDir") or "") or None
        images, layers = images_of(usage.get("Images") or ()), int(usage.get("LayersSize") or 0)
    except EngineError as error:
        silent = error.message
    try:
        directories = sorted(place for place in data.iterdir() if SANDBOX_ID.fullmatch(place.name))
    except OSError:
        directories = []
    rows = [
        of_sandbox(place, (images or {}).get(place.name, Image() if images is not None else None))
        for place in directories
    ]
    other = sum(size_of(place)[0] for place in _others(data, {row.sandbox for row in rows}))
    places = [free_at(data), free_at(Path(root)) if root and not user.environ.get("DOCKER_HOST") else None]
    return Report(
        tuple(rows),
        other,
        layers,
        tuple(place for place in places if place is not None),
        silent,
        _total(rows),
    )


def _others(data: Path, known: set[str]) -> list[Path]:
    try:
        return [place for place in data.iterdir() if place.name not in known]
    except OSError:
        return []


def _total(rows: Sequence[Usage]) -> dict[str, int]:
    names = ("state", "workspace", "sessions", "build", "logs")
    total = {name: sum(int(getattr(row, name)) for row in rows) for name in names}
    total["files"] = sum(row.files for row in rows)
    # Layers that several images share are in each of them.
    total["images_own"] = sum(row.image.own for row in rows if row.image is not None)
    return total


def human(size: int) -> str:
    """Return a number of bytes as Docker writes it: powers of 1000, three digits."""
    value = float(size)
    for unit in UNITS[:-1]:
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} {UNITS[-1]}"


def render(found: Report) -> str:
    """Return the text of ``corral df``, without a final newline."""
    rows: list[tuple[str, ...]] = [HEADER]
    for row in found.sandboxes:
        image = row.image
        rows.append(
            (
                row.sandbox + ("*" if row.partly else ""),
                "?" if image is None else human(image.size),
                "?" if image is None else human(image.own),
                *(human(size) for size in (row.state, row.workspace, row.sessions, row.build, row.logs)),
                str(cleaned(row.project)) or "-",
            )
        )
    total = found.total
    own = "?" if found.docker is not None else human(total["images_own"])
    parts = ("state", "workspace", "sessions", "build", "logs")
    rows.append(("total", "", own, *(human(total[name]) for name in parts), ""))
    lines = columns(rows)
    if any(row.partly for row in found.sandboxes):
        lines.append("* at least: not all of it could be counted")
    lines.append(f"beside sandboxes, corral's own records: {human(found.other)}")
    if found.docker is not None:
        lines.append(f"images are not known: {found.docker}")
    if found.layers is not None:
        lines.append(f"all images of the engine, others' too: {human(found.layers)}")
    lines += [f"free at {cleaned(one.path)}: {human(one.free)} of {human(one.size)}" for one in found.places]
    lines.append("OWN is what no other image shares; corral prune --images and corral down --purge make room")
    return "\n".join(lines)


def body(found: Report) -> dict[str, Any]:
    """Return the same for programs, in bytes."""
    rows = [{**asdict(one), "files": one.files} for one in found.sandboxes]
    return {**asdict(found), "sandboxes": rows}
