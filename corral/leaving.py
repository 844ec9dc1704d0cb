"""What ``corral uninstall`` takes away and what it leaves, decided from what there is. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corral.inventory import Container, Image, Inventory, Network

RULES = (
    "chains CORRAL-*, rules with corral's mark in DOCKER-USER, INPUT, FORWARD and POSTROUTING, "
    "sets corral-*, table inet corral"
)


@dataclass(frozen=True)
class Survey:
    """What there is.

    ``others`` are users with corral installed, by uid; ``accounts`` says which uids have an account.
    ``docker`` is None while Docker does not answer, for the reason ``silent``. ``own`` are ids of sandboxes
    that have state. ``user_files`` and ``system`` are paths that exist; ``state`` and ``settings`` too.
    ``attached`` are bridges of sandboxes with a container on them. ``rootless`` says that corral is installed
    for an engine of the user's own, which runs, or would be; ``apart`` that it is for no other engine.
    """

    uid: int
    docker: Inventory | None
    silent: str = ""
    others: Mapping[int, str] = field(default_factory=dict)
    accounts: frozenset[int] = frozenset()
    own: frozenset[str] = frozenset()
    relays: tuple[str, ...] = ()
    user_files: tuple[Path, ...] = ()
    system: tuple[Path, ...] = ()
    state: tuple[Path, ...] = ()
    settings: tuple[Path, ...] = ()
    attached: tuple[str, ...] = ()
    rootless: bool = False
    apart: bool = False


@dataclass(frozen=True)
class Kept:
    """Something that stays, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class Leaving:
    """What will be done.

    ``system`` says whether the program for root runs, ``rules`` whether it removes rules and files. ``stuck``
    are bridges with containers that nobody can end while Docker does not answer. ``inside`` says that rules
    go from the namespace of the user's own engine.
    """

    containers: tuple[Container, ...] = ()
    networks: tuple[Network, ...] = ()
    images: tuple[Image, ...] = ()
    relays: tuple[str, ...] = ()
    user_files: tuple[Path, ...] = ()
    system: bool = False
    rules: bool = False
    system_files: tuple[Path, ...] = ()
    purged: tuple[Path, ...] = ()
    kept: tuple[Kept, ...] = ()
    running: tuple[str, ...] = ()
    others: tuple[int, ...] = ()
    stuck: tuple[str, ...] = ()
    inside: bool = False

    @property
    def nothing(self) -> bool:
        """Whether there is nothing to remove."""
        parts = (self.containers, self.networks, self.images, self.relays, self.user_files, self.purged)
        return not any(parts) and not self.system and not self.inside

    def rows(self) -> list[tuple[str, str]]:
        """Return (kind, name) of everything that goes, in the order in which it goes."""
        rows = [("container", container.name) for container in self.containers]
        rows += [("relay", unit) for unit in self.relays]
        rows += [("network", network.name) for network in self.networks]
        rows += [("image", ", ".join(image.names)) for image in self.images]
        rows += [("user", str(path)) for path in self.user_files]
        if self.inside:
            rows += [("rules", f"in your engine's namespace: {RULES}")]
        if self.rules:
            rows += [("rules", RULES)]
            rows += [("system", str(path)) for path in self.system_files]
        rows += [("state", str(path)) for path in self.purged]
        return rows


def decide(found: Survey, *, force: bool, purge: bool) -> Leaving:
    """Decide what goes.

    The system part goes with its last user. Containers and networks of uids without an account are nobody's
    and go with it; what belongs to other users stays, whatever else is asked for.

    Args:
        found: what there is.
        force: look for rules although no file is there: with the program for root or, for an engine apart, in
            its namespace.
        purge: the state goes too.
    """
    docker = found.docker or Inventory()
    others = {uid: name for uid, name in found.others.items() if uid != found.uid}
    for uid in docker.uids & found.accounts - {found.uid}:
        others.setdefault(uid, str(uid))
    last = not others
    gone = docker.uids - found.accounts if last else frozenset()
    mine = {found.uid, *gone}
    containers = tuple(thing for thing in docker.containers if thing.uid in mine)
    networks = tuple(thing for thing in docker.networks if thing.uid in mine)
    known = found.own | {c.sandbox for c in containers} | {n.sandbox for n in networks}
    named = [image for image in docker.images if image.names]
    images = tuple(image for image in named if last or _only(image, known))
    recorded = found.uid in found.others
    system = (bool(found.system) and (last or recorded)) or (force and last and not found.apart)
    purged = (*found.state, *found.settings) if purge else ()
    return Leaving(
        containers=containers,
        networks=networks,
        images=images,
        relays=found.relays,
        user_files=found.user_files,
        system=system,
        rules=system and last,
        system_files=found.system if last else (),
        purged=purged,
        kept=tuple(_kept(found, len(named) - len(images), others, purge=purge)),
        running=tuple(sorted(container.name for container in containers if container.alive)),
        others=tuple(sorted(docker.uids - {found.uid} - gone)),
        inside=found.rootless and (bool(found.user_files) or (force and found.apart)),
        stuck=found.attached if found.docker is None and system and last else (),
    )


def _only(image: Image, known: frozenset[str]) -> bool:
    return bool(image.sandboxes) and image.sandboxes <= known


def _kept(
    found: Survey,
    images: int,
    others: Mapping[int, str],
    *,
    purge: bool,
) -> list[Kept]:
    kept = []
    if found.docker is None:
        why = f"{found.silent}; when Docker runs again: corral uninstall"
        kept.append(Kept("containers, networks and images in Docker", why))
    if others:
        names = ", ".join(f"{name} (uid {uid})" for uid, name in sorted(others.items()))
        if found.system:
            kept.append(Kept("the system part (units, writer, rules)", f"{names} uses corral too"))
        if images:
            kept.append(Kept("1 image" if images == 1 else f"{images} images", "they may be another user's"))
    if not purge:
        for path in found.state:
            kept.append(Kept(str(path), "state; --purge removes it"))
        for path in found.settings:
            kept.append(Kept(str(path), "configuration; --purge removes it"))
    return kept


def refusal(plan: Leaving, *, force: bool) -> tuple[str, str] | None:
    """Return why it is not done now, and the way; None when nothing stands in it."""
    if plan.running and not force:
        count = "a sandbox is" if len(plan.running) == 1 else f"{len(plan.running)} sandboxes are"
        return (
            f"{count} running: {', '.join(plan.running)}",
            "end what runs (corral down), or end it with: corral uninstall --force",
        )
    if plan.stuck:
        return (
            f"containers are still on {', '.join(plan.stuck)}, and without Docker they cannot be ended",
            "systemctl start docker, then: corral uninstall --force",
        )
    return None


def text(plan: Leaving) -> str:
    """Return the plan as the user reads it."""
    lines = ["corral uninstall removes:"]
    lines += [f"  {kind:<9} {name}" for kind, name in plan.rows()]
    if plan.system:
        lines.append(
            "  with sudo: "
            + ("rules, units and files of the system" if plan.rules else "the note that you use corral")
        )
    if plan.kept:
        lines.append("and keeps:")
        lines += [f"  {kept.what}: {kept.why}" for kept in plan.kept]
    return "\n".join(lines)


def body(plan: Leaving, *, done: bool, removed: Sequence[str] = ()) -> dict[str, Any]:
    """Return the plan for programs.

    ``{"done": bool, "remove": [{"kind", "name"}], "keep": [{"what", "why"}], "running": [name], "removed":
    [text]}``; ``removed`` is what the program for root says it took away.
    """
    return {
        "done": done,
        "remove": [{"kind": kind, "name": name} for kind, name in plan.rows()],
        "keep": [{"what": kept.what, "why": kept.why} for kept in plan.kept],
        "running": list(plan.running),
        "removed": list(removed),
    }
