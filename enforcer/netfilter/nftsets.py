"""The sets of our own nft table over netlink, with the interface of ``ipsets.Sets``.

Elements travel through the socket that owns the table (see ``hold.py``), so changing them never lets go of
it. What a key means is told by its set: addresses, or (source, protocol, port, destination) each padded to
four bytes.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from enforcer.netfilter.ipsets import SetError
from enforcer.netfilter.model import NO_LIVES, PROTOCOLS, Element, Entry, Lives
from enforcer.netfilter.nfnetlink import (
    ACK,
    CREATE,
    DONE,
    DUMP,
    ERROR,
    INET,
    INTERRUPTED,
    NESTED,
    NETLINK_NETFILTER,
    attribute,
    attributes,
    code_of,
    each,
    message,
    messages,
)
from enforcer.netfilter.owntable import SETS
from enforcer.netfilter.refusals import Tally
from enforcer.netfilter.skeleton import TABLE, TIMEOUT

SUBSYSTEM, NEW, DELETE = 10, 12, 14
GET, GET_GENERATION, GET_TABLE = 13, 16, 1
FAMILIES = {1: "inet", 2: "ip", 3: "arp", 5: "netdev", 7: "bridge", 10: "ip6"}
FLAGS = {1: "dormant", 2: "owner", 4: "persist"}
BATCH_BEGIN, BATCH_END = 16, 17
CHUNK = 100  # elements in one message; its length is a number of 16 bits
BATCH = 10  # messages in one transaction: all of it has to fit the socket's buffer
TRIES = 3
LOOKS = 20  # any other table's change spoils a look
WAIT = 5.0
NUMBERS = {number: name for name, number in PROTOCOLS.items()}


@dataclass(frozen=True)
class Row:
    """One element: its key, the rest of its life in seconds, what it counted, and its comment."""

    key: bytes
    timeout: int = TIMEOUT
    packets: int = 0
    octets: int = 0
    comment: str = ""


def flow_key(src: str, proto: int, port: int, dst: str) -> bytes:
    """Return the key of a set of flows."""
    return struct.pack("!4sB3xH2x4s", socket.inet_aton(src), proto, port, socket.inet_aton(dst))


def flow_of(key: bytes) -> tuple[str, int, int, str]:
    """Return source, protocol, port and destination of a key."""
    src, proto, port, dst = struct.unpack("!4sB3xH2x4s", key[:16])
    return socket.inet_ntoa(src), proto, port, socket.inet_ntoa(dst)


def encode(row: Row, bare: bool = False) -> bytes:
    """Return an element as it travels; ``bare`` is its key alone, to delete it."""
    body = attribute(1 | NESTED, attribute(1, row.key))
    if not bare:
        counter = attribute(1, struct.pack("!Q", row.octets)) + attribute(2, struct.pack("!Q", row.packets))
        body += attribute(4, struct.pack("!Q", row.timeout * 1000))
        if row.comment:
            text = row.comment.encode("ascii", "replace") + b"\0"
            body += attribute(6, bytes((0, len(text))) + text)
        body += attribute(7 | NESTED, attribute(1, b"counter\0") + attribute(2 | NESTED, counter))
    return attribute(1 | NESTED, body)


def decode(data: bytes) -> Row | None:
    """Return an element as it was read; None for one without a plain key."""
    parts = attributes(data)
    key = attributes(parts.get(1, b"")).get(1)
    if key is None:
        return None
    # Of a life without an end the kernel tells neither.
    left = parts.get(5, parts.get(4, bytes(8)))
    packets = octets = 0
    expressions = [parts[7]] if 7 in parts else [value for _, value in each(parts.get(11, b""))]
    for expression in expressions:
        fields = attributes(expression)
        if fields.get(1, b"").rstrip(b"\0") == b"counter":
            counted = attributes(fields.get(2, b""))
            octets, packets = (struct.unpack("!Q", counted[kind])[0] for kind in (1, 2))
    said = parts.get(6, b"")
    comment = said[2 : 2 + said[1]].rstrip(b"\0").decode("ascii", "replace") if said[:1] == b"\0" else ""
    return Row(key, struct.unpack("!Q", left)[0] // 1000, packets, octets, comment)


class TableSets:
    """Read and change the sets; ``owner`` returns the socket that owns the table, None while nobody does."""

    def __init__(self, owner: Callable[[], socket.socket | None]) -> None:
        self._owner = owner
        self._socket = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER
        )
        self._socket.settimeout(WAIT)
        self._socket.bind((0, 0))
        self._sequence = 0
        self._commits = 0

    def close(self) -> None:
        """Close the netlink socket."""
        self._socket.close()

    def _next(self) -> int:
        self._sequence = (self._sequence + 1) & 0x7FFFFFFF
        return self._sequence

    def generation(self) -> int:
        """Return a number that is another one after each change of rules by anybody but this object.

        The kernel counts what it commits to any table of its network namespace. An element that it adds or
        drops by itself is no commit.

        Raises:
            OSError: the kernel does not tell.
        """
        sequence = self._next()
        kind = SUBSYSTEM << 8 | GET_GENERATION
        self._socket.send(message(kind, 0, sequence, b"", family=0))
        while True:
            for kind, _, answered, content in messages(self._socket.recv(1 << 16)):
                if answered != sequence:
                    continue
                if kind == ERROR:
                    code = code_of(content) or errno.EPROTO
                    raise OSError(code, os.strerror(code))
                number: int = struct.unpack("!I", attributes(content[4:])[1])[0]
                return (number - self._commits) & 0xFFFFFFFF

    def rows(self, name: str) -> list[Row]:
        """Return the elements of a set of the table.

        Raises:
            SetError: there is no such set, or it cannot be read.
        """
        body = attribute(1, TABLE.encode() + b"\0") + attribute(2, name.encode() + b"\0")
        return [
            row
            for content in self._dump(name, GET, body, INET)
            for _, element in each(attributes(content[4:]).get(3, b""))
            if (row := decode(element)) is not None
        ]

    def has(self, name: str) -> bool:
        """Tell whether the table has a set of that name; SetError when that cannot be told."""
        try:
            self.rows(name)
        except SetError as error:
            if error.missing:
                return False
            raise
        return True

    def tables(self) -> dict[tuple[str, str], frozenset[str]]:
        """Return every table of this network namespace, by family and name, with its flags.

        Of a table with a single flag, what ``nft -j`` prints is memory that was freed (nft before 1.0.8).

        Raises:
            SetError: they cannot be read.
        """
        found = {}
        for content in self._dump("tables", GET_TABLE, b"", 0):
            parts = attributes(content[4:])
            (bits,) = struct.unpack("!I", parts.get(2, bytes(4)))
            key = (FAMILIES.get(content[0], str(content[0])), parts[1].rstrip(b"\0").decode(errors="replace"))
            found[key] = frozenset(name for bit, name in FLAGS.items() if bits & bit)
        return found

    def _dump(self, what: str, get: int, body: bytes, family: int) -> list[bytes]:
        """Return the content of each message of a listing; SetError when there is none."""
        try:
            for _ in range(LOOKS):
                found = self._look(get, body, family)
                if found is not None:
                    return found
        except OSError as error:
            raise SetError(f"list {what}: {error}") from error
        raise SetError(f"list {what}: the rules change all the time")

    def _look(self, get: int, body: bytes, family: int) -> list[bytes] | None:
        """Return a listing, None when the rules changed meanwhile: parts may be missing then."""
        sequence = self._next()
        found: list[bytes] = []
        whole = True
        self._socket.send(message(SUBSYSTEM << 8 | get, DUMP, sequence, body, family))
        while True:
            for kind, flags, answered, content in messages(self._socket.recv(1 << 18)):
                if answered != sequence:
                    continue
                whole = whole and not flags & INTERRUPTED
                if kind in (ERROR, DONE):
                    code = code_of(content)
                    if code == errno.EINTR:
                        return None
                    if code:
                        raise OSError(code, os.strerror(code))
                    return found if whole else None
                found.append(content)

    def _write(self, name: str, changes: list[tuple[int, list[Row]]]) -> None:
        """Delete and add in transactions; OSError when the kernel refuses one."""
        owner = self._owner()
        sock = self._socket if owner is None else owner
        work = iter(
            (kind, rows[start : start + CHUNK])
            for kind, rows in changes
            for start in range(0, len(rows), CHUNK)
        )
        while part := list(islice(work, BATCH)):
            self._transact(sock, name, part)

    def _transact(self, sock: socket.socket, name: str, part: list[tuple[int, list[Row]]]) -> None:
        head = attribute(1, TABLE.encode() + b"\0") + attribute(2, name.encode() + b"\0")
        data = message(BATCH_BEGIN, 0, self._next(), b"", 0, SUBSYSTEM)
        waiting = set()
        for kind, rows in part:
            body = head + attribute(3 | NESTED, b"".join(encode(row, bare=kind == DELETE) for row in rows))
            sequence = self._next()
            waiting.add(sequence)
            data += message(SUBSYSTEM << 8 | kind, ACK | (CREATE if kind == NEW else 0), sequence, body)
        data += message(BATCH_END, 0, self._next(), b"", 0, SUBSYSTEM)
        sock.send(data)
        while waiting:
            for kind, _, answered, content in messages(sock.recv(1 << 18)):
                if kind != ERROR or answered not in waiting:
                    continue
                code = code_of(content)
                if code:
                    raise OSError(code, os.strerror(code))
                waiting.discard(answered)
        self._commits += 1

    def _change(self, name: str, put: Mapping[bytes, Row], gone: Iterable[bytes]) -> None:
        """Put elements, also in place of older ones with their counters; delete others.

        A kernel before 6.12 does not renew an element, so it is replaced, in one transaction. One may expire
        between the look and the transaction, which then fails as a whole.
        """
        set_ = SETS.get(name, name)
        leaving = set(gone)
        for attempt in range(TRIES):
            there = {row.key: row for row in self.rows(set_)}
            for start in range(0, max(len(put), 1), CHUNK):
                keys = list(islice(put, start, start + CHUNK))
                old = [there[key] for key in keys if key in there]
                new = [
                    Row(key, put[key].timeout, there[key].packets, there[key].octets, put[key].comment)
                    if key in there
                    else put[key]
                    for key in keys
                ]
                try:
                    self._write(set_, [(DELETE, old), (NEW, new)])
                except OSError as error:
                    if error.errno == errno.ENOENT and attempt + 1 < TRIES:
                        break
                    reason = "the set is full" if error.errno == errno.ENFILE else str(error)
                    raise SetError(f"add to {name}: {reason}") from error
            else:
                try:
                    self._write(set_, [(DELETE, [there[key] for key in leaving if key in there])])
                    return
                except OSError as error:
                    if error.errno != errno.ENOENT or attempt + 1 == TRIES:
                        raise SetError(f"delete from {name}: {error}") from error

    def entries(self, name: str) -> dict[Element, Entry]:
        """Return the content of a set of flows."""
        found = {}
        for row in self.rows(SETS[name]):
            src, proto, port, dst = flow_of(row.key)
            element = Element(src, NUMBERS.get(proto, "other"), port, dst)
            found[element] = Entry(element, row.timeout, row.packets, row.comment)
        return found

    def sources(self, name: str) -> dict[str, int]:
        """Return the content of a set of addresses: address -> packets counted."""
        return {socket.inet_ntoa(row.key[:4]): row.packets for row in self.rows(SETS[name])}

    def tallies(self, name: str) -> list[Tally]:
        """Return the content of a set of flows whose elements the kernel added itself."""
        return [Tally(*flow_of(row.key), row.packets, row.timeout) for row in self.rows(SETS[name])]

    def put(self, name: str, elements: Mapping[Element, str], lives: Lives = NO_LIVES) -> None:
        """Add or renew elements; counters of existing ones are kept."""
        rows = [
            Row(_key(element), min(lives.get(element, TIMEOUT), TIMEOUT), comment=comment)
            for element, comment in elements.items()
        ]
        self._change(name, {row.key: row for row in rows}, ())

    def drop(self, name: str, elements: Iterable[Element]) -> None:
        """Delete elements; one that is not there is fine."""
        self._change(name, {}, [_key(element) for element in elements])

    def drop_tallies(self, name: str, gone: Iterable[Tally]) -> None:
        """Delete elements that the kernel added itself; one that is not there is fine."""
        self._change(name, {}, [flow_key(t.src, t.proto, t.port, t.dst) for t in gone])

    def put_source(self, name: str, source: str, comment: str = "") -> None:
        """Add or renew one address."""
        key = socket.inet_aton(source)
        self._change(name, {key: Row(key, comment=comment)}, ())

    def drop_source(self, name: str, source: str) -> None:
        """Delete one address; one that is not there is fine."""
        self._change(name, {}, [socket.inet_aton(source)])

    def claims(self) -> tuple[frozenset[str], frozenset[tuple[str, int]]]:
        """Return what the table's two sets about claims hold: gateways, and (bridge, uid)."""
        gateways = frozenset(socket.inet_ntoa(row.key[:4]) for row in self.rows("gateways"))
        owners = frozenset(
            (row.key[:16].rstrip(b"\0").decode(), struct.unpack("=I", row.key[16:20])[0])
            for row in self.rows("owners")
        )
        return gateways, owners


def _key(element: Element) -> bytes:
    return flow_key(element.src, PROTOCOLS[element.proto], element.port, element.dst)
