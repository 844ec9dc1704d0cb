"""What follows from a state of the pinning engine: kernel entries, hosts lines, readiness, status. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import zip_longest

from enforcer.pinmodel import Container, NameState, Record, Settings, State, Wish, address_order


@dataclass(frozen=True, slots=True)
class Grant:
    """One address that a name opens, on these TCP ports."""

    address: str
    ports: tuple[int, ...]


@dataclass(frozen=True)
class Readiness:
    """May a container start? ``pending`` names have not been tried yet; the others carry the reason."""

    pending: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]
    warnings: tuple[tuple[str, str], ...]

    @property
    def ready(self) -> bool:
        return not self.pending and not self.failed


@dataclass(frozen=True)
class NameStatus:
    """One name of one container. ``lingering``: allowed, no longer in the latest answer. Times in seconds."""

    name: str
    state: NameState
    addresses: tuple[str, ...]
    lingering: tuple[str, ...]
    age: float | None
    next_refresh: float | None
    error: str | None
    optional: bool


@dataclass(frozen=True, slots=True)
class _Share:
    """What one container gets of one name: three disjoint parts, each in numeric order."""

    head: tuple[str, ...]
    rest: tuple[str, ...]
    lingering: tuple[str, ...]


def allowed(state: State) -> dict[str, dict[str, tuple[Grant, ...]]]:
    """Return what the kernel should hold: container id -> name -> grants, sorted, each name present.

    Two names of one container may hold the same address: a kernel entry goes when the last of them has gone.
    """
    return {
        container.id: {
            wish.name: tuple(
                Grant(address, wish.ports)
                for address in sorted((*share.head, *share.rest, *share.lingering), key=address_order)
            )
            for wish, share in _shares(state, container)
        }
        for container in state.containers.values()
    }


def published(
    state: State, live: Mapping[str, AbstractSet[tuple[str, int]]] | None = None
) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return what hosts files should say: container id -> name -> addresses, sorted.

    With ``live`` (container id -> (address, port) pairs as read back from the kernel) an address is published
    only when the kernel has each of its ports.
    """

    def seen(container: str, address: str, wish: Wish) -> bool:
        return live is None or {(address, port) for port in wish.ports} <= live.get(container, frozenset())

    return {
        container.id: {
            wish.name: tuple(address for address in share.head if seen(container.id, address, wish))
            for wish, share in _shares(state, container)
        }
        for container in state.containers.values()
    }


def readiness(state: State, container: str, allow_stale: bool = False) -> Readiness:
    """Say whether a container that has not started may start; meaningless later on. KeyError: unknown."""
    subscriber = state.containers[container]
    pending: list[str] = []
    failed: list[tuple[str, str]] = []
    warnings: list[tuple[str, str]] = []
    for wish, share in _shares(state, subscriber):
        record = state.names[wish.name]
        if record.state is NameState.OK:
            if not share.head:
                limit = state.settings.entries_per_container
                failed.append((wish.name, f"over the limit of {limit} addresses and ports of one container"))
            elif record.error is not None:
                warnings.append((wish.name, record.error))
        elif record.attempts == subscriber.asked[wish.name]:
            pending.append(wish.name)
        else:
            usable = allow_stale and record.state is NameState.STALE and share.head
            reason = (wish.name, record.error or record.state.value)
            (warnings if usable or wish.optional else failed).append(reason)
    return Readiness(tuple(pending), tuple(failed), tuple(warnings))


def status(state: State, container: str, now: float) -> tuple[NameStatus, ...]:
    """Return the names of one container, withdrawn ones last. KeyError: unknown container."""
    subscriber = state.containers[container]
    rows = []
    for wish, share in _shares(state, subscriber):
        record = state.names[wish.name]
        rows.append(
            NameStatus(
                name=wish.name,
                state=record.state,
                addresses=tuple(sorted((*share.head, *share.rest), key=address_order)),
                lingering=share.lingering,
                age=None if record.answered_at is None else now - record.answered_at,
                next_refresh=0.0 if record.inflight is not None else max(0.0, record.due - now),
                error=record.error,
                optional=wish.optional,
            )
        )
    for name in subscriber.revoked:
        error = "withdrawn from the policy"
        rows.append(NameStatus(name, NameState.REVOKED, (), (), None, None, error, optional=False))
    return tuple(rows)


def wanted(state: State) -> set[str]:
    """Return the names that a container has; the others are remembered only."""
    return {name for container in state.containers.values() for name in container.asked}


def next_due(state: State) -> float | None:
    """Return when the next Tick has something to do; None: not before another event."""
    settings = state.settings
    known = wanted(state)
    times = [lease.until for lease in state.leases.values()]
    for record in state.names.values():
        if record.inflight is not None:
            times.append(record.asked_at + settings.query_lost)
            continue
        if record.name not in known:
            times.append(record.due + settings.linger)
            continue
        times.append(record.due)
        if record.frozen_since is not None:
            times.append((record.answered_at or record.frozen_since) + settings.stale_limit)
            continue
        for address, pin in record.pins.items():
            if address not in record.latest:
                times.append(pin.until)
            elif record.state is NameState.REFUSED:
                times.append(pin.until - settings.linger)
    return min(times, default=None)


def _shares(state: State, container: Container) -> list[tuple[Wish, _Share]]:
    """Fit a container's names into its limit of entries.

    Every name gets its first address before any gets its second, what would be published before the rest of
    the latest answers, and these before what lingers. An entry is an (address, port) pair, counted once.
    """
    leased: dict[str, set[str]] = {}
    for subscriber, name, address in state.leases:
        if subscriber == container.id:
            leased.setdefault(name, set()).add(address)
    candidates = [
        _candidates(state.settings, state.names[wish.name], leased.get(wish.name, set()))
        for wish in container.wishes
    ]
    limit = state.settings.entries_per_container
    entries: set[tuple[str, int]] = set()
    chosen: list[tuple[list[str], ...]] = [([], [], []) for _ in candidates]
    for part in range(3):
        for row in zip_longest(*(candidate[part] for candidate in candidates)):
            for index, address in enumerate(row):
                if address is None:
                    continue
                new = {(address, port) for port in container.wishes[index].ports} - entries
                if len(entries) + len(new) <= limit:
                    entries |= new
                    chosen[index][part].append(address)
    return [
        (wish, _Share(*(tuple(sorted(part, key=address_order)) for part in parts)))
        for wish, parts in zip(container.wishes, chosen, strict=True)
    ]


def _candidates(settings: Settings, record: Record, leased: set[str]) -> tuple[tuple[str, ...], ...]:
    """Split a name's addresses into published, rest of latest, lingering: in use first, then youngest."""

    def rank(address: str) -> tuple[bool, float, int]:
        pin = record.pins.get(address)
        return address not in leased, -pin.last_seen if pin is not None else 0.0, address_order(address)

    latest = record.latest
    lingering = sorted((leased | record.pins.keys()) - set(latest), key=rank)
    published_part = latest[: settings.published_per_name]
    return (
        published_part,
        latest[len(published_part) :],
        tuple(lingering[: settings.allowed_per_name - len(latest)]),
    )
