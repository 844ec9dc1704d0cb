"""``corral init``: a corral.yaml to start from."""

from __future__ import annotations

import os
from pathlib import Path

from corral import oserrors
from policy.errors import CorralError, PolicyError
from policy.init import starter
from policy.loader import FILE


def init(directory: Path, profile: str) -> Path:
    """Write a starter policy into a directory and return its path.

    Raises:
        PolicyError: there is one already, or no such profile.
        CorralError: it cannot be written.
    """
    text = starter(profile, directory.name)
    file = directory / FILE
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(file, flags, 0o644)
    except FileExistsError as error:
        raise PolicyError(f"{file} exists already", "edit it, or remove it first") from error
    except OSError as error:
        raise CorralError(f"cannot write {file}: {error.strerror}", oserrors.hint(error)) from error
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        file.unlink(missing_ok=True)
        raise CorralError(f"cannot write {file}: {error.strerror}", oserrors.hint(error)) from error
    return file
