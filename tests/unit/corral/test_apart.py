"""Sandboxes without a network of their own, on the command line's side."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_image.files.entrypoint import apart as gate
from corral import apart, build, checks, lifecycle, names, render, run, state, verify
from corral.context import Invocation
from corral.lifecycle import Prepared, created, prepare
from corral.session import Request
from corral.status import render as shown
from corral.targets import Target
from policy.container import HOSTS_TARGET, Limits
from policy.declaration import LABEL_CONNECTION
from policy.errors import PolicyError
from policy.hostclient import BuildEnvironment, Proxies
from policy.loader import LoadedPolicy
from tests.unit.corral.fakes import FakeDocker, FakeEnforcer

from .test_run import made_up

POLICY = "profile: opencode\nname: demo\negress: {mode: MODE}\n"
GOOD = json.dumps({"check": "non-root", "status": "ok", "detail": ""}).encode() + b"\n"
REQUEST = Request("run", ("agent",), "0a1b2c3d")


@pytest.fixture
def connected(
    invocation: Invocation, loaded_of: Callable[[str], LoadedPolicy], enforcer: FakeEnforcer
) -> Callable[[str], Invocation]:
    def make(connection: str, more: str = "") -> Invocation:
        loaded = loaded_of(POLICY.replace("MODE", connection) + more)
        invocation.__dict__.update(loaded=loaded, approved=loaded)
        state.prepare(invocation.paths, loaded.profile)
        # Nobody has to be there who would make anything true.
        enforcer.running = False
        return invocation

    return make


def prepared(invocation: Invocation) -> Prepared:
    return Prepared(invocation.user, "sha256:1", None, {}, Limits())


@pytest.mark.parametrize("connection", ["none", "host"])
def test_its_container_is_on_no_network_of_corrals_and_says_so(
    connected: Callable[[str], Invocation], docker_engine: FakeDocker, connection: str
) -> None:
    made = connected(connection)
    with created(made, prepared(made), REQUEST) as session:
        body = docker_engine.containers_by_id[session.ident]["Body"]
        hosts = Path(session.spec.hosts_file)
        if connection == "none":
            assert hosts.read_text() == "127.0.0.1 localhost\n127.0.0.1 main\n"
    assert docker_engine.containers_by_id == {}
    config = body["HostConfig"]
    assert body["Labels"][LABEL_CONNECTION] == config["NetworkMode"] == connection
    assert body["NetworkingConfig"] == {"EndpointsConfig": {}}
    assert (config["CapDrop"], config["ReadonlyRootfs"]) == (["ALL"], True)
    mounted = any(row["Target"] == HOSTS_TARGET for row in config["Mounts"])
    # On the host's network names and sysctls are the host's.
    own = connection == "none"
    assert (mounted, bool(config["Dns"]), bool(config["DnsSearch"])) == (own, own, own)
    assert connection == "none" or config["Sysctls"] == {}
    (text,) = [entry.partition("=")[2] for entry in body["Env"] if entry.startswith("CORRAL_GATE=")]
    told = gate.parse(text)
    assert told is not None
    assert (told.connection, told.probe) == (connection, ("192.0.2.1", 443))


@pytest.mark.parametrize("connection", ["none", "host"])
def test_neither_network_nor_service_is_needed(
    connected: Callable[[str], Invocation],
    docker_engine: FakeDocker,
    monkeypatch: pytest.MonkeyPatch,
    connection: str,
) -> None:
    class Built:
        image = "sha256:1"

    monkeypatch.setattr(lifecycle, "ensure_image", lambda _: Built)
    monkeypatch.setattr(lifecycle, "refuse_root", lambda _: None)
    assert prepare(connected(connection)).plan is None
    assert docker_engine.networks_by_name == {}


@pytest.mark.parametrize(("connection", "told"), [("none", False), ("host", True)])
@pytest.mark.parametrize("command", ["run", "shell"])
def test_what_is_not_enforced_is_said_at_every_start(
    connected: Callable[[str], Invocation],
    said: io.StringIO,
    monkeypatch: pytest.MonkeyPatch,
    connection: str,
    told: bool,
    command: str,
) -> None:
    made = connected(connection)
    monkeypatch.setattr(run, "prepare", lambda _: None)
    monkeypatch.setattr(run, "created", made_up)
    monkeypatch.setattr(run, "connect_and_run", lambda *_: 0)
    assert (run.run(made, ["true"]) if command == "run" else run.shell(made)) == 0
    assert ("NOT ENFORCED" in said.getvalue()) == told
    assert ("abstract unix sockets" in said.getvalue()) == told


def test_a_list_that_has_no_effect_is_told(loaded_of: Callable[[str], LoadedPolicy]) -> None:
    text = POLICY.replace("mode: MODE", "mode: host, allow: [a.example.com]")
    assert apart.warning(loaded_of(text))[-1] == "  egress.allow has no effect: everything is allowed"


def results(invocation: Invocation, monkeypatch: pytest.MonkeyPatch) -> dict[str, checks.Check]:
    monkeypatch.setattr(verify, "prepare", prepared)
    monkeypatch.setattr(verify, "asked", lambda _: [])
    return {check.shown_name: check for check in verify.verify(invocation)}


def test_verify_sees_from_outside_that_there_is_no_network(
    connected: Callable[[str], Invocation], docker_engine: FakeDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker_engine.stdout = GOOD
    found = results(connected("none"), monkeypatch)
    assert found["no-network"].status == found["gate"].status == found["non-root"].status == "ok"
    for name in ("session-ready", "live-rules", "skeleton-in-path", "backstop"):
        assert (found[name].status, "egress.mode is none" in found[name].detail) == ("skip", True)
    assert json.loads(docker_engine.created[-1]["Cmd"][1])["connection"] == "none"


def test_verify_of_a_session_that_somebody_connected_fails(
    connected: Callable[[str], Invocation], docker_engine: FakeDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker_engine.stdout, docker_engine.exec_output = GOOD, (GOOD, b"", 0)
    made = connected("none")
    with created(made, prepared(made), REQUEST) as session:
        docker_engine.start(session.ident)
        row = docker_engine.containers_by_id[session.ident]
        row["NetworkSettings"]["Networks"]["bridge"] = {"IPAMConfig": {"IPv4Address": ""}}
        found = results(made, monkeypatch)
        assert found["no-network@0a1b2c3d"].status == "fail"
        assert "bridge" in found["no-network@0a1b2c3d"].detail
        row["Body"]["HostConfig"]["NetworkMode"] = "bridge"
        assert "mode bridge" in results(made, monkeypatch)["no-network@0a1b2c3d"].detail


def test_verify_claims_nothing_of_the_hosts_network(
    connected: Callable[[str], Invocation], docker_engine: FakeDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker_engine.stdout = GOOD
    found = results(connected("host"), monkeypatch)
    for name in ("session-ready", "gate", "no-network", "live-rules", "skeleton-in-path", "backstop"):
        assert (found[name].status, "NOT ENFORCED" in found[name].detail) == ("skip", True), name


def test_a_session_of_another_mode_is_of_another_policy(
    connected: Callable[[str], Invocation], docker_engine: FakeDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker_engine.stdout = GOOD
    made = connected("host")
    with created(made, prepared(made), REQUEST) as session:
        docker_engine.start(session.ident)
        found = results(connected("none"), monkeypatch)
    assert found["session-policy@0a1b2c3d"].status == "fail"
    assert "egress.mode" in found["session-policy@0a1b2c3d"].detail


@pytest.mark.parametrize(("connection", "allowed"), [("none", False), ("host", True)])
def test_a_question_is_answered_by_the_mode_alone(
    connected: Callable[[str], Invocation], connection: str, allowed: bool
) -> None:
    answer = names.check(connected(connection), Target("api.example.com", 443), None)
    assert answer["allowed"] == allowed
    assert f"egress.mode is {connection}" in names.told_check(answer)


@pytest.mark.parametrize("connection", ["none", "host"])
def test_there_is_nothing_to_allow(connected: Callable[[str], Invocation], connection: str) -> None:
    with pytest.raises(PolicyError, match=f"egress.mode is {connection}"):
        apart.refuse_names(connected(connection).loaded)


def test_status_tells_both() -> None:
    row = {"sandbox": "demo-0a0b0c0d", "service": "main", "session": "00000001", "state": "running"}
    body: dict[str, Any] = {"sandboxes": [], "apart": [{**row, "connection": "none", "enforced": True}]}
    assert shown(body, colour=False) == (
        "demo-0a0b0c0d  main-00000001  running  no network (egress.mode: none)"
    )
    body["apart"] = [{**row, "connection": "host", "enforced": False}]
    assert "running  NOT ENFORCED: on this host's own network" in shown(body, colour=False)
    assert "\x1b[31m" in shown(body, colour=True)


@pytest.mark.parametrize("connection", ["none", "host"])
def test_what_is_rendered_has_no_network_and_no_entry(
    connected: Callable[[str], Invocation], monkeypatch: pytest.MonkeyPatch, connection: str
) -> None:
    made = connected(connection)
    monkeypatch.setattr(made.api, "version", lambda: {"Arch": "amd64"}, raising=False)
    monkeypatch.setattr(build, "gather", lambda *_: BuildEnvironment(Proxies()))
    made.__dict__["user"] = made.user
    body = render.rendered(made)
    assert body["network"] == {"NetworkMode": connection}
    assert body["kernel"] == []
    assert ("NOT ENFORCED" in render.text(body)) == (connection == "host")
