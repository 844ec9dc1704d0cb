"""The one shape a sandbox container may have.

``create_body`` is what the CLI sends to Docker; the enforcer compares what Docker reports with the same
function, field by field, before it grants anything. Whatever is not generated here is therefore denied there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from policy.connection import HOST, OWN
from policy.declaration import (
    LABEL_CONNECTION,
    LABEL_EGRESS,
    LABEL_PROJECT,
    LABEL_PURPOSE,
    LABEL_SANDBOX,
    LABEL_SCHEMA,
    LABEL_SERVICE,
    LABEL_SESSION,
    LABEL_UID,
    SCHEMA,
    Declaration,
)
from policy.identity import Sandbox
from policy.records import dataclass

ENTRYPOINT = "/usr/local/bin/corral-entrypoint"
HOME = "/home/agent"
HOSTS_TARGET = "/etc/hosts"
# Where a sandbox writes whose project is mounted read-only; it outlives the session.
WORKSPACE = "/workspace"
# Beside Docker's own, runc: what puts a kernel of its own between the container and the host's.
RUNTIMES = ("runsc", "kata")
DEAD_RESOLVER = "127.0.0.1"
# Docker's resolver of 20.10 and its like answers nothing when nobody answers it: what asks for a name that is
# in no file would wait 10 s. Later ones answer at once.
RESOLVER_OPTIONS = ("timeout:1", "attempts:1")
HOST_ALIAS = "corral-host"
# Of the gateway, where questions for names end up that are answered; the kernel's rules say the same.
DNS_PORT, RESOLVER_PORT = 53, 10053
# No policy has it: the gate of a sandbox whose names are answered asks for it. See agent_image's gate.py.
UNLISTED_NAME = "unlisted.corral-gate.example"
PIDS_LIMIT = 4096
NOFILE = 16384
SHM_SIZE = 64 << 20
# Since API 1.48 a number decides which network has the default route, before the name does (see
# ``policy.identity.NETWORK_PREFIX``); older engines ignore the field.
GATEWAY_PRIORITY = (1 << 31) - 1
# Where programs may write that keep nothing: the root filesystem is read-only. Executable, because harnesses
# unpack libraries there and map them.
TMPFS = dict.fromkeys(("/tmp", "/var/tmp"), "rw,exec,nosuid,nodev,mode=1777")  # noqa: S108 - inside

IPV6_OFF = {
    "net.ipv6.conf.all.disable_ipv6": "1",
    "net.ipv6.conf.default.disable_ipv6": "1",
}


@dataclass(frozen=True)
class Mount:
    """A bind mount: absolute paths on both sides; ``source`` exists before the container is created."""

    source: str
    target: str
    read_only: bool = False

    def body(self) -> dict[str, Any]:
        """Return the Docker API's Mount object."""
        return {
            "Type": "bind",
            "Source": self.source,
            "Target": self.target,
            "ReadOnly": self.read_only,
            "BindOptions": {"Propagation": "rprivate"},
        }


@dataclass(frozen=True)
class Limits:
    """What one container may use of this host; 0 is no limit.

    ``pids`` processes and threads, ``memory`` bytes (swap included), ``nano_cpus`` billionths of a processor.
    """

    pids: int = PIDS_LIMIT
    memory: int = 0
    nano_cpus: int = 0

    def host_config(self) -> dict[str, int]:
        """Return the fields of Docker's HostConfig."""
        # As much with swap as without: swapping is what makes a host that is short of memory unusable.
        return {
            "PidsLimit": self.pids,
            "Memory": self.memory,
            "MemorySwap": self.memory,
            "NanoCpus": self.nano_cpus,
        }


@dataclass(frozen=True)
class SessionSpec:
    """Everything that differs between two sandbox containers.

    ``env`` maps names to values (secrets included: they go into the API's body, never into argv).
    ``hosts_file`` is the absolute path of the published hosts file on the host.
    ``ipv6`` says whether the kernel has IPv6 (/proc/sys/net/ipv6 exists).
    ``gateway`` is the host's address on the sandbox's network; only who asks it for names is told
    of it.
    ``rootless`` says that the engine is the user's own: ``uid`` and ``gid`` are still those on the host.
    ``connection`` is one of ``policy.connection``; without a network of its own the address says nothing.
    ``runtime`` is one of ``RUNTIMES``, empty for runc.
    """

    sandbox: Sandbox
    service: str
    session: str
    purpose: str
    uid: int
    gid: int
    image: str
    address: str
    hosts_file: str
    project: str
    workdir: str
    argv: tuple[str, ...]
    declaration: Declaration
    mounts: tuple[Mount, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    tty: bool = False
    stdin: bool = False
    ipv6: bool = True
    limits: Limits = Limits()
    entrypoint: tuple[str, ...] = (ENTRYPOINT,)
    gateway: str = ""
    rootless: bool = False
    connection: str = OWN
    runtime: str = ""

    @property
    def container(self) -> str:
        """The container's name."""
        return self.sandbox.container(self.service, self.session)

    @property
    def resolver(self) -> str:
        """Whom Docker's resolver in the container asks."""
        return self.gateway if self.declaration.answered and self.gateway else DEAD_RESOLVER


def resolver_rows(address: str, gateway: str) -> frozenset[tuple[str, str, int, str]]:
    """Return the kernel's elements of a session whose names are answered.

    Each is (source, protocol, port, destination). Those from the session to itself open nothing; they say
    whose questions are led to ``RESOLVER_PORT``.
    """
    return frozenset(
        row
        for proto in ("tcp", "udp")
        for row in ((address, proto, DNS_PORT, address), (address, proto, RESOLVER_PORT, gateway))
    )


def user(uid: int, gid: int, *, rootless: bool) -> str:
    """Return as whom a container runs, so that it is the host's ``uid`` and ``gid``.

    A rootless engine maps its user to 0 and has no other number for them.
    """
    return "0:0" if rootless else f"{uid}:{gid}"


def labels(spec: SessionSpec) -> dict[str, str]:
    """Return the labels that declare what the container may reach."""
    return {
        LABEL_SCHEMA: str(SCHEMA),
        LABEL_SANDBOX: spec.sandbox.id,
        LABEL_SERVICE: spec.service,
        LABEL_SESSION: spec.session,
        LABEL_PURPOSE: spec.purpose,
        LABEL_UID: str(spec.uid),
        LABEL_PROJECT: spec.project,
        LABEL_EGRESS: spec.declaration.to_label(),
        **({LABEL_CONNECTION: spec.connection} if spec.connection != OWN else {}),
    }


def host_config(spec: SessionSpec) -> dict[str, Any]:
    """Return the HostConfig part of the create request."""
    # On the host's network its names are the host's, too.
    outside = spec.connection == HOST
    hosts = () if outside else (Mount(spec.hosts_file, HOSTS_TARGET, read_only=True),)
    mounts = (*spec.mounts, *hosts)
    return {
        "NetworkMode": spec.sandbox.network if spec.connection == OWN else spec.connection,
        # The container holds no capability at all; the network part is made true on the host.
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        "Init": True,
        # Said explicitly, so that an engine's own default cannot make it differ.
        "ShmSize": SHM_SIZE,
        **spec.limits.host_config(),
        "Ulimits": [{"Name": "nofile", "Soft": NOFILE, "Hard": NOFILE}],
        "Sysctls": dict(IPV6_OFF) if spec.ipv6 and not outside else {},
        # Dead inside the container's namespace: answered in a millisecond, nothing on the wire. Without it
        # dockerd asks the host's resolver from the host's namespace, where no rule knows whose query it is.
        # A gateway that answers is asked from the container's, and only the enforcer answers there.
        "Dns": [] if outside else [spec.resolver],
        "DnsSearch": [] if outside else ["."],
        "DnsOptions": [] if outside or spec.declaration.answered else list(RESOLVER_OPTIONS),
        "Mounts": [mount.body() for mount in mounts],
        "IpcMode": "private",
        "CgroupnsMode": "private",
        "RestartPolicy": {"Name": "no", "MaximumRetryCount": 0},
        "LogConfig": {"Type": "json-file", "Config": {"max-size": "10m", "max-file": "2"}},
        "AutoRemove": False,
        "Privileged": False,
        "PublishAllPorts": False,
        "ReadonlyRootfs": True,
        "Tmpfs": dict(TMPFS),
        **({"Runtime": spec.runtime} if spec.runtime else {}),
    }


def create_body(spec: SessionSpec) -> dict[str, Any]:
    """Return the body of ``POST /containers/create`` for a session."""
    return {
        "Image": spec.image,
        "Entrypoint": list(spec.entrypoint),
        "Cmd": list(spec.argv),
        "User": user(spec.uid, spec.gid, rootless=spec.rootless),
        "WorkingDir": spec.workdir,
        "Hostname": spec.service,
        "Env": [f"{name}={value}" for name, value in sorted(spec.env.items())],
        "Labels": labels(spec),
        "Tty": spec.tty,
        "OpenStdin": spec.stdin,
        # Who leaves a terminal may come back to it.
        "StdinOnce": spec.stdin and not spec.tty,
        "AttachStdin": spec.stdin,
        "AttachStdout": True,
        "AttachStderr": True,
        "HostConfig": host_config(spec),
        "NetworkingConfig": {"EndpointsConfig": _endpoints(spec)},
    }


def _endpoints(spec: SessionSpec) -> dict[str, Any]:
    if spec.connection != OWN:
        return {}
    return {
        spec.sandbox.network: {
            "IPAMConfig": {"IPv4Address": spec.address},
            "GwPriority": GATEWAY_PRIORITY,
        },
    }


def network_body(sandbox: Sandbox, uid: int, subnet: str, gateway: str, strangers: str) -> dict[str, Any]:
    """Return the body of ``POST /networks/create``.

    ``strangers`` is the top quarter of ``subnet``: Docker hands automatic addresses out of it, so that a
    container corral did not start can never be given an address that a session will use.
    """
    return {
        "Name": sandbox.network,
        "CheckDuplicate": True,
        "Driver": "bridge",
        "EnableIPv6": False,
        "Internal": False,
        "Attachable": False,
        "IPAM": {
            "Driver": "default",
            "Config": [{"Subnet": subnet, "Gateway": gateway, "IPRange": strangers}],
        },
        "Options": {
            "com.docker.network.bridge.name": sandbox.bridge,
            "com.docker.network.bridge.enable_icc": "false",
            # Our own rule masquerades, and only what carries the mark.
            "com.docker.network.bridge.enable_ip_masquerade": "false",
        },
        "Labels": {LABEL_SCHEMA: str(SCHEMA), LABEL_SANDBOX: sandbox.id, LABEL_UID: str(uid)},
    }


# What an engine adds to each network by its own configuration and what says nothing about isolation.
NEUTRAL_NETWORK_OPTIONS = frozenset({"com.docker.network.driver.mtu"})


def network_differences(network: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Compare a network's inspect with the body that would create it; return what differs, field by field."""
    found = []
    for key in ("Name", "Driver", "EnableIPv6", "Internal", "Attachable", "Options", "Labels"):
        value = network.get(key)
        if key == "Options":
            value = {
                name: text for name, text in (value or {}).items() if name not in NEUTRAL_NETWORK_OPTIONS
            }
        if value != wanted[key]:
            found.append(f"{key} is {value!r}, not {wanted[key]!r}")
    actual, expected = network.get("IPAM") or {}, wanted["IPAM"]
    if actual.get("Driver") != expected["Driver"] or actual.get("Options"):
        found.append(
            f"its addresses come from {actual.get('Driver')!r} with {actual.get('Options') or 'no'} options"
        )
    if actual.get("Config") != expected["Config"]:
        found.append(f"its addresses are {actual.get('Config')!r}, not {expected['Config']!r}")
    return found
