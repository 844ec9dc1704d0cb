"""Asking the engine for its version while the rest of corral is still being imported.

Nothing depends on the answer: without one the engine is asked again, and errors are told where they
always are.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from corral import later
from corral.later import Later
from corral.unixhttp import UnixConnection

# Seconds that are waited for it when it is needed; the engine is asked anew then, with a longer patience.
PATIENCE = 5.0
MOST = 1 << 20


@dataclass(frozen=True)
class Told:
    """Version of the engine's API, and the architecture of its images."""

    api: str
    architecture: str


def ask(path: str) -> Told | None:
    """Return what the engine at a socket says, None when it says nothing that is understood."""
    connection = UnixConnection(path, PATIENCE)
    try:
        connection.request("GET", "/version")
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            return None
        body = json.loads(answer.read(MOST))
        return Told(str(body["ApiVersion"]), str(body["Arch"]))
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return None
    finally:
        connection.close()


class Early:
    """A question that is asked in a thread.

    Args:
        url: of the engine; what is no unix socket is not asked.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._told: Told | None = None
        self._thread = later.begin(self._ask) if url.startswith("unix:///") else None

    def _ask(self) -> None:
        self._told = ask(self._url.removeprefix("unix://"))

    def answer(self, url: str) -> Told | None:
        """Return what was said; None when there is nothing, or another engine is meant now."""
        if url != self._url or self._thread is None:
            return None
        self._thread.join(PATIENCE)
        return self._told


def service(environ: Mapping[str, str]) -> Later[dict[str, Any]]:
    """Ask the host service for its version: what it says, or why it does not, is for who needs it."""

    def ask_it() -> dict[str, Any]:
        from enforcer.client import Client, socket_path

        return Client(socket_path(environ)).version()

    return Later(ask_it)


def begin(environ: Mapping[str, str]) -> Early | None:
    """Ask the engine that will be used; None when that cannot be said."""
    from corral.hostfacts import base_url
    from policy.errors import CorralError

    try:
        return Early(base_url(environ))
    except (CorralError, OSError, ValueError):
        return None
