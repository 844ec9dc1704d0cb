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

    ``sets`` are the names of the table's sets, ``flags`` the table's own.
    """

    chains: Mapping[str, tuple[str, ...]] | None = None
    gateways: frozenset[str] = frozenset()
    owners: frozenset[tuple[str, int]] = frozenset()
    sets: frozenset[str] = frozenset()
    closed: frozenset[str] = frozenset()
    flags: tuple[str, ...] = ()


def shape(rows: Iterable[Mapping[str, Any]]) -> Shape:
    """Return the shape of the table whose listing ``rows`` are."""
    chains: dict[str, list[str]] = {}
    content: dict[str, list[Any]] = {}
    flags: tuple[str, ...] = ()
    for row in rows:
        if "table" in row:
            said = row["table"].get("flags", ())
            flags = (said,) if isinstance(said, str) else tuple(said)
        elif "chain" in row:
            chain = row["chain"]
            priority = chain.get("prio")
            hooked = f"{chain['hook']} {PRIORITIES.get(priority, priority)}" if "hook" in chain else ""
            chains[chain["name"]] = [hooked]
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
        flags,
    )


def _uid(value: Any) -> int:
    if isinstance(value, int):
        return value
    # nft prints the name of a user it knows.
    import pwd

    return pwd.getpwnam(str(value)).pw_uid
