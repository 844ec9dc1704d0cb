from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_image.builder import MISSING
from agent_image.runner import SubprocessRunner

ENV = {"PATH": "/usr/bin:/bin"}


def test_lines_of_both_outputs_arrive_and_the_exit_code_too() -> None:
    lines: list[str] = []
    code = SubprocessRunner().run(
        ("sh", "-c", "echo one; echo two >&2; printf three; exit 4"), ENV, lines.append
    )
    assert (code, lines) == (4, ["one", "two", "three"])


def test_program_has_the_given_environment_only_and_no_input() -> None:
    lines: list[str] = []
    SubprocessRunner().run(("sh", "-c", "cat; echo $HOME-$NAME"), {**ENV, "NAME": "value"}, lines.append)
    assert lines == ["-value"]


def test_missing_program_has_the_shells_code() -> None:
    assert SubprocessRunner().run(("no-such-program",), ENV, print) == MISSING


def test_bytes_that_are_no_text_do_not_stop_it() -> None:
    lines: list[str] = []
    assert SubprocessRunner().run(("printf", r"\377x\n"), ENV, lines.append) == 0
    assert lines == ["\ufffdx"]


def test_interrupt_ends_the_program(tmp_path: Path) -> None:
    pids: list[int] = []

    def interrupt(line: str) -> None:
        pids.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SubprocessRunner().run(("sh", "-c", "echo $$; exec sleep 600"), ENV, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_program_in_a_relative_place_of_the_path_is_not_found(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "tool").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "tool").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []
    for search in (".", "", ":/nonexistent", "./"):
        assert SubprocessRunner().run(["tool"], {"PATH": search}, seen.append) == MISSING
    assert SubprocessRunner().run(["tool"], {"PATH": str(tmp_path)}, seen.append) == 3


def test_what_the_system_has_is_not_taken_from_the_users_path(tmp_path: Path) -> None:
    # An activated environment of a project, where an agent writes.
    (tmp_path / "sh").symlink_to("/bin/false")
    lines: list[str] = []
    assert SubprocessRunner().run(("sh", "-c", "echo ours"), {"PATH": f"{tmp_path}:/bin"}, lines.append) == 0
    assert lines == ["ours"]
