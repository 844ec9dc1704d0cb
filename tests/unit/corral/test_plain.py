from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.plain import cleaned, columns, plain, terminal_safe, width

HOSTILE = {
    "\x1b[31mred\x1b[0m": "\\x1b[31mred\\x1b[0m",
    "\x1b]0;title\x07": "\\x1b]0;title\\x07",
    "\x9b2J": "\\x9b2J",
    "a\r\nb\tc\bd": "a\\x0d\\x0ab\\x09c\\x08d",
    "\u202egpj.exe": "\\u202egpj.exe",
    "\u2066x\u2069\u200b\ufeff": "\\u2066x\\u2069\\u200b\\ufeff",
    "line\u2028end\u2029": "line\\u2028end\\u2029",
    "tag\U000e0041": "tag\\U000e0041",
    "z\u0335\u0336": "z\\u0335\\u0336",
    "half\udcff": "half\\udcff",
    "\x7f": "\\x7f",
}


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_what_moves_colours_reverses_or_hides_is_shown_as_an_escape(text: str) -> None:
    assert plain(text) == HOSTILE[text]


def test_ordinary_text_stays_as_it_is() -> None:
    for text in ("api.example.com", "a b", "Grüße", "日本", "\\x1b", ""):
        assert plain(text) == text


@given(st.text())
def test_nothing_that_does_not_print_is_left(text: str) -> None:
    assert plain(text).isprintable()
    assert plain(plain(text)) == plain(text)


def test_every_text_of_a_structure_is_cleaned_and_numbers_stay() -> None:
    body = {"a\x1b": ["\x1b", {"b": "\x1b"}, 1, 1.5, None, True], "c": ("\x1b",)}
    assert cleaned(body) == {"a\\x1b": ["\\x1b", {"b": "\\x1b"}, 1, 1.5, None, True], "c": ["\\x1b"]}


def test_columns_are_aligned_by_cells_not_characters() -> None:
    rows = columns([("日本", "x"), ("abcde", "y")])
    assert rows == ["日本   x", "abcde  y"]
    assert {width(row) for row in rows} == {8}
    assert columns([("a", "b")], [4, 0]) == ["a     b"]
    assert columns([]) == []


def test_what_commands_a_terminal_is_no_part_of_a_line_of_output() -> None:
    for hostile, told in {
        "a\x1b]0;t\x07b": "a\\x1b]0;t\\x07b",
        "a\x9b2Jb\x7f": "a\\x9b2Jb\\x7f",
        "one\rtwo": "one\\x0dtwo",
        "\u202egpj.exe\u2066": "\\u202egpj.exe\\u2066",
        "\x1b[2Jx\x1b[31;1m": "\\x1b[2Jx\\x1b[31;1m",
    }.items():
        assert terminal_safe(hostile) == told


def test_lines_tabs_and_what_writing_is_made_of_stay() -> None:
    for text in ("a\tb\nc\n", "end\r", "one\r\ntwo", "z\u0335", "\U0001f468\u200d\U0001f4bb", "half\udcff"):
        assert terminal_safe(text) == text


def test_colours_stay_where_they_are_wanted_and_nothing_else_of_their_kind() -> None:
    assert terminal_safe("\x1b[1mhead\x1b[0m", colour=True) == "\x1b[1mhead\x1b[0m"
    assert terminal_safe("\x1b[1mhead\x1b[0m", colour=False) == "\\x1b[1mhead\\x1b[0m"
    for hostile in ("\x1b[2J", "\x1b[1;1H", "\x1b[?1049h", "\x1b]8;;x\x1b\\", "\x1bc", "\x1b[>4m"):
        assert "\x1b" not in terminal_safe(hostile, colour=True)
