from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enforcer.overrides import LONGEST, MAX_GRANTS, Overrides, Store, dump, parse
from policy.declaration import Declaration, Name
from policy.errors import EnforcerError

DECLARED = Declaration(
    names=(Name(host="a.example", ports=(443, 8443)), Name(host="b.example", optional=True))
)
NOW, WALL = 1000.0, 1e9


def reach(overrides: Overrides) -> dict[str, tuple[int, ...]]:
    return {name.host: name.ports for name in overrides.names(DECLARED)}


def test_without_overrides_the_declaration_stands() -> None:
    assert Overrides().names(DECLARED) == DECLARED.names


def test_a_granted_name_is_optional_and_comes_last() -> None:
    found = Overrides().allow("c.example", (443,), None).names(DECLARED)
    assert found == (*DECLARED.names, Name(host="c.example", ports=(443,), optional=True))


def test_a_port_granted_to_a_declared_name_keeps_the_name_s_wishes() -> None:
    found = Overrides().allow("b.example", (8080,), None).names(DECLARED)
    assert found[1] == Name(host="b.example", ports=(443, 8080), optional=True)
    assert Overrides().allow("a.example", (443,), None).names(DECLARED) == DECLARED.names


def test_a_denied_name_is_gone_and_an_allowed_port_does_not_bring_the_others_back() -> None:
    denied = Overrides().deny("a.example", DECLARED)
    assert reach(denied) == {"b.example": (443,)}
    assert reach(denied.allow("a.example", (8443,), None)) == {"a.example": (8443,), "b.example": (443,)}


def test_denying_takes_back_what_was_granted() -> None:
    both = Overrides().allow("a.example", (9,), None).allow("c.example", (443,), None)
    assert reach(both.deny("a.example", DECLARED).deny("c.example", DECLARED)) == {"b.example": (443,)}


def test_a_grant_ends_at_its_time_and_the_longer_one_counts() -> None:
    twice = Overrides().allow("c.example", (443,), NOW + 10).allow("c.example", (443, 80), NOW + 5)
    assert reach(twice.at(NOW + 6))["c.example"] == (443,)
    assert "c.example" not in reach(twice.at(NOW + 10))
    assert twice.at(NOW) is twice
    lasting = twice.allow("c.example", (443,), None).allow("c.example", (443,), NOW + 1)
    assert reach(lasting.at(NOW + LONGEST))["c.example"] == (443,)


def test_a_name_keeps_its_place_when_it_has_ended() -> None:
    found = Overrides().allow("d.example", (443,), NOW + 1).allow("c.example", (443,), None).at(NOW + 2)
    assert found.places(DECLARED) == (("a.example", "b.example"), ("d.example", "c.example"))


def test_ends_tells_granted_ports_that_are_not_declared() -> None:
    found = Overrides().allow("a.example", (443, 9), NOW + 7).allow("c.example", (443,), None)
    assert found.ends("a.example", DECLARED) == {9: NOW + 7}
    assert found.ends("c.example", DECLARED) == {443: None}
    assert found.ends("b.example", DECLARED) == {}


def test_there_is_a_limit_to_what_one_session_is_granted() -> None:
    found = Overrides()
    for number in range(MAX_GRANTS):
        found = found.allow(f"n{number}.example", (443,), None)
    with pytest.raises(EnforcerError, match="can be granted 64 names"):
        found.allow("one-more.example", (443,), None)


hosts = st.sampled_from(["a.example", "b.example", "c.example", "d.example"])
steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("allow"), hosts, st.sampled_from([443, 80, 9]), st.one_of(st.none(), st.floats(1, 1e5))
        ),
        st.tuples(st.just("deny"), hosts),
    ),
    max_size=12,
)


def played(events: list[Any]) -> Overrides:
    found = Overrides()
    for event in events:
        if event[0] == "deny":
            found = found.deny(event[1], DECLARED)
        else:
            until = None if event[3] is None else NOW + event[3]
            found = found.allow(event[1], (event[2],), until)
    return found


@given(steps)
def test_the_last_word_about_a_name_counts(events: list[Any]) -> None:
    for host in {event[1] for event in events}:
        last = [event for event in events if event[1] == host][-1]
        shown = reach(played(events))
        assert (host in shown) is (last[0] == "allow")
        if last[0] == "allow":
            assert last[2] in shown[host]


@given(steps, st.floats(-1e6, 1e6), st.floats(0, 1e6))
def test_a_restart_never_widens_whatever_the_clocks_did(
    events: list[Any], wall_moved: float, down: float
) -> None:
    before = played(events)
    # A boot in between: the service's clock begins anew.
    after = parse(dump(before, NOW, WALL), 5.0, WALL + wall_moved)
    old, new = reach(before), reach(after)
    for host, ports in new.items():
        assert set(ports) <= set(old[host])
    for host, granted in after.granted.items():
        for port, until in granted.items():
            known = before.granted[host][port]
            if until is None:
                assert known is None
            else:
                assert known is not None
                assert until - 5.0 <= known - NOW + 1e-3
    assert after.denied == before.denied
    assert after.listed == before.listed


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"wall": "x"},
        {"granted": {"c.example": {"0": None}}},
        {"granted": {"c.example": {"x": None}}},
        {"granted": {"not a name": {"443": None}}, "listed": ["not a name"]},
        {"granted": {"c.example": {"443": None}}, "listed": []},
        {"granted": None},
        {"denied": ["127.0.0.1"]},
        {"denied": 7},
        {"listed": ["localhost"]},
    ],
    ids=str,
)
def test_a_damaged_file_is_told_and_gives_nothing(tmp_path: Path, change: dict[str, Any]) -> None:
    body = json.loads(dump(Overrides().allow("c.example", (443,), None), NOW, WALL)) | change
    with pytest.raises(ValueError, match=r"damaged|version|float|literal"):
        parse(json.dumps(body), NOW, WALL)
    (tmp_path / "c1.json").write_text(json.dumps(body))
    with pytest.raises(EnforcerError, match="cannot be read"):
        Store(tmp_path).load("c1", NOW, WALL)


def test_infinite_and_odd_times_have_ended() -> None:
    body = json.loads(dump(Overrides().allow("c.example", (443,), NOW + 5), NOW, WALL))
    body["granted"]["c.example"] = {"1": float("nan"), "2": float("inf"), "3": -1.0}
    left = parse(json.dumps(body), NOW, WALL).granted.get("c.example", {})
    assert 1 not in left
    assert 3 not in left
    assert (left.get(2) or 0) <= NOW + LONGEST


def test_the_store_keeps_one_file_a_container(tmp_path: Path) -> None:
    store = Store(tmp_path / "sessions")
    assert store.load("c1", NOW, WALL) is None
    assert store.containers() == set()
    made = Overrides().allow("c.example", (443,), None).deny("a.example", DECLARED)
    store.save("c1", made, NOW, WALL)
    assert (tmp_path / "sessions").stat().st_mode & 0o777 == 0o700
    assert store.load("c1", NOW, WALL) == made
    assert store.containers() == {"c1"}
    store.drop("c1")
    store.drop("c1")
    assert store.containers() == set()


@pytest.mark.parametrize("ident", ["", "../x", "a/b", ".x", "x" * 200])
def test_only_the_id_of_a_container_names_a_file(tmp_path: Path, ident: str) -> None:
    with pytest.raises(EnforcerError):
        Store(tmp_path).save(ident, Overrides(), NOW, WALL)
    Store(tmp_path).drop(ident)
