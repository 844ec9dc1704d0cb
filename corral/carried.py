"""Files of the user's own home that a policy asks for by name, copied once into the sandbox's state."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from corral import state
from corral.session import User
from policy.errors import CorralError, PolicyError
from policy.identity import StatePaths
from policy.loader import LoadedPolicy
from policy.mounts import is_within

MAX_SIZE = 1 << 20
_DATA = ".local/share/"


def carry(paths: StatePaths, loaded: LoadedPolicy, user: User) -> list[str]:
    """Copy what is not there yet, and return what to tell the user.

    Raises:
        PolicyError: a file is not the user's own plain file, or an agent could have put it there.
        CorralError: the state cannot be written.
    """
    told = []
    for word in getattr(loaded.options, "from_host", ()):
        part = loaded.profile.host_files[word]
        source = _source(part, user)
        content = _read(source, loaded, user.uid)
        if content is None:
            told.append(f"from_host: {word}: there is no {source}; log in on this host first, or inside")
        elif state.write_once(paths, part, content):
            told.append(f"from_host: {word}: copied {source} into the sandbox, where the agent can read it")
    return told


def _source(part: str, user: User) -> Path:
    data = user.environ.get("XDG_DATA_HOME", "")
    if part.startswith(_DATA) and data.startswith("/"):
        return Path(data) / part.removeprefix(_DATA)
    return user.home / part


def _read(source: Path, loaded: LoadedPolicy, uid: int) -> str | None:
    real = os.path.realpath(source)
    # A link of the agent's would have any file of the user's copied.
    writable = [mount.source for mount in loaded.mounts if not mount.read_only]
    if any(is_within(real, place) for place in writable):
        raise PolicyError(f"{source} leads to {real}, where the agent could have put it")
    try:
        descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CorralError(f"cannot read {source}: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != uid or found.st_size > MAX_SIZE:
            raise PolicyError(
                f"{source} is not a file of yours of at most {MAX_SIZE >> 20} MiB", "leave from_host out"
            )
        try:
            return file.read(MAX_SIZE).decode("utf-8")
        except UnicodeDecodeError as error:
            raise PolicyError(f"{source} is not UTF-8 text", "leave from_host out") from error
