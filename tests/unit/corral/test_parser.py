"""What was typed: how it is refused, where -v may stand, and what the help of all commands looks like."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer

from corral import clireference, commands, invoking, parser, quick, sessions
from corral.cli import main
from corral.sessioncommands import app
from policy.errors import CorralError, EnforcerError
from tests.unit.corral.bare import python


@pytest.fixture(autouse=True)
def surroundings(home: Path, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home and a directory without anything; nobody at a terminal; no host service."""
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "CORRAL_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(project)
    monkeypatch.setattr("corral.cli._end_on_signals", lambda: None)
    monkeypatch.setattr(invoking.Settings, "verbose", False)
    uid = os.getuid() or 1000
    monkeypatch.setattr(os, "geteuid", lambda: uid)


@pytest.mark.parametrize(
    ("words", "what", "usage", "fix"),
    [
        (["bogus"], "no such command 'bogus'", "corral [OPTIONS] COMMAND", "corral --help"),
        (["build", "--bogus"], "no such option: --bogus", "corral build [OPTIONS]", "corral build --help"),
        (["status", "extra"], "got unexpected extra argument", "corral status", "corral status --help"),
        (
            ["policy", "accept"],
            "missing argument 'SHA'",
            "corral policy accept [OPTIONS] SHA",
            "corral policy accept --help",
        ),
    ],
)
def test_what_the_parser_refuses_is_said_as_all_that_corral_says(
    words: list[str], what: str, usage: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    first, second, third = captured.err.splitlines()
    assert first.startswith(f"corral: argument error: {what}")
    assert second.startswith(f"  usage: {usage}")
    assert third == f"  fix: {fix}"
    assert captured.out == ""


def test_an_error_that_does_not_say_where_it_arose_leads_to_the_help_of_its_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["-v", "policy", "diff", "--json=x"]) == 2
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("corral: argument error: option '--json' does not take a value")
    assert last == "  fix: corral policy diff --help"


def test_without_a_command_there_is_the_help_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert "Usage: corral [OPTIONS] COMMAND" in captured.err + captured.out
    assert "error" not in captured.err


@pytest.mark.parametrize(
    "words",
    [
        ["completion", "tcsh"],
        ["logs", "--since", "xyz"],
        ["logs", "--tail", "x"],
        ["inspect", "--tail", "-1"],
        ["run", "--resume", "x", "y"],
        ["run", "--json"],
        ["down", "x"],
        ["revert", "zzz"],
        ["init", "--profile", "nope"],
        ["allow", "no spaces"],
        ["allow", "api.example.com", "--for", "1w"],
        ["deny", "api.example.com:443"],
        ["doctor", "COR-999"],
    ],
)
def test_a_wrong_argument_is_called_one_and_not_a_policy(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("corral: argument error: ")
    assert "policy error" not in err and "Input should" not in err


@pytest.mark.parametrize(
    "words",
    [["down"], ["revert"], ["completion"], ["logs", "--since"], ["run", "--resume", "x", "--workdir"], []],
)
def test_what_is_too_long_is_not_told_again_whole(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "x" * 300]) == 2
    err = capsys.readouterr().err
    assert "x" * 40 in err or words[:1] == ["run"]
    assert "x" * 90 not in err


@pytest.mark.parametrize(
    "words", [["-v", "build"], ["build", "-v"], ["build", "--verbose"], ["policy", "-v", "hash"]]
)
def test_v_may_stand_before_and_behind_the_command(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: Any) -> None:
        raise ValueError("odd")

    monkeypatch.setattr(commands, "_invocation", fail)
    monkeypatch.setattr("corral.policycommands._invocation", fail)
    assert main(words) == 1
    assert "Traceback" in capsys.readouterr().err
    assert main([word for word in words if word not in {"-v", "--verbose"}]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_v_behind_run_s_command_is_the_command_s(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[str, ...]] = []

    def run(_: object, command: list[str], *__: object) -> int:
        given.append(tuple(command))
        return 0

    monkeypatch.setattr("corral.run.run", run)
    assert main(["run", "--name", "x", "--", "ls", "-v"]) == 0
    assert main(["run", "-v", "ls", "-v"]) == 0
    assert given == [("ls", "-v"), ("ls", "-v")]
    assert invoking.verbose()


@pytest.mark.parametrize(
    "words", [["status"], ["status", "--json"], ["denied"], ["denied", "--follow"], ["metrics"]]
)
def test_who_only_reads_is_not_told_that_nothing_would_be_enforced(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 1
    err = capsys.readouterr().err
    assert err.startswith("corral: the enforcer is not running, and only it can tell this; what runs stays")
    assert "would be enforced" not in err
    assert err.endswith("  fix: systemctl --user start corral-enforcer\n")


def test_a_service_that_fails_otherwise_is_told_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> dict[str, Any]:
        raise EnforcerError("odd")

    monkeypatch.setattr("enforcer.client.Client.version", fails)
    with pytest.raises(EnforcerError, match=r"^odd$"):
        quick.status(as_json=False)


def test_to_end_what_runs_wants_a_word_where_nobody_can_be_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[object] = []

    def prune(*_: object, ask: Any, **__: object) -> None:
        asked.append(ask)
        if ask is not None:
            ask("end what runs in x?")
        raise SystemExit(0)

    monkeypatch.setattr("corral.prune.prune", prune)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    assert main(["prune", "--running"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("corral: nothing was removed: nobody can be asked here") and "fix: add --yes" in err
    assert main(["prune", "--running", "--yes"]) == 0
    assert asked[-1] is None


# -- help


def leaves(command: Any, path: str = "corral") -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        if not below.hidden:
            yield from leaves(below, f"{path} {name}")


def examples(text: str | None) -> list[str]:
    """Return the lines below ``Examples:``."""
    _, _, found = (text or "").partition("Examples:\n")
    return [line.strip() for line in found.splitlines() if line.strip()]


def noted(ran: list[str], path: str, **_: object) -> None:
    ran.append(path)


def words_of(line: str) -> list[str]:
    """Return what corral gets of a shell's line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|<>")
    lexer.whitespace_split = True
    words = list(lexer)
    rest = words[words.index("corral") + 1 :]
    end = next((at for at, word in enumerate(rest) if set(word) <= set("|<>")), len(rest))
    return rest[:end]


EVERY = dict(leaves(typer.main.get_command(app)))


@pytest.mark.parametrize("path", EVERY)
def test_every_command_has_examples_and_the_parser_takes_them(path: str) -> None:
    lines = examples(EVERY[path].help)
    assert lines, f"{path} has no example"
    for line in lines:
        root = typer.main.get_command(app)
        ran: list[str] = []
        for name, command in leaves(root):
            if not hasattr(command, "commands"):
                command.callback = partial(noted, ran, name)
        root(words_of(line), prog_name="corral", standalone_mode=False)
        assert len(ran) == 1, line
        assert ran[0] == path or (hasattr(EVERY[path], "commands") and ran[0].startswith(f"{path} ")), line


def test_every_command_is_in_one_group_of_the_help() -> None:
    names = [name for _, group in parser.GROUPS for name in group]
    shown = [path.removeprefix("corral ") for path in EVERY if path.count(" ") == 1]
    assert sorted(names) == sorted(shown)


def test_the_help_lists_commands_by_what_one_does_and_cuts_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    places = [out.index(f"\n{title}:\n") for title, _ in parser.GROUPS]
    assert places == sorted(places)
    assert out.index("  install ") < out.index("  run ") < out.index("  status ") < out.index("  prune ")
    assert "..." not in out.replace("[ARGS]...", "")


@pytest.mark.parametrize("path", EVERY)
def test_no_help_has_words_of_programmers(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*path.split()[1:], "--help"]) == 0
    out = capsys.readouterr().out
    for odd in ("<str>", "<list", "<int", "[[", "{S", "[-- COMMAND]..."):
        assert odd not in out, odd
    assert "--verbose" in out


def test_a_sentence_is_the_first_without_what_qualifies_it() -> None:
    assert parser.sentence("Do a thing; exit 1 when not.\n\nMore.") == "Do a thing."
    assert parser.sentence("Write a corral.yaml\n    here. More.") == "Write a corral.yaml here."


def test_the_reference_tells_of_v_once() -> None:
    assert clireference.pages()[clireference.PAGE].count("--verbose") <= 2


def test_reading_imports_no_more_than_it_needs(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom corral import cli\ncli.main(['status'])\n"
        "print(sorted({'typer', 'pydantic', 'docker', 'corral.parser'} & set(sys.modules)))"
    )
    assert python(tmp_path, script).stdout.endswith("[]\n")


@pytest.mark.parametrize(
    ("command", "default"),
    [
        ("attach", "the one that runs here."),
        ("logs", "the one that runs here, else the last that ended."),
        ("inspect", "the one that runs here, else the last that ended."),
    ],
)
def test_the_help_says_which_session_is_meant_where_none_is_named(command: str, default: str) -> None:
    rows = {found.path: dict(found.rows) for found in clireference.commands(typer.main.get_command(app))}
    assert rows[f"corral {command}"]["SESSION"] == f"Its id or name; default: {default}"
    # What the help says is what is done: the last that ended for reading alone, and never one of several.
    ended, later = (stored(name, "exited") for name in ("aaaaaaaa", "bbbbbbbb"))
    one, other = (stored(name, "running") for name in ("cccccccc", "dddddddd"))
    reads = "else the last" in default
    assert sessions.pick([ended, one, later], None, what=command, running=not reads) is one
    with pytest.raises(CorralError, match="cccccccc, dddddddd"):
        sessions.pick([one, other], None, what=command, running=not reads)
    if reads:
        assert sessions.pick([ended, later], None, what=command, running=False) is later
    else:
        with pytest.raises(CorralError, match="no session"):
            sessions.pick([ended, later], None, what=command, running=True)


def stored(name: str, state: str) -> sessions.Session:
    return sessions.Session(name, name, "demo-0123abcd", name, "main", "run", "/p", state, state, 0.0, "")
