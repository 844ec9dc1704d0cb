"""Links, their addresses and ports of bridges over one rtnetlink socket, by hand.

Looks follow each change of a link within a millisecond or so, on hosts with a thousand links too. pyroute2
decodes every attribute of every link, which takes a hundred times longer than the handful needed here.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Interface

from enforcer.netfilter.claims import Link
from enforcer.netfilter.ports import Port

NLMSG_ERROR, NLMSG_DONE = 2, 3
RTM_NEWLINK, RTM_GETLINK, RTM_SETLINK, RTM_NEWADDR, RTM_GETADDR = 16, 18, 19, 20, 22
NLM_F_REQUEST, NLM_F_ACK, NLM_F_DUMP_INTR, NLM_F_DUMP = 1, 4, 0x10, 0x300
NLA_F_NESTED, NLA_TYPE = 0x8000, 0x3FFF
IFLA_IFNAME, IFLA_MASTER, IFLA_PROTINFO, IFLA_LINKINFO, IFLA_EXT_MASK, IFLA_LINK_NETNSID = (
    3,
    10,
    12,
    18,
    29,
    37,
)
IFLA_INFO_SLAVE_KIND, IFLA_INFO_SLAVE_DATA = 4, 5
IFA_ADDRESS, IFA_LOCAL = 1, 2
IFLA_BRPORT_ISOLATED = 33
RTEXT_FILTER_SKIP_STATS = 8
IFF_UP = 1
HEADER, LINK, ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BxHiII"), struct.Struct("=HH")
ADDRESS = struct.Struct("=BBBBi")
TIMEOUT = 5.0
TRIES = 20


class Links:
    """A socket in the network namespace it was opened in. Its methods raise OSError."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
        self._socket.bind((0, 0))
        self._socket.settimeout(TIMEOUT)
        self._sequence = 0

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def ports(self) -> tuple[Port, ...]:
        """Return the links that are a bridge's port or whose other end is in another namespace."""
        rows = [_read(body) for body in self._dump(RTM_GETLINK, RTM_NEWLINK, ALL_LINKS)]
        names = {index: name for index, name, *_ in rows}
        return tuple(
            Port(
                index,
                name,
                names.get(master) if bridged and master is not None else None,
                netns,
                isolated,
                up,
            )
            for index, name, master, netns, bridged, isolated, up in rows
            if bridged or netns is not None
        )

    def links(self) -> list[Link]:
        """Return every link with its IPv4 addresses."""
        addresses: dict[int, list[IPv4Interface]] = {}
        for body in self._dump(RTM_GETADDR, RTM_NEWADDR, ADDRESS.pack(socket.AF_INET, 0, 0, 0, 0)):
            family, length, _flags, _scope, index = ADDRESS.unpack_from(body)
            found = _attributes(body[ADDRESS.size :])
            own = found.get(IFA_LOCAL) or found.get(IFA_ADDRESS)
            if family == socket.AF_INET and own is not None:
                addresses.setdefault(index, []).append(IPv4Interface((IPv4Address(own), length)))
        links = (_read(body) for body in self._dump(RTM_GETLINK, RTM_NEWLINK, ALL_LINKS))
        return [Link(name, index, tuple(addresses.get(index, ()))) for index, name, *_ in links]

    def _dump(self, request: int, kind: int, body: bytes) -> list[bytes]:
        for _ in range(TRIES):
            sequence, whole = self._send(request, NLM_F_DUMP, body), True
            found: list[bytes] = []
            for answered, flags, content in self._answer(sequence):
                whole = whole and not flags & NLM_F_DUMP_INTR
                if answered == kind:
                    found.append(content)
            # A list that something was added to meanwhile may lack some.
            if whole:
                return found
        raise OSError(errno.EINTR, f"the list changed while it was read, {TRIES} times in a row")

    def isolate(self, index: int) -> None:
        """Set the flag of a bridge's port that keeps it apart from all others that have it."""
        nested = _attribute(IFLA_BRPORT_ISOLATED, b"\1")
        body = LINK.pack(socket.AF_BRIDGE, 0, index, 0, 0) + _attribute(IFLA_PROTINFO | NLA_F_NESTED, nested)
        self._change(RTM_SETLINK, body)

    def set_up(self, index: int, up: bool) -> None:
        """Put a link up or down."""
        self._change(RTM_NEWLINK, LINK.pack(socket.AF_UNSPEC, 0, index, IFF_UP if up else 0, IFF_UP))

    def _change(self, kind: int, body: bytes) -> None:
        for _ in self._answer(self._send(kind, NLM_F_ACK, body)):
            pass

    def _send(self, kind: int, flags: int, body: bytes) -> int:
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        size = HEADER.size + len(body)
        self._socket.send(HEADER.pack(size, kind, NLM_F_REQUEST | flags, self._sequence, 0) + body)
        return self._sequence

    def _answer(self, sequence: int) -> Iterator[tuple[int, int, bytes]]:
        while True:
            data = self._socket.recv(1 << 18)
            offset = 0
            while offset + HEADER.size <= len(data):
                size, kind, flags, answered, _ = HEADER.unpack_from(data, offset)
                body = data[offset + HEADER.size : offset + size]
                offset += (size + 3) & ~3
                if answered != sequence:
                    # The rest of an answer that was given up.
                    continue
                if kind == NLMSG_ERROR:
                    code = -struct.unpack_from("=i", body)[0]
                    if code:
                        raise OSError(code, os.strerror(code))
                    return
                if kind == NLMSG_DONE:
                    return
                yield kind, flags, body


def gone(error: OSError) -> bool:
    """Tell whether the error says that the link, or its place on a bridge, is no more."""
    return error.errno in (errno.ENODEV, errno.EINVAL, errno.EOPNOTSUPP)


def _attribute(kind: int, value: bytes) -> bytes:
    return ATTRIBUTE.pack(ATTRIBUTE.size + len(value), kind) + value + bytes(-len(value) % 4)


def _attributes(data: bytes) -> dict[int, bytes]:
    found, offset = {}, 0
    while offset + ATTRIBUTE.size <= len(data):
        size, kind = ATTRIBUTE.unpack_from(data, offset)
        if size < ATTRIBUTE.size:
            break
        found[kind & NLA_TYPE] = data[offset + ATTRIBUTE.size : offset + size]
        offset += (size + 3) & ~3
    return found


def _number(value: bytes | None) -> int | None:
    return struct.unpack("=i", value)[0] if value is not None else None


def _read(body: bytes) -> tuple[int, str, int | None, int | None, bool, bool, bool]:
    """Return (index, name, master, netns, is a bridge's port, isolated, up)."""
    _family, _type, index, flags, _change = LINK.unpack_from(body)
    found = _attributes(body[LINK.size :])
    info = _attributes(found.get(IFLA_LINKINFO, b""))
    bridged = info.get(IFLA_INFO_SLAVE_KIND, b"").rstrip(b"\0") == b"bridge"
    port = _attributes(info.get(IFLA_INFO_SLAVE_DATA, b"")) if bridged else {}
    return (
        index,
        found.get(IFLA_IFNAME, b"").rstrip(b"\0").decode(errors="replace"),
        _number(found.get(IFLA_MASTER)),
        _number(found.get(IFLA_LINK_NETNSID)),
        bridged,
        port.get(IFLA_BRPORT_ISOLATED) == b"\1",
        bool(flags & IFF_UP),
    )


ALL_LINKS = LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + _attribute(
    IFLA_EXT_MASK, struct.pack("=I", RTEXT_FILTER_SKIP_STATS)
)
