"""Drives the pinning engine the way the service does; answers come only when a test gives them."""

from __future__ import annotations

from typing import Any

from enforcer import pins
from enforcer.pins import (
    Answer,
    Answered,
    Event,
    Failed,
    Failure,
    NameState,
    Notice,
    Query,
    Refresh,
    Settings,
    State,
    Subscribe,
    Tick,
    Wish,
)
from enforcer.vetting import Vetting

LAB = Vetting.of(permit=["192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24"])
NAME = "api.example"
A, B, C = "203.0.113.1", "203.0.113.2", "203.0.113.3"
BOX, OTHER = "box", "other"


class Engine:
    """``open``: the tokens of queries that have not been answered, by name."""

    def __init__(self, vetting: Vetting = LAB, limits: Settings | None = None, now: float = 1000.0) -> None:
        self.state = State(vetting=vetting, settings=limits or Settings(jitter=0.0))
        self.now = now
        self.open: dict[str, int] = {}
        self.notices: list[Notice] = []

    def send(self, event: Event, after: float = 0.0) -> list[str]:
        """Apply one event; return the names that are to be queried."""
        self.now += after
        self.state, actions = pins.step(self.state, event, self.now)
        queries = [action for action in actions if isinstance(action, Query)]
        self.open.update({query.name: query.token for query in queries})
        self.notices += [action for action in actions if isinstance(action, Notice)]
        return [query.name for query in queries]

    def tick(self, after: float = 0.0) -> list[str]:
        return self.send(Tick(), after)

    def want(self, *names: str | Wish, container: str = BOX) -> list[str]:
        wishes = tuple(Wish(name) if isinstance(name, str) else name for name in names)
        return self.send(Subscribe(container, "198.51.100.5", wishes))

    def answer(self, *addresses: str, name: str = NAME, ttl: int = 60, after: float = 0.0) -> list[str]:
        return self.send(Answered(Answer(name, addresses, ttl, self.now), self.open.pop(name)), after)

    def fail(self, kind: Any = "timeout", name: str = NAME, after: float = 0.0) -> list[str]:
        return self.send(Failed(Failure(name, kind, ""), self.open.pop(name)), after)

    def rotate(self, *addresses: str, name: str = NAME, ttl: int = 60, after: float = 0.0) -> None:
        """Let ``after`` seconds pass, ask again, answer."""
        self.now += after
        self.send(Refresh((name,)))
        self.answer(*addresses, name=name, ttl=ttl)

    def allowed(self, container: str = BOX, name: str = NAME) -> list[str]:
        return [grant.address for grant in pins.allowed(self.state)[container][name]]

    def published(self, container: str = BOX, name: str = NAME) -> list[str]:
        return list(pins.published(self.state)[container][name])

    def name_state(self, name: str = NAME) -> NameState:
        return self.state.names[name].state


def started() -> Engine:
    """Return an engine with one container that wants one name, which has just been answered with A."""
    engine = Engine()
    assert engine.want(NAME) == [NAME]
    engine.answer(A)
    return engine


def many(count: int, third: int = 113) -> list[str]:
    return [f"203.0.{third}.{number}" for number in range(count)]
