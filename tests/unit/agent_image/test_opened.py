"""Gate and checker in a sandbox that reaches all public addresses."""

from __future__ import annotations

import errno
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_image.files.entrypoint import gate
from agent_image.files.verify import main, opened
from agent_image.files.verify.network import WAIT, Reply
from tests.unit.agent_image.container import BODY, GATEWAY, PROBE, RESOLVER, Container, expect, outcome
from tests.unit.agent_image.test_gate import BODY as GATE
from tests.unit.agent_image.test_gate import RESOLVER as OUTSIDE
from tests.unit.agent_image.test_gate import World, dns

CLOSED = ["168.63.129.16", "100.100.100.200"]
OPEN: dict[str, Any] = {
    **GATE,
    "names": [],
    "probe": {"address": "169.254.169.254", "port": 443},
    "open": {"closed": CLOSED},
}
EMBEDDED = "127.0.0.11"


def lines(world: World, **changes: Any) -> list[str]:
    return world.lines(**{**OPEN, **changes})


@pytest.fixture
def world() -> World:
    made = World()
    made.answers[EMBEDDED, 53, "udp"] = dns(0, 1)
    return made


def test_the_gate_names_every_closed_address_and_opens(world: World) -> None:
    assert lines(world) == [
        "OK: closed address 169.254.169.254 blocked",
        "OK: closed address 168.63.129.16 blocked",
        "OK: closed address 100.100.100.200 blocked",
        "OK: DNS outside closed",
        "OK: names are answered",
        "OK: host service 8081 reachable",
        "egress policy applied",
    ]


@pytest.mark.parametrize("address", ["169.254.169.254", *CLOSED])
@pytest.mark.parametrize("way", ["tcp", "udp"])
def test_a_closed_address_that_answers_keeps_the_gate_closed(world: World, address: str, way: str) -> None:
    world.answers[address, 443, way] = "connected" if way == "tcp" else ("data", 0.01, b"x")
    assert f"ERROR: closed address {address} reachable — isolation broken" in lines(world)


def test_a_closed_address_that_only_hangs_proves_nothing(world: World) -> None:
    world.answers["168.63.129.16", 443, "tcp"] = ("timeout", 0.9, b"")
    assert any(line.startswith("ERROR: ") for line in lines(world))


@pytest.mark.parametrize("way", ["tcp", "udp"])
def test_a_resolver_outside_that_answers_keeps_the_gate_closed(world: World, way: str) -> None:
    world.answers[OUTSIDE, 53, way] = dns(0, 1)
    assert any(OUTSIDE in line for line in lines(world) if line.startswith("ERROR: "))


def test_names_that_do_not_exist_are_answers_too(world: World) -> None:
    world.answers[EMBEDDED, 53, "udp"] = dns(3)
    assert "OK: names are answered" in lines(world)


@pytest.mark.parametrize("answer", [dns(2), dns(5), ("timeout", 0.9, b""), ("refused", 0.01, b"")])
def test_names_that_nobody_answers_keep_the_gate_closed(world: World, answer: Any) -> None:
    world.answers[EMBEDDED, 53, "udp"] = answer
    found = [line for line in lines(world) if line.startswith("ERROR: ")]
    assert len(found) == 1
    assert "names are not answered" in found[0]


def test_a_policy_with_names_is_not_open_and_keeps_its_own_checks() -> None:
    assert "OK: DNS closed" in World().lines()
    made = World()
    made.answers[EMBEDDED, 53, "udp"] = dns(0, 1)
    # The same answers are an error where nothing says open.
    assert any("127.0.0.11" in line for line in made.lines() if line.startswith("ERROR: "))


@pytest.mark.parametrize(
    "part",
    [None, True, [], {}, {"closed": "168.63.129.16"}, {"closed": ["example.com"]}, {"closed": [], "x": 1}],
)
def test_what_is_not_exactly_understood_opens_nothing(part: object) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError, OSError)):
        gate.parse_policy(json.dumps({**OPEN, "open": part}))


# -- the checker

REFUSED = Reply("refused", 0.001, code=errno.ECONNREFUSED)
PUBLIC = "203.0.113.80"
SHUT = ["169.254.169.254", "10.255.255.1"]


def answer(code: int, *addresses: str) -> Callable[[bytes], bytes]:
    def made(asked: bytes) -> bytes:
        records = b"".join(
            b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 60, 4) + bytes(map(int, address.split(".")))
            for address in addresses
        )
        return (
            asked[:2] + struct.pack("!HHHHH", 0x8180 | code, 1, len(addresses), 0, 0) + asked[12:] + records
        )

    return made


class Opened(Container):
    """One whose resolver answers."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.answered = answer(0, PUBLIC)

    def udp(self, address: str, port: int, payload: bytes, wait: float = WAIT) -> Reply:
        if (address, port) == (EMBEDDED, 53) and (address, port) not in self.open_udp:
            return Reply("data", 0.01, self.answered(payload))
        return super().udp(address, port, payload, wait)

    def tcp(self, address: str, port: int, payload: bytes = b"", linger: float = 0.0) -> Reply:
        if (address, port) == (EMBEDDED, 53) and (address, port) not in self.open_tcp:
            data = self.answered(payload[2:])
            return Reply("data", 0.01, struct.pack("!H", len(data)) + data)
        return super().tcp(address, port, payload, linger)


@pytest.fixture
def inside(container: Container) -> Opened:
    made = Opened(Path(container.root))
    made.open_tcp[PUBLIC, 443] = Reply("connected", 0.01)
    return made


def test_what_is_asked_of_an_open_sandbox_and_what_no_more() -> None:
    names = [name for name, _ in main.checks(expect(closed=SHUT))]
    assert {*(f"closed-address:{a}" for a in SHUT), "host-closed", "dns-outside-closed", "public-name"} <= {
        *names
    }
    assert not {"closed-address", "host-closed", "public-name"} & {name for name, _ in main.checks(expect())}


@pytest.mark.parametrize("name", ["dns-closed", "embedded-dns-closed"])
def test_what_would_be_wrong_there_says_why_it_is_left_out(inside: Opened, name: str) -> None:
    found = {r["check"]: r for r in main.verify({**BODY, "closed": SHUT}, inside)}
    assert found[name]["status"] == "skip"
    assert found[name]["detail"].startswith("egress.mode is open")
    ordinary = {r["check"]: r["status"] for r in main.verify(BODY, inside)}
    # The same container, where nothing says open.
    assert ordinary["embedded-dns-closed"] == "fail"


def test_a_closed_address_has_to_be_refused_by_the_fence(inside: Opened) -> None:
    check = opened.closed_address("10.255.255.1")
    assert outcome(check, inside)[0] == "ok"
    for reply in (
        Reply("connected", 0.01),
        Reply("timeout", 0.9),
        Reply("unreachable", 0.01, code=errno.EHOSTUNREACH),
    ):
        inside.open_tcp["10.255.255.1", 443] = reply
        assert outcome(check, inside)[0] == "fail", reply
    inside.open_tcp["10.255.255.1", 443] = REFUSED
    inside.open_udp["10.255.255.1", 443] = Reply("data", 0.01, b"x")
    assert outcome(check, inside)[0] == "fail"


def test_the_host_and_resolvers_outside_have_to_be_closed(inside: Opened) -> None:
    assert outcome(opened.host_closed, inside)[0] == outcome(opened.dns_outside_closed, inside)[0] == "ok"
    inside.open_tcp[GATEWAY, 22] = Reply("connected", 0.01)
    assert outcome(opened.host_closed, inside)[0] == "fail"
    for address in (RESOLVER, PROBE):
        inside.open_udp[address, 53] = Reply("data", 0.01, b"x")
        assert outcome(opened.dns_outside_closed, inside)[0] == "fail"
        del inside.open_udp[address, 53]


def test_a_public_name_has_an_address_that_answers(inside: Opened) -> None:
    status, detail = outcome(opened.public_name, inside)
    assert status == "ok"
    assert PUBLIC in detail
    inside.open_tcp[PUBLIC, 443] = REFUSED
    assert outcome(opened.public_name, inside)[0] == "fail"


@pytest.mark.parametrize("code", [2, 5])
def test_a_name_that_is_not_answered_is_found(inside: Opened, code: int) -> None:
    inside.answered = answer(code)
    assert outcome(opened.public_name, inside)[0] == "fail"


def test_a_host_that_has_no_such_name_proves_nothing_of_it(inside: Opened) -> None:
    inside.answered = answer(3)
    assert outcome(opened.public_name, inside)[0] == "skip"


def test_the_whole_checker_holds_in_a_right_open_container(inside: Opened) -> None:
    found = {r["check"]: r["status"] for r in main.verify({**BODY, "closed": SHUT, "names": {}}, inside)}
    assert found["public-name"] == found["host-closed"] == found["closed-address:10.255.255.1"] == "ok"
