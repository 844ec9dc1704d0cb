"""Elements of our own table's sets, as the kernel gets and sends them."""

from __future__ import annotations

import struct

import pytest

from enforcer.netfilter.nftsets import Row, attribute, attributes, decode, encode, flow_key, flow_of

KEY = flow_key("192.0.2.2", 6, 443, "203.0.113.10")


def test_a_key_is_four_fields_of_four_bytes() -> None:
    assert KEY.hex() == "c000020206000000" + "01bb0000cb00710a"
    assert flow_of(KEY) == ("192.0.2.2", 6, 443, "203.0.113.10")


@pytest.mark.parametrize(
    "row",
    [
        Row(KEY),
        Row(KEY, 17, 5, 600, "box main api.example"),
        Row(KEY, 3600, 1 << 40, 1 << 45, "x" * 200),
    ],
)
def test_an_element_is_read_back_as_it_was_sent(row: Row) -> None:
    # The kernel answers in the same attributes; the outermost says that it is one of a list.
    assert decode(attributes(encode(row))[1]) == row


def test_deleting_names_the_key_alone() -> None:
    parts = attributes(attributes(encode(Row(KEY, comment="x"), bare=True))[1])
    assert set(parts) == {1}


def test_what_is_left_of_a_life_counts_and_not_the_whole_of_it() -> None:
    body = attribute(1, attribute(1, KEY)) + attribute(4, struct.pack("!Q", 3600000))
    body += attribute(5, struct.pack("!Q", 1500))
    row = decode(body)
    assert row is not None
    assert row.timeout == 1


def test_counters_among_several_expressions_are_found() -> None:
    numbers = attribute(1, struct.pack("!Q", 80)) + attribute(2, struct.pack("!Q", 2))
    counter = attribute(1, attribute(1, b"counter\0") + attribute(2, numbers))
    other = attribute(1, attribute(1, b"limit\0") + attribute(2, b""))
    row = decode(attribute(1, attribute(1, KEY)) + attribute(11, other + counter))
    assert row is not None
    assert (row.packets, row.octets) == (2, 80)


def test_an_element_without_a_key_is_passed_over() -> None:
    assert decode(attribute(3, struct.pack("!I", 2))) is None
