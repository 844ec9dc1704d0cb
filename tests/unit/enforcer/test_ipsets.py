"""Elements of ipsets, as the kernel gets and sends them."""

from __future__ import annotations

import errno
import struct

import pytest
from pyroute2.netlink.nfnetlink.ipset import ipset_msg

from enforcer.netfilter import ipsets
from enforcer.netfilter.ipsets import Row, SetError, Sets, decode, encode
from enforcer.netfilter.nfnetlink import DONE, ERROR, HEADER, attribute, attributes, each

FLOW = Row("192.0.2.2", 6, 443, "203.0.113.10", 3600, 0, "box main api.example")


def content(row: Row, bare: bool = False) -> bytes:
    ((_, found),) = each(encode(row, bare))
    return found


@pytest.mark.parametrize("row", [FLOW, Row("192.0.2.3", timeout=7)])
def test_what_is_sent_is_read_back(row: Row) -> None:
    assert decode(content(row)) == row


def test_to_delete_a_key_is_sent_alone() -> None:
    assert decode(content(FLOW, bare=True)) == Row("192.0.2.2", 6, 443, "203.0.113.10")


def test_an_element_is_what_another_library_reads_in_it() -> None:
    message = ipset_msg(
        bytes(HEADER.pack(HEADER.size + 4 + len(encode(FLOW)), 6 << 8 | 9, 0, 0, 0)) + bytes(4) + encode(FLOW)
    )
    message.decode()
    row = message.get_attr("IPSET_ATTR_DATA")
    assert row.get_attr("IPSET_ATTR_IP_FROM").get_attr("IPSET_ATTR_IPADDR_IPV4") == "192.0.2.2"
    assert row.get_attr("IPSET_ATTR_IP2").get_attr("IPSET_ATTR_IPADDR_IPV4") == "203.0.113.10"
    assert (row.get_attr("IPSET_ATTR_PORT_FROM"), row.get_attr("IPSET_ATTR_PROTO")) == (443, 6)
    assert (row.get_attr("IPSET_ATTR_TIMEOUT"), row.get_attr("IPSET_ATTR_COMMENT")) == (
        3600,
        "box main api.example",
    )


def test_packets_are_a_number_of_eight_bytes() -> None:
    found = decode(content(FLOW) + attribute(25, struct.pack("!Q", 5_000_000_000)))
    assert found is not None
    assert found.packets == 5_000_000_000


def test_an_element_without_an_address_is_none() -> None:
    assert decode(b"") is None
    assert attributes(b"\1") == {}


class Answering:
    """A netlink socket that answers each request with the given messages: (kind, content)."""

    def __init__(self, *answers: tuple[int, bytes], stale: bool = False) -> None:
        self.answers, self.stale, self.sent = answers, stale, b""

    def send(self, data: bytes) -> int:
        self.sent = data
        return len(data)

    def recv(self, _size: int) -> bytes:
        _, _, _, sequence, _ = HEADER.unpack_from(self.sent)
        early = self._message(ERROR, struct.pack("=i", -errno.EPERM), sequence - 1) if self.stale else b""
        return early + b"".join(self._message(kind, body, sequence) for kind, body in self.answers)

    def _message(self, kind: int, body: bytes, sequence: int) -> bytes:
        return HEADER.pack(HEADER.size + len(body), kind, 0, sequence, 0) + body + bytes(-len(body) % 4)

    def close(self) -> None:
        pass


def answered(monkeypatch: pytest.MonkeyPatch, *answers: tuple[int, bytes], stale: bool = False) -> Sets:
    sets = Sets()
    sets.close()
    monkeypatch.setattr(sets, "_socket", Answering(*answers, stale=stale))
    return sets


def failure(code: int) -> tuple[int, bytes]:
    return ERROR, struct.pack("=i", -code)


def listing(*rows: Row) -> tuple[int, bytes]:
    inside = b"".join(encode(row) for row in rows)
    return ipsets.SUBSYSTEM << 8 | ipsets.LIST, bytes(4) + attribute(ipsets.ELEMENTS | 0x8000, inside)


def test_a_list_comes_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Row("192.0.2.2", 17, 53, "203.0.113.11", 5)
    sets = answered(monkeypatch, listing(FLOW), listing(other), (DONE, bytes(4)), stale=True)
    assert [(e.src, e.proto, e.port, e.dst) for e in sets.entries("corral-pins")] == [
        ("192.0.2.2", "tcp", 443, "203.0.113.10"),
        ("192.0.2.2", "udp", 53, "203.0.113.11"),
    ]


@pytest.mark.parametrize(("code", "missing"), [(errno.ENOENT, True), (errno.EPERM, False)])
def test_a_set_that_is_not_there_is_told_from_one_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, code: int, missing: bool
) -> None:
    sets = answered(monkeypatch, failure(code))
    with pytest.raises(SetError) as caught:
        sets.entries("corral-pins")
    assert caught.value.missing is missing
    if missing:
        assert sets.kind("corral-pins") is None
    else:
        with pytest.raises(SetError):
            sets.kind("corral-pins")


def test_deleting_what_is_not_there_is_fine_and_a_full_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answered(monkeypatch, failure(ipsets.NOT_ADDED)).drop_source("corral-denied", "192.0.2.2")
    with pytest.raises(SetError, match="the set is full"):
        answered(monkeypatch, failure(ipsets.HASH_FULL)).put_source("corral-denied", "192.0.2.2")
    with pytest.raises(SetError, match="Operation not permitted"):
        answered(monkeypatch, failure(errno.EPERM)).drop_source("corral-denied", "192.0.2.2")
