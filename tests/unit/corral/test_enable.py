"""What ``corral enable`` warns of and promises, by the systemd and the lingering it finds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from corral import enable, process, units
from corral.context import Invocation
from policy.errors import PolicyError


@dataclass
class Machine:
    """A systemd of a version, and whether its user lingers."""

    systemd: int = 257
    lingers: bool = True
    warned: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def run(self, argv: tuple[str, ...], **_: object) -> process.Completed:
        self.told.append(" ".join(argv[2:]))
        return process.Completed(argv, 0, f"systemd {self.systemd} (x)\n", "")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(process, "run", made.run)
    monkeypatch.setattr(units, "lingers", lambda _: made.lingers)
    monkeypatch.setattr(units, "program", lambda *_: "/home/dev/.local/bin/corral")
    return made


@pytest.fixture
def daemon(invocation: Invocation) -> Invocation:
    loaded = invocation.loaded
    loaded = replace(loaded, policy=loaded.policy.model_copy(update={"mode": "daemon"}))
    invocation.__dict__.update(loaded=loaded, approved=loaded)
    return invocation


def test_who_lingers_on_a_new_systemd_is_warned_of_nothing(machine: Machine, daemon: Invocation) -> None:
    found = enable.enable(daemon, machine.warned.append)
    assert machine.warned == []
    assert "after a pause (1 s to 300 s)" in enable.told(found)
    shown = enable.body(found)
    assert (shown["lingers"], shown["restart_seconds"]) == (True, [1, 300])
    assert machine.told[-1] == f"start {found.unit}"


def test_without_lingering_it_is_enabled_with_a_warning_that_says_how(
    machine: Machine, daemon: Invocation
) -> None:
    machine.lingers = False
    found = enable.enable(daemon, machine.warned.append)
    (warning,) = machine.warned
    assert "without a login your units do not run, not even after a reboot" in warning
    assert warning.endswith(units.linger_fix(daemon.user.uid)) and "loginctl enable-linger" in warning
    assert enable.body(found)["lingers"] is False
    # It runs while its user is there, which is what there is.
    assert f"enable {found.unit}" in machine.told and machine.told[-1] == f"start {found.unit}"


def test_a_systemd_whose_pauses_cannot_grow_is_told(machine: Machine, daemon: Invocation) -> None:
    machine.systemd = 253
    found = enable.enable(daemon, machine.warned.append)
    assert machine.warned == [
        "systemd 253 cannot let the pauses between restarts grow (254 can): they are 15 s each"
    ]
    assert "after a pause (15 s)" in enable.told(found)
    assert enable.body(found)["restart_seconds"] == [15, 15]
    file = units.Manager(daemon.user).file(found.sandbox)
    assert "RestartSec=15\n" in file.read_text() and "RestartSteps" not in file.read_text()


def test_to_disable_where_nothing_is_enabled_is_done_already(
    machine: Machine, daemon: Invocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units.Manager, "disable", lambda *_: False)
    found = enable.disable(daemon)
    assert found == []
    assert enable.told_disabled(found).startswith("nothing to do: ")
    assert enable.told_disabled(["a.service", "b.service"]).splitlines() == [
        "a.service does not start any more with the machine",
        "b.service does not start any more with the machine",
    ]


def test_an_agent_that_is_not_always_on_is_not_enabled(machine: Machine, invocation: Invocation) -> None:
    with pytest.raises(PolicyError, match="corral enable is for an agent that is always on"):
        enable.enable(invocation, machine.warned.append)
    assert machine.told == [] and machine.warned == []
