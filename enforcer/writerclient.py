"""The enforcer's side of the writer's socket."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policy.errors import EnforcerError

PROTOCOL_VERSION = 1
TIMEOUT = 30.0
MAX_ANSWER = 64 << 20


@dataclass(frozen=True)
class Entry:
    """One element as the kernel holds it: ``timeout`` in seconds, ``packets`` matched so far."""

    src: str
    proto: str
    port: int
    dst: str
    timeout: int
    packets: int
    comment: str


@dataclass(frozen=True)
class Held:
    """What the writer read back: elements, denied packets per source, problems and refusals as text."""

    version: str
    pins: tuple[Entry, ...]
    host: tuple[Entry, ...]
    denied: dict[str, int]
    problems: tuple[tuple[str, str], ...]
    refused: tuple[str, ...]


class WriterClient:
    """One request, one connection: nothing to reconnect when the writer restarts."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(TIMEOUT)
                sock.connect(str(self._path))
                sock.sendall(json.dumps({"v": PROTOCOL_VERSION, **body}).encode() + b"\n")
                with sock.makefile("rb") as stream:
                    line = stream.readline(MAX_ANSWER)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise EnforcerError(
                f"the writer does not answer at {self._path}: {error.strerror}", "run: corral install"
            ) from error
        except PermissionError as error:
            raise EnforcerError(
                f"no permission for {self._path}",
                "only members of group docker may use it; log in again after joining",
            ) from error
        except OSError as error:
            raise EnforcerError(f"asking the writer at {self._path} failed: {error}") from error
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise EnforcerError(f"the writer at {self._path} broke off its answer") from error
        if not answer.get("ok"):
            raise EnforcerError(f"the writer refused: {answer.get('error')}")
        return answer

    def hello(self) -> dict[str, Any]:
        """Return the writer's version, its skeleton's digest and how often it healed."""
        return self._ask({"op": "hello"})

    def apply(
        self, sandboxes: list[dict[str, str]], pins: list[list[object]], host: list[list[object]]
    ) -> Held:
        """Make the full desired state of this user true.

        Raises:
            EnforcerError: the writer cannot be asked or refused the whole request.
        """
        return _held(self._ask({"op": "apply", "sandboxes": sandboxes, "pins": pins, "host": host}))

    def read(self) -> Held:
        """Return what the kernel holds for this user now."""
        return _held(self._ask({"op": "read"}))


def _held(answer: dict[str, Any]) -> Held:
    return Held(
        version=str(answer["version"]),
        pins=tuple(Entry(*row) for row in answer["pins"]),
        host=tuple(Entry(*row) for row in answer["host"]),
        denied={str(src): int(count) for src, count in answer["denied"].items()},
        problems=tuple((str(part), str(text)) for part, text in answer["problems"]),
        refused=tuple(str(text) for text in answer["refused"]),
    )
