from __future__ import annotations

import io
import logging
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from enforcer.journal import FIELDS, Handler, encode, has_journal


def parsed(data: bytes) -> dict[str, str]:
    """Read a datagram as journald does."""
    found = {}
    while data:
        line, _, rest = data.partition(b"\n")
        name, sign, value = line.partition(b"=")
        if not sign:
            (size,) = struct.unpack("<Q", rest[:8])
            value, rest = rest[8 : 8 + size], rest[9 + size :]
        found[name.decode()] = value.decode()
        data = rest
    return found


@pytest.fixture
def journald(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "journal"))
        sock.settimeout(5)
        yield sock


def logger(stream: io.StringIO, address: str | None) -> logging.Logger:
    made = logging.Logger("corral.test")
    made.addHandler(Handler(stream, address))
    return made


@pytest.mark.parametrize("value", ["", "a=b", "two\nlines\n", "\x1b[2J", "ä\udcff"])
def test_a_field_says_what_it_was_given(value: str) -> None:
    shown = value.replace("\udcff", "\\udcff")
    assert parsed(encode({"MESSAGE": "x", "CORRAL_NAME": value, "LAST": "y"})) == {
        "MESSAGE": "x",
        "CORRAL_NAME": shown,
        "LAST": "y",
    }


def test_an_event_goes_to_the_journal_with_its_fields(journald: socket.socket) -> None:
    stream = io.StringIO()
    log = logger(stream, journald.getsockname())
    log.warning("name %s: %s", "a.example", "refused", extra={FIELDS: {"CORRAL_EVENT": "refused"}})
    assert parsed(journald.recv(4096)) == {
        "MESSAGE": "WARNING name a.example: refused",
        "PRIORITY": "4",
        "SYSLOG_IDENTIFIER": "corral-enforcer",
        "CORRAL_EVENT": "refused",
    }
    assert stream.getvalue() == ""


def test_plain_lines_and_a_journal_that_is_gone_use_the_stream(tmp_path: Path) -> None:
    stream = io.StringIO()
    log = logger(stream, str(tmp_path / "nowhere"))
    log.info("plain")
    log.info("event", extra={FIELDS: {"CORRAL_EVENT": "stale"}})
    logger(stream, None).info("elsewhere", extra={FIELDS: {"CORRAL_EVENT": "stale"}})
    assert stream.getvalue() == "INFO plain\nINFO event\nINFO elsewhere\n"


def test_the_journal_is_known_by_its_stream(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream:
        found = (tmp_path / "log").stat()
        assert has_journal({"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}, stream)
        assert not has_journal({"JOURNAL_STREAM": "1:1"}, stream)
        assert not has_journal({}, stream)
    assert not has_journal({"JOURNAL_STREAM": "1:1"}, io.StringIO())
