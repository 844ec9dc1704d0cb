"""Joining a container again over a real socket: what comes in one go with the engine's answer is not lost."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from corral.engine import AttachedContainer

UPGRADED = (
    b"HTTP/1.1 101 UPGRADED\r\nContent-Type: application/vnd.docker.raw-stream\r\n"
    b"Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
)
STATE = json.dumps({"State": {"Running": True}}).encode()
INSPECTED = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
    len(STATE),
    STATE,
)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[str, list[bytes]]]:
    """A Docker that answers two requests; the second with a stream of these pieces, each sent in one go."""
    pieces: list[bytes] = []
    path = tmp_path / "docker.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve(client: socket.socket) -> None:
            with client:
                while request := client.recv(65536):
                    if b"/attach" not in request.split(b"\r\n")[0]:
                        client.sendall(INSPECTED)
                        continue
                    for piece in pieces:
                        client.sendall(piece)
                    client.shutdown(socket.SHUT_WR)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"unix://{path}", pieces
        listener.shutdown(socket.SHUT_RDWR)


def everything(stream: socket.socket, ahead: bytes) -> bytes:
    stream.settimeout(10)
    parts = [ahead]
    while part := stream.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("size", [0, 5, 8192, 300_000])
def test_output_that_comes_with_the_answer_is_read(engine: tuple[str, list[bytes]], size: int) -> None:
    url, pieces = engine
    output = bytes(number % 251 for number in range(size))
    pieces[:] = [UPGRADED + output]
    api = docker.APIClient(base_url=url, version="1.41")
    found = AttachedContainer(api, url, "0a1b", stdin=False).rejoin(replay=True)
    assert everything(found.stream, found.ahead) == output
    assert found.running


def test_a_stream_that_stays_silent_does_not_keep_the_reader(engine: tuple[str, list[bytes]]) -> None:
    url, pieces = engine
    pieces[:] = [UPGRADED]
    api = docker.APIClient(base_url=url, version="1.41")
    assert AttachedContainer(api, url, "0a1b", stdin=False).rejoin(replay=True).ahead == b""
