"""What a start costs, in what can be counted: modules that are imported, requests that are made."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from corral import lifecycle, run
from corral.context import Invocation
from corral.run import NO_OPTIONS
from corral.session import Request, Terminal
from tests.unit.corral.bare import python
from tests.unit.corral.fakes import FakeDocker, FakeEnforcer

# Each takes longer than most steps of a start, and none is needed for one.
NOT_NEEDED = frozenset(
    {
        "corral.commands",
        "corral.doctor",
        "corral.install",
        "corral.inventory",
        "corral.usage",
        "corral.verify",
        "difflib",
        "dns",
        "docker",
        "requests",
        "typer",
        "urllib3",
    }
)
# All that a start imports before the program runs.
SCRIPT = """
import sys
from corral import cli, invoking, quick
quick.command(["run", "--", "true"])
invoking.invocation(engine=True)
import corral.run, corral.localengine, agent_image.builder, agent_image.runner
import enforcer.client, enforcer.config, enforcer.hostsfile
print(*sorted(sys.modules))
"""


def test_a_start_imports_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    done = python(tmp_path, SCRIPT)
    modules = set(done.stdout.split())
    assert "corral.lifecycle" in modules
    assert not NOT_NEEDED & modules


def test_a_start_asks_the_engine_and_the_enforcer_for_nothing_twice(
    invocation: Invocation,
    docker_engine: FakeDocker,
    enforcer: FakeEnforcer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def built(_: Invocation) -> SimpleNamespace:
        docker_engine.calls.append("inspect_image")
        return SimpleNamespace(image="sha256:1")

    def version() -> dict[str, object]:
        asked.append("version")
        return enforcer.version_answer

    def connected(made: Invocation, session: lifecycle.Created, *_: object) -> int:
        docker_engine.calls.append("attach")
        docker_engine.start(session.ident)
        return int(docker_engine.wait(session.ident)["StatusCode"])

    monkeypatch.setattr(lifecycle, "ensure_image", built)
    monkeypatch.setattr(lifecycle.relay, "bridge_ifindex", lambda _: 7)
    monkeypatch.setattr(run, "connect_and_run", connected)
    monkeypatch.setattr(enforcer, "version", version)
    for turn in range(2):
        docker_engine.calls.clear()
        asked.clear()
        enforcer.awaited.clear()
        request = Request("run", ("true",), f"0000000{turn}", Terminal())
        assert run._session(invocation, request, NO_OPTIONS.keys) == 0
    # The first one made the network.
    assert docker_engine.calls == [
        "inspect_image",
        "inspect_network",
        # Sessions that somebody left behind; then addresses, together with the creation under one lock.
        "containers",
        "containers",
        "create",
        "attach",
        "start",
        "wait",
        "remove",
    ]
    assert asked == ["version"] and len(enforcer.awaited) == 1
    assert set(enforcer.withdrawn) and docker_engine.containers_by_id == {}
