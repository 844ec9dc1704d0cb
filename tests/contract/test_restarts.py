"""The writer's own programs, started and ended again and again on a real kernel: nothing accumulates."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pyroute2.ipset import IPSet

from enforcer import netfilter
from enforcer.netfilter.kernel import RealKernel
from enforcer.netfilter.process import ToolError, run
from enforcer.netfilter.skeleton import Skeleton
from enforcer.netfilter.writer import Writer

from .conftest import sh

pytestmark = pytest.mark.netns

RESTARTS = 100
BRIDGE = "corral-0a0b0c0d"
SANDBOX = {"bridge": BRIDGE, "subnet": "192.0.2.0/26", "gateway": "192.0.2.1"}
PINS = [["192.0.2.2", "tcp", 443, f"203.0.113.{n}", "box main api.example"] for n in range(1, 21)]
HOST = [["192.0.2.2", "tcp", 8081, "192.0.2.1", "box main model"]]


def sets() -> list[str]:
    """Return every set of the namespace with its elements; ages and counts are left out."""
    ages = ("IPSET_ATTR_TIMEOUT", "IPSET_ATTR_PACKETS", "IPSET_ATTR_BYTES")
    found = []
    with closing(IPSet()) as tool:
        for message in tool.list():
            name, body = message.get_attr("IPSET_ATTR_SETNAME"), message.get_attr("IPSET_ATTR_ADT")
            rows = body.get_attrs("IPSET_ATTR_DATA") if body is not None else []
            found += [f"{name} {message.get_attr('IPSET_ATTR_TYPENAME')}"]
            found += [f"{name} {[a for a in row['attrs'] if a[0] not in ages]}" for row in rows]
    return sorted(found)


def dump() -> str:
    """Return every rule and set of the namespace as text; what counts and what ages is left out."""
    text = sh(
        "iptables-nft-save; ip6tables-nft-save; nft list ruleset; ip -4 rule; ip -4 route show table all"
    )
    text = re.sub(r"counter packets \d+ bytes \d+", "counter", text)
    text = re.sub(r"expires \S+", "", text)
    text = re.sub(r"\[\d+:\d+\]|^#.*$", "", text, flags=re.MULTILINE)
    return "\n".join([text, *sets()])


class Program:
    """``corral-netfilter`` from a directory as ``corral install`` makes it, in this thread's namespace."""

    def __init__(self, directory: Path) -> None:
        source = Path(netfilter.__file__).parent
        shutil.copytree(source, directory / "enforcer" / "netfilter")
        (directory / "enforcer" / "__init__.py").touch()
        (directory / "enforcer" / "netfilter" / "VERSION").write_text("0.1.0\n")
        self.directory = directory
        self.runtime = directory / "run"
        self.runtime.mkdir()
        self.path = directory / "netfilter.sock"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(self.path))
        self.listener.listen(16)
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notify.bind(str(directory / "notify.sock"))
        self.process: subprocess.Popen[bytes] | None = None

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(self.directory),
            "NOTIFY_SOCKET": str(self.directory / "notify.sock"),
        }

    def skeleton(self) -> None:
        """Run what the boot runs."""
        words = [sys.executable, "-m", "enforcer.netfilter", "skeleton"]
        done = subprocess.run(
            words, env=self._environment(), cwd="/", capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    def start(self) -> None:
        """Start the server with a socket as systemd passes it, and return when it says that it is ready."""
        script = 'exec 3<&"$LISTENER"; LISTEN_FDS=1 LISTEN_PID=$$ exec "$0" -m enforcer.netfilter serve'
        listener = self.listener.fileno()
        self.process = subprocess.Popen(
            ["bash", "-c", script, sys.executable],
            env=self._environment() | {"LISTENER": str(listener), "RUNTIME_DIRECTORY": str(self.runtime)},
            cwd="/",
            pass_fds=[listener],
            stderr=subprocess.DEVNULL,
        )
        ready, _, _ = select.select([self.notify], [], [], 60)
        assert ready, f"not ready within 60 s; exit status {self.process.poll()}"
        assert self.notify.recv(100) == b"READY=1"

    def end(self, number: signal.Signals) -> None:
        """End the server."""
        assert self.process is not None
        self.process.send_signal(number)
        assert self.process.wait(30) == (0 if number is signal.SIGTERM else -number)
        self.process = None

    def ask(self, **body: Any) -> dict[str, Any]:
        """Send one request and return its answer."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(30)
            sock.connect(str(self.path))
            sock.sendall(json.dumps({"v": 2, **body}).encode() + b"\n")
            answer: dict[str, Any] = json.loads(sock.makefile("rb").readline())
        assert answer["ok"], answer
        return answer

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.listener.close()
        self.notify.close()


@pytest.fixture
def program(netns: None, tmp_path: Path) -> Iterator[Program]:
    made = Program(tmp_path)
    try:
        yield made
    finally:
        made.close()


def bridge() -> None:
    sh(
        f"ip link add {BRIDGE} type bridge && ip addr add 192.0.2.1/26 dev {BRIDGE} && ip link set {BRIDGE} up"
    )


@pytest.mark.parametrize(("driver", "times"), [("nft", RESTARTS), ("own", RESTARTS // 10)])
def test_a_hundred_restarts_leave_every_rule_and_set_as_it_was(
    program: Program, driver: str, times: int
) -> None:
    bridge()
    if driver == "nft":
        sh("iptables-nft -N DOCKER && iptables-nft -N DOCKER-USER && iptables-nft -A FORWARD -j DOCKER-USER")
    sh(
        "iptables-nft -N FOREIGN && iptables-nft -A FOREIGN -s 198.51.100.1 -j DROP && nft add table ip foreign"
    )
    program.skeleton()
    program.start()
    filtered = program.ask(op="apply", sandboxes=[SANDBOX], pins=PINS, host=HOST)
    assert len(filtered["pins"]) == len(PINS), filtered["refused"]
    before = dump()
    assert filtered["driver"] == driver
    assert before.count("203.0.113.") == len(PINS)
    for number in range(times):
        # One in two is killed, one in ten finds the boot's program at work before it.
        program.end(signal.SIGKILL if number % 2 else signal.SIGTERM)
        if number % 10 == 0:
            program.skeleton()
        program.start()
        answer = program.ask(op="read")
        assert (len(answer["pins"]), len(answer["host"])) == (len(PINS), len(HOST)), "claims were lost"
        assert dump() == before, f"restart {number + 1}"


def test_a_tool_that_fails_at_any_call_is_survived(netns: None) -> None:
    """iptables, ip6tables or nft cannot be run once, at the first, second, third ... call."""
    bridge()
    # Docker's part, so that nothing but the failure stands in the way.
    sh("iptables-nft -N DOCKER-USER && iptables-nft -A FORWARD -j DOCKER-USER")
    clean = ""
    # Twice without a failure: looking at a table for the first time makes it.
    for position in (0, 0, *range(1, 100)):
        calls = 0

        def tool(argv: Sequence[str], stdin: str | None = None, position: int = position) -> str:
            nonlocal calls
            calls += 1
            if calls == position:
                raise ToolError(tuple(argv), "injected", stdin or "")
            return run(argv, stdin)

        kernel = RealKernel(tool)
        try:
            of = Writer(kernel, Skeleton(), "test", sleep=lambda _s: None)
            of.heal("the start")
            asked = {"v": 2, "op": "apply", "sandboxes": [SANDBOX], "pins": PINS, "host": HOST}
            answer = of.handle(1000, asked)
            if not answer["ok"] or len(answer["pins"]) < len(PINS):
                assert answer.get("error") or answer["refused"]
                of.heal("the next turn")
                answer = of.handle(1000, asked)
            assert len(answer["pins"]) == len(PINS), answer
            state = dump()
            assert position == 0 or state == clean, f"call {position}"
            clean = state
        finally:
            kernel.close()
        with closing(RealKernel()) as sound:
            sound.remove(Skeleton())
        if calls < position:
            break
    assert 10 < position < 99, position
