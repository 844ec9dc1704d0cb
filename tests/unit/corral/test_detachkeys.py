from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral import detachkeys
from corral.detachkeys import Matcher, parse
from policy import profiles
from policy.errors import ArgumentError

DEFAULT = profiles.Profile.detach_keys


def typed(keys: str, *pieces: bytes) -> tuple[bytes, bool]:
    matcher, passed = Matcher(parse(keys)), b""
    for piece in pieces:
        part, gone = matcher.feed(piece)
        passed += part
        if gone:
            return passed, True
    return passed, False


@pytest.mark.parametrize(
    "pieces",
    [
        (b"\x1d\x11",),
        (b"\x1d", b"\x11"),
        # kitty's protocol, with and without reports of keys that are let go; xterm's modifyOtherKeys.
        (b"\x1b[93;5u\x1b[113;5u",),
        (b"\x1b[93;5:1u\x1b[93;5:3u\x1b[113;5:1u",),
        (b"\x1b[27;5;93~\x1b[27;5;113~",),
        (b"\x1b[93;5u", b"\x11"),
        # What a program can ask kitty's protocol for: locks that are on, and keys such as Ctrl by themselves.
        (b"\x1b[93;133u\x1b[113;133:1u",),
        (b"\x1b[93;69u\x1b[113;197u",),
        (b"\x1b[57442;5u\x1b[93;5u\x1b[93;5:3u\x1b[57442;1:3u\x1b[57442;5u\x1b[113;5u",),
        (b"\x1d\x1d\x11",),
    ],
)
def test_the_sequence_leaves_in_every_spelling(pieces: tuple[bytes, ...]) -> None:
    passed, gone = typed(DEFAULT, b"ls\r", *pieces)
    assert gone
    assert passed in (b"ls\r", b"ls\r\x1d", b"ls\r\x1b[57442;5u")


@pytest.mark.parametrize(
    "data",
    [
        b"\x10\x11",
        b"\x1dx",
        b"q\x11",
        b"\x1b[93;2u\x1b[113;5u",
        b"\x1b[A\x1b[B",
        b"\x1b[93;5u\x1b[113u",
        "é€\U0001f600".encode(),
    ],
)
def test_other_keys_reach_the_program_as_they_are(data: bytes) -> None:
    assert typed(DEFAULT, data) == (data, False)


def test_the_beginning_is_held_back_until_it_is_something_else() -> None:
    matcher = Matcher(parse("ctrl-],ctrl-q"))
    assert matcher.feed(b"a\x1d") == (b"a", False)
    assert matcher.feed(b"b") == (b"\x1db", False)


def test_control_p_is_in_no_default() -> None:
    for name in profiles.names():
        keys = parse(profiles.get(name).detach_keys)
        assert keys and b"\x10" not in {spelling for key in keys for spelling in key}


@pytest.mark.parametrize("text", ["", "ctrl-", "ctrl-é", "f1", "ab", "a,,b", ",".join("a" * 9), "é", "\n"])
def test_what_is_no_sequence_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse(text)
    assert caught.value.exit_code == 2


def test_none_switches_it_off_and_the_option_outranks_the_environment() -> None:
    assert parse("none") == ()
    assert typed("none", b"\x1d\x11") == (b"\x1d\x11", False)
    environ = {detachkeys.VARIABLE: "ctrl-a,d"}
    assert detachkeys.chosen(None, environ, DEFAULT) == "ctrl-a,d"
    assert detachkeys.chosen("ctrl-b", environ, DEFAULT) == "ctrl-b"
    assert detachkeys.chosen(None, {}, DEFAULT) == DEFAULT


@given(
    st.lists(
        st.sampled_from([b"\x1d", b"\x11", b"a", b"\x1b[93;5u", b"\x1b[1;5A", b"\xc3", b"\x1b"]), max_size=12
    )
)
def test_nothing_is_lost_and_nothing_is_added(pieces: list[bytes]) -> None:
    """Whatever comes in which pieces: what passes, and what is held back, is what was typed."""
    matcher, passed = Matcher(parse(DEFAULT)), b""
    for at, piece in enumerate(pieces):
        part, gone = matcher.feed(piece)
        passed += part
        if gone:
            assert b"".join(pieces[: at + 1]).startswith(passed)
            return
        assert b"".join(pieces[: at + 1]) == passed + matcher.held
