"""What the service tells about itself, as JSON-able values. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import Any

from enforcer import pins
from enforcer.apart import Apart
from enforcer.config import Config
from enforcer.sessions import Network, Session, Stranger
from enforcer.writerclient import Held
from policy import versions
from policy.errors import EnforcerError
from policy.identity import NETWORK_PREFIX

API_VERSION = versions.SCHEMAS[versions.API]

# How many of the writer's refusals are told one by one.
REFUSALS = 5
# Problems of these parts mean: the skeleton is not where packets pass.
PATH_PARTS = frozenset({"jump", "chains", "nat", "hook", "sets", "driver"})


def version(
    release: str, heard: Mapping[str, Any] | EnforcerError, *, rootless: bool = False
) -> dict[str, Any]:
    """Return the body of ``GET /v1/version``; ``heard`` is the writer's hello, or why there is none."""
    if isinstance(heard, EnforcerError):
        writer = {"reachable": False, "version": None, "error": heard.message, "hint": heard.hint}
    else:
        told = {name: heard.get(name) for name in ("version", "schemas", "skeleton")}
        writer = {"reachable": True, **told}
    return {**versions.describe(release), "api": API_VERSION, "rootless": rootless, "writer": writer}


def session_row(
    session: Session, state: str, pinned: pins.State, held: Held | None, now: float
) -> dict[str, Any]:
    """Return one session of ``status``."""
    packets: dict[str, int] = {}
    for entry in held.pins if held else ():
        if entry.src == session.address:
            name = entry.comment.rpartition(" ")[2]
            packets[name] = packets.get(name, 0) + entry.packets
    names = []
    if session.container in pinned.containers:
        names = [
            {
                "name": row.name,
                "state": row.state.value,
                "addresses": list(row.addresses),
                "lingering": list(row.lingering),
                "packets": packets.get(row.name, 0),
                "age": row.age,
                "next_refresh": row.next_refresh,
                "error": row.error,
                "optional": row.optional,
                # Ports that the user allowed while it runs: seconds left, null: until the session ends.
                "granted": {
                    str(port): None if until is None else max(0.0, until - now)
                    for port, until in session.overrides.ends(row.name, session.declaration).items()
                },
            }
            for row in pins.status(pinned, session.container, now)
        ]
    return {
        "container": session.container,
        "name": session.name,
        "service": session.service,
        "session": session.session,
        "address": session.address,
        "state": state,
        "problems": list(session.problems),
        "denied": (held.denied if held else {}).get(session.address, 0),
        "host_services": [{"name": s.name, "port": s.port} for s in session.declaration.host_services],
        "names": names,
        # Whether it asks for names, of a proxy or by DNS; and what for, with the seconds that are left.
        "asks": session.proxied or session.answered,
        "asked": [
            {
                "host": entry.host,
                "ports": list(entry.ports),
                "seconds": None if until == inf else max(0.0, until - now),
            }
            for entry, until in session.overrides.asked(session.declaration)
        ],
        "withdrawn": sorted(session.overrides.denied),
        "mode": session.declaration.mode,
        "proxied": session.proxied,
        "answered": session.answered,
        "open_packets": next((row.packets for row in held.open if row.src == session.address), 0)
        if held
        else 0,
    }


def refusals(held: Held | None) -> list[str]:
    """Return what the writer refused, for people: each once, the first few; not what ``problems`` says."""
    told = [text for _, text in held.problems] if held else []
    found = [text for text in dict.fromkeys(held.refused if held else ()) if not text.endswith(tuple(told))]
    more = [f"the writer refused {len(found) - REFUSALS} more"] if len(found) > REFUSALS else []
    return [*(f"the writer refused: {text}" for text in found[:REFUSALS]), *more]


def status(
    version: str,
    config: Config,
    networks: Iterable[Network],
    rows: Mapping[str, list[dict[str, Any]]],
    strangers: Iterable[Stranger],
    held: Held | None,
    errors: Iterable[str],
    apart: Iterable[Apart] = (),
) -> dict[str, Any]:
    """Return the body of ``GET /v1/status``; ``rows`` maps network names to their sessions."""
    return {
        "version": version,
        "api": API_VERSION,
        "permit_ranges": [str(net) for net in config.permit_ranges],
        "problems": [text for _, text in held.problems] if held else [],
        "errors": list(errors),
        "sandboxes": [
            {
                "sandbox": net.name.removeprefix(NETWORK_PREFIX),
                "network": net.name,
                "bridge": net.bridge,
                "subnet": str(net.subnet),
                "gateway": str(net.gateway),
                "problems": list(net.problems),
                "sessions": rows.get(net.name, []),
            }
            for net in networks
        ],
        "apart": [found.row() for found in apart],
        "strangers": [
            {"container": s.container, "name": s.name, "network": s.network, "reasons": list(s.reasons)}
            for s in strangers
        ],
    }


def live(held: Held, addresses: frozenset[str]) -> dict[str, Any]:
    """Return the body of ``GET /v1/live`` for the containers at ``addresses``."""
    parts = {part for part, _ in held.problems}
    return {
        "pins": [[e.src, e.proto, e.port, e.dst] for e in held.pins if e.src in addresses],
        "host": [[e.src, e.proto, e.port, e.dst] for e in held.host if e.src in addresses],
        "open": [row.src for row in held.open if row.src in addresses],
        "packets": {f"{e.src} {e.dst}:{e.port}": e.packets for e in held.pins if e.src in addresses},
        "denied": {src: count for src, count in held.denied.items() if src in addresses},
        "skeleton": {
            "jump": not parts & PATH_PARTS,
            "backstop": not parts & {"backstop", "claims"},
            "input": "input" not in parts,
            "ipv6": "ipv6" not in parts,
            "problems": [text for _, text in held.problems],
            "driver": held.driver,
        },
    }
