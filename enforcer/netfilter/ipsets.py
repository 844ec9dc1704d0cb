"""Our ipsets over netlink.

Reading and changing elements is done by hand (see ``nfnetlink``); sets are made and destroyed by pyroute2,
which is seldom.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from pyroute2.ipset import IPSet
from pyroute2.netlink.exceptions import IPSetError

from enforcer.netfilter.model import NO_LIVES, PROTOCOLS, Element, Entry, Lives
from enforcer.netfilter.nfnetlink import (
    ACK,
    BIG_ENDIAN,
    DONE,
    DUMP,
    ERROR,
    GENERIC,
    NESTED,
    NETLINK_NETFILTER,
    attribute,
    attributes,
    code_of,
    each,
    message,
    messages,
)
from enforcer.netfilter.refusals import Tally
from enforcer.netfilter.skeleton import MAXELEM, SEEN, SEEN_MAX, TIMEOUT

NUMBERS = {number: name for name, number in PROTOCOLS.items()}
NOT_ADDED = 4103  # IPSET_ERR_EXIST in a delete
HASH_FULL = 4352  # IPSET_ERR_HASH_FULL
SUBSYSTEM, LIST, ADD, DELETE, HEAD = 6, 7, 9, 10, 12
PROTOCOL = 6  # of ipset, which every kernel speaks
# Attributes of a message, and of an element.
VERSION, SETNAME, TYPENAME, DATA, ELEMENTS = 1, 2, 3, 7, 8
IP, PORT, TIME, PROTO, IP2, PACKETS, COMMENT = 1, 4, 6, 7, 20, 25, 26
IPV4 = 1
FAMILY = socket.AF_INET
WAIT = 5.0


class SetError(Exception):
    """The kernel refused an operation on a set."""

    @property
    def missing(self) -> bool:
        """Whether there is no such set."""
        cause = self.__cause__
        if isinstance(cause, IPSetError):
            return bool(cause.code == errno.ENOENT)
        return isinstance(cause, OSError) and cause.errno == errno.ENOENT


@dataclass(frozen=True)
class Row:
    """One element as the kernel tells it; of a set of addresses only ``src`` is used."""

    src: str
    proto: int = 0
    port: int = 0
    dst: str = ""
    timeout: int = 0
    packets: int = 0
    comment: str = ""


def encode(row: Row, bare: bool = False) -> bytes:
    """Return an element as it travels; ``bare`` is its key alone, to delete it."""
    body = _address(IP, row.src)
    if row.dst:
        body += attribute(PORT | BIG_ENDIAN, struct.pack("!H", row.port))
        body += attribute(PROTO, bytes((row.proto,))) + _address(IP2, row.dst)
    if not bare:
        body += attribute(TIME | BIG_ENDIAN, struct.pack("!I", row.timeout))
        # The kernel drops the comment that an element has when none comes with it.
        body += attribute(COMMENT, row.comment.encode("ascii", "replace") + b"\0")
    return attribute(DATA | NESTED, body)


def decode(data: bytes) -> Row | None:
    """Return an element as it was read; None for one without an IPv4 address."""
    parts = attributes(data)
    source = attributes(parts.get(IP, b"")).get(IPV4)
    if source is None:
        return None
    destination = attributes(parts.get(IP2, b"")).get(IPV4)
    return Row(
        socket.inet_ntoa(source),
        parts.get(PROTO, b"\0")[0],
        int.from_bytes(parts.get(PORT, b""), "big"),
        socket.inet_ntoa(destination) if destination is not None else "",
        int.from_bytes(parts.get(TIME, b""), "big"),
        int.from_bytes(parts.get(PACKETS, b""), "big"),
        parts.get(COMMENT, b"").partition(b"\0")[0].decode("ascii", "replace"),
    )


def _address(kind: int, text: str) -> bytes:
    return attribute(kind | NESTED, attribute(IPV4 | BIG_ENDIAN, socket.inet_aton(text)))


class Sets:
    """Create, read and change sets. Its netlink sockets are opened in the caller's network namespace."""

    def __init__(self) -> None:
        self._tool = IPSet()
        self._socket = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER
        )
        self._socket.settimeout(WAIT)
        self._socket.bind((0, 0))
        self._sequence = 0

    def close(self) -> None:
        """Close the netlink sockets."""
        self._tool.close()
        self._socket.close()

    def create(self, name: str, kind: str) -> None:
        """Create a set with counters, comments and a default timeout; an equal one may exist."""
        try:
            self._tool.create(
                name,
                stype=kind,
                family=socket.AF_INET,
                maxelem=SEEN_MAX if name == SEEN else MAXELEM,
                timeout=TIMEOUT,
                counters=True,
                comment=True,
                exclusive=False,
            )
        except IPSetError as error:
            raise SetError(f"create {name}: {error}") from error

    def destroy(self, name: str) -> None:
        """Destroy a set that no rule names."""
        try:
            self._tool.destroy(name)
        except IPSetError as error:
            raise SetError(f"destroy {name}: {error}") from error

    def kind(self, name: str) -> str | None:
        """Return the type of a set, None when it does not exist."""
        try:
            for _, content in self._ask(HEAD, 0, name):
                said = attributes(content[GENERIC:])[TYPENAME]
                return said.partition(b"\0")[0].decode("ascii", "replace")
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise SetError(f"read {name}: {error}") from error
        return None

    def _ask(self, command: int, flags: int, name: str, body: bytes = b"") -> Iterator[tuple[int, bytes]]:
        """Yield kind and content of what answers: one message, all of a list, or nothing but a success.

        Raises:
            OSError: the kernel refuses.
        """
        self._sequence = (self._sequence + 1) & 0x7FFFFFFF
        sequence = self._sequence
        head = attribute(VERSION, bytes((PROTOCOL,))) + attribute(SETNAME, name.encode() + b"\0")
        self._socket.send(message(SUBSYSTEM << 8 | command, flags, sequence, head + body, FAMILY))
        while True:
            for kind, _, answered, content in messages(self._socket.recv(1 << 18)):
                if answered != sequence:
                    # The rest of an answer that was given up.
                    continue
                if kind in (ERROR, DONE):
                    code = code_of(content)
                    if code:
                        raise OSError(code, _reason(code))
                    return
                yield kind, content
                if not flags & DUMP:
                    return

    def _rows(self, name: str) -> list[Row]:
        found = []
        try:
            for _, content in self._ask(LIST, DUMP, name):
                for kind, element in each(attributes(content[GENERIC:]).get(ELEMENTS, b"")):
                    row = decode(element) if kind == DATA else None
                    if row is not None:
                        found.append(row)
        except OSError as error:
            raise SetError(f"list {name}: {error}") from error
        return found

    def entries(self, name: str) -> dict[Element, Entry]:
        """Return the content of a hash:ip,port,ip set."""
        found = {}
        for row in self._rows(name):
            element = Element(row.src, NUMBERS.get(row.proto, "other"), row.port, row.dst)
            found[element] = Entry(element, row.timeout, row.packets, row.comment)
        return found

    def sources(self, name: str) -> dict[str, int]:
        """Return the content of a hash:ip set: address -> packets counted."""
        return {row.src: row.packets for row in self._rows(name)}

    def tallies(self, name: str) -> list[Tally]:
        """Return the content of a hash:ip,port,ip set whose elements the kernel added itself."""
        return [
            Tally(row.src, row.proto, row.port, row.dst, row.packets, row.timeout) for row in self._rows(name)
        ]

    def put(self, name: str, elements: Mapping[Element, str], lives: Lives = NO_LIVES) -> None:
        """Add or renew elements; counters of existing ones are kept.

        Comment and timeout travel every time: the kernel drops what an ``-exist`` add leaves out.
        """
        for element, comment in elements.items():
            life = min(lives.get(element, TIMEOUT), TIMEOUT)
            self._add(name, _row(element, life, comment))

    def _add(self, name: str, row: Row) -> None:
        try:
            for _ in self._ask(ADD, ACK, name, encode(row)):
                pass
        except OSError as error:
            reason = "the set is full" if error.errno == HASH_FULL else str(error)
            raise SetError(f"add to {name}: {reason}") from error

    def drop_tallies(self, name: str, gone: Iterable[Tally]) -> None:
        """Delete elements that the kernel added itself; one that is not there is fine."""
        for tally in gone:
            self._drop(name, Row(tally.src, tally.proto, tally.port, tally.dst))

    def drop(self, name: str, elements: Iterable[Element]) -> None:
        """Delete elements; one that is not there is fine."""
        for element in elements:
            self._drop(name, _row(element))

    def _drop(self, name: str, row: Row) -> None:
        try:
            for _ in self._ask(DELETE, ACK, name, encode(row, bare=True)):
                pass
        except OSError as error:
            if error.errno not in (NOT_ADDED, errno.ENOENT):
                raise SetError(f"delete from {name}: {error}") from error

    def put_source(self, name: str, source: str) -> None:
        """Add or renew one address of a hash:ip set."""
        self._add(name, Row(source, timeout=TIMEOUT))

    def drop_source(self, name: str, source: str) -> None:
        """Delete one address of a hash:ip set; one that is not there is fine."""
        self._drop(name, Row(source))


def _row(element: Element, timeout: int = 0, comment: str = "") -> Row:
    return Row(element.src, PROTOCOLS[element.proto], element.port, element.dst, timeout, 0, comment)


def _reason(code: int) -> str:
    return os.strerror(code) if code < 4096 else f"error {code} of ipset"
