"""Names while the world around them changes: time that went by unseen, resolvers, interfaces, routes."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from enforcer import tracker as tracker_module
from enforcer.config import Config, Dns
from enforcer.host import parse_routes, watch_network
from enforcer.journal import FIELDS
from enforcer.names import RESUMED, Names
from enforcer.pinmodel import Answer, Failure, NameState
from enforcer.pins import Subscribe, Tick, Wish
from enforcer.resolver import Server

from .servicebench import PIN, World, ask, eventually, play

__all__ = ["play"]
A, B = "93.184.216.34", "93.184.216.35"


class Resolving:
    """Records what is asked; answers come when the test says so."""

    def __init__(self, servers: tuple[Server, ...]) -> None:
        self.servers = servers
        self.asked: list[str] = []

    async def resolve(self, name: str) -> Answer | Failure:
        self.asked.append(name)
        return Answer(name, (A,), 300, 0.0)


class Bench:
    """One ``Names`` with a clock that the test moves and coroutines that the test runs."""

    def __init__(self, tmp_path: Path, servers: tuple[str, ...] = ("192.0.2.53",)) -> None:
        self.now = 1000.0
        self.work: list[Coroutine[Any, Any, None]] = []
        self.resolv_conf = tmp_path / "resolv.conf"
        self.resolv_conf.write_text("nameserver 192.0.2.53\n")
        self.resolving = Resolving(())

        def make(found: tuple[Server, ...], _clock: object) -> Any:
            self.resolving.servers = found
            return self.resolving

        async def heard() -> None:
            pass

        self.names = Names(
            Config(dns=Dns(servers=servers)), tmp_path / "pins.json", self.resolv_conf, lambda: self.now, lambda: 1e9,
            spawn=self.work.append, moved=lambda: None, heard=heard, make_resolver=make,
        )  # fmt: skip

    async def run(self) -> None:
        while self.work:
            await self.work.pop(0)

    async def settled(self, *names: str) -> None:
        self.names.step(Subscribe("box", "172.16.0.2", tuple(Wish(name) for name in names)))
        await self.run()
        self.resolving.asked.clear()


def test_after_a_gap_everything_is_asked_before_anything_expires(tmp_path: Path) -> None:
    async def acts() -> None:
        bench = Bench(tmp_path)
        await bench.settled("a.example", "b.example")
        bench.now += RESUMED + 1
        # Whatever comes first after the sleep, here not even a tick.
        bench.names.step(Subscribe("other", "172.16.0.3", ()))
        await bench.run()
        assert sorted(bench.resolving.asked) == ["a.example", "b.example"]

    asyncio.run(acts())


def test_a_day_asleep_takes_no_address_before_its_name_was_asked(tmp_path: Path) -> None:
    async def acts() -> None:
        bench = Bench(tmp_path)
        await bench.settled("a.example")
        bench.now += 86400
        bench.names.step(Tick())
        record = bench.names.state.names["a.example"]
        assert record.latest == (A,)
        assert record.inflight is not None
        await bench.run()
        assert bench.names.state.names["a.example"].state is NameState.OK

    asyncio.run(acts())


def test_without_a_gap_nothing_is_asked_early(tmp_path: Path) -> None:
    async def acts() -> None:
        bench = Bench(tmp_path)
        await bench.settled("a.example")
        for _ in range(5):
            bench.now += RESUMED - 1
            bench.names.step(Tick())
        await bench.run()
        assert bench.resolving.asked == []

    asyncio.run(acts())


def test_another_resolver_is_noticed_without_a_query_and_everything_is_asked_again(tmp_path: Path) -> None:
    async def acts() -> None:
        bench = Bench(tmp_path, servers=())
        await bench.settled("a.example")
        bench.names._watch_resolv_conf()
        new = bench.resolv_conf.with_suffix(".new")
        new.write_text("# the same server, another file\nnameserver 192.0.2.53\n")
        new.replace(bench.resolv_conf)
        bench.names._watch_resolv_conf()
        await asyncio.sleep(0)
        await bench.run()
        assert bench.resolving.asked == []
        new.write_text("nameserver 192.0.2.54\n")
        new.replace(bench.resolv_conf)
        task = asyncio.create_task(bench.names.tick_forever())
        await eventually(lambda: bench.work)
        task.cancel()
        await bench.run()
        assert bench.resolving.asked == ["a.example"]
        assert bench.resolving.servers == (Server("192.0.2.54"),)

    asyncio.run(acts())


def test_a_refused_answer_is_an_event_with_fields(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def acts() -> None:
        bench = Bench(tmp_path)
        bench.resolving.resolve = refused  # type: ignore[method-assign]
        await bench.settled("a.example")

    async def refused(name: str) -> Answer | Failure:
        return Answer(name, ("169.254.169.254",), 300, 0.0)

    with caplog.at_level(logging.INFO, "corral.enforcer"):
        asyncio.run(acts())
    (fields,) = [getattr(record, FIELDS) for record in caplog.records if hasattr(record, FIELDS)]
    assert fields == {
        "CORRAL_EVENT": "refused",
        "CORRAL_NAME": "a.example",
        "CORRAL_DETAIL": "169.254.169.254 is link-local/metadata (169.254.0.0/16)",
        "CORRAL_ALARM": "1",
    }


ROUTES = (
    "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
    "eth0\t00000000\t010200C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
    "docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n"
    "corral-0a0b0c0d\t000010AC\t00000000\t0001\t0\t0\t0\tC0FFFFFF\t0\t0\t0\n"
)


def test_routes_of_containers_are_none_of_the_host_s_uplinks() -> None:
    assert parse_routes(ROUTES) == {("eth0", "00000000", "010200C0", "100", "00000000")}
    assert parse_routes("") == parse_routes("Iface\nodd line\n") == frozenset()


def test_an_address_that_became_the_host_s_own_is_revoked_at_once_also_without_docker(
    play: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001")
        await ask(world.client.await_ready, "c1")
        assert set(world.writer.pins) == {PIN}
        await world.service.tracker.lost("stopped")
        monkeypatch.setattr(tracker_module, "host_addresses", lambda: [A])
        await world.service.tracker.network_moved()
        await eventually(lambda: not world.writer.pins)
        assert f"{A} " not in world.hosts("00000001")
        assert world.service.names.state.names["api.example.com"].latest == ()

    play(acts)


def test_a_changed_route_asks_for_all_names_again(
    play: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001")
        await ask(world.client.await_ready, "c1")
        await world.service.tracker.network_moved()
        world.answers["api.example.com"] = (B,)
        await world.service.tracker.network_moved()
        assert {row[3] for row in world.writer.pins} == {A}
        monkeypatch.setattr(tracker_module, "host_uplinks", lambda: parse_routes(ROUTES))
        await world.service.tracker.network_moved()
        await eventually(lambda: {row[3] for row in world.writer.pins} == {A, B})

    monkeypatch.setattr(tracker_module, "host_uplinks", frozenset)
    play(acts)


def test_several_messages_of_the_kernel_are_one_change() -> None:
    ours, kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    moves: list[None] = []

    async def acts() -> None:
        stop = watch_network(asyncio.get_running_loop(), lambda: moves.append(None), lambda: ours)
        for _ in range(3):
            kernel.send(b"x")
        await eventually(lambda: moves)
        assert moves == [None]
        kernel.send(b"x")
        await eventually(lambda: len(moves) == 2)
        stop()

    asyncio.run(acts())
    kernel.close()
