"""Finding out about the engine: files of the docker command, the engine's answers, the host's interfaces."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pwd
import secrets
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from ipaddress import IPv4Network
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral import hostcheck, process, rootless
from corral.hostcheck import DEFAULT_CONTEXT, DEFAULT_SOCKET, OWN_ENGINE, Choice, Facts
from policy.errors import EnforcerError, EngineError

if TYPE_CHECKING:
    from docker.api.client import APIClient

SNAP_ENGINE = Path("/snap/bin/docker")
DAEMON_CONFIG = Path("/etc/docker/daemon.json")
PROC = Path("/proc")
BRIDGE_NAME = "com.docker.network.bridge.name"
# Fields of the engine's info and the cgroup controllers they tell of.
CONTROLLERS = {"PidsLimit": "pids", "MemoryLimit": "memory", "CpuCfsQuota": "cpu"}
PROBE_LABEL = "io.corral.probe"
# Beside a name that no sandbox has: 15 characters are an interface name's most.
PROBE_PREFIX = "corral-try-"


def docker_contexts(environ: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return the current context of config.json and the addresses of all contexts that exist.

    What cannot be read is not there, as for the docker command.
    """
    base = _configured(environ)
    endpoints = {}
    for file in sorted(Path(base, "contexts", "meta").glob("*/meta.json")):
        body = _json(file)
        endpoint = (body.get("Endpoints") or {}).get("docker") or {}
        endpoints[str(body.get("Name"))] = str(endpoint.get("Host") or DEFAULT_SOCKET)
    return str(_json(Path(base, "config.json")).get("currentContext") or ""), endpoints


def extra_headers(environ: Mapping[str, str]) -> bool:
    """Say whether config.json has headers that go with each request to the engine."""
    return bool(_json(Path(_configured(environ), "config.json")).get("HttpHeaders"))


def _configured(environ: Mapping[str, str]) -> str:
    return environ.get("DOCKER_CONFIG") or f"{home(environ)}/.docker"


def home(environ: Mapping[str, str]) -> str:
    """Return the user's home directory, the account's when HOME is unset."""
    if environ.get("HOME"):
        return environ["HOME"]
    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return "/"


def _json(file: Path) -> dict[str, Any]:
    try:
        body = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}


def choice(environ: Mapping[str, str]) -> Choice:
    """Return which engine the docker command would use, and corral's own socket. Reads a few small files.

    A user who may not open the system's socket and runs an engine means that one.
    """
    by, context, address = hostcheck.choose(environ, *docker_contexts(environ))
    system = DEFAULT_SOCKET.removeprefix("unix://")
    mine = os.path.realpath(rootless.socket_path(environ))
    if by == DEFAULT_CONTEXT and not os.access(system, os.W_OK) and os.path.exists(mine):  # noqa: PTH110
        by, address = OWN_ENGINE, f"unix://{mine}"
    path = os.path.realpath(address.removeprefix("unix://")) if address.startswith("unix:///") else ""
    own = path if by == "DOCKER_HOST" or path == mine else os.path.realpath(system)
    return Choice(address or None, by, context, path, own, rootless=bool(path) and path == mine)


def base_url(environ: Mapping[str, str]) -> str:
    """Return the address of the engine: DOCKER_HOST's, the user's own one, or the system's.

    Raises:
        EngineError: DOCKER_HOST names an engine that is not on this machine.
    """
    host = environ.get("DOCKER_HOST", "").strip()
    if not host:
        found = choice(environ)
        return f"unix://{found.path}" if found.rootless else DEFAULT_SOCKET
    if not host.startswith("unix:///"):
        hostcheck.require(hostcheck.judge_choice(Choice(host, "DOCKER_HOST")))
    return host


def refuse_elsewhere(environ: Mapping[str, str]) -> None:
    """Refuse an engine whose name says already that it is not this machine's.

    Raises:
        EngineError: DOCKER_HOST or the docker context names one.
    """
    hostcheck.require(hostcheck.judge_choice(choice(environ)))


def collect(environ: Mapping[str, str], timeout: int = 10) -> Facts:
    """Find out about the engine; nothing is changed and nothing is raised."""
    chosen = choice(environ)
    facts = Facts(
        chosen,
        docker=_docker_installed(environ),
        podman=_installed("podman", environ),
    )
    if hostcheck.judge_choice(chosen):
        return facts
    try:
        with contextlib.closing(_connect(environ, timeout)) as api:
            return _asked(api, facts, environ)
    except EngineError as error:
        return replace(facts, trouble=error)


def _connect(environ: Mapping[str, str], timeout: int) -> APIClient:
    from corral.engine import connect

    return connect(environ, timeout)


def _asked(api: APIClient, facts: Facts, environ: Mapping[str, str]) -> Facts:
    from corral.engine import errors

    with errors("asking Docker what it is"):
        info: dict[str, Any] = api.info()
        answer: dict[str, Any] = api.version(api_version=False)
        networks: list[dict[str, Any]] = api.networks()
    bridges = bridges_of(networks)
    own = rootless.pid(environ) if facts.choice.rootless else None
    here = interfaces(pid=own or 1)
    pid, uid = listener(facts.choice.own) or (None, None)
    if facts.choice.rootless and uid == os.geteuid():
        # The right one: whose it is tells nothing about where its bridges are.
        uid = 0
    return replace(
        facts,
        version=str(info.get("ServerVersion") or ""),
        system=str(info.get("OperatingSystem") or ""),
        root=str(info.get("DockerRootDir") or ""),
        security=security_names(info.get("SecurityOptions") or ()),
        firewall=str((info.get("FirewallBackend") or {}).get("Driver") or ""),
        components=tuple(str(part.get("Name")) for part in answer.get("Components") or ()),
        owner=uid,
        bridges=bridges,
        missing=tuple(name for name in bridges if name not in here),
        proven=any(name in here for name in bridges if name != "docker0"),
        listening=listening(facts.choice.own, pid=own or 1),
        no_iptables=iptables_off(own or _daemon(pid, environ), config=_daemon_config(environ, own)),
        unguarded=_unguarded(environ) if facts.choice.rootless else "",
        controllers_missing=tuple(name for field, name in CONTROLLERS.items() if info.get(field) is False),
    )


def bridges_of(networks: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the interfaces of the engine's bridge networks (their inspects)."""
    found = []
    for network in networks:
        if network.get("Driver") == "bridge" and network.get("Scope", "local") == "local":
            named = (network.get("Options") or {}).get(BRIDGE_NAME)
            found.append(str(named or f"br-{str(network.get('Id'))[:12]}"))
    return tuple(sorted(found))


def security_names(options: Sequence[object]) -> tuple[str, ...]:
    """Return the names of ``name=seccomp,profile=builtin`` and its like."""
    return tuple(str(text).partition(",")[0].removeprefix("name=") for text in options)


def _unguarded(environ: Mapping[str, str]) -> str:
    try:
        rootless.daemon(environ)
    except EnforcerError as error:
        return error.message
    return ""


def _daemon_config(environ: Mapping[str, str], own: int | None) -> Path:
    if own is None:
        return DAEMON_CONFIG
    base = environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base.startswith("/") else Path(home(environ), ".config")) / "docker" / "daemon.json"


def interfaces(proc: Path = PROC, pid: int = 1) -> frozenset[str]:
    """Return the interfaces of the namespace where the writer works: system services' or ``pid``'s."""
    try:
        lines = (
            (proc / str(pid) / "net" / "dev").read_text(encoding="utf-8", errors="replace").splitlines()[2:]
        )
    except OSError:
        # Hidden processes: this process's own namespace is the next best.
        return frozenset(name for _, name in socket.if_nameindex())
    return frozenset(line.partition(":")[0].strip() for line in lines)


def listening(path: str, proc: Path = PROC, pid: int = 1) -> bool | None:
    """Tell whether somebody listens on a unix socket in that namespace; None when it cannot be told."""
    try:
        lines = (
            (proc / str(pid) / "net" / "unix").read_text(encoding="utf-8", errors="replace").splitlines()[1:]
        )
    except OSError:
        return None
    names = (line.split(None, 7)[7:] for line in lines)
    return any(name and name[0].startswith("/") and os.path.realpath(name[0]) == path for name in names)


def listener(path: str) -> tuple[int, int] | None:
    """Return pid and uid of the process that listens on a unix socket."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(5)
            sock.connect(path)
            raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError:
        return None
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def _daemon(listening: int | None, environ: Mapping[str, str]) -> int | None:
    """Return the pid of dockerd: systemd holds the socket for it where it is started on demand."""
    if listening != 1:
        return listening
    try:
        argv = ("systemctl", "show", "-P", "MainPID", "docker.service")
        return int(process.run(argv, environ=environ, timeout=5).stdout)
    except (process.ProgramError, ValueError):
        return None


def iptables_off(daemon: int | None, proc: Path = PROC, config: Path = DAEMON_CONFIG) -> str:
    """Return where Docker's rules are switched off: a file, dockerd's command line, or empty for nowhere."""
    try:
        words = (proc / str(daemon) / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        words = []
    if "--iptables=false" in words:
        return "the command line of dockerd"
    for word, following in itertools.pairwise(words):
        option, _, value = word.partition("=")
        if option == "--config-file":
            config = Path(value or following)
    return str(config) if _json(config).get("iptables") is False else ""


def _installed(program: str, environ: Mapping[str, str]) -> bool:
    try:
        process.find(program, environ)
    except process.ProgramError:
        return False
    return True


def podman_alone(environ: Mapping[str, str]) -> bool:
    """Tell whether podman is installed and Docker is not."""
    return _installed("podman", environ) and not _docker_installed(environ)


def _docker_installed(environ: Mapping[str, str]) -> bool:
    """The engine, that is; the docker command alone (or podman under its name) is none."""
    return _installed("dockerd", environ) or SNAP_ENGINE.exists()


def try_bridge(api: APIClient, subnet: IPv4Network, here: frozenset[str] | None = None, pid: int = 1) -> str:
    """Let Docker make a bridge, look for it where the writer works, and have it removed again.

    Args:
        api: the engine.
        subnet: for the bridge.
        here: interfaces to look at instead.
        pid: of a process that is where the writer works.

    Returns:
        the bridge's name when it is not there, empty when it is.

    Raises:
        EngineError: Docker cannot make a network.
    """
    from docker.types import IPAMConfig, IPAMPool

    from corral.engine import errors

    _forget_probes(api)
    token = secrets.token_hex(2)
    bridge = f"{PROBE_PREFIX}{token}"
    with errors("creating a network to try"):
        made = api.create_network(
            bridge,
            driver="bridge",
            options={BRIDGE_NAME: bridge, "com.docker.network.bridge.enable_ip_masquerade": "false"},
            ipam=IPAMConfig(pool_configs=[IPAMPool(subnet=str(subnet))]),
            internal=True,
            labels={PROBE_LABEL: str(os.geteuid())},
        )
    try:
        return "" if bridge in (interfaces(pid=pid) if here is None else here) else bridge
    finally:
        with errors("removing the network that was tried"):
            api.remove_network(made["Id"])


def _forget_probes(api: APIClient) -> None:
    """What an interrupted installation left."""
    from docker.errors import APIError

    from corral.engine import errors

    with errors("listing networks"):
        for row in api.networks(filters={"label": f"{PROBE_LABEL}={os.geteuid()}"}):
            with contextlib.suppress(APIError):
                api.remove_network(row["Id"])


def require_local_engine(environ: Mapping[str, str]) -> None:
    """Refuse an engine that corral cannot fence; a bridge that Docker makes now is what decides.

    Raises:
        EngineError: every reason, and the fix.
    """
    facts = collect(environ)
    hostcheck.require(hostcheck.judge(facts))
    with contextlib.closing(_connect(environ, 60)) as api:
        own = rootless.pid(environ) if facts.choice.rootless else None
        bridge = try_bridge(api, _free_subnet(api, environ), pid=own or 1)
    if bridge:
        hostcheck.require(hostcheck.judge(replace(facts, missing=(bridge,))))


def _free_subnet(api: APIClient, environ: Mapping[str, str]) -> IPv4Network:
    from corral import network, subnets
    from corral.engine import errors
    from corral.lifecycle import subnet_ranges
    from enforcer.client import load_config

    with errors("listing networks"):
        taken = subnets.taken_by_networks(api.networks())
    ranges = subnet_ranges(load_config(Path(home(environ)), environ).subnet_range)
    return subnets.choose(ranges, [*taken, *network.host_ranges(environ)]).subnet
