"""Names and the addresses they may be reached at: the pinning engine. Pure: ``step(state, event, now)``.

Words: *latest* is the most recent vetted answer of a name; *allowed* is what the kernel should hold for a
container and a name; *published* is what the container's hosts file should say. Two invariants hold in every
state: published ⊆ latest ⊆ allowed for each container, and nothing is allowed that was not in a vetted answer
for a name in that container's own policy.

An address that leaves *latest* leaves *published* at once and *allowed* only when its time is over, so flows
that are open go on; while such an address still carries packets it is leased to the container that uses it.
Revoking (policy narrowed, address now vetted differently, container gone) is immediate everywhere.

This module is the engine's front door: data is in ``pinmodel``, what follows from a state in ``pinviews``,
the saved form in ``pinstore``; all of it can be imported from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from enforcer.pinmodel import (
    Action,
    Answer,
    Answered,
    Container,
    Event,
    Failed,
    Failure,
    InUse,
    Lease,
    NameState,
    Notice,
    NoticeKind,
    Pin,
    Query,
    Record,
    Refresh,
    Remembered,
    Settings,
    State,
    Subscribe,
    Tick,
    Unsubscribe,
    VettingChanged,
    Wish,
    address_order,
)
from enforcer.pinstore import restore, save
from enforcer.pinviews import (
    Grant,
    NameStatus,
    Readiness,
    allowed,
    next_due,
    published,
    readiness,
    status,
    wanted,
)
from enforcer.vetting import Vetting

__all__ = [
    "Action",
    "Answer",
    "Answered",
    "Container",
    "Event",
    "Failed",
    "Failure",
    "Grant",
    "InUse",
    "Lease",
    "NameState",
    "NameStatus",
    "Notice",
    "Pin",
    "Query",
    "Readiness",
    "Record",
    "Refresh",
    "Settings",
    "State",
    "Subscribe",
    "Tick",
    "Unsubscribe",
    "VettingChanged",
    "Wish",
    "allowed",
    "next_due",
    "published",
    "readiness",
    "restore",
    "save",
    "status",
    "step",
    "wanted",
]

# Answers that say the name has no address; the other kinds say that nobody could be asked.
_ABSENT = ("nxdomain", "empty")


def step(
    state: State, event: Event, now: float, random: Callable[[], float] = lambda: 0.0
) -> tuple[State, tuple[Action, ...]]:
    """Apply one event. ``random`` returns a number in [0, 1) and is used for jitter only."""
    work = _Step(state, now, random)
    match event:
        case Subscribe():
            work.subscribe(event)
        case Unsubscribe():
            work.unsubscribe(event.container)
        case Answered():
            work.answered(event)
        case Failed():
            work.failed(event)
        case VettingChanged():
            work.vet_again(event.vetting)
        case InUse():
            work.in_use(event.container, event.address)
            return work.result()
        case Refresh():
            work.refresh(event)
        case Tick():
            pass
    work.settle()
    return work.result()


class _Step:
    """One transition under construction: copies of the maps, changed in place, handed out once."""

    def __init__(self, state: State, now: float, random: Callable[[], float]) -> None:
        self.before = state
        self.settings = state.settings
        self.vetting = state.vetting
        self.now = now
        self.random = random
        self.names = dict(state.names)
        self.containers = dict(state.containers)
        self.leases = dict(state.leases)
        self.remembered = dict(state.remembered)
        self.token = state.token
        self.changed = False
        self.actions: list[Action] = []

    def result(self) -> tuple[State, tuple[Action, ...]]:
        state = replace(
            self.before,
            vetting=self.vetting,
            names=self.names,
            containers=self.containers,
            leases=self.leases,
            remembered=self.remembered,
            token=self.token,
            generation=self.before.generation + self.changed,
        )
        return state, tuple(self.actions)

    def put(self, record: Record) -> None:
        old = self.names.get(record.name)
        if old is None or old.latest != record.latest or old.pins.keys() != record.pins.keys():
            self.changed = True
        elif old.attempts != record.attempts:
            # A container that waited for this name, and for nothing it can use, may start now.
            waited = (container.asked.get(record.name) for container in self.containers.values())
            self.changed = self.changed or old.attempts in waited
        self.names[record.name] = record

    def notice(self, name: str, kind: NoticeKind, detail: str, alarm: bool = False) -> None:
        self.actions.append(Notice(name, kind, detail, alarm))

    def later(self, seconds: float) -> float:
        return self.now + seconds * (1 - self.settings.jitter * self.random())

    # -- subscribers

    def subscribe(self, event: Subscribe) -> None:
        wishes = _merged(event.wishes)
        old = self.containers.get(event.container)
        asked: dict[str, int] = {}
        for wish in wishes:
            record = self.names.get(wish.name) or Record(wish.name, due=self.now)
            if old is not None and wish.name in old.asked:
                asked[wish.name] = old.asked[wish.name]
            else:
                asked[wish.name] = record.attempts
                if record.state is not NameState.OK:
                    record = replace(record, due=self.now)
            self.put(record)
        dropped = {*old.asked, *old.revoked} - asked.keys() if old is not None else set()
        self.containers[event.container] = Container(
            event.container, event.source, wishes, asked, tuple(sorted(dropped))
        )
        for key in [key for key in self.leases if key[0] == event.container and key[1] not in asked]:
            del self.leases[key]
        self.forget(dropped)
        self.changed = True

    def unsubscribe(self, container: str) -> None:
        old = self.containers.pop(container, None)
        for key in [key for key in self.leases if key[0] == container]:
            del self.leases[key]
        if old is not None:
            self.forget(set(old.asked))
            self.changed = True

    def forget(self, names: set[str]) -> None:
        """Nobody wants these any more; the last good answer is remembered for who may start on it."""
        for name in names - self.wanted():
            record = self.names.pop(name, None)
            if record is not None:
                self.remember(record)

    def remember(self, record: Record) -> None:
        if not record.latest or record.state not in (NameState.OK, NameState.STALE):
            return
        ttl = max(record.pins[address].ttl for address in record.latest)
        self.remembered[record.name] = Remembered(record.latest, ttl, record.answered_at or self.now)
        if len(self.remembered) > self.settings.remembered_names:
            del self.remembered[min(self.remembered, key=lambda name: self.remembered[name].answered_at)]

    def recalled(self, record: Record) -> Record:
        """Return a name that cannot be asked, with its last good answer where a container may start on it."""
        known = self.remembered.get(record.name)
        if known is None or not any(
            wish.name == record.name and wish.stale
            for container in self.containers.values()
            for wish in container.wishes
        ):
            return record
        good, _ = self.vet(known.addresses)
        if not good or self.now - known.answered_at >= self.settings.stale_limit:
            return record
        pins = {
            address: replace(pin, first_seen=known.answered_at, last_seen=known.answered_at)
            for address, pin in self.pinned({}, good, known.ttl).items()
        }
        return replace(
            record,
            state=NameState.STALE,
            latest=good,
            pins=pins,
            answered_at=known.answered_at,
            frozen_since=self.now,
        )

    def wanted(self) -> set[str]:
        return {name for container in self.containers.values() for name in container.asked}

    # -- results of queries

    def answered(self, event: Answered) -> None:
        answer, settings = event.answer, self.settings
        record = self.names.get(answer.name)
        if record is None or record.inflight != event.token:
            return
        if not answer.addresses:
            self.failed(Failed(Failure(answer.name, "empty", "no address"), event.token))
            return
        good, refused = self.vet(answer.addresses)
        ttl = min(max(answer.ttl, 0), settings.ttl_max)
        record = self.thawed(record)
        record = replace(
            record,
            inflight=None,
            discarded=False,
            attempts=record.attempts + 1,
            failures=0,
            absent_seen=0,
            due=self.later(min(max(ttl, settings.refresh_min), settings.refresh_max)),
        )
        if refused and (refused != record.refused or (not good and record.state is not NameState.REFUSED)):
            self.notice(record.name, "refused", _reasons(refused), alarm=not good)
        if not good:
            error = f"every address is refused: {_reasons(refused)}"
            self.put(replace(record, state=NameState.REFUSED, refused=refused, error=error))
            return
        self.remembered.pop(record.name, None)
        if record.state not in (NameState.OK, NameState.NEW):
            self.notice(record.name, "recovered", f"was {record.state}")
        self.put(
            replace(
                record,
                state=NameState.OK,
                latest=good,
                pins=self.pinned(record.pins, good, ttl),
                refused=refused,
                error=f"refused: {_reasons(refused)}" if refused else None,
                answered_at=self.now,
            )
        )

    def vet(self, addresses: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, str]]:
        """Split into at most allowed_per_name good ones, sorted, and the refused with their reasons."""
        good: list[str] = []
        refused: dict[str, str] = {}
        for address in sorted(set(addresses)):
            verdict = self.vetting.check(address)
            if verdict and ":" not in address:
                good.append(address)
            elif len(refused) < self.settings.allowed_per_name:
                refused[address] = verdict.reason or "IPv6 is off"
        return tuple(sorted(good, key=address_order)[: self.settings.allowed_per_name]), refused

    def pinned(self, old: Mapping[str, Pin], latest: tuple[str, ...], ttl: int) -> dict[str, Pin]:
        until = self.now + max(ttl, self.settings.ttl_min) + self.settings.linger
        pins = {
            address: Pin(old[address].first_seen if address in old else self.now, self.now, ttl, until)
            for address in latest
        }
        others = sorted(
            old.keys() - pins.keys(), key=lambda address: (-old[address].last_seen, address_order(address))
        )
        for address in others[: self.settings.allowed_per_name - len(pins)]:
            pins[address] = old[address]
        return pins

    def failed(self, event: Failed) -> None:
        failure, settings = event.failure, self.settings
        record = self.names.get(failure.name)
        if record is None or record.inflight != event.token:
            return
        failures = record.failures + 1
        absent = failure.kind in _ABSENT
        previous = record.failed_at if record.failures else record.answered_at or self.now
        record = replace(
            record,
            inflight=None,
            discarded=False,
            attempts=record.attempts + 1,
            failures=failures,
            failed_at=self.now,
            due=self.later(min(settings.retry_first * 2 ** min(failures - 1, 16), settings.retry_max)),
            error=f"{failure.kind}: {failure.detail}" if failure.detail else failure.kind,
            absent_seen=record.absent_seen + absent,
            absent_since=self.now if absent and not record.absent_seen else record.absent_since,
        )
        if record.state is NameState.NEW:
            record = self.recalled(record)
        if record.state is NameState.OK:
            record = replace(record, state=NameState.STALE, frozen_since=self.now)
            self.notice(record.name, "stale", record.error or "")
        if record.state is NameState.STALE and record.answered_at is not None:
            crossing = record.answered_at + settings.stale_alarm
            if previous < crossing <= self.now:
                detail = f"{record.error}, for over {settings.stale_alarm:.0f} s"
                self.notice(record.name, "stale", detail, alarm=True)
        enough = record.absent_seen >= settings.gone_observations
        if absent and enough and self.now - record.absent_since >= settings.gone_window:
            record = self.gone(record)
        self.put(record)

    def thawed(self, record: Record) -> Record:
        """Let time run again: what was left of each address when the freeze began is left now."""
        if record.frozen_since is None:
            return record
        shift = self.now - record.frozen_since
        pins = {address: replace(pin, until=pin.until + shift) for address, pin in record.pins.items()}
        return replace(record, pins=pins, frozen_since=None)

    def gone(self, record: Record) -> Record:
        if record.state is NameState.GONE:
            return record
        record = self.thawed(record)
        self.notice(record.name, "gone", record.error or "", alarm=bool(record.latest))
        # Out of the hosts file now; the kernel keeps each address for the time it has left.
        return replace(record, state=NameState.GONE, latest=())

    # -- the world around

    def vet_again(self, vetting: Vetting) -> None:
        if vetting == self.vetting:
            return
        self.vetting = vetting
        self.changed = True
        for record in list(self.names.values()):
            self.vet_record(record)
        for key in [key for key in self.leases if not vetting.check(key[2])]:
            del self.leases[key]

    def vet_record(self, record: Record) -> None:
        bad = {a: verdict.reason for a in record.pins if not (verdict := self.vetting.check(a))}
        lifted = any(self.vetting.check(address) for address in record.refused)
        if bad:
            self.notice(record.name, "revoked", _reasons(bad), alarm=True)
            latest = tuple(address for address in record.latest if address not in bad)
            record = replace(
                record,
                latest=latest,
                pins={address: pin for address, pin in record.pins.items() if address not in bad},
                refused=bad,
                error=f"revoked: {_reasons(bad)}",
            )
            if not latest and record.state in (NameState.OK, NameState.STALE):
                record = replace(self.thawed(record), state=NameState.REVOKED)
        if bad or lifted:
            self.put(replace(record, due=self.now))

    def in_use(self, container: str, address: str) -> None:
        settings, subscriber = self.settings, self.containers.get(container)
        for wish in subscriber.wishes if subscriber is not None else ():
            record = self.names[wish.name]
            key = (container, wish.name, address)
            known = record.pins.get(address) or self.leases.get(key)
            if known is None or address in record.latest:
                continue
            until = min(self.now + settings.linger, known.last_seen + settings.in_use_limit)
            if until <= self.now:
                continue
            held = sum(1 for other in self.leases if other[:2] == key[:2])
            if key not in self.leases:
                if held >= settings.in_use_per_name:
                    continue
                self.changed = True
            self.leases[key] = Lease(known.last_seen, until)

    def refresh(self, event: Refresh) -> None:
        for name in self.names if event.names is None else event.names:
            record = self.names.get(name)
            if record is None:
                continue
            # Once: what is under way keeps addresses from expiring, and might be begun anew for ever on a
            # machine that sleeps and wakes faster than names are answered.
            discard = event.discard and record.inflight is not None and not record.discarded
            inflight, discarded = (None, True) if discard else (record.inflight, record.discarded)
            self.names[name] = replace(record, due=self.now, inflight=inflight, discarded=discarded)

    # -- time

    def settle(self) -> None:
        """Ask what is due first, expire afterwards: a name that is being asked expires nothing."""
        wanted = self.wanted()
        for name in list(self.names):
            self.give_up(self.names[name])
            if name in wanted:
                self.ask(self.names[name])
                self.expire(self.names[name])
            elif self.now >= self.names[name].due + self.settings.linger:
                # Restored, and its container did not come back.
                self.remember(self.names.pop(name))
        for key in [key for key, lease in self.leases.items() if self.now >= lease.until]:
            del self.leases[key]
            self.changed = True

    def give_up(self, record: Record) -> None:
        if record.inflight is not None and self.now - record.asked_at >= self.settings.query_lost:
            lost = Failure(record.name, "timeout", "the query never came back")
            self.failed(Failed(lost, record.inflight))

    def ask(self, record: Record) -> None:
        if record.inflight is None and record.due <= self.now:
            self.token += 1
            self.names[record.name] = replace(record, inflight=self.token, asked_at=self.now)
            self.actions.append(Query(record.name, self.token))

    def expire(self, record: Record) -> None:
        if record.inflight is not None:
            return
        settings, now = self.settings, self.now
        if record.frozen_since is not None:
            if now - (record.answered_at or record.frozen_since) < settings.stale_limit:
                return
            record = self.gone(replace(record, error=f"no answer for {settings.stale_limit:.0f} s"))
        latest = record.latest
        if record.state is NameState.REFUSED:
            # Nobody renews these: published for their TTL, allowed for the overlap after it.
            latest = tuple(a for a in latest if now < record.pins[a].until - settings.linger)
        pins = {a: pin for a, pin in record.pins.items() if a in latest or now < pin.until}
        old = self.names[record.name]
        if record is not old or latest != old.latest or len(pins) != len(old.pins):
            self.put(replace(record, latest=latest, pins=pins))


def _merged(wishes: tuple[Wish, ...]) -> tuple[Wish, ...]:
    """Return one wish per name, sorted: ports united, optional only if each one is."""
    merged: dict[str, Wish] = {}
    for wish in wishes:
        other = merged.get(wish.name, wish)
        ports = tuple(sorted({*wish.ports, *other.ports}))
        merged[wish.name] = Wish(
            wish.name, ports, wish.optional and other.optional, wish.stale or other.stale
        )
    return tuple(merged[name] for name in sorted(merged))


def _reasons(refused: Mapping[str, str]) -> str:
    shown = [f"{address} is {reason}" for address, reason in list(refused.items())[:4]]
    return ", ".join(shown) + (f" and {len(refused) - 4} more" if len(refused) > 4 else "")
