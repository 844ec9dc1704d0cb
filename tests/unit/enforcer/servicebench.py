"""The service between doubles: an engine, a writer, a resolver; and what tests of it wait with."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from enforcer import service as service_module
from enforcer import tracker as tracker_module
from enforcer.client import Client
from enforcer.config import Config, Timers
from enforcer.pinmodel import Answer, Failure
from enforcer.service import Service
from enforcer.sessions import MASKED, Owner
from enforcer.writerclient import Entry, Held, Opened
from policy import holding, proxying
from policy.container import Mount, SessionSpec, create_body, network_body
from policy.declaration import Declaration, HostService, Name
from policy.errors import EnforcerError, EngineError
from policy.identity import Sandbox, StatePaths

UID = 1000
SANDBOX = Sandbox("demo-0a0b0c0d")
GATEWAY, SUBNET = "172.16.0.1", "172.16.0.0/26"
DECLARATION = Declaration(
    names=(Name(host="api.example.com"), Name(host="maybe.example.com", optional=True)),
    host_services=(HostService(name="llama", port=8081),),
)


class FakeWriter:
    """A writer whose kernel is a dictionary."""

    def __init__(self) -> None:
        self.pins: dict[tuple[Any, ...], str] = {}
        self.host: dict[tuple[Any, ...], str] = {}
        self.applies: list[dict[tuple[Any, ...], str]] = []
        self.lives: dict[tuple[Any, ...], int] = {}
        self.open: tuple[Opened, ...] = ()
        self.broken = False
        self.problems: tuple[tuple[str, str], ...] = ()
        self.refused: tuple[str, ...] = ()
        self.refuses: set[str] = set()  # addresses
        self.packets = 0
        self.asked: list[tuple[Any, ...]] = []

    def _held(self) -> Held:
        pins = tuple(Entry(*row, 3600, self.packets, text) for row, text in self.pins.items())
        host = tuple(Entry(*row, 3600, 0, text) for row, text in self.host.items())
        return Held("test", pins, host, {}, self.problems, self.refused, open=self.open)

    def hello(self) -> dict[str, Any]:
        return {"version": "test", "skeleton": "x"}

    def read(self) -> Held:
        if self.broken:
            raise EnforcerError("the writer does not answer")
        return self._held()

    def denied(self, epoch: str, after: int, sources: Any, tallies: bool) -> dict[str, Any]:
        if self.broken:
            raise EnforcerError("the writer does not answer")
        self.asked.append((epoch, after, tuple(sources), tallies))
        return {"epoch": "one", "next": 0, "lost": 0, "records": [], "totals": {}, "problem": ""}

    def apply(
        self,
        _boxes: Any,
        pins: list[list[Any]],
        host: list[list[Any]],
        lives: list[list[Any]],
        opened: Any = (),
    ) -> Held:
        self.lives = {tuple(row[:4]): row[4] for row in lives}
        if self.broken:
            raise EnforcerError("the writer does not answer")
        self.pins = {tuple(row[:4]): row[4] for row in pins if row[3] not in self.refuses}
        self.host = {tuple(row[:4]): row[4] for row in host}
        self.open = tuple(Opened(source, 3600, 0, text) for source, text in opened)
        self.applies.append(dict(self.pins))
        return self._held()


class FakeEngine:
    """A Docker that holds inspects and sends what it is told to."""

    version = "26.1.5"

    def __init__(self) -> None:
        self.inspects: dict[str, dict[str, Any]] = {}
        self.queue: queue.Queue[Mapping[str, Any] | None] = queue.Queue()
        self.disconnected: list[tuple[str, str]] = []
        self.stopped: list[str] = []
        self.execs: dict[str, dict[str, Any]] = {}
        self.broken: set[str] = set()
        self.listing = threading.Event()
        self.listing.set()

    def identifiers(self, uid: int) -> list[str]:
        assert uid == UID
        assert self.listing.wait(10)
        return list(self.inspects)

    def container(self, ident: str) -> dict[str, Any] | None:
        if ident in self.broken:
            raise EngineError("Docker: no answer for this container")
        return self.inspects.get(ident)

    def networks(self) -> list[dict[str, Any]]:
        body = network_body(SANDBOX, UID, SUBNET, GATEWAY, "172.16.0.48/28")
        docker0 = {
            "Name": "bridge",
            "Labels": {},
            "Options": {},
            "IPAM": {"Config": [{"Subnet": "172.17.0.0/16"}]},
        }
        return [body, docker0]

    def network(self, ident: str) -> dict[str, Any] | None:
        return {"Containers": {}}

    def disconnect(self, network: str, ident: str) -> None:
        self.disconnected.append((network, ident))
        self.inspects[ident]["NetworkSettings"]["Networks"].pop(network, None)

    def stop(self, ident: str) -> None:
        self.stopped.append(ident)

    def start(self, ident: str) -> None:
        self.inspects[ident]["State"] |= {"Status": "running", "Running": True}
        self.send("start", ident)

    def ended(self, uid: int, *, or_created: bool = False) -> list[str]:
        assert uid == UID
        wanted = ("exited", "dead", *(("created",) if or_created else ()))
        return [i for i, row in self.inspects.items() if row["State"]["Status"] in wanted]

    def remove(self, ident: str) -> None:
        del self.inspects[ident]
        self.send("destroy", ident)

    def joiners(self) -> list[str]:
        return [
            ident
            for ident, row in self.inspects.items()
            if str(row["HostConfig"]["NetworkMode"]).startswith("container:")
        ]

    def exec(self, ident: str) -> dict[str, Any] | None:
        return self.execs.get(ident)

    def subscribe(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.queue.get, None)

    def close(self) -> None:
        self.queue.put(None)

    def send(self, action: str, ident: str, ours: bool = True) -> None:
        attributes = {"io.corral.uid": str(UID)} if ours else {}
        self.queue.put(
            {"Type": "container", "Action": action, "Actor": {"ID": ident, "Attributes": attributes}}
        )


class World:
    """Everything around one service."""

    def __init__(self, tmp_path: Path) -> None:
        self.data = tmp_path / "data"
        self.socket = tmp_path / "run" / "enforcer.sock"
        self.engine, self.writer = FakeEngine(), FakeWriter()
        self.answers: dict[str, tuple[str, ...]] = {"api.example.com": ("198.18.0.1", "93.184.216.34")}
        self.service: Service
        self.gate = asyncio.Event()
        self.gate.set()
        self.locks: list[int] = []
        self.client = Client(self.socket, timeout=10)

    async def resolve(self, name: str) -> Answer | Failure:
        await self.gate.wait()
        if name in self.answers:
            return Answer(name, self.answers[name], 300, service_module.boot_clock())
        return Failure(name, "nxdomain", f"{name} does not exist")

    def container(
        self,
        ident: str,
        session: str,
        address: str = "172.16.0.2",
        declaration: Declaration = DECLARATION,
        *,
        service: str = "main",
        purpose: str = "run",
        mounts: tuple[Mount, ...] = (),
        running: bool = False,
        held: bool = True,
        **host_config: Any,
    ) -> None:
        """Add a session's container, and by ``held`` somebody who looks after it."""
        hosts = StatePaths(self.data / SANDBOX.id).hosts(session)
        hosts.parent.mkdir(parents=True)
        if held:
            self.locks.append(holding.take(hosts.parent))
        spec = SessionSpec(
            sandbox=SANDBOX, service=service, session=session, purpose=purpose, uid=UID, gid=UID, image="x",
            address=address, hosts_file=str(hosts), project="/p", workdir="/p", argv=("x",), declaration=declaration,
            gateway=GATEWAY, mounts=mounts,
        )  # fmt: skip
        body = create_body(spec)
        from enforcer.hostsfile import create, render

        names = [name.host for name in declaration.names]
        create(hosts, render(service, address, GATEWAY, names, proxied=declaration.proxied))
        self.engine.inspects[ident] = {
            "Id": ident,
            "Name": f"/{spec.container}",
            "State": {"Status": "running" if running else "created", "Running": running},
            "Config": {k: v for k, v in body.items() if k not in ("HostConfig", "NetworkingConfig")},
            "HostConfig": {
                **body["HostConfig"],
                "MaskedPaths": sorted(MASKED),
                "ReadonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
                **host_config,
            },
            "NetworkSettings": {
                "Networks": {
                    SANDBOX.network: {
                        "IPAMConfig": {"IPv4Address": address},
                        "IPAddress": address if running else "",
                    }
                }
            },
        }

    def proxy(self, ident: str, session: str, address: str = "172.16.0.9", **words: Any) -> Path:
        """Add the sandbox's proxy, running; return where its socket will be."""
        dial = StatePaths(self.data / SANDBOX.id).dial
        dial.mkdir(mode=0o700, parents=True, exist_ok=True)
        words = {
            "mounts": (Mount(str(dial), proxying.DIAL_TARGET, read_only=True),),
            "running": True,
            **words,
        }
        words = {
            "service": proxying.SERVICE,
            "purpose": proxying.PURPOSE,
            "declaration": Declaration(),
            **words,
        }
        self.container(ident, session, address, **words)
        return dial / proxying.DIAL_SOCKET

    def hosts(self, session: str) -> str:
        return StatePaths(self.data / SANDBOX.id).hosts(session).read_text()


Play = Callable[[World], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    world = World(tmp_path)
    monkeypatch.setattr(tracker_module, "host_addresses", lambda: ["127.0.0.1", GATEWAY])

    def run(acts: Play, before: Callable[[World], None] = lambda _world: None) -> World:
        before(world)

        async def main() -> None:
            owner = Owner(UID, UID, world.data, ipv6=True)
            config = Config(timers=Timers(reconcile=3600, renew=1500))
            made = Service(config, owner, world.writer, lambda: world.engine)  # type: ignore[arg-type]
            world.service = made
            made.names._resolver.resolve = world.resolve  # type: ignore[method-assign]
            stop = asyncio.Event()
            task = asyncio.create_task(made.run(world.socket, stop))
            while not world.socket.exists():
                await asyncio.sleep(0.01)
            try:
                await asyncio.wait_for(acts(world), 20)
            finally:
                stop.set()
                world.engine.listing.set()
                await asyncio.wait_for(task, 10)

        asyncio.run(main())
        return world

    yield run
    for lock in world.locks:
        os.close(lock)


def ask(function: Callable[..., Any], *words: Any) -> Awaitable[Any]:
    return asyncio.to_thread(function, *words)


async def eventually(condition: Callable[[], object]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("never became true")


PIN = ("172.16.0.2", "tcp", 443, "93.184.216.34")
