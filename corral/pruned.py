"""What ``corral prune`` did or would do, for people and programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from corral.sweeping import Kept, Plan
from policy.identity import StatePaths


@dataclass(frozen=True)
class Thing:
    """One thing that was removed, would be, or could not be (``why``)."""

    kind: str
    name: str
    sandbox: str = ""
    why: str = ""

    def line(self) -> str:
        """Return it as the user reads it."""
        return f"{self.kind} {self.name}"


@dataclass
class Outcome:
    """What was done. ``docker`` says why nothing could be."""

    dry_run: bool = False
    docker: str | None = None
    removed: list[Thing] = field(default_factory=list)
    left: list[Thing] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)

    def body(self) -> dict[str, Any]:
        """Return it for programs."""
        return {
            "dry_run": self.dry_run,
            "docker": self.docker,
            "removed": [{"kind": one.kind, "name": one.name, "sandbox": one.sandbox} for one in self.removed],
            "left": [asdict(one) for one in self.left],
            "kept": [asdict(one) for one in self.kept],
        }


def planned(plan: Plan, paths: Callable[[str], StatePaths]) -> list[Thing]:
    """Return what would be removed."""
    return [
        *(Thing("container", one.name, one.sandbox) for one in plan.containers),
        *(Thing("relay", unit) for unit in plan.relays),
        *(Thing("network", net.name, net.sandbox) for net in plan.networks),
        *(
            Thing("session", str(paths(place.sandbox).session(place.session)), place.sandbox)
            for place in plan.directories
        ),
        *(Thing("image", ", ".join(image.names), image.sandbox) for image in plan.images),
    ]


def render(outcome: Outcome, *, quiet: bool = False) -> str:
    """Return what is printed in the end: what would go, what stays, what could not be removed.

    ``quiet``: nothing where there was nothing to do.
    """
    if outcome.docker is not None:
        return f"nothing was done: {outcome.docker}"
    lines = [f"would remove {thing.line()}" for thing in outcome.removed] if outcome.dry_run else []
    lines += [f"left {thing.line()}: {thing.why}" for thing in outcome.left]
    lines += [f"kept {kept.what}: {kept.why}" for kept in outcome.kept]
    if not outcome.removed and not outcome.left and not quiet:
        lines.append("nothing is left over")
    return "\n".join(lines)
