"""How much one source may ask."""

from __future__ import annotations

import asyncio
from math import inf

import pytest

from enforcer.budget import Budget, BusyError, Metered, pays


def test_a_burst_and_then_a_rate() -> None:
    budget = Budget(rate=10, burst=3, most=1)
    assert [budget.take(5.0) for _ in range(4)] == [True, True, True, False]
    assert budget.take(5.125)
    assert not budget.take(5.125)
    assert [budget.take(1000.0) for _ in range(4)] == [True, True, True, False]


def test_who_waits_gets_a_turn_each_after_the_other() -> None:
    budget = Budget(rate=10, burst=2, most=1)
    waits = [budget.reserve(5.0, inf) for _ in range(5)]
    assert waits == pytest.approx([0, 0, 0.1, 0.2, 0.3])
    # Nobody is let in before those who wait already.
    assert budget.reserve(5.1, inf) == pytest.approx(0.3)


def test_who_would_wait_too_long_takes_nothing() -> None:
    budget = Budget(rate=10, burst=1, most=1)
    assert budget.reserve(5.0, 0.05) == 0
    assert budget.reserve(5.0, 0.05) is None
    assert budget.reserve(5.0, 0.15) == pytest.approx(0.1)


def test_a_clock_that_goes_back_gives_nothing() -> None:
    budget = Budget(rate=10, burst=1, most=1)
    assert budget.take(5.0)
    assert not budget.take(1.0)
    assert not budget.take(5.0)


def test_only_so_many_are_under_way() -> None:
    budget = Budget(rate=10, burst=1, most=2)
    with budget.slot(), budget.slot(), pytest.raises(BusyError), budget.slot():
        raise AssertionError
    with pytest.raises(ZeroDivisionError), budget.slot():
        raise ZeroDivisionError
    assert budget.pending == 0


def test_time_on_the_loop_is_charged_to_who_asked_and_waiting_is_not() -> None:
    now, charged = [0.0], []

    async def work() -> str:
        now[0] += 1
        gate = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(gate.set_result, "done")
        asyncio.get_running_loop().call_soon(lambda: now.__setitem__(0, 100.0))
        found: str = await gate
        now[0] += 2
        return found

    async def asks() -> None:
        pays(charged.append)
        # Whoever asked first: a task of its own works for them.
        assert await asyncio.create_task(metered()) == "done"

    async def metered() -> str:
        return await Metered(work(), lambda: now[0])

    async def main() -> None:
        await asyncio.create_task(asks())
        assert charged == [1, 2]
        # For nobody, when nobody asked.
        assert await metered() == "done"
        assert charged == [1, 2]

    asyncio.run(main())


def test_what_is_metered_ends_as_it_would_have() -> None:
    ends = []

    async def work(fails: bool) -> None:
        if fails:
            raise ZeroDivisionError
        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            ends.append("timeout")
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("cancelled")

    async def metered(fails: bool) -> None:
        await Metered(work(fails), lambda: 0.0)

    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            await metered(True)
        task = asyncio.create_task(metered(False))
        while not ends:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ends == ["timeout", "cancelled"]

    asyncio.run(main())
