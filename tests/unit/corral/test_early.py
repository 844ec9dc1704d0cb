from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from corral import early, engine
from corral.context import Invocation
from corral.early import Early, Told, ask
from policy.errors import EngineError

VERSION = {"ApiVersion": "1.45", "Arch": "arm64", "Os": "linux"}
Serve = Callable[[bytes], str]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """An engine that says one thing to everybody; returns its socket's path."""
    listeners = []

    def make(answer: bytes) -> str:
        path = str(tmp_path / f"docker{len(listeners)}.sock")
        listener = socket.socket(socket.AF_UNIX)
        listeners.append(listener)
        listener.bind(path)
        listener.listen()

        def run() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                with client:
                    client.recv(65536)
                    client.sendall(answer)

        threading.Thread(target=run, daemon=True).start()
        return path

    yield make
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def http(body: object, status: str = "200 OK") -> bytes:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(text), text)


def test_an_engine_says_its_version_and_architecture(serve: Serve) -> None:
    assert ask(serve(http(VERSION))) == Told("1.45", "arm64")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense",
        http(VERSION, "500 Internal Server Error"),
        http([]),
        http(b"{"),
        http({"ApiVersion": "1.45"}),
    ],
)
def test_what_is_not_understood_is_nothing(serve: Serve, answer: bytes) -> None:
    assert ask(serve(answer)) is None


def test_an_engine_that_is_not_there_is_nothing(tmp_path: Path) -> None:
    assert ask(str(tmp_path / "missing.sock")) is None
    assert Early(f"unix://{tmp_path}/missing.sock").answer(f"unix://{tmp_path}/missing.sock") is None


def test_an_answer_is_for_the_engine_that_was_asked(serve: Serve) -> None:
    url = f"unix://{serve(http(VERSION))}"
    made = Early(url)
    assert made.answer(url) == Told("1.45", "arm64")
    assert made.answer("unix:///another.sock") is None
    # What is elsewhere is not asked.
    assert Early("tcp://192.0.2.1:2375").answer("tcp://192.0.2.1:2375") is None


def test_what_would_be_refused_is_not_asked(tmp_path: Path) -> None:
    assert early.begin({"DOCKER_HOST": "tcp://192.0.2.1:2375"}) is None
    made = early.begin({"DOCKER_HOST": f"unix://{tmp_path}/x.sock", "HOME": str(tmp_path)})
    assert made is not None and made.answer(f"unix://{tmp_path}/x.sock") is None


def test_the_client_is_made_without_a_second_question(
    serve: Serve, invocation: Invocation, tmp_path: Path
) -> None:
    path = serve(http(VERSION))
    environ = {"DOCKER_HOST": f"unix://{path}", "HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    asked = early.begin(environ)
    assert asked is not None and asked.answer(f"unix://{path}") is not None
    Path(path).unlink()
    assert engine.connect(environ, early=asked).api_version == "1.45"
    with pytest.raises(EngineError):
        engine.connect(environ)
    made = Invocation(replace(invocation.user, environ=environ), tmp_path, invocation.console, early=asked)
    assert made.architecture == "arm64"


def test_without_an_answer_docker_is_asked_as_ever(invocation: Invocation) -> None:
    invocation.__dict__["api"] = SimpleNamespace(version=lambda: {"Arch": "riscv64"})
    assert invocation.architecture == "riscv64"
