"""What a program inside a sandbox asked for: each name and each connection, seen in its own namespace."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .host import Host, Project

# Runs beside the sandbox, in its network namespace, as root of the host: packets as they are sent, before any
# rule of the host sees them. Docker's resolver is asked at a port of its own, so what is sent to it counts.
SNIFF = r"""
import json, select, socket, struct, sys
s = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3))
s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
print("ready", flush=True)
def name(data):
    labels, at = [], 12
    while at < len(data) and data[at]:
        labels.append(data[at + 1:at + 1 + data[at]].decode("ascii", "replace"))
        at += 1 + data[at]
    return ".".join(labels)
while True:
    ready = select.select([s, sys.stdin], [], [])[0]
    if s not in ready:
        break
    data, (_, kind, way, *_) = s.recvfrom(65535)
    if way != socket.PACKET_OUTGOING or kind not in (0x0800, 0x86DD):
        continue
    if kind == 0x86DD:
        print(json.dumps({"kind": "ipv6", "to": socket.inet_ntop(socket.AF_INET6, data[24:40])}), flush=True)
        continue
    head, protocol, to = (data[0] & 15) * 4, data[9], socket.inet_ntoa(data[16:20])
    port = struct.unpack("!H", data[head + 2:head + 4])[0]
    if protocol == 17 and (port == 53 or to == "127.0.0.11"):
        print(json.dumps({"kind": "dns", "to": name(data[head + 8:])}), flush=True)
    elif protocol == 6 and data[head + 13] & 0x12 == 0x02 and to != "127.0.0.1":
        print(json.dumps({"kind": "tcp", "to": f"{to}:{port}"}), flush=True)
    elif protocol == 17 and not to.startswith("127."):
        print(json.dumps({"kind": "udp", "to": f"{to}:{port}"}), flush=True)
"""
# The program waits until it is watched.
WATCHED = 'touch .there; while [ ! -e .go ]; do sleep 0.1; done; exec "$@"'


@dataclass
class Seen:
    """What was asked for, in order, as (kind, to): ("dns", name), ("tcp" or "udp", "address:port")."""

    asked: list[tuple[str, str]]

    def beside(self, *addresses: str) -> list[tuple[str, str]]:
        """Return what was asked for beside some addresses with their ports, each once."""
        return sorted({(kind, to) for kind, to in self.asked if to not in addresses})


def watched(*argv: str) -> tuple[str, ...]:
    """Return a command for a sandbox that waits for ``watching`` and then runs ``argv``."""
    return ("sh", "-c", WATCHED, "sh", *argv)


@contextmanager
def watching(host: Host, project: Project, ended: Callable[[], bool]) -> Iterator[Seen]:
    """Watch the one running session of a project, which was started with ``watched``, unless it has ended."""
    host.box.wait_for(lambda: ended() or project.exists(".there"), timeout=400)
    if ended():
        yield Seen([])
        return
    (container,) = project.containers()
    pid = host.box.run(["docker", "inspect", "-f", "{{.State.Pid}}", container]).stdout.strip()
    process: subprocess.Popen[Any] = host.box.popen(
        ["nsenter", "-n", "-t", pid, "python3", "-c", SNIFF],
        user="root",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    seen = Seen([])
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        project.box.run(["touch", f"{project.path}/.go"])
        yield seen
    finally:
        # It reads what was sent before it ends, also when the sandbox has gone.
        rows = [json.loads(line) for line in process.communicate(timeout=30)[0].splitlines()]
        seen.asked.extend((row["kind"], row["to"]) for row in rows)
        project.box.run(["rm", "-f", f"{project.path}/.go", f"{project.path}/.there"])
