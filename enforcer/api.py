"""The enforcer's local API: HTTP and JSON on a unix socket that only its user may open."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import logging
import os
import select
import socket
import socketserver
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

from enforcer.changes import PATIENCE, Changes
from enforcer.client import API_HEADER
from enforcer.metrics import CONTENT_TYPE
from policy import versions
from policy.errors import CorralError, NotReadyError

log = logging.getLogger("corral.enforcer")

MAX_BODY = 64 << 10
SLACK = 8.0
WATCH = 0.2
JSON = "application/json"
# What opens something is taken back when it is not done in time.
REVOCABLE = frozenset({"/v1/allow"})

Answer = dict[str, Any] | str


class Backend(Protocol):
    """What the API asks of the service. All run on the service's loop."""

    async def version(self) -> dict[str, Any]:
        """Return versions."""

    async def await_ready(self, container: str, timeout: float) -> dict[str, Any]:
        """Return when a container may start; NotReadyError when it may not."""

    async def withdraw(self, container: str) -> dict[str, Any]:
        """Take a container's entries away."""

    async def status(self) -> dict[str, Any]:
        """Return the whole status."""

    async def live(self, sandbox: str) -> dict[str, Any]:
        """Return what the kernel holds for a sandbox."""

    async def denied(self, after: int, project: str | None) -> dict[str, Any]:
        """Return what was refused: rows that changed after a number; of one project directory, or all."""

    @property
    def changes(self) -> Changes:
        """What changes or questions running sessions."""

    async def measured(self) -> str:
        """Return counters and states as text for Prometheus."""


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, path: str, backend: Backend, loop: asyncio.AbstractEventLoop) -> None:
        self.backend = backend
        self.loop = loop
        super().__init__(path, _Handler)

    def call(self, work: Awaitable[Answer], timeout: float) -> Answer:
        """Run on the service's loop; TimeoutError: it is not done yet, and goes on."""

        async def run() -> Answer:
            return await work

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(timeout)

    def call_revocably(self, work: Awaitable[Answer], timeout: float, gone: Callable[[], bool]) -> Answer:
        """The same for what nobody may have without being told: it is cancelled when ``gone`` says so.

        Raises:
            TimeoutError: it was cancelled.
        """

        async def run() -> Answer:
            # Here and not in the thread that waits: it is either done and told, or neither.
            async with asyncio.timeout(timeout):
                return await work

        future = asyncio.run_coroutine_threadsafe(run(), self.loop)
        end = time.monotonic() + timeout + SLACK
        while True:
            try:
                return future.result(WATCH)
            except TimeoutError:
                if future.done():
                    raise
                if gone() or time.monotonic() > end:
                    future.cancel()
                    raise


class _Fields:
    """The fields of a request's body; ValueError, KeyError or TypeError when one is not what it must be."""

    def __init__(self, body: Any) -> None:
        if not isinstance(body, dict):
            raise TypeError("not an object")
        self._body: dict[str, Any] = body

    def text(self, key: str) -> str:
        value = self._body[key]
        if not isinstance(value, str):
            raise TypeError(f"{key} is not text")
        return value

    def optional_text(self, key: str) -> str | None:
        return None if self._body.get(key) is None else self.text(key)

    def texts(self, key: str) -> tuple[str, ...]:
        values = self._body.get(key) or []
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise TypeError(f"{key} is not a list of text")
        return tuple(values)

    def number(self, key: str) -> int:
        value = self._body[key]
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{key} is not a number")
        return value

    def numbers(self, key: str) -> tuple[int, ...]:
        return tuple(_Fields({key: value}).number(key) for value in self._body[key])

    def optional_number(self, key: str) -> float | None:
        value = self._body.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise TypeError(f"{key} is not a number")
        return value

    def flag(self, key: str) -> bool:
        return self._body.get(key) is True

    def seconds(self, key: str, default: float) -> float:
        return min(float(self._body.get(key, default)), 120.0)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "corral"
    timeout = 60
    server: _Server

    def address_string(self) -> str:
        return "local"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        log.debug(format, *args)

    def handle(self) -> None:
        # Who hangs up does without the answer; that is nothing for the journal.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            super().handle()

    def do_GET(self) -> None:
        backend, parts = self.server.backend, urlsplit(self.path)
        if parts.path == "/v1/version":
            self._answer(backend.version())
        elif parts.path == "/v1/status":
            self._answer(backend.status())
        elif parts.path == "/v1/live":
            self._answer(backend.live(parse_qs(parts.query).get("sandbox", [""])[0]))
        elif parts.path == "/v1/denied":
            query = parse_qs(parts.query)
            after = query.get("after", ["0"])[0]
            if not (after.isascii() and after.isdecimal()) or len(after) > 18:
                self._send(400, {"error": "after must be a number"})
                return
            self._answer(backend.denied(int(after), query.get("project", [None])[0]))
        elif parts.path in ("/metrics", "/v1/metrics"):
            self._answer(backend.measured(), content_type=CONTENT_TYPE)
        else:
            self._send(404, {"error": f"no such resource: {parts.path}"})

    def do_POST(self) -> None:
        backend, changes = self.server.backend, self.server.backend.changes
        routes: dict[str, Callable[[_Fields], tuple[Awaitable[Answer], float]]] = {
            "/v1/await-ready": lambda sent: (
                backend.await_ready(sent.text("container"), sent.seconds("timeout", 15.0)),
                sent.seconds("timeout", 15.0) + SLACK,
            ),
            "/v1/withdraw": lambda sent: (backend.withdraw(sent.text("container")), 30.0),
            "/v1/allow": lambda sent: (
                changes.allow(
                    sent.text("sandbox"),
                    sent.text("host"),
                    sent.numbers("ports"),
                    sent.optional_number("seconds"),
                    sent.flag("force"),
                ),
                2 * PATIENCE + SLACK,
            ),
            "/v1/deny": lambda sent: (
                changes.deny(sent.text("sandbox"), sent.text("host")),
                2 * PATIENCE + SLACK,
            ),
            "/v1/refresh": lambda sent: (
                changes.refresh(sent.optional_text("sandbox"), sent.texts("names")),
                2 * PATIENCE + SLACK,
            ),
            "/v1/check": lambda sent: (
                changes.check(
                    sent.text("sandbox"), sent.text("host"), sent.number("port"), sent.flag("resolve")
                ),
                PATIENCE + SLACK,
            ),
        }
        try:
            length = int(self.headers.get("Content-Length", "0"))
            if not 0 <= length <= MAX_BODY:
                raise ValueError("body too large")
            sent = _Fields(json.loads(self.rfile.read(length)))
            if self.path not in routes:
                self._send(404, {"error": f"no such resource: {self.path}"})
                return
            work, timeout = routes[self.path](sent)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self._send(400, {"error": f"malformed request: {error}"})
            return
        self._answer(work, timeout, revocable=self.path in REVOCABLE)

    def _answer(
        self,
        work: Awaitable[Answer],
        timeout: float = 30.0,
        content_type: str = JSON,
        *,
        revocable: bool = False,
    ) -> None:
        try:
            if revocable:
                answer = self.server.call_revocably(work, timeout, self._gone)
            else:
                answer = self.server.call(work, timeout)
            self._send(200, answer, content_type)
        except NotReadyError as error:
            self._send(409, {"error": error.message, "hint": error.hint})
        except CorralError as error:
            self._send(500, {"error": error.message, "hint": error.hint})
        except TimeoutError:
            what = "it was not done in time and is taken back" if revocable else "the enforcer is too busy"
            with contextlib.suppress(OSError):
                self._send(500, {"error": what, "hint": "journalctl --user -u corral-enforcer"})

    def _gone(self) -> bool:
        """Tell whether who asked has hung up."""
        try:
            # Not select, which knows no descriptor above 1023.
            waiting = select.poll()
            waiting.register(self.connection, select.POLLIN)
            return bool(waiting.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    def _send(self, status: int, body: Answer, content_type: str = JSON) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header(API_HEADER, str(versions.SCHEMAS[versions.API]))
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Api:
    """The listening socket and its threads."""

    def __init__(self, path: Path, backend: Backend, loop: asyncio.AbstractEventLoop) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The lock of this directory is ours: what lies here is a dead predecessor's.
        path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            self._server = _Server(str(path), backend, loop)
        finally:
            os.umask(before)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="api", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
