"""Limits that hold: what of them this host can keep, and what Docker says it left out. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from policy.container import Limits
from policy.errors import EngineError, PolicyError
from policy.schema import Limits as Wanted

BEST_EFFORT = "accept it: limits.best_effort: true in corral.yaml"
FIX = f"give this host the controller (docker info lists what is missing), or {BEST_EFFORT}"
# Part of a warning of Docker's, in lower case -> the cgroup controller that is missing.
DISCARDED = {"pids limit": "pids", "memory limit capabilities": "memory", "cpu": "cpu"}
# The memory itself is limited; that swap is not counted with it is for the host's comfort only.
HARMLESS = "swap limit"


def possible(wanted: Wanted, memory_total: int, info: Mapping[str, Any] | None) -> tuple[Limits, list[str]]:
    """Return the limits to ask for, and what the user has to know.

    Args:
        wanted: the policy's.
        memory_total: the host's memory in bytes.
        info: Docker's ``GET /info``; needed when ``wanted`` limits processors, which Docker refuses outright
            where it cannot.

    Raises:
        PolicyError: more processors than there are.
        EngineError: there is no controller for the processors, and the policy does not accept that.
    """
    limits = wanted.container(memory_total)
    if not limits.nano_cpus or info is None:
        return limits, []
    if not (info.get("CpuCfsPeriod") and info.get("CpuCfsQuota")):
        if not wanted.best_effort:
            raise EngineError("limits.cpus cannot be kept: the cgroup controller cpu is missing", FIX)
        told = "limits.cpus is not kept: the cgroup controller cpu is missing"
        return replace(limits, nano_cpus=0), [told]
    there = int(info.get("NCPU") or 0)
    if there and limits.nano_cpus > there * 10**9:
        raise PolicyError(
            f"limits.cpus: {wanted.cpus:g} processors, and this host has {there}", f"at most {there}"
        )
    return limits, []


def judge_warnings(what: str, warnings: Sequence[str] | None, *, best_effort: bool) -> list[str]:
    """Look at what Docker says it left out; nothing of it is dropped silently.

    Args:
        what: what was created.
        warnings: those of the create response.
        best_effort: the policy accepts a limit that cannot be kept.

    Returns:
        what the user has to know: limits that this host cannot keep.

    Raises:
        EngineError: a limit was discarded that must hold, or anything else was left out.
    """
    told, missing, serious = [], [], []
    for warning in warnings or ():
        text = warning.lower()
        if HARMLESS in text:
            continue
        controller = next((name for part, name in DISCARDED.items() if part in text), None)
        if controller is None:
            serious.append(warning)
        elif best_effort:
            told.append(f"{what} has no limit that needs the cgroup controller {controller}: {warning}")
        else:
            missing.append((controller, warning))
    if serious:
        raise EngineError(
            f"Docker did not create {what} as asked: " + "; ".join(serious),
            "enable what is missing in the kernel or its cgroup controllers; docker info lists it",
        )
    if missing:
        names = ", ".join(controller for controller, _ in missing)
        said = "; ".join(warning for _, warning in missing)
        raise EngineError(
            f"Docker would run {what} without its limits; cgroup controllers are missing: {names} ({said})",
            FIX,
        )
    return told
