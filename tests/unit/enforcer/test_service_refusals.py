"""What the writer will not do: nobody new starts, what runs goes on, and the reason is where people look."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from enforcer.netfilter.plan import Problem
from enforcer.netfilter.writer import _standing
from enforcer.writerclient import GRANTED_ALL_THE_SAME
from policy.declaration import Declaration
from policy.errors import NotReadyError

from .servicebench import World, ask, eventually, play

__all__ = ["play"]

WRONG = (("chains", "CORRAL-FORWARD (IPv4) differ"),)


def test_while_the_rules_are_wrong_nobody_starts_not_even_who_asks_for_nothing(
    play: Callable[..., World],
) -> None:
    async def acts(world: World) -> None:
        world.writer.problems = WRONG
        world.container("c1", "00000001", declaration=Declaration())
        with pytest.raises(NotReadyError, match=r"CORRAL-FORWARD \(IPv4\) differ"):
            await ask(world.client.await_ready, "c1", 1.5)
        world.writer.problems = ()
        await ask(world.client.await_ready, "c1", 10)

    play(acts)


def test_what_runs_is_not_called_wrong_for_it(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.writer.problems = WRONG
        world.container("c1", "00000001", declaration=Declaration(), running=True)
        world.engine.send("start", "c1")
        await eventually(lambda: "c1" in world.service.satisfied)

    play(acts)


@pytest.mark.parametrize("part", sorted(GRANTED_ALL_THE_SAME))
def test_what_the_writer_grants_in_spite_of_keeps_nobody_from_starting(
    play: Callable[..., World], part: str
) -> None:
    async def acts(world: World) -> None:
        world.writer.problems = ((part, "it is not as it should be"),)
        world.container("c1", "00000001")
        await ask(world.client.await_ready, "c1", 10)

    play(acts)


def test_both_sides_mean_the_same_problems() -> None:
    parts = ("hook", "port", "hold", "chains", "backstop", "sets", "jump", "driver", "bridge-filter", "ipv6")
    stands = {problem.part for problem in _standing(Problem(part, "x") for part in parts)}
    assert stands == set(parts) - GRANTED_ALL_THE_SAME


def test_what_the_writer_refuses_is_told_to_who_waits_and_to_who_looks(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.writer.refused = tuple(
            f"198.51.100.{number}: not permitted" for number in (1, 1, 2, 3, 4, 5, 6, 7)
        )
        world.writer.refuses = {"93.184.216.34"}
        world.container("c1", "00000001")
        with pytest.raises(NotReadyError, match=r"the writer refused: 198\.51\.100\.1: not permitted"):
            await ask(world.client.await_ready, "c1", 1.5)
        told = (await ask(world.client.status))["errors"]
        assert told[:2] == [f"the writer refused: 198.51.100.{number}: not permitted" for number in (1, 2)]
        assert told[-1] == "the writer refused 2 more" and len(told) == 6
        world.writer.refused, world.writer.refuses = (), set()
        world.service._dirty.set()
        await ask(world.client.await_ready, "c1", 10)
        assert (await ask(world.client.status))["errors"] == []

    play(acts)


def test_what_is_a_problem_already_is_not_told_twice(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.writer.problems = WRONG
        world.writer.refused = (f"nothing new is granted: {WRONG[0][1]}",)
        world.container("c1", "00000001")
        with pytest.raises(NotReadyError) as raised:
            await ask(world.client.await_ready, "c1", 1.5)
        assert str(raised.value).count(WRONG[0][1]) == 1

    play(acts)
