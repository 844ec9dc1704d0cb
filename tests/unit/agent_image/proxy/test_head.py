from __future__ import annotations

import pytest

from agent_image.files.proxy.head import LIMIT, BadHead, HeadReader

GOOD = b"CONNECT api.example.com:443 HTTP/1.1\r\nHost: api.example.com:443\r\nUser-Agent: x/1\r\n\r\n"


def read(*pieces: bytes) -> HeadReader | None:
    """Return the reader when these pieces make a whole head, else None."""
    reader = HeadReader()
    for number, piece in enumerate(pieces, 1):
        if reader.feed(piece):
            assert number == len(pieces)
            return reader
    return None


def singly(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


def refused(data: bytes) -> str:
    """Return why a head is refused, which must be the same in one piece and in single bytes."""
    found = []
    for pieces in ([data], singly(data)):
        with pytest.raises(BadHead) as caught:
            read(*pieces)
        found.append(str(caught.value))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("pieces", [[GOOD], singly(GOOD), [GOOD[:-1], GOOD[-1:]], [GOOD[:-3], GOOD[-3:]]])
def test_a_head_is_read_in_whatever_pieces_it_comes(pieces: list[bytes]) -> None:
    reader = read(*pieces)
    assert reader and (reader.method, reader.target, reader.rest) == ("CONNECT", "api.example.com:443", b"")


def test_what_comes_behind_the_head_in_the_same_piece_is_kept_as_it_is() -> None:
    rest = b"\x16\x03\x01\0\n\r\n\r\n" + bytes(range(256)) * 100
    reader = read(GOOD + rest)
    assert reader and reader.rest == rest


def test_older_clients_say_no_host_and_another_version() -> None:
    reader = read(b"CONNECT a.example:1 HTTP/1.0\r\n\r\n")
    assert reader and reader.target == "a.example:1"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"CONNECT a:1 HTTP/1.1\n\n", "CR LF"),
        (b"CONNECT a:1 HTTP/1.1\r\nA: b\nC: d\r\n\r\n", "CR LF"),
        (b"CONNECT a:1 HTTP/1.1\r\nA: b\rC: d\r\n\r\n", "CR LF"),
        (b"CONNECT a:1 HTTP/1.1\r\nA: b\r\r\n\r\n", "CR LF"),
        (b"CONNECT a:1 HTTP/1.1\r\nA: b\0c\r\n\r\n", "NUL"),
        (b"CONNECT a:1 HTTP/1.1\r\nA: b\x01c\r\n\r\n", "no header field"),
        (b"CONNECT a:1 HTTP/1.1\r\nA: b\r\n c\r\n\r\n", "folded"),
        (b"CONNECT a:1 HTTP/1.1\r\n\tc: d\r\n\r\n", "folded"),
        (b"CONNECT a:1 HTTP/1.1\r\nA : b\r\n\r\n", "no header field"),
        (b"CONNECT a:1 HTTP/1.1\r\n: b\r\n\r\n", "no header field"),
        (b"CONNECT a:1 HTTP/1.1\r\nnothing\r\n\r\n", "no header field"),
        (b"CONNECT a:1 HTTP/1.1\r\nContent-Length: 0\r\n\r\n", "body"),
        (b"CONNECT a:1 HTTP/1.1\r\ncontent-LENGTH:5\r\n\r\n", "body"),
        (b"CONNECT a:1 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", "body"),
        (b"CONNECT  a:1 HTTP/1.1\r\n\r\n", "request line"),
        (b"CONNECT a:1  HTTP/1.1\r\n\r\n", "request line"),
        (b"CONNECT a:1 HTTP/1.1 \r\n\r\n", "request line"),
        (b"CONNECT a:1\r\n\r\n", "request line"),
        (b"CONNECT a:1 HTTP/2.0\r\n\r\n", "request line"),
        (b"CONNECT a:1 http/1.1\r\n\r\n", "request line"),
        (b"CONNECT a\x80:1 HTTP/1.1\r\n\r\n", "request line"),
        (b"CONNECT\ta:1\tHTTP/1.1\r\n\r\n", "request line"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "request line"),
        (b"GET / HTTP/1.1\nHost: a\n\n", "CR LF"),
        (b"\r\nCONNECT a:1 HTTP/1.1\r\n\r\n", "not a request"),
        (b" CONNECT a:1 HTTP/1.1\r\n\r\n", "not a request"),
        (b"\x16\x03\x01\x02\0\x01", "not a request"),
        (b"\x05\x01\0", "not a request"),
        (b"CONNECT a:1 HTTP/1.1\r\nA: " + b"b" * LIMIT, "more than 8192"),
    ],
)
def test_a_head_that_breaks_a_rule_is_refused_in_one_piece_and_in_single_bytes(data: bytes, why: str) -> None:
    assert why in refused(data)


def test_bodies_of_other_methods_are_not_the_heads_business() -> None:
    reader = read(b"POST http://a.example/ HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc")
    assert reader and (reader.method, reader.rest) == ("POST", b"abc")


def test_a_head_may_be_as_long_as_the_limit_and_no_longer() -> None:
    def head(size: int) -> bytes:
        start = b"CONNECT a.example:1 HTTP/1.1\r\nA: "
        return start + b"b" * (size - len(start) - 4) + b"\r\n\r\n"

    for pieces in ([head(LIMIT) + b"more"], singly(head(LIMIT))):
        assert read(*pieces)
    assert "more than" in refused(head(LIMIT + 1))


def test_what_is_not_whole_waits() -> None:
    assert read(*singly(GOOD[:-1])) is None
