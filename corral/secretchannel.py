"""Secrets on their way into a container: a socket in the session's home that answers its first visitor, once.

So they are in no container's configuration, argument, label or file. The directory belongs to the user alone
and is mounted in this one container, whose first program is the entrypoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from corral import oserrors
from policy.errors import CorralError

NAME = ".corral-secrets"
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREDENTIALS = struct.Struct("3i")
# Seconds for a visitor that connects and then does not read.
PATIENCE = 10.0


@contextlib.contextmanager
def offered(directory: Path, secrets: Mapping[str, str]) -> Iterator[threading.Event]:
    """Answer the first visitor of ``directory``/``NAME`` while the block runs; nothing when there are none.

    The event says that nothing is left to be fetched.

    Raises:
        CorralError: the socket cannot be made.
    """
    fetched = threading.Event()
    if not secrets:
        fetched.set()
        yield fetched
        return
    try:
        folder = os.open(directory, DIRECTORY)
    except OSError as error:
        raise CorralError(f"cannot use {directory}: {error.strerror}", oserrors.hint(error)) from error
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        try:
            # The path of a socket is short; a home directory's may not be.
            listener.bind(f"/proc/self/fd/{folder}/{NAME}")
            os.chmod(NAME, 0o600, dir_fd=folder)
            listener.listen(1)
        except OSError as error:
            raise CorralError(
                f"cannot make a socket in {directory}: {error.strerror}", oserrors.hint(error)
            ) from error
        answer = json.dumps(dict(secrets)).encode()
        thread = threading.Thread(target=_serve, args=(listener, folder, answer, fetched), daemon=True)
        # It inherits the mask: a signal that waits for its moment must not be taken by this thread instead.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            yield fetched
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join(PATIENCE + 1)
    finally:
        try:
            listener.close()
            _unlink(folder)
        finally:
            os.close(folder)


def _serve(listener: socket.socket, folder: int, answer: bytes, fetched: threading.Event) -> None:
    with contextlib.suppress(OSError):
        visitor, _ = listener.accept()
        # Whoever comes next finds nothing, also when this one goes away.
        _unlink(folder)
        with visitor:
            if _uid(visitor) == os.geteuid():
                visitor.settimeout(PATIENCE)
                visitor.sendall(answer)
        fetched.set()


def _uid(visitor: socket.socket) -> int:
    raw = visitor.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def _unlink(folder: int) -> None:
    # Once it is answered the name is the agent's, who may have put a directory there.
    with contextlib.suppress(OSError):
        os.unlink(NAME, dir_fd=folder)
