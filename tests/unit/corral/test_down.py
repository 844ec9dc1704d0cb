from __future__ import annotations

from ipaddress import IPv4Network
from typing import Any

import pytest

from corral import network, process, relay, state
from corral.context import Invocation
from corral.down import Removed, down, summary
from corral.lifecycle import Prepared, created
from corral.session import Request
from corral.subnets import Plan
from tests.unit.corral.fakes import FakeDocker, FakeEnforcer

PLAN = Plan(IPv4Network("172.16.0.0/26"))


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sandboxes whose relays were stopped; each had two."""
    asked: list[str] = []

    def stop_all(self: relay.Manager, sandbox: Any) -> int:
        asked.append(sandbox.id)
        return 2

    monkeypatch.setattr(relay.Manager, "stop_all", stop_all)
    return asked


@pytest.fixture
def prepared(invocation: Invocation) -> Prepared:
    loaded = invocation.loaded
    state.prepare(invocation.paths, loaded.profile.state_dirs, loaded.profile.seeds)
    network._create(invocation.api, loaded.sandbox, invocation.user.uid, [PLAN.subnet], [])
    return Prepared(invocation.user, "sha256:1", PLAN, {})


def test_everything_of_the_sandbox_goes_and_its_state_stays(
    invocation: Invocation,
    prepared: Prepared,
    docker_engine: FakeDocker,
    enforcer: FakeEnforcer,
    stopped: list[str],
) -> None:
    kept = invocation.paths.home / invocation.loaded.profile.state_dirs[0] / "session.db"
    kept.write_text("x")
    with created(invocation, prepared, Request("run", ("agent",), "00000001")) as session:
        docker_engine.start(session.ident)
        removed = down(invocation)
        # Its own command line finds nothing to clean up any more, which is no error.
    assert removed == Removed((session.spec.container,), 2, network=True)
    assert docker_engine.containers_by_id == {}
    assert docker_engine.networks_by_name == {}
    assert session.ident in enforcer.withdrawn
    assert not invocation.paths.session("00000001").exists()
    assert kept.read_text() == "x"
    assert stopped == [invocation.loaded.sandbox.id]


def test_containers_of_other_sandboxes_and_users_stay(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker, stopped: list[str]
) -> None:
    with created(invocation, prepared, Request("run", ("agent",), "00000001")) as session:
        row = docker_engine.containers_by_id[session.ident]
        for ident, label, value in (
            ("b", "io.corral.uid", "4242"),
            ("c", "io.corral.sandbox", "demo-0123abce"),
        ):
            docker_engine.containers_by_id[ident] = {
                **row,
                "Id": ident,
                "Names": [f"/other-{ident}"],
                "Labels": {**row["Labels"], label: value},
                "NetworkSettings": {"Networks": {}},
            }
        down(invocation)
        assert set(docker_engine.containers_by_id) == {"b", "c"}


def test_a_container_is_asked_to_end_before_it_is_removed(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker, stopped: list[str]
) -> None:
    with created(invocation, prepared, Request("run", ("agent",), "00000001")):
        docker_engine.calls.clear()
        down(invocation)
        assert docker_engine.calls.index("stop") < docker_engine.calls.index("remove")


def test_it_works_without_the_enforcer_and_without_a_user_manager(
    invocation: Invocation,
    prepared: Prepared,
    docker_engine: FakeDocker,
    enforcer: FakeEnforcer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: relay.Manager, sandbox: Any) -> int:
        raise process.ProgramError("Failed to connect to bus")

    monkeypatch.setattr(relay.Manager, "stop_all", refuse)
    enforcer.running = False
    assert down(invocation).network
    assert down(invocation) == Removed()


def test_the_summary_says_what_was_removed() -> None:
    assert summary("demo-0123abcd", Removed()) == "demo-0123abcd: nothing to do"
    assert summary("demo-0123abcd", Removed(("a",), 2, network=True)) == (
        "demo-0123abcd: removed 1 container, 2 relays, its network; its state is kept"
    )
    assert "disconnected from its network: curious" in summary(
        "demo-0123abcd", Removed(network=True, disconnected=("curious",))
    )
