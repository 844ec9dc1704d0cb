"""``corral init``: a corral.yaml to start from, approved as it is written."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from corral import approval, oserrors
from corral.context import Invocation
from policy.errors import ArgumentError, CorralError, PolicyError
from policy.init import starter
from policy.loader import FILE
from policy.reference import schema_text
from policy.revision import revision

SCHEMA = "corral.schema.json"


def init(invocation: Invocation, profile: str) -> Path:
    """Write a starter policy into the working directory, approve it, and return its path.

    Raises:
        ArgumentError: no such profile.
        PolicyError: there is one already, or the directory cannot be a project.
        CorralError: it cannot be written.
    """
    schema = invocation.data / SCHEMA
    file = write(invocation.cwd, profile, schema)
    try:
        loaded = invocation.loaded
        # What was just written is what its user asked for, in these words and no others.
        text = starter(profile, invocation.cwd.name, str(schema))
        if loaded.path != file or loaded.sha256 != hashlib.sha256(text.encode()).hexdigest():
            raise PolicyError(
                f"{file} changed while it was being approved", "somebody else writes here; try again"
            )
        _own(invocation, schema)
        approval.write(invocation.paths, revision(loaded), loaded)
    except CorralError:
        file.unlink(missing_ok=True)
        raise
    return file


def _own(invocation: Invocation, schema: Path) -> None:
    """Put the schema of this release where the policy's first line says."""
    _ = invocation.paths
    partial = schema.with_name(SCHEMA + ".new")
    try:
        partial.write_text(schema_text(), encoding="utf-8")
        partial.replace(schema)
    except OSError as error:
        raise CorralError(f"cannot write {schema}: {error.strerror}", oserrors.hint(error)) from error


def write(directory: Path, profile: str, schema: Path) -> Path:
    """Write a starter policy into a directory and return its path.

    Raises:
        ArgumentError: no such profile.
        PolicyError: there is one already.
        CorralError: it cannot be written.
    """
    try:
        text = starter(profile, directory.name, str(schema))
    except PolicyError as error:
        raise ArgumentError(error.message, error.hint) from error
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
