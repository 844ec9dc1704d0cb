"""What is purged, and that nothing is without a yes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from corral import relay, state, units
from corral.context import Invocation
from corral.purge import purge
from policy.errors import CorralError
from policy.identity import StatePaths, sandbox_for
from tests.unit.corral.fakes import FakeDocker


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No manager of units; returns what was disabled."""
    disabled: list[str] = []

    def disable(_: units.Manager, sandbox: Any) -> bool:
        disabled.append(sandbox.id)
        return True

    monkeypatch.setattr(relay.Manager, "stop_all", lambda *_: 0)
    monkeypatch.setattr(units.Manager, "disable", disable)
    return disabled


@pytest.fixture
def root(invocation: Invocation) -> Path:
    state.prepare(invocation.paths, invocation.loaded.profile)
    state.remember_project(invocation.paths, invocation.loaded.project)
    (invocation.paths.workspace / "work").write_text("x")
    return invocation.paths.root


def images(docker_engine: FakeDocker, *tags: str) -> None:
    for tag in tags:
        labels = {"io.corral.inputs": "x", "io.corral.image": tag}
        docker_engine.images_by_id[f"sha256:{tag}"] = {
            "Id": f"sha256:{tag}",
            "RepoTags": [tag],
            "Labels": labels,
        }


def test_everything_of_the_sandbox_goes_and_nothing_of_others(
    invocation: Invocation, root: Path, docker_engine: FakeDocker, alone: list[str]
) -> None:
    other = invocation.data / "other-0a0b0c0e"
    other.mkdir()
    images(docker_engine, invocation.loaded.sandbox.image, "corral/other-0a0b0c0e:latest")
    said: list[str] = []
    removed = purge(invocation, None, ask=None, tell=said.append)
    assert removed == [invocation.loaded.sandbox.image, str(root)]
    assert not root.exists() and other.is_dir()
    assert [row["RepoTags"] for row in docker_engine.images_by_id.values()] == [
        ["corral/other-0a0b0c0e:latest"]
    ]
    assert alone == [invocation.loaded.sandbox.id]
    assert invocation.loaded.path.exists()
    assert purge(invocation, None, ask=None, tell=said.append) == []


def test_nothing_goes_without_a_yes(invocation: Invocation, root: Path, docker_engine: FakeDocker) -> None:
    images(docker_engine, invocation.loaded.sandbox.image)
    asked: list[str] = []

    def no(question: str) -> bool:
        asked.append(question)
        return False

    with pytest.raises(CorralError, match="nothing was removed"):
        purge(invocation, None, ask=no, tell=print)
    assert invocation.loaded.sandbox.id in asked[0]
    assert root.is_dir() and docker_engine.images_by_id
    assert "remove" not in docker_engine.calls


def test_state_that_a_command_works_with_stays(invocation: Invocation, root: Path) -> None:
    lock = invocation.in_use
    now = [0.0]
    try:
        with pytest.raises(CorralError, match="a corral works with"):
            purge(
                invocation,
                None,
                ask=None,
                tell=print,
                clock=lambda: now[0],
                sleep=lambda seconds: now.__setitem__(0, now[0] + seconds),
            )
    finally:
        os.close(lock)
    assert root.is_dir()


def test_images_of_another_users_sandbox_stay(
    invocation: Invocation, root: Path, docker_engine: FakeDocker
) -> None:
    images(docker_engine, "corral/hers-0a0b0c0e:latest")
    assert purge(invocation, "hers-0a0b0c0e", ask=None, tell=print) == []
    assert docker_engine.images_by_id and root.is_dir()


def test_a_sandbox_goes_by_its_id_from_anywhere(
    invocation: Invocation, root: Path, tmp_path: Path, docker_engine: FakeDocker
) -> None:
    elsewhere = Invocation(invocation.user, tmp_path, invocation.console)
    elsewhere.__dict__.update(api=docker_engine, enforcer=invocation.enforcer)
    assert purge(elsewhere, invocation.loaded.sandbox.id, ask=None, tell=print) == [str(root)]
    assert not root.exists()


def test_a_name_that_was_sought_removes_nothing_of_another_project(
    invocation: Invocation, tmp_path: Path, alone: list[str]
) -> None:
    # What an agent may write into corral.yaml: one name in four thousand million has the other's id.
    text = invocation.loaded.path.read_text().replace("name: demo", "name: sought")
    invocation.loaded.path.write_text(text)
    project, uid = invocation.loaded.project, invocation.user.uid
    victim = StatePaths(invocation.data / sandbox_for(uid, project, "sought").id)
    victim.workspace.mkdir(parents=True)
    state.remember_project(victim, tmp_path / "victim")
    fresh = Invocation(invocation.user, invocation.cwd, invocation.console)
    fresh.__dict__.update(api=invocation.api, enforcer=invocation.enforcer)
    purge(fresh, None, ask=None, tell=lambda _: None)
    assert victim.workspace.exists()
    assert alone == [sandbox_for(uid, project, project.name).id]
