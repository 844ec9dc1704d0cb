"""What a message shows of a file is text, whatever the file's name and content are."""

from __future__ import annotations

import pytest

from policy.problems import Problem, show, to_error


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("/home/me/a\u202eb/corral.yaml", r"/home/me/a\u202eb/corral.yaml"),
        ("/home/me/two\nlines/corral.yaml", r"/home/me/two\nlines/corral.yaml"),
        ("/home/me/\x1b]0;x\x07/corral.yaml", r"/home/me/\x1b]0;x\x07/corral.yaml"),
        ("/home/me/\udcff/corral.yaml", r"/home/me/\udcff/corral.yaml"),
        ("/home/me/日本 é/corral.yaml", "/home/me/日本 é/corral.yaml"),
    ],
)
def test_the_name_of_a_file_commands_no_terminal(name: str, shown: str) -> None:
    one, two = Problem((), "wrong", line=1), Problem(("name",), "wrong too", line=2)
    assert to_error(name, [one]).message == f"{shown}:1:1: wrong"
    assert to_error(name, [one, two]).message.startswith(f"{shown} has 2 problems\n{shown}:1:1: wrong\n")


def test_a_value_is_shown_without_what_does_not_print() -> None:
    assert show("a\x1b[31m\udc80b") == r"a\x1b[31m\udc80b"
