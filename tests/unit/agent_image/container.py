"""A container for the checks of corral-verify that is right in every way, until a test breaks one thing."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_image.files.verify import attempts
from agent_image.files.verify.expectations import Expectations
from agent_image.files.verify.files import ROOT_DIRS
from agent_image.files.verify.main import judge
from agent_image.files.verify.network import WAIT, Reply, query
from agent_image.files.verify.ownership import GUARDS
from agent_image.files.verify.system import System

if TYPE_CHECKING:
    from agent_image.files.verify.system import Check

GATEWAY = "192.0.2.1"
PROBE = "203.0.113.66"
RESOLVER = "203.0.113.53"
HOME = "/home/zoe"
PROJECT = f"{HOME}/Projects/demo"
NOTES = f"{HOME}/notes"
STATE = "/home/agent/.cache/tool"
PEER = "192.0.2.9"
ENGINE_FILES = "/var/lib/docker/containers/" + "0f" * 32

# What Docker Engine 26 mounts in a container with an init process and no terminal, on cgroup 2.
DOCKERS_MOUNTS = f"""\
911 555 0:69 / / rw,relatime - overlay overlay rw,lowerdir=/a:/b,upperdir=/c,workdir=/d
912 911 0:83 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw
913 911 0:84 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755
914 913 0:90 / /dev/pts rw,nosuid,noexec,relatime - devpts devpts rw,gid=5,mode=620,ptmxmode=666
915 911 0:91 / /sys ro,nosuid,nodev,noexec,relatime - sysfs sysfs ro
916 915 0:38 / /sys/fs/cgroup ro,nosuid,nodev,noexec,relatime - cgroup2 cgroup rw
917 913 0:80 / /dev/mqueue rw,nosuid,nodev,noexec,relatime - mqueue mqueue rw
918 913 0:92 / /dev/shm rw,nosuid,nodev,noexec,relatime - tmpfs shm rw,size=65536k
919 911 254:0 /usr/bin/tini-static /usr/sbin/docker-init ro,relatime master:608 - ext4 /dev/vda rw
920 911 254:0 {ENGINE_FILES}/resolv.conf /etc/resolv.conf rw,relatime - ext4 /dev/vda rw
921 911 254:0 {ENGINE_FILES}/hostname /etc/hostname rw,relatime - ext4 /dev/vda rw
922 911 254:0 /home/zoe/.local/share/corral/demo/sessions/53aae0c2/hosts /etc/hosts ro - ext4 /dev/vda rw
718 912 0:83 /bus /proc/bus ro,nosuid,nodev,noexec,relatime - proc proc rw
721 912 0:83 /sys /proc/sys ro,nosuid,nodev,noexec,relatime - proc proc rw
722 912 0:114 / /proc/acpi ro,relatime - tmpfs tmpfs ro
724 912 0:84 /null /proc/keys rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755
726 915 0:115 / /sys/firmware ro,relatime - tmpfs tmpfs ro
"""

# Ids inside are those of the host; a rootless engine calls the user who runs it 0.
IDENTITY = "         0          0 4294967295\n"
ROOTLESS = "         0       1000          1\n         1     100000      65536\n"

BODY: dict[str, Any] = {
    "uid": 1000,
    "gid": 1000,
    "home": HOME,
    "gateway": GATEWAY,
    "probe": {"address": PROBE, "port": 443},
    "mounts_rw": [PROJECT],
    "mounts_ro": [NOTES],
    "state": [STATE],
    "tmpfs": ["/tmp"],
    "peers": {"corral-other-main": PEER},
    "limits": {"pids": 4096, "memory": 2 << 30, "cpus": 1.5, "nofile": 16384},
    "host_services": [8081],
    "names": {"api.example": ["203.0.113.11", "203.0.113.10"]},
    "env_file": f"{HOME}/secret.env",
    "outside_name": "outside.example",
    "resolvers": [RESOLVER],
    "profile": [],
}

STATUS = {
    "Uid": "1000\t1000\t1000\t1000",
    "Gid": "1000\t1000\t1000\t1000",
    "Groups": "1000",
    "CapInh": "0000000000000000",
    "CapPrm": "0000000000000000",
    "CapEff": "0000000000000000",
    "CapBnd": "0000000000000000",
    "CapAmb": "0000000000000000",
    "NoNewPrivs": "1",
    "Seccomp": "2",
}
HOSTS = f"""\
127.0.0.1 localhost
{GATEWAY} corral-host  # the host
203.0.113.10 api.example
203.0.113.11 api.example
#203.0.113.12 api.example
"""


def expect(**changes: Any) -> Expectations:
    """Return expectations with changes."""
    return Expectations({**BODY, **changes})


def mountinfo(*mounts: tuple[str, str]) -> str:
    """Return the text for (mount point, options) pairs, after the root's own."""
    lines = [
        f"{number} 1 0:{number} / {point} {options} - ext4 /dev/vda rw"
        for number, (point, options) in enumerate((("/", "rw,relatime"), *mounts), 30)
    ]
    return "\n".join(lines) + "\n"


def bound(point: str, options: str = "rw,relatime", kind: str = "ext4", root: str | None = None) -> str:
    """Return the line of one mount, of ``root`` of a file system that is none of Docker's."""
    return f"999 911 254:0 {root or point} {point} {options} - {kind} /dev/vda rw\n"


POLICYS_MOUNTS = (
    bound(PROJECT)
    + bound(NOTES, "ro,relatime")
    + bound(STATE)
    + bound("/tmp", "rw,nosuid,nodev,relatime", kind="tmpfs", root="/")
)


class Container(System):
    """Files are real, below ``root``; the kernel's answers are attributes that a test may set."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.owners: dict[str, int] = {}
        self.read_only: set[str] = {NOTES, "/etc/hosts", *ROOT_DIRS}
        self.refused: set[str] = set(GUARDS)  # paths where every try to change something is refused
        self.mounting = {"here": False, "namespaces": False, "there": False}
        self.nofile = (16384, 16384)
        self.netfilter = errno.EPERM
        self.raw: set[int] = set()  # address families that get a raw socket
        self.exit_code = 1
        self.executed: list[Sequence[str]] = []
        self.open_tcp: dict[tuple[str, int], Reply] = {(GATEWAY, 8081): Reply("connected", 0.001)}
        self.lingered: dict[tuple[str, int], float] = {}
        self.open_udp: dict[tuple[str, int], Reply] = {}
        self.put("/proc/self/status", "".join(f"{name}:\t{value}\n" for name, value in STATUS.items()))
        for kind in ("uid", "gid"):
            self.put(f"/proc/self/{kind}_map", IDENTITY)
        self.devices: dict[str, tuple[int, int]] = {}
        self.put("/proc/self/mountinfo", DOCKERS_MOUNTS + POLICYS_MOUNTS)
        self.put("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1\n")
        self.put("/proc/sys/net/ipv6/conf/eth0/disable_ipv6", "1\n")
        self.put("/proc/net/if_inet6", "")
        self.put("/etc/hosts", HOSTS)
        self.put("/etc/resolv.conf", "nameserver 127.0.0.11\noptions ndots:0\n")
        for path in GUARDS:
            if not self.there(path):
                self.put(path)
            self.owners[path] = 0
        self.owners["/etc/hosts"] = 1000
        for name, text in (("pids.max", "4096"), ("memory.max", str(2 << 30)), ("cpu.max", "150000 100000")):
            self.put(f"/sys/fs/cgroup/{name}", f"{text}\n")
        for directory in (PROJECT, NOTES, STATE, "/usr/bin"):
            self.real(directory).mkdir(parents=True, exist_ok=True)

    def become_rootless(self) -> None:
        """The agent is 0 in here, which is the host's 1000, and so are the files of the image."""
        for kind in ("uid", "gid"):
            self.put(f"/proc/self/{kind}_map", ROOTLESS)
        self.set_status(Uid="0\t0\t0\t0", Gid="0\t0\t0\t0", Groups="0")
        self.owners = dict.fromkeys((*self.owners, PROJECT, STATE), 0)
        self.read_only |= set(GUARDS)

    def put(self, path: str, text: str = "", mode: int = 0o644) -> Path:
        """Write a file of the container."""
        real = self.real(path)
        real.parent.mkdir(parents=True, exist_ok=True)
        real.write_text(text)
        real.chmod(mode)
        return real

    def set_status(self, **fields: str) -> None:
        """Change fields of /proc/self/status; an empty value removes one."""
        found = {**STATUS, **fields}
        self.put(
            "/proc/self/status", "".join(f"{name}:\t{value}\n" for name, value in found.items() if value)
        )

    def device(self, path: str) -> tuple[int, int] | None:
        return self.devices.get(path)

    def flags(self, path: str) -> int:
        return os.ST_RDONLY if path in self.read_only else 0

    def owner(self, path: str) -> int:
        super().owner(path)
        return self.owners.get(path, 1000)

    def write(self, path: str) -> int:
        self._may(path)
        super().write(path)
        return self.owners.get(path, 1000)

    def attempt(self, way: str, path: str) -> str:
        self._may(path)
        return attempts.TRIES[way](self.real(path))

    def mount_over(self, path: str = "") -> dict[str, bool]:
        return self.mounting

    def open_files(self) -> tuple[int, int]:
        return self.nofile

    def _may(self, path: str) -> None:
        if path in self.read_only:
            raise OSError(errno.EROFS, "Read-only file system")
        if path in self.refused:
            raise PermissionError(errno.EACCES, "Permission denied")

    def tcp(self, address: str, port: int, payload: bytes = b"", linger: float = 0.0) -> Reply:
        self.lingered[address, port] = linger
        return self.open_tcp.get((address, port), Reply("refused", 0.001, code=errno.ECONNREFUSED))

    def converse(
        self, address: str, port: int, first: bytes, then: bytes = b"", wait: float = WAIT
    ) -> tuple[Reply, Reply | None]:
        """What ``tcp`` says of the place; no HTTP server is there."""
        return self.tcp(address, port), None

    def udp(self, address: str, port: int, payload: bytes, wait: float = WAIT) -> Reply:
        return self.open_udp.get((address, port), Reply("unreachable", 0.001, code=errno.EHOSTUNREACH))

    def open_raw(self, family: int, protocol: int) -> None:
        if family not in self.raw:
            raise PermissionError(errno.EPERM, "Operation not permitted")

    def ask_netfilter(self) -> int:
        return self.netfilter

    def execute(self, argv: Sequence[str], wait: float) -> int:
        self.executed.append(argv)
        return self.exit_code


def outcome(check: Check, container: Container, **changes: Any) -> tuple[str, str]:
    """Return (status, detail) of one check."""
    return judge(check, expect(**changes), container)


def dns_reply(code: int, answers: int, asked: bytes | None = None) -> bytes:
    """Return the head of a DNS message that answers ``asked``."""
    identity = (asked or query("x.example", "A"))[:2]
    return identity + (0x8180 | code).to_bytes(2, "big") + bytes([0, 1, 0, answers, 0, 0, 0, 0])
