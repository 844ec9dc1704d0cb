"""What a word could become, and that asking costs nobody anything."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from corral import completing, state
from corral.cli import main
from corral.completion import SCRIPTS, Candidate, candidates, told
from corral.context import Invocation
from corral.sessioncommands import app
from corral.sessions import Note, write_note

KNOWN = {
    "session": ["00000001", "review"],
    "sandbox": ["box-0a0b0c0d", "evil; reboot"],
    "host": ["api.example.com", "git.example.com"],
    "check": ["no-sudo", "non-root"],
    "profile": ["opencode"],
    "shell": ["bash", "fish", "zsh"],
}


def offered(line: str) -> list[str]:
    root = typer.main.get_command(app)
    return [one.text for one in candidates(root, line.split(" "), lambda kind: KNOWN.get(kind, []))]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("corral attach ", ["00000001", "review"]),
        ("corral logs --follow r", ["review"]),
        ("corral logs --since 10m r", ["review"]),
        ("corral inspect ", ["00000001", "review"]),
        ("corral down ", ["box-0a0b0c0d"]),
        ("corral attach --sandbox ", ["box-0a0b0c0d"]),
        ("corral attach --sandbox = b", ["box-0a0b0c0d"]),
        ("corral allow x --sandbox b", ["box-0a0b0c0d"]),
        ("corral refresh api.example.com g", ["git.example.com"]),
        ("corral deny a", ["api.example.com"]),
        ("corral deny api.example.com ", []),
        ("corral policy check ", ["api.example.com", "git.example.com"]),
        ("corral policy d", ["diff"]),
        ("corral -v policy d", ["diff"]),
        ("corral verify --explain no-", ["no-sudo"]),
        ("corral init --profile o", ["opencode"]),
        ("corral init --profile=o", ["--profile=opencode"]),
        ("corral init --bogus=o", []),
        ("corral init --force=o", []),
        ("corral completion f", ["fish"]),
        ("corral pru", ["prune"]),
        ("corral prune --im", ["--images"]),
        ("corral complet", ["completion"]),
        ("corral bogus ", []),
        ("corral run -- ", []),
        ("corral run -- --", []),
        ("corral", []),
    ],
)
def test_a_word_is_completed_by_what_it_means(line: str, wanted: list[str]) -> None:
    assert offered(line) == wanted


def test_every_command_and_option_is_offered() -> None:
    commands = set(offered("corral "))
    assert {"run", "prune", "df", "inspect", "policy"} <= commands
    assert "complete" not in commands
    assert {"--json", "--follow", "--help"} <= set(offered("corral logs -"))


def test_what_a_shell_could_take_for_something_else_is_not_offered() -> None:
    assert not any(";" in text for text in offered("corral down "))


def test_each_shell_gets_its_own_form() -> None:
    found = [Candidate("a:b", "about\nit"), Candidate("c")]
    assert told(found, "bash") == "a:b\nc"
    assert told(found, "zsh") == "a\\:b:about it\nc"
    assert told(found, "fish") == "a:b\tabout it\nc"


def test_names_come_from_files_and_a_host_without_any_has_none(
    invocation: Invocation, monkeypatch: pytest.MonkeyPatch, home: Path, project: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.chdir(project)
    assert completing.lookup("session") == [] == completing.lookup("sandbox")
    state.create_session(invocation.paths, "00000001", ())
    state.create_session(invocation.paths, "00000002", ())
    write_note(invocation.paths, "00000002", Note("review"))
    assert completing.lookup("session") == ["00000001", "review"]
    assert completing.lookup("sandbox") == [invocation.loaded.sandbox.id]
    assert {"no-sudo"} <= set(completing.lookup("check"))
    assert "opencode" in completing.lookup("profile")
    monkeypatch.chdir(tmp_path)
    assert completing.lookup("host") == [] == completing.lookup("unheard-of")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_are_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert capsys.readouterr().out == SCRIPTS[shell]


def test_another_shell_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "bash, zsh, fish" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_that_is_here_reads_its_script(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not on this machine")
    subprocess.run([shell, "-n"], input=SCRIPTS[shell], text=True, check=True)


def test_bash_completes_with_it_and_never_runs_the_word_that_is_typed(tmp_path: Path) -> None:
    program, left = tmp_path / "corral", tmp_path / "project" / "corral"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m corral.cli "$@"\n')
    left.parent.mkdir()
    left.write_text("#!/bin/sh\ntouch ran; echo prune\n")
    for each in (program, left):
        each.chmod(0o755)
    text = f"""{SCRIPTS["bash"]}
COMP_WORDS=(corral pru) COMP_CWORD=1; _corral_complete; echo "${{COMPREPLY[*]}}"
COMP_WORDS=(corral prune --im) COMP_CWORD=2; _corral_complete; echo "${{COMPREPLY[*]}}"
COMP_WORDS=(corral completion "") COMP_CWORD=2; _corral_complete; echo "${{COMPREPLY[*]}}"
COMP_WORDS=(corral run -- l) COMP_CWORD=3; _corral_complete; echo "${{#COMPREPLY[*]}}"
cd {left.parent}
COMP_WORDS=(./corral pru) COMP_CWORD=1; _corral_complete
"""
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    root = Path(__file__).parents[3]
    done = subprocess.run(
        ["bash", "-c", text], capture_output=True, text=True, check=True, cwd=root, env=environ
    )
    assert done.stdout.split("\n")[:4] == ["prune", "--images", "bash fish zsh", "0"], done.stderr
    assert not (left.parent / "ran").exists()


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with nothing but ``corral``, which is on the PATH: it completes, and else says what it was given."""
    program = tmp_path / "corral"
    program.write_text(
        f'#!/bin/sh\n[ "$1" = complete ] || {{ echo "ran<$*>"; exit; }}\nexec {sys.executable} -m corral.cli "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("corral pru", ["prune"]),
        ("corral prune --im", ["--images"]),
        ("corral completion ", ["bash", "fish", "zsh"]),
        ("corral init --profile=open", ["--profile=opencode"]),
    ],
)
def test_fish_completes_with_it(typed: Path, line: str, wanted: list[str]) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not on this machine")
    script = typed / "corral.fish"
    script.write_text(SCRIPTS["fish"])
    command = ["fish", "--no-config", "-c", f"source {script}; complete -C '{line}'"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=typed)
    assert [row.partition("\t")[0] for row in done.stdout.splitlines()] == wanted


def test_zsh_completes_with_it(typed: Path) -> None:
    """Through a terminal: the completion of zsh is a part of its line editor."""
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not on this machine")
    (typed / "_corral").write_text(SCRIPTS["zsh"])
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(typed)
        os.execvpe("zsh", ["zsh", "-f", "-i"], {**os.environ, "TERM": "xterm", "PS1": "ready> "})
    seen = b""

    def until(text: bytes) -> None:
        nonlocal seen
        end = time.monotonic() + 30
        while text not in seen:
            assert time.monotonic() < end, seen
            if select.select([terminal], [], [], 1)[0]:
                seen += os.read(terminal, 4096)
        seen = seen.partition(text)[2]

    try:
        until(b"ready> ")
        setup = f"fpath=({typed} $fpath); autoload -U compinit; compinit -u -D; echo set-up-$((40 + 2))\n"
        os.write(terminal, setup.encode())
        until(b"set-up-42\r\n")
        until(b"ready> ")
        for line, wanted in (
            (b"corral pru", b"ran<prune>"),
            (b"corral prune --im", b"ran<prune --images>"),
            (b"corral init --profile=open", b"ran<init --profile=opencode>"),
        ):
            os.write(terminal, line + b"\t\n")
            until(wanted)
            until(b"ready> ")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)
