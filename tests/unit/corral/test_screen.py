from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.screen import REPLAYED, Screen, harmless, lines_again

TUI = b"\x1b[?1049h\x1b[?1000;1006h\x1b[>1u\x1b[?2004h\x1b[?25l\x1b[2J\x1b[Hhello\x1b[c\x1b[6n\x1b]0;title\x07\x1b[>4;2m\x1b="


def screen(data: bytes, size: int | None = None) -> Screen:
    made = Screen()
    step = size or len(data) or 1
    for at in range(0, len(data), step):
        made.feed(data[at : at + step])
    return made


@pytest.mark.parametrize("size", [None, 1, 3, 7])
def test_modes_are_made_again_on_another_terminal_and_undone_on_it(size: int | None) -> None:
    made = screen(TUI, size)
    assert made.full
    enter, leave = made.enter(), made.leave()
    assert enter.startswith(b"\x1b[?1049h")
    for sequence in (
        b"\x1b[?1000h",
        b"\x1b[?1006h",
        b"\x1b[?2004h",
        b"\x1b[?25l",
        b"\x1b[>1u",
        b"\x1b[>4;2m",
        b"\x1b=",
    ):
        assert sequence in enter
    for sequence in (
        b"\x1b[?1000l",
        b"\x1b[?1006l",
        b"\x1b[?2004l",
        b"\x1b[?25h",
        b"\x1b[<1u",
        b"\x1b[>4m",
        b"\x1b>",
    ):
        assert sequence in leave
    assert leave.endswith(b"\x1b[?1049l")
    # A terminal answers these as if the answer were typed.
    assert b"\x1b[c" not in enter and b"\x1b[6n" not in enter and b"title" not in enter


def test_what_was_undone_is_not_made_again() -> None:
    made = screen(TUI + b"\x1b[?1049l\x1b[?1000;1006l\x1b[<u\x1b[?2004l\x1b[?25h\x1b[>4m\x1b>")
    assert not made.full
    assert made.enter() == b""
    assert made.leave() == b"\x1b[0m"
    assert screen(TUI + b"\x1bc").enter() == b""


def test_lines_are_shown_again_from_the_beginning_of_one_and_without_commands() -> None:
    lines = b"".join(b"line %d \x1b[31mred\x1b[0m\x1b[6n\r\n" % number for number in range(5000))
    again = lines_again(lines)
    assert again.startswith(b"line ") and again.endswith(b"line 4999 \x1b[31mred\x1b[0m\r\n")
    assert len(again) <= REPLAYED
    assert b"\x1b[6n" not in again


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a\x1b[31mb\x1b[0m", b"ab"),
        (b"\x1b]52;c;aGk=\x07x", b"x"),
        (b"\x1b]0;t\x1b\\x", b"x"),
        (b"\x1bPq#0\x1b\\x", b"x"),
        (b"\xc2\x9b6nx", b"6nx"),
        ("é\t€\r\n".encode(), "é\t€\r\n".encode()),
        (b"\x1b[", b"["),
    ],
)
def test_a_log_commands_no_terminal(data: bytes, expected: bytes) -> None:
    assert harmless(data, colour=False) == expected


@given(st.binary(max_size=400))
def test_nothing_but_colours_is_left_of_anything(data: bytes) -> None:
    assert b"\x1b" not in harmless(data, colour=False)
    for part in harmless(data).split(b"\x1b")[1:]:
        head = part.partition(b"m")[0]
        assert part[:1] == b"[" and set(head[1:]) <= set(b"0123456789;:")


@given(st.binary(max_size=300), st.integers(1, 50))
def test_pieces_make_no_difference(data: bytes, size: int) -> None:
    whole, parts = screen(data), screen(data, size)
    assert (whole.modes, whole.keyboards, whole.keypad) == (parts.modes, parts.keyboards, parts.keypad)


@pytest.mark.parametrize("part", [b"\x1b]", b"\x1b", b"\x1bP", b"\x1b[", b"\xc2\x9d", b"\x1b]\x1b\\"])
def test_what_begins_and_never_ends_is_read_in_time_that_grows_with_its_length(part: bytes) -> None:
    # Quadratic, this was hours.
    hostile = part * 500_000
    assert b"\x1b" not in harmless(hostile)
    Screen().feed(hostile)


@pytest.mark.parametrize(
    "hostile",
    [
        b"a\xc2\x00\x9b6n",
        b"\xc2\x07\x9d0;title\xc2\x07\x9c",
        b"a\xc2\x1b[0m\x9b6n",
        b"\x1b\x1b[0m[6n",
        b"\x1b\x00[6n",
        b"\xc2\x1b\x9b6n",
    ],
)
@pytest.mark.parametrize("colour", [True, False])
def test_what_is_taken_out_leaves_no_control_of_what_was_around_it(hostile: bytes, colour: bool) -> None:
    text = harmless(hostile, colour=colour).decode("utf-8", "strict").replace("\x1b[0m", "")
    assert not [char for char in text if unicodedata.category(char) == "Cc"]
