"""Open sessions and others in one service: what it asks the writer for, and whom it calls ready."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from enforcer import gatewaydns
from enforcer.netfilter import opening
from enforcer.writerclient import Opened
from policy.container import RESOLVER_PORT
from policy.declaration import Declaration, HostService
from policy.errors import EnforcerError

from .servicebench import GATEWAY, World, ask, eventually, play

__all__ = ["play"]

OPEN = Declaration(mode="open", host_services=(HostService(name="llama", port=8081),))
ONE, TWO = "172.16.0.2", "172.16.0.3"


@pytest.fixture(autouse=True)
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    async def follow(self: gatewaydns.GatewayDns, places: Any) -> None:
        self._listeners = {place.bridge: place for place in places}  # type: ignore[misc]

    monkeypatch.setattr(gatewaydns.GatewayDns, "follow", follow)
    monkeypatch.setattr(gatewaydns.GatewayDns, "close", lambda _self: None)


def test_the_rules_and_the_service_mean_the_same_port() -> None:
    assert opening.RESOLVER_PORT == RESOLVER_PORT


def test_only_the_session_that_declares_it_is_open(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.container("a", "0000000a", ONE, declaration=OPEN)
        world.container("b", "0000000b", TWO)
        for ident in "ab":
            world.engine.send("create", ident)
        await eventually(lambda: {"a", "b"} <= set(world.service.shown))
        assert [row.src for row in world.writer.open] == [ONE]
        dns = {(ONE, proto, RESOLVER_PORT, GATEWAY) for proto in ("tcp", "udp")}
        led = {(ONE, proto, 53, ONE) for proto in ("tcp", "udp")}
        assert {row for row in world.writer.host if row[2] in (RESOLVER_PORT, 53)} == dns | led
        assert not [row for row in world.writer.pins if row[0] == ONE]
        (box,) = (await ask(world.client.status))["sandboxes"]
        status = box["sessions"]
        assert {row["address"]: row["mode"] for row in status} == {ONE: "open", TWO: "allowlist"}
        with pytest.raises(EnforcerError, match=r"egress\.mode is open"):
            await ask(world.client.allow, "demo-0a0b0c0d", "other.example.com", [443], None)
        with pytest.raises(EnforcerError, match=r"egress\.mode is open"):
            await ask(world.client.deny, "demo-0a0b0c0d", "api.example.com")
        # Beside it, what can be closed was closed.
        assert not [row for row in world.writer.pins if row[0] == TWO]
        world.engine.inspects.pop("a")
        world.engine.send("die", "a")
        await eventually(lambda: world.writer.open == ())
        assert not [row for row in world.writer.host if row[0] == ONE]

    play(acts)


def test_a_session_with_names_that_the_kernel_has_as_open_is_not_ready(
    play: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def acts(world: World) -> None:
        applied, stale = world.writer.apply, [True]

        def apply(*words: Any) -> Any:
            held = applied(*words)
            if stale[0]:
                # What the kernel holds is not what was asked for.
                world.writer.open = (Opened(TWO, 3600, 0, "of somebody before"),)
            return world.writer._held() if stale[0] else held

        monkeypatch.setattr(world.writer, "apply", apply)
        world.container("b", "0000000b", TWO)
        world.engine.send("create", "b")
        await eventually(lambda: world.writer.applies and world.service.held is not None)
        await eventually(lambda: any(row[0] == TWO for row in world.writer.pins))
        assert "b" not in world.service.shown
        stale[0] = False
        world.service._dirty.set()
        await eventually(lambda: "b" in world.service.shown)
        assert world.writer.open == ()

    play(acts)


def test_an_open_session_is_ready_when_the_kernel_has_it_and_names_are_answered(
    play: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    serves = [False]
    monkeypatch.setattr(gatewaydns.GatewayDns, "serves", lambda _self, _bridge: serves[0])

    async def acts(world: World) -> None:
        world.container("a", "0000000a", ONE, declaration=OPEN)
        world.engine.send("create", "a")
        await eventually(lambda: world.writer.open != ())
        assert "a" not in world.service.shown
        serves[0] = True
        world.service._dirty.set()
        await eventually(lambda: "a" in world.service.shown)

    play(acts)


@pytest.mark.parametrize("change", [{"Dns": ["127.0.0.1"]}, {"Dns": ["9.9.9.9"]}, {"CapAdd": ["NET_RAW"]}])
def test_an_open_session_of_another_shape_is_not_open(
    play: Callable[..., World], change: dict[str, Any]
) -> None:
    async def acts(world: World) -> None:
        world.container("a", "0000000a", ONE, declaration=OPEN, **change)
        world.container("b", "0000000b", TWO)
        for ident in "ab":
            world.engine.send("create", ident)
        await eventually(lambda: "b" in world.service.shown)
        assert world.writer.open == ()
        assert "a" not in world.service.shown

    play(acts)


def test_the_resolver_of_an_open_session_is_no_other_s(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.container("b", "0000000b", TWO, Dns=[GATEWAY])
        world.container("a", "0000000a", ONE)
        for ident in "ab":
            world.engine.send("create", ident)
        await eventually(lambda: "a" in world.service.shown)
        assert "b" not in world.service.shown
        assert world.writer.open == ()

    play(acts)
