"""The command line from the outside: exit codes, messages, and that nothing is made too early."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from corral import __version__, cli, commands, state
from corral.checks import Check
from corral.cli import main
from corral.down import Removed
from corral.output import print_text
from corral.sessioncommands import app
from policy.errors import (
    ArgumentError,
    CorralError,
    EnforcerError,
    EngineError,
    InstallError,
    NotReadyError,
    PolicyError,
)
from policy.loader import load

COMMANDS = ("install", "init", "build", "run", "shell", "verify", "status", "down", "version")


@pytest.fixture(autouse=True)
def surroundings(home: Path, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home, a runtime directory and a working directory of our own; no handler stays behind."""
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "DOCKER_HOST", "CORRAL_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(project)
    # Tests may be run by root; corral is not.
    uid = os.getuid() or 1000
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    # Nor do root's directories belong to that user.
    monkeypatch.setattr(
        state, "_own_directory", lambda path: path.mkdir(mode=0o700, parents=True, exist_ok=True)
    )
    monkeypatch.setattr(cli, "_end_on_signals", lambda: None)


def write_policy(project: Path, text: str = "profile: opencode\nname: demo\n") -> None:
    (project / "corral.yaml").write_text(text)
    (project / "corral.yaml").chmod(0o644)


def approve(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "hash"]) == 0
    assert main(["policy", "accept", capsys.readouterr().out.strip()]) == 0
    capsys.readouterr()


def test_every_command_has_help() -> None:
    for command in COMMANDS:
        result = CliRunner().invoke(app, [command, "--help"])
        assert result.exit_code == 0, command
        assert "Usage: corral" in result.output or "Usage: " in result.output


@pytest.mark.parametrize(
    "arguments", [["bogus"], ["run", "--bogus"], ["status", "extra"], ["build", "--force=x"]]
)
def test_wrong_arguments_are_exit_code_2(arguments: list[str]) -> None:
    assert main(arguments) == 2


def test_a_missing_policy_is_exit_code_2_with_the_fix(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["run"], ["shell"], ["build"], ["verify"], ["down"]):
        assert main(command) == 2
        err = capsys.readouterr().err
        assert err.startswith("corral: policy error: no corral.yaml in")
        assert "fix: corral init" in err


def test_an_invalid_policy_is_exit_code_2_and_nothing_is_made(
    project: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_policy(project, "profile: opencode\nname: demo\nmounts:\n  rw: [~]\n")
    before = sorted(home.rglob("*"))
    for command in (["run", "--", "true"], ["build"], ["verify"], ["shell"]):
        assert main(command) == 2
        assert capsys.readouterr().err.startswith(
            f"corral: policy error: refusing to mount your home directory ({home})"
        )
    assert sorted(home.rglob("*")) == before


def test_without_the_enforcer_run_says_how_to_start_it(
    project: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_policy(project)
    approve(capsys)
    before = sorted(home.rglob("*"))
    for command in (["run"], ["shell"], ["verify"], ["status"]):
        assert main(command) == 1
        assert "fix: systemctl --user start corral-enforcer" in capsys.readouterr().err
    assert sorted(home.rglob("*")) == before


@pytest.mark.parametrize(
    ("error", "code", "start"),
    [
        (PolicyError("m"), 2, "corral: policy error: m"),
        (ArgumentError("m", "do it"), 2, "corral: argument error: m\n  fix: do it"),
        (EngineError("m"), 1, "corral: m"),
        (EnforcerError("m"), 1, "corral: m"),
        (NotReadyError("m"), 1, "corral: m"),
        (InstallError("m"), 1, "corral: m"),
        (CorralError("m", "do it"), 1, "corral: m\n  fix: do it"),
        (PermissionError(13, "Permission denied", "/x"), 1, "corral: /x: Permission denied\n  fix: look who"),
        (
            OSError(28, "No space left on device", "/x"),
            1,
            "corral: /x: No space left on device\n  fix: make room",
        ),
        (ValueError("odd"), 1, "corral: internal error: ValueError: odd"),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(143), 143, ""),
    ],
)
def test_each_error_has_its_exit_code_and_one_message(
    error: BaseException,
    code: int,
    start: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(**_: Any) -> None:
        raise error

    monkeypatch.setattr(commands, "_invocation", fail)
    assert main(["build"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(start)
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("how", ["-v", "CORRAL_DEBUG"])
def test_a_traceback_is_shown_when_asked_for(
    how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: Any) -> None:
        raise ValueError("odd")

    monkeypatch.setattr(commands, "_invocation", fail)
    if how == "CORRAL_DEBUG":
        monkeypatch.setenv(how, "1")
    assert main([*([how] if how == "-v" else []), "build"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_run_passes_the_command_and_the_agent_s_exit_code(
    monkeypatch: pytest.MonkeyPatch, project: Path
) -> None:
    import corral.run

    given: list[tuple[str, ...]] = []
    names: list[str] = []

    def run(invocation: Any, command: Any, options: Any) -> int:
        given.append(tuple(command))
        names.append(options.name)
        return 42

    monkeypatch.setattr(corral.run, "run", run)
    assert main(["run", "--", "sh", "-c", "exit 42", "--", "-x"]) == 42
    assert main(["run", "ls", "-la", "--all"]) == 42
    assert main(["run"]) == 42
    assert main(["run", "--name", "review", "--", "ls", "--name", "x"]) == 42
    assert given == [
        ("sh", "-c", "exit 42", "--", "-x"),
        ("ls", "-la", "--all"),
        (),
        ("ls", "--name", "x"),
    ]
    assert names == ["", "", "", "review"]


def test_verify_prints_lines_and_exits_1_on_a_failure(
    monkeypatch: pytest.MonkeyPatch, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import corral.verify

    write_policy(project)
    found = [Check("non-root", "ok"), Check("dns-closed", "fail", "203.0.113.53 answers")]
    monkeypatch.setattr(corral.verify, "verify", lambda _: found)
    assert main(["verify"]) == 1
    assert capsys.readouterr().out == (
        "ok   non-root\nFAIL dns-closed: 203.0.113.53 answers\n1 passed, 0 skipped, 1 failed\n"
    )
    found.pop()
    assert main(["verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] == 1


def test_down_with_nothing_to_do_is_exit_code_0(
    monkeypatch: pytest.MonkeyPatch, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import corral.down

    write_policy(project)
    given: list[str | None] = []

    def down(_: Any, sandbox: str | None) -> dict[str, Removed]:
        given.append(sandbox)
        return {"demo-0123abcd": Removed()}

    monkeypatch.setattr(corral.down, "down", down)
    assert main(["down"]) == 0
    assert capsys.readouterr().out == "demo-0123abcd: nothing to do\n"
    assert main(["down", "demo-0123abcd"]) == 0
    assert given == [None, "demo-0123abcd"]


def test_init_writes_a_policy_that_loads_and_never_overwrites(
    project: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "--profile", "opencode"]) == 0
    assert "wrote" in capsys.readouterr().out
    loaded = load(project / "corral.yaml", home=home, environ={}, uid=os.getuid(), own=())
    assert loaded.profile.name == "opencode"
    text = (project / "corral.yaml").read_text()
    assert main(["init"]) == 2
    assert (project / "corral.yaml").read_text() == text


def test_init_on_a_full_disk_leaves_no_half_policy(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import corral.init

    def full(descriptor: int, *_: Any, **__: Any) -> Any:
        os.close(descriptor)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(corral.init.os, "fdopen", full)
    assert main(["init"]) == 1
    monkeypatch.undo()
    assert f"cannot write {project}/corral.yaml: No space left on device" in capsys.readouterr().err
    assert not (project / "corral.yaml").exists()


def test_init_does_not_write_through_a_link(project: Path, tmp_path: Path) -> None:
    (project / "corral.yaml").symlink_to(tmp_path / "elsewhere")
    assert main(["init"]) == 2
    assert not (tmp_path / "elsewhere").exists()


def test_an_unknown_profile_is_exit_code_2(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--profile", "nope"]) == 2
    assert "generic, opencode" in capsys.readouterr().err
    assert not (project / "corral.yaml").exists()


def test_the_version_needs_no_enforcer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"corral {__version__}\ncorral {__version__}\nenforcer not running\n"
    assert main(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "version": __version__, "enforcer": None}


@pytest.mark.parametrize(
    "words",
    [
        ["allow", "a.example.com"], ["denied"], ["denied", "--follow"], ["deny", "a.example.com"], ["disable"], ["enable"], ["inspect"],
        ["logs"], ["metrics"], ["policy", "check", "a.example.com"], ["policy", "diff"], ["policy", "hash"], ["ps"], ["refresh"],
        ["render"], ["render", "--check"], ["run", "--detach"], ["run"], ["status"], ["up"], ["verify"], ["verify", "--explain", "x"],
        ["ps", "--bogus"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_command_that_fails_has_no_answer_for_programs(
    words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a policy, Docker and the host service."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    assert main([*words, "--json"]) in {1, 2}
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("corral: ")


def test_the_hash_of_a_policy_is_told_to_programs(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_policy(project)
    assert main(["policy", "hash"]) == 0
    sha256 = capsys.readouterr().out.strip()
    assert main(["policy", "hash", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "policy": sha256}


def test_counters_are_told_to_programs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = '# HELP corral_x X.\n# TYPE corral_x counter\ncorral_x{a="b"} 2\n'
    monkeypatch.setattr("enforcer.client.Client.metrics", lambda _: text)
    assert main(["metrics"]) == 0
    assert capsys.readouterr().out == text
    assert main(["metrics", "--json"]) == 0
    samples = [{"name": "corral_x", "labels": {"a": "b"}, "value": 2}]
    family = {"name": "corral_x", "type": "counter", "help": "X.", "samples": samples}
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "metrics": [family]}


def test_install_gets_what_the_user_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import corral.install

    given: list[dict[str, Any]] = []
    monkeypatch.setattr(corral.install, "install", lambda **options: given.append(options))
    assert main(["install", "--dry-run", "-y"]) == 0
    assert main(["install"]) == 0
    assert [(call["dry_run"], call["assume_yes"]) for call in given] == [(True, True), (False, False)]
    assert all(callable(call["echo"]) for call in given)


def python(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[3]
    environ = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        env=environ,
        timeout=60,
        **options,
    )


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["version"]])
def test_output_that_cannot_be_written_is_one_line_and_exit_code_1(
    arguments: list[str], project: Path
) -> None:
    root = Path(__file__).parents[3]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "corral.cli", *arguments],
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            # As users have it: what is printed is kept until it is flushed.
            env={**os.environ, "PYTHONPATH": str(root), "PYTHONUNBUFFERED": ""},
            timeout=60,
        )
    assert done.returncode == 1
    first, *rest = done.stderr.splitlines()
    assert first == "corral: cannot write to stdout: No space left on device"
    assert [line[:7] for line in rest] == ["  fix: "]


def test_a_message_that_cannot_be_written_does_not_change_the_exit_code(project: Path) -> None:
    root = Path(__file__).parents[3]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "corral.cli", "run"],
            check=False,
            stdout=subprocess.PIPE,
            stderr=full,
            # As users have it: what is printed is kept until it is flushed.
            env={**os.environ, "PYTHONPATH": str(root), "PYTHONUNBUFFERED": ""},
            timeout=60,
        )
    assert done.returncode == 2


def test_a_full_disk_is_named_although_the_system_names_no_file(
    monkeypatch: pytest.MonkeyPatch, project: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import corral.run

    def full(*_: Any, **__: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(corral.run, "run", full)
    monkeypatch.setattr(corral.run, "shell", full)
    for command in ("run", "shell"):
        assert main([command]) == 1
        err = capsys.readouterr().err
        assert err.startswith(
            f"corral: {home}/.local/share/corral: No space left on device\n  fix: make room"
        )


def test_the_version_option_imports_nothing_heavy() -> None:
    code = (
        "import sys; from corral.cli import main; main(['--version']);"
        "print(sorted({'typer', 'docker', 'pydantic', 'ruamel', 'requests', 'dns'} & set(sys.modules)))"
    )
    assert python(code).stdout == f"corral {__version__}\n[]\n"


def test_help_imports_neither_docker_nor_the_policy() -> None:
    code = (
        "import sys\nfrom corral.cli import main\nmain(['run', '--help'])\n"
        "print(sorted({'docker', 'policy.schema', 'ruamel', 'requests'} & set(sys.modules)))"
    )
    assert python(code).stdout.endswith("\n[]\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_end_unwinds(number: int) -> None:
    code = (
        "import os, signal, sys\nfrom corral import cli\n"
        "def guarded(_):\n"
        "    try:\n"
        f"        os.kill(os.getpid(), {int(number)})\n"
        "        signal.pause()\n"
        "    finally:\n"
        "        print('cleaned up')\n"
        "cli._guarded = guarded\n"
        "sys.exit(cli.main(['build']))"
    )
    done = python(code)
    assert (done.returncode, done.stdout) == (128 + number, "cleaned up\n")


def test_nohup_is_respected() -> None:
    code = (
        "import os, signal, sys\nfrom corral import cli\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "cli._guarded = lambda _: os.kill(os.getpid(), signal.SIGHUP) or 7\n"
        "sys.exit(cli.main(['build']))"
    )
    assert python(code).returncode == 7


def test_a_name_the_terminal_cannot_show_is_no_crash(project: Path) -> None:
    odd = project / "caf\udce9"
    os.mkdir(odd)
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-m", "corral.cli", "run"],
        check=False,
        cwd=odd,
        capture_output=True,
        env={"PATH": os.environ["PATH"], "HOME": str(project.parent), "PYTHONPATH": str(root), "LC_ALL": "C"},
        timeout=60,
    )
    assert done.returncode == 2
    assert b"no corral.yaml" in done.stderr
    assert b"Traceback" not in done.stderr


HOSTILE = "the path /p/\x1b]0;title\x07\x1b[2J\u202ex"


def test_what_is_told_of_an_error_commands_no_terminal(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_policy(project)

    def refuse(*_: object) -> str:
        raise EngineError(HOSTILE, HOSTILE)

    monkeypatch.setattr("corral.down.down", refuse)
    assert main(["down"]) == 1
    err = capsys.readouterr().err
    assert err.count("/p/\\x1b]0;title\\x07\\x1b[2J\\u202ex") == 2
    monkeypatch.setattr("corral.down.down", lambda *_: (_ for _ in ()).throw(RuntimeError(HOSTILE)))
    assert main(["down"]) == 1
    assert "\x1b" not in capsys.readouterr().err


def test_what_is_printed_commands_no_terminal_and_keeps_its_colours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_text(f"\x1b[1mhead\x1b[0m\n{HOSTILE}")
    assert capsys.readouterr().out == ("\x1b[1mhead\x1b[0m\nthe path /p/\\x1b]0;title\\x07\\x1b[2J\\u202ex\n")


def test_a_question_commands_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert commands._ask(HOSTILE)
    assert "\x1b" not in capsys.readouterr().err
