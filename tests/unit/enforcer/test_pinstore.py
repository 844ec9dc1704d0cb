"""A restart neither widens nor cuts what was open."""

from __future__ import annotations

import json
from typing import Any

import pytest

from enforcer import pins
from enforcer.pins import InUse, NameState, Refresh, Subscribe
from enforcer.vetting import Vetting
from tests.unit.enforcer.pin_engine import BOX, LAB, NAME, OTHER, A, B, C, Engine, started


@pytest.fixture
def engine() -> Engine:
    """One container that wants one name, which has just been answered with A."""
    return started()


def restarted(engine: Engine, down: float = 0.0, vetting: Vetting = LAB) -> Engine:
    """Save, start again with another monotonic clock, subscribe the containers that exist."""
    saved = json.loads(json.dumps(pins.save(engine.state, engine.now, wall=1.7e9)))
    new = Engine(vetting=vetting, now=5.0)
    new.state = pins.restore(saved, new.now, 1.7e9 + down, vetting, new.state.settings)
    for container in engine.state.containers.values():
        new.send(Subscribe(container.id, container.source, container.wishes))
    return new


@pytest.mark.parametrize("down", [0.0, 5.0, 4000.0])
def test_restart_keeps_what_was_allowed_and_published(engine: Engine, down: float) -> None:
    engine.rotate(B, C, after=60)
    engine.send(InUse(BOX, A))
    new = restarted(engine, down)
    assert new.allowed() == engine.allowed() == [A, B, C]
    assert new.published() == engine.published()
    assert new.name_state() is NameState.STALE
    assert new.open.keys() == {NAME}
    new.answer(B)
    assert new.published() == [B]
    assert new.allowed() == [A, B, C]


def test_restart_continues_the_time_an_address_has_left(engine: Engine) -> None:
    engine.rotate(B, after=60)
    new = restarted(engine, down=3000)
    new.answer(B)
    for _ in range(9):
        new.rotate(B, after=60)
        assert new.allowed() == [A, B]
    new.rotate(B, after=60)
    assert new.allowed() == [B]


def test_restart_keeps_an_address_that_only_its_use_kept(engine: Engine) -> None:
    for _ in range(20):
        engine.rotate(B, after=60)
        engine.send(InUse(BOX, A))
    assert A not in engine.state.names[NAME].pins
    new = restarted(engine, down=100)
    assert new.allowed() == [A, B]
    new.answer(B)
    new.send(InUse(BOX, A), after=500)
    assert new.allowed() == [A, B]


def test_restart_vets_again(engine: Engine) -> None:
    engine.rotate(A, B)
    new = restarted(engine, vetting=Vetting.of(permit=["203.0.113.0/24"], host_addresses=[A]))
    assert new.allowed() == new.published() == [B]


def test_restart_vets_addresses_that_only_their_use_kept(engine: Engine) -> None:
    for _ in range(20):
        engine.rotate(B, after=60)
        engine.send(InUse(BOX, A))
    new = restarted(engine, vetting=Vetting.of(permit=["203.0.113.0/24"], host_addresses=[A]))
    assert new.allowed() == [B]


def test_restart_during_an_outage_keeps_the_time_addresses_had_left(engine: Engine) -> None:
    engine.rotate(B, after=60)
    for _ in range(20):
        engine.send(Refresh(), after=120)
        engine.fail()
    new = restarted(engine)
    new.answer(B)
    # A had 600 s, of which the first refresh of the outage came after 120.
    for _ in range(7):
        new.rotate(B, after=60)
        assert new.allowed() == [A, B]
    new.rotate(B, after=60)
    new.tick()
    assert new.allowed() == [B]


def test_restart_drops_what_no_container_wants_any_more(engine: Engine) -> None:
    saved = pins.save(engine.state, engine.now, wall=1.7e9)
    new = Engine()
    new.state = pins.restore(saved, new.now, 1.7e9, LAB)
    assert new.tick() == []
    new.tick(after=599)
    assert new.state.names.keys() == {NAME}
    new.tick(after=1)
    assert new.state.names == {}


def test_restart_expires_nothing_before_each_container_has_come_back(engine: Engine) -> None:
    """Even a name that nobody answered for for a day is asked once more first."""
    engine.want("cdn.example", container=OTHER)
    engine.answer(B, name="cdn.example")
    new = restarted(engine, down=90000)
    assert new.allowed(OTHER, "cdn.example") == [B]
    assert new.published() == [A]


def test_restart_after_more_than_a_day_keeps_nothing_without_an_answer(engine: Engine) -> None:
    new = restarted(engine, down=90000)
    new.fail()
    assert new.published() == []
    assert new.name_state() is NameState.GONE


def test_restart_does_not_prolong_a_refused_name(engine: Engine) -> None:
    engine.rotate("127.0.0.1")
    assert restarted(engine, down=500).allowed() == [A]
    assert restarted(engine, down=500).published() == []
    assert restarted(engine, down=4000).allowed() == []


@pytest.mark.parametrize("skew", [-1e6, 1e6])
def test_a_wall_clock_that_jumped_prolongs_nothing_beyond_the_rules(engine: Engine, skew: float) -> None:
    engine.rotate(B, after=60)
    saved = json.loads(json.dumps(pins.save(engine.state, engine.now, wall=1.7e9)))
    state = pins.restore(saved, 50.0, 1.7e9 + skew, LAB)
    for pin in state.names[NAME].pins.values():
        assert pin.last_seen <= 50.0
        frozen = state.names[NAME].frozen_since
        assert frozen is not None
        assert pin.until - frozen <= 660


@pytest.mark.parametrize("field", ["until", "ttl"])
def test_a_forged_file_prolongs_nothing_beyond_the_rules(engine: Engine, field: str) -> None:
    saved = json.loads(json.dumps(pins.save(engine.state, engine.now, wall=1.7e9)))
    saved["names"][NAME]["pins"][A][field] = 1e12
    state = pins.restore(saved, 50.0, 1.7e9, LAB)
    assert state.names[NAME].pins[A].until <= 50 + 86400 + 600


@pytest.mark.parametrize(
    "damage",
    [
        {"version": 99},
        {"wall": None},
        {"wall": "soon"},
        {"wall": float("nan")},
        {"names": []},
        {"names": {NAME: {}}},
        {"names": {NAME: {"state": "WHAT", "answered": 0, "latest": [], "pins": {}}}},
        {"leases": [1]},
        {"leases": [{"container": BOX, "name": NAME, "address": A, "last_seen": float("inf"), "until": 0}]},
    ],
)
def test_a_damaged_file_is_one_clear_error(engine: Engine, damage: dict[str, Any]) -> None:
    saved = pins.save(engine.state, engine.now, wall=1.7e9)
    with pytest.raises(ValueError):
        pins.restore({**saved, **damage}, 0.0, 1.7e9, LAB)
