"""The service started a hundred times: what the kernel holds neither grows nor shrinks."""

from __future__ import annotations

import copy
import random

import pytest

from enforcer.netfilter.skeleton import HOST, PINS
from tests.unit.enforcer.machine import checks
from tests.unit.enforcer.machine.player import Player

RESTARTS = 100


@pytest.mark.parametrize("who", ["service", "writer", "both"])
def test_a_hundred_restarts_keep_every_rule_and_element(who: str) -> None:
    rng = random.Random(1)
    player = Player(0.004, {"a.example": ("203.0.113.1",), "b.example": ("203.0.113.2", "203.0.113.3")})
    try:
        for slot in (0, 4):
            player.create(slot, policy=1)
            player.deed(slot, "start")
        player.come_to_rest()
        kernel = player.world.kernel

        def state() -> object:
            sets = [checks.held(player.world, name) for name in (PINS, HOST)]
            rest = (kernel.tables, kernel.backstop, kernel.owners, kernel.gateways, set(kernel.sources or ()))
            return copy.deepcopy((rest, sets))

        before = state()
        assert len(checks.held(player.world, PINS)) == 10
        for _ in range(RESTARTS):
            if who != "service":
                player.world.writer.kill()
            if who != "writer":
                player.kill_service(rng.uniform(0, 0.3))
            player.act(lambda: None, rng.uniform(0.2, 1.0))
            assert len(checks.held(player.world, PINS)) == 10
        player.come_to_rest()
        assert state() == before
    finally:
        player.close()
