"""Opens addresses on demand: returns when the kernel was read back to hold them. ``granting``: for how long.

The service's loop writes; here is kept what it is to write, and who waits for it. What is permitted is judged
when something is written, and only then: a permission that is gone by that moment opens nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from math import inf
from typing import Literal

from enforcer import asking, granting
from enforcer.granting import Opened, Shelf
from enforcer.sessions import Session
from enforcer.writerclient import Entry, Held, rows_of

log = logging.getLogger("corral.enforcer")

Row = tuple[str, str, int, str]
PATIENCE = 8.0  # seconds
# What has less life left in the kernel is written again before it is told to anybody.
FRESH = 60.0
LOOK = 5.0
# When the life in the kernel comes to this, counters are looked at: what is in use lives on.
RENEW = 240.0
LONGEST_COMMENT = 200


class ClosedError(Exception):
    """Nothing was opened; ``kind`` is one of the dial socket's, ``text`` one line."""

    def __init__(self, kind: Literal["denied", "busy", "unready"], text: str) -> None:
        super().__init__(text)
        self.kind: Literal["denied", "busy", "unready"] = kind
        self.text = text


class Doors:
    """Owns what is open on demand. Runs on the service's loop.

    ``session`` returns a container that is known, ``dirty`` asks the service to write, ``until`` waits for a
    condition for some seconds and tells whether it came true.
    """

    def __init__(
        self,
        session: Callable[[str], Session | None],
        dirty: Callable[[], object],
        until: Callable[[Callable[[], bool], float], Awaitable[bool]],
        clock: Callable[[], float],
    ) -> None:
        self._session, self._dirty, self._until, self._clock = session, dirty, until, clock
        self._shelves: dict[str, Shelf] = {}
        self._judged: asking.Memory = {}
        self._asked = self._written = 0
        self._wanted: Collection[Row] = frozenset()
        self._ends: Mapping[Row, float] = {}
        self._held: set[Row] = set()
        self._looked = clock()

    async def open(
        self,
        container: str,
        name: str,
        ports: Iterable[int],
        addresses: Iterable[str],
        ttl: float,
        patience: float = PATIENCE,
    ) -> tuple[str, ...]:
        """Open vetted addresses of a name for a container; return those that are open on all ``ports``.

        Args:
            ttl: of the answer they are from, in seconds.
            patience: seconds that the writer may take.

        Raises:
            ClosedError: none of them is: it is not permitted (any more), there is no room, or the writer did
                not do it in time.
        """
        own, wanted = tuple(dict.fromkeys(ports)), tuple(dict.fromkeys(addresses))
        if granting.full(self._shelves.get(container, granting.EMPTY), own, wanted):
            # Before anything makes room: is it in use? Only counters that were read just now tell.
            await self._flush(patience)
        session = self._session(container)
        if session is None or session.problems:
            raise ClosedError("denied", "the container is gone, or is not what corral would have created")
        shelf = self._shelves.get(container, granting.EMPTY)
        self._shelves[container], fit = granting.ask(shelf, name, own, wanted, ttl, self._clock())
        if not fit:
            raise ClosedError("busy", f"{granting.PER_CONTAINER} addresses and ports are open and in use")
        rows = {address: {(session.address, "tcp", port, address) for port in own} for address in fit}
        if self._fresh(row for some in rows.values() for row in some):
            return fit
        mark = self._mark()

        def done() -> bool:
            if self._written < mark:
                return False
            kept = self._shelves.get(container, granting.EMPTY)
            waits = [row for some in rows.values() for row in some if row in self._wanted]
            return not kept or not waits or self._held.issuperset(waits)

        await self._until(done, patience)
        good = tuple(address for address in fit if self._written >= mark and rows[address] <= self._held)
        if good and self._stands(container, name, own, good[0]):
            return good
        if self._written < mark:
            raise ClosedError("unready", "the kernel could not be written in time")
        if not any(self._stands(container, name, own, address) for address in fit):
            raise ClosedError("denied", f"{name} is not allowed any more")
        if not any(row in self._wanted for some in rows.values() for row in some):
            raise ClosedError("busy", "the container has as many addresses as one may have")
        raise ClosedError("unready", "the kernel does not hold it yet")

    def _mark(self) -> int:
        self._asked += 1
        self._dirty()
        return self._asked

    async def _flush(self, patience: float) -> None:
        mark = self._mark()
        await self._until(lambda: self._written >= mark, patience)

    def _fresh(self, rows: Iterable[Row]) -> bool:
        soon = self._clock() + FRESH
        return all(row in self._held and self._ends.get(row, inf) > soon for row in rows)

    def _stands(self, container: str, name: str, ports: Iterable[int], address: str) -> bool:
        shelf = self._shelves.get(container, granting.EMPTY)
        return all((address, port) in shelf and name in shelf[address, port].names for port in ports)

    def report(self, container: str) -> list[dict[str, object]]:
        """Return what is open for a container and for which names, for the status."""
        shelf = self._shelves.get(container, granting.EMPTY)
        return [
            {"address": address, "port": port, "names": sorted(shelf[address, port].names)}
            for address, port in sorted(shelf)
        ]

    # -- what the service's loop asks

    def wanted(
        self, sessions: Collection[Session], vet: Callable[[str], bool]
    ) -> tuple[int, dict[str, list[Opened]]]:
        """Return what the kernel is to have by now: container id -> elements, used last first.

        What is not permitted by these sessions, or over, is forgotten. The number goes to ``wrote``.
        """
        now, permission = self._clock(), asking.permission(sessions, self._judged)
        shelves: dict[str, Shelf] = {}
        rows: dict[str, list[Opened]] = {}
        for session in sessions:
            shelf = self._shelves.get(session.container)
            if not shelf or session.problems:
                continue
            left, opened = granting.standing(shelf, now, permission(session), vet)
            if left:
                shelves[session.container], rows[session.container] = left, opened
        self._shelves = shelves
        return self._asked, rows

    def wrote(self, mark: int, wanted: Collection[Row], ends: Mapping[Row, float], held: Held) -> None:
        """Take in that the kernel was written and read back; ``ends``: when each element ends there."""
        self._written, self._wanted, self._ends = mark, wanted, ends
        self._held, self._looked = rows_of(held.pins), self._clock()

    def unsure(self) -> None:
        """Take in that nobody knows what the kernel holds."""
        self._held = set()

    def used(self, container: str, address: str, port: int) -> None:
        """Take in that packets of an element moved."""
        shelf = self._shelves.get(container)
        if shelf is not None:
            self._shelves[container] = granting.used(shelf, (address, port), self._clock())

    def adopt(
        self, found: Iterable[Entry], sessions: Collection[Session], vet: Callable[[str], bool]
    ) -> None:
        """Take over what stood before this service began: streams that it opened live on.

        Only what is permitted now and could be opened now, for the life that it has left in the kernel.
        """
        by_address = {s.address: s for s in sessions if not s.problems and (s.proxy or s.answered)}
        permission, now = asking.permission(sessions), self._clock()
        standing: dict[str, list[tuple[granting.Element, str, float]]] = {}
        for entry in found:
            session = by_address.get(entry.src)
            prefix, _, name = entry.comment.rpartition(" ")
            # One that was cut short may end in another name than it was opened for.
            if session is None or entry.proto != "tcp" or len(entry.comment) >= LONGEST_COMMENT:
                continue
            own = prefix == f"{session.sandbox.id} {session.service}"
            pinned = any(known.host == name for known in session.names)
            if own and not pinned and vet(entry.dst) and permission(session)(name, entry.port) is not None:
                row = ((entry.dst, entry.port), name, float(entry.timeout))
                standing.setdefault(session.container, []).append(row)
        for container, rows in standing.items():
            self._shelves[container] = granting.adopted(rows, now)

    async def forever(self) -> None:
        """See that what ends is taken back, and that what is in use does not end."""
        while True:
            await asyncio.sleep(LOOK)
            if self._due():
                self._dirty()

    def _due(self) -> bool:
        now = self._clock()
        for container, shelf in self._shelves.items():
            session = self._session(container)
            for (address, port), grant in shelf.items():
                until = max(why.until for why in grant.names.values())
                if until <= now or session is None:
                    return True
                end = self._ends.get((session.address, "tcp", port, address), inf)
                if end - now < RENEW and (until > end + 1 or now - self._looked > FRESH):
                    return True
        return False

    def counts(self) -> dict[str, int]:
        """Return how many elements are open for each container."""
        return {container: len(shelf) for container, shelf in self._shelves.items()}
