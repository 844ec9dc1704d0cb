"""What installing looks at first, and what it insists on afterwards. The steps themselves run in the lab."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from corral import install as module
from corral import process
from corral.install import await_enforcer, check_before, root_program
from corral.installer.bundle import MODULES, program, source
from corral.membership import Membership
from policy.errors import CorralError, EnforcerError, InstallError
from tests.unit.corral.fakes import FakeEnforcer

MEMBER = Membership(1000, "agnes", 999, member=True)
ENVIRON = {"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": "/run/user/1000"}
GOOD = FakeEnforcer().version_answer

Answer = tuple[int, str, str]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> dict[str, Answer]:
    """A host where everything is in place: what programs answer, by a word of their command line."""
    answers: dict[str, Answer] = {
        "/usr/bin/python3": (0, "3.11\n", ""),
        "--user": (0, "252\n", ""),
        "MainPID": (0, "77\n", ""),
    }

    def run(argv: Sequence[str], *, environ: Mapping[str, str], **_: Any) -> process.Completed:
        assert environ is ENVIRON
        code, out, err = next(answers[word] for word in answers if word in argv)
        if code == -1:
            raise process.ProgramError(err)
        return process.Completed(tuple(argv), code, out, err)

    monkeypatch.setattr(module.process, "run", run)
    monkeypatch.setattr(module, "programs", lambda: None)
    monkeypatch.setattr(module.hostfacts, "require_local_engine", lambda _: None)
    monkeypatch.setattr(module, "process_groups", lambda pid: {1000, 999} if pid == 77 else None)
    return answers


def test_nothing_is_wrong_with_a_host_in_order(host: dict[str, Answer]) -> None:
    check_before(ENVIRON, MEMBER)
    # What cannot be found out is no reason to refuse.
    host["MainPID"] = (1, "", "no bus")
    check_before(ENVIRON, MEMBER)


@pytest.mark.parametrize(
    ("word", "answer", "message", "hint"),
    [
        ("/usr/bin/python3", (0, "3.9\n", ""), "/usr/bin/python3, the system's Python, .* is 3.9", "upgrade the system"),
        ("/usr/bin/python3", (-1, "", "not installed"), "/usr/bin/python3, the system's Python,", "apt install"),
        ("/usr/bin/python3", (1, "", "broken"), "does not work: broken", "apt install"),
        ("--user", (1, "", "Failed to connect to bus"), "does not answer: Failed to connect", "enable-linger agnes"),
        ("MainPID", (0, "78\n", ""), "before you joined group docker", "systemctl restart user@1000.service"),
    ],
)  # fmt: skip
def test_what_would_stop_it_half_way_is_found_first(
    host: dict[str, Answer],
    monkeypatch: pytest.MonkeyPatch,
    word: str,
    answer: Answer,
    message: str,
    hint: str,
) -> None:
    host[word] = answer
    monkeypatch.setattr(module, "process_groups", lambda pid: {1000, 999} if pid == 77 else {1000})
    with pytest.raises(InstallError, match=message) as caught:
        check_before(ENVIRON, MEMBER)
    assert hint in str(caught.value.hint)


def test_one_who_is_not_in_group_docker_is_told_how_to_join(host: dict[str, Answer]) -> None:
    with pytest.raises(InstallError, match="agnes is not in group docker") as caught:
        check_before(ENVIRON, Membership(1000, "agnes", 999, member=False))
    assert str(caught.value.hint).startswith("sudo usermod -aG docker agnes")


def test_a_failed_check_comes_before_the_step_with_sudo(
    monkeypatch: pytest.MonkeyPatch, host: dict[str, Answer]
) -> None:
    def never(*_: object) -> None:
        pytest.fail("the step with sudo was taken")

    def refuse(*_: object) -> None:
        raise InstallError("not now")

    monkeypatch.setattr(module.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(module, "check_before", refuse)
    monkeypatch.setattr(module, "as_root", never)
    with pytest.raises(InstallError, match="not now"):
        module.install(echo=lambda _: None, assume_yes=True)


def test_all_steps_find_the_user_manager_without_a_login_and_the_writer_is_insisted_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtimes: list[object] = []
    insisted: list[Membership] = []
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(module.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(module, "as_root", lambda *_: {})
    monkeypatch.setattr(module, "membership", lambda uid: MEMBER)
    monkeypatch.setattr(
        module, "check_before", lambda environ, _: runtimes.append(environ["XDG_RUNTIME_DIR"])
    )
    monkeypatch.setattr(module, "write_unit", lambda *_: None)
    monkeypatch.setattr(module, "enforcer_unit", lambda **_: "")
    monkeypatch.setattr(module, "sweep_unit", lambda **_: "")
    monkeypatch.setattr(
        module, "start_units", lambda environ, *_: runtimes.append(environ["XDG_RUNTIME_DIR"])
    )
    monkeypatch.setattr(module, "await_enforcer", lambda ask, found: insisted.append(found))
    module.install(echo=lambda _: None, assume_yes=True)
    assert runtimes == ["/run/user/1000", "/run/user/1000"]
    assert insisted == [MEMBER]


def asked(*answers: Mapping[str, Any] | Exception) -> Callable[[], Mapping[str, Any]]:
    left = list(answers)

    def ask() -> Mapping[str, Any]:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask


def wait(ask: Callable[[], Mapping[str, Any]]) -> list[float]:
    slept: list[float] = []
    await_enforcer(ask, MEMBER, clock=lambda: sum(slept), sleep=slept.append)
    return slept


def test_the_enforcer_is_waited_for_until_it_reaches_the_writer() -> None:
    starting = {**GOOD, "writer": {"reachable": False, "error": "the writer does not answer"}}
    assert len(wait(asked(EnforcerError("not running"), starting, GOOD))) == 2


def test_an_enforcer_without_the_writer_is_no_installation() -> None:
    lost = "no permission for /run/corral/netfilter.sock"
    denied = {**GOOD, "writer": {"reachable": False, "error": lost}}
    with pytest.raises(InstallError, match="no permission") as caught:
        wait(asked(denied))
    assert "systemctl restart user@1000.service" in str(caught.value.hint)
    with pytest.raises(InstallError, match="the enforcer is not running") as caught:
        wait(asked(EnforcerError("the enforcer is not running")))
    assert "journalctl" in str(caught.value.hint)


def test_an_old_python_gets_as_far_as_the_message_about_its_age(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, _ = root_program()
    code = compile(ast.parse(program, feature_version=(3, 7)), "root", "exec", dont_inherit=True)
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    with pytest.raises(SystemExit) as ended:
        exec(code, {})
    assert ended.value.code == 1
    assert "needs 3.11 or newer" in json.loads(capsys.readouterr().err)["message"]


def imported(module: str) -> set[str]:
    """Return what a module imports, without what only a type checker reads."""
    found = set()
    for node in ast.walk(ast.parse(source(module))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def test_programs_for_root_need_nothing_but_the_standard_library_and_each_other() -> None:
    own = {*MODULES, "corral.installer.root", "corral.installer.removal"}
    packages = {name.rpartition(".")[0] for name in own}
    for one in own:
        for name in imported(one) - own - packages:
            standard = name.partition(".")[0] in sys.stdlib_module_names
            assert standard or name.rpartition(".")[0] in own, (one, name)


@pytest.mark.parametrize("text", [root_program()[0], program("corral.installer.removal", {})])
def test_programs_for_root_run_alone(text: str) -> None:
    """In the system's Python, isolated, without corral: all they may say is that they are not root."""
    head, _, _ = text.rpartition("\nsys.exit(")
    done = subprocess.run(
        ["/usr/bin/python3", "-I", "-S", "-"],
        input=head + "\nprint(sorted(n for n in sys.modules if n.startswith(('corral.', 'policy.'))))",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "corral.installer.common" in done.stdout


def settings(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, mark, value = line.partition("=")
        if mark and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


@pytest.mark.parametrize("own", [False, True])
def test_the_sweep_is_started_by_each_start_of_the_enforcer_and_never_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("corral", "corral-enforcer"):
        (programs / name).touch()
    monkeypatch.setattr(module.sys, "executable", str(programs / "python"))
    module.write_user_units(tmp_path / "units", rootless=own)
    sweep, enforcer = (
        settings((tmp_path / "units" / name).read_text()) for name in (module.SWEEP_UNIT, module.USER_UNIT)
    )
    assert sweep["WantedBy"] == sweep["Requires"] == [module.USER_UNIT]
    assert module.USER_UNIT in sweep["After"][0].split()
    assert not {"Wants", "Requires", "After", "Before"} & enforcer.keys()
    assert sweep["Type"] == ["oneshot"] and "RemainAfterExit" not in sweep and "Restart" not in sweep
    assert sweep["ExecStart"] == [f"{programs}/corral prune --unattended"]
    assert sweep["ConditionPathExists"] == [f"{programs}/corral"]
    # The engine that the enforcer watches.
    address = "unix://%t/docker.sock" if own else "unix:///var/run/docker.sock"
    assert sweep["Environment"] == [f"DOCKER_HOST={address}"]
    # No less is closed to it than to the enforcer.
    closed = "UMask NoNewPrivileges LockPersonality RestrictRealtime RestrictSUIDSGID SystemCallArchitectures"
    assert {name: sweep.get(name) for name in closed.split()} == {
        name: enforcer[name] for name in closed.split()
    }
    assert "@" not in (tmp_path / "units" / module.SWEEP_UNIT).read_text()


@pytest.mark.parametrize("missing", ["corral", "corral-enforcer"])
def test_programs_that_the_units_start_have_to_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(module.sys, "executable", str(tmp_path / "python"))
    for name in {"corral", "corral-enforcer"} - {missing}:
        (tmp_path / name).touch()
    with pytest.raises(InstallError, match=f"/{missing} is missing"):
        check_before(ENVIRON, MEMBER)


def test_the_sweep_is_enabled_before_the_enforcer_is_started_and_not_started_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[str, ...]] = []
    monkeypatch.setattr(module, "systemctl", lambda _environ, *words: told.append(words))
    module.start_units(ENVIRON, "writer.service", module.USER_UNIT)
    assert told.index(("enable", module.SWEEP_UNIT)) < told.index(("restart", module.USER_UNIT))
    assert ("restart", module.SWEEP_UNIT) not in told and ("start", module.SWEEP_UNIT) not in told
    assert ("enable", module.USER_UNIT) in told


def test_a_home_with_odd_characters_is_said_as_systemd_understands_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "a home" / "100%s" / "$pipx"
    monkeypatch.setattr(module, "programs", lambda: (own / "corral-enforcer", own / "corral"))
    said = f"{tmp_path}/a home/100%%s/$pipx"
    for text, name in (
        (module.enforcer_unit(rootless=True), "corral-enforcer"),
        (module.sweep_unit(rootless=True), "corral"),
    ):
        lines = dict(line.split("=", 1) for line in text.splitlines() if "=" in line and line[0] not in "#[")
        condition = lines.get("AssertPathExists") or lines["ConditionPathExists"]
        # A condition goes to the end of its line; of a command, the first word does to the second quote.
        assert condition == f"{said}/{name}"
        assert lines["ExecStart"].startswith(f':"{said}/{name}" ')
    monkeypatch.setattr(module, "programs", lambda: (tmp_path / "enforcer", tmp_path / "corral"))
    assert f"ExecStart={tmp_path}/enforcer --rootless\n" in module.enforcer_unit(rootless=True)


def test_a_home_that_no_unit_can_say_is_refused_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "a'b"
    own.mkdir()
    for name in ("corral-enforcer", "corral"):
        (own / name).touch()
    monkeypatch.setattr(module.sys, "executable", str(own / "python"))
    with pytest.raises(CorralError, match="has a quote or a backslash"):
        module.programs()
