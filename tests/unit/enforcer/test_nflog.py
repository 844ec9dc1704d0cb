"""Netlink messages of the kernel's log, also such as no kernel sends."""

from __future__ import annotations

import errno
import socket
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enforcer.netfilter.nflog import HEADER, NFULNL_MSG_CONFIG, NFULNL_MSG_PACKET, Log, Packet, parse


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def message(kind: int, body: bytes) -> bytes:
    return HEADER.pack(HEADER.size + len(body), kind, 0, 0, 0) + body + bytes(-len(body) % 4)


def ip(proto: int, rest: bytes, options: bytes = b"", fragment: int = 0) -> bytes:
    head = struct.pack(
        "!BBHHHBBH4s4s",
        0x45 + len(options) // 4,
        0,
        0,
        0,
        fragment,
        64,
        proto,
        0,
        socket.inet_aton("172.16.0.2"),
        socket.inet_aton("203.0.113.66"),
    )
    return head + options + rest


def logged(payload: bytes, interface: int = 7) -> bytes:
    body = struct.pack("!BBH", 2, 0, 4010) + attribute(1, struct.pack("!HBB", 0x0800, 2, 0))
    body += attribute(4, struct.pack("!I", interface)) + attribute(10, b"corral-denied\0")
    return message(NFULNL_MSG_PACKET, body + attribute(9, payload))


@pytest.mark.parametrize(
    ("payload", "proto", "port"),
    [
        (ip(17, struct.pack("!HHHH", 1234, 53, 8, 0)), 17, 53),
        (ip(6, struct.pack("!HH", 1234, 443)), 6, 443),
        (ip(6, struct.pack("!HH", 1234, 443), options=b"\x01" * 8), 6, 443),
        (ip(1, b"\x08\x00\x12\x34"), 1, 8 << 8),
        (ip(47, b"\x00\x00\x08\x00"), 47, 0),
        (ip(17, b"\xff\xff\xff\xff", fragment=185), 17, 0),
        (ip(17, b"\x00"), 17, 0),
    ],
    ids=["udp", "tcp", "options", "icmp", "gre", "later-fragment", "cut-off"],
)
def test_a_packet_is_read_out_of_its_headers(payload: bytes, proto: int, port: int) -> None:
    assert parse(logged(payload)) == [Packet(7, "172.16.0.2", proto, port, "203.0.113.66")]


def test_a_datagram_holds_many_and_others_are_passed_over() -> None:
    good = logged(ip(17, struct.pack("!HH", 1, 2)))
    assert len(parse(good + message(3, b"") + message(NFULNL_MSG_CONFIG, b"abcd") + good)) == 2


@pytest.mark.parametrize(
    "payload", [b"", b"\x45", bytes(19), b"\x65" + bytes(30), b"\x60" + bytes(40)], ids=len
)
def test_what_is_no_ipv4_packet_is_left_out(payload: bytes) -> None:
    assert parse(logged(payload)) == []


@given(st.binary(max_size=200))
def test_no_bytes_make_it_fail(data: bytes) -> None:
    parse(data)
    parse(logged(data))
    good = logged(ip(17, struct.pack("!HH", 1, 2)))
    for at in range(0, len(good), 7):
        parse(good[:at] + data + good[at:])


class FakeSocket:
    """A kernel that answers each request with the next code, and then sends what it is given."""

    def __init__(self, codes: list[int], datagrams: list[bytes | OSError]) -> None:
        self.codes, self.datagrams, self.sent, self.closed = codes, datagrams, [], False
        self.pending = 0

    def settimeout(self, _seconds: float) -> None: ...

    def setblocking(self, _on: bool) -> None: ...

    def send(self, data: bytes) -> None:
        self.sent.append(data)
        self.pending += 1

    def recv(self, _size: int) -> bytes:
        if self.pending:
            self.pending -= 1
            return message(2, struct.pack("=i", -self.codes[len(self.sent) - 1]))
        if not self.datagrams:
            raise BlockingIOError
        following = self.datagrams.pop(0)
        if isinstance(following, OSError):
            raise following
        return following

    def close(self) -> None:
        self.closed = True


def log(codes: list[int] | None = None, datagrams: list[Any] | None = None) -> tuple[Log, FakeSocket]:
    fake = FakeSocket(codes or [0, 0, 0, 0], datagrams or [])
    return Log(4010, lambda: fake), fake  # type: ignore[arg-type, return-value]


def test_a_group_that_is_taken_is_told_and_can_be_tried_again() -> None:
    of, fake = log([errno.EPERM, 0, 0, 0])
    assert not of.open()
    assert "group 4010" in of.problem
    assert "another program" in of.problem
    assert fake.closed
    again, _ = log()
    of._connect = again._connect
    assert of.open()
    assert of.problem == ""


def test_a_socket_that_cannot_be_made_is_a_problem_not_an_end() -> None:
    def refused() -> socket.socket:
        raise PermissionError("no")

    of = Log(4010, refused)
    assert not of.open()
    assert "cannot be read" in of.problem
    assert of.read() == []


def test_an_overrun_is_counted_and_reading_goes_on() -> None:
    good = logged(ip(17, struct.pack("!HH", 1, 2)))
    of, _ = log(datagrams=[OSError(errno.ENOBUFS, "overrun"), good])
    assert of.open()
    assert len(of.read()) == 1
    assert of.overruns == 1


def test_a_broken_socket_is_left_and_told() -> None:
    of, fake = log(datagrams=[OSError(errno.EIO, "broken")])
    assert of.open()
    assert of.read() == []
    assert of.sock is None
    assert fake.closed
    assert "broke off" in of.problem
