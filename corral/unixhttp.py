"""HTTP over a unix socket, as the engine speaks it."""

from __future__ import annotations

import http.client
import socket


class UnixConnection(http.client.HTTPConnection):
    """A connection to an engine.

    Args:
        path: of its socket.
        timeout: seconds that it may be silent; None: for as long as it takes.
    """

    def __init__(self, path: str, timeout: float | None) -> None:
        super().__init__("docker", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """See http.client."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
