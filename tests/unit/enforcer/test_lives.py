"""What was allowed for a time is gone from the kernel when nobody is left to take it back."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import IPv4Interface
from typing import Any

import pytest

from enforcer.desired import ENDING
from enforcer.netfilter.claims import Link
from enforcer.netfilter.fake import FakeKernel
from enforcer.netfilter.model import PROTOCOL_VERSION, Element
from enforcer.netfilter.skeleton import PINS, TIMEOUT, Skeleton
from enforcer.netfilter.writer import Writer

from .servicebench import PIN, SANDBOX, World, ask, eventually, play

__all__ = ["play"]
NEW, ADDED = "new.example.com", ("172.16.0.2", "tcp", 443, "93.184.216.40")
BRIDGE = "corral-0a0b0c0d"
BOX = {"bridge": BRIDGE, "subnet": "192.0.2.0/26", "gateway": "192.0.2.1"}
ONE, TWO = ["192.0.2.2", "tcp", 443, "203.0.113.10"], ["192.0.2.2", "tcp", 443, "203.0.113.11"]


def prepared(world: World) -> None:
    world.container("c1", "00000001")
    world.answers[NEW] = ("93.184.216.40",)


def test_only_what_ends_is_given_a_life_and_the_longest_permission_counts(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        await ask(world.client.await_ready, "c1")
        assert world.writer.lives == {}
        await ask(world.client.allow, SANDBOX.id, NEW, [443], 600.0)
        assert world.writer.lives.keys() == {ADDED}
        assert 590 < world.writer.lives[ADDED] <= 600 + ENDING
        # Another name with the same address, for longer; then for ever.
        world.answers["other.example.com"] = ("93.184.216.40",)
        await ask(world.client.allow, SANDBOX.id, "other.example.com", [443], 900.0)
        assert 890 < world.writer.lives[ADDED] <= 900 + ENDING
        await ask(world.client.allow, SANDBOX.id, "other.example.com", [443], None)
        assert world.writer.lives == {}
        # A port that is declared ends with nobody's time.
        await ask(world.client.allow, SANDBOX.id, "api.example.com", [443, 8443], 60.0)
        assert world.writer.lives.keys() == {(*PIN[:2], 8443, PIN[3])}

    play(acts, prepared)


def test_a_restarted_service_gives_what_stands_the_life_that_it_has_left(play: Callable[..., World]) -> None:
    async def first(world: World) -> None:
        await ask(world.client.await_ready, "c1")
        await ask(world.client.allow, SANDBOX.id, NEW, [443], 600.0)

    world = play(first, prepared)
    engine, writer = world.engine, world.writer
    engine.queue = type(engine.queue)()
    writer.lives = {}

    def as_it_was(world: World) -> None:
        world.engine, world.writer = engine, writer
        # Names are not answered for: what stands is kept.
        world.gate.clear()

    async def second(world: World) -> None:
        await eventually(lambda: writer.lives)
        assert ADDED in writer.pins
        assert writer.lives.keys() == {ADDED}
        assert 0 < writer.lives[ADDED] <= 600 + ENDING
        world.gate.set()

    play(second, as_it_was)


class Clocked:
    def __init__(self) -> None:
        self.now = 1000.0
        self.kernel = FakeKernel()
        self.kernel.clock = lambda: self.now
        self.kernel.interfaces.append(Link(BRIDGE, 9, (IPv4Interface("192.0.2.1/26"),)))
        self.writer = Writer(self.kernel, Skeleton(), "test", sleep=lambda _: None)
        self.writer.heal("the test")

    def apply(self, *lives: list[Any]) -> dict[str, Any]:
        pins = [[*ONE, ""], [*TWO, ""]]
        body = {"v": PROTOCOL_VERSION, "op": "apply", "sandboxes": [BOX], "pins": pins, "host": []}
        return self.writer.handle(1000, {**body, "lives": list(lives)})

    def left(self) -> dict[str, int]:
        return {element.dst: entry.timeout for element, entry in self.kernel.entries(PINS).items()}


def test_an_element_lives_as_long_as_it_was_given_and_the_others_as_ever() -> None:
    made = Clocked()
    assert made.apply([*ONE, 20])["ok"]
    assert made.left() == {"203.0.113.10": 20, "203.0.113.11": TIMEOUT}
    made.now += 30
    assert made.left().keys() == {"203.0.113.11"}


def test_a_life_is_cut_short_and_prolonged_and_otherwise_left_alone() -> None:
    made, writes = Clocked(), list[Any]()
    made.apply()
    change = made.kernel.change

    def counted(name: str, put: Any, *words: Any) -> None:
        writes.extend(element for element in put if name == PINS)
        change(name, put, *words)

    made.kernel.change = counted  # type: ignore[method-assign]
    made.apply([*ONE, 100])
    assert made.left()["203.0.113.10"] == 100
    assert writes == [Element(*ONE)]  # type: ignore[arg-type]
    made.now += 40
    made.apply([*ONE, 60])
    assert len(writes) == 1
    made.apply([*ONE, 600])
    assert made.left()["203.0.113.10"] == 600
    made.apply()
    assert made.left()["203.0.113.10"] == TIMEOUT
    assert len(writes) == 3
    # Longer than any element: renewed as any other.
    made.apply([*ONE, 100_000])
    assert len(writes) == 3


@pytest.mark.parametrize(
    "row",
    [
        [*ONE, 0], [*ONE, -1], [*ONE, True], [*ONE, "5"], [*ONE, None], [*ONE], [[], "tcp", 443, "203.0.113.10", 5],
        ["192.0.2.2", "tcp", 443, "203.0.113.12", 5], ["192.0.2.2", "tcp", 80, "203.0.113.10", 5], 7,
    ],
    ids=str,
)  # fmt: skip
def test_odd_lives_refuse_the_whole_request(row: Any) -> None:
    made = Clocked()
    assert "lives" in made.apply(row)["error"]
    assert made.left() == {}
