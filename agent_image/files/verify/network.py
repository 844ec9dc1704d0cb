"""Single tries over the network that end in a bounded time, whatever the far end does."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time

WAIT = 0.9
# Who refuses does it with the first: what is reset had been accepted, even if nobody saw it.
_KINDS = {errno.ECONNREFUSED: "refused", errno.ECONNRESET: "closed", errno.EPIPE: "closed"}
RECORD_TYPES = {"A": 1, "TXT": 16}
_RCODES = {0: "NOERROR", 1: "FORMERR", 2: "SERVFAIL", 3: "NXDOMAIN", 4: "NOTIMP", 5: "REFUSED"}
_NETLINK_NETFILTER = 12
_NFT_GET_GENERATION = (10 << 8) | 16
_REQUEST = 1
_ERROR = 2


class Reply:
    """What came of one try.

    kind: connected, data, closed (accepted, then ended without a word), refused, unreachable, no-route (this
    kernel refused before anything was sent), or timeout. seconds: how long it took. data: what was received.
    code: the errno, or 0.
    """

    def __init__(self, kind: str, seconds: float = 0.0, data: bytes = b"", code: int = 0) -> None:
        self.kind, self.seconds, self.data, self.code = kind, seconds, data, code

    def __str__(self) -> str:
        name = errno.errorcode.get(self.code, "")
        return f"{self.kind}{f' ({name})' if name else ''} after {self.seconds * 1000:.0f} ms"


def tcp(address: str, port: int, payload: bytes = b"", linger: float = 0.0, wait: float = WAIT) -> Reply:
    """Connect to a numeric IPv4 address; with a payload, send it and read one length-prefixed answer.

    Without, wait ``linger`` seconds for the far end to end the connection or to say something.
    """
    return _Try(socket.SOCK_STREAM, wait, linger).run(address, port, payload)


def udp(address: str, port: int, payload: bytes, wait: float = WAIT) -> Reply:
    """Send one datagram and wait for one, or for an ICMP error."""
    return _Try(socket.SOCK_DGRAM, wait).run(address, port, payload)


class _Try:
    def __init__(self, kind: int, wait: float, linger: float = 0.0) -> None:
        self.kind, self.linger = kind, linger
        self.began = time.monotonic()
        self.until = self.began + wait

    def run(self, address: str, port: int, payload: bytes) -> Reply:
        with socket.socket(socket.AF_INET, self.kind) as connection:
            connection.setblocking(False)
            code = connection.connect_ex((address, port))
            if code == errno.ENETUNREACH:
                return self.reply("no-route", code=code)
            if code == errno.EINPROGRESS:
                if not self.ready(connection, select.POLLOUT):
                    return self.reply("timeout")
                code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                return self.error(code)
            try:
                return self.talk(connection, payload) if payload else self.stay(connection)
            except OSError as problem:
                return self.error(problem.errno or errno.EIO)

    def stay(self, connection: socket.socket) -> Reply:
        self.until = time.monotonic() + self.linger
        if not self.linger or not self.ready(connection, select.POLLIN):
            return self.reply("connected")
        data = connection.recv(65535)
        return self.reply("data" if data else "closed", data)

    def talk(self, connection: socket.socket, payload: bytes) -> Reply:
        stream = self.kind == socket.SOCK_STREAM
        data = b""
        connection.send(payload)
        while self.ready(connection, select.POLLIN):
            piece = connection.recv(65535)
            data += piece
            if (
                not piece
                or not stream
                or (len(data) >= 2 and len(data) - 2 >= int.from_bytes(data[:2], "big"))
            ):
                break
        if data:
            return self.reply("data", data)
        return self.reply("connected" if stream else "timeout")

    def ready(self, connection: socket.socket, events: int) -> bool:
        poll = select.poll()
        poll.register(connection, events)
        return bool(poll.poll(max(0.0, self.until - time.monotonic()) * 1000))

    def error(self, code: int) -> Reply:
        return self.reply(_KINDS.get(code, "unreachable"), code=code)

    def reply(self, kind: str, data: bytes = b"", code: int = 0) -> Reply:
        return Reply(kind, time.monotonic() - self.began, data, code)


def netfilter_errno() -> int:
    """Ask nf_tables for its generation, a read that changes nothing; return the errno, 0 when answered.

    The kernel refuses every message to the packet filter without CAP_NET_ADMIN over the network namespace.
    """
    header = struct.pack("=IHHII", 20, _NFT_GET_GENERATION, _REQUEST, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER) as connection:
        connection.settimeout(WAIT)
        connection.bind((0, 0))
        connection.send(header + struct.pack("=BBH", 0, 0, 0))
        answer = connection.recv(65535)
    (kind,) = struct.unpack_from("=H", answer, 4)
    if kind != _ERROR:
        return 0
    (code,) = struct.unpack_from("=i", answer, 16)
    return -int(code)


def query(name: str, record: str) -> bytes:
    """Return a recursive DNS query for ``record`` ("A", "TXT")."""
    labels = b"".join(bytes([len(label)]) + label.encode("ascii") for label in name.rstrip(".").split("."))
    head = struct.pack("!HHHHHH", int.from_bytes(os.urandom(2), "big"), 0x0100, 1, 0, 0, 0)
    return head + labels + b"\0" + struct.pack("!HH", RECORD_TYPES[record], 1)


def answer_of(asked: bytes, data: bytes) -> tuple[str, int]:
    """Return the response code's name and the number of answer records; what is no answer is "MALFORMED"."""
    if len(data) < 12 or data[:2] != asked[:2]:
        return "MALFORMED", 0
    flags, _, answers = struct.unpack_from("!HHH", data, 2)
    return _RCODES.get(flags & 15, f"RCODE{flags & 15}"), answers
