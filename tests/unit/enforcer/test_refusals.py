"""Who is told of which refused packet."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enforcer.netfilter.claims import Claim
from enforcer.netfilter.model import DeniedRequest, Refused, parse_denied
from enforcer.netfilter.nflog import Packet
from enforcer.netfilter.refusals import PER_ANSWER, PER_BRIDGE, PER_USER, Refusals


def claim(uid: int, index: int) -> Claim:
    subnet = IPv4Network(f"172.16.{index}.0/26")
    return Claim(uid, f"corral-0000000{index}", index, subnet, IPv4Address(f"172.16.{index}.1"))


MINE, ALSO_MINE, THEIRS = claim(1000, 1), claim(1000, 2), claim(1001, 3)
CLAIMS = {one.bridge: one for one in (MINE, ALSO_MINE, THEIRS)}


def packet(index: int, src: str | None = None, port: int = 9) -> Packet:
    return Packet(index, src or f"172.16.{index}.2", 17, port, "203.0.113.66")


def asking(after: int = 0, epoch: str = "one") -> DeniedRequest:
    return DeniedRequest(epoch, after, frozenset(), tallies=False)


def ports(answer: dict[str, Any]) -> list[int]:
    return [row[4] for row in answer["records"]]


def test_each_user_is_told_of_its_own_bridges_with_numbers_of_its_own() -> None:
    of = Refusals("one")
    of.add([packet(1, port=1), packet(3, port=2), packet(2, port=3), packet(3, port=4)], CLAIMS, 5.0)
    mine, theirs = of.since(1000, asking()), of.since(1001, asking())
    assert mine["records"] == [
        [1, 5.0, "172.16.1.2", 17, 1, "203.0.113.66"],
        [2, 5.0, "172.16.2.2", 17, 3, "203.0.113.66"],
    ]
    assert (mine["next"], mine["lost"]) == (2, 0)
    assert ports(theirs) == [2, 4]
    assert of.since(1002, asking()) == {"epoch": "one", "next": 0, "lost": 0, "records": []}


@pytest.mark.parametrize(
    "stray",
    [packet(9), packet(1, "172.16.3.2"), packet(1, "203.0.113.9"), packet(0, "172.16.1.2")],
    ids=["no-claim", "others-source", "foreign-source", "no-interface"],
)
def test_interface_and_source_have_to_belong_together(stray: Packet) -> None:
    of = Refusals("one")
    of.add([stray], CLAIMS, 0.0)
    assert not any(of.since(uid, asking())["records"] for uid in (1000, 1001))


def test_asking_again_goes_on_where_it_ended_and_a_new_life_begins_anew() -> None:
    of = Refusals("one")
    of.add([packet(1, port=port) for port in (1, 2, 3)], CLAIMS, 0.0)
    assert ports(of.since(1000, asking(2))) == [3]
    assert ports(of.since(1000, asking(3))) == []
    assert ports(of.since(1000, asking(2, epoch="before"))) == [1, 2, 3]
    # Further than there is anything: whoever asks so has it from elsewhere.
    assert of.since(1000, asking(10**9))["next"] == 3


def test_what_is_not_kept_any_more_is_counted_as_lost() -> None:
    of = Refusals("one")
    of.add([packet(1, port=port % 60000) for port in range(PER_BRIDGE + 100)], CLAIMS, 0.0)
    answer = of.since(1000, asking(40))
    assert (answer["lost"], len(answer["records"])) == (60, PER_BRIDGE)


def test_a_flood_on_one_bridge_leaves_the_records_of_others() -> None:
    of = Refusals("one")
    of.add([packet(2, port=7)], CLAIMS, 0.0)
    of.add([packet(1)] * 50_000, CLAIMS, 0.0)
    answer = of.since(1000, asking())
    assert 7 in ports(answer)
    assert of.since(1001, asking())["next"] == 0


def test_a_user_with_many_bridges_is_bounded_and_loses_of_the_busiest() -> None:
    claims = {
        one.bridge: one
        for one in (
            Claim(1000, f"b{n}", n, IPv4Network(f"172.16.{n}.0/26"), IPv4Address(f"172.16.{n}.1"))
            for n in range(20)
        )
    }
    of = Refusals("one")
    of.add([packet(0, port=7)], claims, 0.0)
    for index in range(1, 20):
        of.add([packet(index)] * PER_BRIDGE, claims, 0.0)
    kept, after = 0, 0
    while rows := (answer := of.since(1000, asking(after)))["records"]:
        kept, after = kept + len(rows), answer["next"]
    assert kept == PER_USER
    assert 7 in ports(of.since(1000, asking()))


def test_a_long_answer_comes_in_parts_without_a_gap() -> None:
    of = Refusals("one")
    for index in (1, 2):
        of.add([packet(index)] * PER_BRIDGE, CLAIMS, 0.0)
    extra = claim(1000, 4)
    of.add([packet(4)] * 100, {**CLAIMS, extra.bridge: extra}, 0.0)
    first = of.since(1000, asking())
    assert (len(first["records"]), first["lost"], first["next"]) == (PER_ANSWER, 0, PER_ANSWER)
    second = of.since(1000, asking(first["next"]))
    assert (len(second["records"]), second["lost"]) == (100, 0)


def test_a_bridge_that_changes_hands_takes_nothing_along() -> None:
    of = Refusals("one")
    of.add([packet(1)], CLAIMS, 0.0)
    taken = Claim(1001, MINE.bridge, MINE.index, MINE.subnet, MINE.gateway)
    of.prune({taken.bridge: taken})
    assert of.since(1000, asking())["records"] == []
    assert of.since(1001, asking())["records"] == []


BODY = {"v": 2, "op": "denied", "epoch": "", "after": 0, "sources": ["172.16.0.2"], "tallies": True}


@pytest.mark.parametrize(
    "change",
    [
        {"after": -1},
        {"after": True},
        {"after": "0"},
        {"epoch": 1},
        {"tallies": 1},
        {"sources": "172.16.0.2"},
        {"sources": ["172.16.0.2/24"]},
        {"sources": [1]},
        {"sources": ["172.16.0.2"] * 20_000},
        {"more": 1},
    ],
    ids=str,
)
def test_an_odd_request_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        parse_denied({**BODY, **change})


@given(st.lists(st.integers(0, 5)), st.integers(0, 40))
def test_every_record_is_told_or_counted_as_lost(indexes: list[int], after: int) -> None:
    of = Refusals("one")
    of.add([packet(index) for index in indexes], CLAIMS, 0.0)
    for uid, own in ((1000, (1, 2)), (1001, (3,))):
        count = sum(index in own for index in indexes)
        answer = of.since(uid, asking(after))
        assert len(answer["records"]) + answer["lost"] == max(0, count - after)
