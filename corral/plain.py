"""Text that others decide about, made harmless for a terminal. Pure.

Names, addresses and reasons come from policies, DNS servers, Docker and sandboxes. What could move the
cursor, change colours, reverse the direction of writing or hide itself is shown as an escape instead.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any


def plain(text: str) -> str:
    r"""Return ``text`` with what does not simply print as ``\x1b``, ``\u202e`` or ``\U000e0001``."""
    return "".join(char if _prints(char) else _escaped(char) for char in text)


# Controls, C1 too, and what reverses the direction of writing; a carriage return that ends a line is none.
_COMMANDS = re.compile(
    "(?P<colour>\x1b\\[[0-9;:]*m)"
    "|\r(?!\n|\\Z)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)


def terminal_safe(text: str, *, colour: bool = False) -> str:
    """Return output without what commands a terminal; ``colour``: colours stay.

    The last thing before anything is written: more than ``plain`` stays, such as lines and what accents and
    emoji are made of, because it is for texts that are whole.
    """
    return _COMMANDS.sub(
        lambda match: match[0] if colour and match["colour"] else "".join(map(_spelled, match[0])), text
    )


def _spelled(char: str) -> str:
    return char if char.isprintable() else _escaped(char)


def _prints(char: str) -> bool:
    return char.isprintable() and not unicodedata.combining(char)


def _escaped(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def cleaned(value: Any) -> Any:
    """Return JSON-able values with every text in them plain."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, Mapping):
        return {plain(str(key)): cleaned(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [cleaned(item) for item in value]
    return value


def width(text: str) -> int:
    """Return how many cells plain text takes."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def columns(rows: Sequence[Sequence[str]], widths: Sequence[int] = ()) -> list[str]:
    """Return rows as lines with aligned columns, at least as wide as ``widths``."""
    if not rows:
        return []
    needed = widths_of(rows, widths)
    return [
        "  ".join(_padded(cell, size) for cell, size in zip(row, needed, strict=True)).rstrip()
        for row in rows
    ]


def widths_of(rows: Sequence[Sequence[str]], widths: Sequence[int] = ()) -> list[int]:
    """Return the width that each column needs."""
    least = list(widths) or [0] * len(rows[0])
    return [max(size, *(width(row[index]) for row in rows)) for index, size in enumerate(least)]


def _padded(cell: str, size: int) -> str:
    return cell + " " * (size - width(cell))
