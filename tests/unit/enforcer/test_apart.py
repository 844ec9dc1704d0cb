"""Containers without a network of their own, as the service sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from enforcer import apart
from enforcer.strangers import reasons
from policy.container import DEAD_RESOLVER
from policy.declaration import LABEL_CONNECTION, LABEL_SANDBOX, LABEL_SERVICE, LABEL_SESSION, LABEL_UID
from policy.identity import Sandbox

from .servicebench import UID, World, ask, eventually, play

__all__ = ["play"]

SANDBOX = Sandbox("demo-0a0b0c0d")


def inspect(connection: str, mode: str, *networks: str, **labels: str) -> dict[str, Any]:
    return {
        "Id": "c9",
        "Name": "/corral-demo",
        "State": {"Status": "running", "Running": True},
        "Config": {
            "Labels": {
                LABEL_UID: str(UID),
                LABEL_SANDBOX: SANDBOX.id,
                LABEL_SERVICE: "main",
                LABEL_SESSION: "00000009",
                LABEL_CONNECTION: connection,
                **labels,
            }
        },
        "HostConfig": {"NetworkMode": mode, "Dns": [DEAD_RESOLVER], "Mounts": []},
        "NetworkSettings": {"Networks": {name: {} for name in networks}},
    }


@pytest.mark.parametrize("connection", ["none", "host"])
def test_a_container_that_is_connected_as_its_label_says_is_one(connection: str) -> None:
    found = apart.parse(inspect(connection, connection, connection))
    assert found is not None
    assert found.row()["connection"] == connection
    assert found.row()["enforced"] == (connection == "none")
    assert reasons(inspect(connection, connection, connection), [SANDBOX.network], UID) == {}


@pytest.mark.parametrize(
    "row",
    [
        inspect("none", "bridge", "bridge"),
        inspect("none", SANDBOX.network, SANDBOX.network),
        inspect("none", "none", "none", "bridge"),
        inspect("none", "none", SANDBOX.network),
        inspect("none", "host", "host"),
        inspect("host", "none", "none"),
        inspect("own", "bridge", "bridge"),
        inspect("", "none", "none"),
        inspect("none", "none", "none", **{LABEL_SANDBOX: "what"}),
        inspect("none", "none", "none", **{LABEL_SESSION: "what"}),
    ],
)
def test_a_label_that_is_not_true_makes_none(row: dict[str, Any]) -> None:
    assert apart.parse(row) is None


@pytest.mark.parametrize(
    ("row", "left"),
    [
        (inspect("none", "none", "none", "bridge"), {"bridge"}),
        (inspect("none", "none", "bridge"), {"bridge"}),
        # Without the label nobody asked for it, or with another one.
        (inspect("none", "host", "host"), {"host"}),
        (inspect("", "host", "host"), {"host"}),
    ],
)
def test_what_somebody_connected_is_left(row: dict[str, Any], left: set[str]) -> None:
    assert set(reasons(row, [SANDBOX.network], UID)) == left


@pytest.mark.parametrize("connection", ["none", "host"])
def test_it_is_told_in_status_and_gets_nothing(play: Callable[..., World], connection: str) -> None:
    async def acts(world: World) -> None:
        world.engine.inspects["c9"] = inspect(connection, connection, connection)
        world.engine.send("create", "c9")

        async def told() -> bool:
            return bool((await ask(world.client.status))["apart"])

        for _ in range(200):
            if await told():
                break
        status = await ask(world.client.status)
        assert [row["session"] for row in status["apart"]] == ["00000009"]
        assert [row["sessions"] for row in status["sandboxes"]] == [[]]
        assert status["strangers"] == []
        assert world.engine.disconnected == []
        assert not world.writer.pins
        # A foreign exec in it is reported like one in a session.
        world.engine.execs["e1"] = {"ProcessConfig": {"user": "0", "privileged": False}}
        attributes = {"execID": "e1", LABEL_UID: str(UID)}
        actor = {"ID": "c9", "Attributes": attributes}
        world.engine.queue.put({"Type": "container", "Action": "exec_start: sh", "Actor": actor})
        for _ in range(200):
            strangers = (await ask(world.client.status))["strangers"]
            if strangers:
                break
        assert [row["network"] for row in strangers] == [connection]
        # Connected elsewhere it is none any more, and is taken off.
        world.engine.inspects["c9"]["NetworkSettings"]["Networks"]["bridge"] = {}
        event = {
            "Type": "network",
            "Action": "connect",
            "Actor": {"ID": "n", "Attributes": {"container": "c9"}},
        }
        world.engine.queue.put(event)
        await eventually(lambda: world.engine.disconnected == [("bridge", "c9")])
        del world.engine.inspects["c9"]
        world.engine.send("die", "c9")
        for _ in range(200):
            if not await told():
                break
        assert not await told()

    play(acts)
