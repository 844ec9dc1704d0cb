"""Small things the service asks of its host."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import socket
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from enforcer.client import runtime_directory
from policy.errors import EnforcerError, EngineError

log = logging.getLogger("corral.enforcer")

CONTAINER_LINKS = ("corral-", "docker", "br-", "veth")
# RTMGRP_LINK, _IPV4_IFADDR, _IPV4_ROUTE, _IPV6_IFADDR
RTNL_GROUPS = 0x1 | 0x10 | 0x40 | 0x100
SETTLE = 0.1  # seconds; one change is told in several messages


def boot_clock() -> float:
    """Return seconds since boot, suspend included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


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


def uplinks(routes: Path = Path("/proc/net/route")) -> frozenset[tuple[str, ...]]:
    """Return this host's IPv4 routes of the main table but those of containers; see ``parse_routes``.

    A VPN changes them, or brings an address; a container that starts does not.
    """
    try:
        return parse_routes(routes.read_text())
    except OSError:
        return frozenset()


def parse_routes(text: str) -> frozenset[tuple[str, ...]]:
    """Return (interface, destination, gateway, metric, mask) of a /proc/net/route, as it writes them."""
    rows = [line.split() for line in text.splitlines()[1:]]
    return frozenset(
        (row[0], row[1], row[2], row[6], row[7])
        for row in rows
        if len(row) >= 8 and not row[0].startswith(CONTAINER_LINKS)
    )


def _rtnetlink() -> socket.socket:
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    sock.bind((0, RTNL_GROUPS))
    return sock


def watch_network(
    loop: asyncio.AbstractEventLoop,
    moved: Callable[[], object],
    make: Callable[[], socket.socket] = _rtnetlink,
) -> Callable[[], None]:
    """Call ``moved`` soon after links, addresses or routes of this host changed; returns how to stop that.

    Without such a socket the regular full pass finds changes, later.
    """
    try:
        sock = make()
    except OSError as error:
        log.warning("changes of this host's network are not followed: %s", error)
        return lambda: None
    pending: list[asyncio.TimerHandle] = []

    def fire() -> None:
        pending.clear()
        moved()

    def readable() -> None:
        try:
            while sock.recv(65536):
                pass
        except BlockingIOError:
            pass
        except OSError as error:
            # ENOBUFS: more happened than could be told, which is a change too.
            if error.errno != errno.ENOBUFS:
                log.warning("following this host's network: %s", error)
                loop.remove_reader(sock)
        if not pending:
            pending.append(loop.call_later(SETTLE, fire))

    def stop() -> None:
        loop.remove_reader(sock)
        for handle in pending:
            handle.cancel()
        sock.close()

    loop.add_reader(sock, readable)
    return stop


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
