"""How much one source may ask."""

from __future__ import annotations

from math import inf

import pytest

from enforcer.budget import Budget, BusyError


def test_a_burst_and_then_a_rate() -> None:
    budget = Budget(rate=10, burst=3, most=1)
    assert [budget.take(5.0) for _ in range(4)] == [True, True, True, False]
    assert budget.take(5.125)
    assert not budget.take(5.125)
    assert [budget.take(1000.0) for _ in range(4)] == [True, True, True, False]


def test_who_waits_gets_a_turn_each_after_the_other() -> None:
    budget = Budget(rate=10, burst=2, most=1)
    waits = [budget.reserve(5.0, inf) for _ in range(5)]
    assert waits == pytest.approx([0, 0, 0.1, 0.2, 0.3])
    # Nobody is let in before those who wait already.
    assert budget.reserve(5.1, inf) == pytest.approx(0.3)


def test_who_would_wait_too_long_takes_nothing() -> None:
    budget = Budget(rate=10, burst=1, most=1)
    assert budget.reserve(5.0, 0.05) == 0
    assert budget.reserve(5.0, 0.05) is None
    assert budget.reserve(5.0, 0.15) == pytest.approx(0.1)


def test_a_clock_that_goes_back_gives_nothing() -> None:
    budget = Budget(rate=10, burst=1, most=1)
    assert budget.take(5.0)
    assert not budget.take(1.0)
    assert not budget.take(5.0)


def test_only_so_many_are_under_way() -> None:
    budget = Budget(rate=10, burst=1, most=2)
    with budget.slot(), budget.slot(), pytest.raises(BusyError), budget.slot():
        raise AssertionError
    with pytest.raises(ZeroDivisionError), budget.slot():
        raise ZeroDivisionError
    assert budget.pending == 0
