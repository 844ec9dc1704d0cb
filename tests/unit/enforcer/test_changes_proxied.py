"""Allowing, denying and checking what a sandbox's proxy may be asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from enforcer.overrides import Overrides, dump, parse
from policy.declaration import Declaration, Name, Pattern
from policy.errors import EnforcerError, NotReadyError

from .dialbench import ZONE, connected
from .servicebench import PIN, SANDBOX, World, ask, eventually, play

__all__ = ["play"]

REGEX = r"regex:(a|b)[0-9]+\.example\.org"
BOTH = Declaration(
    names=(Name(host="api.example.com"),),
    patterns=(Pattern(host="api.example.com"), Pattern(host="*.example.net")),
)


def made(world: World, declaration: Declaration = ZONE) -> None:
    world.container("c1", "00000001", declaration=declaration, running=True)
    world.path = world.proxy("p1", "0000000a")  # type: ignore[attr-defined]
    hosts = ("x.example.com", "y.example.com", "a1.example.org", "n.example.net", "new.example.com")
    world.answers |= dict.fromkeys(hosts, ("93.184.216.34",))


async def ready(world: World) -> None:
    for ident in ("c1", "p1"):
        await ask(world.client.await_ready, ident)


async def dial(world: World, name: str, port: int = 443) -> str:
    async with connected(world.path) as line:  # type: ignore[attr-defined]
        answer = await line.dial(name, port)
    return "ok" if answer["ok"] else str(answer["kind"])


async def check(world: World, name: str, port: int = 443) -> tuple[bool, str]:
    row = (await ask(world.client.check, SANDBOX.id, name, port))["sessions"]
    assert [one["container"] for one in row] == ["c1"]
    return row[0]["allowed"], row[0]["reason"]


def test_a_zone_and_an_expression_may_be_asked_for_once_they_are_allowed(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        await ready(world)
        for entry, name in (("*.Example.net", "n.example.net"), (REGEX, "a1.example.org")):
            assert await dial(world, name) == "denied"
            assert not (await check(world, name))[0]
            answer = await ask(world.client.allow, SANDBOX.id, entry, [443], None)
            assert [row["container"] for row in answer["sessions"]] == ["c1"]
            assert await dial(world, name) == "ok"
            assert await dial(world, name, 80) == "denied"
            assert (await check(world, name))[0]
            await ask(world.client.deny, SANDBOX.id, entry)
            assert await dial(world, name) == "denied"
            assert not world.writer.pins

    play(acts, made)


def test_in_mode_proxy_a_name_is_not_pinned_and_not_asked_for_beforehand(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        await ready(world)
        answer = await ask(world.client.allow, SANDBOX.id, "later.example.org", [443, 8000], None)
        assert answer["sessions"][0]["addresses"] == []
        assert "later.example.org" not in world.hosts("00000001")
        assert not world.writer.pins
        assert await dial(world, "later.example.org") == "resolve"
        world.service.lookups._answers.clear()
        world.answers["later.example.org"] = ("93.184.216.34",)
        assert await dial(world, "later.example.org", 8000) == "ok"

    play(acts, made)


def test_with_pinned_names_a_name_is_pinned_and_may_be_asked_for(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        await ready(world)
        with pytest.raises(NotReadyError):
            await ask(world.client.allow, SANDBOX.id, "typo.example.com", [443], None)
        assert await dial(world, "typo.example.com") == "denied"
        await ask(world.client.allow, SANDBOX.id, "new.example.com", [443], None)
        assert PIN in world.writer.pins
        assert "93.184.216.34   new.example.com" in world.hosts("00000001")
        assert await dial(world, "new.example.com") == "ok"
        await ask(world.client.deny, SANDBOX.id, "api.example.com")
        assert await dial(world, "api.example.com") == "denied"

    play(acts, lambda world: made(world, BOTH))


def test_one_name_of_a_zone_can_be_taken_back_and_given_again(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        await ready(world)
        assert await dial(world, "x.example.com") == "ok"
        await ask(world.client.deny, SANDBOX.id, "X.example.com.")
        assert not world.writer.pins
        assert await dial(world, "x.example.com") == "denied"
        assert await dial(world, "y.example.com") == "ok"
        assert await check(world, "x.example.com") == (
            False,
            "corral deny took x.example.com back from session main 00000001",
        )
        # Another zone that means it does not bring it back, and nor does the same.
        await ask(world.client.allow, SANDBOX.id, "*.example.com", [443], None)
        assert await dial(world, "x.example.com") == "denied"
        await ask(world.client.allow, SANDBOX.id, "x.example.com", [443], None)
        assert await dial(world, "x.example.com") == "ok"
        with pytest.raises(EnforcerError, match=r"no running session of .* may reach z\.example\.org"):
            await ask(world.client.deny, SANDBOX.id, "z.example.org")

    play(acts, made)


def test_what_was_allowed_for_a_time_ends_with_its_connections(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        await ready(world)
        await ask(world.client.allow, SANDBOX.id, "*.example.net", [443], 1.5)
        assert await dial(world, "n.example.net") == "ok"
        assert all(left <= 2 + 5 for left in world.writer.lives.values())
        await eventually(lambda: not world.writer.pins)
        assert await dial(world, "n.example.net") == "denied"

    play(acts, made)


def test_what_was_changed_outlives_the_service(play: Callable[..., World]) -> None:
    async def first(world: World) -> None:
        await ready(world)
        await ask(world.client.allow, SANDBOX.id, "*.example.net", [443], None)
        await ask(world.client.deny, SANDBOX.id, "x.example.com")

    async def second(world: World) -> None:
        await ready(world)
        assert await dial(world, "n.example.net") == "ok"
        assert await dial(world, "x.example.com") == "denied"

    world = play(first, made)
    text = (world.data / "enforcer" / "sessions" / "c1.json").read_text()
    assert parse(text, 0.0, 0.0).patterns == {"*.example.net": {443: None}}
    # The same world, and a service that begins anew.
    world.engine.queue.queue.clear()
    play(second)


def test_what_stands_for_many_names_needs_somebody_who_is_asked(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        await ask(world.client.await_ready, "c1")
        with pytest.raises(EnforcerError, match="no running session has a proxy") as caught:
            await ask(world.client.allow, SANDBOX.id, "*.example.com", [443], None)
        assert "egress.allow" in str(caught.value.hint)
        for entry in ("*.com", "*.example.*", "regex:.*"):
            with pytest.raises(EnforcerError, match="cannot be allowed"):
                await ask(world.client.allow, SANDBOX.id, entry, [443], None)

    play(acts, lambda world: world.container("c1", "00000001"))


def test_a_check_says_when_the_proxy_is_what_is_missing(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        await ready(world)
        assert await check(world, "x.example.com") == (True, "through the proxy: *.example.com allows it")
        del world.engine.inspects["p1"]
        world.engine.send("die", "p1")
        await eventually(lambda: "p1" not in world.service.tracker.sessions)
        assert "proxy does not run" in (await check(world, "x.example.com"))[1]

    play(acts, made)


def test_a_file_of_before_patterns_is_read_and_written_as_it_was() -> None:
    old = (
        Overrides()
        .allow("c.example.com", (443,), None)
        .deny("a.example.com", Declaration(names=(Name(host="a.example.com"),)))
    )
    assert '"version": 1' in dump(old, 5.0, 100.0)
    assert "patterns" not in dump(old, 5.0, 100.0)
    assert parse(dump(old, 5.0, 100.0), 6.0, 101.0) == old


@pytest.mark.parametrize(
    "made",
    [Overrides().allow_asking("*.example.com", (443,), 20.0), Overrides().deny("*.example.com", ZONE)],
    ids=["allowed", "denied"],
)
def test_a_file_with_patterns_is_one_that_older_services_refuse(made: Overrides) -> None:
    text = dump(made, 5.0, 100.0)
    assert '"version": 2' in text
    assert parse(text, 5.0, 100.0) == made
    with pytest.raises(ValueError, match="damaged"):
        parse(text.replace("*.example.com", "*.com"), 5.0, 100.0)
