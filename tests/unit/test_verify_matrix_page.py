"""docs/verify-matrix.md has the rows of the table and says of a sandbox what the table expects."""

from __future__ import annotations

import dataclasses

import pytest

from tests.system.matrix.rows import MOUNTS, ROWS, problems, seen
from tests.system.matrix.running import Answers
from tests.system.verify_matrix import PAGE, documented, page

ALL = {row.probe: Answers(row.expected, "something else", "") for row in ROWS}


def test_the_page_says_what_is_expected_of_each_technique() -> None:
    assert documented() == {row.technique: row.expected for row in ROWS}
    mounts = sum(len(mounts) for mounts in MOUNTS.values())
    assert PAGE.read_text().partition("## The mounts")[2].count("\n| ") == mounts + 1


def test_no_probe_and_no_technique_has_two_rows() -> None:
    assert len({row.probe for row in ROWS}) == len({row.technique for row in ROWS}) == len(ROWS)


def test_an_answer_that_is_not_expected_is_named() -> None:
    assert problems(ALL) == []
    first = ROWS[0].probe
    assert problems({**ALL, first: Answers("CapEff 1", "x", "x")}) == [
        f"{first}: CapEff 1, not {ROWS[0].expected}"
    ]


def test_a_probe_that_says_the_same_everywhere_is_named_but_for_what_is_open() -> None:
    same = {row.probe: Answers(row.expected, row.expected, "") for row in ROWS}
    open_ones = {row.probe for row in ROWS if row.limit}
    named = {problem.partition(":")[0] for problem in problems(same)}
    assert open_ones and named == {row.probe for row in ROWS} - open_ones


def test_a_probe_that_was_not_made_and_one_without_a_row_are_named() -> None:
    first = ROWS[0].probe
    less = {name: answer for name, answer in ALL.items() if name != first}
    assert problems({**less, "new": Answers("a", "b", "c")}) == ["new: no row", f"{first}: not probed"]


def test_a_mount_that_is_not_listed_is_named() -> None:
    listed = sorted(mount for mounts in MOUNTS.values() for mount in mounts)
    told = seen({**ALL, "mounts": Answers("\n".join(listed), "\n".join(listed[1:]), "/x tmpfs rw")})["mounts"]
    assert (told.sandbox, told.plain) == ("as listed below", "1 differ")
    told = seen({**ALL, "mounts": Answers("\n".join([*listed, "/x tmpfs rw"]), "", "")})["mounts"]
    assert told.sandbox == "1 differ: /x tmpfs rw"


def test_a_page_with_something_wrong_in_it_is_not_made() -> None:
    assert "## Sockets" in page(ALL, "Docker", "1.0")
    first = ROWS[0].probe
    with pytest.raises(ValueError, match=first):
        page({**ALL, first: dataclasses.replace(ALL[first], sandbox="open")}, "Docker", "1.0")
