"""A proxy asks the service for names, over a real socket: what it gets, what the kernel then holds, and when not."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Callable

import pytest

from policy.container import Mount
from policy.declaration import Declaration, Name, Pattern
from policy.errors import NotReadyError

from .dialbench import ZONE, connected
from .servicebench import GATEWAY, SANDBOX, World, ask, eventually, play

__all__ = ["play"]

PROXY = "172.16.0.9"
NAME = "a.example.com"
ROW = (PROXY, "tcp", 443, "93.184.216.34")


def proxied(
    world: World, ident: str = "c1", session: str = "00000001", address: str = "172.16.0.2", **words: object
) -> None:
    world.container(ident, session, address, words.pop("declaration", ZONE), **words)  # type: ignore[arg-type]
    world.answers[NAME] = ("93.184.216.34",)


async def ready(world: World) -> None:
    for ident in sorted(world.engine.inspects):
        await ask(world.client.await_ready, ident)


def test_a_name_that_a_pattern_means_is_opened_for_the_proxy_and_for_nobody_else(
    play: Callable[..., World],
) -> None:
    async def acts(world: World) -> None:
        proxied(world)
        path = world.proxy("p1", "0000000a")
        await ready(world)
        assert (await ask(world.client.await_ready, "c1"))["names"] == {}
        assert world.writer.pins == {}
        assert world.writer.host == {("172.16.0.2", "tcp", 8443, GATEWAY): f"{SANDBOX.id} main proxy"}
        assert f"{GATEWAY:<16}proxy" in world.hosts("00000001")
        assert f"{GATEWAY:<16}proxy" not in world.hosts("0000000a")
        async with connected(path) as line:
            assert await line.dial(NAME) == {
                "ok": True, "addresses": ["93.184.216.34"], "protocol": "tls", "sni": True,
            }  # fmt: skip
            assert world.writer.pins == {ROW: f"{SANDBOX.id} proxy {NAME}"}
            assert 0 < world.writer.lives[ROW] <= 60 + 300 + 900 + 5

    play(acts)


def test_the_socket_is_its_users_alone_and_comes_back_when_it_is_taken_away(
    play: Callable[..., World],
) -> None:
    async def acts(world: World) -> None:
        proxied(world)
        path = world.proxy("p1", "0000000a")
        await ready(world)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.unlink()
        await eventually(path.exists)
        async with connected(path) as line:
            assert (await line.dial(NAME))["ok"]
        del world.engine.inspects["p1"]
        world.engine.send("die", "p1")
        await eventually(lambda: not path.exists() and not world.writer.pins)

    play(acts)


def test_a_name_that_no_pattern_means_is_refused_before_anybody_is_asked(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        proxied(world)
        path = world.proxy("p1", "0000000a")
        await ready(world)
        world.gate.clear()
        async with connected(path) as line:
            for name, port in (
                ("example.com", 443),
                ("a.example.org", 443),
                (NAME, 80),
                ("x.a.example.com.evil.org", 443),
            ):
                answer = await line.dial(name, port)
                assert (answer["ok"], answer["kind"]) == (False, "denied"), (name, port)
        assert not world.writer.pins
        assert world.service.lookups._answers == {}

    play(acts)


def test_without_a_living_session_that_may_ask_nothing_is_opened(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001")
        world.answers[NAME] = ("93.184.216.35",)
        path = world.proxy("p1", "0000000a")
        await ready(world)
        async with connected(path) as line:
            assert (await line.dial("api.example.com"))["kind"] == "denied"

    play(acts)


def test_every_living_session_has_to_allow_what_their_proxy_is_asked_for(play: Callable[..., World]) -> None:
    narrow = Declaration(
        mode="proxy", patterns=(Pattern(host="b.example.com", ports=(443, 8443), protocol="tcp"),)
    )

    async def acts(world: World) -> None:
        proxied(world)
        world.container("c2", "00000002", "172.16.0.3", narrow)
        world.answers["b.example.com"] = ("93.184.216.35",)
        path = world.proxy("p1", "0000000a")
        await ready(world)
        told = await ask(world.client.await_ready, "c1")
        assert any("*.example.com" in text and "00000002" in text for text in told["warnings"])
        async with connected(path) as line:
            assert (await line.dial(NAME))["kind"] == "denied"
            assert (await line.dial("b.example.com", 8443))["kind"] == "denied"
            # Plain TCP only when all say so.
            found = await line.dial("b.example.com")
            assert (found["protocol"], found["sni"]) == ("tls", True)
            del world.engine.inspects["c1"]
            world.engine.send("die", "c1")
            await eventually(lambda: "c1" not in world.service.tracker.sessions)
            found = await line.dial("b.example.com")
            assert (found["protocol"], found["sni"]) == ("tcp", True)

    play(acts)


def test_an_address_that_vetting_refuses_is_not_opened_and_not_told(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        proxied(world)
        world.answers |= {NAME: ("10.0.0.1", GATEWAY), "b.example.com": ("127.0.0.1", "93.184.216.34")}
        path = world.proxy("p1", "0000000a")
        await ready(world)
        async with connected(path) as line:
            found = await line.dial(NAME)
            assert (found["kind"], "10.0.0.1 is private" in found["text"]) == ("denied", True)
            assert (await line.dial("b.example.com"))["addresses"] == ["93.184.216.34"]
            assert (await line.dial("c.example.com"))["kind"] == "resolve"
        assert set(world.writer.pins) == {ROW}

    play(acts)


def test_a_permission_that_ends_while_a_name_server_thinks_opens_nothing(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        proxied(world)
        path = world.proxy("p1", "0000000a")
        await ready(world)
        world.gate.clear()
        async with connected(path) as line:
            waiting = asyncio.create_task(line.dial(NAME))
            await eventually(lambda: world.service.lookups._asking)
            await ask(world.client.deny, SANDBOX.id, NAME)
            world.gate.set()
            assert (await waiting)["kind"] == "denied"
        assert not any(ROW in pins for pins in world.writer.applies)

    play(acts)


def test_a_proxy_that_goes_while_a_name_server_thinks_gets_nothing(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        proxied(world)
        path = world.proxy("p1", "0000000a")
        await ready(world)
        world.gate.clear()
        async with connected(path) as line:
            waiting = asyncio.create_task(line.reader.read())
            line.send(b'{"v":1,"op":"dial","name":"a.example.com","port":443}\n')
            await eventually(lambda: world.service.lookups._asking)
            del world.engine.inspects["p1"]
            world.engine.send("die", "p1")
            await eventually(lambda: "p1" not in world.service.tracker.sessions)
            world.gate.set()
            assert await waiting == b""
        await eventually(lambda: not world.service._dirty.is_set())
        assert not any(ROW in pins for pins in world.writer.applies)

    play(acts)


def test_a_revocation_takes_what_is_open_at_once(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        proxied(world)
        path = world.proxy("p1", "0000000a")
        await ready(world)
        async with connected(path) as line:
            assert (await line.dial(NAME))["ok"]
            await ask(world.client.deny, SANDBOX.id, "*.example.com")
            assert world.writer.pins == {}
            assert (await line.dial(NAME))["kind"] == "denied"

    play(acts)


def test_a_writer_that_fails_is_no_answer_that_opens(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        proxied(world)
        path = world.proxy("p1", "0000000a")
        await ready(world)
        async with connected(path) as line:
            world.writer.broken = True
            waiting = asyncio.create_task(line.dial(NAME))
            await eventually(lambda: "writer" in world.service.errors)
            assert not waiting.done()
            world.writer.broken = False
            assert (await waiting)["ok"]
            assert set(world.writer.pins) == {ROW}

    play(acts)


@pytest.mark.parametrize("name", [NAME, "gone.example.org"])
def test_a_restart_keeps_what_was_opened_for_names_that_are_allowed(
    play: Callable[..., World], name: str
) -> None:
    def before(world: World) -> None:
        proxied(world)
        world.proxy("p1", "0000000a")
        private = (PROXY, "tcp", 443, "10.0.0.1")
        world.writer.pins = {ROW: f"{SANDBOX.id} proxy {name}", private: f"{SANDBOX.id} proxy {name}"}
        # A restart knows without a name server what may stay.
        world.gate.clear()

    async def acts(world: World) -> None:
        await ask(world.client.await_ready, "p1")
        assert set(world.writer.pins) == ({ROW} if name == NAME else set())
        assert all((ROW in pins) == (name == NAME) for pins in world.writer.applies)

    play(acts, before)


def test_what_is_open_already_is_told_without_another_write(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        proxied(world)
        path = world.proxy("p1", "0000000a")
        await ready(world)
        async with connected(path) as line:
            await line.dial(NAME)
            await eventually(lambda: not world.service._dirty.is_set())
            before = len(world.writer.applies)
            for _ in range(20):
                assert (await line.dial(NAME))["ok"]
            assert len(world.writer.applies) == before

    play(acts)


@pytest.mark.parametrize(
    "line",
    [
        b"", b"x", b"[]", b"1", b'"dial"', b"null", b"{}", b"[" * 3000, b"\xff\xfe", '{"v":1,"op":"dial","name":"\u00e9","port":443}'.encode(),
        b'{"v":2,"op":"dial","name":"a.example.com","port":443}',
        b'{"v":true,"op":"dial","name":"a.example.com","port":443}',
        b'{"v":1,"op":"open","name":"a.example.com","port":443}',
        b'{"v":1,"op":["dial"],"name":"a.example.com","port":443}',
        b'{"v":1,"op":"dial","name":"a.example.com"}',
        b'{"v":1,"op":"dial","name":"a.example.com","port":443,"sandbox":"x"}',
        b'{"v":1,"op":"dial","name":"a.example.com","port":true}',
        b'{"v":1,"op":"dial","name":"a.example.com","port":0}',
        b'{"v":1,"op":"dial","name":"a.example.com","port":65536}',
        b'{"v":1,"op":"dial","name":"a.example.com","port":"443"}',
        b'{"v":1,"op":"dial","name":"93.184.216.34","port":443}',
        b'{"v":1,"op":"dial","name":"0x7f.1","port":443}',
        b'{"v":1,"op":"dial","name":"a..example.com","port":443}',
        b'{"v":1,"op":"dial","name":"a.example.com@evil","port":443}',
        b'{"v":1,"op":"dial","name":"","port":443}',
        b'{"v":1,"op":"dial","name":null,"port":443}',
        b'{"v":1,"op":"dial","name":{},"port":443}',
        b'{"v":1,"op":"refused","name":"a.example.com","port":443,"reason":"boredom"}',
        b'{"v":1,"op":"refused","name":"a.example.com","port":443,"reason":null}',
    ],
)  # fmt: skip
def test_anything_else_is_malformed_and_the_line_goes_on(play: Callable[..., World], line: bytes) -> None:
    async def acts(world: World) -> None:
        proxied(world)
        path = world.proxy("p1", "0000000a")
        await ready(world)
        async with connected(path) as talk:
            talk.send(line + b"\n")
            assert (await talk.answer())["kind"] == "malformed"
            assert (await talk.dial("A.Example.COM."))["ok"]

    play(acts)


def test_a_line_that_does_not_end_is_cut_off(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        proxied(world)
        path = world.proxy("p1", "0000000a")
        await ready(world)
        async with connected(path) as talk:
            talk.send(b"a" * 5000)
            assert (await talk.answer())["kind"] == "malformed"
            assert await talk.reader.read() == b""

    play(acts)


@pytest.mark.parametrize(
    "words",
    [
        {"declaration": Declaration(names=(Name(host="api.example.com"),))},
        {"declaration": ZONE},
        {"declaration": Declaration(mode="open")},
        {"purpose": "run"},
        {"mounts": ()},
        {"mounts": (Mount("/elsewhere", "/corral-dial", read_only=True),)},
    ],
    ids=str,
)
def test_a_proxy_that_differs_gets_nothing_and_no_socket(
    play: Callable[..., World], words: dict[str, object]
) -> None:
    async def acts(world: World) -> None:
        proxied(world)
        path = world.proxy("p1", "0000000a", **words)
        with pytest.raises(NotReadyError):
            await ask(world.client.await_ready, "p1")
        await ask(world.client.await_ready, "c1")
        assert not path.exists()

    play(acts)


@pytest.mark.parametrize(
    "where",
    [
        "",
        SANDBOX.id,
        f"{SANDBOX.id}/proxy",
        f"{SANDBOX.id}/proxy/dial.sock",
        "other-0a0b0c0d/proxy",
        f"{SANDBOX.id}/home/../proxy",
    ],
)
def test_no_session_may_mount_a_proxys_socket(play: Callable[..., World], where: str) -> None:
    async def acts(world: World) -> None:
        proxied(world, mounts=(Mount(f"{world.data}/{where}".rstrip("/"), "/work"),))
        with pytest.raises(NotReadyError, match="socket of a sandbox's proxy"):
            await ask(world.client.await_ready, "c1")

    play(acts)


def test_a_session_may_mount_what_else_corral_keeps_for_it(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        proxied(world, mounts=(Mount(f"{world.data}/{SANDBOX.id}/home/.config", "/home/agent/.config"),))
        await ask(world.client.await_ready, "c1")

    play(acts)


def test_the_status_tells_what_is_open_on_demand_and_for_which_names(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        proxied(world)
        path = world.proxy("p1", "0000000a")
        await ready(world)
        async with connected(path) as line:
            assert (await line.dial(NAME))["ok"]
            (box,) = (await ask(world.client.status))["sandboxes"]
            opened = {row["service"]: row["opened"] for row in box["sessions"]}
            assert opened == {
                "main": [], "proxy": [{"address": "93.184.216.34", "port": 443, "names": [NAME]}],
            }  # fmt: skip

    play(acts)


def test_what_verify_starts_takes_nothing_from_the_others_and_asks_where_it_is_alone(
    play: Callable[..., World],
) -> None:
    other = Declaration(patterns=(Pattern(host="*.example.org"),))

    async def acts(world: World) -> None:
        proxied(world)
        path = world.proxy("p1", "0000000a")
        await ready(world)
        async with connected(path) as line:
            assert (await line.dial(NAME))["ok"]
            proxied(world, "c2", "00000002", "172.16.0.3", declaration=other, purpose="verify")
            await ask(world.client.await_ready, "c2")
            # Also what is open stays so.
            assert ROW in world.writer.pins
            assert (await line.dial(NAME))["ok"]
            assert (await line.dial("a.example.org"))["kind"] == "denied"
            del world.engine.inspects["c1"]
            world.engine.send("die", "c1")
            await eventually(lambda: ROW not in world.writer.pins)
            assert (await line.dial(NAME))["kind"] == "denied"
            world.answers["a.example.org"] = ("93.184.216.34",)
            assert (await line.dial("a.example.org"))["ok"]

    play(acts)
