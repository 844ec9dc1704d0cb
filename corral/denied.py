"""``corral denied``: what sandboxes tried and the fence refused. Pure, but for ``reader_left``."""

from __future__ import annotations

import select
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, tzinfo
from typing import Any, TextIO

from corral import answers
from corral.console import BOLD, RED, YELLOW, paint
from corral.plain import cleaned, columns, plain, widths_of
from policy.errors import EnforcerError

HEADER = ("TIME", "SANDBOX", "SESSION", "PROTO", "ADDRESS", "PORT", "COUNT", "WHAT")
EVERY = 1.0  # seconds
HINTS = 8
REMEMBERED = 10000  # rows that were written, so that a restart of the enforcer repeats none
DESTINATION = (
    *("sandbox", "container", "protocol", "address", "port", "icmp_type", "check"),
    *("name", "reason"),
)
CHATTER = "nothing was denied to sandboxes of this directory; corral denied --all shows all of yours"

Report = Mapping[str, Any]


def selected(report: Report, *, checks: bool) -> dict[str, Any]:
    """Return the report without corral's own checks, unless they are wanted."""
    kept = {
        key: [row for row in report.get(key) or () if checks or not row.get("check")]
        for key in ("rows", "asked")
    }
    return {**report, **kept}


def render(
    report: Report,
    *,
    checks: bool = False,
    chatty: bool = True,
    colour: bool = False,
    zone: tzinfo | None = None,
) -> str:
    """Return the table and what is to be said about it, without a final newline; empty when there is nothing.

    ``chatty``: with advice and explanations, for a person at a terminal. ``zone``: of times, default local.
    """
    found = cleaned(selected(report, checks=checks))
    rows = _ordered(found)
    blocks = [_troubles(found, colour)]
    if rows:
        head, *lines = columns([HEADER, *(cells(row, zone) for row in rows)])
        blocks.append([paint(head, BOLD, colour), *lines])
    elif chatty and not found.get("problem"):
        blocks.append([CHATTER if not checks else "nothing was denied"])
    blocks.append(_facts(found))
    if chatty:
        blocks.append(_hints(rows))
        blocks += _allowing(rows, elsewhere=checks)
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _ordered(report: Report) -> list[Mapping[str, Any]]:
    """Return refused packets and refused names, the latest last."""
    rows = [*report["rows"], *report["asked"]]
    return sorted(rows, key=lambda row: (row["last"], row["number"]))


def cells(row: Mapping[str, Any], zone: tzinfo | None = None) -> tuple[str, ...]:
    """Return one line of the table; ``row`` is clean already."""
    # Which session asked a proxy cannot be seen.
    session = f"{row['service']}-{row['session']}" if row.get("session") else str(row.get("service") or "-")
    note = f"{row['name']}: {row['note']}" if row.get("name") else row.get("note")
    port = str(row["port"]) if row.get("port") is not None else "-"
    if row.get("icmp_type") is not None:
        port = f"type {row['icmp_type']}"
    return (
        datetime.fromtimestamp(row["last"], zone).strftime("%Y-%m-%d %H:%M:%S"),
        str(row["sandbox"]),
        session,
        str(row["protocol"]),
        str(row.get("address") or "-"),
        port,
        f"{row['count']}{'+' if row.get('at_least') else ''}",
        str(note or "-"),
    )


def _troubles(report: Report, colour: bool) -> list[str]:
    lines = []
    if report.get("problem"):
        lines.append(paint(f"PROBLEM: {report['problem']}; newer denials are missing here", RED, colour))
    if report.get("lost"):
        lines.append(paint(f"{report['lost']} records were lost; their packets are counted", YELLOW, colour))
    if report.get("left_out"):
        lines.append(paint(f"{report['left_out']} older rows are not shown", YELLOW, colour))
    return lines


def _facts(report: Report) -> list[str]:
    lines = []
    for sandbox in report.get("sandboxes") or ():
        denied, unlisted = sandbox.get("denied") or 0, sandbox.get("unlisted") or 0
        asked, names = sandbox.get("dead_resolver"), sandbox.get("asked") or 0
        parts = []
        if denied or not names:
            parts.append(
                f"{denied} packets denied" + (f", {unlisted} of them not listed" if unlisted else "")
            )
        if asked:
            parts.append(f"its dead resolver was asked {asked} times (which names cannot be seen)")
        if names:
            missing = sandbox.get("asked_unlisted") or 0
            listed = f", {missing} of them not listed" if missing else ""
            parts.append(f"names refused {names} times{listed}")
        if denied or asked or names:
            lines.append(f"{sandbox.get('sandbox')}: {'; '.join(parts)}")
    return lines


def _hints(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    hints = list(dict.fromkeys(str(row["hint"]) for row in rows if row.get("hint")))
    lines = [f"to allow: {hint}" for hint in hints[:HINTS]]
    return lines + ([f"and {len(hints) - HINTS} more such names"] if len(hints) > HINTS else [])


def _allowing(rows: Iterable[Mapping[str, Any]], *, elsewhere: bool) -> list[list[str]]:
    """Return what lets names through: at once, and for good; the latest first, they are what is missed now.

    ``elsewhere``: rows of other directories are among them, whose sandbox has to be named.
    """
    latest = list(reversed(list(rows)))
    commands = dict.fromkeys(
        f"{row['command']} --sandbox {row['sandbox']}" if elsewhere else str(row["command"])
        for row in latest
        if row.get("command")
    )
    lines = dict.fromkeys(str(row["line"]) for row in latest if row.get("line"))
    return [
        _listed("to allow a name until the session ends:", list(commands)),
        _listed("to allow a name for good, below egress.allow in corral.yaml:", list(lines)),
    ]


def _listed(head: str, items: Sequence[str]) -> list[str]:
    if not items:
        return []
    more = [f"  and {len(items) - HINTS} more"] if len(items) > HINTS else []
    return [head, *(f"  {item}" for item in items[:HINTS]), *more]


def follow(
    ask: Callable[[int], Report],
    write: Callable[[str], None],
    tell: Callable[[str], None],
    wait: Callable[[float], bool],
    *,
    as_json: bool = False,
    checks: bool = False,
    zone: tzinfo | None = None,
) -> None:
    """Write a line for each row that changes, until nobody reads any more.

    Args:
        ask: returns the report of what changed after a number.
        write: takes a line.
        tell: takes what is to be said beside the lines.
        wait: waits so many seconds; True when the reader has gone.
        as_json: each line is a JSON object.
        checks: corral's own checks too.
        zone: of times, default local.

    Raises:
        EnforcerError: it did not answer the first time. Later on it is waited for.
    """
    view = _Lines(write, as_json, zone)
    report = ask(0)
    epoch, trouble, restarted = report["epoch"], "", False
    while True:
        if report.get("problem") and report["problem"] != trouble:
            tell(plain(f"{report['problem']}; what is refused meanwhile is told later, as far as it is kept"))
        trouble = str(report.get("problem") or "")
        view.show(_ordered(selected(report, checks=checks)), restarted=restarted)
        after, answer, said = report["next"], None, ""
        while answer is None:
            if wait(EVERY):
                return
            try:
                answer = ask(after)
                if answer["epoch"] != epoch:
                    tell("the enforcer was restarted; going on")
                    answer = ask(0)
                    epoch, restarted = answer["epoch"], True
                elif said:
                    tell("the enforcer answers again")
            except EnforcerError as error:
                if error.message != said:
                    tell(plain(f"{error.message}; waiting for it"))
                said, answer = error.message, None
        report = answer


class _Lines:
    """Writes rows, each state of a row once; columns only ever grow."""

    def __init__(self, write: Callable[[str], None], as_json: bool, zone: tzinfo | None) -> None:
        self._write, self._json, self._zone = write, as_json, zone
        self._shown: OrderedDict[tuple[Any, ...], tuple[float, int]] = OrderedDict()
        self._widths: Sequence[int] = ()

    def show(self, rows: Iterable[Mapping[str, Any]], *, restarted: bool) -> None:
        """Write ordered rows; ``restarted``: sooner or later, what was written before is among them again."""
        for row in rows:
            key = tuple(row.get(field) for field in DESTINATION)
            last, count = self._shown.get(key, (float("-inf"), 0))
            # Two accounts of one packet differ by a moment in when it came.
            if restarted and row["last"] <= last + EVERY and row["count"] <= count:
                continue
            self._shown[key] = row["last"], row["count"]
            self._shown.move_to_end(key)
            if len(self._shown) > REMEMBERED:
                self._shown.popitem(last=False)
            if self._json:
                self._write(answers.line(row))
                continue
            line = cells(cleaned(row), self._zone)
            if not self._widths:
                self._widths = widths_of([HEADER, line])
                self._write(columns([HEADER], self._widths)[0])
            self._widths = widths_of([line], self._widths)
            self._write(columns([line], self._widths)[0])


def reader_left(stream: TextIO, sleep: Callable[[float], None] = time.sleep) -> Callable[[float], bool]:
    """Return ``wait`` for ``follow``: a pipe whose reader has gone is noticed without writing to it."""
    poll = select.poll()
    try:
        poll.register(stream.fileno(), 0)
    except (OSError, ValueError):

        def blind(seconds: float) -> bool:
            sleep(seconds)
            return False

        return blind
    return lambda seconds: bool(poll.poll(seconds * 1000))
