"""What is asked often is answered without importing what only sessions need."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from corral import invoking, quick, runcommands
from corral.cli import main
from corral.context import Invocation
from tests.unit.corral.bare import python
from tests.unit.corral.fakes import FakeEnforcer

HEAVY = ("typer", "pydantic", "docker", "requests", "ruamel", "policy.loader")
SCRIPT = """
import sys
sys.argv = ["corral", *sys.argv[1:]]
from corral.cli import main
code = main()
print(code, *sorted(sys.modules), file=sys.stderr)
"""


@pytest.mark.parametrize("arguments", [["--version"], ["status"], ["status", "--json"]])
def test_nothing_heavy_is_imported(tmp_path: Path, arguments: list[str]) -> None:
    done = python(tmp_path, SCRIPT, *arguments)
    code, *modules = done.stderr.splitlines()[-1].split()
    assert code == ("0" if arguments == ["--version"] else "1")
    assert not set(HEAVY) & set(modules)
    if arguments == ["--version"]:
        assert not any(name.startswith("corral.") and name != "corral.cli" for name in modules)


@pytest.mark.parametrize(
    ("arguments", "known"),
    [
        (["status"], True),
        (["status", "--json"], True),
        (["status", "--help"], False),
        (["status", "--json", "--json"], False),
        (["-v", "status"], False),
        (["status", "x"], False),
        ([], False),
        (["run"], True),
        (["run", "--"], True),
        (["run", "true"], True),
        (["run", "-h"], False),
        (["run", "--detach", "--", "true"], False),
        (["-v", "run"], False),
        (["running"], False),
        (["shell"], True),
        (["shell", "-h"], False),
    ],
)
def test_what_needs_a_parser_gets_one(arguments: list[str], known: bool) -> None:
    assert (quick.command(arguments) is not None) == known


@pytest.mark.parametrize(
    "words",
    [[], ["--"], ["true"], ["--", "a", "--", "-v"], ["a", "--", "b"], ["a", "-h"], ["--", "--x"], ["", "x"]],
)
def test_a_command_is_the_same_with_and_without_a_parser(
    monkeypatch: pytest.MonkeyPatch, invocation: Invocation, words: list[str]
) -> None:
    """What is run, and the exit code."""
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(invoking, "invocation", lambda **_: invocation)
    monkeypatch.setattr(runcommands, "_invocation", lambda **_: invocation)
    monkeypatch.setattr("corral.run.run", lambda _, given, *rest: ran.append(tuple(given)) or 7)
    monkeypatch.setattr("corral.cli._end_on_signals", lambda: None)
    assert quick.command(["run", *words]) is not None
    assert main(["run", *words]) == 7
    monkeypatch.setattr(quick, "command", lambda _: None)
    assert main(["run", *words]) == 7
    assert ran[0] == ran[1]


def test_a_shell_is_the_same_with_and_without_a_parser(
    monkeypatch: pytest.MonkeyPatch, invocation: Invocation
) -> None:
    opened: list[object] = []
    monkeypatch.setattr(invoking, "invocation", lambda **_: invocation)
    monkeypatch.setattr(runcommands, "_invocation", lambda **_: invocation)
    monkeypatch.setattr("corral.run.shell", lambda _, *options: opened.append(options) or 7)
    monkeypatch.setattr("corral.cli._end_on_signals", lambda: None)
    assert main(["shell"]) == 7
    monkeypatch.setattr(quick, "command", lambda _: None)
    assert main(["shell"]) == 7
    assert opened[0] == opened[1]


@pytest.mark.parametrize("before", [[], ["-v"]])
def test_both_ways_say_the_same(
    enforcer: FakeEnforcer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    home: Path,
    before: list[str],
) -> None:
    monkeypatch.setattr("enforcer.client.Client", lambda _: enforcer)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr("corral.cli._end_on_signals", lambda: None)
    assert main([*before, "status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": 1, **enforcer.status_answer}
    assert main([*before, "status"]) == 0
    assert capsys.readouterr().out == "no sandboxes\n"
    enforcer.running = False
    assert main([*before, "status"]) == 1
    assert "the enforcer is not running" in capsys.readouterr().err


def test_an_error_nobody_foresaw_is_told_with_or_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*, as_json: bool) -> None:
        raise ZeroDivisionError("x")

    monkeypatch.setattr(quick, "status", fails)
    monkeypatch.setattr("corral.cli._end_on_signals", lambda: None)
    monkeypatch.delitem(sys.modules, "corral.invoking", raising=False)
    assert main(["status"]) == 1
    told = capsys.readouterr().err
    assert "internal error: ZeroDivisionError: x" in told and "Traceback" not in told
    monkeypatch.setenv("CORRAL_DEBUG", "1")
    assert main(["status"]) == 1
    assert "Traceback" in capsys.readouterr().err
