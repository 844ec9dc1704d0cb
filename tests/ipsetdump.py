"""What an ipset holds, read as fast as Python can: raw netlink, standard library only, runs anywhere as a text."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

NETFILTER, SUBSYSTEM, LIST = 12, 6, 7
REQUEST_DUMP, DONE, ERROR = 0x301, 3, 2
PROTOCOL_ATTR, NAME_ATTR, DATA_ATTR, ADT_ATTR = 1, 2, 7, 8
SOURCE_ATTR, DESTINATION_ATTR = 1, 20


def attributes(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (type, begin, end) of each attribute in ``data[at:end]``."""
    while at + 4 <= end:
        size, kind = struct.unpack_from("=HH", data, at)
        if size < 4:
            return
        yield kind & 0x3FFF, at + 4, at + size
        at += (size + 3) & ~3


class Dump:
    """One socket, opened in the namespace of the thread that makes it."""

    def __init__(self, name: str, protocol: int = 6) -> None:
        self.sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETFILTER)
        self.sock.bind((0, 0))
        text = name.encode() + b"\0"
        body = struct.pack("=BBH", socket.AF_INET, 0, 0)
        body += struct.pack("=HHB3x", 5, PROTOCOL_ATTR, protocol)
        body += struct.pack("=HH", 4 + len(text), NAME_ATTR) + text + b"\0" * (-len(text) % 4)
        self.request = struct.pack("=IHHII", 16 + len(body), SUBSYSTEM << 8 | LIST, REQUEST_DUMP, 1, 0) + body

    def pairs(self) -> set[tuple[str, str]]:
        """Return (source, destination) of every element of a hash:ip,port,ip set; OSError when refused."""
        self.sock.send(self.request)
        found: set[tuple[str, str]] = set()
        while True:
            data = self.sock.recv(1 << 20)
            at = 0
            while at + 16 <= len(data):
                size, kind = struct.unpack_from("=IH", data, at)
                if kind == DONE:
                    return found
                if kind == ERROR:
                    raise OSError(-struct.unpack_from("=i", data, at + 16)[0], "the kernel refused a dump")
                for what, begin, end in attributes(data, at + 20, at + size):
                    if what == ADT_ATTR:
                        found.update(self._pair(data, *row[1:]) for row in attributes(data, begin, end))
                at += (size + 3) & ~3

    @staticmethod
    def _pair(data: bytes, begin: int, end: int) -> tuple[str, str]:
        ends = {SOURCE_ATTR: "", DESTINATION_ATTR: ""}
        for what, at, _ in attributes(data, begin, end):
            if what in ends:
                # A nested address: a header of four bytes, then the address itself.
                ends[what] = socket.inet_ntoa(data[at + 4 : at + 8])
        return ends[SOURCE_ATTR], ends[DESTINATION_ATTR]
