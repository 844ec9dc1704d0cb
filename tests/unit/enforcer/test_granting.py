"""What was opened on demand: bounds, renewal, and that nothing stands without a question and a permission."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enforcer import granting
from enforcer.granting import EMPTY, LINGER, LONGEST, PER_CONTAINER, PER_ELEMENT, TTL_MIN, UNUSED, Opened

LIFE = TTL_MIN + LINGER
A, B, C = "192.0.2.1", "192.0.2.2", "192.0.2.3"


def anything(_name: str, _port: int) -> float:
    return inf


def good(_address: str) -> bool:
    return True


def test_an_answer_opens_its_addresses_on_each_port_for_their_life() -> None:
    shelf, fit = granting.ask(EMPTY, "a", (443, 80), (A, B, A), 30, 100.0)
    assert fit == (A, B)
    _, rows = granting.standing(shelf, 100.0, anything, good)
    assert rows == [Opened(address, port, "a", 100 + LIFE) for address in (A, B) for port in (80, 443)]
    assert granting.ask(EMPTY, "a", (443,), (A,), 3600, 0.0)[0][A, 443].names["a"].until == 3600 + LINGER
    assert granting.ask(EMPTY, "a", (443,), (A,), 1e12, 0.0)[0][A, 443].names["a"].until == LONGEST


def test_a_question_and_packets_renew_and_packets_alone_do_so_for_a_day() -> None:
    shelf, _ = granting.ask(EMPTY, "a", (443,), (A,), 0, 0.0)
    assert granting.used(shelf, (B, 443), 5.0) == shelf
    now = 0.0
    while now < LONGEST + 2 * LIFE:
        now += 300
        shelf = granting.used(shelf, (A, 443), now)
        shelf, rows = granting.standing(shelf, now, anything, good)
        assert bool(rows) == (now < LONGEST)
    shelf, _ = granting.ask(EMPTY, "a", (443,), (A,), 0, 0.0)
    shelf, _ = granting.ask(shelf, "a", (443,), (A,), 0, 500.0)
    assert granting.standing(shelf, 500 + LIFE - 1, anything, good)[1]
    assert not granting.standing(shelf, 500 + LIFE, anything, good)[1]


def test_an_element_stands_as_long_as_the_last_of_its_names() -> None:
    shelf, _ = granting.ask(EMPTY, "a", (443,), (A,), 0, 0.0)
    shelf, _ = granting.ask(shelf, "b", (443,), (A,), 0, 100.0)
    assert granting.standing(shelf, 100.0, anything, good)[1] == [Opened(A, 443, "a", 100 + LIFE)]
    left, rows = granting.standing(shelf, 100.0, lambda name, _port: inf if name == "b" else None, good)
    assert rows == [Opened(A, 443, "b", 100 + LIFE)]
    # What was taken back does not come back by itself.
    assert granting.standing(left, 100.0, lambda name, _port: inf if name == "a" else None, good)[1] == []
    assert granting.standing(shelf, 100.0, anything, lambda address: address != A)[1] == []


def test_a_permission_for_a_time_ends_what_it_opened() -> None:
    shelf, _ = granting.ask(EMPTY, "a", (443,), (A,), 0, 0.0)
    assert granting.standing(shelf, 0.0, lambda *_: 50.0, good)[1] == [Opened(A, 443, "a", 50.0)]
    assert granting.standing(shelf, 50.0, lambda *_: 50.0, good) == ({}, [])


def filled(used: float = 0.0) -> Any:
    addresses = [f"192.0.{number // 256}.{number % 256}" for number in range(PER_CONTAINER)]
    shelf, fit = granting.ask(EMPTY, "old", (443,), addresses, 0, used)
    assert len(fit) == len(shelf) == PER_CONTAINER
    return shelf


def test_a_full_shelf_gives_up_what_was_used_longest_ago_and_nothing_in_use() -> None:
    shelf = filled()
    assert not granting.full(shelf, (443,), ["192.0.0.7"])
    assert granting.full(shelf, (443,), ["198.51.100.1"])
    assert granting.ask(shelf, "new", (443,), ("198.51.100.1",), 0, UNUSED - 1) == (shelf, ())
    for element in list(shelf)[1:]:
        shelf = granting.used(shelf, element, UNUSED)
    # There is room for one: the second is busy, and not at the expense of the first.
    after, fit = granting.ask(shelf, "new", (443,), ("198.51.100.1", "198.51.100.2"), 0, UNUSED + 1)
    assert fit == ("198.51.100.1",)
    assert shelf.keys() - after.keys() == {("192.0.0.0", 443)}
    assert len(after) == PER_CONTAINER


def test_an_address_is_open_on_all_ports_or_on_none() -> None:
    shelf = filled()
    shelf = granting.used(shelf, ("192.0.0.1", 443), 100.0)
    for element in list(shelf)[2:]:
        shelf = granting.used(shelf, element, 100.0)
    after, fit = granting.ask(shelf, "new", (80, 443), ("198.51.100.1",), 0, 100.0)
    assert (after, fit) == (shelf, ())


def test_names_of_one_element_are_bounded_and_the_one_asked_for_now_stays() -> None:
    shelf: Any = EMPTY
    for number in range(3 * PER_ELEMENT):
        shelf, _ = granting.ask(shelf, f"n{number}", (443,), (A,), 0, float(number))
        assert f"n{number}" in shelf[A, 443].names
    assert len(shelf[A, 443].names) == PER_ELEMENT


def test_names_of_one_shelf_are_bounded_and_no_element_goes_for_it() -> None:
    shelf: Any = filled()
    elements = shelf.keys()
    for number in range(PER_ELEMENT):
        shelf, fit = granting.ask(shelf, f"n{number}", (443,), [a for a, _ in elements], 0, 1.0 + number)
        assert len(fit) == PER_CONTAINER
        assert all(f"n{number}" in grant.names for grant in shelf.values())
    assert shelf.keys() == elements
    assert sum(len(grant.names) for grant in shelf.values()) == granting.NAMES
    # What was asked for last is what is left.
    assert {name for grant in shelf.values() for name in grant.names} == {"n14", "n15"}


def test_what_stood_before_is_taken_over_for_the_life_it_has() -> None:
    shelf = granting.adopted([((A, 443), "a", 40.0), ((B, 443), "b", 0.0)], 1000.0)
    _, rows = granting.standing(shelf, 1000.0, anything, good)
    assert rows == [Opened(A, 443, "a", 1040.0)]
    many = [((f"192.0.{n // 256}.{n % 256}", 443), "a", 40.0) for n in range(PER_CONTAINER + 9)]
    assert len(granting.adopted(many, 0.0)) == PER_CONTAINER


NAMES, ADDRESSES, PORTS = (
    st.sampled_from("abc"),
    st.sampled_from([A, B, C, "192.0.2.4"]),
    st.sampled_from([80, 443]),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("ask"), NAMES, st.lists(PORTS, min_size=1), st.lists(ADDRESSES), st.integers(0, 4000)
        ),
        st.tuples(st.just("used"), ADDRESSES, PORTS),
        st.tuples(st.just("wait"), st.sampled_from([1, 30, 61, 500, 2000, 90000])),
        st.tuples(st.just("close"), NAMES, PORTS),
        st.tuples(st.just("open"), NAMES, PORTS),
        st.tuples(st.just("refuse"), ADDRESSES),
        st.tuples(st.just("look")),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_whatever_happens_only_what_was_asked_for_and_is_permitted_stands(steps: list[Any]) -> None:
    most = 5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(granting, "PER_CONTAINER", most)
        now, shelf = 0.0, EMPTY
        closed: set[tuple[str, int]] = set()
        refused: set[str] = set()
        asked: dict[tuple[str, int, str], float] = {}
        for step in steps:
            before = shelf
            match step:
                case ("ask", name, ports, addresses, ttl):
                    shelf, fit = granting.ask(shelf, name, ports, addresses, ttl, now)
                    assert set(fit) <= set(addresses)
                    for address in fit:
                        for port in ports:
                            asked[address, port, name] = now
                            assert shelf[address, port].names[name].until >= now + LIFE
                    assert all(before[e].used <= now - UNUSED for e in before.keys() - shelf.keys())
                case ("used", address, port):
                    shelf = granting.used(shelf, (address, port), now)
                    assert shelf.keys() == before.keys()
                case ("wait", seconds):
                    now += seconds
                case ("close", name, port):
                    closed.add((name, port))
                case ("open", name, port):
                    closed.discard((name, port))
                case ("refuse", address):
                    refused.add(address)
                case _:
                    shelf, rows = granting.standing(
                        shelf,
                        now,
                        lambda name, port: None if (name, port) in closed else inf,
                        lambda address: address not in refused,
                    )
                    assert {(row.address, row.port) for row in rows} == shelf.keys()
                    for row in rows:
                        assert row.end > now
                        assert row.address not in refused
                        assert (row.name, row.port) not in closed
            assert len(shelf) <= most
            for (address, port), grant in shelf.items():
                for name, why in grant.names.items():
                    assert why.until <= asked[address, port, name] + LONGEST
                    assert why.asked == asked[address, port, name]
