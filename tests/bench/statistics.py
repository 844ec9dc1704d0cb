"""What is told of a series of measurements. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that at least ``part`` (0 to 1) of all values do not exceed (nearest rank).

    Raises:
        ValueError: there is none.
    """
    if not values:
        raise ValueError("nothing was measured")
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Return median, 99th percentile and maximum in milliseconds."""
    parts = {"p50_ms": 0.5, "p99_ms": 0.99, "max_ms": 1.0}
    return {name: round(1000 * percentile(seconds, part), 1) for name, part in parts.items()}
