from __future__ import annotations

import json
import time
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


class Asked:
    """docker-py's own client, and what it would ask Docker for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.params: dict[str, Any] = {}
        self.api = docker.APIClient(base_url="http://127.0.0.1:1", version="1.41")
        monkeypatch.setattr(self.api, "_get", self._get)
        monkeypatch.setattr(self.api, "_get_result", self._result)

    def _get(self, _: str, *, params: dict[str, Any], stream: bool) -> None:
        self.params.update(params)
        assert stream == bool(params["follow"])

    def _result(self, _: str, stream: bool, __: None) -> object:
        return iter([b"a", b"\n"]) if stream else b"a\n"

    def read(self, *, follow: bool = False, start: float | None = None, tail: int | None = None) -> bytes:
        invocation: Any = SimpleNamespace(api=self.api)
        return b"".join(logs.read(invocation, A, follow=follow, start=start, tail=tail, stamps=False))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


@pytest.mark.parametrize(
    ("start", "since"),
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
    asked: Asked, start: float | None, since: float | None
) -> None:
    assert asked.read(start=start) == b"a\n"
    assert asked.params.get("since") == since


def test_what_is_asked_for_is_passed_on(asked: Asked) -> None:
    assert asked.read(follow=True, tail=0) == b"a\n"
    assert (asked.params["follow"], asked.params["tail"]) == (1, 0)
    assert asked.read() == b"a\n"
    assert (asked.params["follow"], asked.params["tail"]) == (0, "all")


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
    # Ended in the same piece, too.
    assert [len(part) for part in logs.lines([b"x" * (logs.LONGEST + 1) + b"\ny\n"])] == [logs.LONGEST, 1, 1]


def test_a_long_line_that_comes_byte_by_byte_takes_no_more_than_many_short_ones() -> None:
    # Copied anew for each byte it is some twenty seconds.
    before = time.process_time()
    assert sum(map(len, logs.lines(b"x" for _ in range(1_000_000)))) == 1_000_000
    assert time.process_time() - before < 6
