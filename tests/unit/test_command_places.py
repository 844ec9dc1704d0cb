"""Each command of the program has its place in the tests that type it at a terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from corral.cli import main
from corral.clireference import commands
from corral.sessioncommands import app
from tests.system.reading import ELSEWHERE, READING

ROOT = Path(__file__).parents[2]


def test_each_command_is_read_at_a_terminal_or_there_is_a_test_that_types_it() -> None:
    there = {command.path.removeprefix("corral ") for command in commands(typer.main.get_command(app))}
    listed = READING.keys() | ELSEWHERE.keys()
    assert sorted(there - listed) == [], "in no list of tests/system/reading.py"
    assert sorted(listed - there) == [], "of no command"
    assert READING.keys() & ELSEWHERE.keys() == set()


def test_the_calls_are_those_of_their_command() -> None:
    for command, calls in READING.items():
        assert calls, command
        assert command == "corral" or all(call.words.startswith(command) for call in calls), command


def test_the_tests_that_are_named_are_there_and_type_the_command() -> None:
    typed = (ROOT / "README.md").read_text()
    for command, place in ELSEWHERE.items():
        file, _, test = place.partition("::")
        text = (ROOT / file).read_text()
        assert f"def {test}(" in text, place
        # The one of README takes its lines from there.
        assert f"corral {command}" in text + (typed if "readme" in file else ""), command


@pytest.mark.parametrize("columns", [1, 40, 200])
def test_the_help_of_every_command_keeps_options_and_values_whole_at_any_width(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    found = list(commands(typer.main.get_command(app)))
    names = [command.path for command in found]
    for command in found:
        assert main([*command.path.split()[1:], "--help"]) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"Usage: {command.path}")
        for below in names:
            if below.rpartition(" ")[0] == command.path:
                assert re.search(rf"^  {below.rpartition(' ')[2]} ", said, re.M), (command.path, below)
        for name in re.findall(r"--?[a-z][\w-]*", " ".join(name for name, _ in command.rows)):
            assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", said), (command.path, name)
        for value in re.findall(r"\S*[./][\w./:>~-]+|ctrl-\S+", " ".join(text for _, text in command.rows)):
            assert value in said, (command.path, value, said)
