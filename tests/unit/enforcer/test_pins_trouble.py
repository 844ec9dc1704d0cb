"""What the pinning engine does when answers are forbidden, missing or denied."""

from __future__ import annotations

import pytest

from enforcer import pins
from enforcer.pins import InUse, NameState, Refresh, VettingChanged
from enforcer.vetting import Vetting
from tests.unit.enforcer.pin_engine import BOX, LAB, NAME, A, B, Engine, started


@pytest.fixture
def engine() -> Engine:
    """One container that wants one name, which has just been answered with A."""
    return started()


# -- vetting


def test_forbidden_addresses_beside_a_good_one_are_named_and_dropped() -> None:
    engine = Engine()
    engine.want(NAME)
    engine.answer("127.0.0.1", "169.254.169.254", A)
    assert engine.allowed() == [A]
    assert engine.name_state() is NameState.OK
    (status,) = pins.status(engine.state, BOX, engine.now)
    assert status.error is not None
    assert "127.0.0.1 is loopback" in status.error
    assert "169.254.169.254" in status.error
    assert [(notice.kind, notice.alarm) for notice in engine.notices] == [("refused", False)]


def test_only_forbidden_addresses_is_an_alarm_and_renews_nothing(engine: Engine) -> None:
    engine.rotate("127.0.0.1", after=60)
    assert engine.name_state() is NameState.REFUSED
    assert [(notice.kind, notice.alarm) for notice in engine.notices] == [("refused", True)]
    assert engine.allowed() == [A]
    engine.rotate("127.0.0.1", after=500)
    assert (engine.allowed(), engine.published()) == ([A], [])
    engine.rotate("127.0.0.1", after=100)
    engine.tick()
    assert engine.allowed() == []


def test_refused_name_rings_once_and_again_when_the_lie_changes(engine: Engine) -> None:
    engine.rotate("127.0.0.1", after=60)
    engine.rotate("127.0.0.1", after=60)
    assert len(engine.notices) == 1
    engine.rotate("127.0.0.2", after=60)
    assert len(engine.notices) == 2


def test_refused_name_does_not_freeze_when_it_then_times_out(engine: Engine) -> None:
    engine.rotate("127.0.0.1")
    for _ in range(10):
        engine.send(Refresh(), after=100)
        engine.fail("timeout")
    assert engine.allowed() == []
    assert engine.name_state() is NameState.REFUSED


def test_refused_name_recovers(engine: Engine) -> None:
    engine.rotate("127.0.0.1")
    engine.rotate(B)
    assert engine.name_state() is NameState.OK
    assert engine.published() == [B]
    assert engine.notices[-1].kind == "recovered"


def test_ipv6_addresses_are_never_pinned() -> None:
    engine = Engine()
    engine.want(NAME)
    engine.answer("2606:4700::1", A)
    assert engine.allowed() == [A]


def test_an_address_that_becomes_the_hosts_is_revoked_at_once(engine: Engine) -> None:
    engine.rotate(A, B)
    engine.send(VettingChanged(Vetting.of(permit=["203.0.113.0/24"], host_addresses=[B])))
    assert engine.allowed() == engine.published() == [A]
    assert engine.name_state() is NameState.OK
    assert engine.notices[-1].kind == "revoked"


def test_a_name_left_without_addresses_by_vetting_is_revoked_and_asked_again(engine: Engine) -> None:
    assert engine.send(VettingChanged(Vetting())) == [NAME]
    assert engine.allowed() == engine.published() == []
    assert engine.name_state() is NameState.REVOKED
    engine.fail("timeout")
    assert engine.name_state() is NameState.REVOKED


def test_lingering_and_leased_addresses_are_revoked_too(engine: Engine) -> None:
    engine.rotate(B)
    engine.send(InUse(BOX, A))
    engine.tick(after=300)
    engine.answer(B)
    engine.send(VettingChanged(Vetting.of(permit=["203.0.113.0/24"], docker_subnets=["203.0.113.1/32"])))
    assert engine.allowed() == [B]
    assert engine.state.leases == {}


def test_a_refused_name_is_asked_again_when_its_range_is_permitted() -> None:
    engine = Engine(vetting=Vetting())
    engine.want(NAME)
    engine.answer(A)
    assert engine.name_state() is NameState.REFUSED
    assert engine.send(VettingChanged(LAB)) == [NAME]
    engine.answer(A)
    assert engine.published() == [A]


def test_late_answer_is_vetted_with_what_is_known_now(engine: Engine) -> None:
    engine.tick(after=60)
    engine.send(VettingChanged(Vetting.of(permit=["203.0.113.0/24"], host_addresses=[B])))
    engine.answer(B)
    assert B not in engine.allowed()


def test_equal_vetting_changes_nothing(engine: Engine) -> None:
    before = engine.state.generation
    assert (
        engine.send(VettingChanged(Vetting.of(permit=["203.0.113.0/24", "198.51.100.0/24", "192.0.2.0/24"])))
        == []
    )
    assert engine.state.generation == before


# -- failures


@pytest.mark.parametrize("kind", ["timeout", "servfail", "refused", "network", "loop"])
def test_a_name_that_cannot_be_asked_keeps_its_last_good_addresses(engine: Engine, kind: str) -> None:
    engine.rotate(B)
    engine.send(Refresh())
    for _ in range(100):
        engine.fail(kind)
        assert engine.name_state() is NameState.STALE
        assert engine.allowed() == [A, B]
        assert engine.published() == [B]
        engine.tick(after=120)
    assert engine.now > 1000 + 10000


def test_retries_double_from_5_to_120_seconds(engine: Engine) -> None:
    engine.send(Refresh())
    for delay in (5, 10, 20, 40, 80, 120, 120):
        engine.fail()
        assert engine.tick(after=delay - 0.01) == []
        assert engine.tick(after=0.01) == [NAME]
    engine.answer(A)
    engine.send(Refresh())
    engine.fail()
    assert engine.tick(after=5) == [NAME]


def test_time_that_a_name_could_not_be_asked_does_not_count_against_addresses(engine: Engine) -> None:
    engine.rotate(B, after=60)
    engine.tick(after=60)
    engine.fail()
    for _ in range(30):
        engine.tick(after=120)
        engine.fail()
    engine.rotate(B)
    # A had 540 s left when the outage began.
    engine.tick(after=59)
    engine.tick(after=1)
    engine.answer(B)
    for _ in range(7):
        engine.rotate(B, after=60)
        assert engine.allowed() == [A, B]
    engine.rotate(B, after=60)
    engine.tick(after=1)
    assert engine.allowed() == [B]


def test_after_a_day_without_an_answer_a_name_is_gone_and_its_addresses_follow(engine: Engine) -> None:
    engine.send(Refresh())
    engine.fail()
    while engine.now < 1000 + 86400 - 200:
        if engine.tick(after=100):
            engine.fail()
    assert engine.published() == [A]
    while engine.name_state() is not NameState.GONE:
        if engine.tick(after=100):
            engine.fail()
    assert engine.published() == []
    assert engine.allowed() == [A]
    assert (engine.notices[-1].kind, engine.notices[-1].alarm) == ("gone", True)
    for _ in range(7):
        if engine.tick(after=100):
            engine.fail()
    assert engine.allowed() == []


def test_long_staleness_rings_once(engine: Engine) -> None:
    engine.send(Refresh())
    for _ in range(60):
        engine.fail()
        engine.tick(after=120)
    assert [(notice.kind, notice.alarm) for notice in engine.notices] == [("stale", False), ("stale", True)]


@pytest.mark.parametrize("kind", ["nxdomain", "empty"])
def test_a_name_is_gone_after_three_denials_over_ten_minutes(engine: Engine, kind: str) -> None:
    engine.send(Refresh())
    first = engine.now
    engine.fail(kind)
    while engine.now < first + 600:
        assert engine.name_state() is NameState.STALE
        assert engine.published() == [A]
        if engine.tick(after=60):
            engine.fail(kind)
    assert engine.name_state() is NameState.GONE
    assert engine.published() == []
    # Out of the hosts file first; the kernel keeps it for what was left when the denials began.
    gone = engine.now
    while engine.now < gone + 650:
        assert engine.allowed() == [A]
        if engine.tick(after=10):
            engine.fail(kind)
    if engine.tick(after=10):
        engine.fail(kind)
    assert engine.allowed() == []


def test_two_denials_are_not_enough_however_far_apart(engine: Engine) -> None:
    engine.send(Refresh())
    engine.fail("nxdomain")
    engine.send(Refresh(), after=5000)
    engine.fail("nxdomain")
    assert engine.published() == [A]


def test_an_answer_between_denials_starts_the_count_again(engine: Engine) -> None:
    for _ in range(10):
        engine.send(Refresh(), after=300)
        engine.fail("nxdomain")
        engine.send(Refresh(), after=300)
        engine.fail("nxdomain")
        assert engine.name_state() is NameState.STALE
        assert engine.published() == [A]
        engine.rotate(A)


def test_timeouts_between_denials_neither_count_nor_reset(engine: Engine) -> None:
    for kind in ("nxdomain", "timeout", "timeout", "timeout"):
        engine.send(Refresh(), after=300)
        engine.fail(kind)
    assert engine.name_state() is NameState.STALE
    for kind in ("nxdomain", "servfail", "nxdomain"):
        engine.send(Refresh(), after=300)
        engine.fail(kind)
    assert engine.name_state() is NameState.GONE


def test_an_answer_without_addresses_is_a_denial_not_a_withdrawal(engine: Engine) -> None:
    engine.rotate()
    assert engine.name_state() is NameState.STALE
    assert engine.published() == [A]


def test_a_gone_name_comes_back(engine: Engine) -> None:
    for _ in range(4):
        engine.send(Refresh(), after=300)
        engine.fail("nxdomain")
    assert engine.name_state() is NameState.GONE
    engine.rotate(B)
    assert engine.published() == [B]


def test_a_failing_name_never_hurts_another() -> None:
    engine = Engine()
    engine.want(NAME, "cdn.example")
    engine.answer(A)
    for _ in range(12):
        engine.fail("nxdomain", name="cdn.example")
        engine.tick(after=120)
        engine.answer(A)
    assert engine.published() == [A]
    assert engine.name_state() is NameState.OK
