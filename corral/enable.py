"""``corral enable`` and ``corral disable``: whether a sandbox's agent comes back with the machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from corral import units
from corral.context import Invocation
from corral.down import of_directory
from corral.up import refuse_run
from policy.identity import Sandbox


@dataclass(frozen=True)
class Enabled:
    """A unit that was enabled. ``growing``: its pauses between restarts grow."""

    sandbox: Sandbox
    unit: str
    program: str
    systemd: int
    lingers: bool

    @property
    def growing(self) -> bool:
        """Whether this systemd can let pauses grow."""
        return self.systemd >= units.GROWING


def enable(invocation: Invocation, warn: Callable[[str], None]) -> Enabled:
    """Write, enable and start the unit of this directory's sandbox; it takes over what is up already.

    Raises:
        PolicyError: the policy is invalid, not approved, or its agent is not always on.
        CorralError: corral has no path that stays, or the agent did not come up.
    """
    refuse_run(invocation, "enable")
    loaded, user = invocation.approved, invocation.user
    manager = units.Manager(user)
    # Whoever works in the project writes it, mounted or not.
    writable = (loaded.project, *loaded.rw)
    path = units.program(user.environ, writable)
    version = manager.version()
    found = Enabled(loaded.sandbox, units.unit_of(loaded.sandbox), path, version, units.lingers(user.uid))
    if not found.lingers:
        warn(f"without a login your units do not run, not even after a reboot: {units.linger_fix(user.uid)}")
    if not found.growing:
        warn(
            f"systemd {version} cannot let the pauses between restarts grow ({units.GROWING} can): "
            f"they are {units.FIXED} s each"
        )
    with invocation.console.step("unit"):
        manager.write(loaded.sandbox, units.text(loaded, path, user.environ, version, writable))
        manager.start(loaded.sandbox)
    return found


def told(found: Enabled) -> str:
    """Return what ``corral enable`` prints."""
    pauses = f"{units.FIRST} s to {units.LONGEST} s" if found.growing else f"{units.FIXED} s"
    return (
        f"{found.sandbox.id} is up and comes back with the machine: {found.unit} runs {found.program}\n"
        f"  when its agent ends it is started again after a pause ({pauses})\n"
        f"  corral down ends it until the next boot, corral disable for good"
    )


def body(found: Enabled) -> dict[str, Any]:
    """Return the same for programs."""
    return {
        "sandbox": found.sandbox.id,
        "unit": found.unit,
        "program": found.program,
        "lingers": found.lingers,
        "restart_seconds": [units.FIRST, units.LONGEST] if found.growing else [units.FIXED, units.FIXED],
    }


def disable(invocation: Invocation) -> list[str]:
    """Take this directory's sandboxes out of the boot; return the units that were. What runs goes on.

    Raises:
        PolicyError: there is no sandbox here.
    """
    manager = units.Manager(invocation.user)
    return [units.unit_of(sandbox) for sandbox in of_directory(invocation) if manager.disable(sandbox)]


def told_disabled(found: Sequence[str]) -> str:
    """Return what ``corral disable`` prints of these units."""
    lines = [f"{unit} does not start any more with the machine" for unit in found]
    return "\n".join(lines) or "nothing to do: nothing of this directory starts with the machine"
