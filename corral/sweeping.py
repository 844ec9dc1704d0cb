"""What of a user's sandboxes is left over and what is not, decided from what there is. Pure.

A leftover is what nobody looks after: a container that has ended, or was made and never started, whose
command line is gone; a session's files without a container; networks and relays of sandboxes in which nothing
is left and that no command works with. What runs is none, whoever started it, but for the proxy of a sandbox
in which no session does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from policy.identity import Sandbox

RUNNING = frozenset({"running", "paused", "restarting"})
DEAD = frozenset({"exited", "dead", "created"})
RELAY = re.compile(r"corral-relay-([0-9a-f]{8})-[0-9]{1,5}\.service")


@dataclass(frozen=True)
class Container:
    """A session's container. ``held``: its command line lives. ``kept``: to be looked at after its end.

    ``left``: somebody left it running, and may want to read what it said. ``always_on``: it is an agent's of
    ``mode: daemon``. ``proxy``: it is none's, but its sandbox's proxy.
    """

    ident: str
    name: str
    sandbox: str
    session: str
    state: str
    held: bool = False
    kept: bool = False
    left: bool = False
    always_on: bool = False
    proxy: bool = False

    @property
    def running(self) -> bool:
        """Whether a program runs in it."""
        return self.state in RUNNING


@dataclass(frozen=True)
class Network:
    """A sandbox's network."""

    ident: str
    name: str
    sandbox: str


@dataclass(frozen=True)
class Directory:
    """The files of a session."""

    sandbox: str
    session: str
    held: bool = False


@dataclass(frozen=True)
class Image:
    """An image that corral built, or named: what can be removed of it, and whose it is."""

    names: tuple[str, ...]
    sandbox: str
    tagged: bool = True


@dataclass(frozen=True)
class Found:
    """What there is of one user.

    ``relays`` are names of units; ``busy`` ids of sandboxes that a command works with, ``known`` of those
    that have state; ``images`` those of this user's sandboxes, ``strange`` counts those of which nobody can
    tell; ``wanted`` are sandboxes that the policy of their directory still makes.
    """

    containers: tuple[Container, ...] = ()
    networks: tuple[Network, ...] = ()
    relays: tuple[str, ...] = ()
    directories: tuple[Directory, ...] = ()
    busy: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()
    images: tuple[Image, ...] = ()
    strange: int = 0
    wanted: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Kept:
    """Something that stays, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class Plan:
    """What goes, in this order, and what stays."""

    containers: tuple[Container, ...] = ()
    relays: tuple[str, ...] = ()
    networks: tuple[Network, ...] = ()
    directories: tuple[Directory, ...] = ()
    images: tuple[Image, ...] = ()
    kept: tuple[Kept, ...] = field(default=())

    @property
    def running(self) -> tuple[Container, ...]:
        """Those that have to be ended first; a proxy that nobody needs has nothing to end in order."""
        return tuple(one for one in self.containers if one.running and not one.proxy)


def decide(found: Found, *, running: bool = False, images: bool = False) -> Plan:
    """Decide what goes.

    Args:
        found: what there is.
        running: end and remove what runs, too, but for agents that are always on.
        images: remove images that no policy makes any more, too.
    """
    sessions = [one for one in found.containers if not one.proxy]
    ended = [one for one in sessions if _goes(one, running=running)]
    # What is ended lets go of its sandbox in a moment; it is looked at again then.
    ending = {one.sandbox for one in ended if one.running}
    busy = found.busy - ending
    needed = {one.sandbox for one in sessions if one.state not in DEAD and one not in ended} | busy
    unneeded = [one for one in found.containers if one.proxy and one.sandbox not in needed]
    going = (*ended, *unneeded)
    staying = [one for one in found.containers if one not in going]
    alive = {one.sandbox for one in staying} | busy
    tokens = _tokens(alive)
    with_container = {(one.sandbox, one.session) for one in staying}
    return Plan(
        containers=going,
        relays=tuple(unit for unit in found.relays if _token(unit) not in tokens),
        networks=tuple(net for net in found.networks if net.sandbox not in alive),
        directories=tuple(
            one
            for one in found.directories
            if (one.sandbox, one.session) not in with_container
            and (not one.held or any(_of(one, other) and other.running for other in going))
        ),
        images=tuple(_unused(found)) if images else (),
        kept=tuple(_kept(staying, found, images=images)),
    )


def unattended(found: Found) -> Plan:
    """Decide what goes when nobody is there to be told: at a start of the host service.

    Files of sessions stay: what a session changed of files that the host executes is told before they go. So
    do containers that a person may want to read, and what is of a sandbox without state here: whether a
    command works with it cannot be told.

    Args:
        found: what there is.
    """
    seen = replace(
        found,
        containers=tuple(
            replace(one, kept=one.kept or one.left or one.always_on)
            for one in found.containers
            if one.sandbox in found.known
        ),
        networks=tuple(net for net in found.networks if net.sandbox in found.known),
        relays=tuple(unit for unit in found.relays if _token(unit) in _tokens(found.known)),
    )
    return replace(decide(seen), directories=(), kept=())


def _goes(one: Container, *, running: bool) -> bool:
    if one.running:
        return running and not one.always_on
    return one.state in DEAD and not one.held and not one.kept


def _of(directory: Directory, container: Container) -> bool:
    return (directory.sandbox, directory.session) == (container.sandbox, container.session)


def _tokens(sandboxes: Iterable[str]) -> set[str]:
    return {Sandbox(sandbox).token for sandbox in sandboxes}


def _token(unit: str) -> str:
    match = RELAY.fullmatch(unit)
    return match[1] if match else ""


def _unused(found: Found) -> Iterator[Image]:
    for image in found.images:
        if not image.tagged or image.sandbox not in found.wanted:
            yield image


def _kept(staying: Sequence[Container], found: Found, *, images: bool) -> Iterator[Kept]:
    for one in staying:
        if one.proxy:
            # Whoever needs it stays, and is told of.
            continue
        if one.kept and not one.running and not one.held:
            yield Kept(one.name, "keep: true; corral inspect looks at it, corral down removes it")
        elif one.running and one.always_on:
            yield Kept(one.name, "its agent is always on; corral down ends it")
        elif one.running:
            yield Kept(one.name, "it runs; corral down ends it, or corral prune --running")
    if images and found.strange:
        count = "1 image" if found.strange == 1 else f"{found.strange} images"
        yield Kept(count, "whose they are cannot be told: docker image ls --filter label=io.corral.inputs")
