"""The socket through which a sandbox's proxy asks for names: one for each sandbox that has a proxy.

A proxy is not trusted. Which sandbox it speaks for is known by the socket, never by what it says; what it
gets is an address opened for itself, for a name that every session which can reach it allows. Whatever it
sends, it takes no time from other sandboxes: its lines wait for their turn, and so do its connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import stat
import struct
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Protocol

from enforcer import asking
from enforcer.budget import Budget, BusyError, pays
from enforcer.doors import ClosedError, Doors
from enforcer.lookups import Lookups
from enforcer.pinmodel import Failure
from enforcer.sessions import Session
from enforcer.vetting import Verdict
from policy import proxying
from policy.hosts import HostError, canonical_wire_name
from policy.identity import StatePaths

log = logging.getLogger("corral.enforcer")

VERSION = 1
LONGEST = 4096  # bytes of a line
ADDRESSES = 8  # in an answer
RATE, BURST = 100.0, 200.0  # lines a second of one sandbox, and new connections; more wait
# Of a second of this service, what one sandbox may use to have its names compared with its policies
# and what name servers say of them read.
SHARE = 0.1
PENDING = 64  # names of one sandbox that are being resolved or opened
CONNECTIONS = 272  # of one sandbox: more than its proxy has, which opens one for each that waits
BACKLOG = 64
LOOK = 2.0  # seconds
REASONS = frozenset({"sni-mismatch", "no-sni", "not-tls", "bad-hello", "second-hello"})
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREDENTIALS = struct.Struct("3i")


class Refusing(Protocol):
    """Where refused names are told; see denials.Denials.asked."""

    def asked(self, sandbox: str, container: str, name: str, port: int, reason: str) -> None:
        """Take in a name that was asked for and refused."""


class MalformedError(Exception):
    """A line is none of the protocol; the text says what is wrong with it."""


class _NoError(Exception):
    """A dial is refused; ``reason`` is what ``corral denied`` says about it, or nothing."""

    def __init__(self, reason: str, kind: str, text: str) -> None:
        super().__init__(text)
        self.reason, self.kind, self.text = reason, kind, text


@dataclass(frozen=True)
class Request:
    """One line: ``reason`` is empty in a dial, and why the proxy closed a connection otherwise."""

    name: str
    port: int
    reason: str = ""


def parse(line: bytes) -> Request:
    """Read one line.

    Raises:
        MalformedError: it is not one.
    """
    if len(line) > LONGEST:
        raise MalformedError(f"a line longer than {LONGEST} bytes")
    try:
        body: Any = json.loads(line.decode("ascii"))
    except (ValueError, RecursionError):
        raise MalformedError("not a line of JSON in ASCII") from None
    if not isinstance(body, dict) or body.get("v") != VERSION or body["v"] is True:
        raise MalformedError(f"not an object of version {VERSION}")
    fields = {"dial": {"v", "op", "name", "port"}, "refused": {"v", "op", "name", "port", "reason"}}
    op, name, port, reason = (body.get(key) for key in ("op", "name", "port", "reason"))
    if not isinstance(op, str) or fields.get(op) != body.keys():
        raise MalformedError("neither a dial nor a refusal, with their fields")
    if type(port) is not int or not 0 < port < 65536:
        raise MalformedError("port is not a number from 1 to 65535")
    if op == "refused" and (not isinstance(reason, str) or reason not in REASONS):
        raise MalformedError("an unknown reason")
    try:
        wire = canonical_wire_name(name) if isinstance(name, str) else ""
    except HostError as error:
        raise MalformedError(f"not a name: {error.what}") from None
    if not wire:
        raise MalformedError("name is not text")
    return Request(wire, port, str(reason or ""))


def refusal(kind: str, text: str) -> dict[str, Any]:
    """Return the answer to what is not done."""
    plain = "".join(char if char.isascii() and char.isprintable() else "?" for char in text)
    return {"ok": False, "kind": kind, "text": plain[:300]}


@dataclass
class _Listener:
    """``directory`` stays open, so that the socket has a short name, and is found again wherever it lies."""

    sandbox: str
    place: Path
    directory: int
    sock: socket.socket
    mark: tuple[int, int]
    task: asyncio.Task[None] | None = None
    arriving: Budget = field(default_factory=lambda: Budget(RATE, BURST, CONNECTIONS))
    asking: Budget = field(default_factory=lambda: Budget(RATE, BURST, PENDING))
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    clients: set[asyncio.Task[None]] = field(default_factory=set)
    free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CONNECTIONS))
    results: Counter[str] = field(default_factory=Counter)

    def stands(self) -> bool:
        """Tell whether who looks for the socket finds this one."""
        with contextlib.suppress(OSError):
            found = os.stat(proxying.DIAL_SOCKET, dir_fd=self.directory, follow_symlinks=False)
            here, there = os.fstat(self.directory), self.place.stat(follow_symlinks=False)
            same = (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
            return same and (found.st_dev, found.st_ino) == self.mark
        return False

    def close(self) -> None:
        for task in (*self.clients, *([self.task] if self.task is not None else [])):
            task.cancel()
        self.sock.close()
        if self.stands():
            with contextlib.suppress(OSError):
                os.unlink(proxying.DIAL_SOCKET, dir_fd=self.directory)
        os.close(self.directory)


def listen(place: Path, uid: int) -> tuple[int, socket.socket, tuple[int, int]]:
    """Make the socket in a directory; return the directory, the socket and what it is known by.

    Raises:
        OSError: the directory is not there, or is none that only its user writes in.
    """
    directory = os.open(place, _DIRECTORY)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        found = os.fstat(directory)
        if found.st_uid != uid or found.st_mode & 0o022:
            raise PermissionError(f"{place} does not belong to its user alone")
        with contextlib.suppress(FileNotFoundError):
            old = os.stat(proxying.DIAL_SOCKET, dir_fd=directory, follow_symlinks=False)
            if not stat.S_ISSOCK(old.st_mode):
                raise FileExistsError(f"{place / proxying.DIAL_SOCKET} is not a socket")
            # This service is the only one of its user: it is a dead predecessor's.
            os.unlink(proxying.DIAL_SOCKET, dir_fd=directory)
        # A socket's path is at most 107 bytes long, which a home directory may exceed.
        sock.bind(f"/proc/self/fd/{directory}/{proxying.DIAL_SOCKET}")
        os.chmod(proxying.DIAL_SOCKET, 0o600, dir_fd=directory)
        made = os.stat(proxying.DIAL_SOCKET, dir_fd=directory, follow_symlinks=False)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        os.close(directory)
        raise
    return directory, sock, (made.st_dev, made.st_ino)


class Dialing:
    """Listens where a proxy is, and nowhere else. Runs on the service's loop.

    ``world`` returns the sessions as they are now, ``vet`` judges an address. Below ``data_home`` are the
    files of sandboxes; ``uid`` is this service's, and that of all who may ask.
    """

    def __init__(
        self,
        world: Callable[[], Collection[Session]],
        lookups: Lookups,
        doors: Doors,
        refused: Refusing,
        vet: Callable[[str], Verdict],
        clock: Callable[[], float],
        data_home: Path,
        uid: int | None = None,
    ) -> None:
        self._world, self._lookups, self._doors, self._refused = world, lookups, doors, refused
        self._vet, self._clock, self._data = vet, clock, data_home
        self._uid = os.geteuid() if uid is None else uid
        self._listeners: dict[str, _Listener] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.problems: dict[str, str] = {}
        self.results: Counter[str] = Counter()

    def serves(self, sandbox: str) -> bool:
        """Tell whether the proxy of a sandbox can ask."""
        listener = self._listeners.get(sandbox)
        return listener is not None and listener.stands()

    def counts(self, sandbox: str) -> dict[str, int]:
        """Return how often the proxy of a sandbox asked, by result."""
        listener = self._listeners.get(sandbox)
        return dict(listener.results) if listener is not None else {}

    def follow(self) -> str:
        """Listen for the proxies that there are; return what of it is impossible, or nothing."""
        wanted = {session.sandbox.id for session in self._world() if session.proxy}
        self.problems = {}
        for sandbox, listener in list(self._listeners.items()):
            if sandbox not in wanted or not listener.stands():
                del self._listeners[sandbox]
                listener.close()
        for sandbox in sorted(wanted - self._listeners.keys()):
            place = StatePaths(self._data / sandbox).dial
            try:
                directory, sock, mark = listen(place, self._uid)
            except OSError as error:
                why = error.strerror or str(error)
                self.problems[sandbox] = f"the proxy of {sandbox} cannot ask at {place}: {why}"
                continue
            made = _Listener(sandbox, place, directory, sock, mark)
            made.task = asyncio.get_running_loop().create_task(self._accept(made))
            made.task.add_done_callback(_told)
            self._listeners[sandbox] = made
        return "; ".join(self.problems.values())

    async def forever(self, moved: Callable[[], object]) -> None:
        """Call ``moved`` when a socket was taken away."""
        while True:
            await asyncio.sleep(LOOK)
            if not all(listener.stands() for listener in self._listeners.values()):
                moved()

    def close(self) -> None:
        """Answer nobody any more."""
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()

    # -- one sandbox

    async def _accept(self, listener: _Listener) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await listener.free.acquire()
            await self._turn(listener.arriving)
            try:
                connection, _ = await loop.sock_accept(listener.sock)
            except OSError as error:
                # Out of descriptors, most likely: what there is may end meanwhile.
                log.warning("proxy of %s: %s", listener.sandbox, error)
                listener.free.release()
                await asyncio.sleep(1.0)
                continue
            task = loop.create_task(self._serve(listener, connection))
            listener.clients.add(task)
            task.add_done_callback(listener.clients.discard)
            task.add_done_callback(lambda _task: listener.free.release())
            task.add_done_callback(_told)

    async def _turn(self, budget: Budget) -> None:
        wait = budget.reserve(self._clock(), inf)
        if wait:
            await asyncio.sleep(wait)

    async def _serve(self, listener: _Listener, connection: socket.socket) -> None:
        with contextlib.closing(connection):
            found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            uid = _CREDENTIALS.unpack(found)[1]
            if uid != self._uid:
                log.warning("proxy of %s: uid %d has no business at its socket", listener.sandbox, uid)
                return
            pays(lambda spent: listener.asking.charge(spent * RATE / SHARE))
            reader, writer = await asyncio.open_unix_connection(sock=connection, limit=LONGEST)
            try:
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    while await self._exchange(listener, reader, writer):
                        pass
            finally:
                writer.close()

    async def _exchange(
        self, listener: _Listener, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Answer one line; False when the connection is of no more use."""
        goes_on = True
        try:
            line = await reader.readuntil(b"\n")
            # One waits at a time: what the one before it used is known by then.
            async with listener.turn:
                await self._turn(listener.asking)
            answer = await self._answer(listener, parse(line))
        except asyncio.LimitOverrunError:
            answer, goes_on = refusal("malformed", f"a line longer than {LONGEST} bytes"), False
        except MalformedError as error:
            answer = refusal("malformed", str(error))
        kind = "ok" if answer["ok"] else str(answer["kind"])
        listener.results[kind] += 1
        self.results[kind] += 1
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()
        return goes_on

    async def _answer(self, listener: _Listener, request: Request) -> dict[str, Any]:
        proxy = self._proxy(listener.sandbox)
        if request.reason:
            container = proxy.container if proxy is not None else ""
            self._refused.asked(listener.sandbox, container, request.name, request.port, request.reason)
            return {"ok": True}
        if proxy is None:
            return refusal("unready", "the proxy is not known yet")
        try:
            with listener.asking.slot():
                return await self._dial(listener, proxy, request)
        except BusyError:
            no = _NoError("busy", "busy", f"{PENDING} names are being asked for already")
        except _NoError as error:
            no = error
        if no.reason:
            self._refused.asked(listener.sandbox, proxy.container, request.name, request.port, no.reason)
        return refusal(no.kind, no.text)

    def _proxy(self, sandbox: str) -> Session | None:
        found = [session for session in self._world() if session.sandbox.id == sandbox and session.proxy]
        return min(found, key=lambda s: (not s.running, s.life.created, s.container), default=None)

    async def _dial(self, listener: _Listener, proxy: Session, request: Request) -> dict[str, Any]:
        self._judge(listener, proxy, request)
        result, left = await self._lookups.find(request.name)
        if isinstance(result, Failure):
            raise _NoError("resolve", "resolve", f"{request.name}: {result.kind} {result.detail}".strip())
        verdicts = [(address, self._vet(address)) for address in result.addresses]
        good = [address for address, verdict in verdicts if verdict]
        if not good:
            why = "; ".join(f"{address} is {verdict.reason}" for address, verdict in verdicts)
            raise _NoError("refused-address", "denied", f"{request.name} has no address it may have: {why}")
        # Whatever was changed while a name server thought, holds.
        self._judge(listener, proxy, request)
        try:
            opened = await self._doors.open(
                proxy.container, request.name, (request.port,), good[:ADDRESSES], left
            )
        except ClosedError as error:
            raise _NoError("" if error.kind == "unready" else error.kind, error.kind, error.text) from error
        permit = self._judge(listener, proxy, request)
        return {"ok": True, "addresses": list(opened), "protocol": permit.protocol, "sni": permit.sni}

    def _judge(self, listener: _Listener, proxy: Session, request: Request) -> asking.Permit:
        began = self._clock()
        found = asking.judge(asking.askers(self._world(), proxy.sandbox.id), request.name, request.port)
        listener.asking.charge((self._clock() - began) * RATE / SHARE)
        if isinstance(found, asking.Refused):
            raise _NoError("denied", "denied", found.text)
        return found


def _told(task: asyncio.Task[None]) -> None:
    # Whoever may ask must not be able to end the service.
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a proxy's question could not be answered", exc_info=error)
