"""What is said of a sandbox whose policy says ``egress.mode: open``. Pure."""

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
        CorralError: the engine is the user's own, where it cannot be had.
    """
    if loaded.declaration.mode != OPEN:
        return
    if rootless:
        raise CorralError(
            "egress.mode: open needs an engine of the system: the gateway of a rootless one is in a "
            "namespace where names cannot be answered",
            "use egress.mode: allowlist, or Docker as a system service",
        )
    told(WARNING)
