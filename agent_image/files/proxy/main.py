"""`corral-proxy --listen ADDRESS:PORT --dial SOCKET`: serves until SIGTERM, which ends it at once.

One line of JSON for each event on stdout. Exit codes: 0 after SIGTERM or SIGINT, 1 it cannot listen, 2 an
argument is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import signal
import socket
import stat
import sys
import time

from .authority import MAX_PORT
from .dialer import Dialer
from .hangup import Hangups
from .journal import Journal
from .server import MOST, Server
from .session import Means

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

EVERY = 60.0
BACKLOG = 128
# Two for a client, what is told that it is too much, and the rest.
DESCRIPTORS = 1024


def address(text: str) -> tuple[str, int]:
    """Read ADDRESS:PORT, an IPv4 address; port 0 is any. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or not port.isascii() or int(port) > MAX_PORT:
        raise ValueError("a port from 0 to 65535 is missing")
    try:
        socket.inet_pton(socket.AF_INET, host)
    except OSError as error:
        raise ValueError("not an IPv4 address") from error
    return host, int(port)


def arguments(argv: Sequence[str]) -> tuple[tuple[str, int], str]:
    """Return where to listen and where to ask; exits with 2 when an argument is wrong."""
    parser = argparse.ArgumentParser(prog="corral-proxy", allow_abbrev=False)
    parser.add_argument("--listen", required=True, type=address, metavar="ADDRESS:PORT")
    parser.add_argument("--dial", required=True, metavar="SOCKET")
    options = parser.parse_args(argv)
    return options.listen, options.dial


def listen(where: tuple[str, int]) -> socket.socket:
    """Return a socket that listens. Raises OSError."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def write(line: bytes) -> None:
    """Write to stdout, or raise OSError: nobody who reads the log slowly may stop the proxy."""
    os.write(1, line)


def _never_wait_for_the_log() -> None:
    # Of a pipe only: a terminal's or a file's description may be shared with others.
    if stat.S_ISFIFO(os.fstat(1).st_mode):
        os.set_blocking(1, False)


def _enough_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def run(where: tuple[str, int], dial: str) -> None:
    """Serve until a signal. Raises OSError: it cannot listen."""
    loop = asyncio.get_running_loop()
    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    journal = Journal(write, loop.time, time.time)
    listening = listen(where)
    enforcer = Dialer(dial)
    hangups = Hangups(loop)
    server = Server(listening, Means(journal, enforcer, hangups))
    host, port = listening.getsockname()
    journal.line("listening", address=host, port=port, most=MOST)
    telling = loop.create_task(_tell(journal, server))
    try:
        await ending.wait()
    finally:
        telling.cancel()
        journal.counters(server.active)
        await server.close()
        enforcer.close()
        hangups.close()


async def _tell(journal: Journal, server: Server) -> None:
    while True:
        await asyncio.sleep(EVERY)
        journal.counters(server.active)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run as a program."""
    where, dial = arguments(sys.argv[1:] if argv is None else argv)
    _enough_descriptors()
    _never_wait_for_the_log()
    try:
        asyncio.run(run(where, dial))
    except OSError as error:
        sys.stderr.write(f"corral-proxy: ERROR: cannot listen at {where[0]}:{where[1]}: {error.strerror}\n")
        sys.exit(1)
    sys.exit(0)
