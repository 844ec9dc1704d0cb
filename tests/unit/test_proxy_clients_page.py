"""docs/proxy-clients.md is a page that a run made: a line for each client, and none that nothing helps."""

from __future__ import annotations

import dataclasses

import pytest

from tests.system.proxy_clients import FAILS, INTRO, PAGE, ROWS, WORKS, Found, documented, page, plain

ALL = {
    row.client: Found("1.0", FAILS if row.setting else WORKS, WORKS if row.setting else "") for row in ROWS
}


def test_the_page_has_a_line_for_each_client_with_its_version_and_its_setting() -> None:
    text = PAGE.read_text()
    assert text.startswith(INTRO)
    lines = [line.split(" | ") for line in text.removeprefix(INTRO).splitlines()]
    assert [line[0].removeprefix("| ") for line in lines] == [row.client for row in ROWS]
    assert all(line[1][:1].isdigit() for line in lines), lines
    assert [line[3] for line in lines] == [row.setting or "—" for row in ROWS]


def test_the_page_says_that_each_works_by_itself_or_with_what_it_needs() -> None:
    said = documented()
    assert said == {client: (one.alone, one.more or "—") for client, one in ALL.items()}


@pytest.mark.parametrize(
    "wrong", [{"alone": FAILS, "more": FAILS}, {"alone": FAILS, "more": ""}, {"version": ""}]
)
def test_a_page_with_a_client_that_nothing_helps_or_that_was_not_run_is_not_made(
    wrong: dict[str, str],
) -> None:
    assert page(ALL).startswith(INTRO)
    first = ROWS[0].client
    with pytest.raises(ValueError, match=first):
        page({**ALL, first: dataclasses.replace(ALL[first], **wrong)})


def test_a_setting_for_what_works_without_it_is_no_line() -> None:
    needs = next(row.client for row in ROWS if row.setting)
    with pytest.raises(ValueError, match="not as it has to be"):
        page({**ALL, needs: dataclasses.replace(ALL[needs], alone=WORKS)})


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("17.0.21.1", "17.0.21"),
        ("9.2p1 Debian-2+deb12u10", "9.2p1"),
        ("v24.19.0", "24.19.0"),
        ("go1.19.8", "1.19.8"),
        ("Python 3.11.2", "3.11.2"),
        ("bash: not found", ""),
    ],
)
def test_a_version_is_numbers(said: str, shown: str) -> None:
    assert plain(said) == shown
