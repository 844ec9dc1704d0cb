"""The account of refused packets: attribution, counting, bounds, words."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from enforcer.addressbook import ADDRESSES, NAMES, AddressBook
from enforcer.denied import CONTAINERS, ROWS, SANDBOXES, Counted, Flow, Heard, Ledger
from enforcer.deniedreport import MAX_ROWS, report
from enforcer.pinmodel import NameState, Pin, Record
from enforcer.sessions import Life, Network, Session
from policy.declaration import Declaration, Name
from policy.identity import Sandbox

FORBIDDEN, ALLOWED, LYING = "203.0.113.66", "203.0.113.10", "198.18.0.9"
PROBE, RESOLVER, GATEWAY = "192.0.2.1", "192.0.2.53", "172.16.0.1"
NET = Network(
    Sandbox("demo-0a0b0c0d").network, "corral-0a0b0c0d", IPv4Network("172.16.0.0/26"), IPv4Address(GATEWAY)
)
OTHER_NET = Network(
    Sandbox("other-0a0b0c0e").network,
    "corral-0a0b0c0e",
    IPv4Network("172.16.0.64/26"),
    IPv4Address("172.16.0.65"),
)
START = 1000.0


def session(container: str = "c1", address: str = "172.16.0.2", **changes: Any) -> Session:
    made = Session(
        container=container,
        name=f"corral-demo-main-{container}",
        sandbox=Sandbox("demo-0a0b0c0d"),
        service="main",
        session=f"5e55{container}",
        address=address,
        hostname="demo",
        hosts_file=Path("/none"),
        declaration=Declaration(
            names=(Name(host="api.example.com"), Name(host="git.example.com", ports=(22,)))
        ),
        network=NET,
        running=True,
        project="/home/dev/demo",
        life=Life(START - 1, START, 4242, frozenset({PROBE, RESOLVER})),
    )
    return replace(made, **changes)


def flow(dst: str = FORBIDDEN, port: int = 9, proto: int = 17, src: str = "172.16.0.2") -> Flow:
    return (src, proto, port, dst)


def ledger(*sessions: Session) -> Ledger:
    of = Ledger()
    of.notice(sessions or (session(),), (NET, OTHER_NET))
    return of


def counts(of: Ledger) -> dict[tuple[str, int, int], int]:
    return {(row.flow[3], row.flow[1], row.flow[2]): row.count for row in of.rows()}


def told(of: Ledger, book: AddressBook | None = None, **words: Any) -> dict[str, Any]:
    return report(of, book or AddressBook(), {}, epoch="one", **words)


def only(of: Ledger, book: AddressBook | None = None) -> dict[str, Any]:
    (row,) = told(of, book)["rows"]
    return row


LATER = START + 100


# -- counting


def test_what_is_logged_once_and_counted_afterwards_is_one_exact_row() -> None:
    of = ledger()
    of.hear([Heard(LATER, flow())])
    of.count([Counted(flow(), 5000, 60)], LATER + 1)
    of.count([Counted(flow(), 7000, 58)], LATER + 3)
    (row,) = of.rows()
    assert (row.count, of.at_least(row), row.first, row.last) == (7000, False, LATER, LATER + 3)


def test_a_count_that_begins_anew_is_added_and_marked_as_a_lower_bound() -> None:
    of = ledger()
    of.count([Counted(flow(), 100, 60)], LATER)
    of.count([Counted(flow(), 150, 1)], LATER + 59)
    # Between the last look and the end of the element some may have come that nobody saw.
    of.hear([Heard(LATER + 61, flow())])
    of.count([Counted(flow(), 200, 59)], LATER + 62)
    (row,) = of.rows()
    assert (row.count, of.at_least(row)) == (350, True)


def test_an_element_that_ends_unseen_leaves_a_lower_bound_unless_the_total_accounts_for_it() -> None:
    of = ledger()
    of.count([Counted(flow(), 3, 2)], LATER)
    of.count([], LATER + 2)
    (row,) = of.rows()
    assert (row.count, of.at_least(row)) == (3, True)
    of.totals({"172.16.0.2": 3}, LATER + 2)
    assert not of.at_least(row)
    of.totals({"172.16.0.2": 4}, LATER + 4)
    assert of.at_least(row)


def test_a_record_that_comes_after_its_count_is_not_counted_twice() -> None:
    of = ledger()
    of.count([Counted(flow(), 3, 60)], LATER)
    of.hear([Heard(LATER, flow())])
    of.count([Counted(flow(), 3, 59)], LATER + 1)
    assert [row.count for row in of.rows()] == [3]


def test_without_counters_the_records_are_the_count_and_a_lower_bound() -> None:
    of = ledger()
    of.hear([Heard(LATER + n, flow()) for n in range(7)])
    (row,) = of.rows()
    assert (row.count, of.at_least(row)) == (7, True)


def test_what_no_row_has_is_told_as_a_number() -> None:
    of = ledger()
    of.count([Counted(flow(port=port), 1, 60) for port in range(1, 51)], LATER)
    of.totals({"172.16.0.2": 3000}, LATER)
    assert of.of_sandbox("demo-0a0b0c0d") == (3000, 2950)
    assert of.of_session("c1", "demo-0a0b0c0d") == 3000
    (sandbox,) = told(of)["sandboxes"]
    assert (sandbox["denied"], sandbox["unlisted"]) == (3000, 2950)


def test_a_kernel_count_that_began_anew_is_added() -> None:
    of = ledger()
    for total in (100, 150, 20):
        of.totals({"172.16.0.2": total}, LATER)
    assert of.of_session("c1", "demo-0a0b0c0d") == 170


# An element that ended before anybody looked again, and one that nobody ever saw.
@example([(1, 1, False), *[(1, 0, False)] * 9, (1, 0, True), (1, 1, False), (1, 0, True)])
@example([(1, 1, False), *[(1, 0, False)] * 11, (1, 2, True)])
@settings(max_examples=500)
@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 50), st.booleans()),
        max_size=30,
    )
)
def test_no_order_of_logs_counts_and_restarts_invents_a_packet(steps: list[tuple[int, int, bool]]) -> None:
    """The kernel's element of a destination counts; now and then it ends and begins anew. 5 s a step."""
    of, sent, element, now = ledger(), dict.fromkeys((1, 2, 3), 0), {}, LATER
    for port, packets, looked in steps:
        now += 5
        element = {key: row for key, row in element.items() if now - row[1] < 60}
        for _ in range(packets):
            if port not in element:
                element[port] = [0, now]
                of.hear([Heard(now, flow(port=port))])
            element[port][0] += 1
            sent[port] += 1
        if looked:
            rows = [Counted(flow(port=key), row[0], int(60 - now + row[1])) for key, row in element.items()]
            of.count(rows, now)
    for row in of.rows():
        assert row.count <= sent[row.flow[2]]
        assert of.at_least(row) or row.count == sent[row.flow[2]] or not steps[-1][2]


# -- who


def test_an_address_that_changes_hands_leaves_each_its_own() -> None:
    first = session("c1")
    of = ledger(first)
    of.hear([Heard(LATER, flow(port=1))])
    second = session("c2", life=replace(first.life, created=LATER + 10, started=LATER + 10))
    of.notice([second], [NET])
    of.hear([Heard(LATER + 20, flow(port=2)), Heard(LATER + 5, flow(port=3))])
    assert {(row.place.container, row.flow[2]) for row in of.rows()} == {("c1", 1), ("c2", 2), ("c1", 3)}


def test_a_source_nobody_knows_belongs_to_its_network() -> None:
    of = ledger()
    of.hear([Heard(LATER, flow(src="172.16.0.70")), Heard(LATER, flow(src="172.16.9.9"))])
    assert {row.place.sandbox for row in of.rows()} == {"other-0a0b0c0e", "-"}
    row = told(of)["rows"][0]
    assert (row["service"], row["session"], row["container"]) == (None, None, None)


def test_one_project_is_told_without_the_others() -> None:
    of = ledger(
        session(), session("c9", "172.16.0.66", sandbox=Sandbox("other-0a0b0c0e"), project="/home/dev/o")
    )
    of.hear([Heard(LATER, flow()), Heard(LATER, flow(src="172.16.0.66", port=5))])
    assert [row["port"] for row in told(of, project="/home/dev/demo")["rows"]] == [9]
    assert told(of, project="/elsewhere")["rows"] == []
    assert len(told(of)["rows"]) == 2


# -- what is corral's own


@pytest.mark.parametrize(
    ("what", "at", "check"),
    [
        (flow(PROBE, 443, 6), 0.05, True),
        (flow(PROBE, 443, 17), 0.05, True),
        (flow(RESOLVER, 53), 0.05, True),
        (flow(GATEWAY, 53, 6), 0.05, True),
        (flow(RESOLVER, 53), 60, False),
        (flow(GATEWAY, 53), 60, False),
        (flow(FORBIDDEN, 53), 0.05, False),
        (flow(GATEWAY, 22, 6), 0.05, False),
        (flow(RESOLVER, 443, 6), 60, False),
        (flow(PROBE, 443, 1), 0.05, False),
    ],
)
def test_only_what_the_gate_tries_while_it_works_is_a_check(what: Flow, at: float, check: bool) -> None:
    of = ledger()
    of.hear([Heard(START + at, what)])
    assert [row.check for row in of.rows()] == [check]


def test_a_question_of_the_program_to_where_the_gate_asked_is_a_row_of_its_own() -> None:
    of = ledger()
    of.hear([Heard(START + 0.1, flow(GATEWAY, 53))])
    of.count([Counted(flow(GATEWAY, 53), 2, 60)], START + 1)
    of.count([Counted(flow(GATEWAY, 53), 5, 40)], START + 20)
    assert sorted((row.check, row.count) for row in of.rows()) == [(False, 3), (True, 2)]
    of.totals({"172.16.0.2": 5}, START + 20)
    assert of.of_session("c1", "demo-0a0b0c0d") == 3
    assert of.of_sandbox("demo-0a0b0c0d") == (3, 0)


def test_everything_a_verifying_session_tries_is_a_check() -> None:
    of = ledger(session(purpose="verify"))
    of.hear([Heard(LATER, flow())])
    assert [row.check for row in of.rows()] == [True]


# -- bounds


def test_rows_of_a_sandbox_are_bounded_and_those_that_had_to_go_are_counted() -> None:
    of = ledger(session(), session("c2", "172.16.0.3"))
    of.count([Counted(flow(port=1, src="172.16.0.3"), 4, 60)], LATER)
    for n in range(ROWS + 50):
        of.hear([Heard(LATER + n, flow(dst=f"203.0.113.{n % 250}", port=1000 + n // 250))])
    assert len(of.rows()) == ROWS
    assert of.of_sandbox("demo-0a0b0c0d") == (ROWS + 50 + 4, 54)
    answer = told(of)
    assert (len(answer["rows"]), answer["left_out"]) == (ROWS, 0)
    assert MAX_ROWS > ROWS


def test_sandboxes_containers_and_addresses_are_bounded() -> None:
    of = Ledger()
    for n in range(SANDBOXES + 10):
        made = session(f"c{n}", f"172.16.{n // 200 + 1}.{n % 200}", sandbox=Sandbox(f"s{n}-0a0b0c0d"))
        of.notice([made], [NET])
        of.hear([Heard(LATER, flow(src=made.address))])
    assert len(of.accounts) == SANDBOXES
    of = Ledger()
    for n in range(CONTAINERS + 10):
        life = Life(START + n, START + n)
        of.notice([session(f"c{n}", life=life)], [NET])
        of.totals({"172.16.0.2": 7 * (n + 1)}, START + n + 0.5)
    assert len(of.accounts["demo-0a0b0c0d"].total) == CONTAINERS
    assert of.of_sandbox("demo-0a0b0c0d") == (7 * (CONTAINERS + 10), 7 * (CONTAINERS + 10))


# -- words


def book(**records: Record) -> AddressBook:
    made = AddressBook()
    made.learn(records)
    return made


def record(name: str, *addresses: str, refused: dict[str, str] | None = None) -> Record:
    pins = {address: Pin(0, 0, 60, 0) for address in addresses}
    return Record(name, state=NameState.OK, latest=addresses, pins=pins, refused=refused or {})


@pytest.mark.parametrize(
    ("known", "what", "note", "hint"),
    [
        (record("new.example.com", FORBIDDEN), flow(proto=6, port=443), "new.example.com", "add new.example.com to egress.allow"),
        (
            record("git.example.com", FORBIDDEN),
            flow(proto=6, port=443),
            "git.example.com",
            "git.example.com is allowed on 22: add port 443 to it in egress.allow",
        ),
        (record("api.example.com", FORBIDDEN), flow(proto=6, port=443), "api.example.com: an earlier", None),
        (record("new.example.com", FORBIDDEN), flow(), "new.example.com: names are opened for TCP only", None),
        (
            record("lying.example.com", refused={LYING: "benchmarking"}),
            flow(LYING, 443, 6),
            "refused answer of lying.example.com: benchmarking",
            None,
        ),
        (record("x.example.com"), flow(proto=6, port=443), None, None),
        (record("x.example.com"), flow(GATEWAY, 8081, 6), "this host", "add port 8081 to host_services"),
        (record("x.example.com"), flow("172.16.0.70", 80, 6), "sandbox other-0a0b0c0e", None),
        (record("x.example.com"), flow("172.16.0.9", 80, 6), "a session of the same sandbox", None),
        (record("dns.example.com", FORBIDDEN), flow(port=53), "DNS: a sandbox has no resolver", None),
        (record("dns.example.com", FORBIDDEN), flow(port=853, proto=6), "DNS: a sandbox has no resolver", None),
    ],
)  # fmt: skip
def test_a_row_says_what_it_is_and_what_would_allow_it(
    known: Record, what: Flow, note: str | None, hint: str | None
) -> None:
    of = ledger()
    of.hear([Heard(LATER, what)])
    row = only(of, book(**{known.name: known}))
    assert row["hint"] == hint
    assert row["note"] == note or (note is not None and str(row["note"]).startswith(note))


def test_an_icmp_row_has_a_type_and_no_port() -> None:
    of = ledger()
    of.hear([Heard(LATER, flow(proto=1, port=8 << 8))])
    row = only(of)
    assert (row["protocol"], row["port"], row["icmp_type"]) == ("icmp", None, 8)
    of = ledger()
    of.hear([Heard(LATER, flow(proto=47, port=0))])
    assert (only(of)["protocol"], only(of)["port"]) == ("ip-47", None)


def test_the_second_account_of_the_same_packet_is_no_news() -> None:
    for counted_first in (False, True):
        of = ledger()
        steps = [
            lambda of=of: of.hear([Heard(LATER, flow())]),
            lambda of=of: of.count([Counted(flow(), 1, 60)], LATER + 1),
        ]
        first, second = reversed(steps) if counted_first else steps
        first()
        reached = told(of)["next"]
        second()
        assert told(of, after=reached)["rows"] == []
        assert [(row["count"], row["at_least"]) for row in told(of)["rows"]] == [(1, False)]


def test_only_what_changed_is_told_again() -> None:
    of = ledger()
    of.hear([Heard(LATER, flow(port=1)), Heard(LATER, flow(port=2))])
    reached = told(of)["next"]
    assert told(of, after=reached)["rows"] == []
    of.hear([Heard(LATER, flow(port=1))])
    assert [(row["port"], row["count"]) for row in told(of, after=reached)["rows"]] == [(1, 2)]


# -- names of addresses


def test_names_outlive_their_policy_and_their_answers() -> None:
    made = book(a=record("a", ALLOWED))
    made.learn({"a": record("a", FORBIDDEN), "b": record("b", ALLOWED)})
    made.learn({})
    assert [known.name for known in made.names(ALLOWED)] == ["b", "a"]
    assert [known.name for known in made.names(FORBIDDEN)] == ["a"]
    again = AddressBook()
    again.restore(made.save())
    assert [known.name for known in again.names(ALLOWED)] == ["b", "a"]
    assert not again.moved


def test_the_book_is_bounded() -> None:
    made = AddressBook()
    for n in range(ADDRESSES + 10):
        made.learn({"a": record("a", f"203.{n >> 16}.{n >> 8 & 255}.{n & 255}")})
    assert len(made.save()["addresses"]) == ADDRESSES
    for n in range(NAMES + 5):
        made.learn({f"n{n}": record(f"n{n}", ALLOWED)})
    assert len(made.names(ALLOWED)) == NAMES


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    )
)
def test_a_damaged_book_is_read_as_far_as_it_makes_sense(rows: Any) -> None:
    made = AddressBook()
    made.restore(rows)
    made.restore({"version": 1, "addresses": rows})
    made.restore({"version": 1, "addresses": {ALLOWED: rows}})
