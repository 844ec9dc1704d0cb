"""The enforcer on a user's own (rootless) engine: which one, and whether the writer is in its namespace."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from enforcer.netfilter import namespace
from enforcer.netfilter.namespace import Daemon, NotGuarded
from policy.errors import EnforcerError

RESTART = "systemctl --user restart docker.service; if that does not help: corral install"


def address(environ: Mapping[str, str]) -> str:
    """Return where the engine listens.

    Raises:
        EnforcerError: XDG_RUNTIME_DIR is not set.
    """
    return f"unix://{_runtime(environ) / 'docker.sock'}"


def writer_socket(environ: Mapping[str, str]) -> Path:
    """Return where the writer listens.

    Raises:
        EnforcerError: XDG_RUNTIME_DIR is not set.
    """
    return _runtime(environ) / namespace.SOCKET


def _runtime(environ: Mapping[str, str]) -> Path:
    try:
        return namespace.runtime_directory(environ)
    except NotGuarded as error:
        raise EnforcerError(str(error), "start it with: systemctl --user start corral-enforcer") from error


def daemon(environ: Mapping[str, str]) -> Daemon:
    """Return the engine that runs, in whose namespace the rules came first.

    Raises:
        EnforcerError: there is none.
    """
    try:
        return namespace.find(_runtime(environ))
    except NotGuarded as error:
        raise EnforcerError(str(error), RESTART) from error


class Neighbour:
    """Tells whether the process behind a connection is in the namespace of the engine that runs now.

    What it says of itself does not count: the kernel knows who listens, and where that process is.
    """

    def __init__(self, environ: Mapping[str, str], proc: Path = namespace.PROC) -> None:
        self._runtime = _runtime(environ)
        self._proc = proc

    def __call__(self, sock: socket.socket) -> None:
        """Raise EnforcerError unless it is."""
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.check(int(struct.unpack("3i", raw)[0]))

    def check(self, pid: int) -> None:
        """Raise EnforcerError unless that process is."""
        try:
            found = namespace.find(self._runtime, self._proc)
            there = namespace.netns(pid, self._proc)
        except (NotGuarded, OSError) as error:
            raise EnforcerError(f"the writer cannot be told to be your engine's: {error}", RESTART) from error
        if there != found.netns:
            raise EnforcerError(
                "the writer is in the network namespace of an engine that has ended",
                "systemctl --user restart corral-netfilter.service",
            )
