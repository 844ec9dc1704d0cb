"""The program that runs on the host before a session, and containers that stay after one."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from corral import hooks, network, run, state
from corral.context import Invocation
from corral.lifecycle import Prepared, created
from corral.session import WORKSPACE_VARIABLE, Request, environment, mounts
from corral.subnets import Plan
from policy.container import WORKSPACE, Limits
from policy.errors import CorralError
from policy.loader import LoadedPolicy
from tests.unit.corral.conftest import POLICY
from tests.unit.corral.fakes import FakeDocker, FakeEnforcer
from tests.unit.corral.test_session import NO_TERMINAL, OUTSIDE

Load = Callable[[str], LoadedPolicy]


def hooked(loaded_of: Load, home: Path, script: str) -> LoadedPolicy:
    program = home / "hook.sh"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return loaded_of(POLICY + f"hooks:\n  pre_launch: [{program}, 'two words']\n")


def test_a_hook_runs_at_home_and_is_told_what_for(home: Path, loaded_of: Load) -> None:
    loaded = hooked(loaded_of, home, 'echo "$PWD $1 $CORRAL_PROJECT $CORRAL_SESSION_ID $MINE" > told')
    hooks.pre_launch(loaded, environ={"PATH": "/usr/bin:/bin", "MINE": "x"}, home=home, session="0a1b2c3d")
    assert (home / "told").read_text() == f"{home} two words {loaded.project} 0a1b2c3d x\n"


def test_a_hook_that_fails_starts_nothing(
    home: Path, loaded_of: Load, invocation: Invocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = hooked(loaded_of, home, "echo no room >&2; exit 3")
    invocation.__dict__["loaded"] = invocation.__dict__["approved"] = loaded
    monkeypatch.setattr(run, "prepare", lambda _: None)
    monkeypatch.setattr(run, "created", lambda *_: pytest.fail("a container was made"))
    with pytest.raises(CorralError, match=r"pre_launch: .*exit code 3\n  \| no room") as caught:
        run.run(invocation, ["true"])
    assert caught.value.exit_code == 1


def test_no_hook_is_no_program(loaded: LoadedPolicy, home: Path) -> None:
    hooks.pre_launch(loaded, environ={}, home=home, session="0a1b2c3d")


@pytest.mark.parametrize(
    ("purpose", "failure", "stays"),
    [("run", False, True), ("shell", False, True), ("verify", False, False), ("run", True, False)],
)
def test_a_container_stays_when_its_session_ended_and_the_policy_says_so(
    purpose: str,
    failure: bool,
    stays: bool,
    invocation: Invocation,
    loaded_of: Load,
    docker_engine: FakeDocker,
    enforcer: FakeEnforcer,
    said: io.StringIO,
) -> None:
    loaded = loaded_of(POLICY + "keep: true\n")
    invocation.__dict__["loaded"] = invocation.__dict__["approved"] = loaded
    state.prepare(invocation.paths, loaded.profile)
    plan = Plan(IPv4Network("172.16.0.0/26"))
    network._create(invocation.api, loaded.sandbox, invocation.user.uid, [plan.subnet], [])
    prepared = Prepared(invocation.user, "sha256:1", plan, {}, Limits())
    try:
        with created(invocation, prepared, Request(purpose, ("agent",), "0a1b2c3d")) as made:
            if failure:
                raise ValueError("x")
    except ValueError:
        assert failure
    assert (made.ident in docker_engine.containers_by_id) == stays
    assert invocation.paths.session("0a1b2c3d").exists() == stays
    # Kept or not, it reaches nothing any more.
    assert enforcer.withdrawn == [made.ident]
    assert ("kept: corral-demo" in said.getvalue()) == stays


def test_a_read_only_project_comes_with_a_workspace(invocation: Invocation, loaded_of: Load) -> None:
    loaded = loaded_of(POLICY + "mounts: {project: ro}\n")
    state.prepare(invocation.paths, loaded.profile)
    found = {mount.target: mount for mount in mounts(loaded, invocation.paths, "0a1b2c3d")}
    assert found[str(loaded.project)].read_only
    assert not found[WORKSPACE].read_only
    assert Path(found[WORKSPACE].source).is_dir()
    request = Request("run", ("agent",), "0a1b2c3d", NO_TERMINAL)
    assert environment(loaded, invocation.user, request, OUTSIDE, ())[WORKSPACE_VARIABLE] == WORKSPACE
    plain = replace(loaded, policy=loaded_of(POLICY).policy)
    assert WORKSPACE not in {mount.target for mount in mounts(plain, invocation.paths, "0a1b2c3d")}
