"""Small things the service asks of its host."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from enforcer.client import runtime_directory
from policy.errors import EnforcerError, EngineError


def addresses() -> list[str]:
    """Return every address of every interface.

    Raises:
        EngineError: the kernel did not tell.
    """
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        with IPRoute() as route:
            found = [row.get_attr("IFA_LOCAL") or row.get_attr("IFA_ADDRESS") for row in route.get_addr()]
    except (NetlinkError, OSError) as error:
        raise EngineError(f"reading this host's addresses: {error}") from error
    return [text for text in found if text]


def socket_sources(paths: Iterable[str]) -> frozenset[str]:
    """Return those of ``paths`` that are sockets: a mounted one is a way out that no rule sees."""
    found = set()
    for path in paths:
        try:
            if stat.S_ISSOCK(Path(path).stat().st_mode):
                found.add(path)
        except OSError:
            continue
    return frozenset(found)


def notify(text: str) -> None:
    """Tell the service manager, when there is one."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(text.encode(), address.replace("@", "\0", 1))


def only_instance(environ: Mapping[str, str]) -> Path:
    """Take the lock that one enforcer per user holds, and return the runtime directory.

    Raises:
        EnforcerError: another one runs.
    """
    directory = runtime_directory(environ)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(directory / "enforcer.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise EnforcerError(
            "another enforcer of this user is running",
            "see: systemctl --user status corral-enforcer",
        ) from error
    # The descriptor stays open, and with it the lock, until the process ends.
    return directory
