from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import requests
from docker.errors import DockerException, InvalidArgument, InvalidVersion, NullResource

from corral import engine
from policy.errors import EngineError, EngineGoneError
from policy.schema import Limits
from tests.unit.corral.fakes import FakeDocker, refusal

BODY = {"Labels": {}, "NetworkingConfig": {"EndpointsConfig": {}}, "HostConfig": {}}


def create(docker_engine: FakeDocker, *, best_effort: bool = False) -> tuple[str, list[str]]:
    return engine.create_container(docker_engine, BODY, "corral-x", best_effort=best_effort)  # type: ignore[arg-type]


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


def test_a_limit_that_docker_discards_is_an_error_and_leaves_no_container(docker_engine: FakeDocker) -> None:
    docker_engine.warnings = ["Your kernel does not support PIDs limit capabilities. PIDs limit discarded."]
    with pytest.raises(EngineError, match="cgroup controllers are missing: pids"):
        create(docker_engine)
    assert docker_engine.containers_by_id == {}


def test_a_discarded_limit_that_the_policy_accepts_is_told(docker_engine: FakeDocker) -> None:
    docker_engine.warnings = ["Your kernel does not support PIDs limit capabilities. PIDs limit discarded."]
    ident, told = create(docker_engine, best_effort=True)
    assert ident in docker_engine.containers_by_id
    assert "PIDs limit discarded" in told[0]


def test_docker_is_asked_about_processors_only_when_they_are_limited(docker_engine: FakeDocker) -> None:
    said: list[str] = []
    found = engine.possible_limits(docker_engine, Limits(memory="1g"), said.append)  # type: ignore[arg-type]
    assert (found.memory, docker_engine.calls, said) == (1 << 30, [], [])
    wanted = Limits(cpus=1, best_effort=True)
    found = engine.possible_limits(docker_engine, wanted, said.append)  # type: ignore[arg-type]
    assert (found.nano_cpus, docker_engine.calls) == (0, ["info"])
    assert "controller cpu is missing" in said[0]


def test_docker_s_own_explanation_is_shown(docker_engine: FakeDocker) -> None:
    docker_engine.fail["create"] = refusal(400, "invalid mount config: bind source path does not exist")
    with pytest.raises(EngineError, match="creating the container corral-x failed: invalid mount config"):
        create(docker_engine)


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
        create(docker_engine)
    assert "corral down" in str(caught.value.hint)
    docker_engine.fail["create"] = refusal(400, "no such image")
    with pytest.raises(EngineError, match="no such image") as caught:
        create(docker_engine)
    assert caught.value.hint is None


def test_an_argument_that_the_client_refuses_is_not_said_to_be_a_missing_docker() -> None:
    for error in (InvalidArgument("since has to be more"), NullResource("no id"), InvalidVersion("too old")):
        with pytest.raises(EngineError, match=f"reading failed: {error}") as caught, engine.errors("reading"):
            raise error
        assert not isinstance(caught.value, EngineGoneError)
    for gone in (DockerException("no answer"), requests.ConnectionError("no answer")):
        with pytest.raises(EngineGoneError, match="does not answer: no answer"), engine.errors("reading"):
            raise gone


def test_an_engine_of_the_users_own_is_started_without_root() -> None:
    for error in ("No such file or directory", "Connection refused", "odd"):
        told = engine._unreachable("unix:///run/user/1000/docker.sock", OSError(error))
        assert str(told.hint).startswith("systemctl --user ")
        assert "--user" not in str(engine._unreachable("unix:///var/run/docker.sock", OSError(error)).hint)


def test_what_is_over_is_removed_when_an_engine_that_went_away_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api, tried = MagicMock(), list[str]()

    def remove(ident: str, **_: object) -> None:
        tried.append(ident)
        if len(tried) < 3:
            raise requests.ConnectionError("No such file or directory")

    api.remove_container = remove
    monkeypatch.setattr(engine, "COME_BACK_PAUSE", 0)
    engine.remove_ended(api, "c1")
    assert tried == ["c1"] * 3
    # One that stays away is told after a while.
    tried.clear()
    monkeypatch.setattr(engine, "SOON", 0)
    with pytest.raises(EngineGoneError, match="removing the container c1"):
        engine.remove_ended(api, "c1")


BEGIN = 1_800_000_000.0


class Restarted:
    """A container that ended, and an engine of which ``began`` is the start; both are times of the wall."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.api = MagicMock()
        self.code, self.asked = 143, 0
        self.refusal: Exception | None = None
        self.pidfile = directory / engine.PIDFILE
        self.pidfile.touch()
        self.clock = 0.0
        monkeypatch.setattr(engine.AttachedContainer, "_code", lambda _: self.code)
        monkeypatch.setattr(engine.time, "monotonic", lambda: self.clock)
        self.api.inspect_container = self._inspect
        self.container = engine.AttachedContainer(
            self.api, f"unix://{directory}/docker.sock", "c1", stdin=False
        )
        self.began(BEGIN + 5)

    def began(self, when: float) -> None:
        os.utime(self.pidfile, (when, when))

    def _inspect(self, _: str) -> dict[str, object]:
        self.asked += 1
        if self.refusal is not None:
            raise self.refusal
        return {"State": {"FinishedAt": "2027-01-15T08:00:00.123456789Z"}}


@pytest.fixture
def restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Restarted:
    return Restarted(tmp_path, monkeypatch)


def test_a_docker_that_took_a_session_along_is_one_that_went_away_and_is_told_once(
    restarted: Restarted,
) -> None:
    # Whatever the agent makes of the request to end.
    restarted.code = 0
    restarted.container.start()
    restarted.clock += engine.SHORT
    with pytest.raises(EngineGoneError, match="Docker was restarted, and ended the session"):
        restarted.container.wait()
    assert (restarted.container.wait(), restarted.asked) == (0, 1)


@pytest.mark.parametrize("began", [-100.0, -5.0, 500.0])
def test_a_session_that_ended_at_another_time_has_its_exit_code(restarted: Restarted, began: float) -> None:
    restarted.began(BEGIN + began)
    assert restarted.container.wait() == 143


def test_what_succeeded_at_once_is_not_asked_about(restarted: Restarted) -> None:
    restarted.code = 0
    restarted.container.start()
    assert (restarted.container.wait(), restarted.asked) == (0, 0)


def test_how_one_ended_is_its_exit_code_when_it_was_removed_and_unknown_when_docker_is_away(
    restarted: Restarted,
) -> None:
    restarted.refusal = refusal(404, "no such container")
    assert restarted.container.wait() == 143
    restarted.refusal = requests.ConnectionError("refused")
    with pytest.raises(EngineGoneError):
        restarted.container.wait()
    # Whoever waited until it was back asks again.
    assert restarted.container.wait() == 143
