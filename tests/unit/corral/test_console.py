from __future__ import annotations

import io
import itertools

import pytest

from corral.console import Console, paint, wants_colour


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def console(**options: bool) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    ticks = itertools.count(step=1.25)
    return Console(stream, clock=lambda: float(next(ticks)), **options), stream


def test_a_step_is_shown_with_its_time_when_it_is_done() -> None:
    shown, stream = console(progress=True)
    with shown.step("network"):
        assert stream.getvalue() == ""
    assert stream.getvalue() == "corral: network (1.2 s)\n"


def test_a_step_that_fails_is_not_shown_as_done() -> None:
    shown, stream = console(progress=True)
    with pytest.raises(ValueError, match="x"), shown.step("network"):
        raise ValueError("x")
    assert stream.getvalue() == ""


def test_without_a_terminal_only_warnings_are_shown() -> None:
    quiet, stream = console()
    with quiet.step("network"):
        quiet.say("working")
        quiet.detail("a line of the build")
    assert stream.getvalue() == ""
    quiet.warn("careful")
    assert stream.getvalue() == "corral: warning: careful\n"


def test_minor_steps_and_details_are_for_verbose() -> None:
    shown, stream = console(progress=True)
    with shown.step("image", minor=True):
        shown.detail("x")
    assert stream.getvalue() == ""
    loud, stream = console(verbose=True)
    with loud.step("image", minor=True):
        loud.detail("x")
    assert stream.getvalue() == "  x\ncorral: image (1.2 s)\n"


def test_a_stream_that_is_gone_ends_nothing() -> None:
    shown, stream = console(progress=True)
    stream.close()
    shown.warn("into the void")


def test_colour_is_for_terminals_that_want_it() -> None:
    assert wants_colour(Terminal(), {"TERM": "xterm"})
    assert not wants_colour(io.StringIO(), {"TERM": "xterm"})
    assert not wants_colour(Terminal(), {"TERM": "xterm", "NO_COLOR": "1"})
    assert wants_colour(Terminal(), {"TERM": "xterm", "NO_COLOR": ""})
    assert not wants_colour(Terminal(), {"TERM": "dumb"})
    assert not wants_colour(Terminal(), {})
    assert paint("x", "\033[31m", enabled=False) == "x"


HOSTILE = "a\x1b]0;title\x07\x1b[8mb\u202e"
TOLD = "a\\x1b]0;title\\x07\\x1b[8mb\\u202e"


def test_nothing_that_is_told_commands_the_terminal() -> None:
    shown, stream = console(progress=True, verbose=True, colour=True)
    shown.say(HOSTILE)
    shown.tell(HOSTILE)
    shown.show(HOSTILE)
    shown.detail(HOSTILE)
    with shown.step(HOSTILE):
        pass
    assert stream.getvalue().count(TOLD) == 5 and "\x1b" not in stream.getvalue()
    shown.warn_block([HOSTILE, HOSTILE])
    assert stream.getvalue().endswith(f"\033[33mcorral: warning: {TOLD}\033[0m\n\033[33m{TOLD}\033[0m\n")
    shown.tell("at a raw terminal\r")
    assert stream.getvalue().endswith("at a raw terminal\r\n")
