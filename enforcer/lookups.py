"""Names asked for on demand: each once at a time, with a small memory.

What an address may be is not decided here. Whoever uses a result judges its addresses each time: what was
asked a minute ago may be this host's by now.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import replace

from enforcer.budget import Metered
from enforcer.pinmodel import Answer, Failure

LONGEST_TTL = 300  # seconds
FAILURE_TTL = 5.0
REMEMBERED = 2048  # names
ADDRESSES = 16  # of an answer; in numeric order, as the resolver returns them

Result = Answer | Failure


class Lookups:
    """One for the whole service. Runs on one event loop; ``ask`` resolves a name and does not raise."""

    def __init__(self, ask: Callable[[str], Awaitable[Result]], clock: Callable[[], float]) -> None:
        self._ask, self._clock = ask, clock
        self._answers: OrderedDict[str, tuple[float, Result]] = OrderedDict()
        self._asking: dict[str, asyncio.Task[Result]] = {}

    async def find(self, name: str) -> tuple[Result, int]:
        """Return what is known about a canonical name, and for how many seconds that may be kept.

        Who is cancelled while it waits leaves the question to the others who wait for it.
        """
        kept = self._answers.get(name)
        if kept is not None and kept[0] > self._clock():
            self._answers.move_to_end(name)
            return kept[1], int(kept[0] - self._clock())
        task = self._asking.get(name)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._find(name))
            self._asking[name] = task
        result = await asyncio.shield(task)
        until = self._answers.get(name, (0.0, result))[0]
        return result, max(0, int(until - self._clock()))

    async def _find(self, name: str) -> Result:
        try:
            # What a zone's servers answer may take long to read: who asked first pays for it.
            result = await Metered(self._ask(name), self._clock)
        finally:
            self._asking.pop(name, None)
        if isinstance(result, Answer):
            result = replace(result, addresses=result.addresses[:ADDRESSES])
            life = float(min(max(0, result.ttl), LONGEST_TTL))
        else:
            life = FAILURE_TTL
        self._answers.pop(name, None)
        self._answers[name] = (self._clock() + life, result)
        while len(self._answers) > REMEMBERED:
            self._answers.popitem(last=False)
        return result

    def close(self) -> None:
        """Ask nothing any more; who waits is cancelled."""
        for task in list(self._asking.values()):
            task.cancel()
