"""What is shown of a build: its steps with their times at a terminal, nothing in a pipe."""

from __future__ import annotations

import io
import itertools

import pytest

from corral.building import Building, summary
from corral.console import Console
from corral.going import Going, columns, fitted, rewrites, shown
from tests.unit.agent_image.test_steps import BUILDKIT


def built(text: str, *, error: bool = False, **options: object) -> str:
    stream = io.StringIO()
    console = Console(stream, clock=itertools.count().__next__, **options)  # type: ignore[arg-type]
    with console.step("image", minor=True) as step:
        try:
            with Building(console, step, clock=itertools.count().__next__) as building:
                for line in text.splitlines():
                    building.line(line)
                if error:
                    raise ValueError
        except ValueError:
            pass
    return stream.getvalue()


def test_at_a_terminal_each_step_is_a_line_with_its_time_and_the_last_says_what_was_cached() -> None:
    lines = built(BUILDKIT, progress=True).splitlines()
    assert lines[:3] == [
        "corral:   looking up debian:bookworm-slim (0.8 s)",
        "corral:   packages (12.5 s)",
        "corral:   base image debian:bookworm-slim (2.5 s)",
    ]
    assert lines[3].startswith("corral:   harness failed (")
    assert lines[-1].startswith("corral: image (") and lines[-1].endswith("; cached: COPY files /usr/local)")


def test_in_a_pipe_nothing_is_shown() -> None:
    assert built(BUILDKIT) == ""
    assert built(BUILDKIT, error=True) == ""


def test_v_shows_the_builder_s_own_lines_too() -> None:
    found = built(BUILDKIT, verbose=True)
    assert "#4 0.210 Get:1 git" in found and "COPY files /usr/local (cached)" in found


def test_what_goes_on_is_the_last_line_and_never_wider_than_the_terminal() -> None:
    found = built(BUILDKIT, progress=True, live=True, room=lambda: 60)
    drawn = [piece for piece in found.split("\r\x1b[K") if piece and not piece.endswith("\n")]
    assert any("packages" in piece for piece in drawn)
    assert all(len(line) <= 60 for piece in drawn for line in piece.split("\n"))


@pytest.mark.parametrize("room", [1, 40])
def test_a_terminal_too_narrow_for_it_has_no_last_line(room: int) -> None:
    assert "\x1b" not in built(BUILDKIT, progress=True, live=True, room=lambda: room)


def test_a_terminal_that_cannot_rewrite_is_told_of_what_takes_long() -> None:
    stream, seconds = io.StringIO(), iter([0.5, 2.0, 3.0, 4.0])
    going = Going(stream, live=False, room=lambda: 0, clock=lambda: next(seconds))
    key = going.begin("packages", 0.0)
    going.tick()
    assert stream.getvalue() == ""
    going.tick()
    going.tick()
    going.end(key)
    assert stream.getvalue() == "corral:   packages ...\n"


def test_lines_are_cut_in_the_text_and_never_in_the_seconds() -> None:
    assert fitted("x" * 100, " (1.0 s)", 60) == "x" * 49 + "... (1.0 s)"
    assert fitted("x" * 100, " (1.0 s)", 0) == "x" * 100 + " (1.0 s)"
    assert len(shown([("a", 1.0), ("b" * 200, 2.0)], 60)) == 60


@pytest.mark.parametrize(
    ("environ", "actual", "wanted"),
    [
        ({}, 80, 80),
        ({"COLUMNS": "40"}, 80, 40),
        ({"COLUMNS": "200"}, 80, 80),
        ({"COLUMNS": "x"}, 0, 0),
        ({"COLUMNS": "1"}, 0, 1),
    ],
)
def test_columns_are_the_fewer_of_what_is_asked_for_and_what_there_is(
    environ: dict[str, str], actual: int, wanted: int
) -> None:
    assert columns(environ, actual) == wanted


def test_a_terminal_of_no_kind_rewrites_nothing() -> None:
    assert rewrites({"TERM": "xterm"}) and not rewrites({}) and not rewrites({"TERM": "dumb"})


def test_the_cache_is_told_in_a_word_where_names_do_not_fit() -> None:
    assert summary([], 3, lambda _: True) == "nothing cached"
    assert summary(["a", "b"], 2, lambda _: True) == "all 2 steps cached"
    assert summary(["a", "b"], 3, lambda _: True) == "cached: a, b"
    assert summary(["a", "b"], 3, lambda _: False) == "2 of 3 steps cached"


def test_where_there_is_no_room_the_word_about_a_step_is_left_out_and_not_its_name() -> None:
    last = built(BUILDKIT, progress=True, room=lambda: 1).splitlines()[-1]
    assert last.startswith("corral: image (") and last.endswith(" s)")
