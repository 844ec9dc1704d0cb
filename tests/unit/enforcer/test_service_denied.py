"""What the service tells about refused packets, its counters, and drift it finds: over its socket."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from enforcer.client import Client
from enforcer.metrics import CONTENT_TYPE
from policy.errors import EnforcerError

from .dialbench import ZONE, connected
from .servicebench import PIN, SANDBOX, World, ask, eventually, play
from .test_metrics import parsed

__all__ = ["play"]
SOURCE = "172.16.0.2"


def told(world: World, *records: list[Any], total: int = 0) -> None:
    """From now on the writer has these records."""
    numbered = [[number, time.time(), SOURCE, *row] for number, row in enumerate(records, 1)]

    def denied(epoch: str, after: int, sources: Any, tallies: bool) -> dict[str, Any]:
        fresh = [row for row in numbered if epoch != "one" or row[0] > after]
        answer = {"epoch": "one", "next": len(numbered), "lost": 0, "records": fresh, "problem": ""}
        return {**answer, "totals": {SOURCE: total}, "tallies": []}

    world.writer.denied = denied  # type: ignore[method-assign]


def test_what_was_refused_is_told_with_session_and_number(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001")
        await ask(world.client.await_ready, "c1")
        told(world, [17, 9, "203.0.113.66"], [6, 22, "93.184.216.34"], total=40)
        answer = await ask(world.client.denied)
        first, second = answer["rows"]
        assert (first["sandbox"], first["session"], first["port"]) == (SANDBOX.id, "00000001", 9)
        assert second["hint"] == "api.example.com is allowed on 443: add port 22 to it in egress.allow"
        assert answer["sandboxes"][0]["denied"] == 40
        assert (await ask(world.client.denied, answer["next"]))["rows"] == []
        assert (await ask(world.client.denied, 0, "/elsewhere"))["rows"] == []
        status = await ask(world.client.status)
        assert status["sandboxes"][0]["sessions"][0]["denied"] == 40

    play(acts)


def test_the_writer_is_asked_without_anybody_asking_the_service(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001")
        await ask(world.client.await_ready, "c1")
        await eventually(lambda: any(SOURCE in sources for _, _, sources, _ in world.writer.asked))

    play(acts)


def test_a_writer_that_is_down_leaves_the_account_readable(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001")
        await ask(world.client.await_ready, "c1")
        world.writer.broken = True
        assert "does not answer" in (await ask(world.client.denied))["problem"]
        samples, _ = parsed(await ask(world.client.metrics))
        assert samples["corral_writer_errors_total", ()] >= 0
        assert (await ask(world.client.status))["sandboxes"]

    play(acts)


def test_metrics_are_text_of_the_right_type(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001")
        await ask(world.client.await_ready, "c1")
        samples, _ = parsed(await ask(world.client.metrics))
        assert samples["corral_pins", ()] == 1
        assert samples["corral_host_entries", ()] == 1
        assert samples["corral_sessions", (("state", "ready"),)] == 1
        assert samples["corral_refreshes_total", (("result", "answered"),)] == 1
        assert samples["corral_refreshes_total", (("result", "failed"),)] >= 1
        assert samples["corral_apply_seconds_count", ()] >= 1
        assert samples["corral_docker_up", ()] == 1

        def head() -> str | None:
            connection = http.client.HTTPConnection("corral")
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.connect(str(world.socket))
            connection.request("GET", "/metrics")
            return connection.getresponse().headers["Content-Type"]

        assert await ask(head) == CONTENT_TYPE

    play(acts)


@pytest.mark.parametrize("after", ["x", "-1", "1" * 30, "١"])
def test_an_odd_number_is_refused(play: Callable[..., World], after: str) -> None:
    async def acts(world: World) -> None:
        with pytest.raises(EnforcerError, match="after must be a number"):
            await ask(world.client.denied, after)

    play(acts)


def test_elements_that_others_took_away_are_drift_and_put_back(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001")
        await ask(world.client.await_ready, "c1")
        world.writer.pins = {}
        await world.service._look_for_drift()
        await eventually(lambda: PIN in world.writer.pins)
        samples, _ = parsed(await ask(world.client.metrics))
        assert samples["corral_drift_total", (("part", "pins"),)] == 1
        # Looking again finds nothing.
        await eventually(lambda: world.service.held is not None and world.service.held.pins)
        await world.service._look_for_drift()
        samples, _ = parsed(await ask(world.client.metrics))
        assert samples["corral_drift_total", (("part", "pins"),)] == 1

    play(acts)


def test_a_reconnect_to_docker_is_counted(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001")
        await ask(world.client.await_ready, "c1")
        assert world.service.metrics.reconnects == 0
        world.engine.queue.put(None)
        await eventually(lambda: world.service.metrics.reconnects == 1)

    play(acts)


def test_an_enforcer_that_is_not_there_is_told_as_for_other_questions(tmp_path: Any) -> None:
    with pytest.raises(EnforcerError, match="not running"):
        Client(tmp_path / "none").metrics()


def test_a_name_that_a_proxy_was_refused_is_told_until_the_command_that_is_advised_allows_it(
    play: Callable[..., World],
) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001", declaration=ZONE)
        path = world.proxy("p1", "0000000a")
        told(world)
        for ident in ("c1", "p1"):
            await ask(world.client.await_ready, ident)
        async with connected(path) as line:
            for _ in range(2):
                assert (await line.dial("Files.Example.net.", 8443))["kind"] == "denied"
            assert not (await line.dial("\x1b[2J.example.net"))["ok"]
            answer = await ask(world.client.denied)
            (row,) = answer["asked"]
            assert answer["rows"] == []
            assert (row["name"], row["port"], row["count"], row["service"], row["session"]) == (
                "files.example.net",
                8443,
                2,
                "proxy",
                None,
            )
            assert (row["project"], row["note"]) == ("/p", "not allowed")
            assert row["line"] == "- {host: files.example.net, ports: [8443]}"
            assert row["command"] == "corral allow files.example.net:8443"
            page, _ = parsed(await ask(world.client.metrics))
            assert page["corral_denied_names_total", (("sandbox", SANDBOX.id),)] == 2

            world.answers["files.example.net"] = ("93.184.216.34",)
            await ask(world.client.allow, SANDBOX.id, "files.example.net", (8443,), None)
            assert (await line.dial("files.example.net", 8443))["ok"]
            (row,) = (await ask(world.client.denied))["asked"]
            assert (row["count"], row["command"]) == (2, None)
            assert row["note"] == "not allowed at that time; it is now"
            await ask(world.client.deny, SANDBOX.id, "files.example.net")
            assert (await line.dial("files.example.net", 8443))["kind"] == "denied"
            (row,) = (await ask(world.client.denied, answer["next"]))["asked"]
            assert (row["count"], row["command"]) == (3, "corral allow files.example.net:8443")

    play(acts)
