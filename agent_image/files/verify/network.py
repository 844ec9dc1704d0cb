"""Single tries over the network that end in a bounded time, whatever the far end does."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

WAIT = 0.9
HTTP_OK = 200
# Of one answer; more is not read.
MOST = 8192
# Who refuses does it with the first: what is reset had been accepted, even if nobody saw it.
_KINDS = {errno.ECONNREFUSED: "refused", errno.ECONNRESET: "closed", errno.EPIPE: "closed"}
RECORD_TYPES = {"A": 1, "TXT": 16}
_NUMBERS = {**RECORD_TYPES, "AAAA": 28}
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


def converse(address: str, port: int, first: bytes, then: bytes, wait: float) -> tuple[Reply, Reply | None]:
    """Say something to an HTTP server; when it answers 200, say more over the same connection.

    Args:
        first: a whole request. then: what follows a 200, empty for nothing. wait: seconds for each answer.

    Returns:
        What came of the request (``data``: head and body), and of what followed, None when nothing did.
    """
    return _Try(socket.SOCK_STREAM, wait).converse(address, port, first, then)


def status_of(answer: bytes) -> int:
    """Return the status code of an HTTP answer, 0 for anything else."""
    words = answer.split(b"\r\n", 1)[0].split(b" ")
    known = len(words) > 1 and words[0] in {b"HTTP/1.0", b"HTTP/1.1"} and len(words[1]) == 3
    return int(words[1]) if known and words[1].isdigit() else 0


class _Try:
    def __init__(self, kind: int, wait: float, linger: float = 0.0) -> None:
        self.kind, self.linger = kind, linger
        self.began = time.monotonic()
        self.until = self.began + wait

    def run(self, address: str, port: int, payload: bytes) -> Reply:
        with socket.socket(socket.AF_INET, self.kind) as connection:
            if failed := self.connect(connection, address, port):
                return failed
            try:
                return self.talk(connection, payload) if payload else self.stay(connection)
            except OSError as problem:
                return self.error(problem.errno or errno.EIO)

    def connect(self, connection: socket.socket, address: str, port: int) -> Reply | None:
        """Return why there is no connection, or nothing."""
        connection.setblocking(False)
        code = connection.connect_ex((address, port))
        if code == errno.ENETUNREACH:
            return self.reply("no-route", code=code)
        if code == errno.EINPROGRESS:
            if not self.ready(connection, select.POLLOUT):
                return self.reply("timeout")
            code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return self.error(code) if code else None

    def converse(self, address: str, port: int, first: bytes, then: bytes) -> tuple[Reply, Reply | None]:
        wait = self.until - self.began
        with socket.socket(socket.AF_INET, self.kind) as connection:
            if failed := self.connect(connection, address, port):
                return failed, None
            answer = self.answer(connection, first, _whole)
            if not then or status_of(answer.data) != HTTP_OK:
                return answer, None
            self.until = time.monotonic() + wait
            return answer, self.answer(connection, then, bool)

    def answer(self, connection: socket.socket, payload: bytes, enough: Callable[[bytes], bool]) -> Reply:
        """Send, and read until it is enough, too much, or over."""
        data = b""
        try:
            connection.send(payload)
            while not enough(data) and len(data) < MOST:
                if not self.ready(connection, select.POLLIN):
                    return self.reply("data" if data else "timeout", data)
                piece = connection.recv(MOST)
                if not piece:
                    return self.reply("data" if data else "closed", data)
                data += piece
        except OSError as problem:
            return self.reply("data", data) if data else self.error(problem.errno or errno.EIO)
        return self.reply("data", data)

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


def _whole(answer: bytes) -> bool:
    """Say whether an HTTP answer is there in full, as far as its head tells."""
    head, end, body = answer.partition(b"\r\n\r\n")
    if not end:
        return False
    for line in head.lower().split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name == b"content-length" and value.strip().isdigit():
            return len(body) >= int(value)
    # Nothing more is said before what follows a 200; anything else ends with the connection.
    return status_of(answer) == HTTP_OK


def client_hello(name: str) -> bytes:
    """Return the first record of a TLS 1.3 client that asks for ``name``."""
    server = name.encode("ascii")
    listed = b"\0" + struct.pack("!H", len(server)) + server
    extensions = b"".join(
        struct.pack("!HH", kind, len(body)) + body
        for kind, body in (
            (0, struct.pack("!H", len(listed)) + listed),  # server_name
            (10, b"\0\2\0\x17"),  # supported_groups: secp256r1
            (13, b"\0\4\4\3\x08\4"),  # signature_algorithms
            (43, b"\4\3\4\3\3"),  # supported_versions: 1.3, 1.2
            (51, b"\0\0"),  # key_share: none, the server has to ask for one
        )
    )
    body = b"".join(
        (
            b"\3\3" + os.urandom(32) + b"\0",
            b"\0\4\x13\1\xc0\x2f" + b"\1\0",  # two ciphers, no compression
            struct.pack("!H", len(extensions)) + extensions,
        )
    )
    handshake = b"\1" + struct.pack("!I", len(body))[1:] + body
    return b"\x16\3\1" + struct.pack("!H", len(handshake)) + handshake


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
    """Return a recursive DNS query for ``record`` ("A", "AAAA", "TXT")."""
    labels = b"".join(bytes([len(label)]) + label.encode("ascii") for label in name.rstrip(".").split("."))
    head = struct.pack("!HHHHHH", int.from_bytes(os.urandom(2), "big"), 0x0100, 1, 0, 0, 0)
    return head + labels + b"\0" + struct.pack("!HH", _NUMBERS[record], 1)


def answer_of(asked: bytes, data: bytes) -> tuple[str, int]:
    """Return the response code's name and the number of answer records; what is no answer is "MALFORMED"."""
    if len(data) < 12 or data[:2] != asked[:2]:
        return "MALFORMED", 0
    flags, _, answers = struct.unpack_from("!HHH", data, 2)
    return _RCODES.get(flags & 15, f"RCODE{flags & 15}"), answers
