"""What of the user's own home comes along with a harness, by the words of ``from_host``.

A login is copied once into the sandbox's state. A directory of configuration is copied at each start to where
the sandbox has it read-only: the user's own is not mounted, because a harness may insist on a file that it
lacks.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path

from corral import state
from corral.session import User
from policy.errors import CorralError, PolicyError
from policy.identity import StatePaths
from policy.loader import LoadedPolicy
from policy.mounts import is_within
from policy.records import dataclass

MAX_SIZE = 1 << 20
# Of one directory of configuration. What a harness installs there itself is no configuration.
MAX_FILES, MAX_TOTAL = 2000, 16 << 20
INSTALLED = frozenset({"node_modules", ".git"})
_XDG = {".local/share/": "XDG_DATA_HOME", ".config/": "XDG_CONFIG_HOME"}


@dataclass
class Carried:
    """Files of managed directories, and what to tell the user.

    ``files``: by the directory's path below HOME, content by relative path. ``told``: what is told anyway.
    ``copied``: by directory, what to tell when it is not what the sandbox has already.
    """

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    copied: dict[str, str] = field(default_factory=dict)


class RefusedError(PolicyError):
    """Something of the user's is not taken along."""


def words(loaded: LoadedPolicy) -> tuple[str, ...]:
    """Return what the policy, or the profile where it says nothing, takes along."""
    return tuple(getattr(loaded.options, "from_host", ()))


def carry(paths: StatePaths, loaded: LoadedPolicy, user: User) -> list[str]:
    """Copy what is not there yet, and return what to tell the user.

    Raises:
        PolicyError: a file that the policy names is not the user's own plain file, or an agent could have put
            it there. Where the policy names nothing, that is told instead.
        CorralError: the state cannot be written.
    """
    told = []
    for word in words(loaded):
        if word not in loaded.profile.host_files:
            continue
        part = loaded.profile.host_files[word]
        source = _source(part, user)
        try:
            content = _text(source, loaded, user.uid)
        except RefusedError as refused:
            if _asked(loaded):
                raise
            told.append(f"from_host: {word}: not copied: {refused}")
            continue
        if content is None:
            if _asked(loaded):
                told.append(f"from_host: {word}: there is no {source}; log in on this host first, or inside")
        elif state.write_once(paths, part, content):
            told.append(f"from_host: {word}: copied {source} into the sandbox, where the agent can read it")
    return told


def managed(loaded: LoadedPolicy, user: User) -> Carried:
    """Read the configuration that comes along.

    Raises:
        PolicyError: as in ``carry``.
    """
    found = Carried()
    for directory in loaded.profile.managed_dirs:
        if directory.word not in words(loaded):
            continue
        source = _source(directory.path, user)
        try:
            files = _tree(source, loaded, user.uid, found.told)
        except RefusedError as refused:
            if _asked(loaded):
                raise
            found.told.append(f"from_host: {directory.word}: not copied: {refused}")
            continue
        if files:
            found.files[directory.path] = files
            found.copied[directory.path] = (
                f"from_host: {directory.word}: copied {len(files)} files of {source} into the sandbox, "
                "where the agent can read them"
            )
        elif _asked(loaded):
            found.told.append(f"from_host: {directory.word}: there is nothing in {source}")
    return found


def _asked(loaded: LoadedPolicy) -> bool:
    return "from_host" in loaded.options.model_fields_set


def _source(part: str, user: User) -> Path:
    for prefix, variable in _XDG.items():
        base = user.environ.get(variable, "")
        if part.startswith(prefix) and base.startswith("/"):
            return Path(base) / part.removeprefix(prefix)
    return user.home / part


def _tree(source: Path, loaded: LoadedPolicy, uid: int, told: list[str]) -> dict[str, bytes]:
    """Return the files below a directory, links followed; what is no plain file is told and left out."""
    files: dict[str, bytes] = {}
    total = 0
    for name, path in _below(source, "", frozenset()):
        if len(files) >= MAX_FILES or total > MAX_TOTAL:
            raise RefusedError(
                f"{source} has more than {MAX_FILES} files or {MAX_TOTAL >> 20} MiB",
                "leave config out of from_host",
            )
        if path.is_file() or not path.exists():
            content = _read(path, loaded, uid)
            if content is not None:
                files[name] = content
                total += len(content)
        else:
            told.append(f"from_host: {path} is no plain file and was left out")
    return files


def _below(directory: Path, name: str, above: frozenset[str]) -> Iterator[tuple[str, Path]]:
    """Yield (relative name, path) of what is no directory. A link that leads up again is left out."""
    real = os.path.realpath(directory)
    if real in above:
        return
    try:
        entries = sorted(Path(real).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise CorralError(f"cannot read {directory}: {error.strerror}") from error
    for path in entries:
        if not path.is_dir():
            yield f"{name}{path.name}", path
        elif path.name not in INSTALLED:
            yield from _below(path, f"{name}{path.name}/", above | {real})


def _text(source: Path, loaded: LoadedPolicy, uid: int) -> str | None:
    content = _read(source, loaded, uid)
    try:
        return None if content is None else content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RefusedError(f"{source} is not UTF-8 text", "leave login out of from_host") from error


def _read(source: Path, loaded: LoadedPolicy, uid: int) -> bytes | None:
    real = os.path.realpath(source)
    # A link of the agent's would have any file of the user's copied.
    writable = [mount.source for mount in loaded.mounts if not mount.read_only]
    if any(is_within(real, place) for place in writable):
        raise RefusedError(
            f"{source} leads to {real}, where the agent could have put it",
            f"profile_options.{loaded.profile.name}.from_host: [] leaves it out",
        )
    try:
        descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CorralError(f"cannot read {source}: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != uid or found.st_size > MAX_SIZE:
            raise RefusedError(
                f"{source} is not a file of yours of at most {MAX_SIZE >> 20} MiB",
                f"profile_options.{loaded.profile.name}.from_host: [] leaves it out",
            )
        return file.read(MAX_SIZE)
