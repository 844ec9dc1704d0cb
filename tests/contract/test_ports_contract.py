"""Ports of sandboxes' bridges, once against the kernel in memory and once against the real one."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from enforcer.netfilter.kernel import RealKernel
from enforcer.netfilter.model import Element
from enforcer.netfilter.ports import ISOLATE, UP, Fix, judge
from enforcer.netfilter.server import RTNLGRP_LINK, Server, watch_socket
from enforcer.netfilter.skeleton import Skeleton
from enforcer.netfilter.writer import Writer

from .conftest import World

BRIDGE, SECOND, FOREIGN = "corral-0a0b0c0d", "corral-99999999", "br-app"


@pytest.fixture
def writer(world: World) -> Writer:
    world.add_bridge(BRIDGE, "192.0.2.1/26")
    world.add_bridge(FOREIGN, "192.0.2.129/26")
    return Writer(world.kernel, Skeleton(), "test", sleep=lambda _s: None)


def test_ports_are_read_with_their_bridge_state_and_namespace(world: World, writer: Writer) -> None:
    world.add_port("veth-a", BRIDGE, "one")
    world.add_port("veth-b", FOREIGN, "one")
    world.add_port("veth-c", FOREIGN, "two")
    a, b, c = (world.port(name) for name in ("veth-a", "veth-b", "veth-c"))
    assert (a.bridge, b.bridge, c.bridge) == (BRIDGE, FOREIGN, FOREIGN)
    assert not a.isolated
    assert a.up
    assert a.index < b.index < c.index
    assert a.netns == b.netns != c.netns
    assert None not in (a.netns, c.netns)
    world.change_port("veth-a", isolated=True, up=False)
    assert world.port("veth-a").isolated
    assert not world.port("veth-a").up


def test_a_sandboxs_port_is_isolated_and_a_foreign_one_is_not(world: World, writer: Writer) -> None:
    world.add_port("veth-a", BRIDGE, "one")
    world.add_port("veth-c", FOREIGN, "two")
    assert writer.guard() == ()
    assert world.port("veth-a").isolated
    assert not world.port("veth-c").isolated
    assert judge(world.kernel.ports()) == ()


def test_the_later_link_of_a_sandbox_is_put_down_and_the_port_stays_up(world: World, writer: Writer) -> None:
    world.add_port("veth-a", BRIDGE, "one")
    world.add_port("veth-b", FOREIGN, "one")
    assert writer.guard() == ()
    assert world.port("veth-a").up
    assert not world.port("veth-b").up


def test_a_foreign_container_keeps_its_own_link_and_loses_the_sandboxs(world: World, writer: Writer) -> None:
    world.add_port("veth-b", FOREIGN, "one")
    world.add_port("veth-a", BRIDGE, "one")
    assert writer.guard() == ()
    assert world.port("veth-b").up
    assert not world.port("veth-a").up
    assert world.port("veth-a").isolated
    world.delete_port("veth-b")
    assert writer.guard() == ()
    assert world.port("veth-a").up


def test_a_flag_taken_away_comes_back_and_is_told(
    world: World, writer: Writer, caplog: pytest.LogCaptureFixture
) -> None:
    world.add_port("veth-a", BRIDGE, "one")
    with caplog.at_level(logging.WARNING):
        writer.guard()
        assert caplog.messages == []
        world.change_port("veth-a", isolated=False)
        writer.guard()
    assert caplog.messages == [f"mended: port veth-a of {BRIDGE} is not isolated"]
    assert world.port("veth-a").isolated


def test_a_port_that_is_gone_by_now_is_no_error(world: World, writer: Writer) -> None:
    world.add_port("veth-a", BRIDGE, "one")
    port = world.port("veth-a")
    world.delete_port("veth-a")
    world.kernel.set_ports([Fix(port, ISOLATE, ""), Fix(port, UP, "")])
    assert writer.guard() == ()


def test_a_port_that_cannot_be_isolated_is_a_problem_and_takes_nothing_away(
    world: World, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.heal("the start")
    world.add_port("veth-a", BRIDGE, "one")
    pin = Element("192.0.2.2", "tcp", 443, "203.0.113.10")
    monkeypatch.setattr(world.kernel, "set_ports", lambda _fixes: None)
    body = {
        "v": 2,
        "op": "apply",
        "sandboxes": [{"bridge": BRIDGE, "subnet": "192.0.2.0/26", "gateway": "192.0.2.1"}],
        "pins": [[*pin.row(), ""]],
        "host": [],
    }
    for answer in (writer.handle(1000, body), writer.handle(1000, {"v": 2, "op": "read"})):
        assert ["port", f"port veth-a of {BRIDGE} is not isolated"] in answer["problems"]
        assert [row[:4] for row in answer["pins"]] == [pin.row()]
    assert answer["refused"] == []


@pytest.mark.netns
def test_a_running_writer_isolates_a_port_as_it_appears(netns: None, tmp_path: Path) -> None:
    kernel = RealKernel()
    world = World(kernel)
    world.add_bridge(BRIDGE, "192.0.2.1/26")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    links, rules = watch_socket(socket.NETLINK_ROUTE, RTNLGRP_LINK), watch_socket(12, 7)
    server = Server(Writer(kernel, Skeleton(), "test"), listener, rules, links)
    thread = threading.Thread(target=server.serve)
    own = World(RealKernel())
    try:
        thread.start()
        own.add_port("veth-a", BRIDGE, f"one{os.getpid()}")
        end = time.monotonic() + 10
        while not own.port("veth-a").isolated:
            assert time.monotonic() < end, "the port was not isolated"
        own.change_port("veth-a", isolated=False)
        while not own.port("veth-a").isolated:
            assert time.monotonic() < end, "the flag did not come back"
    finally:
        server.stop()
        own.change_port("veth-a", up=False)
        thread.join(40)
        own.close()
        own.kernel.close()
        kernel.close()
        for sock in (listener, links, rules):
            sock.close()
