"""What there is to complete on this host: read from files, never asked of a service."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from corral.completion import SHELLS
from corral.context import Invocation, current_user
from corral.sessions import read_note
from policy.errors import CorralError
from policy.identity import SANDBOX_ID, SESSION_ID, StatePaths, data_home


def lookup(kind: str) -> list[str]:
    """Return what there is of a kind of ``completion.KINDS``, sorted; nothing when it cannot be told."""
    found: set[str] = set()
    with contextlib.suppress(CorralError, OSError, ValueError):
        found.update(_found(kind))
    return sorted(found)


def _found(kind: str) -> Iterator[str]:
    if kind == "shell":
        yield from SHELLS
    elif kind == "check":
        from corral.checkdocs import DOCS

        yield from (doc.name for doc in DOCS)
    elif kind == "profile":
        from policy.profiles import names

        yield from names()
    elif kind in ("sandbox", "session"):
        for sandbox in _sandboxes():
            yield from _sessions(sandbox) if kind == "session" else (sandbox.name,)
    elif kind == "host":
        yield from _hosts()


def _sandboxes() -> Iterator[Path]:
    user = current_user(os.environ)
    for place in data_home(user.home, dict(user.environ)).iterdir():
        if SANDBOX_ID.fullmatch(place.name):
            yield place


def _sessions(sandbox: Path) -> Iterator[str]:
    paths = StatePaths(sandbox)
    with contextlib.suppress(OSError):
        for place in (sandbox / "sessions").iterdir():
            # The sandbox's proxy has its files there, too.
            if SESSION_ID.fullmatch(place.name) and not sandbox.name.endswith(place.name):
                yield read_note(paths, place.name).name or place.name


def _hosts() -> Iterator[str]:
    from corral.console import Console
    from corral.lifecycle import working_directory

    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        invocation = Invocation(current_user(os.environ), working_directory(), Console(nowhere))
        declaration = invocation.loaded.declaration
        yield from (name.host for name in declaration.names)
        yield from (pattern.host for pattern in declaration.patterns)
