from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.plain import cleaned, columns, plain, width

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
