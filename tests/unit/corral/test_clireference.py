"""The reference of the command line is what the commands say, and a manual page's text stays text."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import typer

from corral import clireference
from corral.clireference import Command, commands, manual, markdown, roff
from corral.sessioncommands import app

PROJECT = Path(__file__).parents[3]
PAGES = clireference.pages()


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_the_pages_are_those_of_today(path: Path) -> None:
    assert (PROJECT / path).read_text(encoding="utf-8") == PAGES[path], "run: python -m corral.clireference"


def test_every_command_and_each_of_its_options_is_there() -> None:
    found = {command.path: command for command in commands(typer.main.get_command(app))}
    assert {"corral", "corral run", "corral verify", "corral policy check"} <= found.keys()
    assert "--explain CHECK" in dict(found["corral verify"].rows)
    page = PAGES[clireference.PAGE]
    for name, command in found.items():
        assert f"\n## {name}\n" in page
        assert command.help, f"{name} has no help"
        assert all(meaning for _, meaning in command.rows), f"{name} has an option without a word about it"


def test_examples_keep_their_lines() -> None:
    found = {command.path: command for command in commands(typer.main.get_command(app))}
    assert found["corral run"].help[-1].split("\n")[:2] == ["Examples:", "corral run"]
    assert "\n.br\ncorral run\n" in manual(list(found.values()))


def test_what_looks_like_a_request_of_man_is_text() -> None:
    assert roff(".SH x") == "\\&.SH x"
    assert roff("'tis") == "\\&'tis"
    assert roff("a\\b -c") == "a\\eb \\-c"
    hostile = Command("corral x", "", (".so /etc/passwd", "\\!x"), (("--a|b", ".de"),))
    text = manual([hostile])
    assert "\n.so" not in text
    assert "\n.de" not in text
    assert "--a\\|b" in markdown([hostile])


@pytest.mark.skipif(
    shutil.which("groff") is None, reason="groff is not on this machine; the pages are compared"
)
@pytest.mark.parametrize("path", [clireference.COMMANDS, clireference.POLICY], ids=str)
def test_the_manual_pages_are_read_without_a_warning(path: Path) -> None:
    done = subprocess.run(
        ["groff", "-man", "-ww", "-Tutf8", "-z"],
        input=PAGES[path],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
