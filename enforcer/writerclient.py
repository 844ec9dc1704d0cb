"""The enforcer's side of the writer's socket."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from enforcer.release import RELEASE
from policy import versions
from policy.errors import EnforcerError

PROTOCOL_VERSION = versions.SCHEMAS[versions.PROTOCOL]
HELLO = {"op": "hello"}
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


def rows_of(entries: Iterable[Entry]) -> set[tuple[str, str, int, str]]:
    """Return what elements permit: (source, protocol, port, destination)."""
    return {(entry.src, entry.proto, entry.port, entry.dst) for entry in entries}


@dataclass(frozen=True)
class Opened:
    """A source that may reach all public addresses; see ``Entry``."""

    src: str
    timeout: int
    packets: int
    comment: str


# As the writer has it: the backstop is there, and a port that is not isolated still meets the rules.
GRANTED_ALL_THE_SAME = frozenset({"hook", "port", "hold"})


@dataclass(frozen=True)
class Held:
    """What the writer read back: elements, denied packets per source, problems and refusals as text.

    ``driver``: where the decision is, nft, legacy or own; empty when an older writer does not tell.
    """

    version: str
    pins: tuple[Entry, ...]
    host: tuple[Entry, ...]
    denied: dict[str, int]
    problems: tuple[tuple[str, str], ...]
    refused: tuple[str, ...]
    driver: str = ""
    open: tuple[Opened, ...] = ()

    @property
    def standing(self) -> tuple[str, ...]:
        """What is wrong with the rules, for as long as which the writer grants nothing new."""
        return tuple(text for part, text in self.problems if part not in GRANTED_ALL_THE_SAME)


class WriterClient:
    """One request, one connection: nothing to reconnect when the writer restarts.

    ``vet`` looks at each connection before anything is asked, and raises EnforcerError when the process at
    its other end is not the right writer.
    """

    def __init__(
        self,
        path: Path,
        release: str = RELEASE,
        vet: Callable[[socket.socket], None] = lambda _sock: None,
    ) -> None:
        self._path = path
        self._release = release
        self._vet = vet

    def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """Greet, and ask only a writer that is understood. A greeting alone is answered by any version."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(TIMEOUT)
                sock.connect(str(self._path))
                self._vet(sock)
                with sock.makefile("rb") as stream:
                    hello = self._exchange(sock, stream, HELLO)
                    if body == HELLO:
                        return hello
                    self._check(hello)
                    answer = self._exchange(sock, stream, body)
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
        if not answer.get("ok"):
            raise EnforcerError(f"the writer refused: {answer.get('error')}")
        return answer

    def _exchange(self, sock: socket.socket, stream: IO[bytes], body: dict[str, Any]) -> dict[str, Any]:
        sock.sendall(json.dumps({"v": PROTOCOL_VERSION, **body}).encode() + b"\n")
        try:
            answer = json.loads(stream.readline(MAX_ANSWER))
        except ValueError as error:
            raise EnforcerError(f"the writer at {self._path} broke off its answer") from error
        if not isinstance(answer, dict):
            raise EnforcerError(f"the writer at {self._path} does not answer as one")
        return answer

    def _check(self, hello: dict[str, Any]) -> None:
        own = versions.parse("the enforcer", versions.describe(self._release))
        problem = versions.writer_mismatch(own, versions.parse("the netfilter writer", hello))
        if problem is not None:
            raise EnforcerError(*problem)

    def hello(self) -> dict[str, Any]:
        """Return the writer's version and schemas, its skeleton's digest and how often it healed.

        A writer that speaks another protocol tells its version all the same, and nothing else for sure.
        """
        return self._ask(HELLO)

    def apply(
        self,
        sandboxes: list[dict[str, str]],
        pins: list[list[object]],
        host: list[list[object]],
        lives: Sequence[list[object]] = (),
        opened: Sequence[list[object]] = (),
    ) -> Held:
        """Make the full desired state of this user true.

        ``lives``: of some pins, the seconds after which the kernel lets go of them by itself.

        Raises:
            EnforcerError: the writer cannot be asked or refused the whole request.
        """
        body: dict[str, object] = {"op": "apply", "sandboxes": sandboxes, "pins": pins, "host": host}
        return _held(self._ask(body | {"lives": list(lives), "open": list(opened)}))

    def denied(self, epoch: str, after: int, sources: Collection[str], tallies: bool) -> Mapping[str, Any]:
        """Return what the fence refused to this user's sandboxes; see the writer's ``Writer.denied``.

        Args:
            epoch: of the answer before, empty at first.
            after: where that answer ended.
            sources: addresses whose packets are to be counted from now on.
            tallies: whether the kernel's counters of each destination are wanted too.
        """
        body = {"op": "denied", "epoch": epoch, "after": after, "sources": sorted(sources)}
        return self._ask({**body, "tallies": tallies})

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
        driver=str(answer.get("driver", "")),
        open=tuple(Opened(*row) for row in answer.get("open", ())),
    )
