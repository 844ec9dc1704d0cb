"""What each container gets of the names it wants: entries, limits, readiness, status."""

from __future__ import annotations

import random

import pytest

from enforcer import pins
from enforcer.pins import InUse, NameState, Refresh, Settings, Unsubscribe, VettingChanged, Wish
from enforcer.vetting import Vetting
from tests.unit.enforcer.pin_engine import BOX, NAME, OTHER, A, B, C, Engine, many, started


@pytest.fixture
def engine() -> Engine:
    """One container that wants one name, which has just been answered with A."""
    return started()


# -- containers


def test_an_answer_widens_only_containers_whose_policy_has_the_name() -> None:
    engine = Engine()
    engine.want(NAME, container=BOX)
    engine.want("cdn.example", container=OTHER)
    engine.answer(A)
    engine.answer(B, name="cdn.example")
    assert pins.allowed(engine.state) == {
        BOX: {NAME: (pins.Grant(A, (443,)),)},
        OTHER: {"cdn.example": (pins.Grant(B, (443,)),)},
    }


def test_ports_are_those_of_the_containers_own_policy() -> None:
    engine = Engine()
    engine.want(Wish(NAME, (443, 8443)), container=BOX)
    engine.want(Wish(NAME, (80,)), Wish(NAME, (22, 80)), container=OTHER)
    engine.answer(A)
    assert pins.allowed(engine.state)[BOX][NAME] == (pins.Grant(A, (443, 8443)),)
    assert pins.allowed(engine.state)[OTHER][NAME] == (pins.Grant(A, (22, 80)),)


def test_two_names_may_share_an_address_and_one_may_go() -> None:
    engine = Engine()
    engine.want(NAME, "cdn.example")
    engine.answer(A)
    engine.answer(A, name="cdn.example")
    engine.want("cdn.example")
    assert pins.allowed(engine.state)[BOX] == {"cdn.example": (pins.Grant(A, (443,)),)}


def test_narrowing_a_policy_revokes_at_once_and_shows_it(engine: Engine) -> None:
    engine.want(NAME, "cdn.example")
    engine.answer(B, name="cdn.example")
    engine.rotate(C)
    engine.send(InUse(BOX, A))
    engine.want("cdn.example")
    assert pins.allowed(engine.state)[BOX].keys() == {"cdn.example"}
    assert NAME not in engine.state.names
    assert engine.state.leases == {}
    rows = {row.name: row.state for row in pins.status(engine.state, BOX, engine.now)}
    assert rows == {"cdn.example": NameState.OK, NAME: NameState.REVOKED}
    engine.want("cdn.example", NAME)
    rows = {row.name: row.state for row in pins.status(engine.state, BOX, engine.now)}
    assert rows == {"cdn.example": NameState.OK, NAME: NameState.NEW}


def test_a_container_that_is_gone_has_nothing(engine: Engine) -> None:
    engine.want(NAME, container=OTHER)
    engine.rotate(B)
    engine.send(InUse(BOX, A))
    engine.send(Unsubscribe(BOX))
    engine.send(Unsubscribe(BOX))
    assert pins.allowed(engine.state).keys() == pins.published(engine.state).keys() == {OTHER}
    assert engine.state.leases == {}


def test_published_holds_only_what_the_kernel_was_read_to_have() -> None:
    engine = Engine()
    engine.want(Wish(NAME, (443, 80)))
    engine.answer(A, B, C)
    live = {BOX: {(A, 443), (B, 443), (B, 80), (C, 80)}, OTHER: {(A, 80)}}
    assert pins.published(engine.state, live)[BOX][NAME] == (B,)
    assert pins.published(engine.state, {})[BOX][NAME] == ()


# -- caps


def test_an_answer_of_four_hundred_is_cut_to_the_same_64_each_time(engine: Engine) -> None:
    addresses = many(200) + many(200, third=112)
    vetting = Vetting.of(permit=["203.0.112.0/23"])
    engine.send(VettingChanged(vetting))
    engine.rotate(*addresses)
    first = engine.allowed()
    assert len(first) == 64
    assert len(engine.published()) == 16
    assert set(engine.published()) <= set(first)
    for seed in range(5):
        random.Random(seed).shuffle(addresses)
        engine.rotate(*addresses, after=60)
        assert engine.allowed() == first


def test_old_addresses_make_room_oldest_first_and_latest_never(engine: Engine) -> None:
    engine.rotate(*many(40)[10:], after=10)
    engine.rotate(*many(80)[40:], after=10)
    kept = engine.allowed()
    assert len(kept) == 64
    assert set(many(80)[40:]) <= set(kept)
    assert A not in kept
    assert len(engine.state.names[NAME].pins) == 64


def test_addresses_in_use_stay_within_the_limit_of_a_name(engine: Engine) -> None:
    engine.rotate(*many(16))
    engine.rotate("203.0.113.200")
    for address in many(16):
        engine.send(InUse(BOX, address))
    engine.rotate(*many(80)[20:], after=60)
    kept = engine.allowed()
    assert len(kept) == 64
    assert set(many(80)[20:]) <= set(kept)


def test_a_container_has_at_most_1024_entries_and_every_name_a_share() -> None:
    engine = Engine(vetting=Vetting.of(permit=["203.0.0.0/16"]))
    names = [f"n{number:02}.example" for number in range(50)]
    engine.want(*(Wish(name, (443, 8443)) for name in names))
    for number, name in enumerate(names):
        engine.answer(*many(64, third=number), name=name)
    granted = pins.allowed(engine.state)[BOX]
    entries = {
        (grant.address, port) for grants in granted.values() for grant in grants for port in grant.ports
    }
    assert len(entries) == 1024
    assert min(len(grants) for grants in granted.values()) >= 10
    published = pins.published(engine.state)[BOX]
    assert all(
        set(published[name]) <= {grant.address for grant in granted[name]} and published[name]
        for name in names
    )


def test_a_name_without_a_place_below_the_limit_is_not_ready() -> None:
    engine = Engine(limits=Settings(entries_per_container=2))
    engine.want("a.example", "b.example", "c.example")
    for number, name in enumerate(("a.example", "b.example", "c.example")):
        engine.answer(f"203.0.113.{number}", name=name)
    readiness = pins.readiness(engine.state, BOX)
    assert [name for name, _ in readiness.failed] == ["c.example"]
    assert "limit of 2" in readiness.failed[0][1]


def test_names_with_one_address_count_it_once() -> None:
    engine = Engine(limits=Settings(entries_per_container=1))
    engine.want("a.example", "b.example")
    engine.answer(A, name="a.example")
    engine.answer(A, name="b.example")
    assert pins.readiness(engine.state, BOX).ready


# -- readiness


def test_a_container_waits_for_all_its_names_and_hears_of_all_failures_at_once() -> None:
    engine = Engine()
    engine.want("a.example", "b.example", "c.example", Wish("d.example", optional=True))
    assert pins.readiness(engine.state, BOX).pending == ("a.example", "b.example", "c.example", "d.example")
    engine.answer(A, name="a.example")
    engine.fail("nxdomain", name="b.example")
    engine.fail("timeout", name="d.example")
    assert pins.readiness(engine.state, BOX).pending == ("c.example",)
    engine.answer("127.0.0.1", name="c.example")
    readiness = pins.readiness(engine.state, BOX)
    assert not readiness.ready
    assert [name for name, _ in readiness.failed] == ["b.example", "c.example"]
    assert readiness.failed[0][1] == "nxdomain"
    assert "loopback" in readiness.failed[1][1]
    assert readiness.warnings == (("d.example", "timeout"),)


def test_an_optional_name_is_picked_up_later() -> None:
    engine = Engine()
    engine.want(Wish(NAME, optional=True))
    engine.fail("nxdomain")
    assert pins.readiness(engine.state, BOX).ready
    assert engine.tick(after=5) == [NAME]
    engine.answer(A)
    assert engine.published() == [A]


def test_a_new_container_does_not_start_on_stale_names_unless_told_to(engine: Engine) -> None:
    engine.send(Refresh())
    engine.fail()
    assert engine.want(NAME, container=OTHER) == [NAME]
    assert pins.readiness(engine.state, OTHER).pending == (NAME,)
    engine.fail()
    assert pins.readiness(engine.state, OTHER).failed == ((NAME, "timeout"),)
    assert pins.readiness(engine.state, OTHER, allow_stale=True).ready


def test_a_failure_before_a_container_came_does_not_speak_for_it(engine: Engine) -> None:
    engine.send(Refresh())
    engine.fail()
    engine.want(NAME, container=OTHER)
    engine.answer(B)
    assert pins.readiness(engine.state, OTHER).ready


def test_status_shows_age_next_refresh_and_what_lingers(engine: Engine) -> None:
    engine.rotate(B, after=60)
    (row,) = pins.status(engine.state, BOX, engine.now + 10)
    assert (row.addresses, row.lingering) == ((B,), (A,))
    assert (row.age, row.next_refresh, row.error) == (10, 50, None)
