"""``corral logs``: what a session has printed, from Docker's own files; they hold the last 20 MB."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from corral import answers, engine
from corral.context import Invocation
from corral.screen import harmless
from corral.sessions import Session
from policy.errors import ArgumentError

# A line that does not end is cut here.
LONGEST = 1 << 16
_DURATION = re.compile(r"(\d{1,9})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# Docker is younger than this second of 1970, and docker-py calls 0 and what is before it no time.
_BEGINNING = 1.0
# Docker's stamp of a line, with a space behind it.
_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z) ?(.*)", re.DOTALL)


def since(text: str, now: float) -> float:
    """Return a wall time: of ``90s``, ``10m``, ``2h``, ``1d`` ago, or of an ISO 8601 time.

    Raises:
        ArgumentError: it is neither.
    """
    from datetime import datetime

    match = _DURATION.fullmatch(text)
    if match is not None:
        return now - int(match[1]) * _SECONDS[match[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError) as error:
        raise ArgumentError(
            f"{text[:80]!r} is no time", "write 10m, 2h, 1d, or 2026-01-31T09:00:00+00:00"
        ) from error


def read(
    invocation: Invocation,
    session: Session,
    *,
    follow: bool,
    start: float | None,
    tail: int | None,
    stamps: bool,
) -> Iterator[bytes]:
    """Yield pieces of the output of a session, until its end with ``follow``.

    Raises:
        EngineError: Docker refuses.
    """
    # What docker-py streams of a terminal comes byte by byte: only what is waited for is worth that.
    options: dict[str, Any] = {"follow": follow, "stream": follow, "timestamps": stamps}
    if start is not None and start >= _BEGINNING:
        options["since"] = start
    if tail is not None:
        options["tail"] = tail
    with engine.errors("reading the session's output"):
        found = invocation.api.logs(session.ident, stdout=True, stderr=True, **options)
        yield from found if follow else [found]


def lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of what comes in pieces, and what is left at the end; very long ones in parts."""
    rest = bytearray()
    for piece in pieces:
        rest += piece
        if b"\n" in piece:
            *whole, rest = rest.split(b"\n")
            for line in whole:
                yield from _parts(line)
        while len(rest) > LONGEST:
            yield bytes(rest[:LONGEST])
            del rest[:LONGEST]
    if rest:
        yield bytes(rest)


def _parts(line: bytearray) -> Iterator[bytes]:
    for at in range(0, max(len(line), 1), LONGEST):
        yield bytes(line[at : at + LONGEST])


def shown(line: bytes, *, colour: bool) -> str:
    """Return a line for a terminal: a carriage return overwrites what was before, as it did there."""
    text = line.rstrip(b"\r").rpartition(b"\r")[2]
    return harmless(text, colour=colour).decode("utf-8", "replace")


def row(session: Session, line: bytes) -> dict[str, Any]:
    """Return a line with Docker's stamp for programs: ``{"session", "time", "text"}``."""
    match = _STAMP.fullmatch(line.decode("utf-8", "replace"))
    stamp, text = (match[1], match[2]) if match else (None, line.decode("utf-8", "replace"))
    return {"session": session.session, "time": stamp, "text": shown(text.encode(), colour=False)}


def print_logs(
    pieces: Iterable[bytes], session: Session, write: Callable[[str], None], *, as_json: bool, colour: bool
) -> None:
    """Write the lines of what ``read`` yields."""
    for line in lines(pieces):
        write(answers.line(row(session, line)) if as_json else shown(line, colour=colour))
