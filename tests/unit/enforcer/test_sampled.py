"""Both invariants, read by somebody else as fast as possible while a name rotates under the whole service."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from enforcer import service as service_module
from enforcer.pinmodel import Answer, Failure
from policy.identity import StatePaths

from .servicebench import SANDBOX, World, ask, play

__all__ = ["play"]
NAME = "api.example.com"
POOL = tuple(f"93.184.216.{number}" for number in range(1, 60))
ROTATIONS = 100


class Sampler(threading.Thread):
    """Hosts file, then kernel, then what was answered: what is wrong in this order was wrong at some moment."""

    def __init__(self, world: World, answered: set[str]) -> None:
        super().__init__(daemon=True)
        self.world, self.answered = world, answered
        self.path = StatePaths(world.data / SANDBOX.id).hosts("00000001")
        self.samples, self.bad, self.over = 0, [], threading.Event()  # type: ignore[var-annotated]

    def run(self) -> None:
        began = time.monotonic()
        while not self.over.is_set():
            lines = [line.split() for line in self.path.read_text().splitlines()]
            shown = {row[0] for row in lines if len(row) == 2 and row[1] == NAME and row[0] != "#"}
            allowed = {row[3] for row in list(self.world.writer.pins)}
            answered = set(self.answered)
            self.samples += 1
            if not shown or not shown <= allowed or not allowed <= answered:
                self.bad.append((shown, allowed - answered, shown - allowed))
        self.rate = self.samples / (time.monotonic() - began)


def test_a_hundred_rotations_show_no_moment_in_which_an_invariant_does_not_hold(
    play: Callable[..., World],
) -> None:
    answered: set[str] = set()
    turn = [0]

    async def acts(world: World) -> None:
        async def resolve(name: str) -> Answer | Failure:
            if name != NAME:
                return Failure(name, "nxdomain", "")
            turn[0] += 1
            found = tuple(POOL[(turn[0] + offset) % len(POOL)] for offset in range(3))
            answered.update(found)
            return Answer(name, found, 5, service_module.boot_clock())

        world.service.names._resolver.resolve = resolve  # type: ignore[method-assign]
        world.container("c1", "00000001")
        await ask(world.client.await_ready, "c1")
        sampler = Sampler(world, answered)
        sampler.start()
        seen: list[Any] = []
        for _ in range(ROTATIONS):
            row = (await ask(world.client.refresh, SANDBOX.id, [NAME]))["names"][0]
            seen.append(row["addresses"])
        sampler.over.set()
        sampler.join()
        print(f"{sampler.samples} samples, {sampler.rate:.0f} a second")
        assert sampler.bad == []
        assert sampler.samples > ROTATIONS
        assert len({tuple(addresses) for addresses in seen}) > len(POOL) - 5
        # What was answered lately stays allowed for flows that are open; the limit of one name holds.
        assert len(world.writer.pins) == len(POOL)

    play(acts)
