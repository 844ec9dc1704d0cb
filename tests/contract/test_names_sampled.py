"""Both invariants of names on a kernel: read from outside, as fast as possible, while a name rotates."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from enforcer import service as service_module
from enforcer import tracker as tracker_module
from enforcer.config import Config, Timers
from enforcer.netfilter.fake import FakeKernel
from enforcer.netfilter.model import PROTOCOL_VERSION
from enforcer.netfilter.skeleton import PINS, Skeleton
from enforcer.netfilter.writer import Writer
from enforcer.pinmodel import Answer, Failure
from enforcer.service import Service
from enforcer.sessions import Owner
from enforcer.writerclient import WriterClient
from policy.errors import EnforcerError
from policy.identity import StatePaths
from tests.ipsetdump import Dump
from tests.unit.enforcer.servicebench import GATEWAY, SANDBOX, UID
from tests.unit.enforcer.servicebench import World as Bench

from .conftest import World, chained

NAME = "api.example.com"
POOL = tuple(f"93.184.216.{number}" for number in range(1, 60))
ROTATIONS, RESTARTS = 100, 4


class Client(WriterClient):
    """The writer in this process; one request at a time, as its server does it."""

    def __init__(self, writer: Writer) -> None:
        self._writer, self._one = writer, threading.Lock()

    def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._one:
            answer = self._writer.handle(UID, {"v": PROTOCOL_VERSION, **body})
        if not answer.get("ok"):
            raise EnforcerError(str(answer.get("error")))
        return answer


class Sampler(threading.Thread):
    """Hosts file, then kernel, then what was answered; begun in the namespace of the kernel."""

    def __init__(self, world: World, hosts: Path, answered: set[str]) -> None:
        super().__init__(daemon=True)
        self.world, self.hosts, self.answered = world, hosts, answered
        self.samples, self.rate, self.over = 0, 0.0, threading.Event()
        self.bad: list[Any] = []

    def run(self) -> None:
        kernel = self.world.kernel
        dump = None if isinstance(kernel, FakeKernel) else Dump(PINS)
        began = time.monotonic()
        while not self.over.is_set():
            lines = [line.split() for line in self.hosts.read_text().splitlines()]
            shown = {row[0] for row in lines if len(row) == 2 and row[1] == NAME and row[0] != "#"}
            if isinstance(kernel, FakeKernel):
                allowed = {element.dst for element in list(kernel.sets[PINS])}
            else:
                assert dump is not None
                allowed = {destination for _, destination in dump.pairs()}
            answered = set(self.answered)
            self.samples += 1
            if not shown or not shown <= allowed or not allowed <= answered:
                self.bad.append((shown - allowed, allowed - answered))
        self.rate = self.samples / (time.monotonic() - began)


# What reads beside the service reads ipset; the driver without DOCKER-USER has sets of nft.
@chained
def test_published_is_allowed_and_allowed_was_answered_through_rotations_and_restarts(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, answered, turn = Bench(tmp_path), set[str](), [0]
    monkeypatch.setattr(tracker_module, "host_addresses", lambda: ["127.0.0.1", GATEWAY])
    world.add_bridge(SANDBOX.bridge, f"{GATEWAY}/26")
    writer = Writer(world.kernel, Skeleton(), "test", sleep=lambda _s: None)
    writer.heal("the test's start")
    client = Client(writer)
    bench.container("c1", "00000001")
    sampler = Sampler(world, StatePaths(bench.data / SANDBOX.id).hosts("00000001"), answered)

    async def resolve(name: str) -> Answer | Failure:
        if name != NAME:
            return Failure(name, "nxdomain", "")
        turn[0] += 1
        found = tuple(POOL[(turn[0] + offset) % len(POOL)] for offset in range(3))
        answered.update(found)
        return Answer(name, found, 5, service_module.boot_clock())

    async def life(number: int) -> None:
        """One life of the service, ended without a word."""
        owner = Owner(UID, UID, bench.data, ipv6=True)
        config = Config(timers=Timers(reconcile=3600, renew=1500))
        made = Service(config, owner, client, lambda: bench.engine)  # type: ignore[arg-type,return-value]
        made.names._resolver.resolve = resolve  # type: ignore[method-assign]
        made.start(asyncio.get_running_loop())
        await made.tracker.connected(bench.engine)  # type: ignore[arg-type]
        await made.await_ready("c1", 20)
        if number == 0:
            sampler.start()
        for _ in range(ROTATIONS // RESTARTS):
            await made.changes.refresh(SANDBOX.id, [NAME])

    for number in range(RESTARTS):
        asyncio.run(asyncio.wait_for(life(number), 60))
    sampler.over.set()
    sampler.join()
    print(f"{sampler.samples} samples, {sampler.rate:.0f} a second, {len(sampler.bad)} violations")
    assert sampler.bad == []
    assert sampler.samples > ROTATIONS
    assert len(answered) == len(POOL)
