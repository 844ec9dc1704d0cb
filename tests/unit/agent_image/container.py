"""A container for the checks of corral-verify that is right in every way, until a test breaks one thing."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_image.files.verify.expectations import Expectations
from agent_image.files.verify.main import judge
from agent_image.files.verify.network import Reply, query
from agent_image.files.verify.system import System

if TYPE_CHECKING:
    from agent_image.files.verify.system import Check

GATEWAY = "192.0.2.1"
PROBE = "203.0.113.66"
RESOLVER = "203.0.113.53"
HOME = "/home/zoe"
PROJECT = f"{HOME}/Projects/demo"
NOTES = f"{HOME}/notes"

BODY: dict[str, Any] = {
    "uid": 1000,
    "gid": 1000,
    "home": HOME,
    "gateway": GATEWAY,
    "probe": {"address": PROBE, "port": 443},
    "mounts_rw": [PROJECT],
    "mounts_ro": [NOTES],
    "state": ["/home/agent/.cache/tool"],
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


class Container(System):
    """Files are real, below ``root``; the kernel's answers are attributes that a test may set."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.owners: dict[str, int] = {}
        self.read_only: set[str] = {NOTES}
        self.refused: set[str] = set()  # paths where write, rename and chmod are refused
        self.netfilter = errno.EPERM
        self.raw: set[int] = set()  # address families that get a raw socket
        self.exit_code = 1
        self.executed: list[Sequence[str]] = []
        self.open_tcp: dict[tuple[str, int], Reply] = {(GATEWAY, 8081): Reply("connected", 0.001)}
        self.open_udp: dict[tuple[str, int], Reply] = {}
        self.put("/proc/self/status", "".join(f"{name}:\t{value}\n" for name, value in STATUS.items()))
        self.put("/proc/self/mountinfo", mountinfo((PROJECT, "rw"), (NOTES, "ro,relatime")))
        self.put("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1\n")
        self.put("/proc/sys/net/ipv6/conf/eth0/disable_ipv6", "1\n")
        self.put("/proc/net/if_inet6", "")
        self.put("/etc/hosts", HOSTS)
        self.put("/etc/resolv.conf", "nameserver 127.0.0.11\noptions ndots:0\n")
        for directory in (PROJECT, NOTES, "/home/agent/.cache/tool", "/usr/bin"):
            self.real(directory).mkdir(parents=True)

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

    def flags(self, path: str) -> int:
        return os.ST_RDONLY if path in self.read_only else 0

    def owner(self, path: str) -> int:
        super().owner(path)
        return self.owners.get(path, 1000)

    def write(self, path: str) -> int:
        self._may(path)
        super().write(path)
        return self.owners.get(path, 1000)

    def rename(self, path: str) -> None:
        self._may(path)
        super().rename(path)

    def chmod(self, path: str) -> None:
        self._may(path)
        super().chmod(path)

    def _may(self, path: str) -> None:
        if path in self.read_only:
            raise OSError(errno.EROFS, "Read-only file system")
        if path in self.refused:
            raise PermissionError(errno.EACCES, "Permission denied")

    def tcp(self, address: str, port: int, payload: bytes = b"") -> Reply:
        return self.open_tcp.get((address, port), Reply("refused", 0.001, code=errno.ECONNREFUSED))

    def udp(self, address: str, port: int, payload: bytes) -> Reply:
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
