"""The writer's socket and the kernel's notifications, in one thread.

A request is one line of JSON, the answer too. Who asks is SO_PEERCRED, not anything in the request. A slow or
hostile client costs a small buffer until its deadline; it cannot hold up others or the repair of the rules.
"""

from __future__ import annotations

import contextlib
import json
import logging
import selectors
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from enforcer.netfilter.kernel import KernelError
from enforcer.netfilter.model import MAX_REQUEST
from enforcer.netfilter.schemas import SCHEMAS
from enforcer.netfilter.writer import Writer

log = logging.getLogger("corral.netfilter")

CLIENTS = 64
CLIENTS_PER_UID = 16
DEADLINE = 10.0  # seconds for a whole request, and for a whole answer
SETTLE = 0.02  # a burst of kernel notifications is one audit
AUDIT_EVERY = 30.0
# A link on its way into a container is announced when it leaves, not when it arrives: intervals that double.
GUARD_FIRST, GUARD_LAST = 0.001, 0.032
FILTER_EVERY = 1.0  # no notification tells of bridge filtering switched off, or of the legacy tables

NETLINK_NETFILTER, NFNLGRP_NFTABLES, RTNLGRP_LINK, RTNLGRP_IPV4_IFADDR = 12, 7, 1, 5
SOL_NETLINK, NETLINK_ADD_MEMBERSHIP = 270, 1


@dataclass
class Client:
    """One connection: what it sent so far, what it still has to receive."""

    uid: int
    deadline: float
    received: bytearray = field(default_factory=bytearray)
    to_send: bytearray = field(default_factory=bytearray)


def watch_socket(protocol: int, *groups: int) -> socket.socket:
    """Return a netlink socket that becomes readable when something in ``groups`` changes."""
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
    sock.bind((0, 0))
    for group in groups:
        sock.setsockopt(SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, group)
    sock.setblocking(False)
    return sock


def peer_uid(sock: socket.socket) -> int:
    """Return the uid of the process at the other end of a unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[1])


class Server:
    """Serves ``listener`` and repairs the rules until ``stop`` is called.

    ``only`` is the one uid that is served, as this process's user namespace has it; None: whoever gets in.
    """

    def __init__(
        self,
        writer: Writer,
        listener: socket.socket,
        rules: socket.socket,
        links: socket.socket,
        clock: Callable[[], float] = time.monotonic,
        only: int | None = None,
    ) -> None:
        self.writer = writer
        self._clock = clock
        self._only = only
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._clients: dict[socket.socket, Client] = {}
        self._links = links
        self._dirty: float | None = None
        self._prune_at: float | None = None
        self._guard_at: float | None = None
        self._guard_wait = 0.0
        self._next_audit = clock() + AUDIT_EVERY
        self._next_filter = clock() + FILTER_EVERY
        self._running = True
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        for watch in (rules, links):
            self._selector.register(watch, selectors.EVENT_READ)
        self._listen()

    def stop(self) -> None:
        """End ``serve`` after the current turn."""
        self._running = False

    def serve(self) -> None:
        """Run until stopped.

        Raises:
            GiveUp: the skeleton could not be mended.
        """
        while self._running:
            self.turn()

    def turn(self) -> None:
        """Wait for one round of events and handle them."""
        for key, events in self._selector.select(self._wait()):
            sock = key.fileobj
            if not isinstance(sock, socket.socket):
                continue
            if sock is self._listener:
                self._accept()
            elif sock in self._clients:
                self._serve_client(sock, events)
            else:
                self._drain(sock)
        now = self._clock()
        if self._guard_at is not None and now >= self._guard_at:
            self._guard(2 * self._guard_wait)
        for sock, client in list(self._clients.items()):
            if client.deadline < now:
                self._close(sock)
        if now >= self._next_filter:
            self._next_filter = now + FILTER_EVERY
            kernel = self.writer.kernel
            if not self.writer.unsettled and (not kernel.filtering() or kernel.unannounced()):
                self._dirty = now
        if now >= self._next_audit or (self._dirty is not None and now >= self._dirty):
            self._audit("a change by others" if self._dirty is not None else "the timer")
        elif self._prune_at is not None and now >= self._prune_at:
            self._prune()

    def _hear(self, sock: socket.socket) -> None:
        self.writer.hear()
        if self.writer.journal is None or self.writer.journal.sock is not sock:
            self._selector.unregister(sock)

    def _listen(self) -> None:
        """Open the log of refused packets, which is tried again with each audit; all else does without it."""
        journal = self.writer.journal
        if journal is None or journal.sock is not None:
            return
        before = journal.problem
        if journal.open() and journal.sock is not None:
            self._selector.register(journal.sock, selectors.EVENT_READ)
        elif journal.problem != before:
            log.warning("%s", journal.problem)

    def _wait(self) -> float:
        now = self._clock()
        moments = [
            self._next_audit,
            self._next_filter,
            *(client.deadline for client in self._clients.values()),
        ]
        moments += [moment for moment in (self._dirty, self._prune_at, self._guard_at) if moment is not None]
        return max(0.0, min(moments) - now)

    def _drain(self, sock: socket.socket) -> None:
        if self.writer.journal is not None and sock is self.writer.journal.sock:
            self._hear(sock)
            return
        # What changed does not matter, everything is read again; ENOBUFS says the same.
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    sock.recv(1 << 16)
                except BlockingIOError:
                    raise
                except OSError:
                    break
        if sock is self._links:
            self._guard(GUARD_FIRST)
            self._prune_at = self._prune_at or self._clock() + SETTLE
        else:
            self._dirty = self._dirty or self._clock() + SETTLE

    def _audit(self, why: str) -> None:
        self._dirty = None
        self._next_audit = self._clock() + AUDIT_EVERY
        self._listen()
        # Requests rely on what is known to be unchanged; that knowledge is put to the test here.
        self.writer.kernel.distrust()
        self.writer.mend(why)
        self._look_again()
        self._guard()
        self._prune()

    def _guard(self, again: float = 0.0) -> None:
        self._guard_wait = again if again <= GUARD_LAST else 0.0
        self._guard_at = self._clock() + self._guard_wait if self._guard_wait else None
        try:
            self.writer.guard()
        except KernelError as error:
            log.error("%s", error)
            self._next_audit = min(self._next_audit, self._clock() + 1.0)

    def _look_again(self) -> None:
        # While somebody else keeps changing the rules, requests are served in between.
        if self.writer.unsettled:
            due = self._clock() + self.writer.delay
            self._dirty = due if self._dirty is None else min(self._dirty, due)

    def _prune(self) -> None:
        self._prune_at = None
        try:
            self.writer.prune()
        except KernelError as error:
            log.error("reading the sets failed: %s", error)
            self._prune_at = self._clock() + 1.0

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            sock, _ = self._listener.accept()
            uid = peer_uid(sock)
            mine = sum(client.uid == uid for client in self._clients.values())
            stranger = self._only is not None and uid != self._only
            if stranger or len(self._clients) >= CLIENTS or mine >= CLIENTS_PER_UID:
                sock.close()
                return
            sock.setblocking(False)
            self._clients[sock] = Client(uid, self._clock() + DEADLINE)
            self._selector.register(sock, selectors.EVENT_READ)

    def _close(self, sock: socket.socket) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(sock)
        self._clients.pop(sock, None)
        sock.close()

    def _serve_client(self, sock: socket.socket, events: int) -> None:
        client = self._clients[sock]
        try:
            if events & selectors.EVENT_READ:
                data = sock.recv(1 << 16)
                if not data:
                    self._close(sock)
                    return
                client.received += data
                self._requests(sock, client)
            if client.to_send:
                del client.to_send[: sock.send(client.to_send)]
        except BlockingIOError:
            pass
        except OSError:
            self._close(sock)
            return
        if sock in self._clients:
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.to_send else 0)
            self._selector.modify(sock, mask)

    def _requests(self, sock: socket.socket, client: Client) -> None:
        if len(client.received) > MAX_REQUEST or len(client.to_send) > MAX_REQUEST:
            self._close(sock)
            return
        while b"\n" in client.received:
            line, _, client.received = client.received.partition(b"\n")
            client.deadline = self._clock() + DEADLINE
            try:
                body = json.loads(line)
            except (ValueError, RecursionError):
                body = None
            answer = {**self.writer.handle(client.uid, body), "schemas": SCHEMAS}
            client.to_send += json.dumps(answer).encode() + b"\n"
        self._look_again()
