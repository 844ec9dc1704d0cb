"""Host services: what stays on the host's 127.0.0.1 and is reachable from one sandbox, and nowhere else.

One relay per service: systemd-socket-proxyd, in a transient unit of the user's systemd, on the gateway
address of the sandbox's bridge. Its socket is bound to the bridge as a device too, because an address alone
is no boundary: without that, a container on another bridge or a neighbour on the uplink can connect to it.

Where the engine is the user's own, the bridge is in the engine's network namespace: the socket is opened in
there and passed out to the relay, which runs on the host like any other.

A relay to the sandbox's proxy leads back to an address of the same bridge instead. Ports of one bridge never
see each other, and the host's end sees all of them; with an engine of the user's own that end is in the
engine's namespace, so this relay runs there.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from ipaddress import IPv4Address
from typing import TYPE_CHECKING

from corral import process, relaylaunch
from policy import proxying
from policy.errors import CorralError
from policy.identity import Sandbox
from policy.records import dataclass

if TYPE_CHECKING:
    from enforcer.client import Daemon
    from policy.declaration import HostService

PROXY_PATHS = ("/usr/lib/systemd/systemd-socket-proxyd", "/lib/systemd/systemd-socket-proxyd")
NO_MANAGER = 'the user manager of systemd has to run; without a login: loginctl enable-linger "$USER"'
_UNIT = re.compile(r"^corral-relay-[0-9a-f]{8}-[0-9]{1,5}\.service", re.MULTILINE)


@dataclass(frozen=True)
class Relay:
    """One relay. ``ifindex`` is the bridge's: a bridge that was made anew needs a new socket.

    ``engine`` is the life of the user's own engine that the bridge belongs to, None on the system's.
    ``target``: address and port on the bridge that it leads to; empty: the same port of the host's 127.0.0.1.
    """

    sandbox: Sandbox
    port: int
    gateway: IPv4Address
    ifindex: int
    engine: Daemon | None = None
    target: str = ""

    @property
    def unit(self) -> str:
        """Name of the unit."""
        return unit_of(self.sandbox, self.port)

    @property
    def leads_to(self) -> str:
        """Address and port at its other end."""
        return self.target or f"{relaylaunch.LOOPBACK}:{self.port}"

    @property
    def what(self) -> str:
        """What it is for, in messages."""
        return "the sandbox's proxy" if self.target else f"host service {self.port}"

    @property
    def description(self) -> str:
        """Everything the relay depends on, kept in the unit itself so that it can be compared."""
        return (
            f"corral relay {self.gateway}:{self.port} on {self.sandbox.bridge} (interface {self.ifindex}) "
            f"to {self.leads_to}{self._where}"
        )

    @property
    def _where(self) -> str:
        if self.engine is None:
            return ""
        return f" for engine {self.engine.pid} of {self.engine.start} in {self.engine.netns}"

    def _inside(self) -> tuple[str, ...]:
        from enforcer.client import enter

        return enter(self.engine) if self.engine is not None else ()

    def argv(self, proxy: str) -> tuple[str, ...]:
        """Return the command that starts the relay and returns when it listens."""
        return (
            "systemd-run",
            "--user",
            "--quiet",
            "--collect",
            f"--unit={self.unit}",
            f"--description={self.description}",
            "--service-type=notify",
            "--property=Restart=on-failure",
            "--property=RestartSec=1",
            "--property=NoNewPrivileges=yes",
            # A socket would keep the namespace of an engine that has ended.
            *(("--property=PartOf=docker.service",) if self.engine is not None else ()),
            sys.executable,
            "-I",
            relaylaunch.__file__,
            str(self.gateway),
            str(self.port),
            self.sandbox.bridge,
            proxy,
            self.leads_to,
            *self._inside(),
        )


def unit_of(sandbox: Sandbox, port: int) -> str:
    """Return the name of the unit of a sandbox's relay."""
    return f"corral-relay-{sandbox.token}-{port}.service"


def relays(
    sandbox: Sandbox,
    services: Sequence[HostService],
    gateway: IPv4Address,
    ifindex: int,
    engine: Daemon | None = None,
) -> list[Relay]:
    """Return the relays a sandbox needs, one per port."""
    ports = sorted({service.port for service in services})
    return [Relay(sandbox, port, gateway, ifindex, engine) for port in ports]


def to_proxy(
    sandbox: Sandbox, gateway: IPv4Address, ifindex: int, address: str, engine: Daemon | None = None
) -> Relay:
    """Return the relay through which sessions reach the proxy of their sandbox, at ``address``."""
    return Relay(sandbox, proxying.PORT, gateway, ifindex, engine, f"{address}:{proxying.PORT}")


def environment(environ: Mapping[str, str], uid: int) -> dict[str, str]:
    """Return an environment in which ``systemctl --user`` finds the user's manager.

    Without a login (cron, sudo) the variable is missing; after su it may be another user's.
    """
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if not runtime or _belongs_to_another(runtime, uid):
        runtime = f"/run/user/{uid}"
    return {**environ, "XDG_RUNTIME_DIR": runtime}


def _belongs_to_another(directory: str, uid: int) -> bool:
    try:
        return os.stat(directory).st_uid != uid  # noqa: PTH116 - the text may be no path at all
    except (OSError, ValueError):
        return False


def units_of(listing: str, sandbox: Sandbox) -> set[str]:
    """Return the names of a sandbox's relay units in the output of ``list-units``."""
    found = {match.group() for match in _UNIT.finditer(listing)}
    return {unit for unit in found if unit.startswith(f"corral-relay-{sandbox.token}-")}


def properties(text: str) -> dict[str, str]:
    """Return what ``systemctl show`` printed."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {name: value for name, _, value in pairs}


def bridge_ifindex(sandbox: Sandbox, lookup: Callable[[str], int] = socket.if_nametoindex) -> int:
    """Return the interface index of the sandbox's bridge.

    Raises:
        CorralError: there is no such interface in this network namespace.
    """
    try:
        return lookup(sandbox.bridge)
    except OSError as error:
        raise CorralError(
            f"the bridge {sandbox.bridge} that Docker made is not on this machine",
            "corral needs the Docker Engine of this machine itself, not one in a virtual machine",
        ) from error


def find_proxy(paths: Sequence[str] = PROXY_PATHS) -> str:
    """Return the path of systemd-socket-proxyd.

    Raises:
        CorralError: systemd came without it.
    """
    for path in paths:
        if os.access(path, os.X_OK):
            return path
    raise CorralError(
        "systemd-socket-proxyd is missing, which host services need",
        "sudo apt install systemd (or its extra package)",
    )


class Manager:
    """The relays of one user, as transient units of the user's systemd.

    Args:
        environ: the user's environment, see ``environment``.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def ensure(self, wanted: Sequence[Relay]) -> None:
        """Make these relays run: start what is missing, replace what is stale.

        Others are left alone: a session that started under an earlier policy may use them.

        Raises:
            CorralError: a relay cannot be started; the message names its port.
        """
        for relay in wanted:
            if not self._is_current(relay):
                self._stop([relay.unit])
                self._start(relay)

    def stop(self, sandbox: Sandbox, port: int) -> None:
        """Stop one relay of a sandbox, if there is one."""
        self._stop([unit_of(sandbox, port)])

    def stop_all(self, sandbox: Sandbox) -> int:
        """Stop the relays of a sandbox; return how many there were."""
        units = sorted(self._listed(sandbox))
        self._stop(units)
        return len(units)

    def _listed(self, sandbox: Sandbox) -> set[str]:
        pattern = f"corral-relay-{sandbox.token}-*"
        argv = ("systemctl", "--user", "list-units", "--all", "--plain", "--no-legend", "--no-pager", pattern)
        return units_of(process.run(argv, environ=self._environ, hint=NO_MANAGER).stdout, sandbox)

    def _is_current(self, relay: Relay) -> bool:
        argv = ("systemctl", "--user", "show", "-p", "ActiveState,Description", relay.unit)
        shown = properties(process.run(argv, environ=self._environ, hint=NO_MANAGER).stdout)
        return shown.get("ActiveState") == "active" and shown.get("Description") == relay.description

    def _start(self, relay: Relay) -> None:
        try:
            process.run(relay.argv(find_proxy()), environ=self._environ)
        except process.ProgramError as error:
            raise CorralError(
                f"{relay.what}: its relay on {relay.gateway} cannot be started\n{error.message}",
                "ports below 1024 need net.ipv4.ip_unprivileged_port_start"
                if relay.port < 1024
                else f"see: journalctl --user -u {relay.unit}",
            ) from error

    def _stop(self, units: Sequence[str]) -> None:
        if units:
            # Stopped means gone: the unit is transient and collected even when it failed.
            process.run(("systemctl", "--user", "stop", *units), environ=self._environ, check=False)
