"""Changing running sessions while the disk is full, sessions come and go, or nobody waits any more."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enforcer import api
from enforcer.overrides import Overrides, Store, parse
from enforcer.tracker import Tracker
from policy.errors import CorralError, EnforcerError, NotReadyError

from .servicebench import PIN, SANDBOX, World, ask, eventually, play

__all__ = ["play"]
NEW, API = "new.example.com", "api.example.com"
ADDED = ("172.16.0.2", "tcp", 443, "93.184.216.40")


def two(world: World) -> None:
    world.container("c1", "00000001")
    world.container("c2", "00000002", "172.16.0.3")
    world.answers[NEW] = ("93.184.216.40",)


async def ready(world: World) -> None:
    for ident in world.engine.inspects:
        await ask(world.client.await_ready, ident)


def file(world: World, ident: str) -> Path:
    return world.data / "enforcer" / "sessions" / f"{ident}.json"


def after_a_restart(world: World, ident: str) -> dict[str, tuple[int, ...]] | str:
    """Return what a service that starts now reads: the names, or why it gives nothing."""
    try:
        found = Store(file(world, ident).parent).load(ident, 0.0, 0.0) or Overrides()
    except EnforcerError as error:
        return error.message
    declaration = world.service.tracker.sessions[ident].declaration
    return {name.host: name.ports for name in found.names(declaration)}


class Disk:
    """Refuses to save, for the containers it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full: set[str] = set()
        self.full_after: dict[str, int] = {}
        save = Store.save

        def saving(store: Store, ident: str, *words: Any) -> None:
            left = self.full_after.get(ident)
            if left is not None:
                self.full_after[ident] = left - 1
            if ident in self.full or left == 0:
                raise EnforcerError(f"cannot write {ident}: No space left on device")
            save(store, ident, *words)

        monkeypatch.setattr(Store, "save", saving)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def reaches(world: World, ident: str) -> set[str]:
    return {name.host for name in world.service.tracker.sessions[ident].names}


@pytest.mark.parametrize("full", [{"c1"}, {"c2"}, {"c1", "c2"}], ids=lambda full: "+".join(sorted(full)))
def test_a_denial_closes_every_session_whatever_cannot_be_saved(
    play: Callable[..., World], disk: Disk, full: set[str]
) -> None:
    async def acts(world: World) -> None:
        await ready(world)
        disk.full |= full
        with pytest.raises(EnforcerError, match="No space left") as caught:
            await ask(world.client.deny, SANDBOX.id, API)
        for ident in full:
            assert ident in caught.value.message
        assert not world.writer.pins
        for ident in ("c1", "c2"):
            told = after_a_restart(world, ident)
            assert "cannot be read" in told if ident in full else API not in told
        # With room it is as it should be, without anybody asking.
        disk.full.clear()
        await eventually(lambda: all(isinstance(after_a_restart(world, c), dict) for c in ("c1", "c2")))
        assert all(API not in after_a_restart(world, ident) for ident in ("c1", "c2"))

    play(acts, two)


def test_what_was_granted_is_taken_back_everywhere_when_one_session_cannot_have_it(
    play: Callable[..., World], disk: Disk
) -> None:
    async def acts(world: World) -> None:
        world.container("c3", "00000003", "172.16.0.4")
        await ready(world)
        disk.full.add("c3")
        before = set(world.writer.pins)
        # What is saved for c1 a second time is its closing.
        disk.full_after["c1"] = 1
        with pytest.raises(EnforcerError, match="c3: No space left"):
            await ask(world.client.allow, SANDBOX.id, NEW, [443], None)
        for ident in ("c1", "c2", "c3"):
            assert NEW not in reaches(world, ident)
            assert NEW not in after_a_restart(world, ident)
        await eventually(lambda: set(world.writer.pins) == before)

    play(acts, two)


def test_a_closing_that_leaves_not_even_an_empty_file_is_told(
    play: Callable[..., World], disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def acts(world: World) -> None:
        await ready(world)
        file(world, "c1").parent.mkdir(parents=True, exist_ok=True)
        file(world, "c1").mkdir()
        disk.full.add("c1")
        with pytest.raises(EnforcerError, match="a restart of the enforcer may bring back what was closed"):
            await ask(world.client.deny, SANDBOX.id, API)
        assert not world.writer.pins

    play(acts, two)


async def until_asked(world: World, ident: str) -> None:
    await eventually(lambda: NEW in reaches(world, ident))


def test_a_session_that_went_away_while_it_was_granted_something_comes_back_without(
    play: Callable[..., World],
) -> None:
    async def acts(world: World) -> None:
        await ready(world)
        world.answers.pop(NEW)
        world.gate.clear()
        asking = asyncio.ensure_future(ask(world.client.allow, SANDBOX.id, NEW, [443], None))
        await until_asked(world, "c1")
        world.engine.inspects["c1"]["State"] = {"Status": "exited", "Running": False}
        world.engine.send("die", "c1")
        await eventually(lambda: "c1" not in world.service.tracker.sessions)
        world.gate.set()
        with pytest.raises(CorralError):
            await asking
        world.answers[NEW] = ("93.184.216.40",)
        world.engine.inspects["c1"]["State"] = {"Status": "created", "Running": False}
        world.engine.send("start", "c1")
        await eventually(lambda: "c1" in world.service.tracker.sessions)
        assert NEW not in reaches(world, "c1")
        assert NEW not in after_a_restart(world, "c1")

    play(acts, two)


@pytest.mark.parametrize("away", ["stopped", "refused"])
def test_a_denial_reaches_a_session_that_is_away(play: Callable[..., World], away: str) -> None:
    async def acts(world: World) -> None:
        await ready(world)
        row, tracker = world.engine.inspects["c1"], world.service.tracker
        if away == "stopped":
            row["State"]["Status"] = "exited"
            world.engine.send("die", "c1")
            await eventually(lambda: "c1" not in tracker.sessions)
        else:
            row["HostConfig"]["Privileged"] = True
            world.engine.send("update", "c1")
            await eventually(lambda: tracker.sessions["c1"].problems)
        answer = await ask(world.client.deny, SANDBOX.id, API)
        assert {session["container"] for session in answer["sessions"]} == {"c1", "c2"}
        row["State"]["Status"] = "created"
        row["HostConfig"]["Privileged"] = False
        world.engine.send("start", "c1")
        await eventually(lambda: "c1" in tracker.sessions and not tracker.sessions["c1"].problems)
        assert API not in reaches(world, "c1")
        await ask(world.client.await_ready, "c1")
        assert not world.writer.pins

    play(acts, two)


def test_a_session_that_became_refused_while_it_was_granted_something_is_without(
    play: Callable[..., World],
) -> None:
    async def acts(world: World) -> None:
        await ready(world)
        world.answers.pop(NEW)
        world.gate.clear()
        asking = asyncio.ensure_future(ask(world.client.allow, SANDBOX.id, NEW, [443], None))
        await until_asked(world, "c1")
        row, tracker = world.engine.inspects["c1"], world.service.tracker
        row["HostConfig"]["Privileged"] = True
        world.engine.send("update", "c1")
        await eventually(lambda: tracker.sessions["c1"].problems)
        world.gate.set()
        with pytest.raises(CorralError):
            await asking
        row["HostConfig"]["Privileged"] = False
        world.engine.send("update", "c1")
        await eventually(lambda: not tracker.sessions["c1"].problems)
        assert NEW not in reaches(world, "c1")
        assert NEW not in after_a_restart(world, "c1")

    play(acts, two)


def saved_then(world: World, wall: float) -> Overrides:
    return parse(file(world, "c1").read_text(), 0.0, wall)


def test_what_has_ended_does_not_come_back_when_the_time_of_day_is_set_back(
    play: Callable[..., World],
) -> None:
    async def acts(world: World) -> None:
        await ready(world)
        tracker: Tracker = world.service.tracker
        began = tracker._wall()
        await ask(world.client.allow, SANDBOX.id, NEW, [443], 1.0)
        assert NEW in saved_then(world, began).granted
        await eventually(lambda: NEW not in reaches(world, "c1"))
        await eventually(lambda: NEW not in saved_then(world, began).granted)

    play(acts, two)


def test_what_had_ended_before_the_start_is_gone_from_the_file_after_it(play: Callable[..., World]) -> None:
    granted = Overrides().allow(NEW, (443,), 2.0)

    def before(world: World) -> None:
        two(world)
        Store(file(world, "c1").parent).save("c1", granted, 1.0, 1e9)
        assert NEW in saved_then(world, 1e9).granted

    async def acts(world: World) -> None:
        await ready(world)
        assert NEW not in saved_then(world, 1e9).granted
        assert set(world.writer.pins) == {PIN, ("172.16.0.3", *PIN[1:])}

    play(acts, before)


def test_a_name_without_an_address_leaves_a_permission_that_another_request_gave(
    play: Callable[..., World],
) -> None:
    async def acts(world: World) -> None:
        await ready(world)
        await ask(world.client.allow, SANDBOX.id, NEW, [443], None)
        with pytest.raises(NotReadyError):
            await ask(world.client.allow, SANDBOX.id, "typo.example.com", [443], None)
        assert NEW in reaches(world, "c1")
        assert ADDED in world.writer.pins

    play(acts, two)


def begin(world: World, path: str, **body: Any) -> http.client.HTTPConnection:
    """Send a request and read no answer."""
    connection = http.client.HTTPConnection("corral")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(world.socket))
    connection.request("POST", path, json.dumps({"sandbox": SANDBOX.id, "host": NEW, **body}))
    return connection


def test_what_is_not_done_when_the_one_who_asked_hangs_up_is_taken_back(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        await ready(world)
        world.gate.clear()
        connection = begin(world, "/v1/allow", ports=[443])
        await until_asked(world, "c1")
        connection.close()
        await eventually(lambda: NEW not in reaches(world, "c1"))
        world.gate.set()
        assert NEW not in after_a_restart(world, "c1")
        # The next one is not kept waiting by it, and a name that works is answered as ever.
        await ask(world.client.allow, SANDBOX.id, NEW, [443], None)
        assert ADDED in world.writer.pins

    play(acts, two)


def test_what_is_not_done_in_time_is_taken_back_before_that_is_told(
    play: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def acts(world: World) -> None:
        await ready(world)
        world.gate.clear()
        monkeypatch.setattr(api, "SLACK", 0.5)
        monkeypatch.setattr(api, "PATIENCE", 0.0)
        with pytest.raises(EnforcerError, match="not done in time and is taken back"):
            await ask(world.client.allow, SANDBOX.id, NEW, [443], None)
        assert NEW not in reaches(world, "c1")
        assert NEW not in after_a_restart(world, "c1")
        world.gate.set()
        await eventually(lambda: world.service.satisfied == {"c1", "c2"})
        assert ADDED not in world.writer.pins

    play(acts, two)


def test_a_denial_goes_through_though_who_asked_hangs_up(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        await ready(world)
        await ask(world.client.allow, SANDBOX.id, NEW, [443], None)
        begin(world, "/v1/deny").close()
        await eventually(lambda: ADDED not in world.writer.pins)

    play(acts, two)
