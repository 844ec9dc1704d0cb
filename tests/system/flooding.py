"""A sandbox that sends what it must not, all the time, while a test breaks something around it."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.lab import Box

from .host import BASE_POLICY, ENFORCER, Host, Project, until

HOST_PORT = 9998
ALLOWED_URL = "https://allowed1.corral.example/"

# Datagrams to every target given, about ten thousand a second, until a file appears; prints how many each got.
SENDER = """\
import os, socket, sys, time
stop, targets = sys.argv[1], [(a, int(p)) for a, p in (t.rsplit(":", 1) for t in sys.argv[2:])]
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sent, end = 0, time.monotonic() + 240
while time.monotonic() < end and not os.path.exists(stop):
    for _ in range(10):
        for target in targets:
            try:
                s.sendto(b"flood", target)
            except OSError:
                pass
        sent += 1
    time.sleep(0.001)
print(sent)
"""

# On the host, on all of its addresses: writes down each time a datagram came, and how many by then.
SINK = """\
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("0.0.0.0", int(sys.argv[1])))
print("ready", flush=True)
count = 0
while True:
    s.recv(2000)
    count += 1
    with open(sys.argv[2], "w") as file:
        file.write(str(count))
"""


@dataclass
class Sink:
    """Servers on all addresses of the host that count what they hear.

    Where the engine has a network of its own there is one more, on the addresses of that: the gateway of a sandbox
    is one of them. It is made anew where the engine is.
    """

    host: Host
    port: int
    paths: list[str] = field(default_factory=list)
    servers: list[subprocess.Popen[Any]] = field(default_factory=list)
    networks: list[str] = field(default_factory=list)
    before: int = 0

    def listen(self) -> None:
        """Listen on the host and in the engine's network, where nobody does so yet."""
        for entering, network in (
            ((), "the host's"),
            (self.host.engine.entering(), self.host.engine.network()),
        ):
            if network not in self.networks:
                self._serve(entering)
                self.networks.append(network)

    def _serve(self, entering: tuple[str, ...]) -> None:
        path = f"/tmp/heard-{self.port}-{len(self.paths)}"
        self.host.root("rm", "-f", path)
        command = [*entering, "python3", "-c", SINK, str(self.port), path]
        user = "root" if entering else "dev"
        server = self.host.box.popen(command, user=user, stdout=subprocess.PIPE, text=True)
        self.servers.append(server)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        self.paths.append(path)

    def close(self) -> None:
        for server in self.servers:
            Box.kill(server)

    @property
    def heard(self) -> int:
        return self._count() - self.before

    def reset(self) -> None:
        """Count from here."""
        self.before = self._count()

    def _count(self) -> int:
        heard = [self.host.box.run(["cat", path], check=False).stdout for path in self.paths]
        return sum(int(text or 0) for text in heard)


@contextlib.contextmanager
def host_sink(host: Host, port: int = HOST_PORT) -> Iterator[Sink]:
    sink = Sink(host, port)
    try:
        sink.listen()
        yield sink
    finally:
        sink.close()


@dataclass
class Flood:
    """A running sandbox: ``leaked`` is what arrived at the far end and at the host since it started."""

    host: Host
    project: Project
    process: subprocess.Popen[Any]
    sink: Sink

    @property
    def forbidden(self) -> str:
        return self.host.internet.addresses["forbidden"]

    @property
    def leaked(self) -> tuple[int, int]:
        return self.host.internet.packets(self.forbidden), self.sink.heard

    @property
    def handed_over(self) -> int:
        """How many datagrams the sandbox's kernel has taken from the program so far."""
        (container,) = self.project.containers()
        text = self.host.box.run(["docker", "exec", container, "cat", "/proc/net/snmp"]).stdout
        names, values = [line.split() for line in text.splitlines() if line.startswith("Udp:")]
        return int(dict(zip(names, values, strict=True))["OutDatagrams"])

    def works(self) -> None:
        """What is allowed is reachable, from a session beside the one that floods."""
        assert "203.0.113.10" in self.project.inside("curl", "-sS", "-m", "10", ALLOWED_URL).stdout

    def stop(self) -> int:
        """End the flood and return how many datagrams each target was sent."""
        self.project.write("stop", "")
        self.process.wait(timeout=30)
        return int(self.project.read("sent"))


def controls(host: Host, sink: Sink) -> None:
    """Both counts of 0 could have been more: the same datagrams from Docker's own bridge arrive."""
    host.control(host.internet.addresses["forbidden"])
    sink.listen()
    for address in dict.fromkeys([host.box.address, host.engine.address()]):
        before = sink.heard
        code = (
            f"import socket\nfor _ in range(5): socket.socket(2, 2).sendto(b'x', ('{address}', {HOST_PORT}))"
        )
        host.plain("python3", "-c", code)
        until(lambda before=before: sink.heard == before + 5, 10, f"{address} hears an unfenced container")  # type: ignore[misc]


@contextlib.contextmanager
def flooding(host: Host, name: str, policy: str = BASE_POLICY) -> Iterator[Flood]:
    """A sandbox that floods the forbidden address and the host's own; on leaving all counts must be 0.

    It must have sent at least a thousand datagrams to each, and the positive controls must arrive.
    """
    project = host.project(name, policy)
    project.write("send.py", SENDER)
    project.inside("true")
    targets = [
        f"{host.internet.addresses['forbidden']}:9",
        f"{project.sandbox['gateway']}:{HOST_PORT}",
        f"{host.box.address}:{HOST_PORT}",
    ]
    with host_sink(host) as sink:
        host.internet.reset_counters()
        script = f"touch up; exec python3 send.py stop {' '.join(targets)} > sent"
        flood = Flood(host, project, project.start("sh", "-c", script, marker="up"), sink)
        yield flood
        sent = flood.stop()
        assert sent > 1000
        assert flood.leaked == (0, 0), host.internet.all_packets()
        controls(host, sink)


def standing(host: Host) -> Callable[[], bool]:
    """Return a condition: our jumps stand first where they must, the table stands, Docker's chain is hooked."""

    def holds() -> bool:
        if not host.engine.network():
            return False
        listed = host.netadmin_shell(
            "iptables -S DOCKER-USER | sed -n 2p; iptables -S INPUT | sed -n 2p; nft list chain inet corral forward_backstop",
            check=False,
        ).stdout
        return all(word in listed for word in ("CORRAL-OUT", "CORRAL-HOST", "drop"))

    return holds


def after_each(host: Host, flood: Flood, commands: Sequence[str]) -> dict[str, tuple[float, tuple[int, int]]]:
    """Run each command as root of the engine's network, wait until the rules stand again; command -> seconds it took and what leaked."""
    found = {}
    for command in commands:
        before = flood.leaked
        host.netadmin_shell(command)
        took = until(standing(host), 20, f"the rules stand after {command}")
        # What was on its way, and what a repair in several steps may have let through.
        time.sleep(0.3)
        leaked = tuple(now - then for now, then in zip(flood.leaked, before, strict=True))
        found[command] = (took, (leaked[0], leaked[1]))
    for command, (took, leaked) in found.items():
        print(f"{command.splitlines()[0]}: stands again after {took:.2f} s, leaked {leaked}")
    return found


@pytest.fixture
def services_back(host: Host) -> Iterator[None]:
    """Whatever a test stopped runs again afterwards."""
    try:
        yield
    finally:
        host.engine.systemctl("start", *host.engine.writer_units)
        pid = host.enforcer_pid()
        if pid:
            host.root("kill", "-CONT", str(pid), check=False)
        host.user_systemctl("start", ENFORCER)
        host.wait_enforcer()
        strangers = host.box.run(["docker", "ps", "-aq", "--filter", "label=test=faults"]).stdout.split()
        if strangers:
            host.box.run(["docker", "rm", "-f", *strangers], timeout=120)


def pins(host: Host) -> list[str]:
    listed = host.netadmin("ipset", "list", "corral-pins").stdout.partition("Members:\n")[2]
    return [line.split()[0] for line in listed.splitlines()]


def image(host: Host) -> str:
    return host.box.run(["docker", "images", "-q", "corral/*"]).stdout.split()[0]


def stranger(host: Host, network: str, *argv: str, options: tuple[str, ...] = ()) -> str:
    """Start a container that corral did not start on a sandbox's network; returns its id."""
    command = [
        "docker",
        "run",
        "-d",
        "--label",
        "test=faults",
        "--network",
        network,
        *options,
    ]
    return host.box.run(
        [*command, "-u", "1000:1000", "--entrypoint", argv[0], image(host), *argv[1:]]
    ).stdout.strip()
