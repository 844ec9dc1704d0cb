"""What `corral denied` shows, and how it follows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from datetime import UTC
from typing import Any

import pytest

from corral.console import BOLD, RED
from corral.denied import CHATTER, HEADER, follow, reader_left, render, selected
from policy.errors import EnforcerError

ROW: dict[str, Any] = {
    "id": 1,
    "number": 5,
    "first": 1700000000.0,
    "last": 1700000061.5,
    "sandbox": "demo-0a0b0c0d",
    "project": "/home/dev/demo",
    "service": "main",
    "session": "0a1b2c3d",
    "container": "c" * 64,
    "protocol": "tcp",
    "address": "203.0.113.66",
    "port": 443,
    "icmp_type": None,
    "count": 12,
    "at_least": False,
    "names": [{"name": "new.example.com", "refused": None}],
    "dns": False,
    "check": False,
    "note": "new.example.com",
    "hint": "add new.example.com to egress.allow",
}
PING = {**ROW, "id": 2, "number": 6, "protocol": "icmp", "port": None, "icmp_type": 8, "count": 3, "at_least": True, "note": None, "hint": None}  # fmt: skip
CHECK = {**ROW, "id": 3, "number": 7, "check": True, "address": "192.0.2.1", "hint": None}
SANDBOX = {
    "sandbox": "demo-0a0b0c0d",
    "project": "/home/dev/demo",
    "denied": 5000,
    "unlisted": 4985,
    "dead_resolver": 7,
}


def report(*rows: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    body = {
        "epoch": "one",
        "next": max((row["number"] for row in rows), default=0),
        "problem": "",
        "lost": 0,
        "left_out": 0,
        "sandboxes": [SANDBOX],
        "rows": list(rows),
    }
    return {**body, **changes}


def test_a_table_with_what_is_not_listed_and_advice() -> None:
    assert render(report(ROW, PING, CHECK), zone=UTC).splitlines() == [
        "TIME                 SANDBOX        SESSION        PROTO  ADDRESS       PORT    COUNT  WHAT",
        "2023-11-14 22:14:21  demo-0a0b0c0d  main-0a1b2c3d  tcp    203.0.113.66  443     12     new.example.com",
        "2023-11-14 22:14:21  demo-0a0b0c0d  main-0a1b2c3d  icmp   203.0.113.66  type 8  3+     -",
        "",
        "demo-0a0b0c0d: 5000 packets denied, 4985 of them not listed; "
        "its dead resolver was asked 7 times (which names cannot be seen)",
        "",
        "to allow: add new.example.com to egress.allow",
    ]


def test_in_a_pipe_there_is_no_advice_and_no_chatter() -> None:
    assert "to allow" not in render(report(ROW), chatty=False)
    assert render(report(sandboxes=[]), chatty=False) == ""
    assert render(report(sandboxes=[])) == CHATTER


def test_corrals_own_checks_are_shown_when_asked_for() -> None:
    assert "192.0.2.1" not in render(report(ROW, CHECK))
    assert "192.0.2.1" in render(report(ROW, CHECK), checks=True)
    assert selected(report(CHECK), checks=False)["rows"] == []


def test_advice_is_given_once_and_not_without_end() -> None:
    rows = [{**ROW, "number": n, "hint": f"add n{n % 20}.example.com to egress.allow"} for n in range(60)]
    lines = render(report(*rows)).splitlines()
    assert sum(line.startswith("to allow: ") for line in lines) == 8
    assert lines[-1] == "and 12 more such names"


def test_troubles_come_first_and_red() -> None:
    body = report(ROW, problem="the writer does not answer", lost=3, left_out=9)
    lines = render(body, colour=True).splitlines()
    assert lines[0].startswith(f"{RED}PROBLEM: the writer does not answer")
    assert "3 records were lost" in lines[1]
    assert "9 older rows" in lines[2]
    assert any(line.startswith(BOLD) for line in lines)
    assert "\033" not in render(body)


HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202e\r\n"


def test_nothing_in_any_field_reaches_the_terminal_as_it_is() -> None:
    row = {**ROW, **{key: HOSTILE for key, value in ROW.items() if isinstance(value, str)}}
    body = report(row, problem=HOSTILE, sandboxes=[{**SANDBOX, "sandbox": HOSTILE}])
    text = render(body, checks=True)
    assert all(line.isprintable() for line in text.split("\n"))
    assert len(text.split("\n")) == len(render(report(ROW, problem="x"), checks=True).split("\n"))
    lines: list[str] = []
    said: list[str] = []
    run(lines, said, [body])
    assert all(line.isprintable() for line in [*lines, *said])
    json_lines: list[str] = []
    run(json_lines, said, [body], as_json=True)
    assert all(line.isprintable() for line in json_lines)


# -- following


def run(
    lines: list[str],
    said: list[str],
    answers: list[dict[str, Any] | EnforcerError],
    asked: list[int] | None = None,
    **words: Any,
) -> None:
    """Follow until the answers are used up, which is when the reader leaves."""
    left = list(answers)

    def ask(after: int) -> dict[str, Any]:
        if asked is not None:
            asked.append(after)
        answer = left.pop(0)
        if isinstance(answer, EnforcerError):
            raise answer
        return answer

    follow(ask, lines.append, said.append, lambda _seconds: not left, zone=UTC, **words)


def ports(lines: list[str]) -> list[str]:
    return [line.split()[6] for line in lines if not line.startswith("TIME")]


def test_each_change_is_a_line_and_only_later_ones_are_asked_for() -> None:
    lines: list[str] = []
    asked: list[int] = []
    more = {**ROW, "number": 9, "count": 20}
    run(lines, [], [report(ROW, PING), report(next=6), report(more), report(next=9)], asked)
    assert asked == [0, 6, 6, 9]
    assert lines[0].split() == list(HEADER)
    assert [line.split()[-2] for line in lines[1:]] == ["12", "3+", "20"]


def test_columns_keep_their_places_and_grow_when_they_must() -> None:
    lines: list[str] = []
    long = {**ROW, "number": 6, "sandbox": "a-much-longer-name-0a0b0c0d"}
    run(lines, [], [report(ROW), report(long), report({**ROW, "number": 7}), report(next=7)])
    assert lines[1].index("tcp") == lines[0].index("PROTO")
    assert lines[3].index("tcp") == lines[2].index("tcp")


def test_json_is_one_object_a_line_without_a_header() -> None:
    lines: list[str] = []
    run(lines, [], [report(ROW), report(PING)], as_json=True)
    assert [json.loads(line)["protocol"] for line in lines] == ["tcp", "icmp"]


def test_an_enforcer_that_goes_and_comes_back_is_told_of_and_nothing_is_repeated() -> None:
    lines: list[str] = []
    said: list[str] = []
    asked: list[int] = []
    down = EnforcerError("the enforcer is not running", "start it")
    again = {**ROW, "id": 1, "number": 1, "last": ROW["last"] + 0.1}
    later = {**ROW, "id": 2, "number": 2, "port": 8443, "last": ROW["last"] + 5}
    run(
        lines,
        said,
        [
            report(ROW),
            down,
            down,
            report(next=0, epoch="two"),
            # It has not heard anything yet itself.
            report(next=0, epoch="two", problem="Docker was not looked at yet"),
            report(again, later, epoch="two"),
            report({**again, "number": 3, "count": 13}, epoch="two"),
            report(next=3, epoch="two"),
        ],
        asked,
    )
    assert said[:2] == ["the enforcer is not running; waiting for it", "the enforcer was restarted; going on"]
    assert len(said) == 3
    assert ports(lines) == ["443", "8443", "443"]
    assert asked == [0, 5, 5, 5, 0, 0, 2, 3]


def test_a_short_silence_is_told_with_its_end() -> None:
    said: list[str] = []
    run([], said, [report(ROW), EnforcerError("too busy"), report(next=5), report(next=5)])
    assert said == ["too busy; waiting for it", "the enforcer answers again"]


def test_a_writer_that_is_gone_is_told_once() -> None:
    said: list[str] = []
    broken = report(next=5, problem="the writer does not answer")
    run([], said, [report(ROW), broken, broken, report(next=5), report(next=5)])
    assert len(said) == 1
    assert said[0].startswith("the writer does not answer")


def test_an_enforcer_that_does_not_run_at_all_is_an_error() -> None:
    with pytest.raises(EnforcerError):
        run([], [], [EnforcerError("the enforcer is not running")])


def test_checks_are_left_out_of_the_stream() -> None:
    lines: list[str] = []
    run(lines, [], [report(ROW, CHECK), report(next=7)])
    assert len(lines) == 2


def test_a_closed_pipe_is_noticed_without_writing() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        wait = reader_left(stream)
        assert not wait(0.01)
        os.close(reading)
        assert wait(60)


def test_what_has_no_descriptor_is_slept_for() -> None:
    class Nowhere:
        def fileno(self) -> int:
            raise OSError("none")

    slept: list[float] = []
    sleep: Callable[[float], None] = slept.append
    wait = reader_left(Nowhere(), sleep)  # type: ignore[arg-type]
    assert not wait(1.5)
    assert slept == [1.5]


# -- names that were asked for

ASKED: dict[str, Any] = {
    "id": 8,
    "number": 8,
    "first": 1700000000.0,
    "last": 1700000062.5,
    "sandbox": "demo-0a0b0c0d",
    "project": "/home/dev/demo",
    "service": "proxy",
    "session": None,
    "container": None,
    "protocol": "proxy",
    "address": None,
    "port": 443,
    "icmp_type": None,
    "count": 12,
    "at_least": False,
    "name": "files.example.com",
    "reason": "denied",
    "dns": False,
    "check": False,
    "note": "not allowed",
    "line": "- files.example.com",
    "command": "corral allow files.example.com",
}
BY_PORT = {**ASKED, "id": 9, "number": 9, "last": ASKED["last"] + 1, "port": 8443, "count": 1, "name": "git.example.com", "note": "not allowed on port 8443, only on 443", "line": "- {host: git.example.com, ports: [8443]}", "command": "corral allow git.example.com:8443"}  # fmt: skip
BY_DNS = {**ASKED, "id": 10, "number": 10, "last": ASKED["last"] + 2, "service": "main", "session": "0a1b2c3d", "container": "c" * 64, "protocol": "dns name", "port": None, "name": "db.example.com", "reason": "resolve", "note": "it could not be resolved", "line": None, "command": None, "dns": True}  # fmt: skip
ASKING = {**SANDBOX, "denied": 0, "unlisted": 0, "dead_resolver": None, "asked": 25, "asked_unlisted": 2}


def test_names_are_rows_with_what_allows_them_now_and_for_good() -> None:
    body = report(asked=[ASKED, BY_PORT, BY_DNS], sandboxes=[ASKING])
    assert render(body, zone=UTC).splitlines() == [
        "TIME                 SANDBOX        SESSION        PROTO     ADDRESS  PORT  COUNT  WHAT",
        "2023-11-14 22:14:22  demo-0a0b0c0d  proxy          proxy     -        443   12     "
        "files.example.com: not allowed",
        "2023-11-14 22:14:23  demo-0a0b0c0d  proxy          proxy     -        8443  1      "
        "git.example.com: not allowed on port 8443, only on 443",
        "2023-11-14 22:14:24  demo-0a0b0c0d  main-0a1b2c3d  dns name  -        -     12     "
        "db.example.com: it could not be resolved",
        "",
        "demo-0a0b0c0d: names refused 25 times, 2 of them not listed",
        "",
        "to allow a name until the session ends:",
        "  corral allow git.example.com:8443",
        "  corral allow files.example.com",
        "",
        "to allow a name for good, below egress.allow in corral.yaml:",
        "  - {host: git.example.com, ports: [8443]}",
        "  - files.example.com",
    ]


def test_packets_and_names_are_one_table_in_the_order_of_time() -> None:
    lines = render(report(ROW, {**PING, "last": ASKED["last"] + 9}, asked=[ASKED]), zone=UTC).splitlines()
    assert [line.split()[4] for line in lines[1:4]] == ["tcp", "proxy", "icmp"]


def test_a_sandbox_elsewhere_is_named_in_what_allows_its_names() -> None:
    text = render(report(asked=[ASKED]), checks=True)
    assert "  corral allow files.example.com --sandbox demo-0a0b0c0d" in text.splitlines()


def test_names_get_no_advice_in_a_pipe_and_not_without_end_at_a_terminal() -> None:
    asked = [
        {**ASKED, "number": n, "name": f"n{n}.example.com", "line": f"- n{n}.example.com", "command": f"corral allow n{n}.example.com"}
        for n in range(20)
    ]  # fmt: skip
    assert "allow a name" not in render(report(asked=asked), chatty=False)
    lines = render(report(asked=asked)).splitlines()
    assert sum(line.startswith("  corral allow ") for line in lines) == 8
    assert lines.count("  and 12 more") == 2
    assert "  corral allow n19.example.com" in lines


def test_names_that_corral_verify_asked_for_are_shown_when_asked_for() -> None:
    body = report(asked=[{**ASKED, "check": True}])
    assert selected(body, checks=False)["asked"] == []
    assert "files.example.com" not in render(body)
    assert "files.example.com" in render(body, checks=True)


def test_following_shows_names_among_packets_and_tells_one_from_another() -> None:
    lines: list[str] = []
    later = {**ASKED, "number": 12, "count": 13, "last": ASKED["last"] + 4}
    other = {**ASKED, "number": 13, "id": 13, "reason": "no-sni", "last": ASKED["last"] + 5}
    answers: list[dict[str, Any] | EnforcerError] = [report(ROW, asked=[ASKED]), report(asked=[later, other])]
    run(lines, [], answers, as_json=True)
    assert [(row.get("name"), row["count"]) for row in map(json.loads, lines)] == [
        (None, 12),
        ("files.example.com", 12),
        ("files.example.com", 13),
        ("files.example.com", 12),
    ]


def test_following_repeats_no_name_after_a_restart() -> None:
    lines: list[str] = []
    others = [{**ASKED, "name": "new.example.com"}, {**ASKED, "reason": "no-sni"}]
    again = report(asked=[ASKED, *others], epoch="two")
    run(lines, [], [report(asked=[ASKED]), again, again], as_json=True)
    assert [(row["name"], row["reason"]) for row in map(json.loads, lines)] == [
        ("files.example.com", "denied"),
        ("new.example.com", "denied"),
        ("files.example.com", "no-sni"),
    ]


def test_nothing_in_a_row_of_a_name_reaches_the_terminal_as_it_is() -> None:
    hostile = {**ASKED, **{key: HOSTILE for key, value in ASKED.items() if isinstance(value, str)}}
    body = report(asked=[hostile])
    text = render(body, checks=True)
    assert all(line.isprintable() for line in text.split("\n"))
    assert len(text.split("\n")) == len(render(report(asked=[ASKED]), checks=True).split("\n"))
    lines: list[str] = []
    run(lines, [], [body])
    assert all(line.isprintable() for line in lines)
