"""Open sessions and others in one service: what it asks the writer for, and whom it calls ready."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dns.message
import dns.rcode
import pytest

from enforcer import gatewaydns
from enforcer.netfilter import opening
from enforcer.writerclient import Opened
from policy.container import RESOLVER_PORT
from policy.declaration import Declaration, HostService, Name, Pattern
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


ANSWERED = Declaration(
    dns="answer",
    names=(Name(host="api.example.com"),),
    patterns=(Pattern(host="api.example.com"), Pattern(host="*.example.org", ports=(443, 8443))),
)


async def says(world: World, name: str, source: str = ONE) -> tuple[str, list[str]]:
    """Return what the service answers to a question, wherever it would have arrived."""
    said = world.service.open._decide(source, dns.message.make_query(name, "A"))
    reply = said if isinstance(said, gatewaydns.Reply) else await said
    return dns.rcode.to_text(reply.code), list(reply.addresses)


def test_an_answered_session_may_ask_and_what_it_is_told_is_open_for_it_alone(
    play: Callable[..., World],
) -> None:
    async def acts(world: World) -> None:
        world.answers["db.example.org"] = ("93.184.216.40",)
        world.container("a", "0000000a", ONE, declaration=ANSWERED)
        world.container("b", "0000000b", TWO)
        for ident in "ab":
            world.engine.send("create", ident)
        await eventually(lambda: {"a", "b"} <= set(world.service.shown))
        assert world.writer.open == ()
        assert {row for row in world.writer.host if row[2] in (RESOLVER_PORT, 53)} == {
            (ONE, proto, port, to)
            for proto in ("tcp", "udp")
            for port, to in ((RESOLVER_PORT, GATEWAY), (53, ONE))
        }
        assert await says(world, "evil.example.com") == ("NXDOMAIN", [])
        assert await says(world, "api.example.com") == ("NOERROR", ["93.184.216.34"])
        assert (ONE, "tcp", 8443, "93.184.216.40") not in world.writer.pins
        assert await says(world, "db.example.org") == ("NOERROR", ["93.184.216.40"])
        rows = {row for row in world.writer.pins if row[3] == "93.184.216.40"}
        assert rows == {(ONE, "tcp", port, "93.184.216.40") for port in (443, 8443)}
        # Whose address it is not, or who has no names by DNS, is told nothing.
        assert await says(world, "db.example.org", TWO) == ("SERVFAIL", [])
        assert await says(world, "db.example.org", "172.16.0.9") == ("SERVFAIL", [])
        await ask(world.client.deny, "demo-0a0b0c0d", "db.example.org")
        assert await says(world, "db.example.org") == ("NXDOMAIN", [])
        assert not {row for row in world.writer.pins if row[3] == "93.184.216.40"}
        told = world.service.denials.names.accounts["demo-0a0b0c0d"].rows.values()
        assert {(row.name, row.port, row.reason) for row in told} == {
            ("evil.example.com", 0, "denied"),
            ("db.example.org", 0, "denied"),
        }

    play(acts)


def test_an_answered_session_is_ready_when_somebody_answers_at_its_gateway(
    play: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    serves = [False]
    monkeypatch.setattr(gatewaydns.GatewayDns, "serves", lambda _self, _bridge: serves[0])

    async def acts(world: World) -> None:
        world.container("a", "0000000a", ONE, declaration=ANSWERED)
        world.engine.send("create", "a")
        await eventually(lambda: (ONE, "udp", RESOLVER_PORT, GATEWAY) in world.writer.host)
        await eventually(lambda: (ONE, "tcp", 443, "93.184.216.34") in world.writer.pins)
        assert "a" not in world.service.shown
        # What is in its hosts file is told meanwhile.
        assert await says(world, "api.example.com") == ("NOERROR", ["93.184.216.34"])
        serves[0] = True
        world.service._dirty.set()
        await eventually(lambda: "a" in world.service.shown)

    play(acts)
