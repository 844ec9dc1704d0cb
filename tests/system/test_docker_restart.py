"""Docker is restarted, or killed, under a session: with live-restore the session does not notice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .host import LIVE_RESTORE, Host, Project

LINES = 300
COUNT = f"touch up; for i in $(seq {LINES}); do echo line $i; echo other $i >&2; sleep 0.02; done; exit 7"


@pytest.fixture
def live_restore(host: Host) -> Iterator[Host]:
    with host.engine_options(**{"live-restore": True}):
        yield host


def counting(host: Host, project: Project) -> list[str]:
    """Start a session that counts, and return the command that waits for its end and prints its exit code."""
    project.corral("build", timeout=300)
    script = f"cd {project.path}; corral run -- sh -c '{COUNT}' >out 2>err </dev/null; echo $? >code"
    project.started.append(host.box.popen(["sh", "-c", script]))
    host.box.wait_for(lambda: project.exists("up"), timeout=60)
    return project.read("out").splitlines()


def ended(host: Host, project: Project) -> int:
    host.box.wait_for(lambda: project.exists("code") and project.read("code").strip(), timeout=90)
    return int(project.read("code"))


@LIVE_RESTORE
@pytest.mark.fault("dockerd restart")
@pytest.mark.parametrize("how", ["restart", "kill"])
def test_a_session_outlives_docker_and_nothing_of_its_output_is_lost(live_restore: Host, how: str) -> None:
    host = live_restore
    project = host.project("outlives")
    counting(host, project)
    if how == "restart":
        host.restart_docker()
    else:
        host.engine.kill()
    assert ended(host, project) == 7
    assert project.read("out").splitlines() == [f"line {number}" for number in range(1, LINES + 1)]
    said = project.read("err").splitlines()
    assert [line for line in said if line.startswith("other")] == [
        f"other {number}" for number in range(1, LINES + 1)
    ]
    assert any("Docker went away" in line for line in said)
    assert any("Docker is back, and so is the session" in line for line in said)
    assert project.containers() == []


@pytest.mark.fault("dockerd restart")
def test_a_session_that_docker_ended_ends_with_its_code_and_leaves_nothing(host: Host) -> None:
    project = host.project("ended")
    counting(host, project)
    host.restart_docker()
    assert ended(host, project) in {137, 143}
    said = project.read("err")
    # Once, however Docker went: it may answer for its last session while it is ending already.
    assert said.count("Docker went away") == 1, said
    assert said.count("Docker is back, and the session has ended (without live-restore Docker ends it)") == 1
    printed = project.read("out").splitlines()
    assert printed == [f"line {number}" for number in range(1, len(printed) + 1)]
    host.wait_enforcer()
    assert project.containers() == []
    assert project.inside("echo", "again").stdout == "again\n"
