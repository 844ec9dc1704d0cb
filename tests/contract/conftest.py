"""The kernel in two forms: in memory, and the real one in a network namespace made for the test."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Interface
from pathlib import Path

import pytest

from enforcer.netfilter.claims import Link
from enforcer.netfilter.detect import LEGACY, NFT, OWN
from enforcer.netfilter.fake import FakeKernel
from enforcer.netfilter.kernel import RealKernel
from enforcer.netfilter.owntable import SETS
from enforcer.netfilter.ports import Port
from tests.lab import machine
from tests.lab.execute import Steps
from tests.lab.layout import Layout
from tests.lab.state import locked

PROJECT = Path(__file__).resolve().parents[2]
DRIVERS = (NFT, LEGACY, OWN)
CLONE_NEWNET = 0x40000000
libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class World:
    """A kernel and what stands outside corral: interfaces and foreign rules."""

    kernel: FakeKernel | RealKernel
    places: list[str] = field(default_factory=list)

    @property
    def real(self) -> bool:
        return isinstance(self.kernel, RealKernel)

    @property
    def iptables(self) -> str:
        """The program that others use on the tables this kernel's driver writes to."""
        return program(self.kernel.driver if isinstance(self.kernel, RealKernel) else NFT)

    def has_set(self, name: str) -> bool:
        seen = self.kernel.observe()
        return name in seen.sets or SETS[name] in seen.table_sets

    def add_bridge(self, name: str, address: str) -> None:
        if isinstance(self.kernel, FakeKernel):
            index = 10 + len(self.kernel.interfaces)
            self.kernel.interfaces.append(Link(name, index, (IPv4Interface(address),)))
        else:
            sh(f"ip link add {name} type bridge && ip addr add {address} dev {name} && ip link set {name} up")

    def delete_bridge(self, name: str) -> None:
        if isinstance(self.kernel, FakeKernel):
            self.kernel.interfaces = [link for link in self.kernel.interfaces if link.name != name]
        else:
            sh(f"ip link del {name}")

    def add_port(self, name: str, bridge: str, place: str) -> None:
        """Make a link that is a port of ``bridge`` and leads into the namespace ``place``, up on both sides."""
        if place not in self.places:
            self.places.append(place)
            if self.real:
                sh(f"ip netns add {self._netns(place)}")
        if isinstance(self.kernel, FakeKernel):
            index = 100 + len(self.kernel.attached)
            port = Port(index, name, bridge, self.places.index(place), isolated=False, up=True)
            self.kernel.attached[index] = port
        else:
            inside = self._netns(place)
            sh(f"""ip link add {name} type veth peer name p-{name} netns {inside}
                   ip link set {name} master {bridge}; ip link set {name} up
                   ip -n {inside} link set p-{name} up""")

    def delete_port(self, name: str) -> None:
        if isinstance(self.kernel, FakeKernel):
            del self.kernel.attached[self.port(name).index]
        else:
            sh(f"ip link del {name}")

    def port(self, name: str) -> Port:
        return next(port for port in self.kernel.ports() if port.name == name)

    def change_port(self, name: str, *, isolated: bool | None = None, up: bool | None = None) -> None:
        """What root does by hand."""
        port = self.port(name)
        if isinstance(self.kernel, FakeKernel):
            wanted = port if isolated is None else replace(port, isolated=isolated)
            self.kernel.attached[port.index] = wanted if up is None else replace(wanted, up=up)
            return
        if isolated is not None:
            sh(f"ip link set {name} type bridge_slave isolated {'on' if isolated else 'off'}")
        if up is not None:
            sh(f"ip link set {name} {'up' if up else 'down'}")

    def _netns(self, place: str) -> str:
        return f"corral-c{os.getpid()}-{place}"

    def close(self) -> None:
        if self.real:
            for place in self.places:
                sh(f"ip netns del {self._netns(place)}")

    def foreign_rule(self, chain: str, rule: str) -> None:
        """Append a rule that is not ours to a chain of the filter table."""
        if isinstance(self.kernel, FakeKernel):
            self.kernel.tables[(4, "filter")].setdefault(chain, []).append(rule)
        else:
            subprocess.run([self.iptables, "-N", chain], capture_output=True, check=False)
            sh(f"{self.iptables} -A {chain} {rule}")

    def flush(self, chain: str) -> None:
        if isinstance(self.kernel, FakeKernel):
            self.kernel.tables[(4, "filter")][chain].clear()
        else:
            sh(f"{self.iptables} -F {chain}")

    def insert_first(self, chain: str, rule: str) -> None:
        if isinstance(self.kernel, FakeKernel):
            self.kernel.tables[(4, "filter")][chain].insert(0, rule)
        else:
            sh(f"{self.iptables} -I {chain} 1 {rule}")

    def drop_table(self) -> None:
        if isinstance(self.kernel, FakeKernel):
            self.kernel.backstop = None
        else:
            sh("nft delete table inet corral")

    def change_table(self, command: str) -> None:
        """Change our nft table as root does by hand. Of what is done, the fake knows the flag alone."""
        if isinstance(self.kernel, FakeKernel):
            self.kernel.dormant = frozenset({"inet corral"})
        else:
            sh(f"nft '{command}'")

    def rules(self, chain: str) -> list[str]:
        if isinstance(self.kernel, FakeKernel):
            return list(self.kernel.tables[(4, "filter")].get(chain, []))
        lines = sh(f"{self.iptables} -S {chain}").splitlines()
        return [line.removeprefix(f"-A {chain} ") for line in lines if line.startswith("-A")]


def program(driver: str) -> str:
    return "iptables-legacy" if driver == LEGACY else "iptables-nft"


def sh(command: str) -> str:
    done = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def tools() -> None:
    """The programs these tests run, installed when the machine lacks them. None starts a daemon."""
    machine.prepare(Steps())


@pytest.fixture
def netns(tools: None) -> Iterator[None]:
    """Move this thread into a new network namespace and back afterwards."""
    original = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    if libc.unshare(CLONE_NEWNET) != 0:
        pytest.fail("these tests need root: unshare(CLONE_NEWNET) was refused")
    try:
        sh("ip link set lo up")
        yield
    finally:
        assert libc.setns(original, CLONE_NEWNET) == 0
        os.close(original)


@pytest.fixture(scope="session")
def python_iptables(tools: None) -> None:
    """The library of the driver for legacy tables, compiled once and kept by its pin."""
    lock = PROJECT / "requirements" / "legacy.lock"
    key = hashlib.sha256(lock.read_bytes() + sys.version.encode()).hexdigest()[:16]
    cache = Layout.of().cache
    directory = cache / "legacy" / key
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / "legacy.lock", "python-iptables", wait=lambda: None):
        if not directory.is_dir():
            machine.prepare_compiler(Steps())
            partial = directory.with_name("partial")
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--require-hashes"]
            sh(f"rm -rf {partial}")
            done = subprocess.run(
                [*pip, "--target", str(partial), "-r", str(lock)], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"python-iptables cannot be built (gcc, python3-dev): {done.stderr}"
            partial.rename(directory)
    if str(directory) not in sys.path:
        sys.path.append(str(directory))
    importlib.invalidate_caches()


@pytest.fixture(params=["fake", *(pytest.param(name, marks=pytest.mark.netns) for name in DRIVERS)])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    if request.param == "fake":
        yield World(FakeKernel())
        return
    if request.param == LEGACY:
        request.getfixturevalue("python_iptables")
    request.getfixturevalue("netns")
    kernel = RealKernel(driver=request.param)
    made = World(kernel)
    try:
        yield made
    finally:
        made.close()
        kernel.close()


chained = pytest.mark.parametrize(
    "world",
    ["fake", *(pytest.param(name, marks=pytest.mark.netns) for name in (NFT, LEGACY))],
    indirect=True,
)
"""For tests about chains of iptables, which the driver without DOCKER-USER has none of."""
