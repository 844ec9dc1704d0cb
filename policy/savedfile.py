"""Reading what an earlier run left, or the user wrote; anybody may have damaged it meanwhile."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

MOST = 64 << 20  # bytes


def text(path: Path, most: int = MOST) -> str:
    """Return the content of a plain file.

    Raises:
        OSError: it is not there, or cannot be read.
        ValueError: it is no plain file, longer than ``most``, or not UTF-8.
    """
    # Another kind of file must not keep the service waiting.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise ValueError("it is not a plain file")
        data = stream.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it is longer than {most} bytes")
    return data.decode()


def parse(content: str) -> Any:
    """Return what JSON says.

    Raises:
        ValueError: it is not JSON, or JSON that no program wrote.
    """
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def value(path: Path) -> Any:
    """Return what a file of JSON says; see ``text`` and ``parse`` for errors."""
    return parse(text(path))
