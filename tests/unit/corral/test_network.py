from __future__ import annotations

import os
import threading
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest

from corral import network, process
from corral.subnets import Plan
from policy.errors import CorralError, EngineError
from policy.identity import Sandbox
from tests.unit.corral.fakes import FakeDocker, refusal, routes

SANDBOX = Sandbox("demo-0123abcd")
UID = 1000
RANGES = [IPv4Network("172.16.0.0/16")]


@pytest.fixture(autouse=True)
def host_routes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The host's routes are what this list says."""
    destinations: list[str] = []

    def run(argv: Any, **_: Any) -> process.Completed:
        return process.Completed(tuple(argv), 0, routes(*destinations), "")

    monkeypatch.setattr(network.process, "run", run)
    monkeypatch.setattr(network, "RESOLV_CONFS", ())
    return destinations


def ensure(engine: FakeDocker, lock: Path) -> Plan:
    return network.ensure(
        engine,  # type: ignore[arg-type]
        SANDBOX,
        UID,
        ranges=RANGES,
        lock=lock,
        environ={},
    )


def test_the_network_is_made_once_and_used_again(docker_engine: FakeDocker, tmp_path: Path) -> None:
    first = ensure(docker_engine, tmp_path / "lock")
    assert ensure(docker_engine, tmp_path / "lock") == first
    assert docker_engine.calls.count("create_network") == 1
    made = docker_engine.networks_by_name[SANDBOX.network]
    assert made["Options"]["com.docker.network.bridge.name"] == SANDBOX.bridge
    assert made["Options"]["com.docker.network.bridge.enable_ip_masquerade"] == "false"


def test_a_subnet_that_docker_refuses_is_not_tried_again(docker_engine: FakeDocker, tmp_path: Path) -> None:
    docker_engine.overlapping = [IPv4Network("172.16.0.0/25")]
    assert str(ensure(docker_engine, tmp_path / "lock").subnet) == "172.16.0.128/26"


def test_a_route_of_the_host_is_avoided(
    docker_engine: FakeDocker, tmp_path: Path, host_routes: list[str]
) -> None:
    host_routes.append("172.16.0.0/24")
    assert str(ensure(docker_engine, tmp_path / "lock").subnet) == "172.16.1.0/26"


def test_an_existing_network_that_differs_is_refused_with_the_fix(
    docker_engine: FakeDocker, tmp_path: Path
) -> None:
    ensure(docker_engine, tmp_path / "lock")
    options = docker_engine.networks_by_name[SANDBOX.network]["Options"]
    options["com.docker.network.bridge.enable_icc"] = "true"
    with pytest.raises(EngineError, match="enable_icc") as caught:
        ensure(docker_engine, tmp_path / "lock")
    assert "corral down" in (caught.value.hint or "")
    docker_engine.networks_by_name[SANDBOX.network]["Labels"] = {}
    with pytest.raises(EngineError) as caught:
        ensure(docker_engine, tmp_path / "lock")
    # corral down would not touch it.
    assert f"docker network rm {SANDBOX.network}" in (caught.value.hint or "")


def test_docker_refusing_for_another_reason_is_reported(docker_engine: FakeDocker, tmp_path: Path) -> None:
    docker_engine.fail["create_network"] = refusal(500, "could not find an available interface name")
    with pytest.raises(EngineError, match="available interface name"):
        ensure(docker_engine, tmp_path / "lock")


def test_a_warning_of_docker_about_the_network_is_an_error(
    docker_engine: FakeDocker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = docker_engine.create_network
    monkeypatch.setattr(
        docker_engine, "create_network", lambda *a, **k: {**real(*a, **k), "Warning": "left out X"}
    )
    with pytest.raises(EngineError, match="left out X"):
        ensure(docker_engine, tmp_path / "lock")


def test_removing_disconnects_strangers_and_names_them(docker_engine: FakeDocker, tmp_path: Path) -> None:
    ensure(docker_engine, tmp_path / "lock")
    docker_engine.containers_by_id["cafe"] = {
        "Id": "cafe",
        "Names": ["/stranger"],
        "State": "running",
        "Labels": {},
        "NetworkSettings": {"Networks": {SANDBOX.network: {}}},
    }
    assert network.remove(docker_engine, SANDBOX, UID) == ["stranger"]  # type: ignore[arg-type]
    assert docker_engine.networks_by_name == {}
    assert network.remove(docker_engine, SANDBOX, UID) is None  # type: ignore[arg-type]


def test_a_network_of_somebody_else_is_not_removed(docker_engine: FakeDocker, tmp_path: Path) -> None:
    ensure(docker_engine, tmp_path / "lock")
    with pytest.raises(EngineError, match="it stays"):
        network.remove(docker_engine, SANDBOX, UID + 1)  # type: ignore[arg-type]
    assert SANDBOX.network in docker_engine.networks_by_name


def test_the_lock_lets_one_in_at_a_time(tmp_path: Path) -> None:
    inside = threading.Event()
    with network.locked(tmp_path / "sub" / "lock"):
        other = threading.Thread(target=lambda: _enter(tmp_path / "sub" / "lock", inside))
        other.start()
        assert not inside.wait(0.05)
    other.join(10)
    assert inside.is_set()


def _enter(path: Path, inside: threading.Event) -> None:
    with network.locked(path):
        inside.set()


def test_a_lock_that_is_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    os.symlink(tmp_path / "elsewhere", tmp_path / "lock")
    with pytest.raises(CorralError, match="cannot open the lock"), network.locked(tmp_path / "lock"):
        pass
    assert not (tmp_path / "elsewhere").exists()
