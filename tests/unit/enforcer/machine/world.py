"""One host: Docker, DNS, kernel, writer, files, and the service that joins them; killed and started at will."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from pathlib import Path, PosixPath
from typing import Any
from unittest.mock import patch

from enforcer import hostsfile
from enforcer import tracker as tracker_module
from enforcer.config import Config, Dns, Timers
from enforcer.netfilter.claims import Link
from enforcer.pinmodel import Answer, Failure
from enforcer.resolver import Server
from enforcer.service import Service
from enforcer.sessions import Owner
from policy.errors import CorralError
from tests.unit.enforcer.machine.docker import UID, Box, FakeDocker
from tests.unit.enforcer.machine.faults import Faults, ServiceKilled
from tests.unit.enforcer.machine.loop import VirtualLoop
from tests.unit.enforcer.machine.netfilter import InProcessClient, WatchedKernel, WriterProcess

BOXES = (Box(0), Box(1))
OTHER_UID = 2000
OTHER = {"bridge": "corral-00000009", "subnet": "172.16.9.0/26", "gateway": "172.16.9.1"}
OTHER_PIN = ["172.16.9.2", "tcp", 443, "203.0.113.99", "other main api.example"]
RECONCILE = 10.0
CONFIG = Config(
    permit_ranges=(IPv4Network("203.0.113.0/24"),),
    dns=Dns(servers=("192.0.2.53",)),
    timers=Timers(reconcile=RECONCILE, renew=300),
)


_parse = IPv4Address._ip_int_from_string.__func__  # type: ignore[attr-defined]


@lru_cache(maxsize=4096)
def _parsed(cls: type[IPv4Address], text: str) -> int:
    return int(_parse(cls, text))


@dataclass
class Zone:
    """What DNS says about one name: ``kind`` is ok or a kind of failure, after ``latency`` seconds."""

    kind: str = "ok"
    addresses: tuple[str, ...] = ()
    ttl: int = 60
    latency: float = 0.01


class TableResolver:
    """Answers from ``World.zones`` as they are when the answer arrives."""

    def __init__(self, world: World) -> None:
        self.servers: tuple[Server, ...] = ()
        self._world = world

    async def resolve(self, name: str) -> Answer | Failure:
        world = self._world
        await asyncio.sleep(world.zones.get(name, Zone()).latency)
        zone = world.zones.get(name, Zone("nxdomain"))
        kind = zone.kind
        try:
            world.faults.call("dns", name)
        except TimeoutError:
            kind = "timeout"
        if kind == "ok" and zone.addresses:
            return Answer(name, zone.addresses, zone.ttl, world.clock())
        return Failure(name, "empty" if kind == "ok" else kind, "")  # type: ignore[arg-type]


class _Os:
    """The ``os`` that the hosts files are written with: a write can find the disk full, or be the last."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def pwrite(self, descriptor: int, content: bytes, offset: int) -> int:
        self._faults.call("file", "hosts")
        self._faults.service_writes("before a hosts file")
        done = os.pwrite(descriptor, content, offset)
        self._faults.service_writes("after a hosts file")
        return done


def _disk_path(faults: Faults) -> type[Path]:
    class DiskPath(PosixPath):
        def write_text(self, data: str, *words: Any, **options: Any) -> int:
            faults.call("file", f"write {self.name}")
            faults.service_writes(f"before writing {self.name}")
            return super().write_text(data, *words, **options)

        def replace(self, target: Any) -> Any:
            faults.call("file", f"replace {self.name}")
            faults.service_writes(f"before replacing {self.name}")
            done = super().replace(target)
            faults.service_writes(f"after replacing {self.name}")
            return done

    return DiskPath


class _Unexpected(logging.Handler):
    """Collects what no state should lead to: exceptions that nobody had in mind."""

    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self._found.append(logging.Formatter().format(record))


@dataclass
class Start:
    """One ``corral run`` that waits for its container: what it was told."""

    ident: str
    answer: dict[str, Any] | None = None
    error: str | None = None


class World:
    """``heard`` is called with each result that the service waits for, ``ready`` when a session was told it may start."""

    def __init__(
        self,
        latency: float = 0.0,
        make_resolver: Callable[..., Any] | None = None,
        config: Config = CONFIG,
    ) -> None:
        self.loop = VirtualLoop(1000.0, latency)
        self.config = config
        self.slept = 0.0
        self.faults = Faults()
        base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.directory = tempfile.mkdtemp(prefix="corral-machine-", dir=base)
        data = _disk_path(self.faults)(self.directory)
        self.owner = Owner(UID, UID, data, ipv6=True)
        self.docker = FakeDocker(self.faults, data)
        self.zones: dict[str, Zone] = {}
        self.heard: Callable[[str, str, Zone, float], None] = lambda *_: None
        self.ready: Callable[[Start], None] = lambda _start: None
        self.starts: dict[str, Start] = {}
        self.service: Service | None = None
        self.ended: list[str] = []
        self.make_resolver = make_resolver or (lambda _servers, _clock: TableResolver(self))
        self._patches = [
            patch.object(hostsfile, "os", _Os(self.faults)),
            patch.object(tracker_module, "host_addresses", self._addresses),
            patch.object(tracker_module, "host_uplinks", frozenset),
            patch.object(tracker_module, "socket_sources", lambda _paths: frozenset()),
            # The same few addresses are parsed over and over: a sixth of the time.
            patch.object(IPv4Address, "_ip_int_from_string", classmethod(_parsed)),
        ]
        for one in self._patches:
            one.start()
        self._log, self._handler = logging.getLogger("corral"), _Unexpected(self.ended)
        self._before = (self._log.level, self._log.propagate)
        self._log.setLevel(logging.ERROR)
        self._log.propagate = False
        self._log.addHandler(self._handler)
        self.kernel = WatchedKernel(self.loop.time, self.faults)
        self.writer = WriterProcess(self.kernel, self.loop, self.faults)
        for box in BOXES:
            self.add_box(box)
        self._link(OTHER["bridge"], f"{OTHER['gateway']}/26")
        self.renew_other()
        self.foreign = self.kernel.foreign()

    def close(self) -> None:
        """Give everything back."""
        for one in self._patches:
            one.stop()
        self._log.removeHandler(self._handler)
        self._log.setLevel(self._before[0])
        self._log.propagate = self._before[1]
        self.loop.bury()
        shutil.rmtree(self.directory)

    # -- time

    def clock(self) -> float:
        """Seconds since boot, suspend included."""
        return self.loop.now + self.slept

    def run(self, seconds: float) -> None:
        """Let everything happen that happens within ``seconds``."""
        until = self.loop.now + seconds
        while True:
            try:
                self.loop.run_for(max(0.0, until - self.loop.now))
            except ServiceKilled:
                self._died()
            else:
                return

    def jump(self, seconds: float) -> None:
        """Let time pass in which no process could run."""
        self.loop.now += seconds

    def sleep(self, seconds: float) -> None:
        """Suspend the machine: kernel timers and the loop's clock stand still."""
        self.slept += seconds

    # -- the service

    def start_service(self) -> Service:
        """Start it from what the last one left on disk, and connect it to Docker when that is up."""
        assert self.service is None
        made = Service(
            self.config,
            self.owner,
            InProcessClient(self.writer, UID, self.faults),
            make_engine=lambda: self.docker,
            clock=self.clock,
            wall=lambda: 1e9 + self.clock(),
            make_resolver=self.make_resolver,
            end=lambda _code: self._unexpected(),
        )
        self.service = made
        step = made.names.step

        def hear(event: Any) -> None:
            # Only answers that are waited for: a discarded one is as good as none.
            result = getattr(event, "answer", None) or getattr(event, "failure", None)
            record = made.names.state.names.get(result.name) if result is not None else None
            if record is not None and record.inflight == event.token:
                if isinstance(result, Answer):
                    zone = Zone("ok", result.addresses, result.ttl)
                else:
                    zone = Zone(result.kind)
                self.heard(result.name, zone.kind, zone, self.clock())
            before = {name: known.attempts for name, known in made.names.state.names.items()}
            step(event)
            for name, known in made.names.state.names.items():
                given_up = known.attempts > before.get(name, known.attempts)
                if given_up and (result is None or name != result.name):
                    # The answer took longer than anybody waits for.
                    self.heard(name, "timeout", Zone("timeout"), self.clock())

        made.names.step = hear  # type: ignore[method-assign]
        made.start(self.loop)
        if self.docker.up:
            self.docker.events.clear()
            made.connected(self.docker)
        return made

    def kill_service(self) -> None:
        """kill -9, between two turns of its loop."""
        if self.service is not None:
            self._died()

    def _died(self) -> None:
        self.service = None
        self.loop.abandon()
        for start in list(self.starts.values()):
            if start.answer is None and start.error is None:
                start.error = "the enforcer broke off"
        self.on_killed()

    on_killed: Callable[[], None] = staticmethod(lambda: None)

    def _unexpected(self) -> None:
        self.ended.append("the service ended itself")

    def wait_ready(self, ident: str, timeout: float = 15.0) -> Start:
        """What ``corral run`` does after it created a container."""
        start = self.starts[ident] = Start(ident)
        service = self.service
        if service is None:
            start.error = "the enforcer is not running"
            return start

        async def wait() -> None:
            try:
                start.answer = await service.await_ready(ident, timeout)
            except CorralError as error:
                start.error = error.message
            else:
                self.ready(start)

        self.loop.create_task(wait())
        return start

    def deliver(self, events: list[Mapping[str, Any]] | None = None) -> None:
        """Hand events to the service in this order; None: all that are waiting, in theirs."""
        if events is None:
            events, self.docker.events = self.docker.events, []
        if self.service is not None and self.docker.up:
            for event in events:
                self.service.event(event)

    def lose_docker(self) -> None:
        """The daemon is gone and with it the stream and every event in it."""
        self.docker.up = False
        self.docker.events.clear()
        if self.service is not None:
            self.service.lost("the event stream ended")

    def find_docker(self) -> None:
        """The daemon answers again."""
        self.docker.up = True
        self.docker.events.clear()
        if self.service is not None:
            self.service.connected(self.docker)

    # -- the host

    def _addresses(self) -> list[str]:
        self.faults.call("engine", "addresses")
        return sorted(
            self.kernel.addresses | {str(a.ip) for k in self.kernel.interfaces for a in k.addresses}
        )

    def _link(self, name: str, address: str) -> None:
        index = 1 + max((link.index for link in self.kernel.interfaces), default=9)
        self.kernel.interfaces.append(Link(name, index, (IPv4Interface(address),)))

    def add_box(self, box: Box) -> None:
        """Create a sandbox's network, and with it its bridge."""
        self.docker.nets[box.sandbox.network] = box.network
        self._link(box.sandbox.bridge, f"{box.gateway}/26")
        self.docker.emit("create", "", network=True)
        self.writer.links_moved()

    def remove_box(self, box: Box) -> None:
        """Remove a sandbox's network, and with it its bridge."""
        self.docker.remove_network(box.sandbox.network)
        self.kernel.interfaces = [k for k in self.kernel.interfaces if k.name != box.sandbox.bridge]
        self.writer.links_moved()

    def renew_other(self) -> None:
        """What the service of another user does all the time."""
        if self.writer.writer is not None:
            body = {"v": 2, "op": "apply", "sandboxes": [OTHER], "pins": [OTHER_PIN], "host": []}
            try:
                self.writer.handle(OTHER_UID, body)
            except CorralError:
                return
