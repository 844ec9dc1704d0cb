"""The Docker Engine of this machine: a client, errors in corral's words, and nothing that decides."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from corral import limits
from corral.hostfacts import base_url, extra_headers, podman_alone, refuse_elsewhere
from corral.localengine import LocalEngine, Stream
from corral.membership import login_fix, membership
from policy.declaration import LABEL_PROJECT, LABEL_SANDBOX, LABEL_UID
from policy.errors import CorralError, EngineError, EngineGoneError

if TYPE_CHECKING:
    import socket

    from docker.api.client import APIClient

    from corral.attach import Rejoined
    from corral.early import Early
    from policy.container import Limits
    from policy.schema import Limits as Wanted

# Also what is defined where less is imported.
__all__ = ["base_url"]
TIMEOUT = 60
# With live-restore the agent outlives a restart of Docker, which may be the step of a longer upgrade.
COME_BACK, COME_BACK_PAUSE = 120.0, 0.1
# What is over does not need it, and its user waits.
SOON = 20.0
# Beside the engine's socket, written when it starts; and seconds that a restart takes at most.
PIDFILE, RESTART = "docker.pid", 120.0
# What succeeded within this many seconds ended by itself, and nobody asks how.
SHORT = 2.0
# Docker always listens for a detach sequence. This one no keyboard sends: 0xFF is not part of any UTF-8 text.
NO_DETACH = b",".join([b"\xff"] * 8)


def connect(environ: Mapping[str, str], timeout: int = TIMEOUT, early: Early | None = None) -> APIClient:
    """Return docker-py's low-level client of the local engine, or what stands for it until more is asked.

    Args:
        environ: the user's.
        timeout: seconds, for each request.
        early: the engine was asked for its version already.

    Raises:
        EngineError: no engine, no permission, or the docker command would use one elsewhere; with the fix.
    """
    url = base_url(environ)
    refuse_elsewhere(environ)
    told = early.answer(url) if early is not None else None
    if told is not None and not extra_headers(environ):
        return cast("APIClient", LocalEngine(url, told.api, timeout))
    import docker
    import requests
    from docker.errors import DockerException

    try:
        return docker.APIClient(base_url=url, version=told.api if told else "auto", timeout=timeout)
    except (DockerException, requests.RequestException) as error:
        raise _unreachable(url, error, podman=podman_alone(environ)) from error


def _unreachable(url: str, error: Exception, *, podman: bool = False) -> EngineError:
    path = url.removeprefix("unix://")
    text = str(error)
    # The socket of an engine of the user's own is in the user's runtime directory.
    control = "systemctl --user" if path.startswith("/run/user/") else "systemctl"
    if "Permission denied" in text:
        return EngineError(
            f"you may not use Docker: permission denied on {path}",
            login_fix(membership(os.geteuid())),
        )
    if "No such file" in text and podman:
        from corral.hostcheck import INSTALL_ENGINE

        return EngineError("Docker is not installed, and podman is not supported yet", INSTALL_ENGINE)
    if "No such file" in text:
        return EngineGoneError(
            f"Docker is not running or not installed: there is no {path}", f"{control} start docker"
        )
    if "refused" in text:
        return EngineGoneError(f"Docker is not running: nobody answers at {path}", f"{control} start docker")
    return EngineGoneError(f"Docker does not answer at {path}: {text}", f"{control} status docker")


@contextlib.contextmanager
def errors(doing: str) -> Iterator[None]:
    """Turn what docker-py raises into EngineError: ``doing`` failed, and Docker's own explanation."""
    try:
        yield
    except CorralError:
        raise
    except Exception as error:
        # Imported when there is one: the SDK takes its time.
        import requests
        from docker.errors import APIError, DockerException

        if isinstance(error, APIError):
            raise EngineError(f"{doing} failed: {error.explanation or error}") from error
        # Its other kinds are raised before anybody is asked: about an argument, not about Docker.
        if isinstance(error, DockerException) and type(error) is not DockerException:
            raise EngineError(f"{doing} failed: {error}") from error
        if isinstance(error, DockerException | requests.RequestException):
            raise EngineGoneError(
                f"{doing} failed: Docker went away or does not answer: {error}", "systemctl status docker"
            ) from error
        raise


def missing(error: Exception) -> bool:
    """Say whether that is Docker's word for what it does not have."""
    from docker.errors import NotFound

    return isinstance(error, NotFound)


def possible_limits(api: APIClient, wanted: Wanted, warn: Callable[[str], None]) -> Limits:
    """Return what a container may use of this host, as far as the host can keep it.

    Raises:
        EngineError, PolicyError: see limits.possible.
    """
    info = None
    if wanted.cpus is not None:
        with errors("asking Docker what it can limit"):
            info = api.info()
    found, told = limits.possible(wanted, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), info)
    for text in told:
        warn(text)
    return found


def create_container(
    api: APIClient, body: Mapping[str, Any], name: str, *, best_effort: bool
) -> tuple[str, list[str]]:
    """Create a container; return its id and what the user has to know (see ``limits.judge_warnings``).

    Raises:
        EngineError: refused, or created with something left out (then it is removed again).
    """
    try:
        with errors(f"creating the container {name}"):
            answer = api.create_container_from_config(dict(body), name)  # type: ignore[no-untyped-call]
    except EngineError as error:
        import requests

        if isinstance(error.__cause__, requests.RequestException) and error.__cause__.response is None:
            # Docker may be slow and not gone: what it makes after we stopped listening is nobody's.
            error.hint = "when Docker is well again: corral down, which removes what it may still have made"
        raise
    ident: str = answer["Id"]
    try:
        warnings = answer.get("Warnings")
        return ident, limits.judge_warnings(f"the container {name}", warnings, best_effort=best_effort)
    except EngineError:
        remove_container(api, ident)
        raise


def remove_container(api: APIClient, ident: str) -> bool:
    """Remove a container, running or not; return False when it is gone already.

    Raises:
        EngineError: Docker cannot.
    """
    with errors(f"removing the container {ident[:12]}"):
        try:
            api.remove_container(ident, force=True, v=True)
        except Exception as error:
            # Or somebody else is removing it at this moment, which comes to the same.
            if missing(error) or _already(error):
                return False
            raise
    return True


def _already(error: Exception) -> bool:
    from docker.errors import APIError

    text = str(error.explanation) if isinstance(error, APIError) and error.status_code == 409 else ""
    return "already in progress" in text


def remove_ended(api: APIClient, ident: str) -> None:
    """Remove the container of a session that is over, also while the engine is being started again.

    systemd holds the socket of the system's engine meanwhile. A rootless one has none, and ended the session.

    Raises:
        EngineError: Docker cannot, or is not back within ``SOON`` seconds.
    """
    until = time.monotonic() + SOON
    while True:
        try:
            remove_container(api, ident)
            return
        except EngineGoneError:
            if time.monotonic() > until:
                raise
            time.sleep(COME_BACK_PAUSE)


def sandbox_containers(
    api: APIClient, sandbox: str, uid: int, *, running: bool = False
) -> list[dict[str, Any]]:
    """Return Docker's list entries of the containers of one sandbox of one user."""
    return _labelled(api, uid, LABEL_SANDBOX, sandbox, running=running)


def project_containers(api: APIClient, project: str, uid: int) -> list[dict[str, Any]]:
    """Return Docker's list entries of one user's containers of a project directory, of any sandbox."""
    return _labelled(api, uid, LABEL_PROJECT, project, running=False)


def _labelled(api: APIClient, uid: int, label: str, value: str, *, running: bool) -> list[dict[str, Any]]:
    wanted = [f"{label}={value}", f"{LABEL_UID}={uid}"]
    with errors("listing containers"):
        found: list[dict[str, Any]] = api.containers(all=not running, filters={"label": wanted})
    return found


def container_name(entry: Mapping[str, Any]) -> str:
    """Return the name of a list entry."""
    names = entry.get("Names") or ["/" + str(entry.get("Id", ""))[:12]]
    return str(names[0]).lstrip("/")


def read_ahead(held: Any) -> bytes:
    """Return what was read of a stream behind the answer that began it.

    Args:
        held: what docker-py's ``attach_socket`` returned: the raw end below a buffered reader. The reader
            takes what comes in one go with the headers, and nobody would ever ask it again.
    """
    if isinstance(held, Stream):
        return held.ahead
    reader = held._response.raw._fp.fp
    before = held._sock.gettimeout()
    held._sock.setblocking(False)
    try:
        # Not blocking, a look into an empty buffer reads once, into the buffer, or finds nothing.
        return bytes(reader.peek())
    finally:
        held._sock.settimeout(before)


def ended_with_engine(api: APIClient, url: str, ident: str) -> bool:
    """Say whether a container ended right before this engine was started: without live-restore it ends them.

    Raises:
        EngineError: Docker does not answer, or does not have it.
    """
    from datetime import datetime
    from pathlib import Path

    with errors("looking at the session"):
        told = str((api.inspect_container(ident).get("State") or {}).get("FinishedAt"))
    with contextlib.suppress(OSError, ValueError):
        # To the second: Docker writes nine digits, of which not every Python reads more than six.
        finished = datetime.fromisoformat(f"{told[:19]}+00:00").timestamp()
        started = Path(url.removeprefix("unix://")).with_name(PIDFILE).stat().st_mtime
        return 0 <= started - finished <= RESTART
    return False


class AttachedContainer:
    """A created container and the connection to its input and output (see ``corral.attach.Container``)."""

    def __init__(self, api: APIClient, url: str, ident: str, *, stdin: bool) -> None:
        self._api = api
        self._url = url
        self._ident = ident
        self._stdin = stdin
        self._held: Any = None
        self._started: float | None = None
        self._taken_along = False

    @property
    def held(self) -> Any:
        """What ``connect`` got from docker-py, for ``read_ahead``."""
        return self._held

    def connect(self) -> socket.socket:
        """Return the stream of the container's input and output. Call it before ``start``: nothing is missed.

        Raises:
            EngineError: Docker refuses.
        """
        return self._attached(replay=False)

    def _attached(self, *, replay: bool, stream: bool = True) -> socket.socket:
        import socket

        params = {
            "stdin": int(self._stdin and stream),
            "stdout": 1,
            "stderr": 1,
            "stream": int(stream),
            "logs": int(replay),
            "detachKeys": NO_DETACH,
        }
        with errors("attaching to the container"):
            # What docker-py returns is a reader on the socket of a response that must stay alive.
            self._held = self._api.attach_socket(self._ident, params=params)
        return socket.socket(fileno=os.dup(self._held.fileno()))

    def rejoin(self, *, replay: bool) -> Rejoined:
        """See corral.attach.Container."""
        from corral.attach import Rejoined

        until = time.monotonic() + COME_BACK
        while True:
            try:
                with errors("looking for the session"):
                    running = bool(self._api.inspect_container(self._ident)["State"]["Running"])
                self.close()
                stream = self._attached(replay=replay, stream=running)
                return Rejoined(stream, running, read_ahead(self._held))
            except EngineGoneError:
                if time.monotonic() > until:
                    raise
                time.sleep(COME_BACK_PAUSE)

    def start(self) -> None:
        """See corral.attach.Container."""
        with errors("starting the container"):
            self._api.start(self._ident)
        self._started = time.monotonic()

    def wait(self) -> int:
        """See corral.attach.Container.

        Raises:
            EngineGoneError: Docker went away; also when it answered first, and took the container along. That
                is said once, when it is back already: asked again, it has the exit code.
        """
        code = self._code()
        briefly = self._started is not None and time.monotonic() - self._started < SHORT
        if self._taken_along or (code == 0 and briefly):
            return code
        try:
            # A Docker that is ending takes no new question; the one after it answers this.
            self._taken_along = ended_with_engine(self._api, self._url, self._ident)
        except EngineGoneError:
            self._taken_along = True
            raise
        except EngineError:
            # It was removed.
            return code
        if self._taken_along:
            raise EngineGoneError("Docker was restarted, and ended the session")
        return code

    def _code(self) -> int:
        with errors("waiting for the container"):
            if isinstance(self._api, LocalEngine):
                return int(self._api.wait(self._ident)["StatusCode"])
            import docker

            # A client of its own: this one blocks in a thread for as long as the session lasts.
            client = docker.APIClient(base_url=self._url, version=self._api.api_version)
            with contextlib.closing(client):
                return int(client.wait(self._ident, timeout=None)["StatusCode"])

    def kill(self, name: str) -> None:
        """See corral.attach.Container."""
        with errors(f"sending {name} to the container"):
            self._api.kill(self._ident, name)

    def resize(self, columns: int, rows: int) -> bool:
        """See corral.attach.Container."""
        with errors("setting the size of the container's terminal"):
            try:
                self._api.resize(self._ident, rows, columns)
            except Exception as error:
                from docker.errors import APIError

                if isinstance(error, APIError):
                    return False
                raise
        return True

    def close(self) -> None:
        """Let go of the connection."""
        if self._held is not None:
            # docker-py hangs the response it belongs to on the reader; that one closes both.
            with contextlib.suppress(OSError, ValueError):
                getattr(self._held, "_response", self._held).close()
