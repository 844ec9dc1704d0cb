"""The programs that stand before a harness, run as they are, with a program in its place that tells what it got."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from policy.profiles import claude, codex, gemini
from tests.models.server import serve

STUB = """\
#!/usr/bin/env python3
import json, os, sys
print(json.dumps({"words": sys.argv[1:], "env": {n: v for n, v in os.environ.items() if n not in ("PATH", "LC_CTYPE", "PWD")}}))
"""


def started(launcher: str, binary: str, tmp_path: Path, *words: str, **environ: str) -> Any:
    stub, program = tmp_path / "stub", tmp_path / "launcher"
    stub.write_text(STUB)
    stub.chmod(0o755)
    program.write_text(launcher.replace(binary, str(stub)).replace("/usr/bin/python3", sys.executable))
    program.chmod(0o755)
    return subprocess.run(
        [program, *words],
        env={"PATH": "/usr/bin:/bin", **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def claude_started(tmp_path: Path, *words: str, settings: str = "{}", **environ: str) -> dict[str, Any]:
    managed = tmp_path / "managed.json"
    managed.write_text(settings)
    launcher = claude.LAUNCHER.replace(claude.MANAGED_SETTINGS, str(managed))
    done = started(launcher, claude.BINARY, tmp_path, *words, **environ)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_claude_finds_its_key_by_a_helper_and_not_in_its_environment(tmp_path: Path) -> None:
    found = claude_started(tmp_path, "-p", "a b", ANTHROPIC_API_KEY="sk-1 $x")
    assert found["env"] == {"CORRAL_API_KEY": "sk-1 $x"}
    assert found["words"] == ["--settings", '{"apiKeyHelper":"printenv CORRAL_API_KEY"}', "-p", "a b"]
    assert claude_started(tmp_path, "-p", CORRAL_API_KEY="sk-1")["words"] == found["words"][:3]


@pytest.mark.parametrize("name", ["ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN"])
def test_claude_keeps_tokens_as_they_are(tmp_path: Path, name: str) -> None:
    found = claude_started(tmp_path, "x", settings='{"env": {"ANTHROPIC_BASE_URL": "y"}}', **{name: "t"})
    assert found == {"words": ["x"], "env": {name: "t"}}


def test_claude_needs_no_credential_for_a_server_of_ones_own_only(tmp_path: Path) -> None:
    own = claude_started(tmp_path, settings='{"env": {"ANTHROPIC_BASE_URL": "http://corral-host:1"}}')
    assert own["env"] == {"ANTHROPIC_AUTH_TOKEN": "none"}
    assert claude_started(tmp_path)["env"] == {}


def first(tmp_path: Path, *words: str, terminal: bool) -> tuple[int, str]:
    """Start claude's launcher as a session's first program, and return its exit code and what it says."""
    stub, program = tmp_path / "stub", tmp_path / "launcher"
    stub.write_text('#!/bin/sh\nprintf "<%s>" "$@"\n')
    launcher = claude.LAUNCHER.replace(claude.MANAGED_SETTINGS, str(stub)).replace('"$PPID"', "1")
    program.write_text(launcher.replace(claude.BINARY, str(stub)))
    for file in (stub, program):
        file.chmod(0o755)
    ours, theirs = os.openpty()
    try:
        done = subprocess.run(
            [program, *words],
            stdin=theirs if terminal else subprocess.DEVNULL,
            env={"PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(ours)
        os.close(theirs)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("flag", ["--bg", "--background"])
def test_claude_in_the_background_is_the_session_itself_where_it_has_a_terminal(
    tmp_path: Path, flag: str
) -> None:
    assert first(tmp_path, flag, "a b", "--model", "x", terminal=True) == (0, "<a b><--model><x>")
    assert first(tmp_path, "a b", terminal=True) == (0, "<a b>")


def test_claude_in_the_background_without_a_terminal_is_refused_and_the_way_is_said(tmp_path: Path) -> None:
    code, said = first(tmp_path, "--bg", "a b", terminal=False)
    assert code == 1 and "corral run --detach" in said
    assert first(tmp_path, "-p", "a b", terminal=False) == (0, "<-p><a b>")


def test_claude_in_the_background_of_a_shell_is_left_as_it_is(tmp_path: Path) -> None:
    assert claude_started(tmp_path, "--bg", "a b")["words"] == ["--bg", "a b"]


@pytest.fixture
def model() -> Iterator[int]:
    server = serve(0, {"commands": [], "final": "x"}, io.StringIO())
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def codex_started(tmp_path: Path, url: str, *words: str, **environ: str) -> Any:
    managed = tmp_path / "managed.toml"
    managed.write_text(
        f'model_provider = "a"\n[model_providers.a]\nbase_url = "{url}"\nenv_key = "OPENAI_API_KEY"\n'
    )
    launcher = codex.LAUNCHER.replace(codex.MANAGED_CONFIG, str(managed))
    return started(launcher, codex.BINARY, tmp_path, *words, **environ)


def test_codex_starts_when_the_models_server_answers_whatever_it_says(tmp_path: Path, model: int) -> None:
    done = codex_started(tmp_path, f"http://127.0.0.1:{model}/v1", "exec", "a b", OPENAI_API_KEY="sk-1")
    assert json.loads(done.stdout) == {"words": ["exec", "a b"], "env": {"OPENAI_API_KEY": "sk-1"}}
    own = codex_started(tmp_path, f"http://127.0.0.1:{model}/v1", "exec", "x")
    assert json.loads(own.stdout)["env"] == {"OPENAI_API_KEY": "none"}


def test_codex_exec_ends_when_nobody_answers_and_a_terminal_is_left_to_codex(tmp_path: Path) -> None:
    url = "http://127.0.0.1:9/v1"
    done = codex_started(tmp_path, url, "exec", "x", OPENAI_API_KEY="sk-1")
    assert done.returncode == 1
    assert done.stderr.startswith("codex: the model's server 127.0.0.1:9 does not answer: ")
    assert "sk-1" not in done.stderr
    for words, environ in ((("resume",), {}), (("exec", "x"), {"HTTPS_PROXY": "http://127.0.0.1:1"})):
        assert codex_started(tmp_path, url, *words, **environ).returncode == 0


def test_codex_is_given_no_key_that_openai_would_be_told(tmp_path: Path) -> None:
    done = codex_started(tmp_path, "https://api.openai.com/v1", "resume")
    assert json.loads(done.stdout)["env"] == {}


def test_gemini_is_run_by_the_node_beside_it(tmp_path: Path) -> None:
    done = started(gemini.LAUNCHER, gemini.NODE, tmp_path, "-p", "a b", GOOGLE_GEMINI_BASE_URL="http://h")
    found = json.loads(done.stdout)
    assert found["words"] == [f"{gemini.DIRECTORY}/bundle/gemini.js", "-p", "a b"]
    assert found["env"]["GEMINI_API_KEY"] == "none"
    assert "GEMINI_API_KEY" not in json.loads(started(gemini.LAUNCHER, gemini.NODE, tmp_path).stdout)["env"]
