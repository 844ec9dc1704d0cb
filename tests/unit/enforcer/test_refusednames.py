"""The account of names that were asked for and refused: numbers, bounds, and what a name may look like."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from enforcer import refusednames
from enforcer.denied import SANDBOXES, Heard, Ledger, Place
from enforcer.refusednames import NAMES, REASONS, RefusedNames

DEMO = Place("demo-0a0b0c0d", "/home/dev/demo", "proxy")
AT = 1000.0


def made() -> tuple[Ledger, RefusedNames]:
    ledger = Ledger()
    return ledger, RefusedNames(ledger)


def test_a_name_asked_for_again_is_one_row_with_a_count_and_both_times() -> None:
    _, names = made()
    for at, text in ((AT, "Files.Example.com."), (AT + 9, "files.example.com")):
        names.ask(DEMO, text, 443, "denied", at)
    (row,) = names.rows()
    assert (row.name, row.count, row.first, row.last) == ("files.example.com", 2, AT, AT + 9)


def test_port_and_reason_tell_rows_apart() -> None:
    _, names = made()
    for port, reason in ((443, "denied"), (8443, "denied"), (0, "denied"), (443, "no-sni"), (443, "denied")):
        names.ask(DEMO, "files.example.com", port, reason, AT)
    assert [(row.port, row.reason, row.count) for row in names.rows()] == [
        (8443, "denied", 1),
        (0, "denied", 1),
        (443, "no-sni", 1),
        (443, "denied", 2),
    ]


def test_numbers_are_shared_with_refused_packets_so_that_nothing_is_shown_twice_or_missed() -> None:
    ledger, names = made()
    names.ask(DEMO, "a.example.com", 443, "denied", AT)
    ledger.hear([Heard(AT, ("172.16.0.2", 17, 9, "203.0.113.66"))])
    seen = ledger.number
    assert [row.number for row in names.rows()] == [1]
    assert seen == 2
    names.ask(DEMO, "b.example.com", 443, "denied", AT)
    assert [row.name for row in names.rows(seen)] == ["b.example.com"]
    assert ledger.rows(seen) == []
    assert len({row.ident for row in names.rows()} | {row.ident for row in ledger.rows()}) == 3


def test_what_is_no_name_is_counted_and_not_kept() -> None:
    _, names = made()
    odd = [
        "",
        "\x1b[2Jx.example.com",
        "a b.example.com",
        "203.0.113.7",
        "a" * 300,
        "n\n.example.com",
        "ü.example.com",
    ]
    for text in odd:
        names.ask(DEMO, text, 443, "denied", AT)
    names.ask(DEMO, "x.example.com", 65536, "denied", AT)
    names.ask(DEMO, "x.example.com", 443, "\x1b[2J", AT)
    assert names.rows() == []
    account = names.accounts[DEMO.sandbox]
    assert (account.total, account.unlisted) == (len(odd) + 2, len(odd) + 2)


def test_a_flood_of_names_keeps_the_latest_and_counts_the_rest() -> None:
    _, names = made()
    for number in range(NAMES + 500):
        names.ask(DEMO, f"n{number}.example.com", 443, "denied", AT + number)
        names.ask(DEMO, "asked-all-the-time.example.com", 443, "denied", AT + number)
    kept = {row.name: row for row in names.rows()}
    assert len(kept) == NAMES
    assert kept["asked-all-the-time.example.com"].count == NAMES + 500
    assert "n0.example.com" not in kept
    assert f"n{NAMES + 499}.example.com" in kept
    assert names.accounts[DEMO.sandbox].unlisted == 501


def test_one_sandbox_cannot_make_the_names_of_another_be_forgotten() -> None:
    _, names = made()
    names.ask(Place("quiet-0a0b0c0e"), "needed.example.com", 443, "denied", AT)
    for sandbox in range(refusednames.ALL_NAMES // NAMES + 3):
        for number in range(NAMES):
            names.ask(Place(f"loud{sandbox}"), f"n{number}.example.com", 443, "denied", AT)
    assert len(names.rows()) == refusednames.ALL_NAMES
    assert "needed.example.com" in {row.name for row in names.rows()}


def test_sandboxes_that_did_not_ask_for_longest_are_forgotten() -> None:
    _, names = made()
    for number in range(SANDBOXES + 5):
        names.ask(Place(f"s{number}"), "a.example.com", 443, "denied", AT)
    assert len(names.accounts) == SANDBOXES
    assert "s0" not in names.accounts


QUESTIONS = st.tuples(
    st.sampled_from([DEMO, Place("other-0a0b0c0e", "", "main", "5e55", "c1")]),
    st.sampled_from(["a.example.com", "A.example.com.", "b.example.com", "c.example.com", "no name", "\x1b"]),
    st.sampled_from([0, 443, 8443, -1, 70000]),
    st.sampled_from([*sorted(REASONS), "odd"]),
)


@given(st.lists(st.one_of(QUESTIONS, st.just(None)), max_size=60), st.integers(1, 6), st.integers(1, 8))
def test_numbers_grow_rows_are_bounded_and_no_question_is_lost(
    questions: list[tuple[Place, str, int, str] | None], most: int, whole: int
) -> None:
    ledger, names = made()
    before = refusednames.NAMES, refusednames.ALL_NAMES
    refusednames.NAMES, refusednames.ALL_NAMES = most, whole
    try:
        asked = 0
        for step, question in enumerate(questions):
            seen = ledger.number
            if question is None:
                ledger.hear([Heard(AT + step, ("172.16.0.2", 17, step, "203.0.113.66"))])
                assert names.rows(seen) == []
                continue
            names.ask(*question, AT + step)
            asked += 1
            changed = names.rows(seen)
            assert [row.number for row in changed] == ([ledger.number] if ledger.number > seen else [])
            assert all(len(account.rows) <= most for account in names.accounts.values())
            assert len(names.rows()) <= whole
            assert sum(a.total for a in names.accounts.values()) == asked
            assert all(a.unlisted >= 0 for a in names.accounts.values())
        numbers = [row.number for row in names.rows()]
        assert numbers == sorted(set(numbers))
        assert all(row.name.isascii() and row.name.isprintable() for row in names.rows())
    finally:
        refusednames.NAMES, refusednames.ALL_NAMES = before
