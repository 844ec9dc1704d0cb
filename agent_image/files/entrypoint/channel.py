"""Where secrets come from: a socket that answers once, before the program runs."""

from __future__ import annotations

import json
import socket

VARIABLE = "CORRAL_SECRETS"
# Seconds; the other side is on this machine and waits already.
PATIENCE = 10.0
MAX_SIZE = 4 << 20


def receive(path: str) -> dict[str, str]:
    """Return the variables that the socket at ``path`` tells its first visitor.

    Raises:
        OSError: nobody is there, or it takes too long.
        ValueError: what came is not a whole answer. The text names nothing of it.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        channel.settimeout(PATIENCE)
        channel.connect(path)
        data = b""
        while True:
            part = channel.recv(65536)
            if not part:
                break
            data += part
            if len(data) > MAX_SIZE:
                raise ValueError("the answer is too long")
    try:
        body = json.loads(data)
    except ValueError:
        # The error of the parser would quote the secrets.
        raise ValueError("the answer is not whole") from None
    if not isinstance(body, dict) or not all(
        isinstance(name, str) and isinstance(value, str) for name, value in body.items()
    ):
        raise ValueError("the answer is not a list of variables")
    return body
