"""Opening on demand: told when the kernel holds it, and at no other time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

import pytest

from enforcer import desired, granting
from enforcer.doors import FRESH, RENEW, ClosedError, Doors
from enforcer.granting import LINGER, TTL_MIN
from enforcer.overrides import Overrides
from enforcer.sessions import Session
from enforcer.writerclient import Entry, Held
from policy.declaration import Pattern

from .sessionbench import NETWORK, proxy, session

ZONE = Pattern(host="*.example.com", ports=(443, 8443))
NAME, ADDRESS, OTHER = "a.example.com", "192.0.2.1", "192.0.2.2"
LIFE = TTL_MIN + LINGER


class Bench:
    """Doors between a clock that is a number and a kernel that is written when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.sessions: dict[str, Session] = {one.container: one for one in (session(1, ZONE), proxy())}
        self.writes, self.dirty = 0, 0
        self.refused: set[str] = set()
        self.held: dict[desired.Row, str] = {}
        self.lives: dict[desired.Row, float] = {}
        self.broken = False
        self.extra: list[tuple[desired.Row, str, float | None]] = []
        self.vet: Callable[[str], bool] = lambda _address: True
        self.before: Callable[[], None] = lambda: None
        self.doors = Doors(self.sessions.get, self._mark, self._until, lambda: self.now)

    def _mark(self) -> None:
        self.dirty += 1

    async def _until(self, condition: Callable[[], bool], timeout: float) -> bool:
        end = self.now + timeout
        while not condition():
            if self.now >= end:
                return False
            self.write()
            self.now += 0.25
            await asyncio.sleep(0)
        return True

    def write(self) -> None:
        self.before()
        mark, opened = self.doors.wanted(list(self.sessions.values()), self.vet)
        rules = desired.desired(list(self.sessions.values()), [NETWORK], {}, self.extra, opened)
        self.writes += 1
        if self.broken:
            self.doors.unsure()
            return
        self.held = {row: text for row, text in rules.pins.items() if row[3] not in self.refused}
        self.doors.wrote(mark, rules.pins.keys(), rules.ends, self.kernel())

    def kernel(self) -> Held:
        rows = tuple(Entry(*row, 900, 0, text) for row, text in self.held.items())
        return Held("test", rows, (), {}, (), ())

    async def open(
        self, *addresses: str, ports: Iterable[int] = (443,), name: str = NAME, container: str = "c9"
    ) -> tuple[str, ...]:
        return await self.doors.open(container, name, ports, addresses or (ADDRESS,), 60)

    async def closed(self, *addresses: str, **words: object) -> str:
        with pytest.raises(ClosedError) as caught:
            await self.open(*addresses, **words)  # type: ignore[arg-type]
        return caught.value.kind


def play(acts: Callable[[Bench], Awaitable[None]]) -> Bench:
    bench = Bench()

    async def main() -> None:
        await acts(bench)

    asyncio.run(main())
    return bench


def test_an_address_is_told_once_the_kernel_holds_each_port() -> None:
    async def acts(bench: Bench) -> None:
        assert await bench.open(ADDRESS, OTHER, ports=(443, 8443)) == (ADDRESS, OTHER)
        assert {row[2:] for row in bench.held} == {(p, a) for p in (443, 8443) for a in (ADDRESS, OTHER)}

    play(acts)


def test_what_the_writer_refuses_is_not_told_and_the_rest_is() -> None:
    async def acts(bench: Bench) -> None:
        bench.refused = {OTHER}
        assert await bench.open(ADDRESS, OTHER) == (ADDRESS,)
        assert await bench.closed(OTHER) == "unready"

    play(acts)


def test_a_writer_that_fails_is_waited_for_and_not_for_ever() -> None:
    async def acts(bench: Bench) -> None:
        bench.broken = True
        assert await bench.closed() == "unready"

        def mend() -> None:
            bench.broken = bench.writes < 40

        bench.before = mend
        bench.writes = 30
        assert await bench.open() == (ADDRESS,)

    play(acts)


def test_what_is_fresh_in_the_kernel_is_told_without_a_write_and_renewed() -> None:
    async def acts(bench: Bench) -> None:
        await bench.open()
        writes = bench.writes
        bench.now += LIFE - FRESH - 2
        assert await bench.open() == (ADDRESS,)
        assert bench.writes == writes
        bench.now += 2
        assert await bench.open() == (ADDRESS,)
        assert bench.writes == writes + 1
        bench.doors.unsure()
        await bench.open()
        assert bench.writes == writes + 2

    play(acts)


def test_a_permission_that_goes_before_the_write_opens_nothing() -> None:
    async def acts(bench: Bench) -> None:
        def deny() -> None:
            one = bench.sessions["c1"]
            taken = Overrides().deny(ZONE.host, one.declaration)
            bench.sessions["c1"] = replace(one, overrides=taken)

        bench.before = deny
        assert await bench.closed() == "denied"
        assert not bench.held
        assert bench.doors.counts() == {}

    play(acts)


@pytest.mark.parametrize("who", ["c9", "c1"])
def test_a_container_that_goes_before_the_write_opens_nothing(who: str) -> None:
    async def acts(bench: Bench) -> None:
        bench.before = lambda: bench.sessions.pop(who, None)  # type: ignore[assignment,return-value]
        assert await bench.closed() == "denied"
        assert not bench.held
        bench.before = lambda: None
        bench.write()
        assert await bench.closed() == "denied"

    play(acts)


def test_an_address_that_turns_private_goes_at_the_next_write() -> None:
    async def acts(bench: Bench) -> None:
        await bench.open(ADDRESS, OTHER)
        bench.vet = lambda address: address != OTHER
        bench.write()
        assert {row[3] for row in bench.held} == {ADDRESS}

    play(acts)


def test_who_may_not_ask_opens_nothing_for_itself() -> None:
    async def acts(bench: Bench) -> None:
        assert await bench.closed(container="c1") == "denied"
        assert await bench.closed(container="nobody") == "denied"
        assert not bench.held

    play(acts)


def test_no_room_is_busy_and_what_is_in_use_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(granting, "PER_CONTAINER", 2)

    async def acts(bench: Bench) -> None:
        await bench.open(ADDRESS, OTHER)
        assert await bench.closed("192.0.2.3") == "busy"
        bench.now += 300
        # Only counters that are read just before tell that a stream uses it still.
        bench.before = lambda: bench.doors.used("c9", ADDRESS, 443)
        assert await bench.open("192.0.2.3") == ("192.0.2.3",)
        assert {row[3] for row in bench.held} == {ADDRESS, "192.0.2.3"}
        assert await bench.closed(OTHER) == "busy"

    play(acts)


def test_no_room_in_the_kernel_is_busy_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desired, "PER_SOURCE", 1)

    async def acts(bench: Bench) -> None:
        row = ("172.16.0.10", "tcp", 443, "192.0.2.9")
        bench.extra = [(row, "kept", None)]
        assert await bench.closed() == "busy"

    play(acts)


def test_what_was_found_standing_is_adopted_when_it_is_allowed() -> None:
    prefix = "demo-0a0b0c0d proxy"
    long = f"{prefix} {'a' * 200}.example.com"[:200]
    found = [
        Entry("172.16.0.10", "tcp", 443, ADDRESS, 500, 0, f"{prefix} {NAME}"),
        Entry("172.16.0.10", "tcp", 80, ADDRESS, 500, 0, f"{prefix} {NAME}"),
        Entry("172.16.0.10", "udp", 443, ADDRESS, 500, 0, f"{prefix} {NAME}"),
        Entry("172.16.0.10", "tcp", 443, "10.0.0.1", 500, 0, f"{prefix} {NAME}"),
        Entry("172.16.0.10", "tcp", 443, OTHER, 500, 0, f"{prefix} a.example.org"),
        Entry("172.16.0.10", "tcp", 443, OTHER, 500, 0, f"demo-0a0b0c0d main {NAME}"),
        Entry("172.16.0.10", "tcp", 443, OTHER, 500, 0, long),
        Entry("172.16.0.2", "tcp", 443, OTHER, 500, 0, f"{prefix} {NAME}"),
        Entry("172.16.0.99", "tcp", 443, OTHER, 500, 0, f"{prefix} {NAME}"),
    ]
    bench = Bench()
    bench.doors.adopt(found, list(bench.sessions.values()), lambda address: address != "10.0.0.1")
    bench.write()
    assert set(bench.held) == {("172.16.0.10", "tcp", 443, ADDRESS)}
    bench.now += 500
    bench.write()
    assert not bench.held


def test_what_ends_and_what_is_in_use_has_the_kernel_written_in_time() -> None:
    async def acts(bench: Bench) -> None:
        await bench.open()
        assert not bench.doors._due()
        bench.now += LIFE - RENEW + 1
        # Whether it is in use is known when counters were read.
        assert bench.doors._due()
        bench.write()
        assert not bench.doors._due()
        bench.doors.used("c9", ADDRESS, 443)
        assert bench.doors._due()
        bench.write()
        assert not bench.doors._due()
        bench.now += LIFE + 1
        assert bench.doors._due()
        bench.write()
        assert not bench.held
        assert not bench.doors._due()

    play(acts)
