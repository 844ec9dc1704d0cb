"""Which names an address was ever an answer for, whether that answer was used or refused. Pure.

It outlives the names it knows: a name that was taken out of a policy, or whose sandbox is gone, is what
people look for when they see an address. Bounded: the addresses that were not seen for longest go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from enforcer.pinmodel import Record

VERSION = 1
ADDRESSES = 4096
NAMES = 4


@dataclass(frozen=True)
class Known:
    """A name that had an address in an answer; ``refused`` is why that answer was not used, or empty."""

    name: str
    refused: str = ""


class AddressBook:
    """Addresses with the names that resolved to them, the latest first. ``moved``: something was added."""

    def __init__(self) -> None:
        self.moved = False
        self._names: OrderedDict[str, tuple[Known, ...]] = OrderedDict()
        self._learnt: dict[str, Record] = {}

    def learn(self, records: Mapping[str, Record]) -> None:
        """Take in what the pinning engine knows now; what did not change costs a comparison."""
        for name, record in records.items():
            old = self._learnt.get(name)
            if old is record:
                continue
            if old is None or (old.pins.keys(), old.refused) != (record.pins.keys(), record.refused):
                for address in record.pins:
                    self._put(address, Known(name))
                for address, reason in record.refused.items():
                    self._put(address, Known(name, reason))
        self._learnt = dict(records)

    def note(self, name: str, addresses: Iterable[str], refused: str = "") -> None:
        """Take in an answer for a name that is in no policy."""
        for address in addresses:
            self._put(address, Known(name, refused))

    def _put(self, address: str, known: Known) -> None:
        before = self._names.pop(address, ())
        others = (other for other in before if other.name != known.name)
        after = (known, *others)[:NAMES]
        self._names[address] = after
        self.moved = self.moved or after != before
        while len(self._names) > ADDRESSES:
            self._names.popitem(last=False)

    def names(self, address: str) -> tuple[Known, ...]:
        """Return the names an address is known under."""
        return self._names.get(address, ())

    def save(self) -> dict[str, Any]:
        """Return the book as plain JSON values."""
        self.moved = False
        rows = {address: [[k.name, k.refused] for k in known] for address, known in self._names.items()}
        return {"version": VERSION, "addresses": rows}

    def restore(self, saved: Any) -> None:
        """Read what ``save`` returned; what is odd is left out, because it is only for people to read."""
        body = saved if isinstance(saved, dict) and saved.get("version") == VERSION else {}
        rows = body.get("addresses")
        for address, known in rows.items() if isinstance(rows, dict) else ():
            for name, refused in reversed(list(_pairs(known))):
                self._put(str(address), Known(name, refused))
        self.moved = False


def _pairs(rows: Any) -> Iterable[tuple[str, str]]:
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, list) and len(row) == 2 and all(isinstance(text, str) for text in row):
            yield row[0], row[1]
