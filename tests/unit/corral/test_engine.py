from __future__ import annotations

from pathlib import Path

import pytest

from corral import engine
from policy.errors import EngineError
from tests.unit.corral.fakes import FakeDocker, refusal

BODY = {"Labels": {}, "NetworkingConfig": {"EndpointsConfig": {}}, "HostConfig": {}}


def test_an_engine_elsewhere_is_refused_and_a_local_socket_is_taken() -> None:
    assert engine.base_url({}) == "unix:///var/run/docker.sock"
    assert engine.base_url({"DOCKER_HOST": "unix:///run/user/1000/docker.sock"}).endswith("1000/docker.sock")
    for host in ("tcp://203.0.113.9:2375", "ssh://dev@build.example", "http://127.0.0.1"):
        with pytest.raises(EngineError, match="DOCKER_HOST") as caught:
            engine.base_url({"DOCKER_HOST": host})
        assert caught.value.hint == "unset DOCKER_HOST"


def test_a_missing_engine_says_how_to_start_it(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="not running or not installed") as caught:
        engine.connect({"DOCKER_HOST": f"unix://{tmp_path}/none.sock"})
    assert caught.value.hint == "systemctl start docker"


def test_a_socket_nobody_answers_is_explained(tmp_path: Path) -> None:
    import socket

    path = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    with pytest.raises(EngineError, match="nobody answers"):
        engine.connect({"DOCKER_HOST": f"unix://{path}"})


@pytest.mark.parametrize(
    "warning",
    [
        "Your kernel does not support CPU cfs quota. CPU quota discarded.",
        "Memory limit discarded",
        "something new",
    ],
)
def test_a_limit_that_docker_discards_is_an_error_and_leaves_no_container(
    docker_engine: FakeDocker, warning: str
) -> None:
    docker_engine.warnings = [warning]
    with pytest.raises(EngineError) as caught:
        engine.create_container(docker_engine, BODY, "corral-x")  # type: ignore[arg-type]
    assert warning in caught.value.message
    assert docker_engine.containers_by_id == {}


def test_a_warning_about_swap_alone_is_no_error(docker_engine: FakeDocker) -> None:
    docker_engine.warnings = ["Your kernel does not support swap limit capabilities. Limitation discarded."]
    _, told = engine.create_container(docker_engine, BODY, "corral-x")  # type: ignore[arg-type]
    assert told == []


def test_an_unlimited_number_of_processes_is_told(docker_engine: FakeDocker) -> None:
    docker_engine.warnings = ["Your kernel does not support PIDs limit capabilities. PIDs limit discarded."]
    ident, told = engine.create_container(docker_engine, BODY, "corral-x")  # type: ignore[arg-type]
    assert ident in docker_engine.containers_by_id
    (warning,) = told
    assert "not limited" in warning and "PIDs limit discarded" in warning


def test_docker_s_own_explanation_is_shown(docker_engine: FakeDocker) -> None:
    docker_engine.fail["create"] = refusal(400, "invalid mount config: bind source path does not exist")
    with pytest.raises(EngineError, match="creating the container corral-x failed: invalid mount config"):
        engine.create_container(docker_engine, BODY, "corral-x")  # type: ignore[arg-type]


def test_a_container_that_is_gone_is_removed_enough(docker_engine: FakeDocker) -> None:
    assert engine.remove_container(docker_engine, "none") is False  # type: ignore[arg-type]
    docker_engine.fail["remove"] = refusal(409, "removal of container x is already in progress")
    assert engine.remove_container(docker_engine, "x") is False  # type: ignore[arg-type]
    docker_engine.fail["remove"] = refusal(500, "driver failed")
    with pytest.raises(EngineError, match="driver failed"):
        engine.remove_container(docker_engine, "x")  # type: ignore[arg-type]


def test_no_key_a_person_types_detaches() -> None:
    assert engine.NO_DETACH.split(b",") == [b"\xff"] * 8


def test_a_create_whose_answer_never_came_says_how_to_clean_up(docker_engine: FakeDocker) -> None:
    import requests

    docker_engine.fail["create"] = requests.ReadTimeout("timed out")
    with pytest.raises(EngineError, match="creating the container corral-x failed") as caught:
        engine.create_container(docker_engine, BODY, "corral-x")  # type: ignore[arg-type]
    assert "corral down" in str(caught.value.hint)
    docker_engine.fail["create"] = refusal(400, "no such image")
    with pytest.raises(EngineError, match="no such image") as caught:
        engine.create_container(docker_engine, BODY, "corral-x")  # type: ignore[arg-type]
    assert caught.value.hint is None
