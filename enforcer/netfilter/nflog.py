"""What the fence refused, as the kernel logs it: one netlink socket bound to an NFLOG group.

A group has one listener, so the writer reads it for all users and tells each what concerns its own sandboxes.
Of a packet only the fixed fields of its headers are looked at; the sandbox decides about every byte in it.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

NETLINK_NETFILTER = 12
NFNL_SUBSYS_ULOG = 4
NFULNL_MSG_PACKET, NFULNL_MSG_CONFIG = NFNL_SUBSYS_ULOG << 8, NFNL_SUBSYS_ULOG << 8 | 1
NFULA_IFINDEX_INDEV, NFULA_PAYLOAD = 4, 9
NFULA_CFG_CMD, NFULA_CFG_MODE, NFULA_CFG_TIMEOUT, NFULA_CFG_QTHRESH = 1, 2, 4, 5
NFULNL_CFG_CMD_BIND, NFULNL_COPY_PACKET = 1, 2
NLMSG_ERROR, NLM_F_REQUEST, NLM_F_ACK, NLA_TYPE = 2, 1, 4, 0x3FFF

COPY = 64  # bytes of a packet: IPv4 header with options, and the ports
BATCH = 32  # packets that the kernel may collect for one message
FLUSH = 10  # hundredths of a second after which it sends what it has
READS = 64  # messages of one turn: who floods the log does not hold up requests
WAIT = 2.0  # seconds for the kernel's answer

HEADER, ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=HH")
FAMILY = struct.Struct("!BBH")
TCP, UDP, ICMP, SCTP, UDPLITE = 6, 17, 1, 132, 136
WITH_PORTS = frozenset({TCP, UDP, SCTP, UDPLITE})


@dataclass(frozen=True)
class Packet:
    """A refused packet: the interface it came in by, and where it wanted to go.

    ``proto`` is the IP protocol's number. ``port`` is 0 where there is none; of ICMP it is type * 256 + code.
    """

    interface: int
    src: str
    proto: int
    port: int
    dst: str


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield type and value of each netlink attribute; ends at the first that does not fit."""
    while len(data) >= ATTRIBUTE.size:
        length, kind = ATTRIBUTE.unpack_from(data)
        if not ATTRIBUTE.size <= length <= len(data):
            return
        yield kind & NLA_TYPE, data[ATTRIBUTE.size : length]
        data = data[(length + 3) & ~3 :]


def messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield type and body of each netlink message of a datagram; ends at the first that does not fit."""
    while len(data) >= HEADER.size:
        length, kind, *_ = HEADER.unpack_from(data)
        if not HEADER.size <= length <= len(data):
            return
        yield kind, data[HEADER.size : length]
        data = data[(length + 3) & ~3 :]


def parse(data: bytes) -> list[Packet]:
    """Return the IPv4 packets in a datagram of the log; what cannot be read is left out."""
    found = []
    for kind, body in messages(data):
        if kind != NFULNL_MSG_PACKET or len(body) < FAMILY.size:
            continue
        parts = dict(attributes(body[FAMILY.size :]))
        interface, payload = parts.get(NFULA_IFINDEX_INDEV, b""), parts.get(NFULA_PAYLOAD, b"")
        packet = _packet(int.from_bytes(interface, "big"), payload)
        if packet is not None:
            found.append(packet)
    return found


def _packet(interface: int, data: bytes) -> Packet | None:
    if len(data) < 20 or data[0] >> 4 != 4:
        return None
    start, fragment = (data[0] & 15) * 4, int.from_bytes(data[6:8], "big") & 0x1FFF
    proto, src, dst = data[9], socket.inet_ntoa(data[12:16]), socket.inet_ntoa(data[16:20])
    port = 0
    # Later fragments have no header of the protocol's.
    if start >= 20 and not fragment and len(data) >= start + 4:
        if proto in WITH_PORTS:
            port = int.from_bytes(data[start + 2 : start + 4], "big")
        elif proto == ICMP:
            port = int.from_bytes(data[start : start + 2], "big")
    return Packet(interface, src, proto, port, dst)


def _request(group: int, sequence: int, kind: int, value: bytes) -> bytes:
    body = FAMILY.pack(socket.AF_INET, 0, group) + ATTRIBUTE.pack(ATTRIBUTE.size + len(value), kind) + value
    body += bytes(-len(body) % 4)
    head = HEADER.pack(HEADER.size + len(body), NFULNL_MSG_CONFIG, NLM_F_REQUEST | NLM_F_ACK, sequence, 0)
    return head + body


def _netlink() -> socket.socket:
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER)
    sock.bind((0, 0))
    return sock


class Log:
    """The listener of one group. ``overruns`` counts how often the kernel had to throw records away."""

    def __init__(self, group: int, connect: Callable[[], socket.socket] = _netlink) -> None:
        self.group = group
        self.sock: socket.socket | None = None
        self.problem = "the log of refused packets was not opened"
        self.overruns = 0
        self._connect = connect

    def open(self) -> bool:
        """Bind to the group, if that is not done yet; else ``problem`` says why; try again later."""
        if self.sock is not None:
            return True
        try:
            sock = self._connect()
        except OSError as error:
            self.problem = f"the log of refused packets cannot be read: {error}"
            return False
        try:
            sock.settimeout(WAIT)
            steps = (
                (NFULA_CFG_CMD, struct.pack("!B", NFULNL_CFG_CMD_BIND)),
                (NFULA_CFG_MODE, struct.pack("!IBB", COPY, NFULNL_COPY_PACKET, 0)),
                (NFULA_CFG_QTHRESH, struct.pack("!I", BATCH)),
                (NFULA_CFG_TIMEOUT, struct.pack("!I", FLUSH)),
            )
            for sequence, (kind, value) in enumerate(steps, 1):
                sock.send(_request(self.group, sequence, kind, value))
                self._acknowledged(sock)
        except OSError as error:
            sock.close()
            taken = error.errno in (errno.EPERM, errno.EBUSY)
            why = "another program listens there" if taken else str(error)
            self.problem = f"the log of refused packets (NFLOG group {self.group}) cannot be read: {why}"
            return False
        sock.setblocking(False)
        self.sock, self.problem = sock, ""
        return True

    def _acknowledged(self, sock: socket.socket) -> None:
        # Once bound, packets may come in between; they are few and lost.
        for _ in range(READS):
            for kind, body in messages(sock.recv(1 << 16)):
                if kind == NLMSG_ERROR:
                    code = -int.from_bytes(body[:4], "little" if _LITTLE else "big", signed=True)
                    if code:
                        raise OSError(code, errno.errorcode.get(code, str(code)))
                    return
        raise TimeoutError("the kernel does not acknowledge")

    def read(self) -> list[Packet]:
        """Return what has come in since the last time, at most so much as one turn should take."""
        found: list[Packet] = []
        if self.sock is None:
            return found
        for _ in range(READS):
            try:
                found += parse(self.sock.recv(1 << 16))
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    self._fail(error)
                    break
                self.overruns += 1
        return found

    def _fail(self, error: OSError) -> None:
        self.close()
        self.problem = f"the log of refused packets broke off: {error}"

    def close(self) -> None:
        """Leave the group."""
        if self.sock is not None:
            with contextlib.suppress(OSError):
                self.sock.close()
            self.sock = None


_LITTLE = struct.pack("=H", 1) == b"\x01\x00"
