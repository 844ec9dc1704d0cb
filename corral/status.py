"""``corral status``: what runs, what it may reach, what is wrong; from the enforcer's account. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from corral.console import BOLD, RED, YELLOW, paint

_GOOD_STATES = frozenset({"running", "ready"})
_GOOD_NAMES = frozenset({"OK"})


def render(status: Mapping[str, Any], *, colour: bool) -> str:
    """Return the text of ``corral status``, without a final newline."""
    blocks = [_warnings(status, colour)]
    sandboxes = status.get("sandboxes") or []
    blocks += [_sandbox(sandbox, colour) for sandbox in sandboxes]
    if not sandboxes:
        blocks.append(["no sandboxes"])
    blocks.append(_strangers(status.get("strangers") or [], colour))
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _warnings(status: Mapping[str, Any], colour: bool) -> list[str]:
    lines = []
    ranges = status.get("permit_ranges") or []
    if ranges:
        shown = ", ".join(map(str, ranges))
        lines.append(paint(f"WARNING: permitted ranges: {shown}", RED, colour))
        lines.append(
            paint("  enforcer.toml lets names open addresses that are refused otherwise", RED, colour)
        )
    for text in (*(status.get("problems") or ()), *(status.get("errors") or ())):
        lines.append(paint(f"PROBLEM: {text}", RED, colour))
    return lines


def _sandbox(sandbox: Mapping[str, Any], colour: bool) -> list[str]:
    head = f"{sandbox.get('sandbox')}  network {sandbox.get('subnet')}  bridge {sandbox.get('bridge')}"
    lines = [paint(head, BOLD, colour)]
    lines += [paint(f"  PROBLEM: {text}", RED, colour) for text in sandbox.get("problems") or ()]
    sessions = sandbox.get("sessions") or []
    if not sessions:
        lines.append("  no sessions")
    for session in sessions:
        lines += _session(session, colour)
    return lines


def _session(session: Mapping[str, Any], colour: bool) -> list[str]:
    state = str(session.get("state"))
    good = state in _GOOD_STATES
    head = f"  {session.get('service')}-{session.get('session')}  {session.get('address')}  "
    lines = [head + (state if good else paint(state, YELLOW, colour))]
    lines += [paint(f"    PROBLEM: {text}", RED, colour) for text in session.get("problems") or ()]
    rows: list[tuple[str, ...]] = [("NAME", "STATE", "ADDRESSES", "PACKETS", "AGE", "NEXT")]
    rows += [_name(name) for name in session.get("names") or ()]
    if len(rows) > 1:
        lines += [
            f"    {line}" if index == 0 or row[1] in _GOOD_NAMES else paint(f"    {line}", YELLOW, colour)
            for index, (row, line) in enumerate(zip(rows, _columns(rows), strict=True))
        ]
    for name in session.get("names") or ():
        if name.get("error"):
            lines.append(paint(f"    {name.get('name')}: {name['error']}", YELLOW, colour))
    for service in session.get("host_services") or ():
        lines.append(f"    host service {service.get('name')}: corral-host:{service.get('port')}")
    denied = session.get("denied")
    if denied:
        lines.append(f"    {denied} packets denied")
    return lines


def _name(name: Mapping[str, Any]) -> tuple[str, ...]:
    addresses = " ".join(map(str, name.get("addresses") or ())) or "-"
    return (
        str(name.get("name")),
        str(name.get("state")),
        addresses,
        str(name.get("packets", 0)),
        _seconds(name.get("age")),
        _seconds(name.get("next_refresh")),
    )


def _seconds(value: object) -> str:
    return f"{value:.0f}s" if isinstance(value, int | float) else "-"


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _strangers(strangers: Iterable[Mapping[str, Any]], colour: bool) -> list[str]:
    lines = []
    for stranger in strangers:
        reasons = "; ".join(map(str, stranger.get("reasons") or ()))
        text = f"STRANGER: container {stranger.get('name')} on {stranger.get('network')} reaches nothing"
        lines.append(paint(f"{text}: {reasons}" if reasons else text, YELLOW, colour))
    return lines
