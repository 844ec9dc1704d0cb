from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.frames import STDERR, STDOUT, FrameDecoder
from policy.errors import EngineError


def frame(stream: int, payload: bytes) -> bytes:
    return bytes([stream, 0, 0, 0]) + len(payload).to_bytes(4, "big") + payload


FRAMES = st.lists(st.tuples(st.sampled_from([STDOUT, STDERR]), st.binary(max_size=40)), max_size=8)


@given(FRAMES, st.lists(st.integers(1, 30), min_size=1, max_size=20))
def test_any_fragmentation_gives_the_same_two_streams(
    frames: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    wire = b"".join(frame(*one) for one in frames)
    decoder, got = FrameDecoder(), {STDOUT: b"", STDERR: b""}
    position = index = 0
    while position < len(wire):
        size = cuts[index % len(cuts)]
        for stream, payload in decoder.feed(wire[position : position + size]):
            got[stream] += payload
        position, index = position + size, index + 1
    for stream, payload in got.items():
        assert payload == b"".join(part for which, part in frames if which == stream)


def test_payload_is_given_before_its_frame_is_complete() -> None:
    decoder = FrameDecoder()
    assert decoder.feed(frame(STDOUT, b"hello")[:10]) == [(STDOUT, b"he")]


@pytest.mark.parametrize(
    "head", [b"\x03\0\0\0\0\0\0\1", b"\x01\0\1\0\0\0\0\1", b"\x01\0\0\0\xff\0\0\0", b"HTTP/1.1"]
)
def test_what_is_no_frame_is_an_error(head: bytes) -> None:
    with pytest.raises(EngineError, match="not a frame"):
        FrameDecoder().feed(head + b"x")
