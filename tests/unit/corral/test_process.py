from __future__ import annotations

import os
from pathlib import Path

import pytest

from corral import process
from corral.process import ProgramError


def script(directory: Path, text: str) -> str:
    file = directory / "program"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def test_output_input_and_locale(tmp_path: Path) -> None:
    program = script(tmp_path, 'echo "$1:$LC_ALL:$LANG:$(cat)"; echo oops >&2')
    done = process.run([program, "a b"], environ={**os.environ, "LC_ALL": "de_DE", "LANG": "x"}, stdin="in")
    assert (done.code, done.stdout, done.stderr) == (0, "a b:C:x:in\n", "oops\n")


def test_a_failure_shows_the_end_of_stderr_and_the_fix(tmp_path: Path) -> None:
    program = script(tmp_path, "i=0; while [ $i -lt 30 ]; do echo line $i >&2; i=$((i+1)); done; exit 3")
    with pytest.raises(ProgramError) as caught:
        process.run([program], hint="do that")
    assert "exit code 3" in caught.value.message
    assert "line 29" in caught.value.message
    assert "line 5\n" not in caught.value.message
    assert caught.value.hint == "do that"


def test_a_failure_can_be_wanted(tmp_path: Path) -> None:
    assert process.run([script(tmp_path, "exit 4")], check=False).code == 4


def test_a_program_that_does_not_end_is_stopped(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"did not end within 0\.1 s"):
        process.run([script(tmp_path, "exec sleep 60")], timeout=0.1)


def test_a_missing_program_is_an_error_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="no-such-program is not installed") as caught:
        process.run(["no-such-program"], environ={"PATH": str(tmp_path)}, hint="apt install it")
    assert caught.value.hint == "apt install it"


def test_a_relative_path_entry_is_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, "true")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ProgramError):
        process.find("program", {"PATH": ".:"})
    assert process.find("program", {"PATH": f".:{tmp_path}"}) == str(tmp_path / "program")


def test_what_the_system_has_is_not_taken_from_the_users_path(tmp_path: Path) -> None:
    # An activated environment of a project, where an agent writes.
    for name in ("git", "sh"):
        (tmp_path / name).symlink_to("/bin/false")
    found = process.find("sh", {"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert Path(found).parent != tmp_path
    assert process.run(["sh", "-c", "echo ours"], environ={"PATH": str(tmp_path)}).stdout == "ours\n"
