"""Asking the enforcer: HTTP and JSON over its unix socket. What the command line may use of this package."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from policy import versions
from policy.errors import EnforcerError, NotReadyError

if TYPE_CHECKING:
    from enforcer.config import Config
    from enforcer.netfilter.namespace import Daemon

__all__ = [
    "Client",
    "Config",
    "Daemon",
    "create_hosts_file",
    "enter",
    "guarded_daemon",
    "load_config",
    "render_hosts_file",
    "running_daemon",
    "socket_path",
]

START = "systemctl --user start corral-enforcer"
VERSION = "/v1/version"
CHANGING = 45.0  # seconds; the service gives up earlier
# In every answer: the enforcer may have been replaced since its version was asked for.
API_HEADER = "Corral-Api"


def runtime_directory(environ: Mapping[str, str]) -> Path:
    """Return corral's runtime directory of this user: $XDG_RUNTIME_DIR/corral."""
    base = environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    return Path(base) / "corral"


def socket_path(environ: Mapping[str, str]) -> Path:
    """Return where the enforcer of this user listens."""
    return runtime_directory(environ) / "enforcer.sock"


def load_config(home: Path, environ: Mapping[str, str]) -> Config:
    """Read the service configuration of a user.

    Raises:
        PolicyError: it is not valid.
    """
    # Imported here: most commands ask the service and do not wait for a schema library.
    from enforcer import config

    return config.load(config.path(home, environ))


def config_directory(home: Path, environ: Mapping[str, str]) -> Path:
    """Return where the service configuration of a user lies."""
    from enforcer import config

    return config.path(home, environ).parent


def running_daemon(runtime: Path) -> Daemon | None:
    """Return the user's own engine as it runs now; see netfilter.namespace.running."""
    from enforcer.netfilter import namespace

    return namespace.running(runtime)


def guarded_daemon(environ: Mapping[str, str]) -> Daemon:
    """Return the user's own engine, in whose namespace the rules came first; see rootless.daemon."""
    from enforcer import rootless

    return rootless.daemon(environ)


def enter(daemon: Daemon) -> tuple[str, ...]:
    """Return the beginning of a command that runs in an engine's namespaces."""
    from enforcer.netfilter import namespace

    return namespace.enter(daemon)


def create_hosts_file(path: Path, content: bytes) -> None:
    """Create the hosts file of a container that does not exist yet; see hostsfile.create."""
    from enforcer import hostsfile

    hostsfile.create(path, content)


def render_hosts_file(
    hostname: str, address: str, gateway: str, names: Iterable[str], *, proxied: bool = False
) -> bytes:
    """Return a hosts file without any pin, as long as it will ever be; see hostsfile.render."""
    from enforcer import hostsfile

    return hostsfile.render(hostname, address, gateway, names, proxied=proxied)


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("corral", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Client:
    """One request, one connection. ``timeout`` in seconds."""

    def __init__(self, path: Path, timeout: float = 30.0) -> None:
        self._path = path
        self._timeout = timeout

    def _ask(
        self, method: str, target: str, body: Any = None, timeout: float | None = None
    ) -> dict[str, Any]:
        answer: dict[str, Any] = self._request(method, target, body, timeout)
        return answer

    def _request(
        self, method: str, target: str, body: Any = None, timeout: float | None = None, *, text: bool = False
    ) -> Any:
        connection = _Connection(self._path, timeout or self._timeout)
        try:
            connection.request(method, target, json.dumps(body) if body is not None else None)
            response = connection.getresponse()
            data = response.read()
            answer: Any = data.decode() if text and response.status == 200 else json.loads(data)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise EnforcerError(
                "the enforcer is not running: what runs keeps its fence, nothing new starts", START
            ) from error
        except TimeoutError as error:
            raise EnforcerError(
                f"the enforcer did not answer {target} in time", f"restart it: {START}"
            ) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise EnforcerError(f"asking the enforcer at {self._path} failed: {error}", START) from error
        finally:
            connection.close()
        told = response.headers.get(API_HEADER)
        if target != VERSION and told != str(versions.SCHEMAS[versions.API]):
            raise EnforcerError(
                f"corral speaks API schema {versions.SCHEMAS[versions.API]}, but the enforcer "
                f"{told or 'an unknown one'}: they are of different versions",
                versions.FIX,
            )
        if response.status == 200:
            return answer
        kind = NotReadyError if response.status == 409 else EnforcerError
        raise kind(str(answer.get("error", response.reason)), answer.get("hint"))

    def version(self) -> dict[str, Any]:
        """Return the versions of the enforcer, its API and the writer."""
        return self._ask("GET", VERSION)

    def await_ready(self, container: str, timeout: float = 15.0) -> dict[str, Any]:
        """Wait until the network policy of a created container is true in the kernel.

        Raises:
            NotReadyError: it was refused, or not true in time; the container must not start.
        """
        body = {"container": container, "timeout": timeout}
        return self._ask("POST", "/v1/await-ready", body, timeout + 10)

    def withdraw(self, container: str) -> None:
        """Take away what a container may reach, now."""
        self._ask("POST", "/v1/withdraw", {"container": container})

    def status(self) -> dict[str, Any]:
        """Return sandboxes, sessions, names and what is wrong."""
        return self._ask("GET", "/v1/status")

    def live(self, sandbox: str) -> dict[str, Any]:
        """Return what the kernel holds for a sandbox now, and whether the constant rules stand."""
        return self._ask("GET", f"/v1/live?sandbox={sandbox}")

    def denied(self, after: int = 0, project: str | None = None) -> dict[str, Any]:
        """Return what was refused: rows that changed after a number, of one project directory or of all.

        Numbers mean nothing to another life of the service; ``epoch`` in the answer tells them apart.
        """
        only = {} if project is None else {"project": project}
        return self._ask("GET", f"/v1/denied?{urlencode({'after': after, **only})}")

    def allow(
        self, sandbox: str, host: str, ports: Iterable[int], seconds: float | None, *, force: bool = False
    ) -> dict[str, Any]:
        """Let the running sessions of a sandbox reach a name, for ``seconds`` or until they end.

        Raises:
            NotReadyError: it has no usable address; nothing was changed.
        """
        body = {"sandbox": sandbox, "host": host, "ports": list(ports), "seconds": seconds, "force": force}
        return self._ask("POST", "/v1/allow", body, CHANGING)

    def deny(self, sandbox: str, host: str) -> dict[str, Any]:
        """Take a name from the running sessions of a sandbox until they end."""
        return self._ask("POST", "/v1/deny", {"sandbox": sandbox, "host": host}, CHANGING)

    def refresh(self, sandbox: str | None, names: Iterable[str] = ()) -> dict[str, Any]:
        """Resolve names again now, of one sandbox or of all; none named: every name."""
        return self._ask("POST", "/v1/refresh", {"sandbox": sandbox, "names": list(names)}, CHANGING)

    def check(self, sandbox: str, host: str, port: int, *, resolve: bool = False) -> dict[str, Any]:
        """Return what would happen to a connection from each running session of a sandbox."""
        body = {"sandbox": sandbox, "host": host, "port": port, "resolve": resolve}
        return self._ask("POST", "/v1/check", body, CHANGING)

    def metrics(self) -> str:
        """Return the service's counters and states as text for Prometheus."""
        return str(self._request("GET", "/metrics", text=True))
