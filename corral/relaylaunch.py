"""Opens a relay's listening socket and becomes systemd-socket-proxyd, which takes it over.

``python -I relaylaunch.py GATEWAY PORT BRIDGE PROXY``. Run by the user's systemd, standard library only.

Not a socket unit: systemd makes one with BindToDevice= wait for the interface's device unit, which exists
only where udev runs, so that on other systems it would never start.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

# The first descriptor that is handed over, by systemd's convention.
FIRST = 3
IP_FREEBIND = 15
BACKLOG = 128


def listen(gateway: str, port: int, bridge: str) -> socket.socket:
    """Return a socket that listens on the gateway address, for what comes in through the bridge only.

    Raises:
        OSError: the port is taken, or there is no such interface.
    """
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, bridge.encode() + b"\0")
    made.bind((gateway, port))
    made.listen(BACKLOG)
    return made


def hand_over(listening: socket.socket, argv: Sequence[str], environ: dict[str, str]) -> NoReturn:
    """Become ``argv`` with the socket as descriptor 3."""
    os.dup2(listening.fileno(), FIRST, inheritable=True)
    if listening.fileno() == FIRST:
        os.set_inheritable(FIRST, True)
    os.execve(argv[0], list(argv), {**environ, "LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())})  # noqa: S606


def tell_ready(environ: Mapping[str, str]) -> None:
    """Tell systemd that the port is open. The proxy of systemd 252 does not; of later ones, it does again."""
    path = environ.get("NOTIFY_SOCKET", "")
    if path:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.sendto(b"READY=1", "\0" + path[1:] if path.startswith("@") else path)


def main(argv: Sequence[str]) -> NoReturn:
    """Listen and hand over."""
    gateway, port, bridge, proxy = argv
    listening = listen(gateway, int(port), bridge)
    tell_ready(os.environ)
    hand_over(listening, (proxy, f"127.0.0.1:{port}"), dict(os.environ))


if __name__ == "__main__":
    main(sys.argv[1:])
