"""Our nft table as it is compared, out of what ``nft -j`` lists. Pure but for the names of users."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from enforcer.netfilter.opening import CLOSED, listed

PRIORITIES = {
    -300: "raw",
    -101: "dstnat - 1",
    -100: "dstnat",
    -1: "filter - 1",
    0: "filter",
    10: "filter + 10",
    100: "srcnat",
}


@dataclass(frozen=True)
class Shape:
    """``chains`` maps a chain to its hook line and tags (``skeleton.Chain.shape``), None: no table.

    ``sets`` are the names of the table's sets.
    """

    chains: Mapping[str, tuple[str, ...]] | None = None
    gateways: frozenset[str] = frozenset()
    owners: frozenset[tuple[str, int]] = frozenset()
    sets: frozenset[str] = frozenset()
    closed: frozenset[str] = frozenset()


def shape(rows: Iterable[Mapping[str, Any]]) -> Shape:
    """Return the shape of the table whose listing ``rows`` are."""
    chains: dict[str, list[str]] = {}
    content: dict[str, list[Any]] = {}
    for row in rows:
        if "chain" in row:
            chains[row["chain"]["name"]] = [_hooked(row["chain"])]
        elif "rule" in row:
            chains[row["rule"]["chain"]].append(str(row["rule"].get("comment", "")))
        elif "set" in row:
            content[str(row["set"]["name"])] = row["set"].get("elem", [])
    return Shape(
        {name: tuple(parts) for name, parts in chains.items()},
        frozenset(content.get("gateways", ())),
        frozenset((e["concat"][0], _uid(e["concat"][1])) for e in content.get("owners", ())),
        frozenset(content),
        listed(content.get(CLOSED, ())),
    )


def _hooked(chain: Mapping[str, Any]) -> str:
    if "hook" not in chain:
        return ""
    priority = chain.get("prio", 0)
    where = f"{chain['hook']} {PRIORITIES.get(priority, priority)}"
    return f"{chain.get('type')} {where} {chain.get('policy')}"


def _uid(value: Any) -> int:
    if isinstance(value, int):
        return value
    # nft prints the name of a user it knows.
    import pwd

    return pwd.getpwnam(str(value)).pw_uid
