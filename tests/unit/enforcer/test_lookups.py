"""Names asked for on demand: once at a time, remembered for a while, and bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from enforcer.lookups import ADDRESSES, FAILURE_TTL, LONGEST_TTL, REMEMBERED, Lookups, Result
from enforcer.pinmodel import Answer, Failure


class Server:
    def __init__(self) -> None:
        self.now = 1000.0
        self.asked: list[str] = []
        self.result: Callable[[str], Result] = lambda name: Answer(name, ("192.0.2.1",), 60, self.now)
        self.gate = asyncio.Event()
        self.gate.set()
        self.lookups = Lookups(self.ask, lambda: self.now)

    async def ask(self, name: str) -> Result:
        self.asked.append(name)
        await self.gate.wait()
        return self.result(name)


def run(acts: Callable[[Server], Awaitable[None]]) -> None:
    async def main() -> None:
        await acts(Server())

    asyncio.run(main())


def test_many_who_ask_at_once_are_one_question() -> None:
    async def acts(server: Server) -> None:
        server.gate.clear()
        waiting = [asyncio.create_task(server.lookups.find("a.example.com")) for _ in range(5)]
        await asyncio.sleep(0)
        # One that goes takes nothing from the others.
        waiting[0].cancel()
        await asyncio.sleep(0)
        server.gate.set()
        found = await asyncio.gather(*waiting[1:])
        assert server.asked == ["a.example.com"]
        assert {left for _, left in found} == {60}

    run(acts)


def test_an_answer_is_remembered_for_its_ttl_and_a_failure_for_a_moment() -> None:
    async def acts(server: Server) -> None:
        await server.lookups.find("a.example.com")
        server.now += 59
        assert (await server.lookups.find("a.example.com"))[1] == 1
        server.now += 1
        server.result = lambda name: Answer(name, ("192.0.2.1",), 90000, server.now)
        assert (await server.lookups.find("a.example.com"))[1] == LONGEST_TTL
        server.now += LONGEST_TTL
        server.result = lambda name: Failure(name, "timeout")
        await server.lookups.find("a.example.com")
        assert len(server.asked) == 3
        server.now += FAILURE_TTL
        await server.lookups.find("a.example.com")
        assert len(server.asked) == 4

    run(acts)


def test_memory_and_answers_are_bounded() -> None:
    async def acts(server: Server) -> None:
        many = tuple(f"192.0.2.{number}" for number in range(200))
        server.result = lambda name: Answer(name, many, 60, server.now)
        for number in range(REMEMBERED + 3):
            result, _ = await server.lookups.find(f"n{number}.example.com")
        assert isinstance(result, Answer)
        assert result.addresses == many[:ADDRESSES]
        assert len(server.lookups._answers) == REMEMBERED

    run(acts)


def test_who_waits_is_let_go_at_the_end() -> None:
    async def acts(server: Server) -> None:
        server.gate.clear()
        waiting = asyncio.create_task(server.lookups.find("a.example.com"))
        await asyncio.sleep(0)
        server.lookups.close()
        await asyncio.wait([waiting], timeout=5)
        assert waiting.cancelled()

    run(acts)
