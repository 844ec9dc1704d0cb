"""The few requests that a session needs of the engine, without importing its SDK: that takes 90 ms.

What is not here is asked of docker-py's low-level client, which is made when it is first needed. Answers,
arguments and errors are docker-py's, so nobody has to know which of the two it is.
"""

from __future__ import annotations

import http.client
import io
import json
import socket
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import quote, urlencode

from corral.unixhttp import UnixConnection

if TYPE_CHECKING:
    from docker.api.client import APIClient

# Bytes of the answer that begins a stream.
HEAD = 1 << 16
UPGRADE = "POST {} HTTP/1.1\r\nHost: {}\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n"
ITS_OWN = -1.0
ALL: Mapping[str, Any] = MappingProxyType({"stdout": 1, "stderr": 1, "stream": 1})
Filters = Mapping[str, str | Sequence[str]]


class Stream:
    """A container's input and output; ``ahead`` is what was read of it behind the engine's answer."""

    ahead = b""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def fileno(self) -> int:
        """Return its descriptor."""
        return self._connection.fileno()

    def close(self) -> None:
        """Let go of it."""
        self._connection.close()


class LocalEngine:
    """The engine at a unix socket; each request has a connection of its own, so any thread may ask.

    Args:
        url: ``unix:///PATH``.
        version: of the engine's API.
        timeout: seconds that the engine may be silent.
    """

    def __init__(self, url: str, version: str, timeout: float) -> None:
        self.api_version = version
        self._url, self._path, self._timeout = url, url.removeprefix("unix://"), timeout
        self._full: APIClient | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._full is None:
            import docker

            self._full = docker.APIClient(
                base_url=self._url, version=self.api_version, timeout=int(self._timeout)
            )
        return getattr(self._full, name)

    def close(self) -> None:
        """Let go of what the SDK holds."""
        if self._full is not None:
            self._full.close()

    def containers(self, *, all: bool = False, filters: Filters | None = None) -> Any:  # noqa: A002
        """List containers."""
        query: dict[str, Any] = {"limit": -1, "all": int(all), "size": 0, "trunc_cmd": 0}
        if filters:
            lists = {key: [one] if isinstance(one, str) else list(one) for key, one in filters.items()}
            query["filters"] = json.dumps(lists)
        return self._ask("GET", "/containers/json", query)

    def inspect_container(self, container: str) -> Any:
        """Return the account of a container."""
        return self._ask("GET", f"/containers/{quote(container, safe='/:')}/json")

    def inspect_image(self, image: str) -> Any:
        """Return the account of an image."""
        return self._ask("GET", f"/images/{quote(image, safe='/:')}/json")

    def inspect_network(self, net_id: str) -> Any:
        """Return the account of a network."""
        return self._ask("GET", f"/networks/{quote(net_id, safe='/:')}")

    def create_container_from_config(self, config: Mapping[str, Any], name: str | None = None) -> Any:
        """Create a container; return its id and warnings."""
        return self._ask("POST", "/containers/create", {"name": name} if name else None, config)

    def start(self, container: str) -> None:
        """Start a container."""
        self._ask("POST", f"/containers/{quote(container)}/start")

    def wait(self, container: str, timeout: float | None = None) -> Any:
        """Block until a container has ended; return its exit code."""
        return self._ask("POST", f"/containers/{quote(container)}/wait", timeout=timeout)

    def kill(self, container: str, signal: str | None = None) -> None:
        """Send a signal to a container."""
        self._ask("POST", f"/containers/{quote(container)}/kill", {"signal": signal} if signal else None)

    def resize(self, container: str, height: int, width: int) -> None:
        """Set the size of a container's terminal."""
        self._ask("POST", f"/containers/{quote(container)}/resize", {"h": height, "w": width})

    def remove_container(self, container: str, *, v: bool = False, force: bool = False) -> None:
        """Remove a container, with its volumes and by force if that is wanted."""
        self._ask("DELETE", f"/containers/{quote(container)}", {"v": int(v), "force": int(force)})

    def attach_socket(self, container: str, params: Mapping[str, Any] = ALL) -> Stream:
        """Return a stream of a container's input and output."""
        target = self._target(f"/containers/{quote(container)}/attach", params)
        connection = UnixConnection(self._path, self._timeout)
        try:
            connection.connect()
            connection.sock.sendall(UPGRADE.format(target, connection.host).encode("ascii"))
            status, reason, data = _begun(connection.sock)
            connection.sock.settimeout(None)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            _lost(error)
        if status not in (http.client.SWITCHING_PROTOCOLS, http.client.OK):
            connection.close()
            _refuse(target, status, reason, data)
        return Stream(connection.sock)

    def _target(self, path: str, query: Mapping[str, Any] | None) -> str:
        return f"/v{self.api_version}{path}" + (f"?{urlencode(query)}" if query else "")

    def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        timeout: float | None = ITS_OWN,
    ) -> Any:
        target = self._target(path, query)
        connection = UnixConnection(self._path, self._timeout if timeout == ITS_OWN else timeout)
        try:
            headers = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, target, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            data = answer.read()
            found = json.loads(data) if data and answer.status < http.client.BAD_REQUEST else None
        except (OSError, ValueError, http.client.HTTPException) as error:
            _lost(error)
        finally:
            connection.close()
        if answer.status >= http.client.BAD_REQUEST:
            _refuse(target, answer.status, answer.reason, data)
        return found


def _begun(sock: socket.socket) -> tuple[int, str, bytes]:
    """Take the answer that begins a stream, and nothing of the stream; return status, reason, and a refusal.

    Raises:
        OSError, HTTPException: the engine went away, or is not understood.
    """
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        # One by one: what is read ahead nobody would ask for again. They are two hundred.
        part = sock.recv(1)
        head += part
        if not part or len(head) > HEAD:
            raise http.client.BadStatusLine(head[:80].decode("latin-1"))
    first, _, rest = head.partition(b"\r\n")
    words = [*first.decode("latin-1").split(maxsplit=2), "", "", ""]
    if not words[1].isdecimal():
        raise http.client.BadStatusLine(words[0])
    data = b""
    length = http.client.parse_headers(io.BytesIO(rest)).get("Content-Length", "")
    if int(words[1]) >= http.client.BAD_REQUEST and length.isdecimal():
        while len(data) < min(int(length), HEAD):
            part = sock.recv(HEAD)
            data += part
            if not part:
                break
    return int(words[1]), words[2], data


def _refuse(target: str, status: int, reason: str, data: bytes) -> NoReturn:
    """Raise what docker-py raises when the engine refuses."""
    import requests
    from docker.errors import create_api_error_from_http_exception

    response = requests.Response()
    response.status_code, response.reason, response.url = status, reason, target
    response.raw = io.BytesIO(data)
    kind = "Client" if status < http.client.INTERNAL_SERVER_ERROR else "Server"
    text = f"{status} {kind} Error: {reason} for url: {target}"
    create_api_error_from_http_exception(requests.HTTPError(text, response=response))
    raise AssertionError("docker-py raises")


def _lost(error: Exception) -> NoReturn:
    """Raise what docker-py raises when the engine is not there or is not understood."""
    import requests

    kind = requests.ReadTimeout if isinstance(error, TimeoutError) else requests.ConnectionError
    raise kind(error) from error
