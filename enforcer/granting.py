"""What was opened on demand for one container: addresses and ports, for which names, until when. Pure.

A *shelf* is what one container has. An element, (address, port), stands as long as one of its names does; a
name's end moves with each question for it, and while packets of the element move, at most a day from the last
question. Nothing here decides what is permitted: that is asked again each time, see ``standing``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

PER_CONTAINER = 512  # elements
PER_ELEMENT = 16  # names
NAMES = 1024  # of all elements together: each is judged anew when what the sessions say changes
TTL_MIN = 60.0  # seconds, like all below
LINGER = 900.0
LONGEST = 86400.0
UNUSED = 60.0  # what was not used for so long may make room

Element = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Reason:
    """A name that an element was opened for: when it was asked for last, and until when it holds."""

    asked: float
    until: float


@dataclass(frozen=True, slots=True)
class Grant:
    """One element: its names, in the order they came, and when it was used last."""

    names: Mapping[str, Reason]
    used: float


@dataclass(frozen=True, slots=True)
class Opened:
    """One element as the kernel is to have it: the first name that it stands for, and its last end."""

    address: str
    port: int
    name: str
    end: float


Shelf = Mapping[Element, Grant]
EMPTY: Shelf = MappingProxyType({})


def ask(
    shelf: Shelf, name: str, ports: Iterable[int], addresses: Iterable[str], ttl: float, now: float
) -> tuple[dict[Element, Grant], tuple[str, ...]]:
    """Open ``addresses`` for a name, each on all ``ports``: as many as there is room for, in their order.

    Room is made by what was used longest ago, unless that was within the last minute.

    Returns:
        The shelf, and the addresses that have a place on it; none: there is no room.
    """
    made, own = dict(shelf), tuple(dict.fromkeys(ports))
    until = now + min(max(ttl, TTL_MIN) + LINGER, LONGEST)
    fit: list[str] = []
    fresh: set[Element] = set()
    for address in dict.fromkeys(addresses):
        places = [(address, port) for port in own]
        missing = sum(place not in made for place in places)
        if not _make_room(made, missing, fresh.union(places), now):
            continue
        for place in places:
            old = made.get(place)
            names = dict(old.names) if old is not None else {}
            names[name] = Reason(now, max(until, names[name].until) if name in names else until)
            while len(names) > PER_ELEMENT:
                del names[min((n for n in names if n != name), key=lambda n: names[n].until)]
            made[place] = Grant(names, now)
        fresh.update(places)
        fit.append(address)
    _forget_names(made, fresh, name)
    return made, tuple(fit)


def _forget_names(made: dict[Element, Grant], fresh: set[Element], name: str) -> None:
    """Leave out the names that were asked for longest ago, of elements that stand for others as well."""
    over = sum(len(grant.names) for grant in made.values()) - NAMES
    if over <= 0:
        return
    old = sorted(
        (why.asked, element, other)
        for element, grant in made.items()
        for other, why in grant.names.items()
        if len(grant.names) > 1 and (element not in fresh or other != name)
    )
    for _, element, other in old:
        grant = made[element]
        if len(grant.names) > 1:
            left = {kept: why for kept, why in grant.names.items() if kept != other}
            made[element] = replace(grant, names=left)
            over -= 1
        if not over:
            return


def _make_room(made: dict[Element, Grant], missing: int, stays: set[Element], now: float) -> bool:
    over = len(made) + missing - PER_CONTAINER
    if over <= 0:
        return True
    old = sorted((made[e].used, e) for e in made if e not in stays and made[e].used <= now - UNUSED)
    if len(old) < over:
        return False
    for _, element in old[:over]:
        del made[element]
    return True


def full(shelf: Shelf, ports: Iterable[int], addresses: Iterable[str]) -> bool:
    """Tell whether opening these takes room from others."""
    wanted = {(address, port) for address in addresses for port in ports}
    return len(shelf.keys() | wanted) > PER_CONTAINER


def used(shelf: Shelf, element: Element, now: float) -> Shelf:
    """Take in that packets of an element moved."""
    old = shelf.get(element)
    if old is None:
        return shelf
    names = {
        name: replace(why, until=max(why.until, min(now + TTL_MIN + LINGER, why.asked + LONGEST)))
        for name, why in old.names.items()
    }
    return {**shelf, element: Grant(names, now)}


def standing(
    shelf: Shelf,
    now: float,
    permitted: Callable[[str, int], float | None],
    vet: Callable[[str], bool],
) -> tuple[dict[Element, Grant], list[Opened]]:
    """Leave out what is over, what is not permitted any more, and addresses that no name may open.

    Args:
        permitted: when the permission for a name on a port ends, ``inf``: not by itself; None: there is none.
        vet: whether a name may open an address.

    Returns:
        The shelf, and what the kernel is to have of it, used last first.
    """
    left: dict[Element, Grant] = {}
    rows: list[tuple[float, Opened]] = []
    for (address, port), grant in shelf.items():
        if not vet(address):
            continue
        names: dict[str, Reason] = {}
        end, first = now, ""
        for name, why in grant.names.items():
            allowed = permitted(name, port)
            ends = now if allowed is None else min(allowed, why.until)
            if ends <= now:
                continue
            names[name] = why
            end, first = max(end, ends), first or name
        if names:
            left[address, port] = replace(grant, names=names)
            rows.append((grant.used, Opened(address, port, first, end)))
    rows.sort(key=lambda row: (-row[0], row[1].address, row[1].port))
    return left, [row for _, row in rows]


def adopted(found: Iterable[tuple[Element, str, float]], now: float) -> dict[Element, Grant]:
    """Return the shelf of what stood before this service began: (element, name, seconds of life left)."""
    shelf: dict[Element, Grant] = {}
    for element, name, left in found:
        if left > 0 and len(shelf) < PER_CONTAINER:
            shelf[element] = Grant({name: Reason(now, now + min(left, LONGEST))}, now)
    return shelf
