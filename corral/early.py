"""Asking the engine for its version while the rest of corral is still being imported.

Nothing depends on the answer: without one the engine is asked again, and errors are told where they
always are.
"""

from __future__ import annotations

import http.client
import json
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass

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
        self._thread = threading.Thread(target=self._ask, daemon=True)
        if url.startswith("unix:///"):
            # It inherits the mask: a signal is for the main thread.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            try:
                self._thread.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _ask(self) -> None:
        self._told = ask(self._url.removeprefix("unix://"))

    def answer(self, url: str) -> Told | None:
        """Return what was said; None when there is nothing, or another engine is meant now."""
        if url != self._url or self._thread.ident is None:
            return None
        self._thread.join(PATIENCE)
        return self._told


def begin(environ: Mapping[str, str]) -> Early | None:
    """Ask the engine that will be used; None when that cannot be said."""
    from corral.hostfacts import base_url
    from policy.errors import CorralError

    try:
        return Early(base_url(environ))
    except (CorralError, OSError, ValueError):
        return None
