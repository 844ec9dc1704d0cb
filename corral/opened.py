"""What is said of a sandbox whose policy says ``egress.mode: open``, or wants names answered. Pure."""

from __future__ import annotations

from collections.abc import Callable

from policy.declaration import OPEN
from policy.errors import CorralError
from policy.loader import LoadedPolicy

WARNING = (
    "egress.mode is open: the agent reaches every public address, and can send there what it can read. "
    "This host, private networks and cloud metadata stay closed"
)


def warn(loaded: LoadedPolicy, told: Callable[[str], None], *, rootless: bool) -> None:
    """Say what an open policy means, each time.

    Raises:
        CorralError: the engine is the user's own, where names are not answered.
    """
    if rootless and loaded.declaration.answered:
        key = "egress.mode: open" if loaded.declaration.mode == OPEN else "egress.dns: answer"
        fix = "use egress.mode: allowlist" if loaded.declaration.mode == OPEN else "remove it"
        raise CorralError(
            f"{key} needs an engine of the system: the gateway of a rootless one is in a "
            "namespace where names cannot be answered",
            f"{fix}, or use Docker as a system service",
        )
    if loaded.declaration.mode == OPEN:
        told(WARNING)
