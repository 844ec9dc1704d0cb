"""The resolver is down for ten minutes and more: time is the machine's, not the clock's on the wall."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.enforcer.machine.checks import published
from tests.unit.enforcer.machine.player import Player
from tests.unit.enforcer.machine.world import Zone

GOOD = ("203.0.113.1",)
MINUTES = 600.0


@pytest.fixture
def player() -> Iterator[Player]:
    made = Player(0.004, {"a.example": GOOD, "b.example": ("203.0.113.2",), "c.example": GOOD})
    yield made
    made.close()


def down(player: Player, kind: str = "timeout") -> None:
    for name in ("a.example", "b.example", "c.example"):
        player.world.zones[name] = Zone(kind, latency=5.0)


@pytest.mark.parametrize("kind", ["timeout", "servfail", "network"])
@pytest.mark.parametrize("restarted", [False, True])
def test_what_runs_goes_on_without_a_resolver_for_ten_minutes(
    player: Player, kind: str, restarted: bool
) -> None:
    player.create(0, policy=0)
    player.act(lambda: None, 1.0)
    down(player, kind)
    player.act(lambda: None, MINUTES / 2)
    if restarted:
        player.kill_service(20.0)
    player.act(lambda: None, MINUTES / 2)
    player.act(lambda: None, MINUTES)
    service = player.world.service
    assert service is not None
    assert service.names.state.names["a.example"].state.value == "STALE"
    assert published(player.oracle.truths["c1"])["a.example"] == set(GOOD)


def test_a_new_session_is_refused_with_the_names_meanwhile_and_starts_afterwards(player: Player) -> None:
    player.create(0, policy=0)
    player.act(lambda: None, 1.0)
    down(player)
    player.act(lambda: None, MINUTES)
    player.create(4, policy=2)
    player.act(lambda: None, 20.0)
    refused = player.world.starts["c2"]
    assert refused.answer is None
    assert "b.example" in (refused.error or "")
    assert "a.example" not in (refused.error or "")
    for name, addresses in (("a.example", GOOD), ("b.example", ("203.0.113.2",)), ("c.example", GOOD)):
        player.world.zones[name] = Zone("ok", addresses)
    player.act(lambda: None, 130.0)
    player.create(4, policy=2)
    player.act(lambda: None, 2.0)
    assert player.world.starts["c3"].answer is not None
    service = player.world.service
    assert service is not None
    assert service.names.state.names["a.example"].state.value == "OK"
