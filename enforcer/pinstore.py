"""The saved form of the pinning engine, so that a restart neither widens nor cuts what was open. Pure.

Saved times are wall time; the engine runs on monotonic time. Time during which nothing could refresh a name
(the service was down) does not count against its addresses, as for a resolver that is down.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enforcer.pinmodel import Lease, NameState, Pin, Record, Remembered, Settings, State, address_order
from enforcer.vetting import Vetting

VERSION = 1


def save(state: State, now: float, wall: float) -> dict[str, Any]:
    """Return ``state`` as plain JSON values; ``now`` and ``wall`` are the two clocks at this moment."""
    offset = wall - now
    names = {}
    for record in state.names.values():
        if record.answered_at is None:
            continue
        frozen = 0.0 if record.frozen_since is None else now - record.frozen_since
        names[record.name] = {
            "state": record.state.value,
            "answered": record.answered_at + offset,
            "latest": list(record.latest),
            "pins": {
                address: {
                    "first_seen": pin.first_seen + offset,
                    "last_seen": pin.last_seen + offset,
                    "ttl": pin.ttl,
                    "until": pin.until + frozen + offset,
                }
                for address, pin in record.pins.items()
            },
        }
    leases = [
        {
            "container": container,
            "name": name,
            "address": address,
            "last_seen": lease.last_seen + offset,
            "until": lease.until + offset,
        }
        for (container, name, address), lease in sorted(state.leases.items())
    ]
    remembered = {
        name: {"addresses": list(one.addresses), "ttl": one.ttl, "answered": one.answered_at + offset}
        for name, one in state.remembered.items()
    }
    return {
        "version": VERSION,
        "wall": wall,
        "names": names,
        "leases": leases,
        "remembered": remembered,
    }


def restore(saved: Any, now: float, wall: float, vetting: Vetting, settings: Settings | None = None) -> State:
    """Rebuild names and leases; subscribe the containers that exist before the first Tick.

    Every address is vetted again, and no time can lie further ahead than the rules allow, whatever the file
    says. Names come back STALE and are asked as soon as a container wants them.

    Raises:
        ValueError: another version, or not the shape that ``save`` returns.
    """
    if not isinstance(saved, dict):
        raise ValueError("saved pins are damaged: no object")
    if saved.get("version") != VERSION:
        raise ValueError(f"saved pins have version {saved.get('version')!r}, not {VERSION}")
    reader = _Reader(now, wall, vetting, settings or Settings())
    try:
        saved_at = reader.past(saved["wall"])
        names = {
            str(name): reader.record(str(name), entry, saved_at) for name, entry in saved["names"].items()
        }
        leases = dict(reader.lease(entry, saved_at) for entry in saved["leases"])
        # Files of earlier releases have none.
        remembered = {
            str(name): reader.remembered(entry) for name, entry in saved.get("remembered", {}).items()
        }
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"saved pins are damaged: {error!r}") from error
    permitted = {key: lease for key, lease in leases.items() if reader.good(key[2]) and lease.until > now}
    return State(
        vetting=vetting,
        settings=reader.settings,
        names=names,
        leases=permitted,
        remembered={name: one for name, one in remembered.items() if name not in names and one.addresses},
    )


class _Reader:
    def __init__(self, now: float, wall: float, vetting: Vetting, settings: Settings) -> None:
        self.now = now
        self.wall = wall
        self.vetting = vetting
        self.settings = settings

    def good(self, address: str) -> bool:
        return ":" not in address and self.vetting.check(address).ok

    def clock(self, value: Any) -> float:
        moment = float(value)
        if not abs(moment) < float("inf"):
            raise ValueError(f"saved pins are damaged: {moment} is not a time")
        return self.now + (moment - self.wall)

    def past(self, value: Any) -> float:
        return min(self.clock(value), self.now)

    def record(self, name: str, entry: Mapping[str, Any], saved_at: float) -> Record:
        pins = {
            address: self.pin(pin, saved_at) for address, pin in entry["pins"].items() if self.good(address)
        }
        latest = tuple(sorted({a for a in entry["latest"] if a in pins}, key=address_order))
        state = NameState(entry["state"])
        if state is NameState.OK:
            state = NameState.STALE
        frozen = saved_at if state is NameState.STALE else None
        if frozen is None:
            # Nobody renewed these, so they ran out meanwhile; the addresses of other names waited for us.
            latest = tuple(a for a in latest if self.now < pins[a].until - self.settings.linger)
            pins = {a: pin for a, pin in pins.items() if a in latest or self.now < pin.until}
        return Record(
            name,
            state=state,
            latest=latest[: self.settings.allowed_per_name],
            pins=pins,
            error="not asked again since the service started",
            answered_at=self.past(entry["answered"]),
            due=self.now,
            frozen_since=frozen,
        )

    def remembered(self, entry: Mapping[str, Any]) -> Remembered:
        good = tuple(str(address) for address in entry["addresses"] if self.good(str(address)))
        ttl = min(max(int(entry["ttl"]), 0), self.settings.ttl_max)
        return Remembered(good[: self.settings.allowed_per_name], ttl, self.past(entry["answered"]))

    def pin(self, entry: Mapping[str, Any], saved_at: float) -> Pin:
        settings = self.settings
        ttl = min(max(int(entry["ttl"]), 0), settings.ttl_max)
        last_seen = self.past(entry["last_seen"])
        longest = saved_at + max(ttl, settings.ttl_min) + settings.linger
        return Pin(
            first_seen=min(self.past(entry["first_seen"]), last_seen),
            last_seen=last_seen,
            ttl=ttl,
            until=min(self.clock(entry["until"]), longest),
        )

    def lease(self, entry: Mapping[str, Any], saved_at: float) -> tuple[tuple[str, str, str], Lease]:
        settings = self.settings
        key = (str(entry["container"]), str(entry["name"]), str(entry["address"]))
        last_seen = self.past(entry["last_seen"])
        left = min(self.clock(entry["until"]) - saved_at, settings.linger)
        return key, Lease(last_seen, min(self.now + left, last_seen + settings.in_use_limit))
