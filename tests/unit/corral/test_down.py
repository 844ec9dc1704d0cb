from __future__ import annotations

import contextlib
from collections.abc import Callable
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest

from corral import network, process, relay, state
from corral.context import Invocation
from corral.down import Removed, down, report, summary
from corral.lifecycle import Prepared, created
from corral.session import Request
from corral.subnets import Plan
from policy.container import Limits
from policy.errors import ArgumentError, PolicyError
from policy.loader import LoadedPolicy
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
    state.prepare(invocation.paths, loaded.profile)
    network._create(invocation.api, loaded.sandbox, invocation.user.uid, [PLAN.subnet], [])
    return Prepared(invocation.user, "sha256:1", PLAN, {}, Limits())


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
        removed = down(invocation)[invocation.loaded.sandbox.id]
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
        elsewhere = {"io.corral.sandbox": "demo-0123abce", "io.corral.project": "/elsewhere/demo"}
        for ident, other in (("b", {"io.corral.uid": "4242"}), ("c", elsewhere)):
            docker_engine.containers_by_id[ident] = {
                **row,
                "Id": ident,
                "Names": [f"/other-{ident}"],
                "Labels": {**row["Labels"], **other},
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
    ident = invocation.loaded.sandbox.id
    assert down(invocation)[ident].network
    assert down(invocation)[ident] == Removed()


def test_a_sandbox_of_a_former_name_goes_too(
    invocation: Invocation,
    prepared: Prepared,
    docker_engine: FakeDocker,
    stopped: list[str],
    loaded_of: Callable[[str], LoadedPolicy],
) -> None:
    state.remember_project(invocation.paths, invocation.loaded.project)
    former = invocation.loaded.sandbox.id
    later = Invocation(invocation.user, invocation.cwd, invocation.console)
    loaded = loaded_of("profile: opencode\nname: renamed\n")
    later.__dict__.update(loaded=loaded, api=docker_engine, enforcer=invocation.enforcer)
    removed = down(later)
    assert set(removed) == {former, loaded.sandbox.id} and removed[former].network
    assert docker_engine.networks_by_name == {}
    assert report(removed).startswith(f"{former}: removed 2 relays, its network; its state is kept")
    assert not any(found.network or found.containers for found in down(later).values())


@pytest.mark.parametrize("spoiled", ["invalid", "gone"])
@pytest.mark.parametrize("trace", ["state", "container"])
def test_the_policy_need_not_be_valid(
    invocation: Invocation,
    prepared: Prepared,
    docker_engine: FakeDocker,
    stopped: list[str],
    spoiled: str,
    trace: str,
) -> None:
    ident = invocation.loaded.sandbox.id
    file = invocation.loaded.path
    with contextlib.ExitStack() as stack:
        if trace == "state":
            state.remember_project(invocation.paths, invocation.loaded.project)
        else:
            stack.enter_context(created(invocation, prepared, Request("run", ("agent",), "00000001")))
        file.unlink() if spoiled == "gone" else file.write_text("profile: opencode\nnome: demo\n")
        below = invocation.cwd / "below"
        below.mkdir()
        later = Invocation(invocation.user, below, invocation.console)
        later.__dict__.update(api=docker_engine, enforcer=invocation.enforcer)
        removed = down(later)
        assert removed[ident].network
        assert len(removed[ident].containers) == (trace == "container")
    assert docker_engine.networks_by_name == {}


def test_a_directory_that_never_had_a_sandbox_is_told(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker, tmp_path: Path
) -> None:
    state.remember_project(invocation.paths, invocation.loaded.project)
    elsewhere = Invocation(invocation.user, tmp_path, invocation.console)
    elsewhere.__dict__.update(api=docker_engine, enforcer=invocation.enforcer)
    with pytest.raises(PolicyError, match=r"no corral\.yaml"):
        down(elsewhere)
    assert docker_engine.networks_by_name


def test_one_sandbox_can_be_named_from_anywhere(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker, stopped: list[str], tmp_path: Path
) -> None:
    elsewhere = Invocation(invocation.user, tmp_path, invocation.console)
    elsewhere.__dict__.update(api=docker_engine, enforcer=invocation.enforcer)
    ident = invocation.loaded.sandbox.id
    assert down(elsewhere, "other-01234567") == {"other-01234567": Removed(relays=2)}
    assert docker_engine.networks_by_name
    assert down(elsewhere, ident)[ident].network
    with pytest.raises(ArgumentError, match="not the id"):
        down(elsewhere, "../demo")


def test_the_summary_says_what_was_removed() -> None:
    assert report({"demo-0123abcd": Removed()}) == "demo-0123abcd: nothing to do"
    assert report({"demo-0123abcd": Removed(), "new-0123abcd": Removed(network=True)}) == (
        "new-0123abcd: removed its network; its state is kept"
    )
    assert summary("demo-0123abcd", Removed(("a",), 2, network=True)) == (
        "demo-0123abcd: removed 1 container, 2 relays, its network; its state is kept"
    )
    assert "disconnected from its network: curious" in summary(
        "demo-0123abcd", Removed(network=True, disconnected=("curious",))
    )
