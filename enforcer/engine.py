"""What the enforcer needs of Docker: list, inspect, events. The only module here that imports the SDK."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import docker
import requests
from docker.errors import APIError, DockerException, NotFound

from policy.declaration import LABEL_UID
from policy.errors import EngineError

EVENT_TYPES = ["container", "network"]
QUIET = 6 * 3600


class Engine(Protocol):
    """The Docker calls of the service. Every method raises EngineError when Docker does not answer."""

    def identifiers(self, uid: int) -> list[str]:
        """Return the ids of all containers that declare this uid, running or not."""

    def container(self, ident: str) -> dict[str, Any] | None:
        """Return one container's inspect, None when it is gone."""

    def networks(self) -> list[dict[str, Any]]:
        """Return the inspects of all networks."""

    def network(self, ident: str) -> dict[str, Any] | None:
        """Return one network's inspect with the containers on it, None when it is gone."""

    @property
    def version(self) -> str:
        """The engine's own version, as it says it."""

    def disconnect(self, network: str, ident: str) -> None:
        """Take a container off a network, by force; fine when it is not on it."""

    def stop(self, ident: str) -> None:
        """End a container at once, so that no restart policy starts it again; fine when it is gone."""

    def start(self, ident: str) -> None:
        """Start a container that has ended; fine when it is gone or runs."""

    def ended(self, uid: int, *, or_created: bool = False) -> list[str]:
        """Return the ids of containers that declare this uid and have ended, or were never started too."""

    def remove(self, ident: str) -> None:
        """Remove a container that does not run; fine when it is gone, refused when it runs again."""

    def joiners(self) -> list[str]:
        """Return the ids of running containers that share another container's network."""

    def exec(self, ident: str) -> dict[str, Any] | None:
        """Return one exec's inspect, None when it is gone."""

    def subscribe(self) -> Iterator[Mapping[str, Any]]:
        """Open the event stream, and return it only once it is open; it ends when Docker does."""

    def close(self) -> None:
        """Break off the event stream of this client."""


class DockerEngine:
    """Docker over its local socket: the environment's, or the one at ``url``.

    Raises:
        EngineError: it does not answer, or is rootless when it should not be, or the other way round: then
            the rules are not where its bridges are, and its users are not who they seem.
    """

    def __init__(self, url: str | None = None, *, rootless: bool = False) -> None:
        try:
            self._client = _client(url, 20)
            # A stream that is quiet for hours is not broken.
            self._streaming = _client(url, QUIET)
        except DockerException as error:
            raise EngineError(f"Docker does not answer: {error}", "systemctl status docker") from error
        self._stream: Any = None
        with _errors():
            info = self._client.info()
        self._version, told = str(info.get("ServerVersion", "")), info.get("SecurityOptions") or ()
        if any("name=rootless" in str(option).split(",") for option in told) != rootless:
            self.close()
            what = "not rootless" if rootless else "rootless"
            raise EngineError(f"the engine is {what}, and corral was installed for another", "corral install")

    @property
    def version(self) -> str:
        """See Engine."""
        return self._version

    def identifiers(self, uid: int) -> list[str]:
        """See Engine."""
        with _errors():
            rows = self._client.api.containers(all=True, filters={"label": f"{LABEL_UID}={uid}"})
            return [str(row["Id"]) for row in rows]

    def container(self, ident: str) -> dict[str, Any] | None:
        """See Engine."""
        with _errors():
            try:
                inspect: dict[str, Any] = self._client.api.inspect_container(ident)
            except NotFound:
                return None
            return inspect

    def networks(self) -> list[dict[str, Any]]:
        """See Engine."""
        with _errors():
            rows: list[dict[str, Any]] = self._client.api.networks()
            return rows

    def network(self, ident: str) -> dict[str, Any] | None:
        """See Engine."""
        with _errors():
            try:
                inspect: dict[str, Any] = self._client.api.inspect_network(ident)
            except NotFound:
                return None
            return inspect

    def disconnect(self, network: str, ident: str) -> None:
        """See Engine."""
        with _errors(), contextlib.suppress(NotFound):
            try:
                self._client.api.disconnect_container_from_network(ident, network, force=True)
            except APIError as error:
                # It left by itself, or was taken off a moment ago: engines say so as 403 or 500.
                if "is not connected to" not in str(error.explanation):
                    raise

    def stop(self, ident: str) -> None:
        """See Engine."""
        with _errors(), contextlib.suppress(NotFound):
            self._client.api.stop(ident, timeout=0)

    def start(self, ident: str) -> None:
        """See Engine."""
        with _errors(), contextlib.suppress(NotFound):
            self._client.api.start(ident)

    def ended(self, uid: int, *, or_created: bool = False) -> list[str]:
        """See Engine."""
        with _errors():
            status = ["exited", "dead", *(["created"] if or_created else [])]
            wanted = {"label": f"{LABEL_UID}={uid}", "status": status}
            return [str(row["Id"]) for row in self._client.api.containers(all=True, filters=wanted)]

    def remove(self, ident: str) -> None:
        """See Engine."""
        with _errors(), contextlib.suppress(NotFound):
            try:
                self._client.api.remove_container(ident, v=True)
            except APIError as error:
                # Somebody else is at it, or has started it.
                if error.status_code != 409:
                    raise

    def joiners(self) -> list[str]:
        """See Engine."""
        with _errors():
            rows = self._client.api.containers()
            return [
                str(row["Id"])
                for row in rows
                if str((row.get("HostConfig") or {}).get("NetworkMode", "")).startswith("container:")
            ]

    def exec(self, ident: str) -> dict[str, Any] | None:
        """See Engine."""
        with _errors():
            try:
                inspect: dict[str, Any] = self._client.api.exec_inspect(ident)
            except NotFound:
                return None
            return inspect

    def subscribe(self) -> Iterator[Mapping[str, Any]]:
        """See Engine."""
        with _errors():
            self._stream = self._streaming.events(decode=True, filters={"type": EVENT_TYPES})
        return self._iterate()

    def _iterate(self) -> Iterator[Mapping[str, Any]]:
        with _errors():
            yield from self._stream

    def close(self) -> None:
        """See Engine."""
        if self._stream is not None:
            with contextlib.suppress(Exception):
                self._stream.close()
        self._client.close()
        self._streaming.close()


def _client(url: str | None, timeout: int) -> docker.DockerClient:
    if url is None:
        return docker.from_env(timeout=timeout)
    return docker.DockerClient(base_url=url, version="auto", timeout=timeout)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (APIError, DockerException, requests.exceptions.RequestException, OSError) as error:
        raise EngineError(f"Docker: {error}") from error
