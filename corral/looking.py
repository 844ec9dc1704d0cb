"""Looking at what an agent may have left: no link is followed, nothing is waited for, all is bounded.

What is too much is named (`Look.cut`), never left out silently.
"""

from __future__ import annotations

import base64
import errno
import fnmatch
import hashlib
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from corral.held import open_place
from policy.mounts import is_within
from policy.records import dataclass

# Bytes that are kept of a file, that are read of one, and that are read of all of a mount.
MAX_CONTENT = 262144
MAX_READ = 1048576
MAX_BYTES = 134217728
# Characters of Git's configuration that are understood, of a mount: reading them one by one takes its time.
MAX_CONFIGS = 1048576
# Bytes of Git's indexes that are read, of a mount; that of a hundred thousand files has some ten million.
MAX_INDEXES = 67108864
# Entries of one directory, of all below one, of a mount, and of a directory in which few names count.
MAX_LISTING = 1024
MAX_TREE = 4096
MAX_MOUNT = 16384
MAX_SCAN = 65536
MAX_DEPTH = 16
# Places that are named as not looked at.
MAX_CUT = 64
T = TypeVar("T")
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True)
class Entry:
    """What is at a path: its mode with type, its size, a hash, and its content unless it is too large.

    ``digest`` is empty when it was not read; then ``stamp`` (inode, times) tells it from another.
    """

    mode: int
    size: int = 0
    digest: str = ""
    content: bytes | None = None
    stamp: tuple[int, ...] = ()

    def body(self) -> list[Any]:
        """Return it as JSON has it."""
        content = None if self.content is None else base64.b64encode(self.content).decode()
        return [self.mode, self.size, self.digest, content, list(self.stamp)]

    @classmethod
    def of(cls, body: Any) -> Entry:
        """Return what ``body`` returned.

        Raises:
            TypeError, ValueError: it is something else.
        """
        mode, size, digest, content, stamp = body
        kept = None if content is None else base64.b64decode(content, validate=True)
        return cls(int(mode), int(size), str(digest), kept, tuple(map(int, stamp)))

    @property
    def executable(self) -> bool:
        """Whether it is a file that can be executed."""
        return stat.S_ISREG(self.mode) and bool(self.mode & 0o111)

    @property
    def unread(self) -> bool:
        """Whether it is a file that was too large to be read."""
        return stat.S_ISREG(self.mode) and not self.digest

    @property
    def text(self) -> str:
        """Its content as text, nothing when that was not kept."""
        return (self.content or b"").decode("utf-8", "replace")

    def same(self, other: Entry | None) -> bool:
        """Return whether nothing says that another entry is different."""
        if other is None or self.mode != other.mode:
            return False
        if self.digest and other.digest:
            return self.digest == other.digest
        return (self.size, self.stamp) == (other.size, other.stamp)


@dataclass
class Look:
    """What was seen.

    Args:
        found: each path that was looked at, None where there was nothing.
        cut: places that could not be looked at whole, and why.
        configs: paths that Git reads as configuration.
    """

    found: dict[str, Entry | None] = field(default_factory=dict)
    cut: dict[str, str] = field(default_factory=dict)
    configs: set[str] = field(default_factory=set)
    tree: str = "/"
    left: int = MAX_MOUNT
    bytes_left: int = MAX_BYTES
    configs_left: int = MAX_CONFIGS
    indexes_left: int = MAX_INDEXES

    def body(self) -> dict[str, Any]:
        """Return what was seen as JSON has it: ``{"found": {path: entry}, "cut": {}, "configs": []}``."""
        found = {path: None if entry is None else entry.body() for path, entry in self.found.items()}
        return {"found": found, "cut": self.cut, "configs": sorted(self.configs)}

    @classmethod
    def of(cls, body: Any) -> Look:
        """Return what ``body`` returned.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        found = {str(path): None if row is None else Entry.of(row) for path, row in body["found"].items()}
        cut = {str(path): str(why) for path, why in body["cut"].items()}
        return cls(found, cut, {str(path) for path in body["configs"]})

    def begin(self, tree: str) -> None:
        """Give the next mount what may be spent on one."""
        self.tree, self.left = tree, MAX_MOUNT
        self.bytes_left, self.configs_left, self.indexes_left = MAX_BYTES, MAX_CONFIGS, MAX_INDEXES

    def miss(self, place: str, why: str) -> None:
        """Note what could not be looked at; of too many places the whole mount is noted."""
        if place in self.cut or len(self.cut) < MAX_CUT:
            self.cut[place] = why
        else:
            self.cut[self.tree] = "there is more that could not be looked at"

    def uncertain(self, path: str) -> bool:
        """Return whether a path may be there although it was not seen."""
        if path in self.found:
            return False
        return any(
            is_within(path, place) or ("*" in place and fnmatch.fnmatchcase(path, place))
            for place in self.cut
        )

    def read(self, path: str) -> Entry | None:
        """Return what is at a path, None when there is nothing or a link leads there."""
        if path not in self.found:
            self.found[path] = entry = read(path, min(MAX_READ, self.bytes_left))
            if entry is not None and entry.digest:
                self.bytes_left -= entry.size
        return self.found[path]

    def names(self, directory: str, pattern: str = "") -> list[tuple[str, bool]]:
        """Return (path, is a directory) of what is in a directory, nothing when a link leads there."""
        limit, where = min((MAX_LISTING, "entries"), (self.left, "entries left for this mount"))
        rows: list[tuple[str, bool]] = []
        try:
            descriptor = _open(directory)
        except (OSError, ValueError):
            return []
        try:
            with os.scandir(descriptor) as entries:
                for count, entry in enumerate(entries):
                    if pattern and count < MAX_SCAN and not fnmatch.fnmatchcase(entry.name, pattern):
                        continue
                    if len(rows) >= limit or count >= MAX_SCAN:
                        place = f"{directory}/{pattern}" if pattern else directory
                        self.miss(place, f"more than {limit} {where}; not all could be looked at")
                        break
                    rows.append((f"{directory}/{entry.name}", entry.is_dir(follow_symlinks=False)))
        except OSError as error:
            self.miss(directory, f"could not be looked at: {error.strerror}")
        finally:
            os.close(descriptor)
        self.left -= len(rows)
        return sorted(rows)

    def below(self, top: str) -> Iterator[str]:
        """Yield the path of all that is not a directory below one."""
        todo = deque([(top, 1)])
        count = 0
        while todo:
            directory, level = todo.popleft()
            for path, folder in self.names(directory):
                count += 1
                if count > MAX_TREE:
                    self.miss(top, f"more than {MAX_TREE} entries; not all could be looked at")
                    return
                if not folder:
                    yield path
                elif level < MAX_DEPTH:
                    todo.append((path, level + 1))
                else:
                    self.miss(path, f"more than {MAX_DEPTH} levels deep; not looked at")


def kind(path: str) -> int:
    """Return the type of what is at a path (``stat.S_IFDIR``, ...), 0 for nothing or behind a link."""
    entry = _at(path, lambda name, parent: os.stat(name, dir_fd=parent, follow_symlinks=False))
    return 0 if entry is None else stat.S_IFMT(entry.st_mode)


def read(path: str, limit: int = MAX_READ) -> Entry | None:
    """Return what is at a path, None when there is nothing or a link leads there."""
    return _at(path, lambda name, parent: _entry(name, parent, limit))


def bytes_of(path: str, limit: int) -> bytes | None:
    """Return the content of a regular file, at most one byte more than ``limit``; None for anything else."""
    return _at(path, lambda name, parent: _bytes(name, parent, limit))


def _bytes(name: str, parent: int, limit: int) -> bytes | None:
    with os.fdopen(os.open(name, _FILE | os.O_NOFOLLOW, dir_fd=parent), "rb") as stream:
        return stream.read(limit + 1) if stat.S_ISREG(os.fstat(stream.fileno()).st_mode) else None


def real(path: str) -> str:
    """Return what a path leads to as the kernel follows it, the path itself when that is nowhere."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (OSError, ValueError):
        return os.path.normpath(path)
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - text in, text out
    finally:
        os.close(descriptor)


def behind_link(path: str) -> bool:
    """Return whether a part of a path is a symbolic link."""
    try:
        os.close(open_place(path))
    except OSError as error:
        return error.errno == errno.ELOOP
    except ValueError:
        pass
    return False


def text_of(path: str | Path, limit: int = MAX_READ, *, follow: bool = False) -> str | None:
    """Return the text of a regular file, None when it is none, is not there or is larger than ``limit``."""
    try:
        descriptor = os.open(path, _FILE | (0 if follow else os.O_NOFOLLOW))
    except (OSError, ValueError):
        return None
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        try:
            content = stream.read(limit + 1)
        except OSError:
            return None
    return content.decode("utf-8", "surrogateescape") if len(content) <= limit else None


def _at(path: str, act: Callable[[str, int], T]) -> T | None:
    pure = PurePosixPath(path)
    try:
        parent = open_place(str(pure.parent))
    except (OSError, ValueError):
        return None
    try:
        return act(pure.name, parent)
    except (OSError, ValueError):
        return None
    finally:
        os.close(parent)


def _open(directory: str) -> int:
    place = open_place(directory)
    try:
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(place)


def _entry(name: str, parent: int, limit: int) -> Entry:
    status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode):
        target = os.fsencode(os.readlink(name, dir_fd=parent))
        return Entry(status.st_mode, len(target), hashlib.sha256(target).hexdigest(), target)
    if not stat.S_ISREG(status.st_mode):
        return Entry(status.st_mode)
    with os.fdopen(os.open(name, _FILE | os.O_NOFOLLOW, dir_fd=parent), "rb") as stream:
        status = os.fstat(stream.fileno())
        # The time of change cannot be set back by who changed it.
        stamp = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
        content = b""
        if stat.S_ISREG(status.st_mode) and status.st_size <= limit:
            content = stream.read(limit + 1)
        if not stat.S_ISREG(status.st_mode) or max(status.st_size, len(content)) > limit:
            return Entry(status.st_mode, status.st_size, stamp=stamp)
    kept = content if len(content) <= MAX_CONTENT else None
    return Entry(status.st_mode, len(content), hashlib.sha256(content).hexdigest(), kept, stamp)
