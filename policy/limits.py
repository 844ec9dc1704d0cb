"""How much of the host a sandbox may use: what a policy says, as numbers. Pure."""

from __future__ import annotations

import re

# Below this not even the gate and a harness start.
LEAST_MEMORY = 128 << 20
MOST_MEMORY = 1 << 50
# What a container gets that names no amount: this part of the host's memory.
SHARE = (3, 4)

_MEMORY = re.compile(r"([0-9]{1,15})(?:\.([0-9]{1,3}))?\s?([kmgt])(?:i?b)?", re.IGNORECASE)
_UNITS = {"k": 10, "m": 20, "g": 30, "t": 40}


def parse_memory(text: str) -> int:
    """Return the bytes of "512m", "8g" or "1.5 GiB"; units are powers of 1024.

    Raises:
        ValueError: it is no amount with a unit, or beyond what makes sense.
    """
    found = _MEMORY.fullmatch(text.strip())
    if found is None:
        raise ValueError("not an amount of memory")
    whole, part, unit = found.groups()
    shift = _UNITS[unit.lower()]
    size = (int(whole) << shift) + (int(part) << shift) // 10 ** len(part) if part else int(whole) << shift
    if not LEAST_MEMORY <= size <= MOST_MEMORY:
        raise ValueError("less than 128m" if size < LEAST_MEMORY else "more than any machine has")
    return size


def default_memory(total: int) -> int:
    """Return the limit for a policy without one, in bytes, from the host's memory.

    What an agent starts must not push the host into swapping or choose among the user's own programs.
    """
    return max(LEAST_MEMORY, total * SHARE[0] // SHARE[1] >> 20 << 20)
