"""The kernel in two forms: in memory, and the real one in a network namespace made for the test."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Interface

import pytest

from enforcer.netfilter.claims import Link
from enforcer.netfilter.fake import FakeKernel
from enforcer.netfilter.kernel import RealKernel
from tests.lab import machine
from tests.lab.execute import Steps

CLONE_NEWNET = 0x40000000
libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class World:
    """A kernel and what stands outside corral: interfaces and foreign rules."""

    kernel: FakeKernel | RealKernel

    @property
    def real(self) -> bool:
        return isinstance(self.kernel, RealKernel)

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

    def foreign_rule(self, chain: str, rule: str) -> None:
        """Append a rule that is not ours to a chain of the filter table."""
        if isinstance(self.kernel, FakeKernel):
            self.kernel.tables[(4, "filter")].setdefault(chain, []).append(rule)
        else:
            subprocess.run(["iptables-nft", "-N", chain], capture_output=True, check=False)
            sh(f"iptables-nft -A {chain} {rule}")

    def flush(self, chain: str) -> None:
        if isinstance(self.kernel, FakeKernel):
            self.kernel.tables[(4, "filter")][chain].clear()
        else:
            sh(f"iptables-nft -F {chain}")

    def insert_first(self, chain: str, rule: str) -> None:
        if isinstance(self.kernel, FakeKernel):
            self.kernel.tables[(4, "filter")][chain].insert(0, rule)
        else:
            sh(f"iptables-nft -I {chain} 1 {rule}")

    def drop_table(self) -> None:
        if isinstance(self.kernel, FakeKernel):
            self.kernel.backstop = None
        else:
            sh("nft delete table inet corral")

    def rules(self, chain: str) -> list[str]:
        return list(self.kernel.observe().tables[(4, "filter")].get(chain, []))


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


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.netns)])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    if request.param == "fake":
        yield World(FakeKernel())
        return
    request.getfixturevalue("netns")
    kernel = RealKernel()
    try:
        yield World(kernel)
    finally:
        kernel.close()
