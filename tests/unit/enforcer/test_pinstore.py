"""A restart neither widens nor cuts what was open."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from enforcer import pins
from enforcer.pins import InUse, NameState, Refresh, Settings, Subscribe, Unsubscribe, Wish
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


def stale_start(engine: Engine, name: str = NAME, stale: bool = True) -> pins.Readiness:
    """A new container wants a name that cannot be asked."""
    engine.send(Subscribe(OTHER, "198.51.100.6", (Wish(name, stale=stale),)))
    engine.fail("timeout", name=name)
    return pins.readiness(engine.state, OTHER, stale)


def test_a_new_container_may_start_on_the_last_good_answer_where_it_says_so(engine: Engine) -> None:
    engine.send(Unsubscribe(BOX))
    assert engine.state.names == {}
    engine.tick(after=3600)
    ready = stale_start(engine)
    assert ready.ready
    assert ready.warnings == ((NAME, "timeout"),)
    assert engine.published(OTHER) == [A]
    assert engine.state.names[NAME].state is NameState.STALE
    engine.rotate(B, after=5)
    assert engine.published(OTHER) == [B]
    assert engine.state.remembered == {}


def test_it_may_not_without_saying_so_nor_after_a_day(engine: Engine) -> None:
    engine.send(Unsubscribe(BOX))
    refused = stale_start(engine, stale=False)
    assert refused.failed == ((NAME, "timeout"),)
    assert engine.published(OTHER) == []
    engine.send(Unsubscribe(OTHER))
    engine.tick(after=86400)
    assert stale_start(engine).failed == ((NAME, "timeout"),)
    assert engine.allowed(OTHER) == []


def test_a_remembered_answer_survives_a_restart_and_is_vetted_again(engine: Engine) -> None:
    engine.send(Unsubscribe(BOX))
    saved = json.loads(json.dumps(pins.save(engine.state, engine.now, wall=1.7e9)))
    for vetting, wanted in ((LAB, [A]), (Vetting.of(), [])):
        new = Engine()
        new.state = pins.restore(saved, new.now, 1.7e9 + 600, vetting)
        stale_start(new)
        assert new.published(OTHER) == wanted
    del saved["remembered"]
    assert pins.restore(saved, 0.0, 1.7e9, LAB).remembered == {}


def test_what_was_gone_or_refused_is_not_remembered(engine: Engine) -> None:
    engine.tick(after=60)
    engine.answer("10.0.0.5")
    engine.send(Unsubscribe(BOX))
    assert engine.state.remembered == {}


def test_only_so_many_names_are_remembered(engine: Engine) -> None:
    engine.state = replace(engine.state, settings=Settings(remembered_names=2))
    for number in range(3):
        engine.tick(after=1)
        engine.want(f"n{number}.example", container=OTHER)
        engine.answer(B, name=f"n{number}.example")
        engine.send(Unsubscribe(OTHER))
    assert engine.state.remembered.keys() == {"n1.example", "n2.example"}
