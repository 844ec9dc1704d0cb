"""``corral status``: what runs, what it may reach, what is wrong; from the enforcer's account. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from corral.console import BOLD, RED, YELLOW, paint
from corral.plain import cleaned, columns, width
from policy import proxying

HEADER = ("NAME", "STATE", "ADDRESSES", "PACKETS", "AGE", "NEXT")
# Wider names have a line of their own, and of many addresses the first ones are shown: no line should wrap.
WIDEST_NAME = 48
ADDRESSES = 3
NO_SOCKET = "it cannot ask the enforcer for names; see: journalctl --user -u corral-enforcer"
NO_PROXY = (
    "the proxy that its sessions need does not run; it is started again in a moment, or by the next start"
)

_GOOD_STATES = frozenset({"running", "ready"})
_GOOD_NAMES = frozenset({"OK"})


def render(status: Mapping[str, Any], *, colour: bool) -> str:
    """Return the text of ``corral status``, without a final newline; ``--json`` has all that is cut short."""
    status = cleaned(status)
    blocks = [_warnings(status, colour)]
    sandboxes = status.get("sandboxes") or []
    blocks += [_sandbox(sandbox, colour) for sandbox in sandboxes]
    if not sandboxes and not status.get("apart"):
        blocks.append(["no sandboxes"])
    blocks.append(_apart(status.get("apart") or [], colour))
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
    lines += [paint(f"  {text}", YELLOW if bad else "", colour and bad) for text, bad in _unit(sandbox)]
    every = sandbox.get("sessions") or []
    sessions = [row for row in every if row.get("service") != proxying.SERVICE]
    if not sessions:
        lines.append("  no sessions")
    for session in sessions:
        lines += _session(session, colour)
    return lines + _proxy(sessions, [row for row in every if row not in sessions], colour)


def _proxy(
    sessions: Iterable[Mapping[str, Any]], proxies: Sequence[Mapping[str, Any]], colour: bool
) -> list[str]:
    """Show the proxy, and say when sessions need one and none runs."""
    lines = []
    for row in proxies:
        state = str(row.get("state"))
        shown = state if state in _GOOD_STATES else paint(state, YELLOW, colour)
        lines.append(f"  proxy  {row.get('address')}  {shown}{_counted(row.get('proxy') or {})}")
        if state == "running" and (row.get("proxy") or {}).get("socket") is False:
            lines.append(paint(f"    PROBLEM: {NO_SOCKET}", RED, colour))
        lines += [paint(f"    PROBLEM: {text}", RED, colour) for text in row.get("problems") or ()]
    needed = any(row.get("proxied") and row.get("state") == "running" for row in sessions)
    if needed and not any(row.get("state") == "running" for row in proxies):
        lines.append(paint(f"  PROBLEM: {NO_PROXY}", RED, colour))
    return lines


def _counted(proxy: Mapping[str, Any]) -> str:
    if not proxy:
        return ""
    refused = sum((proxy.get("refused") or {}).values())
    return (
        f"  {proxy.get('allowed', 0)} names opened, {refused} refused; {proxy.get('open', 0)} addresses open"
    )


def _unit(sandbox: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield what is to be said of the unit that keeps an agent up, and whether it is bad."""
    unit = sandbox.get("unit") or {}
    if not unit:
        return
    boot = "starts with the machine" if unit.get("enabled") else "does not start with the machine"
    yield (
        f"unit {unit.get('unit')}: {unit.get('active')} ({unit.get('sub')}), {boot}",
        (unit.get("active") not in {"active", "activating"}),
    )
    if sandbox.get("lingers") is False:
        yield 'without a login nothing of it runs: sudo loginctl enable-linger "$USER"', True


def _session(session: Mapping[str, Any], colour: bool) -> list[str]:
    state = str(session.get("state"))
    good = state in _GOOD_STATES
    head = f"  {session.get('service')}-{session.get('session')}  {session.get('address')}  "
    lines = [head + (state if good else paint(state, YELLOW, colour))]
    lines += [paint(f"    PROBLEM: {text}", RED, colour) for text in session.get("problems") or ()]
    if session.get("mode") == "open":
        told = f"    WARNING: open: reaches all public addresses ({session.get('open_packets', 0)} packets)"
        lines.append(paint(told, RED, colour))
    lines += _names(session.get("names") or (), colour)
    for name in session.get("names") or ():
        lines += [f"    {name.get('name')}: {text}" for text in _granted(name.get("granted") or {})]
        if name.get("error"):
            lines.append(paint(f"    {name.get('name')}: {name['error']}", YELLOW, colour))
    lines += _asked(session)
    for service in session.get("host_services") or ():
        lines.append(f"    host service {service.get('name')}: corral-host:{service.get('port')}")
    if session.get("attended") is False:
        lines.append(
            f"    nobody is attached: corral attach {session.get('called') or session.get('session')}"
        )
    return lines + _denied(session)


def _asked(session: Mapping[str, Any]) -> list[str]:
    """Say what it may ask for by name; what is pinned has its line already."""
    ways = [
        *(["through the proxy"] if session.get("proxied") else []),
        *(["by DNS"] if session.get("answered") else []),
    ]
    pinned = {row.get("name") for row in session.get("names") or ()}
    lines = []
    for row in session.get("asked") or ():
        if ways and row.get("host") not in pinned:
            numbers = [str(port) for port in row.get("ports") or ()]
            ports = f"port{'s' * (len(numbers) != 1)} {', '.join(numbers)}"
            seconds = row.get("seconds")
            until = "" if seconds is None else f", for {_seconds(seconds)} more"
            lines.append(f"    {row.get('host')}: {ports} {' and '.join(ways)}{until}")
    return lines


def _granted(ports: Mapping[str, Any]) -> list[str]:
    """Say which ports were allowed while the session runs, and how long for."""
    lines = []
    for port, seconds in sorted(ports.items(), key=lambda row: int(row[0])):
        until = "until the session ends" if seconds is None else f"for {_seconds(seconds)} more"
        lines.append(f"port {port} was allowed by hand, {until}")
    return lines


def _denied(session: Mapping[str, Any]) -> list[str]:
    denied, asked = session.get("denied"), session.get("dead_resolver")
    parts = [f"{denied} packets denied (see: corral denied)"] if denied else []
    parts += [f"its dead resolver was asked {asked} times"] if asked else []
    return [f"    {'; '.join(parts)}"] if parts else []


def _names(names: Iterable[Mapping[str, Any]], colour: bool) -> list[str]:
    rows = [_name(name) for name in names]
    if not rows:
        return []
    short = [row if width(row[0]) <= WIDEST_NAME else ("", *row[1:]) for row in rows]
    head, *table = columns([HEADER, *short])
    lines = [f"    {head}"]
    for row, line in zip(rows, table, strict=True):
        good = row[1] in _GOOD_NAMES
        whole = [f"    {row[0]}", f"    {line}"] if width(row[0]) > WIDEST_NAME else [f"    {line}"]
        lines += whole if good else [paint(text, YELLOW, colour) for text in whole]
    return lines


def _name(name: Mapping[str, Any]) -> tuple[str, ...]:
    addresses = [str(address) for address in name.get("addresses") or ()]
    more = f" +{len(addresses) - ADDRESSES}" if len(addresses) > ADDRESSES else ""
    # Allowed still, but not in the hosts file any more.
    lingering = len(name.get("lingering") or ())
    shown = (" ".join(addresses[:ADDRESSES]) + more or "-") + (f" ({lingering} ending)" if lingering else "")
    return (
        str(name.get("name")),
        str(name.get("state")),
        shown,
        str(name.get("packets", 0)),
        _seconds(name.get("age")),
        _seconds(name.get("next_refresh")),
    )


def _seconds(value: object) -> str:
    if not isinstance(value, int | float):
        return "-"
    for size, unit in ((1, "s"), (60, "m"), (3600, "h")):
        if value < 100 * size:
            return f"{value / size:.0f}{unit}"
    return f"{value / 86400:.0f}d"


def _apart(rows: Iterable[Mapping[str, Any]], colour: bool) -> list[str]:
    """Show the containers without a network of their own; what is not enforced is hard to overlook."""
    lines = []
    for row in rows:
        head = f"{row.get('sandbox')}  {row.get('service')}-{row.get('session')}  {row.get('state')}  "
        if row.get("enforced"):
            lines.append(f"{head}no network (egress.mode: none)")
        else:
            text = f"{head}NOT ENFORCED: on this host's own network (egress.mode: host)"
            lines.append(paint(text, RED, colour))
    return lines


def _strangers(strangers: Iterable[Mapping[str, Any]], colour: bool) -> list[str]:
    lines = []
    for stranger in strangers:
        reasons = "; ".join(map(str, stranger.get("reasons") or ()))
        text = f"STRANGER: container {stranger.get('name')} on {stranger.get('network')}"
        lines.append(paint(f"{text}: {reasons}" if reasons else text, YELLOW, colour))
    return lines
