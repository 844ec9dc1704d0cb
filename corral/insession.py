"""Running a program in a container that is up, where the agent may try to hold it up or to flood us."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from corral import engine
from corral.frames import STDERR, STDOUT, FrameDecoder
from policy.errors import EngineError

if TYPE_CHECKING:
    from docker.api.client import APIClient

# A checker's output is some 10 kB.
MOST = 1 << 20


class Unfinished(Exception):
    """The program did not end in time, or said more than it can have to say; the text says which."""


def execute(
    api: APIClient,
    ident: str,
    argv: Sequence[str],
    *,
    user: str,
    wait: float,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[str, str, int]:
    """Run a program as ``user`` and return its stdout, stderr and exit code; -1 when that is not known.

    Args:
        api: Docker's low-level client.
        ident: the container's id.
        argv: the program; its directory is the root, not one that the agent can write.
        user: uid:gid.
        wait: seconds it may take.
        clock: seconds.

    Raises:
        Unfinished: it is still running after that time, or printed too much.
        EngineError: Docker refused.
    """
    with engine.errors("running a program in a session"):
        made = api.exec_create(ident, list(argv), user=user, workdir="/")
        # Docker's own way to read the answer has no end when the program has none.
        held: Any = api.exec_start(made["Id"], socket=True)
    try:
        with socket.socket(fileno=os.dup(held.fileno())) as stream:
            stdout, stderr = _read(stream, clock, clock() + wait)
    finally:
        with contextlib.suppress(OSError, ValueError):
            getattr(held, "_response", held).close()
    with engine.errors("running a program in a session"):
        code = api.exec_inspect(made["Id"]).get("ExitCode")
    return stdout, stderr, -1 if code is None else int(code)


def _read(stream: socket.socket, clock: Callable[[], float], until: float) -> tuple[str, str]:
    decoder, parts = FrameDecoder(), {STDOUT: bytearray(), STDERR: bytearray()}
    while True:
        left = until - clock()
        if left <= 0:
            raise Unfinished("it did not end in time")
        stream.settimeout(left)
        try:
            data = stream.recv(65536)
        except TimeoutError:
            continue
        except OSError as error:
            raise EngineError(f"reading what a program in a session says failed: {error.strerror}") from error
        if not data:
            return parts[STDOUT].decode("utf-8", "replace"), parts[STDERR].decode("utf-8", "replace")
        for which, payload in decoder.feed(data):
            parts[which] += payload
        if sum(map(len, parts.values())) > MOST:
            raise Unfinished(f"it printed more than {MOST} bytes")
