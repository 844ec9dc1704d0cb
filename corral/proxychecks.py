"""What ``corral verify`` asks of names that are not pinned ahead: of the proxy, and of who answers DNS. Pure.

What was opened on demand is the enforcer's account; whether the policy lets it be is judged here again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from policy import asking, proxying
from policy.declaration import ALLOWLIST, ANSWER, Declaration, Pattern
from policy.records import dataclass

Row = tuple[str, str, int, str]
# They exist, and what asks for one of them learns nothing that it did not know.
EXISTING = proxying.CHECKED


@dataclass(frozen=True)
class Opened:
    """One address and port that was opened on demand, and the names that it stands for."""

    address: str
    port: int
    names: tuple[str, ...]


def opened(row: Mapping[str, Any]) -> list[Opened]:
    """Return what was opened on demand for a container, from its row of the enforcer's status."""
    return [
        Opened(str(one["address"]), int(one["port"]), tuple(map(str, one.get("names") or ())))
        for one in row.get("opened") or ()
    ]


def not_permitted(patterns: Iterable[Pattern], found: Opened) -> str:
    """Return why something may not be open, or nothing: one of its names has to be the policy's."""
    known = tuple(patterns)
    if any(found.port in asking.ports(known, name) for name in found.names):
        return ""
    names = ", ".join(found.names) or "no name"
    return f"{found.address}:{found.port} is open for {names}, which may not be asked for there"


def elements(
    patterns: Iterable[Pattern],
    address: str,
    held: Iterable[Opened],
    pins: Iterable[Row],
    host: Iterable[Row],
) -> list[str]:
    """Return what is wrong with what the kernel lets the proxy of a sandbox reach.

    Args:
        patterns: what the sandbox may ask for.
        address: the proxy's.
        held: what the enforcer says it opened.
        pins, host: kernel elements with that source.
    """
    known = tuple(patterns)
    told = {(address, "tcp", one.port, one.address): one for one in held}
    found = []
    for row in sorted(pins):
        problem = not_permitted(known, told[row]) if row in told else f"{_shown(row)} is open for nothing"
        found += [problem] if problem else []
    return [*found, *(f"{_shown(row)} of this host is open" for row in sorted(host))]


def _shown(row: Row) -> str:
    return f"{row[3]}:{row[2]}" if row[1] == "tcp" else f"{row[3]}:{row[2]}/{row[1]}"


# -- what the checker inside is told


def denied_name(declaration: Declaration, default: str = EXISTING[0]) -> str:
    """Return a name that exists outside and that a sandbox may not ask for."""
    patterns = declaration.patterns
    return next((name for name in EXISTING if not asking.matching(patterns, name)), default)


def told_of_proxy(
    declaration: Declaration, address: str = "", pins: Iterable[Row] = ()
) -> dict[str, Any] | None:
    """Return what the checker is told of the proxy (see ``agent_image.files.verify.expectations.Proxy``).

    Args:
        declaration: the session's, as it is now.
        address: of the proxy's container, empty when it is not known.
        pins: kernel elements of the whole sandbox.
    """
    if not declaration.proxied:
        return None
    rows = list(pins)
    # What a session of the sandbox may reach as well proves nothing.
    others = {(dst, port) for src, _, port, dst in rows if src != address}
    only = sorted({(dst, port) for src, _, port, dst in rows if src == address} - others)
    return {
        "port": proxying.PORT,
        "denied": denied_name(declaration),
        "permitted": _by_tls(declaration),
        "address": address,
        "only": [list(pair) for pair in only],
    }


def _by_tls(declaration: Declaration) -> list[Any] | None:
    """Return one name and port that the proxy connects, and in whose ClientHello it looks."""
    excused = {name.host for name in declaration.names if name.optional or not name.liveness}
    exact = [pattern for pattern in declaration.patterns if pattern.exact and pattern.host not in excused]
    for pattern in exact:
        for port in pattern.ports:
            if asking.terms(declaration.patterns, pattern.host, port) == asking.Terms():
                return [pattern.host, port]
    return None


def told_of_answers(declaration: Declaration) -> dict[str, Any] | None:
    """Return what the checker is told of names that are answered (see ``expectations.Answered``)."""
    if (declaration.mode, declaration.dns) != (ALLOWLIST, ANSWER):
        return None
    named = [name for name in declaration.names if name.liveness and not name.optional]
    permitted = [[name.host, name.ports[0]] for name in named][:1]
    return {"denied": denied_name(declaration), "permitted": permitted[0] if permitted else None}
