"""Secrets are told once, to the first visitor, and are nowhere else."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path

import pytest

from agent_image.files.entrypoint import channel
from corral import secretchannel
from corral.context import Invocation
from corral.lifecycle import Prepared, created
from corral.secretchannel import NAME, offered
from policy.errors import CorralError
from tests.unit.corral.fakes import FakeDocker
from tests.unit.corral.test_lifecycle import prepared, request

__all__ = ["prepared"]
SECRETS = {"API_KEY": "s3cr3t-välue", "LONG": "x" * 300_000, "EMPTY": ""}


def test_the_first_visitor_gets_all_and_the_second_nothing(tmp_path: Path) -> None:
    with offered(tmp_path, SECRETS):
        assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600
        assert channel.receive(str(tmp_path / NAME)) == SECRETS
        with pytest.raises(OSError):
            channel.receive(str(tmp_path / NAME))
    assert list(tmp_path.iterdir()) == []


def test_of_many_visitors_one_gets_an_answer(tmp_path: Path) -> None:
    told: list[dict[str, str]] = []

    def visit() -> None:
        with contextlib.suppress(OSError, ValueError):
            told.append(channel.receive(str(tmp_path / NAME)))

    with offered(tmp_path, SECRETS):
        visitors = [threading.Thread(target=visit) for _ in range(20)]
        for visitor in visitors:
            visitor.start()
        for visitor in visitors:
            visitor.join(20)
    assert told == [SECRETS]


def test_a_visitor_that_goes_away_was_the_first(tmp_path: Path) -> None:
    with offered(tmp_path, SECRETS):
        with socket.socket(socket.AF_UNIX) as visitor:
            visitor.connect(str(tmp_path / NAME))
        with pytest.raises((OSError, ValueError)):
            for _ in range(1000):
                channel.receive(str(tmp_path / NAME))


def test_nobody_comes_and_nothing_is_left(tmp_path: Path) -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with offered(tmp_path, SECRETS):
        pass
    with offered(tmp_path, {}):
        assert list(tmp_path.iterdir()) == []
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_another_user_gets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secretchannel, "_uid", lambda _: os.geteuid() + 1)
    with offered(tmp_path, SECRETS), pytest.raises(ValueError, match="not whole"):
        channel.receive(str(tmp_path / NAME))


def test_a_long_path_is_no_obstacle(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["x" * 60] * 4)
    deep.mkdir(parents=True)
    with offered(deep, SECRETS):
        assert (deep / NAME).is_socket()


def test_a_socket_that_cannot_be_made_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / NAME).touch()
    with pytest.raises(CorralError, match="cannot make a socket"), offered(tmp_path, SECRETS):
        pytest.fail("went on")
    with pytest.raises(CorralError, match="cannot use"), offered(tmp_path / "missing", SECRETS):
        pytest.fail("went on")


@pytest.mark.parametrize("answer", [b"", b'{"A": "s3cr3t"', b'["s3cr3t"]', b'{"A": 1}', b"s3cr3t"])
def test_half_an_answer_is_none_and_is_not_quoted(tmp_path: Path, answer: bytes) -> None:
    path = str(tmp_path / NAME)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)

        def serve() -> None:
            visitor, _ = listener.accept()
            with visitor:
                visitor.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ValueError) as caught:
            channel.receive(path)
        thread.join(10)
    assert "s3cr3t" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_session_s_container_knows_where_to_ask_and_nothing_more(
    invocation: Invocation,
    prepared: Prepared,
    docker_engine: FakeDocker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with created(invocation, prepared, request()) as made:
        row = docker_engine.containers_by_id[made.ident]
        assert "CORRAL_SECRETS=/home/agent/.corral-secrets" in row["Body"]["Env"]
        assert "s3cr3t" not in repr(row)
        assert "s3cr3t" not in repr(made.spec)
        home = invocation.paths.session_home("0a1b2c3d")
        monkeypatch.chdir(home)  # the path of a socket is short
        assert channel.receive(NAME) == {"API_KEY": "s3cr3t"}
        assert not any("s3cr3t" in path.read_text() for path in home.parent.rglob("*") if path.is_file())


def test_a_directory_in_its_place_afterwards_is_no_error(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with offered(tmp_path, SECRETS):
        assert channel.receive(str(tmp_path / NAME)) == SECRETS
        (tmp_path / NAME).mkdir()
    assert set(os.listdir("/proc/self/fd")) <= before
