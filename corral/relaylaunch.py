"""Opens a relay's listening socket and becomes systemd-socket-proxyd, which takes it over.

``python -I relaylaunch.py GATEWAY PORT BRIDGE PROXY TARGET [ENTER...]``. Run by the user's systemd, standard
library only. ``ENTER...`` is the beginning of a command that runs where the bridge is: the socket is opened
by this program in there, which passes it out over its standard input, a unix socket. What is not on the
host's loopback (TARGET, an address and a port) is on the bridge: what leads to it runs in there, too.

Not a socket unit: systemd makes one with BindToDevice= wait for the interface's device unit, which exists
only where udev runs, so that on other systems it would never start.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

# The first descriptor that is handed over, by systemd's convention.
FIRST = 3
IP_FREEBIND = 15
BACKLOG = 128
INSIDE = "--pass"
LOOPBACK = "127.0.0.1"
# Seconds for entering a namespace and opening a socket there.
PATIENCE = 20.0


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


def listen_inside(enter: Sequence[str], where: Sequence[str]) -> socket.socket:
    """Return a socket that listens where ``enter`` leads; ``where`` is as for ``listen``, as text.

    Raises:
        OSError: it could not be opened there, or did not arrive.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        ours.settimeout(PATIENCE)
        command = [*enter, sys.executable, "-I", __file__, INSIDE, *where]
        # What goes wrong in there is said on stderr, which is the journal's.
        child = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
        theirs.close()
        try:
            _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        finally:
            child.kill()
            child.wait()
    if not descriptors:
        raise OSError(f"no socket came out of the namespace of {' '.join(where)}")
    return socket.socket(fileno=descriptors[0])


def pass_out(made: socket.socket) -> None:
    """Send a socket to whoever started this program, and wait until it was taken."""
    with socket.socket(fileno=os.dup(0)) as out:
        socket.send_fds(out, [b"\0"], [made.fileno()])
        out.recv(1)


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


def becomes(proxy: str, target: str, enter: Sequence[str]) -> tuple[str, ...]:
    """Return what this program becomes; a descriptor and the process id stay in whatever is entered."""
    inside = () if target.startswith(f"{LOOPBACK}:") else tuple(enter)
    return (*inside, proxy, target)


def main(argv: Sequence[str]) -> NoReturn:
    """Listen and hand over."""
    if argv[0] == INSIDE:
        pass_out(listen(argv[1], int(argv[2]), argv[3]))
        sys.exit(0)
    gateway, port, bridge, proxy, target, *enter = argv
    listening = listen_inside(enter, (gateway, port, bridge)) if enter else listen(gateway, int(port), bridge)
    tell_ready(os.environ)
    hand_over(listening, becomes(proxy, target, enter), dict(os.environ))


if __name__ == "__main__":
    main(sys.argv[1:])
