"""Which host paths a policy may mount.

Everything is decided on resolved paths, and a second time on (device, inode), so that a symbolic link or a
bind mount under another name is the thing it leads to.
"""

from __future__ import annotations

import errno
import os
import stat
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from policy.container import HOME
from policy.credentials import CREDENTIALS, EVERYWHERE, EXECUTED, RELOCATED, SYSTEM
from policy.errors import PolicyError
from policy.identity import data_home
from policy.records import dataclass

Kind = Literal["directory", "file", "socket", "fifo", "device", "missing", "unreadable"]
Access = Literal["rw", "ro"]
Identity = tuple[int, int]

MAX_PATH = 4096
SHARED_TEMPORARY = ("/tmp", "/var/tmp")  # noqa: S108 - refused, not used
BELOW = "mount the directory you need below it"


class Probe(Protocol):
    """What the validation has to know about the file system. No method raises."""

    def resolve(self, path: str) -> str:
        """Return the absolute path without symbolic links; parts that do not exist stay as they are."""
        ...

    def kind(self, path: str) -> Kind:
        """Return what the path leads to."""
        ...

    def identity(self, path: str) -> Identity | None:
        """Return (device, inode), or None when the path cannot be examined."""
        ...


class RealProbe:
    """The file system of this host, for one look at it: where a directory led to is remembered."""

    def __init__(self) -> None:
        self._directories: dict[str, str] = {}

    def resolve(self, path: str) -> str:
        """See Probe."""
        try:
            return self._resolved(path)
        except (OSError, ValueError):
            return os.path.normpath(path)

    def _resolved(self, path: str) -> str:
        parent, _, name = path.rpartition("/")
        if not parent.startswith("/") or name in {"", ".", ".."}:
            return os.path.realpath(path)
        # Of some hundred places a start asks for, most lie in the same few directories.
        above = self._directories.get(parent)
        if above is None:
            above = self._directories[parent] = "" if _circles(parent) else os.path.realpath(parent)
        if not above:
            return os.path.realpath(path)
        place = f"{above.rstrip('/')}/{name}"
        try:
            link = stat.S_ISLNK(os.lstat(place).st_mode)
        except OSError:
            link = False
        return os.path.realpath(place) if link else place

    def kind(self, path: str) -> Kind:
        """See Probe."""
        try:
            mode = os.stat(path).st_mode  # noqa: PTH116 - see _ancestors
        except (FileNotFoundError, NotADirectoryError):
            return "missing"
        except (OSError, ValueError):
            return "unreadable"
        kinds: dict[int, Kind] = {
            stat.S_IFDIR: "directory",
            stat.S_IFREG: "file",
            stat.S_IFSOCK: "socket",
            stat.S_IFIFO: "fifo",
        }
        return kinds.get(stat.S_IFMT(mode), "device")

    def identity(self, path: str) -> Identity | None:
        """See Probe."""
        try:
            found = os.stat(path)  # noqa: PTH116 - see _ancestors
        except (OSError, ValueError):
            return None
        return found.st_dev, found.st_ino


def _circles(path: str) -> bool:
    """Say whether links lead around in a circle: then each part of a path counts."""
    try:
        os.stat(path)  # noqa: PTH116 - see _ancestors
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


@dataclass(frozen=True)
class Refusal:
    """Why a path is not mounted.

    ``what`` may name paths of the host, never a content. With ``sentence`` it opens the whole message.
    """

    what: str
    fix: str
    sentence: bool = False

    def error(self) -> PolicyError:
        """Return the refusal as an error of its own."""
        return PolicyError(self.what, None if self.sentence else self.fix)


@dataclass(frozen=True)
class Finding:
    """A refused entry of mounts.rw or mounts.ro."""

    access: Access
    index: int
    refusal: Refusal


@dataclass(frozen=True)
class Guarded:
    """A resolved path that is never mounted, nor what contains it, nor (``deep``) what lies below it."""

    path: str
    what: str
    deep: bool = True


class Guard:
    """Refuses single paths. Built once per policy; ``home`` is absolute."""

    def __init__(self, home: str, environ: Mapping[str, str], probe: Probe, own: Iterable[str] = ()) -> None:
        self.probe = probe
        self.home = probe.resolve(home)
        self.guarded = tuple(_guarded(home, environ, probe, own))
        self._identities = self._identify()

    def refuse(self, path: str) -> Refusal | None:
        """Return why the resolved ``path`` must not be mounted, or None."""
        if any(unicodedata.category(char)[0] == "C" for char in path):
            return Refusal("a control character or undecodable byte in a path", "rename the directory")
        if len(path) > MAX_PATH:
            return Refusal("a path that is too long", "mount a directory with a shorter path")
        return self._by_name(path) or self._by_place(path) or self._by_identity(path) or self._by_kind(path)

    def _by_name(self, path: str) -> Refusal | None:
        if path == "/":
            return Refusal("refusing to mount the root of the file system (/)", BELOW, sentence=True)
        if path == self.home:
            return home_refusal(path)
        if path == HOME:
            return Refusal(f"refusing to mount {path}: it is the agent's home inside the sandbox", BELOW)
        if path in (*SHARED_TEMPORARY, "/home"):
            return Refusal(f"refusing to mount {path}: every user of this host has files there", BELOW)
        for part in path.split("/"):
            if part in EVERYWHERE:
                return Refusal(f"refusing to mount {path}: {EVERYWHERE[part]} are there", "remove the entry")
        return None

    def _by_place(self, path: str) -> Refusal | None:
        if is_within(self.home, path):
            return Refusal(f"refusing to mount {path}: it contains your home directory ({self.home})", BELOW)
        for guarded in self.guarded:
            if path == guarded.path or (guarded.deep and is_within(path, guarded.path)):
                return Refusal(f"refusing to mount {path}: {guarded.what}", "remove the entry")
            if is_within(guarded.path, path):
                return Refusal(
                    f"refusing to mount {path}: it contains {guarded.path} ({guarded.what})", BELOW
                )
        return None

    def _by_identity(self, path: str) -> Refusal | None:
        for place in (path, *_ancestors(path)):
            identity = self.probe.identity(place)
            known = self._identities.get(identity) if identity else None
            # The path itself may not be a guarded place or contain one; what lies above it may only not be a
            # guarded place.
            if known and (place == path or (known.same and known.guarded.deep)):
                relation = "is the same as" if known.same else "is the same as one that contains"
                target = f"{known.guarded.path} ({known.guarded.what})"
                return Refusal(f"refusing to mount {path}: {place} {relation} {target}", "remove the entry")
        return None

    def _by_kind(self, path: str) -> Refusal | None:
        kind = self.probe.kind(path)
        if kind in {"directory", "file"}:
            return None
        if kind == "missing":
            return Refusal(f"there is no {path}", f"mkdir -p {path}, or remove the entry")
        if kind == "socket":
            return Refusal(
                f"refusing to mount {path}: it is a socket, a way out of the sandbox",
                "declare a host service",
            )
        if kind == "unreadable":
            return Refusal(f"{path} cannot be examined", "check its permissions and symbolic links")
        return Refusal(f"refusing to mount {path}: it is neither a directory nor a file", "remove the entry")

    def _identify(self) -> dict[Identity, _Known]:
        """Map the identity of every guarded place, and of what contains it, to the place."""
        found: dict[Identity, _Known] = {}
        examined: set[str] = set()
        places = (*self.guarded, Guarded(self.home, "your home directory", deep=False))
        for same in (True, False):
            climbed: set[str] = set()
            for guarded in places:
                for place in (guarded.path,) if same else _ancestors(guarded.path):
                    if place in climbed:
                        # And all above it.
                        break
                    climbed.add(place)
                    identity = None if place in examined else self.probe.identity(place)
                    examined.add(place)
                    if identity is not None:
                        found.setdefault(identity, _Known(guarded, same))
        return found


@dataclass(frozen=True)
class _Known:
    guarded: Guarded
    same: bool


def home_refusal(home: str) -> Refusal:
    """Return the refusal of the user's home directory."""
    return Refusal(f"refusing to mount your home directory ({home})", BELOW, sentence=True)


def _guarded(home: str, environ: Mapping[str, str], probe: Probe, own: Iterable[str]) -> Iterator[Guarded]:
    """Yield every guarded place, resolved, corral's own first."""
    resolved_home = probe.resolve(home)

    def at(path: str) -> str:
        return probe.resolve(path if path.startswith("/") else f"{home}/{path}")

    env = dict(environ)
    config = env.get("XDG_CONFIG_HOME", "")
    runtime = env.get("XDG_RUNTIME_DIR", "")
    yield Guarded(at(str(data_home(Path(home), env))), "corral's own state")
    yield Guarded(at(".local/share/corral"), "corral's own state")
    yield Guarded(at(".config/corral"), "corral's own configuration")
    if config.startswith("/"):
        yield Guarded(at(f"{config}/corral"), "corral's own configuration")
    if runtime.startswith("/"):
        yield Guarded(at(f"{runtime}/corral"), "corral's own sockets")
    for path in own:
        yield Guarded(at(path), "corral's own program")
    for place in (*SYSTEM, *CREDENTIALS, *EXECUTED):
        yield Guarded(at(place.path), place.what)
        yield from _moved_by_xdg(place.path, place.what, env, probe)
    for variable, what in RELOCATED.items():
        for value in env.get(variable, "").split(":"):
            path = probe.resolve(value) if value.startswith("/") else "/"
            # A variable that names a whole home would forbid every project in it.
            if not is_within(resolved_home, path):
                yield Guarded(path, f"{what} ({variable})")


def _moved_by_xdg(path: str, what: str, env: Mapping[str, str], probe: Probe) -> Iterator[Guarded]:
    if not path.startswith((".config/", ".local/share/")):
        return
    for prefix, variable in ((".config/", "XDG_CONFIG_HOME"), (".local/share/", "XDG_DATA_HOME")):
        base = env.get(variable, "")
        if path.startswith(prefix) and base.startswith("/"):
            yield Guarded(probe.resolve(f"{base}/{path.removeprefix(prefix)}"), what)


def _ancestors(path: str) -> Iterator[str]:
    # Of some hundred places in each start, so without a Path for each of their parents.
    while path != "/":
        path = path.rpartition("/")[0] or "/"
        yield path


def is_within(path: str, directory: str) -> bool:
    """Say whether ``path`` is ``directory`` or lies below it; both absolute and resolved."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def expand(text: str, home: str) -> str | Refusal:
    """Return the absolute path that an entry means; ``~`` and ``$HOME`` may begin it."""
    if any(unicodedata.category(char)[0] == "C" for char in text):
        return Refusal("a control character in a path", "remove it")
    for short in ("~", "$HOME", "${HOME}"):
        if text == short or text.startswith(short + "/"):
            return home + text[len(short) :]
    if text.startswith("~"):
        return Refusal("another user's home directory", "write the absolute path")
    if not text.startswith("/"):
        return Refusal("not an absolute path", "begin it with / or ~/")
    return text


def check(
    rw: Sequence[str],
    ro: Sequence[str],
    *,
    project: str,
    project_mounted: bool,
    home: str,
    guard: Guard,
) -> tuple[tuple[str, ...], tuple[str, ...], list[Finding]]:
    """Resolve and check the mounts of a policy.

    Args:
        rw, ro: entries as written.
        project: the resolved project directory.
        project_mounted: whether the project is mounted rw by itself (run mode).
        home: absolute home directory that ``~`` stands for.
        guard: refuses single paths.

    Returns:
        The resolved paths of the accepted rw and ro entries, in order, and what was refused.
    """
    accepted: list[tuple[Access, str]] = []
    findings: list[Finding] = []
    entries: list[tuple[Access, int, str]] = [("rw", i, text) for i, text in enumerate(rw)]
    entries += [("ro", i, text) for i, text in enumerate(ro)]
    for access, index, text in entries:
        expanded = expand(text, home)
        refusal: Refusal | None
        if isinstance(expanded, Refusal):
            refusal = expanded
        else:
            path = guard.probe.resolve(expanded)
            refusal = _listed_project(path, project) if project_mounted else None
            refusal = refusal or guard.refuse(path)
            refusal = refusal or (_around_project(path, project) if project_mounted else None)
            refusal = refusal or _overlap(path, access, accepted)
            if refusal is None:
                accepted.append((access, path))
        if refusal is not None:
            findings.append(Finding(access, index, refusal))
    return (
        tuple(path for access, path in accepted if access == "rw"),
        tuple(path for access, path in accepted if access == "ro"),
        findings,
    )


def _listed_project(path: str, project: str) -> Refusal | None:
    if path == project:
        return Refusal(
            f"in run mode the project directory is mounted rw automatically; don't list it here ({project})",
            "remove the entry",
            sentence=True,
        )
    if is_within(path, project):
        return Refusal(f"{path} lies in the project directory, which is mounted already", "remove the entry")
    return None


def _around_project(path: str, project: str) -> Refusal | None:
    if is_within(project, path):
        return Refusal(f"{path} contains the project directory, which is mounted by itself", BELOW)
    return None


def _overlap(path: str, access: Access, accepted: Iterable[tuple[Access, str]]) -> Refusal | None:
    for other_access, other in accepted:
        if path == other and access == other_access:
            return Refusal(f"{path} is listed twice", "keep one of the entries")
        if is_within(path, other) or is_within(other, path):
            return Refusal(
                f"{path} ({access}) overlaps {other} ({other_access})",
                "keep one of the entries or separate them",
            )
    return None
