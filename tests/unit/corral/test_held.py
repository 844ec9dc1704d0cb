"""Mounts are what was looked at, or there is no session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_image.files.entrypoint import mounts
from corral import held, lifecycle
from corral.context import Invocation
from corral.lifecycle import Prepared, created
from policy.errors import CorralError, PolicyError
from tests.unit.corral.fakes import FakeDocker, FakeEnforcer
from tests.unit.corral.test_lifecycle import leftovers, prepared, request

__all__ = ["prepared"]


def exchange(path: Path, other: Path) -> None:
    path.rename(path.with_name("aside"))
    other.rename(path)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    place = tmp_path / "a" / "place"
    place.mkdir(parents=True)
    (tmp_path / "other").mkdir()
    return place


def test_what_stays_passes_here_and_inside(place: Path) -> None:
    with held.held([str(place)]) as found:
        found.check()
        (row,) = found.rows()
        assert row[0] == str(place)
        assert mounts.changed([row]) == []


@pytest.mark.parametrize("how", ["renamed", "link", "removed", "parent", "parent link"])
def test_whatever_is_done_to_the_path_is_seen_here_and_inside(place: Path, tmp_path: Path, how: str) -> None:
    other = tmp_path / "other"
    with held.held([str(place)]) as found:
        if how == "renamed":
            exchange(place, other)
        elif how == "link":
            place.rmdir()
            place.symlink_to(other)
        elif how == "removed":
            place.rmdir()
        elif how == "parent":
            (other / "place").mkdir()
            exchange(place.parent, other)
        else:
            place.parent.rename(tmp_path / "b")
            (tmp_path / "a").symlink_to(tmp_path / "b")
        with pytest.raises(CorralError, match="was exchanged"):
            found.check()
        if how != "parent link":  # the same directory by another way: nothing else is mounted
            assert mounts.changed(found.rows()) == [str(place)]


def test_an_inode_that_is_held_is_not_given_to_another_file(place: Path) -> None:
    with held.held([str(place)]) as found:
        for _ in range(200):
            place.rmdir()
            place.mkdir()
            with pytest.raises(CorralError):
                found.check()


@pytest.mark.parametrize("part", ["place", "parent"])
def test_a_link_is_never_held(place: Path, tmp_path: Path, part: str) -> None:
    link = tmp_path / "link"
    link.symlink_to(place if part == "place" else place.parent)
    path = link if part == "place" else link / "place"
    with pytest.raises(CorralError, match="changed while"), held.held([str(path)]):
        pytest.fail("held")


def test_descriptors_are_given_back(place: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with held.held([str(place)] * 5):
        pass
    for path in (place / "missing", place.parent / "missing" / "x"):
        with pytest.raises(CorralError), held.held([str(place), str(path)]):
            pass
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("moment", ["before", "during create", "during policy"])
def test_a_mount_that_changes_is_no_session_and_leaves_nothing(
    invocation: Invocation,
    prepared: Prepared,
    docker_engine: FakeDocker,
    enforcer: FakeEnforcer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    moment: str,
) -> None:
    project, other = invocation.loaded.project, tmp_path / "other"
    other.mkdir()
    if moment == "before":
        project.rmdir() if not any(project.iterdir()) else (project / "corral.yaml").unlink()
        other.rename(tmp_path / "x")
        project.rename(tmp_path / "aside")
        project.symlink_to(tmp_path / "x")
    else:
        target, name = (
            (docker_engine, "create_container_from_config")
            if moment == "during create"
            else (enforcer, "await_ready")
        )
        original = getattr(target, name)

        def then(*args: object, **options: object) -> object:
            answer = original(*args, **options)
            exchange(project, other)
            return answer

        monkeypatch.setattr(target, name, then)
    with pytest.raises(CorralError), created(invocation, prepared, request()):
        pytest.fail("a container was handed out")
    assert leftovers(invocation, docker_engine) == []
    assert "start" not in docker_engine.calls


def test_what_became_a_credential_meanwhile_is_refused(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker, home: Path
) -> None:
    project = invocation.loaded.project
    keys = home / ".ssh"
    project.rename(keys)
    project.symlink_to(keys)
    with pytest.raises(CorralError), created(invocation, prepared, request()):
        pytest.fail("a container was handed out")
    project.unlink()
    keys.rename(project)
    keys.mkdir()
    assert lifecycle is not None
    # Under its own name, the directory is the same as one that must not be mounted.
    keys.rmdir()
    keys.symlink_to(project)
    with pytest.raises(PolicyError, match="SSH keys"), created(invocation, prepared, request()):
        pytest.fail("a container was handed out")
    assert leftovers(invocation, docker_engine) == []
