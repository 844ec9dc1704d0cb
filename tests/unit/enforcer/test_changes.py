"""Allowing, denying, refreshing and checking, over the service's socket."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from enforcer.pinmodel import Answer, Failure
from enforcer.sessions import Session
from policy.errors import EnforcerError, NotReadyError

from .servicebench import PIN, SANDBOX, World, ask, eventually, play

__all__ = ["play"]
NEW, ADDED = "new.example.com", ("172.16.0.2", "tcp", 443, "93.184.216.40")


def prepared(world: World) -> None:
    world.container("c1", "00000001")
    world.answers[NEW] = ("10.0.0.5", "93.184.216.40")


async def ready(world: World) -> None:
    await ask(world.client.await_ready, "c1")


def stored(world: World) -> list[str]:
    return sorted(path.name for path in (world.data / "enforcer" / "sessions").glob("*"))


def test_an_allowed_name_is_vetted_opened_and_published_before_the_answer(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        await ready(world)
        answer = await ask(world.client.allow, SANDBOX.id, "New.example.com.", [443, 8443], None)
        assert answer["host"] == NEW
        assert answer["sessions"][0]["addresses"] == ["93.184.216.40"]
        assert set(world.writer.pins) == {PIN, ADDED, (*ADDED[:2], 8443, ADDED[3])}
        assert f"93.184.216.40   {NEW}" in world.hosts("00000001")
        assert "10.0.0.5" not in world.hosts("00000001")
        session = (await ask(world.client.status))["sandboxes"][0]["sessions"][0]
        row = {row["name"]: row for row in session["names"]}[NEW]
        assert row["granted"] == {"443": None, "8443": None}
        assert stored(world) == ["c1.json"]

    play(acts, prepared)


def test_a_name_that_does_not_resolve_changes_nothing(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        await ready(world)
        with pytest.raises(NotReadyError, match=r"typo\.example\.com is not allowed.*does not exist"):
            await ask(world.client.allow, SANDBOX.id, "typo.example.com", [443], None)
        world.answers["inside.example.com"] = ("10.0.0.5",)
        with pytest.raises(NotReadyError, match=r"10\.0\.0\.5 is private"):
            await ask(world.client.allow, SANDBOX.id, "inside.example.com", [443], None)
        session = world.service.tracker.sessions["c1"]
        assert [name.host for name in session.names] == [name.host for name in session.declaration.names]
        assert set(world.writer.pins) == {PIN}

    play(acts, prepared)


@pytest.mark.parametrize(
    ("host", "ports", "seconds"),
    [
        ("192.0.2.1", [443], None),
        ("*.example.com", [443], None),
        ("localhost", [443], None),
        ("dns.google", [443], None),
        (NEW, [], None),
        (NEW, [53], None),
        (NEW, [70000], None),
        (NEW, [443], -1.0),
        (NEW, [443], 1e12),
    ],
)
def test_what_no_policy_may_open_is_refused_by_the_service_too(
    play: Callable[..., World], host: str, ports: list[int], seconds: float | None
) -> None:
    async def acts(world: World) -> None:
        await ready(world)
        with pytest.raises(EnforcerError):
            await ask(world.client.allow, SANDBOX.id, host, ports, seconds)
        assert set(world.writer.pins) == {PIN}
        assert stored(world) == []

    play(acts, prepared)


def test_nothing_is_allowed_where_nothing_runs(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        await ready(world)
        for call in (
            lambda: world.client.allow("other-0a0b0c0e", NEW, [443], None),
            lambda: world.client.deny("other-0a0b0c0e", NEW),
            lambda: world.client.refresh("other-0a0b0c0e"),
        ):
            with pytest.raises(EnforcerError, match="no session of other-0a0b0c0e is running"):
                await ask(call)

    play(acts, prepared)


def test_a_temporary_permission_ends_by_itself(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        await ready(world)
        await ask(world.client.allow, SANDBOX.id, NEW, [443], 1.0)
        assert ADDED in world.writer.pins
        await eventually(lambda: set(world.writer.pins) == {PIN})
        assert f"93.184.216.40   {NEW}" not in world.hosts("00000001")
        found = await ask(world.client.check, SANDBOX.id, NEW, 443)
        assert (found["sessions"][0]["allowed"], found["sessions"][0]["reason"]) == (
            False,
            "it was allowed for a time that is over, or taken back",
        )

    play(acts, prepared)


def test_a_denied_name_leaves_kernel_and_hosts_file_before_the_answer(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        await ready(world)
        await ask(world.client.deny, SANDBOX.id, "api.example.com")
        assert set(world.writer.pins) == set()
        assert "93.184.216.34" not in world.hosts("00000001")
        session = (await ask(world.client.status))["sandboxes"][0]["sessions"][0]
        assert session["withdrawn"] == ["api.example.com"]
        with pytest.raises(EnforcerError, match=r"no running session .* may reach api\.example\.com"):
            await ask(world.client.deny, SANDBOX.id, "api.example.com")
        await ask(world.client.allow, SANDBOX.id, "api.example.com", [443], None)
        assert set(world.writer.pins) == {PIN}

    play(acts, prepared)


def test_what_was_allowed_and_denied_outlives_the_service_and_goes_with_the_container(
    play: Callable[..., World],
) -> None:
    async def first(world: World) -> None:
        await ready(world)
        await ask(world.client.allow, SANDBOX.id, NEW, [443], 3600.0)
        await ask(world.client.deny, SANDBOX.id, "api.example.com")

    world = play(first, prepared)
    engine, writer = world.engine, world.writer
    assert set(writer.pins) == {ADDED}

    async def second(world: World) -> None:
        world.engine, world.writer = engine, writer
        await eventually(world.service.tracker.looked.is_set)
        await eventually(lambda: world.service.satisfied == {"c1"})
        assert set(writer.pins) == {ADDED}
        left = world.service.tracker.sessions["c1"].overrides.granted[NEW][443]
        assert left is not None
        assert 3500 < left - world.service._clock() <= 3600
        del engine.inspects["c1"]
        engine.send("destroy", "c1")
        await eventually(lambda: stored(world) == [])

    engine.queue = type(engine.queue)()

    def as_it_was(world: World) -> None:
        world.engine, world.writer = engine, writer
        world.answers[NEW] = ("93.184.216.40",)

    play(second, as_it_was)


def test_a_file_that_cannot_be_read_closes_its_container(play: Callable[..., World]) -> None:
    def before(world: World) -> None:
        prepared(world)
        directory = world.data / "enforcer" / "sessions"
        directory.mkdir(parents=True)
        (directory / "c1.json").write_text("{")

    async def acts(world: World) -> None:
        with pytest.raises(NotReadyError, match="what was allowed and denied in it cannot be read"):
            await ready(world)
        assert not world.writer.pins
        assert not world.writer.host

    play(acts, before)


def test_files_of_containers_that_went_unseen_are_swept(play: Callable[..., World]) -> None:
    def before(world: World) -> None:
        prepared(world)
        directory = world.data / "enforcer" / "sessions"
        directory.mkdir(parents=True)
        (directory / "gone.json").write_text("{}")

    async def acts(world: World) -> None:
        await ready(world)
        await eventually(lambda: stored(world) == [])

    play(acts, before)


def test_nothing_is_opened_that_cannot_be_kept_and_what_is_closed_stays_closed(
    play: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def acts(world: World) -> None:
        await ready(world)

        def full(*_words: Any) -> None:
            raise EnforcerError("cannot write: no space left")

        monkeypatch.setattr(world.service.tracker._store, "save", full)
        with pytest.raises(EnforcerError, match="no space left"):
            await ask(world.client.allow, SANDBOX.id, NEW, [443], None)
        assert set(world.writer.pins) == {PIN}
        with pytest.raises(EnforcerError, match="no space left"):
            await ask(world.client.deny, SANDBOX.id, "api.example.com")
        await eventually(lambda: not world.writer.pins)

    play(acts, prepared)


def test_refresh_brings_the_new_answer_before_it_returns(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        await ready(world)
        world.answers["api.example.com"] = ("93.184.216.35",)
        found = await ask(world.client.refresh, SANDBOX.id)
        rows = {row["name"]: row for row in found["names"]}
        assert rows["api.example.com"]["before"] == ["93.184.216.34"]
        assert rows["api.example.com"]["addresses"] == ["93.184.216.35"]
        assert rows["maybe.example.com"]["error"].startswith("nxdomain")
        assert (rows["maybe.example.com"]["optional"], rows["api.example.com"]["optional"]) == (True, False)
        assert "93.184.216.35   api.example.com" in world.hosts("00000001")
        # The old address stays allowed for flows that are open, and is not published.
        assert {row[3] for row in world.writer.pins} == {"93.184.216.34", "93.184.216.35"}
        assert world.engine.stopped == []

    play(acts, prepared)


def test_refresh_asks_for_the_named_ones_only(play: Callable[..., World]) -> None:
    asked: list[str] = []

    async def acts(world: World) -> None:
        await ready(world)
        resolve = world.service.names._resolver.resolve

        async def counting(name: str) -> Answer | Failure:
            asked.append(name)
            return await resolve(name)

        world.service.names._resolver.resolve = counting  # type: ignore[method-assign]
        await ask(world.client.refresh, SANDBOX.id, ["api.example.com"])
        assert asked == ["api.example.com"]
        with pytest.raises(EnforcerError, match=r"may reach other\.example\.com"):
            await ask(world.client.refresh, None, ["other.example.com"])

    play(acts, prepared)


@pytest.mark.parametrize(
    ("host", "port", "allowed", "reason"),
    [
        ("api.example.com", 443, True, "allowed on port 443"),
        ("api.example.com", 8443, False, "allowed on port 443, not on 8443"),
        ("maybe.example.com", 443, False, "has no address: nxdomain"),
        ("other.example.com", 443, False, "not in the session's policy"),
        ("corral-host", 8081, True, "host service llama"),
        ("corral-host", 22, False, "no host service has port 22 (declared: 8081)"),
        ("93.184.216.34", 443, True, "an address of api.example.com"),
        ("93.184.216.34", 80, False, "only while an allowed name has it"),
        ("10.0.0.1", 443, False, "only while an allowed name has it"),
    ],
)
def test_check_says_what_would_happen_and_why(
    play: Callable[..., World], host: str, port: int, allowed: bool, reason: str
) -> None:
    async def acts(world: World) -> None:
        await ready(world)
        found = await ask(world.client.check, SANDBOX.id, host, port)
        (row,) = found["sessions"]
        assert row["allowed"] is allowed
        assert reason in row["reason"]

    play(acts, prepared)


def test_check_sees_what_the_kernel_does_not_hold(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        await ready(world)
        world.writer.pins.clear()
        found = await ask(world.client.check, SANDBOX.id, "api.example.com", 443)
        assert not found["sessions"][0]["allowed"]
        assert "kernel does not hold 93.184.216.34" in found["sessions"][0]["reason"]

    play(acts, prepared)


def test_check_resolves_and_vets_what_is_not_running_and_changes_nothing(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        await ready(world)
        generation = world.service.names.state.generation
        found = await asyncio.to_thread(lambda: world.client.check("other-0a0b0c0e", NEW, 443, resolve=True))
        assert found["sessions"] == []
        assert found["resolution"]["addresses"] == ["93.184.216.40"]
        assert found["resolution"]["refused"] == {"10.0.0.5": "private (10.0.0.0/8)"}
        assert world.service.names.state.generation == generation
        assert NEW not in world.service.names.state.names

    play(acts, prepared)


def request(world: World, path: str, body: bytes) -> int:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(world.socket))
    connection = http.client.HTTPConnection("corral")
    connection.sock = sock
    connection.request("POST", path, body)
    status = connection.getresponse().status
    connection.close()
    return status


BODIES: Iterable[Any] = (
    [],
    7,
    {"sandbox": 1, "host": NEW, "ports": [443]},
    {"sandbox": SANDBOX.id, "host": None, "ports": [443]},
    {"sandbox": SANDBOX.id, "host": NEW, "ports": [True]},
    {"sandbox": SANDBOX.id, "host": NEW, "ports": ["443"]},
    {"sandbox": SANDBOX.id, "host": NEW, "ports": 443},
    {"sandbox": SANDBOX.id, "host": NEW, "ports": [443], "seconds": "1"},
    {"sandbox": SANDBOX.id, "host": NEW, "ports": [443], "seconds": True},
)


def test_a_malformed_request_is_told_and_changes_nothing(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        await ready(world)
        for body in BODIES:
            assert await ask(request, world, "/v1/allow", json.dumps(body).encode()) == 400, body
        for path, body in (("/v1/deny", {}), ("/v1/refresh", {"names": 1}), ("/v1/check", {"sandbox": "x"})):
            assert await ask(request, world, path, json.dumps(body).encode()) == 400
        assert await ask(request, world, "/v1/allow", b"[" * 60000) == 400
        assert set(world.writer.pins) == {PIN}

    play(acts, prepared)


def test_a_session_that_starts_later_has_its_own_policy_only(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        await ready(world)
        await ask(world.client.allow, SANDBOX.id, NEW, [443], 3600.0)
        world.container("c2", "00000002", "172.16.0.3")
        await ask(world.client.await_ready, "c2")
        sessions: dict[str, Session] = world.service.tracker.sessions
        assert NEW not in {name.host for name in sessions["c2"].names}
        assert {row[3] for row in world.writer.pins if row[0] == "172.16.0.3"} == {"93.184.216.34"}

    play(acts, prepared)
