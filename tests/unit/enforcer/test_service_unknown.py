"""What is said of containers that the service does not know, or does not know yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from policy.errors import EngineError, NotReadyError

from .servicebench import World, ask, eventually, play

__all__ = ["play"]


def test_why_a_container_is_not_known_is_told(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001")
        world.container("c2", "00000002", "172.16.0.3")
        world.container("c3", "00000003", "172.16.0.4")
        world.engine.inspects["c1"]["State"]["Status"] = "removing"
        world.engine.inspects["c2"]["Config"]["Labels"]["io.corral.session"] = "nonsense"
        world.engine.inspects["c3"]["Config"]["Labels"]["io.corral.uid"] = "7"
        for ident, why in (
            ("c1", "it is removing"),
            ("c2", "its labels name no session"),
            ("c3", "its labels do not say"),
        ):
            with pytest.raises(NotReadyError, match=why):
                await ask(world.client.await_ready, ident)

    play(acts)


def test_a_container_whose_network_cannot_be_read_is_looked_at_again_and_the_reason_is_told(
    play: Callable[..., World],
) -> None:
    async def acts(world: World) -> None:
        await eventually(world.service.tracker.looked.is_set)
        networks = world.engine.networks
        world.service.tracker.networks = {}

        def broken() -> list[dict[str, Any]]:
            raise EngineError("Docker: no answer about networks")

        world.engine.networks = broken  # type: ignore[method-assign]
        world.container("c1", "00000001")
        with pytest.raises(NotReadyError, match="no answer about networks"):
            await ask(world.client.await_ready, "c1", 0.5)
        world.engine.networks = networks  # type: ignore[method-assign]
        await ask(world.client.await_ready, "c1")

    play(acts)


def test_who_asks_before_docker_was_asked_is_kept_waiting(play: Callable[..., World]) -> None:
    def before(world: World) -> None:
        world.container("c1", "00000001")

    async def acts(world: World) -> None:
        tracker = world.service.tracker
        await eventually(tracker.looked.is_set)
        engine, tracker.engine = tracker.engine, None
        tracker._forget("c1")
        with pytest.raises(NotReadyError, match="Docker was not asked yet"):
            await ask(world.client.await_ready, "c1", 0.5)
        waiting = asyncio.ensure_future(ask(world.client.await_ready, "c1"))
        await asyncio.sleep(0)
        tracker.engine = engine
        await waiting

    play(acts, before)
