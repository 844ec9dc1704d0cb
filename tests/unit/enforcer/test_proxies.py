"""Proxies without a session are removed, proxies that ended are started again, and neither against who is at work."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from enforcer.proxies import IDLE, TRIES, WITHIN, Proxies, ended
from enforcer.sessions import Owner
from policy import holding, proxying
from policy.identity import StatePaths

from .dialbench import ZONE
from .servicebench import SANDBOX, UID, FakeEngine, World, ask, eventually, play

__all__ = ["play"]


class Stage:
    def __init__(self, tmp_path: Path) -> None:
        self.now = 1000.0
        self.engine = FakeEngine()
        self.sessions: list[Any] = []
        self.started: list[str] = []
        self.engine.start = self.started.append  # type: ignore[method-assign]
        self.root = StatePaths(tmp_path / SANDBOX.id).root
        self.root.mkdir()
        owner = Owner(UID, UID, tmp_path, ipv6=True)
        self.proxies = Proxies(
            lambda: self.engine,  # type: ignore[arg-type,return-value]
            owner,
            lambda: self.sessions,
            asyncio.Event(),
            lambda: self.now,
        )

    def session(self, running: bool = True, proxied: bool = True) -> Any:
        made = SimpleNamespace(
            sandbox=SANDBOX,
            service="main",
            container="c1",
            session="00000001",
            proxied=proxied,
            running=running,
        )
        self.sessions.append(made)
        return made

    def proxy(self, status: str = "running") -> None:
        labels = {
            "io.corral.uid": str(UID), "io.corral.sandbox": SANDBOX.id, "io.corral.session": SANDBOX.token,
            "io.corral.service": "proxy", "io.corral.purpose": "proxy",
        }  # fmt: skip
        self.engine.inspects["p1"] = {
            "Id": "p1",
            "Name": f"/{SANDBOX.container('proxy', SANDBOX.token)}",
            "State": {"Status": status, "Running": status == "running"},
            "Config": {"Labels": labels},
        }
        self.sessions = [one for one in self.sessions if one.service != "proxy"]
        if status == "running":
            self.sessions.append(
                SimpleNamespace(
                    sandbox=SANDBOX,
                    service="proxy",
                    container="p1",
                    session=SANDBOX.token,
                    proxied=False,
                    running=True,
                )
            )

    def look(self, after: float = 0.0) -> None:
        self.now += after
        asyncio.run(self.proxies.look())

    def gone(self) -> bool:
        if "p1" not in self.engine.inspects:
            assert self.engine.stopped == ["p1"]
            return True
        return False


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_a_proxy_without_a_session_is_removed_after_a_while(stage: Stage) -> None:
    stage.proxy()
    stage.look()
    stage.look(IDLE - 1)
    assert not stage.gone()
    stage.look(1)
    assert stage.gone()


def test_a_session_that_comes_in_between_keeps_it(stage: Stage) -> None:
    stage.proxy()
    stage.look()
    made = stage.session()
    stage.look(IDLE)
    stage.sessions.remove(made)
    stage.look(1)
    stage.look(IDLE - 1)
    assert not stage.gone()
    stage.session(proxied=False)
    stage.look(1)
    assert stage.gone()


def test_a_session_that_was_made_keeps_it_while_somebody_looks_after_it(stage: Stage) -> None:
    stage.proxy()
    stage.session(running=False)
    directory = StatePaths(stage.root).session("00000001")
    directory.mkdir(parents=True)
    held = holding.take(directory)
    stage.look()
    stage.look(IDLE)
    assert not stage.gone()
    os.close(held)
    stage.look()
    stage.look(IDLE)
    assert stage.gone()


@pytest.mark.parametrize("name", [proxying.LOCK, proxying.USE])
def test_nothing_is_removed_under_a_command_that_is_about_to_use_it(stage: Stage, name: str) -> None:
    stage.proxy()
    held = os.open(stage.root / name, os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_SH)
    stage.look()
    stage.look(IDLE)
    assert not stage.gone()
    os.close(held)
    stage.look()
    assert stage.gone()


def test_one_that_ended_while_it_is_needed_is_started_again_and_not_for_ever(stage: Stage) -> None:
    stage.session()
    stage.proxy("exited")
    for count in range(TRIES):
        stage.look(5)
        assert len(stage.started) == count + 1
    stage.look(5)
    assert stage.started == ["p1"] * TRIES
    assert "ended 3 times" in stage.proxies.problems[SANDBOX.id]
    stage.look(WITHIN)
    assert stage.started == ["p1"] * (TRIES + 1)
    stage.proxy()
    stage.look(5)
    assert not stage.proxies.problems


def test_one_that_is_being_made_anew_is_not_started(stage: Stage) -> None:
    stage.session()
    stage.proxy("exited")
    held = os.open(stage.root / proxying.LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    stage.look(5)
    assert not stage.started
    os.close(held)
    stage.look(5)
    assert stage.started == ["p1"]


def test_one_that_ended_and_that_nobody_needs_is_removed(stage: Stage) -> None:
    stage.proxy("exited")
    stage.look()
    assert not stage.gone()
    stage.look(61)
    assert stage.gone()


@pytest.mark.parametrize(
    "change",
    [
        {"Name": "/something"},
        {"State": {"Status": "running"}},
        {"State": {"Status": "created"}},
        {"io.corral.purpose": "run"},
        {"io.corral.service": "main"},
        {"io.corral.uid": "4242"},
        {"io.corral.sandbox": "../x"},
        {"io.corral.session": "x"},
    ],
    ids=str,
)
def test_no_other_container_is_taken_for_one(stage: Stage, change: dict[str, Any]) -> None:
    stage.proxy("exited")
    inspect = stage.engine.inspects["p1"]
    assert ended(inspect, UID) is not None
    labels = {**inspect["Config"]["Labels"], **{key: text for key, text in change.items() if "." in key}}
    made = {
        **inspect,
        **{key: text for key, text in change.items() if "." not in key},
        "Config": {"Labels": labels},
    }
    assert ended(made, UID) is None


def test_the_service_tells_how_a_proxy_is_and_starts_it_again(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001", declaration=ZONE, running=True)
        world.proxy("p1", SANDBOX.token)
        for ident in ("c1", "p1"):
            await ask(world.client.await_ready, ident)
        rows = (await ask(world.client.status))["sandboxes"][0]["sessions"]
        assert [row["proxy"] for row in rows if row["service"] == "proxy"] == [
            {"socket": True, "allowed": 0, "refused": {}, "open": 0}
        ]
        world.engine.inspects["p1"]["State"] = {"Status": "exited", "Running": False}
        world.engine.send("die", "p1")
        await eventually(lambda: "p1" not in world.service.tracker.sessions)
        await eventually(lambda: "p1" in world.service.tracker.sessions)

    play(acts)
