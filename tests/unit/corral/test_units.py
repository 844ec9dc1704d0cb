from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from corral import process, units
from corral.session import User
from policy.errors import CorralError
from policy.loader import LoadedPolicy

ENVIRON = {
    "PATH": "/home/dev/.local/bin:/usr/bin",
    "HOME": "/home/dev",
    "SECRET": "x",
    "DOCKER_HOST": 'unix:///a "b"%c$d',
}


def unit(loaded: LoadedPolicy, systemd: int = 257, program: str = "/home/dev/.local/bin/corral") -> list[str]:
    return units.text(loaded, program, ENVIRON, systemd).splitlines()


def test_pauses_grow_where_systemd_can_and_are_fixed_where_not(loaded: LoadedPolicy) -> None:
    assert {"RestartSec=1", "RestartSteps=8", "RestartMaxDelaySec=300"} <= set(unit(loaded))
    old = unit(loaded, 252)
    assert "RestartSec=15" in old
    assert not [line for line in old if "Steps" in line or "MaxDelay" in line]


def test_a_policy_that_cannot_be_used_is_not_tried_again(loaded: LoadedPolicy) -> None:
    lines = unit(loaded)
    assert "RestartPreventExitStatus=2" in lines
    assert "Restart=always" in lines
    assert "StartLimitIntervalSec=0" in lines[: lines.index("[Service]")]


def test_only_what_is_listed_of_the_environment_is_written_down(loaded: LoadedPolicy) -> None:
    lines = [line for line in unit(loaded) if line.startswith("Environment=")]
    assert lines == [
        'Environment="PATH=/home/dev/.local/bin:/usr/bin"',
        'Environment="DOCKER_HOST=unix:///a \\"b\\"%%c$d"',
    ]


def test_odd_paths_are_said_as_systemd_reads_them(loaded: LoadedPolicy) -> None:
    odd = replace(loaded, project=Path('/home/dev/a b%n "ü"'))
    lines = unit(odd, program="/opt/a b%$x/corral")
    assert 'WorkingDirectory=/home/dev/a b%%n "ü"' in lines
    assert 'ExecStart=:"/opt/a b%%$x/corral" up --foreground' in lines
    for bad in ("/a\nExecStart=/evil", "/a\t", "/a ", "/a\\"):
        with pytest.raises(CorralError):
            unit(replace(loaded, project=Path(bad)))


@pytest.mark.parametrize("odd", ["it's", 'a "b"', "a\\b"])
def test_a_program_that_systemd_does_not_start_is_refused(loaded: LoadedPolicy, odd: str) -> None:
    with pytest.raises(CorralError, match="systemd starts no program of such a name") as caught:
        unit(loaded, program=f"/opt/{odd}/corral")
    assert caught.value.hint is not None and "link corral" in caught.value.hint


def test_the_program_is_found_by_path_and_not_where_the_agent_writes(tmp_path: Path) -> None:
    directory = tmp_path / "bin"
    directory.mkdir()
    program = directory / "corral"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert units.program({"PATH": f".:relative:{directory}"}, []) == str(program)
    with pytest.raises(CorralError, match="the agent could replace it"):
        units.program({"PATH": str(directory)}, [tmp_path])
    link = tmp_path / "links"
    link.mkdir()
    (link / "corral").symlink_to(program)
    with pytest.raises(CorralError, match="the agent could replace it"):
        units.program({"PATH": str(link)}, [directory])
    for path in ("", "relative", str(tmp_path / "none")):
        with pytest.raises(CorralError, match="not on your PATH"):
            units.program({"PATH": path}, [])


def test_lingering_is_looked_up(tmp_path: Path) -> None:
    uid = os.getuid()
    with pytest.raises(CorralError) as caught:
        units.require_linger(uid, tmp_path)
    assert caught.value.hint is not None and "enable-linger" in caught.value.hint
    (tmp_path / units.membership(uid).user).touch()
    units.require_linger(uid, tmp_path)


class Systemd:
    """Answers for one unit, and keeps what it was told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[str] = []
        self.shown = "ActiveState=active\nSubState=running\nUnitFileState=enabled\n"
        self.fail = ""
        monkeypatch.setattr(units.process, "run", self._run)

    def _run(self, argv: tuple[str, ...], *, check: bool = True, **_: object) -> process.Completed:
        words = " ".join(argv[2:])
        if argv[2] == "show":
            return process.Completed(argv, 0, self.shown, "")
        self.told.append(words)
        if self.fail and words.startswith(self.fail) and check:
            raise process.ProgramError("it failed")
        return process.Completed(argv, 0, "systemd 257 (257.9-1)\n", "")


@pytest.fixture
def systemd(monkeypatch: pytest.MonkeyPatch) -> Systemd:
    return Systemd(monkeypatch)


@pytest.fixture
def manager(user: User) -> units.Manager:
    return units.Manager(user)


def test_a_unit_is_written_enabled_and_started(
    systemd: Systemd, manager: units.Manager, loaded: LoadedPolicy
) -> None:
    sandbox = loaded.sandbox
    assert manager.state(sandbox) == units.State(f"corral-sandbox-{sandbox.token}.service")
    manager.write(sandbox, "x\n")
    manager.start(sandbox)
    name = units.unit_of(sandbox)
    assert systemd.told == ["daemon-reload", f"enable {name}", f"reset-failed {name}", f"start {name}"]
    assert manager.file(sandbox).read_text() == "x\n"
    assert manager.enabled(sandbox)
    assert manager.version() == 257


@pytest.mark.parametrize("refused", ["daemon-reload", "enable"])
def test_a_unit_that_systemd_did_not_take_leaves_no_file(
    systemd: Systemd, manager: units.Manager, loaded: LoadedPolicy, refused: str
) -> None:
    systemd.fail = refused
    with pytest.raises(CorralError):
        manager.write(loaded.sandbox, "x\n")
    assert not manager.file(loaded.sandbox).exists()
    # One that is there is somebody's, and stays.
    systemd.fail = ""
    manager.write(loaded.sandbox, "x\n")
    systemd.fail = refused
    with pytest.raises(CorralError):
        manager.write(loaded.sandbox, "y\n")
    assert manager.file(loaded.sandbox).exists()


def test_disabled_what_runs_goes_on_and_the_file_goes_with_it(
    systemd: Systemd, manager: units.Manager, loaded: LoadedPolicy
) -> None:
    assert not manager.disable(loaded.sandbox)
    manager.write(loaded.sandbox, "x\n")
    systemd.shown = "ActiveState=active\nSubState=running\nUnitFileState=disabled\n"
    assert manager.disable(loaded.sandbox)
    assert manager.file(loaded.sandbox).exists()
    assert not [words for words in systemd.told if words.startswith("stop")]
    assert manager.stop(loaded.sandbox)
    systemd.shown = "ActiveState=inactive\nSubState=dead\nUnitFileState=disabled\n"
    assert not manager.stop(loaded.sandbox)
    manager.tidy(loaded.sandbox)
    assert not manager.file(loaded.sandbox).exists()


def test_a_start_that_fails_names_the_journal(
    systemd: Systemd, manager: units.Manager, loaded: LoadedPolicy
) -> None:
    systemd.fail = "start"
    with pytest.raises(CorralError) as caught:
        manager.start(loaded.sandbox)
    assert caught.value.hint is not None and "journalctl --user -u corral-sandbox-" in caught.value.hint


def test_a_unit_finds_no_program_where_the_agent_can_put_one(tmp_path: Path) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "bin"
    (project / ".venv" / "bin").mkdir(parents=True)
    elsewhere.mkdir()
    (tmp_path / "link").symlink_to(project / ".venv")
    search = f"{project}/.venv/bin:.venv/bin:{tmp_path}/link/bin::{elsewhere}:/usr/bin:/usr/bin"
    assert units.trusted(search, [project]) == f"{elsewhere}:/usr/bin"
