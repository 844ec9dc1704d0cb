"""Files in writable mounts that this host executes or obeys: which they are, and what a session did to them.

Nothing an agent could have left is followed: every file is opened step by step, without a single link.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from corral.held import open_place
from policy import gitconfig
from policy.mounts import is_within
from policy.revision import shown

# Below a working tree: what shells, editors and agents of the host run or load when they come there.
FILES = (
    ".envrc",  # direnv
    "mise.toml",
    ".mise.toml",
    ".vscode/tasks.json",
    ".vscode/launch.json",
    ".vscode/settings.json",
    ".vscode/mcp.json",
    ".devcontainer/devcontainer.json",
    ".devcontainer.json",
    ".mcp.json",
    ".claude/settings.json",
    ".claude/settings.local.json",
    ".cursor/mcp.json",
    ".cursor/hooks.json",
    ".gemini/settings.json",
    ".codex/config.toml",
    ".zed/tasks.json",
    ".zed/settings.json",
    ".nvim.lua",
    ".exrc",
)
# Below a Git directory.
GIT_CONFIGURATION = frozenset({"config", "config.worktree"})
GIT_FILES = (*sorted(GIT_CONFIGURATION), "info/attributes", "commondir")
# Examples that Git puts there and never executes.
SAMPLE = ".sample"
MAX_CONTENT = 262144
MAX_ENTRIES = 4096
MAX_MODULES = 256
DIFF_LINES = 30


@dataclass(frozen=True)
class Entry:
    """What is at a path: its mode with type, its size, a hash, and its content unless it is too large."""

    mode: int
    size: int = 0
    digest: str = ""
    content: bytes | None = None

    @property
    def executable(self) -> bool:
        """Whether it is a file that can be executed."""
        return stat.S_ISREG(self.mode) and bool(self.mode & 0o111)


Snapshot = Mapping[str, Entry]


@dataclass(frozen=True)
class Finding:
    """A path that is not what it was, with printable lines about it. ``before`` None: there was nothing."""

    path: str
    what: str
    before: Entry | None
    lines: tuple[str, ...] = ()


def git_directories(tree: str) -> list[str]:
    """Return the Git directories that lie in a mounted directory: its own, and those of its submodules."""
    found = [tree] if _is_git(tree) else []
    for own in (tree, f"{tree}/.git"):
        if own != tree and _is_git(own):
            found.append(own)
        if own in found:
            found += _modules(f"{own}/modules")
    return found


def _modules(top: str) -> list[str]:
    found: list[str] = []
    for directory, folders, _ in os.walk(top, followlinks=False):
        if len(found) >= MAX_MODULES:
            break
        inner = [f"{directory}/{name}" for name in folders]
        found += [path for path in inner if _is_git(path)]
        if _is_git(directory):
            # Of what it has only its own submodules are of interest.
            folders[:] = [name for name in folders if name == "modules"]
    return found


def _is_git(path: str) -> bool:
    return kind(path) == stat.S_IFDIR and all(kind(f"{path}/{part}") for part in ("HEAD", "objects"))


def kind(path: str) -> int:
    """Return the type of what is at a path (``stat.S_IFDIR``, ...), 0 when there is nothing."""
    try:
        return stat.S_IFMT(os.lstat(path).st_mode)
    except (OSError, ValueError):
        return 0


def hook_directories(tree: str) -> list[str]:
    """Return the directories of hooks in a mounted directory, also where ``core.hooksPath`` leads."""
    found = []
    for directory in git_directories(tree):
        found.append(f"{directory}/hooks")
        entry = _read(f"{directory}/config")
        text = (entry.content or b"").decode("utf-8", "replace") if entry is not None else ""
        for value in gitconfig.suspect(text).get("core.hookspath", ()):
            path = os.path.normpath(os.path.join(tree, value))  # noqa: PTH118 - text in, text out
            if is_within(path, tree) and path != tree and kind(path) == stat.S_IFDIR:
                found.append(path)
    return list(dict.fromkeys(found))


def snapshot(trees: Iterable[str], search: Iterable[str]) -> dict[str, Entry]:
    """Return what is there now.

    Args:
        trees: directories that are mounted writable.
        search: the directories of the user's PATH.
    """
    programs = [os.path.normpath(part) for part in search if part.startswith("/")]
    found: dict[str, Entry] = {}
    for tree in trees:
        for path in _watched(tree, programs):
            entry = _read(path)
            if entry is not None and len(found) < MAX_ENTRIES:
                found[path] = entry
    return found


def _watched(tree: str, programs: Iterable[str]) -> Iterator[str]:
    yield from (f"{tree}/{part}" for part in FILES)
    yield f"{tree}/.git"
    for directory in git_directories(tree):
        yield from (f"{directory}/{part}" for part in GIT_FILES)
    for directory in hook_directories(tree):
        yield directory
        yield from (path for path in _listing(directory) if not path.endswith(SAMPLE))
    for directory in programs:
        if is_within(directory, tree):
            yield from _listing(directory)


def _listing(directory: str) -> Iterator[str]:
    with contextlib.suppress(OSError):
        descriptor = _open(directory)
        try:
            yield from (f"{directory}/{name}" for name in sorted(os.listdir(descriptor)))  # noqa: PTH208
        finally:
            os.close(descriptor)


def _open(directory: str) -> int:
    place = open_place(directory)
    try:
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(place)


def _read(path: str) -> Entry | None:
    """Return what is at a path, None when there is nothing or a link leads there."""
    pure = PurePosixPath(path)
    try:
        parent = open_place(str(pure.parent))
    except OSError:
        return None
    try:
        status = os.stat(pure.name, dir_fd=parent, follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            target = os.fsencode(os.readlink(pure.name, dir_fd=parent))
            return Entry(status.st_mode, len(target), _digest(target), target)
        if not stat.S_ISREG(status.st_mode):
            return Entry(status.st_mode)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(pure.name, flags, dir_fd=parent), "rb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            content = stream.read(MAX_CONTENT)
            total = hashlib.sha256(content)
            size = len(content)
            while more := stream.read(MAX_CONTENT):
                total.update(more)
                size += len(more)
        return Entry(mode, size, total.hexdigest(), content if size <= MAX_CONTENT else None)
    except OSError:
        return None
    finally:
        os.close(parent)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def compare(before: Snapshot, after: Snapshot, search: Iterable[str]) -> list[Finding]:
    """Return what a session changed, by path. Of a Git configuration only keys count that are not harmless."""
    programs = {os.path.normpath(part) for part in search if part.startswith("/")}
    found = []
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path), after.get(path)
        if old == new:
            continue
        name = PurePosixPath(path)
        plain = all(entry is None or entry.content is not None for entry in (old, new))
        if name.name in GIT_CONFIGURATION and plain and all(_regular(entry) for entry in (old, new)):
            lines = gitconfig.differences(_text(old), _text(new))
            if lines:
                found.append(
                    Finding(path, "keys that may make Git run something", old, tuple(map(shown, lines)))
                )
        elif str(name.parent) in programs:
            if new is not None and new.executable:
                found.append(Finding(path, "a program in a directory of your PATH", old))
        elif old is not None or (new is not None and not stat.S_ISDIR(new.mode)):
            found.append(Finding(path, _what(old, new), old, tuple(_diff(old, new))))
    return found


def _regular(entry: Entry | None) -> bool:
    return entry is None or stat.S_ISREG(entry.mode)


def _what(old: Entry | None, new: Entry | None) -> str:
    if new is None:
        return "removed"
    if stat.S_ISLNK(new.mode):
        return "is a link now"
    return "new" if old is None else "changed"


def _text(entry: Entry | None) -> str:
    if entry is None or entry.content is None:
        return ""
    return entry.content.decode("utf-8", "replace")


def _diff(old: Entry | None, new: Entry | None) -> Iterator[str]:
    lines = list(difflib.unified_diff(_text(old).splitlines(), _text(new).splitlines(), lineterm="", n=0))[2:]
    yield from (shown(line) for line in lines[:DIFF_LINES])
    if len(lines) > DIFF_LINES:
        yield f"... and {len(lines) - DIFF_LINES} lines more"


def writable(mounts: Iterable[tuple[Path, bool]]) -> list[str]:
    """Return the directories among (path, read-only) that an agent can write."""
    return [str(path) for path, read_only in mounts if not read_only and path.is_dir()]
