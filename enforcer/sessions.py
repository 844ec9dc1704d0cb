"""From what Docker reports to what corral may do for it. Pure.

A container gets entries only if its inspect equals, field by field, what corral itself would have created: an
allow-list, because a deny-list misses the next option that opens something.
"""

from __future__ import annotations

import contextlib
import json
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path, PurePosixPath
from typing import Any

from enforcer.overrides import Overrides
from policy import proxying
from policy.container import (
    ENTRYPOINT,
    HOSTS_TARGET,
    RUNTIMES,
    Mount,
    SessionSpec,
    host_config,
    network_body,
    network_differences,
    user,
)
from policy.declaration import (
    ALLOWLIST,
    ANSWER,
    LABEL_EGRESS,
    LABEL_PROJECT,
    LABEL_PURPOSE,
    LABEL_SANDBOX,
    LABEL_SCHEMA,
    LABEL_SERVICE,
    LABEL_SESSION,
    LABEL_UID,
    OPEN,
    SCHEMA,
    Declaration,
    Name,
)
from policy.errors import PolicyError
from policy.identity import BRIDGE, SANDBOX_ID, SESSION_ID, Sandbox, StatePaths

# What Docker fills in by itself. Everything else that corral did not ask for must be empty. A runtime with a
# kernel of its own is its user's wish: the rules are at the host's end of the link.
DOCKER_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "Runtime": ("runc", "io.containerd.runc.v2", *RUNTIMES),
    "MemorySwappiness": (-1,),
}
# Values that say nothing about isolation.
IGNORED = frozenset({"ConsoleSize", "ContainerIDFile", "Ulimits"})
# How much of this host a container may use is its user's wish, no way out of the sandbox; Docker leaves out
# what it has no cgroup controller for.
LIMITS = frozenset({"PidsLimit", "Memory", "MemorySwap", "NanoCpus"})
# The score of what the kernel ends first.
OOM_FIRST = 1000
# Where output stays on this host. A driver that ships it elsewhere is a way out that no packet rule sees.
LOCAL_LOGS = frozenset({"json-file", "local", "journald", "none"})
MASKED = frozenset(
    {
        "/proc/asound",
        "/proc/acpi",
        "/proc/kcore",
        "/proc/keys",
        "/proc/latency_stats",
        "/proc/timer_list",
        "/proc/timer_stats",
        "/proc/sched_debug",
        "/proc/scsi",
        "/sys/firmware",
    }
)
# What the gate of a session tries; see agent_image/files/entrypoint/gate.py.
GATE = "CORRAL_GATE="
NOT_ROOTLESS = (
    "names are answered at its gateway, which needs an engine of the system: a user's own has none to ask"
)
SERVICE = re.compile(r"[a-z][a-z0-9-]{0,31}")
# Nothing may be mounted over the programs that guard the start, nor over what they read.
GUARDED = tuple(
    PurePosixPath(text)
    for text in (
        "/bin", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr/bin", "/usr/lib",
        "/usr/local/bin", "/usr/local/lib", "/usr/local/sbin", "/usr/sbin", "/var/run",
    )
)  # fmt: skip
# A directory with the sockets of an engine in it is as good as them, and so is one with its files.
ENGINES_OWN = ("/run/user", "/run/docker", "/run/containerd", "/var/lib/docker", "/var/lib/containerd")
READ_ONLY = frozenset({"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"})


@dataclass(frozen=True)
class Network:
    """A sandbox's Docker network as it really is; ``problems`` say where it differs from corral's own."""

    name: str
    bridge: str
    subnet: IPv4Network
    gateway: IPv4Address
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Life:
    """When a container was created and started (seconds of wall time, 0: unknown or not yet), and as what.

    ``pid``: its first process, 0 while it does not run. ``tried``: addresses that its gate finds closed.
    """

    created: float = 0.0
    started: float = 0.0
    pid: int = 0
    tried: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Session:
    """One container that declares itself corral's. With ``problems`` it gets nothing.

    ``declaration`` is what its labels say, ``overrides`` what its user said since.
    """

    container: str
    name: str
    sandbox: Sandbox
    service: str
    session: str
    address: str
    hostname: str
    hosts_file: Path
    declaration: Declaration
    network: Network | None
    running: bool
    problems: tuple[str, ...] = ()
    purpose: str = ""
    project: str = ""
    life: Life = Life()
    overrides: Overrides = field(default_factory=Overrides)

    @property
    def open(self) -> bool:
        """Whether it may reach all public addresses."""
        return self.declaration.mode == OPEN and not self.problems and self.network is not None

    @property
    def asks(self) -> bool:
        """Whether its questions for names are answered at its gateway: any, or those of its policy."""
        return self.declaration.answered and not self.problems and self.network is not None

    @property
    def proxy(self) -> bool:
        """Whether it is a sandbox's proxy."""
        return self.service == proxying.SERVICE and not self.problems and self.network is not None

    @property
    def proxied(self) -> bool:
        """Whether it may ask its sandbox's proxy for names."""
        asks = self.declaration.proxied and self.service != proxying.SERVICE
        return asks and not self.problems and self.network is not None

    @property
    def answered(self) -> bool:
        """Whether names that its policy means are answered at its gateway."""
        asks = self.declaration.dns == ANSWER and self.declaration.mode == ALLOWLIST
        return asks and not self.problems and self.network is not None

    @property
    def names(self) -> tuple[Name, ...]:
        """The names it may reach."""
        return self.overrides.names(self.declaration)


@dataclass(frozen=True)
class Stranger:
    """A container on a corral network that does not declare itself, with the reasons it gets nothing."""

    container: str
    name: str
    network: str
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Owner:
    """Whose service this is: only containers of this uid, with hosts files below ``data_home``.

    ``rootless``: of an engine that maps this user to 0. ``engine``: where it keeps its files, if not where
    engines do.
    """

    uid: int
    gid: int
    data_home: Path
    ipv6: bool
    sockets: frozenset[str] = field(default_factory=frozenset)
    rootless: bool = False
    engine: tuple[str, ...] = ()


def parse_network(inspect: Mapping[str, Any], uid: int) -> Network | None:
    """Read ``GET /networks/<id>``; None when the network is no sandbox's of this user."""
    found = inspect.get("Labels") or {}
    bridge = (inspect.get("Options") or {}).get("com.docker.network.bridge.name", "")
    sandbox_id = found.get(LABEL_SANDBOX, "")
    if (
        found.get(LABEL_UID) != str(uid)
        or not SANDBOX_ID.fullmatch(sandbox_id)
        or not BRIDGE.fullmatch(bridge)
    ):
        return None
    sandbox = Sandbox(sandbox_id)
    problems = []
    try:
        config = (inspect.get("IPAM") or {}).get("Config") or []
        subnet = IPv4Network(config[0]["Subnet"])
        gateway = IPv4Address(config[0]["Gateway"])
        strangers = str(config[0].get("IPRange", ""))
    except (IndexError, KeyError, ValueError, TypeError):
        return None
    wanted = network_body(sandbox, uid, str(subnet), str(gateway), strangers)
    problems += [f"network: {text}" for text in network_differences(inspect, wanted)]
    return Network(str(inspect.get("Name")), bridge, subnet, gateway, tuple(problems))


def is_declared(labels: Mapping[str, str], uid: int) -> bool:
    """Tell whether a container says it is a corral session of this user."""
    return LABEL_SANDBOX in labels and labels.get(LABEL_UID) == str(uid)


def parse_session(inspect: Mapping[str, Any], network: Network | None, owner: Owner) -> Session:
    """Read ``GET /containers/<id>/json`` of a declared container.

    Raises:
        PolicyError: its labels do not even name a sandbox and a session.
    """
    config = inspect.get("Config") or {}
    labels = config.get("Labels") or {}
    sandbox_id, session = labels.get(LABEL_SANDBOX, ""), labels.get(LABEL_SESSION, "")
    service = labels.get(LABEL_SERVICE, "")
    if (
        not SANDBOX_ID.fullmatch(sandbox_id)
        or not SESSION_ID.fullmatch(session)
        or not SERVICE.fullmatch(service)
    ):
        raise PolicyError(f"container {inspect.get('Name')}: its labels name no session")
    sandbox = Sandbox(sandbox_id)
    problems: list[str] = []
    declaration = Declaration()
    if labels.get(LABEL_SCHEMA) != str(SCHEMA):
        problems.append(f"label {LABEL_SCHEMA} is not {SCHEMA}; run: corral install")
    else:
        try:
            declaration = Declaration.from_label(labels.get(LABEL_EGRESS, ""))
        except PolicyError as error:
            problems.append(error.message)
    endpoints = (inspect.get("NetworkSettings") or {}).get("Networks") or {}
    endpoint = endpoints.get(sandbox.network) or {}
    address = str((endpoint.get("IPAMConfig") or {}).get("IPv4Address") or "")
    state = inspect.get("State") or {}
    running = bool(state.get("Running"))
    hosts_file = StatePaths(owner.data_home / sandbox.id).hosts(session)
    spec = SessionSpec(
        sandbox=sandbox,
        service=service,
        session=session,
        purpose=labels.get(LABEL_PURPOSE, ""),
        uid=owner.uid,
        gid=owner.gid,
        image="",
        address=address,
        hosts_file=str(hosts_file),
        project=labels.get(LABEL_PROJECT, ""),
        workdir="",
        argv=(),
        declaration=declaration,
        mounts=_mounts(inspect),
        ipv6=owner.ipv6,
        gateway=str(network.gateway) if network is not None else "",
        rootless=owner.rootless,
    )
    if declaration.answered and owner.rootless:
        problems.append(NOT_ROOTLESS)
    problems += _endpoint_problems(endpoints, sandbox, address, running, network)
    problems += _config_problems(config, owner)
    problems += _host_config_problems(inspect.get("HostConfig") or {}, spec)
    data = owner.data_home
    if service == proxying.SERVICE:
        problems += _proxy_problems(spec, data)
    for mount in spec.mounts:
        dial = service != proxying.SERVICE and _holds_dial(mount, data)
        told = f"mount {mount.source} holds the socket of a sandbox's proxy" if dial else None
        problems += filter(None, [_mount_problem(mount, owner) or told])
    return Session(
        container=str(inspect.get("Id")),
        name=str(inspect.get("Name", "")).lstrip("/"),
        sandbox=sandbox,
        service=service,
        session=session,
        address=address,
        hostname=str(config.get("Hostname", "")),
        hosts_file=hosts_file,
        declaration=declaration,
        network=network,
        running=running,
        problems=tuple(problems),
        purpose=spec.purpose,
        project=spec.project,
        life=_life(inspect),
    )


def _life(inspect: Mapping[str, Any]) -> Life:
    state, config = inspect.get("State") or {}, inspect.get("Config") or {}
    pid = state.get("Pid")
    given = [text.removeprefix(GATE) for text in config.get("Env") or () if str(text).startswith(GATE)]
    tried: frozenset[str] = frozenset()
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        gate = json.loads(given[-1] if given else "{}")
        closed = (gate.get("open") or {}).get("closed", ())
        tried = frozenset({str(gate["probe"]["address"]), str(gate["resolver"]), *map(str, closed)})
    return Life(
        _moment(inspect.get("Created")),
        _moment(state.get("StartedAt")),
        pid if isinstance(pid, int) else 0,
        tried,
    )


def _moment(text: Any) -> float:
    try:
        return max(0.0, datetime.fromisoformat(str(text)).timestamp())
    except (ValueError, OverflowError):
        return 0.0


def mount_sources(inspect: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the host paths that a container mounts."""
    return tuple(mount.source for mount in _mounts(inspect))


def _mounts(inspect: Mapping[str, Any]) -> tuple[Mount, ...]:
    rows = (inspect.get("HostConfig") or {}).get("Mounts") or []
    mounts = [Mount(str(r.get("Source")), str(r.get("Target")), bool(r.get("ReadOnly"))) for r in rows]
    return tuple(mount for mount in mounts if mount.target != HOSTS_TARGET)


def _endpoint_problems(
    endpoints: Mapping[str, Any], sandbox: Sandbox, address: str, running: bool, network: Network | None
) -> list[str]:
    problems = []
    if set(endpoints) != {sandbox.network}:
        problems.append(
            f"attached to {', '.join(sorted(endpoints)) or 'no network'}, not to {sandbox.network} alone"
        )
    if network is None:
        return [*problems, f"network {sandbox.network} is not this sandbox's"]
    problems += network.problems
    try:
        usable = IPv4Address(address) in network.subnet and IPv4Address(address) != network.gateway
    except ValueError:
        usable = False
    if not usable:
        problems.append(f"address {address or '(none)'} is not a fixed one in {network.subnet}")
    endpoint = endpoints.get(sandbox.network) or {}
    for key in ("DriverOpts", "Links"):
        if endpoint.get(key):
            problems.append(f"its endpoint has {key}")
    if set(filter(None, (endpoint.get("IPAMConfig") or {}).values())) - {address}:
        problems.append("its endpoint has more addresses")
    actual = endpoint.get("IPAddress")
    if running and actual != address:
        problems.append(f"Docker gave it {actual or 'no address'} instead of {address}")
    return problems


def _mount_problem(mount: Mount, owner: Owner) -> str | None:
    if mount.source in owner.sockets:
        return f"mount {mount.source} is a socket, or cannot be looked at"
    source = _place(mount.source)
    for path in map(_place, (*ENGINES_OWN, *owner.engine)):
        if source.is_relative_to(path) or path.is_relative_to(source):
            return f"mount {mount.source} holds the engine's sockets or files ({path})"
    target = PurePosixPath(mount.target)
    if any(target.is_relative_to(guarded) or guarded.is_relative_to(target) for guarded in GUARDED):
        return f"mount at {mount.target} covers what guards the start"
    return None


def _proxy_problems(spec: SessionSpec, data: Path) -> list[str]:
    """Judge what a proxy has, which is nothing beside its socket."""
    problems = []
    dial = str(StatePaths(data / spec.sandbox.id).dial)
    if spec.mounts != (Mount(dial, proxying.DIAL_TARGET, read_only=True),):
        problems.append(f"a proxy mounts {dial} at {proxying.DIAL_TARGET}, read-only, and nothing else")
    if spec.declaration != Declaration() or spec.purpose != proxying.PURPOSE:
        problems.append(f"service {proxying.SERVICE} is a sandbox's proxy, which has no policy of its own")
    return problems


def _holds_dial(mount: Mount, data: Path) -> bool:
    """Tell whether a mount is such a socket's directory, lies in one, or has some below it."""
    source, root = _place(mount.source), _place(str(data))
    if mount.target == proxying.DIAL_TARGET or root.is_relative_to(source):
        return True
    if not source.is_relative_to(root):
        return False
    parts = source.relative_to(root).parts
    return len(parts) == 1 or parts[1] == StatePaths(Path()).dial.name


def _place(path: str) -> PurePosixPath:
    plain = PurePosixPath("/", posixpath.normpath(path).lstrip("/"))
    return PurePosixPath("/run", *plain.parts[3:]) if plain.parts[1:3] == ("var", "run") else plain


def _config_problems(config: Mapping[str, Any], owner: Owner) -> list[str]:
    problems = []
    wanted = user(owner.uid, owner.gid, rootless=owner.rootless)
    if str(config.get("User", "")) != wanted or owner.uid == 0:
        problems.append(f"runs as user {config.get('User')!r}, not as {wanted}")
    if config.get("Entrypoint") != [ENTRYPOINT]:
        problems.append(f"entrypoint is {config.get('Entrypoint')!r}")
    if config.get("Volumes"):
        problems.append("declares anonymous volumes")
    return problems


def _host_config_problems(actual: Mapping[str, Any], spec: SessionSpec) -> list[str]:
    wanted = host_config(spec)
    found = (
        _field_problem(key, actual.get(key), wanted[key])
        if key in wanted
        else _extra_problem(key, actual.get(key), rootless=spec.rootless)
        for key in sorted(set(actual) | set(wanted))
    )
    return [problem for problem in found if problem is not None]


def _field_problem(key: str, value: Any, expected: Any) -> str | None:
    """Judge a field that corral sets itself."""
    if key in IGNORED or key in LIMITS:
        return None
    if key == "LogConfig":
        # The engine's configuration may add options; what counts is where the output goes.
        leaves = (value or {}).get("Type") not in LOCAL_LOGS
        return f"{key} is {value!r}: output would leave this host" if leaves else None
    if key == "DnsOptions" and not value:
        # A container of an earlier corral, which may run on: nobody is asked there either.
        return None
    if key == "Mounts":
        differs = _plain_mounts(value) != _plain_mounts(expected)
        return "mounts differ from bind mounts with private propagation" if differs else None
    return f"{key} is {value!r}, not {expected!r}" if _plain(value) != _plain(expected) else None


def _extra_problem(key: str, value: Any, *, rootless: bool) -> str | None:
    """Judge a field that corral leaves to Docker: its default, or nothing."""
    if key == "MaskedPaths":
        return None if set(value or ()) >= MASKED else "paths of /proc are unmasked"
    if key == "ReadonlyPaths":
        return None if set(value or ()) >= READ_ONLY else "paths of /proc are writable"
    if key == "OomScoreAdj" and rootless and type(value) is int and 0 < value <= OOM_FIRST:
        # An engine without root cannot go below its own score, which it fills in at the start.
        return None
    if key in IGNORED or not value or value in DOCKER_DEFAULTS.get(key, ()):
        return None
    return f"{key} is {value!r}"


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item not in (None, "", [], {})}
    return value or None


def _plain_mounts(rows: Any) -> list[Any]:
    plain = [{key: item for key, item in row.items() if key != "Consistency" or item} for row in rows or []]
    for row in plain:
        row["ReadOnly"] = bool(row.get("ReadOnly"))
    return sorted(
        (_plain(row) | {"ReadOnly": row["ReadOnly"]} for row in plain), key=lambda row: str(row["Target"])
    )
