"""The writer on a user's own (rootless) engine: ``guard``, ``join`` and ``joined``; none needs root.

``guard`` runs under the name dockerd, in the namespaces that rootlesskit has just made: it loads the rules
and becomes the real one. Without it a container with a restart policy would run before anything of ours.
``join`` enters the namespaces of the engine that runs, and is the writer there (``joined``) for as long as
that engine lives.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from ipaddress import IPv4Network
from pathlib import Path
from typing import NoReturn

from enforcer.netfilter import namespace
from enforcer.netfilter.kernel import RealKernel
from enforcer.netfilter.namespace import OWNER, SOCKET, Daemon, NotGuarded
from enforcer.netfilter.server import (
    NETLINK_NETFILTER,
    NFNLGRP_NFTABLES,
    RTNLGRP_IPV4_IFADDR,
    RTNLGRP_LINK,
    Server,
    watch_socket,
)
from enforcer.netfilter.skeleton import IFACE
from enforcer.netfilter.writer import Writer

log = logging.getLogger("corral.netfilter")

CHILD = "_DOCKERD_ROOTLESS_CHILD"
PROGRAM = "dockerd"
GONE = 3
BACKLOG = 64
WIDEST = 20

MakeWriter = Callable[[Path | None, type[RealKernel]], Writer]


class JoinedKernel(RealKernel):
    """The kernel as the engine's namespace has it: what is beside its uplink is the host in disguise.

    slirp4netns and its like answer there for the host's loopback and for the host's resolver.
    """

    def host_addresses(self) -> frozenset[str]:
        """See Kernel; every neighbour on the uplink is as much the host's as an address of its own."""
        found = set(super().host_addresses())
        for link in self._links():
            if not link.name.startswith((IFACE, "lo", "docker", "br-", "veth")):
                for address in link.addresses:
                    found |= neighbours(address.network)
        return frozenset(found)


def neighbours(network: IPv4Network) -> set[str]:
    """Return the addresses beside an uplink: all of its network, the first and last 2,048 of a huge one."""
    if network.prefixlen >= WIDEST:
        return {str(address) for address in network}
    half = 1 << (31 - WIDEST)
    size = network.num_addresses
    return {str(network[index]) for index in (*range(half), *range(size - half, size))}


def real_program(path: str, own: Path) -> str:
    """Return the dockerd that PATH has behind ours.

    Raises:
        NotGuarded: there is none.
    """
    for directory in path.split(":"):
        candidate = Path(directory) / PROGRAM
        if directory and os.access(candidate, os.X_OK) and candidate.resolve() != own.resolve():
            return str(candidate)
    raise NotGuarded(f"there is no {PROGRAM} on PATH behind {own}")


def guard(
    argv: Sequence[str],
    environ: Mapping[str, str],
    make: MakeWriter,
    execute: Callable[[str, list[str]], object] = os.execv,
) -> int:
    """Load the rules and become dockerd; when they cannot be loaded, there is no dockerd.

    Args:
        argv: of this program.
        environ: the environment.
        make: makes a writer that serves nobody.
        execute: becomes a program.

    Raises:
        NotGuarded, KernelError, GiveUp, OSError: nothing was started.
    """
    real = real_program(environ.get("PATH", ""), Path(argv[0]))
    # Asked for its version or its options, it makes no namespace.
    if environ.get(CHILD):
        for problem in make(None, JoinedKernel).heal("the start of the engine"):
            log.warning("%s", problem.text)
        namespace.record(namespace.runtime_directory(environ), namespace.describe("self"))
    execute(real, [real, *argv[1:]])
    return 1


def join(
    environ: Mapping[str, str],
    command: Sequence[str],
    execute: Callable[[str, list[str]], object] = os.execv,
) -> int:
    """Become the writer in the namespaces of the user's engine.

    Args:
        environ: the environment.
        command: what runs this program, for ``joined`` with the daemon's three numbers.
        execute: becomes a program.

    Raises:
        NotGuarded: there is no engine that was started by the guard.
    """
    found = namespace.find(namespace.runtime_directory(environ))
    numbers = [str(found.pid), str(found.start), str(found.netns)]
    entering = namespace.enter(found)
    execute(entering[0], [*entering, *command, "joined", *numbers])
    return 1


def joined(
    words: Sequence[str], environ: Mapping[str, str], make: MakeWriter, notify: Callable[[str], None]
) -> int:
    """Serve in the namespace of a daemon until that ends.

    Args:
        words: pid, start time and namespace of the daemon.
        environ: the environment.
        make: makes the writer.
        notify: tells the service manager.

    Raises:
        NotGuarded: this is not that daemon's namespace, or it has ended.
        KernelError, GiveUp, OSError: the writer could not do its work.
    """
    pid, start, inode = map(int, words)
    runtime = namespace.runtime_directory(environ)
    watched = os.pidfd_open(pid)
    # In this order: what the descriptor holds cannot become another process any more.
    if namespace.describe(pid) != Daemon(pid, start, inode) or namespace.netns("self") != inode:
        raise NotGuarded("your engine has ended meanwhile")
    threading.Thread(target=_end_with, args=(watched,), daemon=True).start()
    writer = make(runtime / namespace.CLAIMS, JoinedKernel)
    rules = watch_socket(NETLINK_NETFILTER, NFNLGRP_NFTABLES)
    links = watch_socket(socket.NETLINK_ROUTE, RTNLGRP_LINK, RTNLGRP_IPV4_IFADDR)
    writer.heal("the start")
    writer.guard()
    writer.prune()
    server = Server(writer, listen(runtime / SOCKET), rules, links, only=OWNER)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    notify("READY=1")
    server.serve()
    return 0


def _end_with(descriptor: int) -> NoReturn:
    """A writer in a namespace without its engine would keep it, and answer for it."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    while not waiting.poll():
        pass
    log.warning("the engine has ended, and its namespace with it")
    os._exit(GONE)


def listen(path: Path) -> socket.socket:
    """Return a socket that listens at a path for its owner only, in place of whatever was there.

    Raises:
        OSError: it cannot be made.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    partial = path.with_suffix(".new")
    with contextlib.suppress(FileNotFoundError):
        partial.unlink()
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.bind(str(partial))
    partial.chmod(0o600)
    made.listen(BACKLOG)
    partial.replace(path)
    return made


def launcher() -> tuple[str, ...]:
    """Return what runs this program again."""
    return (sys.executable, "-I", "-S", str(Path(sys.argv[0]).resolve()))
