"""Whether the limits of the container are in force, as its own control group and process say."""

from __future__ import annotations

import mmap
import resource

from .outcome import Failed, Skipped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .expectations import Expectations
    from .system import System

CGROUP = "/sys/fs/cgroup"
UNLIMITED = float("inf")
# Control groups of version 1 print the largest number of pages instead of "max".
V1_UNLIMITED = 1 << 60


def limits(expected: Expectations, system: System) -> str:
    """Each limit that was asked for is the one in force; one whose controller is missing may be excused."""
    wrong, missing, right = [], [], []
    for name, wanted in sorted(expected.limits.items()):
        found = MEASURES[name](system)
        if found is None:
            missing.append(name)
        elif abs(found - wanted) > TOLERANCE[name]:
            wrong.append(f"{name} is {_shown(found)}, not {_shown(wanted)}")
        else:
            right.append(f"{name} {_shown(wanted)}")
    if missing and not expected.limits_best_effort:
        wrong.append(f"nothing limits {', '.join(missing)}: its controller is missing here")
    if wrong:
        raise Failed("; ".join(wrong))
    if missing:
        raise Skipped(f"no controller for {', '.join(missing)} here (limits.best_effort); {', '.join(right)}")
    return ", ".join(right)


def _shown(value: float) -> str:
    return "unlimited" if value == UNLIMITED else f"{value:g}" if value < 1000 else f"{value:.0f}"


def _number(text: str) -> float:
    words = text.split()
    if not words or words[0] in {"max", "-1"}:
        return UNLIMITED
    value = int(words[0])
    return UNLIMITED if value >= V1_UNLIMITED else float(value)


def _first(system: System, *names: str) -> str | None:
    """Return the text of the first of these files that is there."""
    for name in names:
        if system.there(f"{CGROUP}/{name}"):
            return system.read(f"{CGROUP}/{name}")
    return None


def _pids(system: System) -> float | None:
    text = _first(system, "pids.max", "pids/pids.max")
    return None if text is None else _number(text)


def _memory(system: System) -> float | None:
    text = _first(system, "memory.max", "memory/memory.limit_in_bytes")
    return None if text is None else _number(text)


def _cpus(system: System) -> float | None:
    text = _first(system, "cpu.max")
    if text is None:
        quota, period = _first(system, "cpu/cpu.cfs_quota_us"), _first(system, "cpu/cpu.cfs_period_us")
        if quota is None or period is None:
            return None
        text = f"{quota.strip()} {period.strip()}"
    return _number(text) / int(text.split()[1])


def _nofile(system: System) -> float:
    soft, hard = system.open_files()
    # A soft limit below the hard one could be raised by the agent itself.
    return UNLIMITED if resource.RLIM_INFINITY in {soft, hard} else float(max(soft, hard))


MEASURES: dict[str, Callable[[System], float | None]] = {
    "pids": _pids,
    "memory": _memory,
    "cpus": _cpus,
    "nofile": _nofile,
}
# The kernel counts memory in pages.
TOLERANCE = {"pids": 0.0, "memory": float(mmap.PAGESIZE), "cpus": 0.01, "nofile": 0.0}
