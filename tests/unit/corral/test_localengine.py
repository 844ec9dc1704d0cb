"""What a session asks of the engine is what docker-py would ask, and fails as it would."""

from __future__ import annotations

import http.server
import inspect
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import docker
import pytest
import requests
from docker.errors import APIError, ImageNotFound, NotFound

from corral import engine
from corral.engine import AttachedContainer
from corral.localengine import LocalEngine
from policy.errors import EngineError, EngineGoneError

VERSION = "1.45"


@dataclass
class Heard:
    """What was asked, and what is answered."""

    url: str = ""
    status: int = 200
    answer: bytes = b"{}"
    asked: list[tuple[Any, ...]] = field(default_factory=list)


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[Heard]:
    found = Heard(f"unix://{tmp_path}/docker.sock")

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def address_string(self) -> str:
            return ""

        def log_message(self, format: str, *args: Any) -> None: ...  # noqa: A002

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            query = {key: values[0] for key, values in parse_qs(parts.query).items()}
            # Go reads both as the same.
            query = {key: {"True": "1", "False": "0"}.get(one, one) for key, one in query.items()}
            query.pop("link", None)
            found.asked.append((self.command, parts.path, query, json.loads(body) if body else None))
            self.send_response(found.status)
            self.send_header("Content-Length", str(len(found.answer)))
            self.end_headers()
            self.wfile.write(found.answer)

        do_POST = do_DELETE = do_GET  # noqa: N815

    with socketserver.ThreadingUnixStreamServer(found.url.removeprefix("unix://"), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield found
        server.shutdown()


@pytest.fixture
def local(heard: Heard) -> LocalEngine:
    return LocalEngine(heard.url, VERSION, 5)


CALLS: dict[str, Callable[[Any], Any]] = {
    "list": lambda api: api.containers(all=True, filters={"label": ["a=b", "c"]}),
    "list those that run": lambda api: api.containers(all=False, filters={"network": "0-corral-x"}),
    "container": lambda api: api.inspect_container("0a1b"),
    "image": lambda api: api.inspect_image("registry:5000/corral/demo:latest"),
    "network": lambda api: api.inspect_network("0-corral-demo"),
    "create": lambda api: api.create_container_from_config({"Image": "x", "Env": ["A=\u00e9"]}, "corral-x"),
    "create one without a name": lambda api: api.create_container_from_config({"Image": "x"}),
    "start": lambda api: api.start("0a1b"),
    "wait": lambda api: api.wait("0a1b"),
    "kill": lambda api: api.kill("0a1b", "SIGTERM"),
    "kill at once": lambda api: api.kill("0a1b"),
    "resize": lambda api: api.resize("0a1b", 30, 100),
    "remove": lambda api: api.remove_container("corral-x", force=True, v=True),
    "what is not here": lambda api: api.version(),
}


@pytest.mark.parametrize("what", CALLS)
def test_the_sdk_would_ask_the_same(heard: Heard, local: LocalEngine, what: str) -> None:
    heard.answer = b'{"Id": "x"}'
    answers = [CALLS[what](api) for api in (local, docker.APIClient(heard.url, VERSION))]
    ours, theirs = heard.asked
    assert ours == theirs and ours[1].startswith(f"/v{VERSION}/")
    assert answers[0] == answers[1]


def test_whoever_calls_need_not_know_which_of_the_two_it_is() -> None:
    """No argument is needed that docker-py does not need, and none has another name or place."""
    names = [name for name in vars(LocalEngine) if not name.startswith("_") and name != "close"]
    assert "create_container_from_config" in names
    for name in names:
        ours = inspect.signature(getattr(LocalEngine, name)).parameters
        theirs = inspect.signature(getattr(docker.APIClient, name)).parameters
        optional = {one for one, found in theirs.items() if found.default is not found.empty}
        for one, found in ours.items():
            assert one in theirs or "kwargs" in theirs, (name, one)
            assert found.default is not found.empty or one not in optional, (name, one)
        places = [one for one, found in ours.items() if found.kind is not found.KEYWORD_ONLY]
        assert places == list(theirs)[: len(places)], name


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (404, "No such container: x", NotFound),
        (404, "No such image: x:latest", ImageNotFound),
        (409, "removal is already in progress", APIError),
        (500, "driver failed", APIError),
        (500, "", APIError),
    ],
)
@pytest.mark.parametrize("what", ["image", "create", "attach"])
def test_a_refusal_is_the_sdk_s(
    heard: Heard, local: LocalEngine, status: int, message: str, kind: type[Exception], what: str
) -> None:
    heard.status, heard.answer = status, json.dumps({"message": message}).encode()
    call = {**CALLS, "attach": lambda api: api.attach_socket("0a1b", {"stdin": 1})}[what]
    caught = []
    for api in (local, docker.APIClient(heard.url, VERSION)):
        with pytest.raises(APIError) as error:
            call(api)
        caught.append(error.value)
    ours, theirs = caught
    assert type(ours) is type(theirs) is kind
    assert (ours.status_code, ours.explanation) == (theirs.status_code, theirs.explanation)
    assert ours.is_client_error() == theirs.is_client_error()


def test_an_engine_that_went_away_is_the_sdk_s_error_too(heard: Heard, local: LocalEngine) -> None:
    gone = LocalEngine(heard.url + "x", VERSION, 5)
    for call in (gone.containers, lambda: gone.attach_socket("0a1b", {})):
        with pytest.raises(requests.ConnectionError, match="No such file"):
            call()
    heard.answer = b"no json"
    with pytest.raises(requests.RequestException):
        local.containers()
    with pytest.raises(EngineGoneError, match="listing failed"), engine.errors("listing"):
        local.containers()


def test_an_engine_that_says_nothing_is_waited_for_only_so_long(tmp_path: Path) -> None:
    path = tmp_path / "dumb.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        dumb = LocalEngine(f"unix://{path}", VERSION, 0.05)
        with pytest.raises(requests.ReadTimeout):
            dumb.inspect_container("x")
        with pytest.raises(requests.ReadTimeout):
            dumb.attach_socket("x", {})


@pytest.mark.parametrize("status", ["101 UPGRADED", "200 OK"])
def test_nothing_of_a_stream_is_lost_that_comes_together_with_the_answer(tmp_path: Path, status: str) -> None:
    path, told = tmp_path / "docker.sock", list[bytes]()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/vnd.docker.raw-stream\r\n\r\n".encode()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            client, _ = listener.accept()
            with client:
                told.append(client.recv(65536))
                client.sendall(head + b"first\r\n\r\n")
                told.append(client.recv(65536))

        server = threading.Thread(target=answer)
        server.start()
        container = AttachedContainer(LocalEngine(f"unix://{path}", VERSION, 5), "", "0a1b", stdin=True)  # type: ignore[arg-type]
        with container.connect() as stream:
            assert stream.gettimeout() is None
            assert engine.read_ahead(container.held) == b""
            assert stream.recv(100) == b"first\r\n\r\n"
            stream.sendall(b"typed")
            server.join()
        container.close()
    request = told[0].decode("ascii")
    assert request.startswith(f"POST /v{VERSION}/containers/0a1b/attach?stdin=1&stdout=1&stderr=1&stream=1&")
    assert "\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n" in request and request.endswith("\r\n\r\n")
    assert told[1] == b"typed"


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 101", b"nonsense\r\n\r\n", b"x" * 70000])
def test_what_is_no_answer_begins_no_stream(tmp_path: Path, answer: bytes) -> None:
    path = tmp_path / "docker.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def say() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(65536)
                client.sendall(answer)

        server = threading.Thread(target=say, daemon=True)
        server.start()
        with pytest.raises(EngineError, match="attaching"), engine.errors("attaching"):
            LocalEngine(f"unix://{path}", VERSION, 5).attach_socket("0a1b", {})


def test_headers_that_the_user_wants_sent_are_the_sdk_s_business(heard: Heard, tmp_path: Path) -> None:
    from corral.early import Early

    heard.answer = json.dumps({"ApiVersion": VERSION, "Arch": "arm64"}).encode()
    environ = {"DOCKER_HOST": heard.url, "HOME": str(tmp_path), "DOCKER_CONFIG": str(tmp_path)}
    assert isinstance(engine.connect(environ, early=Early(heard.url)), LocalEngine)
    (tmp_path / "config.json").write_text('{"HttpHeaders": {"X-Who": "me"}}')
    assert isinstance(engine.connect(environ, early=Early(heard.url)), docker.APIClient)
