"""When an address becomes allowed and published, and for how long it stays."""

from __future__ import annotations

import pytest

from enforcer import pins
from enforcer.pins import (
    Answer,
    Answered,
    Failed,
    Failure,
    InUse,
    NameState,
    Query,
    Refresh,
    Settings,
    State,
    Subscribe,
    Unsubscribe,
    Wish,
)
from tests.unit.enforcer.pin_engine import BOX, LAB, NAME, OTHER, A, B, C, Engine, many, started


@pytest.fixture
def engine() -> Engine:
    """One container that wants one name, which has just been answered with A."""
    return started()


# -- answers


def test_answer_is_allowed_and_published(engine: Engine) -> None:
    assert engine.allowed() == engine.published() == [A]
    assert engine.name_state() is NameState.OK


def test_nothing_is_allowed_before_an_answer() -> None:
    engine = Engine()
    engine.want(NAME)
    assert engine.allowed() == engine.published() == []
    assert engine.name_state() is NameState.NEW


def test_same_address_twice_is_one(engine: Engine) -> None:
    engine.rotate(B, B, B)
    assert engine.published() == [B]


def test_order_is_numeric_and_stable(engine: Engine) -> None:
    engine.rotate("203.0.113.10", "203.0.113.9", A)
    assert engine.published() == [A, "203.0.113.9", "203.0.113.10"]


def test_equal_answer_changes_neither_sets_nor_generation(engine: Engine) -> None:
    engine.rotate(A, B)
    before = engine.state.generation
    engine.rotate(B, A)
    assert engine.state.generation == before


def test_changed_answer_changes_the_generation(engine: Engine) -> None:
    before = engine.state.generation
    engine.rotate(B)
    assert engine.state.generation > before


# -- schedule


@pytest.mark.parametrize(
    ("ttl", "delay"), [(0, 30), (29, 30), (31, 31), (299, 299), (300, 300), (86400, 300)]
)
def test_refresh_follows_the_ttl_between_30_and_300_seconds(ttl: int, delay: float) -> None:
    engine = Engine()
    engine.want(NAME)
    engine.answer(A, ttl=ttl)
    assert engine.tick(after=delay - 0.01) == []
    assert engine.tick(after=0.01) == [NAME]


def test_jitter_makes_refreshes_earlier_by_up_to_a_tenth() -> None:
    state, actions = pins.step(State(vetting=LAB), Subscribe(BOX, "198.51.100.5", (Wish(NAME),)), 0.0)
    (query,) = actions
    assert isinstance(query, Query)
    answered = Answered(Answer(NAME, (A,), 200, 0.0), query.token)
    delays = [pins.step(state, answered, 0.0, lambda r=r: r)[0].names[NAME].due for r in (0.0, 0.5, 0.999)]
    assert delays == [200.0, pytest.approx(190.0), pytest.approx(180.02)]


def test_one_schedule_for_a_name_of_many_containers() -> None:
    engine = Engine()
    assert engine.want(NAME, container=BOX) == [NAME]
    assert engine.want(NAME, container=OTHER) == []
    engine.answer(A)
    assert engine.allowed(BOX) == engine.allowed(OTHER) == [A]
    assert engine.tick(after=60) == [NAME]


def test_a_name_under_way_is_not_asked_again(engine: Engine) -> None:
    assert engine.tick(after=60) == [NAME]
    assert engine.tick(after=5) == []
    assert engine.send(Refresh()) == []


def test_a_lost_query_is_given_up_and_asked_again(engine: Engine) -> None:
    engine.tick(after=60)
    engine.tick(after=30)
    assert engine.name_state() is NameState.STALE
    assert engine.tick(after=5) == [NAME]


def test_nobody_asks_for_a_name_that_no_container_wants(engine: Engine) -> None:
    engine.send(Unsubscribe(BOX))
    assert engine.state.names == {}
    assert engine.tick(after=1000) == []


def test_refresh_asks_now_and_only_what_was_named() -> None:
    engine = Engine()
    engine.want(NAME, "cdn.example")
    engine.answer(A)
    engine.answer(B, name="cdn.example")
    assert engine.send(Refresh(("cdn.example", "unknown.example"))) == ["cdn.example"]
    assert engine.send(Refresh()) == [NAME]


def test_next_due_is_the_next_moment_something_happens(engine: Engine) -> None:
    assert pins.next_due(engine.state) == engine.now + 60
    engine.rotate(B, ttl=300, after=60)
    # A lingers until 660 s after it was seen; B is asked for in 300 s.
    assert pins.next_due(engine.state) == engine.now + 300
    engine.rotate(B, ttl=300, after=300)
    engine.tick(after=299.0)
    assert pins.next_due(engine.state) == engine.now + 1
    assert pins.next_due(State()) is None


# -- late results


def test_result_of_a_discarded_query_is_dropped(engine: Engine) -> None:
    engine.tick(after=60)
    old = engine.open[NAME]
    assert engine.send(Refresh(discard=True)) == [NAME]
    engine.send(Answered(Answer(NAME, (B,), 60, engine.now), old))
    assert engine.published() == [A]
    engine.answer(C)
    assert engine.published() == [C]


def test_result_for_an_earlier_life_of_a_name_is_dropped(engine: Engine) -> None:
    engine.tick(after=60)
    old = engine.open[NAME]
    engine.send(Unsubscribe(BOX))
    engine.send(Answered(Answer(NAME, (B,), 60, engine.now), old))
    engine.want(NAME)
    engine.send(Answered(Answer(NAME, (B,), 60, engine.now), old))
    engine.send(Failed(Failure(NAME, "nxdomain"), old))
    assert engine.allowed() == []
    assert engine.name_state() is NameState.NEW


# -- expiry


@pytest.mark.parametrize(("ttl", "lifetime"), [(0, 660), (60, 660), (200, 800), (300, 900), (3600, 4200)])
def test_an_address_stays_allowed_for_its_ttl_and_ten_minutes(ttl: int, lifetime: float) -> None:
    engine = Engine()
    engine.want(NAME)
    engine.answer(A, ttl=ttl)
    seen = engine.now
    engine.rotate(B, after=1)
    assert engine.published() == [B]
    while engine.now < seen + lifetime - 20:
        engine.rotate(B, after=10)
    engine.tick(after=seen + lifetime - 0.01 - engine.now)
    assert A in engine.allowed()
    engine.tick(after=0.01)
    assert engine.allowed() == [B]


def test_an_absurd_ttl_counts_as_a_day(engine: Engine) -> None:
    engine.rotate(A, ttl=2**31 - 1)
    assert engine.state.names[NAME].pins[A].until == engine.now + 86400 + 600


def test_each_address_has_its_own_time(engine: Engine) -> None:
    engine.rotate(A, B, after=30)
    engine.rotate(B, after=300)
    engine.rotate(C, after=300)
    assert engine.allowed() == [A, B, C]
    engine.rotate(C, after=90)
    assert engine.allowed() == [B, C]


def test_latest_answer_never_expires_by_itself(engine: Engine) -> None:
    engine.tick(after=60)
    engine.tick(after=29)
    assert engine.allowed() == [A]
    for _ in range(50):
        engine.tick(after=30)
        engine.tick(after=130)
    assert engine.published() == engine.allowed() == [A]


def test_latest_answer_outlives_its_time_when_refreshes_are_rare() -> None:
    engine = Engine(limits=Settings(jitter=0.0, refresh_min=5000, refresh_max=5000))
    engine.want(NAME)
    engine.answer(A)
    engine.tick(after=4000)
    assert engine.published() == engine.allowed() == [A]
    assert engine.state.names[NAME].pins.keys() == {A}


def test_after_a_long_sleep_names_are_asked_before_anything_expires(engine: Engine) -> None:
    engine.rotate(B, after=60)
    engine.tick(after=5000)
    assert engine.allowed() == [A, B]
    engine.answer(B)
    assert engine.allowed() == [B]


# -- in use


def test_an_address_in_use_is_not_pulled_away(engine: Engine) -> None:
    engine.rotate(B)
    for _ in range(100):
        engine.send(InUse(BOX, A))
        engine.rotate(B, after=60)
        assert engine.allowed() == [A, B]
        assert engine.published() == [B]
    for _ in range(11):
        engine.rotate(B, after=60)
    assert engine.allowed() == [B]


def test_use_by_one_container_renews_nothing_for_another() -> None:
    engine = Engine()
    engine.want(NAME, container=BOX)
    engine.want(NAME, container=OTHER)
    engine.answer(A)
    engine.rotate(B)
    for _ in range(12):
        engine.send(InUse(BOX, A))
        engine.rotate(B, after=60)
    assert engine.allowed(BOX) == [A, B]
    assert engine.allowed(OTHER) == [B]


def test_use_is_bounded_by_a_day(engine: Engine) -> None:
    engine.rotate(B)
    start = engine.now
    while engine.now < start + 86400 - 300:
        engine.send(InUse(BOX, A))
        engine.rotate(B, after=300)
    assert engine.allowed() == [A, B]
    engine.send(InUse(BOX, A))
    engine.rotate(B, after=300)
    engine.tick()
    assert engine.allowed() == [B]


def test_use_is_bounded_by_sixteen_addresses_of_a_name(engine: Engine) -> None:
    engine.rotate(*many(40))
    engine.rotate(B)
    for _ in range(12):
        for address in many(40):
            engine.send(InUse(BOX, address))
        engine.rotate(B, after=60)
    assert len(engine.allowed()) == 17


def test_use_never_allows_what_was_not_answered(engine: Engine) -> None:
    before = engine.allowed()
    engine.send(InUse(BOX, "203.0.113.99"))
    engine.send(InUse("nobody", A))
    assert engine.allowed() == before
    assert engine.state.leases == {}


def test_use_after_expiry_brings_nothing_back(engine: Engine) -> None:
    for _ in range(12):
        engine.rotate(B, after=60)
    assert engine.allowed() == [B]
    engine.send(InUse(BOX, A))
    assert engine.allowed() == [B]
