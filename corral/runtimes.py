"""Which program runs containers: whether the engine knows it, and what it takes from the checks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policy.errors import EngineError

RUNC = "runc"
CONFIGURATION = "/etc/docker/daemon.json"


def insist(runtime: str, info: Mapping[str, Any]) -> None:
    """Refuse a runtime that the engine has not.

    Args:
        runtime: as the policy names it.
        info: Docker's ``GET /info``.

    Raises:
        EngineError: with how it is made known.
    """
    known = sorted(info.get("Runtimes") or {}) or ["none"]
    if runtime not in known:
        raise EngineError(
            f"Docker has no runtime {runtime}, which the policy asks for; it has {', '.join(known)}",
            f'install it, then in {CONFIGURATION}: {{"runtimes": {{"{runtime}": {{"path": "..."}}}}}}, and: '
            "sudo systemctl reload docker; or remove runtime from corral.yaml",
        )


def warnings(runtime: str) -> tuple[str, ...]:
    """Return what has to be said of a runtime at every start; nothing of Docker's own."""
    if runtime == RUNC:
        return ()
    return (
        f"runtime {runtime}: corral was never tried with it; the network's fence is at the host's end",
        "  with a kernel of its own inside, these cannot be seen from there: whether a mounted directory was",
        "  exchanged in the moment of the start, system calls that are refused, the packet filter, limits",
    )


def field(runtime: str) -> str:
    """Return what a container's configuration says: nothing for Docker's own."""
    return "" if runtime == RUNC else runtime
