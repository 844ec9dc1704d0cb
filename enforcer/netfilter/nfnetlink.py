"""Messages of nfnetlink as bytes, for nft's sets and for ipset. Pure.

pyroute2 decodes and keeps every attribute; what is asked here is asked at each change of a sandbox, and takes
it a hundred times as long.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

NETLINK_NETFILTER = 12
REQUEST, ACK, DUMP, CREATE, INTERRUPTED = 1, 4, 0x300, 0x400, 0x10
ERROR, DONE = 2, 3
HEADER = struct.Struct("=IHHII")
NESTED, BIG_ENDIAN, KIND = 0x8000, 0x4000, 0x3FFF
INET = 1
GENERIC = 4  # bytes that each message has after its header


def attribute(kind: int, value: bytes) -> bytes:
    """Return a netlink attribute, padded."""
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def attributes(data: bytes) -> dict[int, bytes]:
    """Return the attributes in ``data`` by their kind; the last of each."""
    return dict(each(data))


def each(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the attributes in ``data``."""
    offset, end = 0, len(data)
    while offset + 4 <= end:
        length, kind = struct.unpack_from("=HH", data, offset)
        if length < 4:
            return
        yield kind & KIND, data[offset + 4 : offset + length]
        offset += (length + 3) & ~3


def message(
    kind: int, flags: int, sequence: int, body: bytes, family: int = INET, resource: int = 0
) -> bytes:
    """Return one netlink message of nfnetlink."""
    content = struct.pack("!BBH", family, 0, resource) + body
    return HEADER.pack(HEADER.size + len(content), kind, flags | REQUEST, sequence, 0) + content


def messages(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield kind, flags, sequence and content of each message that was received at once."""
    while len(data) >= HEADER.size:
        length, kind, flags, sequence, _ = HEADER.unpack_from(data)
        if length < HEADER.size:
            return
        yield kind, flags, sequence, data[HEADER.size : length]
        data = data[(length + 3) & ~3 :]


def code_of(content: bytes) -> int:
    """Return the error in the content of ERROR or DONE; 0: none."""
    return -int(struct.unpack_from("=i", content)[0]) if len(content) >= 4 else 0
