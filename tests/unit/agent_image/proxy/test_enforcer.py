"""What the proxy and the enforcer say to each other is what the other understands; and what the page says is so."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from agent_image.files.proxy import answers, dialer, head, hello, server, session, streams, tunnel
from agent_image.files.proxy.dialer import Granted, Refused
from enforcer import dialing
from tests.unit.agent_image.proxy.world import NAME, World, told

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "proxy.md").read_text()


@told
async def test_what_the_proxy_asks_is_what_the_enforcer_reads(world: World) -> None:
    world.answers[NAME] = dialing.refusal("denied", "no")
    await world.dialer.dial(NAME, 443)
    for reason in sorted(session.TOLD):
        await world.dialer.tell(NAME, 443, reason)
    read = [dialing.parse(json.dumps(question).encode()) for question in world.asked]
    assert read == [
        dialing.Request(NAME, 443),
        *(dialing.Request(NAME, 443, reason) for reason in sorted(session.TOLD)),
    ]


def test_what_the_enforcer_answers_is_what_the_proxy_reads() -> None:
    for kind in answers.KINDS:
        found = dialer.understand(dialing.refusal(kind, "a\nb"))
        assert isinstance(found, Refused) and (found.kind, found.text) == (kind, "a?b")
    most: dict[str, Any] = {"ok": True, "protocol": "tcp", "sni": False}
    most["addresses"] = [f"192.0.2.{number}" for number in range(dialing.ADDRESSES)]
    granted = dialer.understand(most)
    assert isinstance(granted, Granted) and len(granted.addresses) == dialing.ADDRESSES


def test_every_kind_of_refusal_that_the_enforcer_has_has_an_answer() -> None:
    kinds = set()
    for node in ast.walk(ast.parse((ROOT / "enforcer" / "dialing.py").read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            at = {"refusal": 0, "_NoError": 1}.get(node.func.id)
            if at is not None and isinstance(node.args[at], ast.Constant):
                kinds.add(node.args[at].value)
    assert len(kinds) >= 4 and kinds <= set(answers.KINDS)


def test_both_know_the_same_reasons_and_limits() -> None:
    assert session.TOLD == dialing.REASONS
    assert (dialer.VERSION, dialer.LONGEST_LINE) == (dialing.VERSION, dialing.LONGEST)
    assert dialing.ADDRESSES == dialer.MOST_ADDRESSES
    assert dialer.MOST_CONNECTIONS <= dialing.CONNECTIONS


@pytest.mark.parametrize("status", sorted(answers.LINES))
def test_the_page_has_each_answer(status: int) -> None:
    assert f"`{answers.LINES[status]}`" in PAGE


def test_the_page_has_each_reason_and_event_and_limit() -> None:
    for reason in (*session.TOLD, session.NO_HELLO, session.SERVER_NOT_TLS):
        assert f"`{reason}`" in PAGE
    for event in (
        "listening",
        "allowed",
        "denied",
        "refused",
        "closed",
        tunnel.ENDED,
        tunnel.RESET,
        tunnel.IDLED,
    ):
        assert f"`{event}`" in PAGE
    for text in (
        f"| connections at a time | {server.MOST} |",
        f"| head of a request | {head.LIMIT // 1024} KiB |",
        f"| time for the request | {session.HEAD_WITHIN:.0f} s |",
        f"| the enforcer's answer | {dialer.ANSWER_WITHIN:.0f} s |",
        f"| a connection to an address | {streams.CONNECT_WITHIN:.0f} s, {streams.CONNECT_WITHIN_ALL:.0f} s in all |",
        f"| time for a ClientHello | {session.HELLO_WITHIN:.0f} s |",
        f"| the client has ended, and the server has not answered its hello | {session.GONE_WITHIN:.0f} s |",
        f"| size of a ClientHello | {hello.LIMIT // 1024} KiB, {hello.RAW_LIMIT // 1024} KiB with its records |",
        f"| nothing moves in either direction | {tunnel.IDLE / 60:.0f} min |",
    ):
        assert text in PAGE, text
