"""The enforcer between two others: it asks only a writer it understands, and tells both sides who it is."""

from __future__ import annotations

import http.server
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from enforcer import reports
from enforcer.client import API_HEADER, Client
from enforcer.netfilter.schemas import SCHEMAS
from enforcer.writerclient import WriterClient
from policy import versions
from policy.errors import EnforcerError

READ = {"pins": [], "host": [], "denied": {}, "problems": [], "refused": []}


@contextmanager
def writer(path: Path, answer: Callable[[dict[str, Any]], Any], asked: list[str]) -> Iterator[WriterClient]:
    """A writer of whatever version on a socket; ``asked`` collects the operations."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                body = json.loads(line)
                asked.append(body["op"])
                self.wfile.write(json.dumps(answer(body)).encode() + b"\n")

    with socketserver.ThreadingUnixStreamServer(str(path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield WriterClient(path, "1.2.0")
        finally:
            server.shutdown()
            thread.join()


def speaks(release: str | None, schemas: dict[str, int] | None) -> Callable[[dict[str, Any]], dict[str, Any]]:
    told: dict[str, Any] = {"ok": True, "v": 2, "skeleton": "0a0b", **READ}
    if release is not None:
        told["version"] = release
    if schemas is not None:
        told["schemas"] = schemas
    return lambda _: told


def test_a_writer_that_is_understood_is_asked_on_the_same_connection(tmp_path: Path) -> None:
    asked: list[str] = []
    with writer(tmp_path / "w", speaks("1.2.0", SCHEMAS), asked) as client:
        assert client.read().version == "1.2.0"
        assert client.apply([], [], []).pins == ()
    assert asked == ["hello", "read", "hello", "apply"]


@pytest.mark.parametrize(
    ("release", "schemas", "message"),
    [
        ("1.1.0", SCHEMAS, "the enforcer is version 1.2.0, but the netfilter writer is 1.1.0"),
        ("1.3.0", {**SCHEMAS, "protocol": 3}, r"writer is 1\.3\.0 \(protocol schema 2 and 3\)"),
        ("1.2.0", {**SCHEMAS, "skeleton": 3}, "skeleton schema 2 and 3"),
        ("1.2.0", None, "protocol schema 2 and unknown"),
        (None, None, "the netfilter writer is of an unknown version"),
    ],
)
def test_a_writer_that_is_not_understood_is_asked_for_nothing(
    tmp_path: Path, release: str | None, schemas: dict[str, int] | None, message: str
) -> None:
    asked: list[str] = []
    with writer(tmp_path / "w", speaks(release, schemas), asked) as client:
        for ask in (client.read, lambda: client.apply([], [], [])):
            with pytest.raises(EnforcerError, match=message) as caught:
                ask()
            assert "corral install" in str(caught.value.hint)
        # Who asks only for the version gets it, for people to read.
        assert client.hello().get("version") == release
    assert set(asked) == {"hello"}


def test_a_later_writer_of_another_user_is_used_while_it_speaks_the_same(tmp_path: Path) -> None:
    with writer(tmp_path / "w", speaks("1.3.0", SCHEMAS), []) as client:
        assert client.read().version == "1.3.0"


def test_a_refusal_of_a_greeting_still_tells_the_version(tmp_path: Path) -> None:
    def old(body: dict[str, Any]) -> dict[str, Any]:
        return {"v": 0, "version": "0.9", "ok": False, "error": "this writer speaks version 0"}

    with writer(tmp_path / "w", old, []) as client:
        told = reports.version("1.2.0", client.hello())
    found = versions.mismatch(
        versions.parse("corral", versions.describe("1.2.0")),
        versions.parse("E", told),
        versions.parse("W", told["writer"]),
    )
    assert found is not None
    assert "W is 0.9" in found[0]


@pytest.mark.parametrize("line", [["a", "list"], "text", 3])
def test_an_answer_that_is_no_object_is_an_error_in_words(tmp_path: Path, line: object) -> None:
    with writer(tmp_path / "w", lambda _: line, []) as client, pytest.raises(EnforcerError, match="as one"):
        client.hello()


def test_what_the_enforcer_tells_of_itself_and_the_writer_is_read_back() -> None:
    hello = {"version": "1.3.0", "schemas": SCHEMAS, "skeleton": "0a0b", "ok": True}
    told = json.loads(json.dumps(reports.version("1.2.0", hello)))
    assert versions.parse("x", told).schemas == versions.SCHEMAS
    assert versions.parse("x", told["writer"]) == versions.Part("x", "1.3.0", SCHEMAS)
    assert reports.version("1.2.0", EnforcerError("gone", "look"))["writer"] == {
        "reachable": False,
        "version": None,
        "error": "gone",
        "hint": "look",
    }


@contextmanager
def enforcer(path: Path, api: str | None) -> Iterator[Client]:
    """An enforcer whose answers carry that API schema, None for one of a time before there was any."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def address_string(self) -> str:
            return "local"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200)
            if api is not None:
                self.send_header(API_HEADER, api)
            self.end_headers()
            self.wfile.write(b"{}")

    class Server(socketserver.ThreadingUnixStreamServer):
        address_family = socket.AF_UNIX

    with Server(str(path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield Client(path, timeout=5)
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("api", ["0", "99", "", None])
def test_an_enforcer_that_was_replaced_meanwhile_is_noticed_at_every_answer(
    tmp_path: Path, api: str | None
) -> None:
    with enforcer(tmp_path / "e", api) as client:
        # Asking for the version is how one finds out.
        assert client.version() == {}
        with pytest.raises(EnforcerError, match="API schema 1, but the enforcer") as caught:
            client.status()
        assert caught.value.hint == "run: corral install"


def test_an_enforcer_of_the_same_schema_is_understood(tmp_path: Path) -> None:
    with enforcer(tmp_path / "e", str(versions.SCHEMAS[versions.API])) as client:
        assert client.status() == {}
