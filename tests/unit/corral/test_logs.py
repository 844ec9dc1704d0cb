from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import docker
import pytest

from corral import logs
from policy.errors import ArgumentError

from .test_sessions import A


def test_times_are_lengths_or_moments() -> None:
    assert logs.since("10m", 1000.0) == 400.0
    assert logs.since("1d", 0.0) == -86400.0
    assert logs.since("1970-01-01T00:01:00+00:00", 0.0) == 60.0
    for text in ("", "10", "ten", "1w", "-5m", "1970-13-01"):
        with pytest.raises(ArgumentError) as caught:
            logs.since(text, 0.0)
        assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("start", "asked"),
    [
        (None, None),
        (logs.since("1970-01-01T00:00:00+00:00", 0.0), None),
        # Long before there were years; and a fraction that would be written with an exponent.
        (logs.since("999999999d", 1_800_000_000.0), None),
        (logs.since("1969-12-31T23:59:59+00:00", 0.0), None),
        (0.00001, None),
        (logs.since("1970-01-01T00:00:01+00:00", 0.0), 1.0),
        (logs.since("10m", 1_800_000_000.5), 1_799_999_400.5),
    ],
)
def test_docker_is_asked_for_everything_since_a_time_before_it(
    monkeypatch: pytest.MonkeyPatch, start: float | None, asked: float | None
) -> None:
    api = docker.APIClient(base_url="http://127.0.0.1:1", version="1.41")
    given: dict[str, Any] = {}

    def get(_: str, *, params: dict[str, Any], stream: bool) -> None:
        assert stream
        given.update(params)

    monkeypatch.setattr(api, "_get", get)
    monkeypatch.setattr(api, "_get_result", lambda *_: iter([b"a\n"]))
    invocation: Any = SimpleNamespace(api=api)
    assert list(logs.read(invocation, A, follow=False, start=start, tail=3, stamps=False)) == [b"a\n"]
    assert given.get("since") == asked
    assert given["tail"] == 3 and given["follow"] == 0


def test_lines_come_whole_however_they_were_cut() -> None:
    assert list(logs.lines([b"a\nb", b"c\n", b"\nd"])) == [b"a", b"bc", b"", b"d"]


def test_what_would_command_the_terminal_is_left_out() -> None:
    written: list[str] = []
    pieces = [b"\x1b[?1049h\x1b[31mred\x1b[0m\x1b[6n\r\nprogress 1\rprogress 2\r\n"]
    logs.print_logs(pieces, A, written.append, as_json=False, colour=True)
    assert written == ["\x1b[31mred\x1b[0m", "progress 2"]
    written.clear()
    logs.print_logs(pieces, A, written.append, as_json=False, colour=False)
    assert written == ["red", "progress 2"]


def test_json_has_the_time_of_each_line() -> None:
    written: list[str] = []
    pieces = [b"2026-01-31T09:00:00.123456789Z a \x1b[1mb\r\n2026-01-31T09:00:01.0Z \r\n"]
    logs.print_logs(pieces, A, written.append, as_json=True, colour=False)
    assert [json.loads(line) for line in written] == [
        {"schema": 1, "session": "aaaaaaaa", "time": "2026-01-31T09:00:00.123456789Z", "text": "a b"},
        {"schema": 1, "session": "aaaaaaaa", "time": "2026-01-31T09:00:01.0Z", "text": ""},
    ]


def test_a_line_that_does_not_end_is_cut_instead_of_kept() -> None:
    pieces = iter([b"x" * 50_000] * 4)
    found = list(logs.lines(pieces))
    assert b"".join(found) == b"x" * 200_000
    assert max(map(len, found)) <= logs.LONGEST
