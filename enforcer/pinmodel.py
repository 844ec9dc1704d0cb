"""What the pinning engine is made of: names, addresses, subscribers, events, actions. Pure data.

Times are seconds of one monotonic clock that counts suspend; names are lower case without the final dot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from ipaddress import ip_address
from typing import Literal

from enforcer.vetting import Vetting

FailureKind = Literal["timeout", "servfail", "nxdomain", "empty", "loop", "refused", "network"]


@dataclass(frozen=True)
class Answer:
    """A successful resolution: unique sorted addresses, not vetted; ``ttl`` in seconds; ``at``: when."""

    name: str
    addresses: tuple[str, ...]
    ttl: int
    at: float


@dataclass(frozen=True)
class Failure:
    """One failed resolution; ``detail`` is for people."""

    name: str
    kind: FailureKind
    detail: str = ""


class NameState(StrEnum):
    """NEW no answer yet; OK fresh; STALE last good kept; REFUSED only forbidden addresses; GONE no such name
    any more (or no answer for too long); REVOKED taken back: by vetting, or by the container's own policy."""

    NEW = "NEW"
    OK = "OK"
    STALE = "STALE"
    REFUSED = "REFUSED"
    GONE = "GONE"
    REVOKED = "REVOKED"


@dataclass(frozen=True)
class Settings:
    """Seconds and counts; every field may come from the service configuration."""

    refresh_min: float = 30
    refresh_max: float = 300
    jitter: float = 0.1
    ttl_min: int = 60
    ttl_max: int = 86400
    linger: float = 600
    retry_first: float = 5
    retry_max: float = 120
    query_lost: float = 30
    stale_alarm: float = 3600
    stale_limit: float = 86400
    gone_observations: int = 3
    gone_window: float = 600
    in_use_limit: float = 86400
    in_use_per_name: int = 16
    allowed_per_name: int = 64
    entries_per_container: int = 1024
    published_per_name: int = 16
    remembered_names: int = 1024


@dataclass(frozen=True, slots=True)
class Pin:
    """One address of one name; it is allowed until ``until``, and longer while it is in *latest*."""

    first_seen: float
    last_seen: float
    ttl: int
    until: float


@dataclass(frozen=True, slots=True)
class Lease:
    """An address one container keeps because it is in use; last in an answer at ``last_seen``."""

    last_seen: float
    until: float


@dataclass(frozen=True)
class Record:
    """Everything known about one name. ``frozen_since``: expiry stands still, the name cannot be asked.

    ``discarded``: a query under way was given up since the last result, for a new one.
    """

    name: str
    state: NameState = NameState.NEW
    latest: tuple[str, ...] = ()
    pins: Mapping[str, Pin] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    error: str | None = None
    answered_at: float | None = None
    due: float = 0.0
    inflight: int | None = None
    discarded: bool = False
    asked_at: float = 0.0
    attempts: int = 0
    failures: int = 0
    failed_at: float = 0.0
    frozen_since: float | None = None
    absent_seen: int = 0
    absent_since: float = 0.0


@dataclass(frozen=True)
class Wish:
    """One name a container may reach: lower case, no final dot.

    ``stale``: the container may start on the last good answer while the name cannot be resolved.
    """

    name: str
    ports: tuple[int, ...] = (443,)
    optional: bool = False
    stale: bool = False


@dataclass(frozen=True)
class Remembered:
    """The last good answer of a name that no container has now."""

    addresses: tuple[str, ...]
    ttl: int
    answered_at: float


@dataclass(frozen=True)
class Container:
    """A subscriber. ``asked``: per name, the number of attempts made before this container wanted it."""

    id: str
    source: str
    wishes: tuple[Wish, ...]
    asked: Mapping[str, int]
    revoked: tuple[str, ...] = ()


@dataclass(frozen=True)
class State:
    """``generation`` moves whenever allowed, published or who waits for what may have moved.

    Compare it before each write.
    """

    vetting: Vetting = field(default_factory=Vetting)
    settings: Settings = field(default_factory=Settings)
    names: Mapping[str, Record] = field(default_factory=dict)
    containers: Mapping[str, Container] = field(default_factory=dict)
    leases: Mapping[tuple[str, str, str], Lease] = field(default_factory=dict)
    remembered: Mapping[str, Remembered] = field(default_factory=dict)
    token: int = 0
    generation: int = 0


@dataclass(frozen=True)
class Subscribe:
    """A container with its whole list of names; sent again, it replaces the earlier list."""

    container: str
    source: str
    wishes: tuple[Wish, ...]


@dataclass(frozen=True)
class Unsubscribe:
    """The container is gone."""

    container: str


@dataclass(frozen=True)
class Answered:
    """A query succeeded; ``token`` is the one of its Query action."""

    answer: Answer
    token: int


@dataclass(frozen=True)
class Failed:
    """A query failed; ``token`` is the one of its Query action."""

    failure: Failure
    token: int


@dataclass(frozen=True)
class Tick:
    """Time has passed; see ``next_due``."""


@dataclass(frozen=True)
class VettingChanged:
    """Interfaces, Docker networks or the configuration changed."""

    vetting: Vetting


@dataclass(frozen=True)
class InUse:
    """The packet counter of an entry of this container moved since the last look."""

    container: str
    address: str


@dataclass(frozen=True)
class Refresh:
    """Ask again now: these names, or all.

    ``discard`` drops the results of queries under way: for another resolver, or a resume from suspend. Sent
    before the next Tick, nothing expires before its name was asked for again.
    """

    names: tuple[str, ...] | None = None
    discard: bool = False


Event = Subscribe | Unsubscribe | Answered | Failed | Tick | VettingChanged | InUse | Refresh


@dataclass(frozen=True)
class Query:
    """Resolve ``name`` and report with ``token``."""

    name: str
    token: int


NoticeKind = Literal["refused", "stale", "gone", "revoked", "recovered"]


@dataclass(frozen=True)
class Notice:
    """Something for the journal; an alarm needs a human."""

    name: str
    kind: NoticeKind
    detail: str
    alarm: bool = False


Action = Query | Notice


@lru_cache(maxsize=16384)
def address_order(address: str) -> int:
    """Sort key of an address: numeric, so that a choice is the same whoever makes it."""
    return int(ip_address(address))
