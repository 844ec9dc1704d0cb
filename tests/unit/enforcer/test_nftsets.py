"""Elements of our own table's sets, as the kernel gets and sends them."""

from __future__ import annotations

import struct

import pytest

from enforcer.netfilter import nftsets
from enforcer.netfilter.ipsets import SetError
from enforcer.netfilter.nfnetlink import DONE, HEADER, INTERRUPTED, NESTED, attribute, attributes
from enforcer.netfilter.nftsets import (
    NEW,
    SUBSYSTEM,
    Row,
    TableSets,
    decode,
    encode,
    flow_key,
    flow_of,
)

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


class Dumping:
    """The kernel's end of a socket: each look is answered with rows, and with what the header's flags say."""

    def __init__(self, looks: list[tuple[list[Row], int]]) -> None:
        self.looks = looks
        self.asked = 0
        self.sequence = 0

    def send(self, data: bytes) -> None:
        self.sequence = HEADER.unpack_from(data)[3]
        self.asked += 1

    def recv(self, _size: int) -> bytes:
        rows, flags = self.looks[min(self.asked, len(self.looks)) - 1]
        elements = attribute(3 | NESTED, b"".join(encode(row) for row in rows))
        return self._message(SUBSYSTEM << 8 | NEW, flags, bytes(4) + elements) + self._message(
            DONE, flags, bytes(4)
        )

    def _message(self, kind: int, flags: int, content: bytes) -> bytes:
        return HEADER.pack(HEADER.size + len(content), kind, flags, self.sequence, 0) + content

    def close(self) -> None:
        pass


def reading(monkeypatch: pytest.MonkeyPatch, *looks: tuple[list[Row], int]) -> tuple[TableSets, Dumping]:
    sets = TableSets(lambda: None)
    sets.close()
    kernel = Dumping(list(looks))
    monkeypatch.setattr(sets, "_socket", kernel)
    return sets, kernel


def test_a_look_during_which_the_rules_changed_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    other = flow_key("192.0.2.2", 6, 443, "203.0.113.11")
    sets, kernel = reading(monkeypatch, ([Row(KEY)], INTERRUPTED), ([Row(KEY), Row(other)], 0))
    assert [row.key for row in sets.rows("pins")] == [KEY, other]
    assert kernel.asked == 2


def test_rules_that_change_all_the_time_are_an_error_and_no_shorter_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sets, kernel = reading(monkeypatch, ([Row(KEY)], INTERRUPTED))
    with pytest.raises(SetError, match="change all the time"):
        sets.rows("pins")
    assert kernel.asked == nftsets.LOOKS
