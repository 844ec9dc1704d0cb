"""The writer's repair loop and its socket, on the kernel in memory."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Any

import pytest

from enforcer.netfilter import server as server_module
from enforcer.netfilter.claims import Link, from_rows, to_rows
from enforcer.netfilter.fake import FakeKernel
from enforcer.netfilter.kernel import KernelError
from enforcer.netfilter.model import MAX_REQUEST, PROTOCOL_VERSION
from enforcer.netfilter.plan import Plan
from enforcer.netfilter.server import Server
from enforcer.netfilter.skeleton import DOCKER_USER, PINS, Skeleton
from enforcer.netfilter.writer import HEAL_TRIES, GiveUp, Writer

BRIDGE = "corral-0a0b0c0d"
SANDBOX = {"bridge": BRIDGE, "subnet": "192.0.2.0/26", "gateway": "192.0.2.1"}
PIN = ["192.0.2.2", "tcp", 443, "203.0.113.10", "box main api.example"]


def writer(kernel: FakeKernel, slept: list[float] | None = None) -> Writer:
    return Writer(kernel, Skeleton(), "test", sleep=(slept if slept is not None else []).append)


class Vandal(FakeKernel):
    """Somebody flushes DOCKER-USER each time it was mended."""

    def carry_out(self, todo: Plan) -> None:
        super().carry_out(todo)
        self.tables[(4, "filter")][DOCKER_USER].clear()


def test_a_fight_is_given_up_after_ten_tries_with_what_was_sent() -> None:
    slept: list[float] = []
    with pytest.raises(GiveUp, match="-I DOCKER-USER 1 -i corral-"):
        writer(Vandal(), slept).heal("the test")
    assert len(slept) == HEAL_TRIES
    assert slept == [0.05 * 2**n for n in range(HEAL_TRIES)]


def test_a_kernel_that_cannot_be_read_is_given_up() -> None:
    class Broken(FakeKernel):
        def audit(self, *_words: Any) -> Plan:
            raise KernelError("nft: not found")

    with pytest.raises(GiveUp, match="nft: not found"):
        writer(Broken()).heal("the test")


def test_a_fight_does_not_hold_up_requests() -> None:
    kernel = Vandal()
    of = writer(kernel)
    slept: list[float] = []
    of.sleep = slept.append
    for _ in range(3):
        assert of.handle(1000, {"v": 2, "op": "hello"})["ok"]
        of.mend("the test")
    assert slept == []
    assert of.unsettled == 3


def test_nothing_is_granted_while_the_rules_do_not_hold() -> None:
    kernel = Vandal()
    kernel.interfaces.append(Link(BRIDGE, 9, (IPv4Interface("192.0.2.1/26"),)))
    of = writer(kernel)
    FakeKernel.carry_out(kernel, of.audit())
    kernel.tables[(4, "filter")][DOCKER_USER].clear()
    answer = of.handle(1000, {"v": 2, "op": "apply", "sandboxes": [SANDBOX], "pins": [PIN], "host": []})
    assert answer["pins"] == []
    assert any(text.startswith("nothing new is granted") for text in answer["refused"])
    assert kernel.entries(PINS) == {}


def granted() -> tuple[FakeKernel, Writer]:
    kernel = FakeKernel()
    kernel.interfaces.append(Link(BRIDGE, 9, (IPv4Interface("192.0.2.1/26"),)))
    of = writer(kernel)
    of.heal("the start")
    assert apply(of)["pins"]
    of.heal("the turn")
    return kernel, of


def apply(of: Writer, *pins: list[Any]) -> dict[str, Any]:
    body = {"v": 2, "op": "apply", "sandboxes": [SANDBOX], "pins": list(pins) or [PIN], "host": []}
    return of.handle(1000, body)


@pytest.mark.parametrize("position", range(1, 16))
def test_a_passing_failure_takes_nothing_away_that_is_still_wanted(position: int) -> None:
    kernel, of = granted()
    kernel.tables[(4, "filter")][DOCKER_USER].clear()
    kernel.fail_at = kernel.calls + position
    apply(of)
    kernel.fail_at = None
    assert len(kernel.entries(PINS)) == 1


def test_a_foreign_rule_that_comes_back_takes_nothing_away_and_lets_nothing_be_added() -> None:
    kernel, of = granted()
    kernel.__class__ = Vandal
    kernel.tables[(4, "filter")][DOCKER_USER].clear()
    other = ["192.0.2.2", "tcp", 443, "203.0.113.11", ""]
    answer = apply(of, PIN, other)
    assert [row[3] for row in answer["pins"]] == ["203.0.113.10"]
    assert apply(of, other)["pins"] == []


def test_switching_bridge_filtering_off_for_good_takes_everything_away() -> None:
    kernel, of = granted()
    kernel.bridge_filter, kernel.bridge_filter_stuck = (0, 0), True
    assert apply(of)["pins"] == []
    assert kernel.entries(PINS) == {}


def test_requests_do_not_spend_the_tries_of_a_repair() -> None:
    kernel, of = granted()
    kernel.__class__ = Vandal
    kernel.tables[(4, "filter")][DOCKER_USER].clear()
    for _ in range(3 * HEAL_TRIES):
        assert apply(of)["ok"]
    assert of.unsettled == 1


@pytest.mark.parametrize("proto", [["tcp"], {"tcp": 1}, None, 6, 1.5])
def test_no_request_ends_the_writer(proto: object) -> None:
    _, of = granted()
    assert apply(of, ["192.0.2.2", proto, 443, "203.0.113.10", ""])["ok"] is False


def test_an_unexpected_error_is_an_answer() -> None:
    kernel, of = granted()

    def broken() -> list[Link]:
        raise RuntimeError("nobody expected this")

    kernel.links = broken  # type: ignore[method-assign]
    answer = apply(of)
    assert (answer["ok"], answer["error"]) == (False, "internal error: RuntimeError")


def test_a_pin_never_leads_into_a_sandbox_even_where_root_permits_the_range() -> None:
    from ipaddress import IPv4Network

    kernel, of = granted()
    of.permitted = (IPv4Network("192.0.2.0/24"),)
    answer = apply(of, ["192.0.2.2", "tcp", 443, "192.0.2.9", ""])
    assert answer["refused"] == ["destination 192.0.2.9 is inside a sandbox"]
    assert kernel.entries(PINS) == {}


def test_what_was_mended_is_logged_once_it_holds(caplog: pytest.LogCaptureFixture) -> None:
    kernel = FakeKernel()
    of = writer(kernel)
    of.heal("the start")
    caplog.clear()
    kernel.tables[(4, "filter")][DOCKER_USER].clear()
    with caplog.at_level(logging.WARNING):
        of.heal("a change by others")
        of.heal("the timer")
    assert [record.getMessage().partition(" in ")[0] for record in caplog.records] == [
        "healed after a change by others"
    ]
    assert DOCKER_USER in caplog.text


def test_claims_survive_a_restart_of_the_writer(tmp_path: Path) -> None:
    kernel = FakeKernel()
    kernel.interfaces.append(Link(BRIDGE, 9, (IPv4Interface("192.0.2.1/26"),)))
    of = writer(kernel)
    of.heal("the start")
    of.handle(1000, {"v": 2, "op": "apply", "sandboxes": [SANDBOX], "pins": [PIN], "host": []})
    again = Writer(kernel, Skeleton(), "test", claims=from_rows(json.loads(json.dumps(to_rows(of.claims)))))
    again.heal("the start")
    again.prune()
    assert len(kernel.entries(PINS)) == 1
    assert "belongs to uid 1000" in str(
        again.handle(1001, {"v": 2, "op": "apply", "sandboxes": [SANDBOX], "pins": [], "host": []})["refused"]
    )
    assert from_rows([{"uid": "x"}, 1, None]) == {}
    assert from_rows({"no": "list"}) == {}


class Live:
    """A server in a thread."""

    def __init__(self, path: Path) -> None:
        self.kernel = FakeKernel()
        self.kernel.interfaces.append(Link(BRIDGE, 9, (IPv4Interface("192.0.2.1/26"),)))
        self.writer = writer(self.kernel)
        self.writer.heal("the start")
        self.path = path
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen(64)
        self.rules, self._rules = socket.socketpair()
        self.links, self._links = socket.socketpair()
        for end in (self._rules, self._links):
            end.setblocking(False)
        self.server = Server(self.writer, listener, self._rules, self._links)
        self.thread = threading.Thread(target=self.server.serve, daemon=True)
        self.thread.start()

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(10)
        sock.connect(str(self.path))
        return sock

    def ask(self, *bodies: object) -> list[dict[str, Any]]:
        with self.connect() as sock:
            sock.sendall(b"".join(json.dumps(body).encode() + b"\n" for body in bodies))
            with sock.makefile("rb") as stream:
                return [json.loads(stream.readline()) for _ in bodies]

    def stop(self) -> None:
        self.server.stop()
        self.rules.send(b"x")
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    made = Live(tmp_path / "netfilter.sock")
    try:
        yield made
    finally:
        made.stop()


HELLO = {"v": 2, "op": "hello"}


def test_several_requests_in_one_write_are_all_answered(live: Live) -> None:
    answers = live.ask(HELLO, {"v": 2, "op": "read"}, HELLO)
    assert [answer["ok"] for answer in answers] == [True, True, True]


@pytest.mark.parametrize(
    "line", [b"\n", b"{\n", b"[[[\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n", b'"x"\n', b"1e999\n"]
)
def test_garbage_is_answered_and_the_next_request_works(live: Live, line: bytes) -> None:
    with live.connect() as sock:
        sock.sendall(line)
        with sock.makefile("rb") as stream:
            assert json.loads(stream.readline())["ok"] is False
    assert live.ask(HELLO)[0]["ok"]


def test_a_silent_client_and_a_half_request_hold_up_nobody(live: Live) -> None:
    silent = [live.connect() for _ in range(5)]
    half = live.connect()
    half.sendall(b'{"v": 2, ')
    assert live.ask(HELLO)[0]["ok"]
    for sock in (*silent, half):
        sock.close()


def test_an_endless_request_is_cut_off(live: Live) -> None:
    with live.connect() as sock, suppress(BrokenPipeError, ConnectionResetError):
        for _ in range(MAX_REQUEST // 65536 + 50):
            sock.sendall(b"x" * 65536)
    assert live.ask(HELLO)[0]["ok"]


def test_a_client_that_says_nothing_is_closed_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "DEADLINE", 0.2)
    made = Live(tmp_path / "netfilter.sock")
    try:
        with made.connect() as sock:
            assert sock.recv(1) == b""
    finally:
        made.stop()


def test_one_user_cannot_take_all_connections(live: Live) -> None:
    taken = [live.connect() for _ in range(server_module.CLIENTS_PER_UID + 3)]
    closed = 0
    for sock in taken:
        sock.settimeout(0.3)
        with suppress(TimeoutError):
            closed += sock.recv(1) == b""
    assert closed == 3
    for sock in taken:
        sock.close()


def test_a_notification_of_the_kernel_is_followed_by_a_repair(live: Live) -> None:
    live.kernel.tables[(4, "filter")][DOCKER_USER].clear()
    live.rules.send(b"something changed")
    for _ in range(500):
        if live.kernel.tables[(4, "filter")][DOCKER_USER]:
            break
        time.sleep(0.01)
    assert len(live.kernel.tables[(4, "filter")][DOCKER_USER]) == 2


def test_a_link_that_went_takes_its_elements_along(live: Live) -> None:
    uid = os.getuid()
    answer = live.ask({"v": 2, "op": "apply", "sandboxes": [SANDBOX], "pins": [PIN], "host": []})[0]
    assert len(answer["pins"]) == 1
    assert live.writer.claims[BRIDGE].uid == uid
    live.kernel.interfaces.clear()
    live.links.send(b"a link went")
    for _ in range(500):
        if not live.writer.claims:
            break
        time.sleep(0.01)
    assert live.kernel.entries(PINS) == {}


def test_the_time_a_repair_took_begins_with_its_first_failure(caplog: pytest.LogCaptureFixture) -> None:
    kernel, moments = FakeKernel(), iter(range(100, 200))
    of = Writer(kernel, Skeleton(), "test", sleep=lambda _: None, clock=lambda: next(moments))
    kernel.fail_at = 1
    with caplog.at_level(logging.WARNING):
        of.heal("the test")
    (told,) = [record.getMessage() for record in caplog.records if "healed" in record.getMessage()]
    # Two looks at a clock that moves a second each time, whatever it shows.
    assert "in 1000 ms" in told


def test_claims_are_saved_when_they_change_and_again_when_saving_failed() -> None:
    kernel = FakeKernel()
    kernel.interfaces.append(Link(BRIDGE, 9, (IPv4Interface("192.0.2.1/26"),)))
    of, saved = writer(kernel), list[dict[str, Any]]()
    of.heal("the test")
    body = {"v": PROTOCOL_VERSION, "op": "apply", "sandboxes": [SANDBOX], "pins": [PIN], "host": []}

    def fail(_claims: Any) -> None:
        raise KernelError("no space left")

    of.save = fail
    assert not of.handle(1000, body)["ok"]
    of.save = saved.append
    for _ in range(3):
        assert of.handle(1000, body)["ok"]
    assert [list(claims) for claims in saved] == [[BRIDGE]]
    kernel.interfaces.clear()
    of.prune()
    assert [list(claims) for claims in saved] == [[BRIDGE], []]


OPEN_SOURCE = ["192.0.2.2", "box main open"]


def unreadable() -> dict[str, Any]:
    raise KernelError("list open: the rules change all the time")


def body(*boxes: dict[str, str], **wanted: Any) -> dict[str, Any]:
    asked = {"v": 2, "op": "apply", "sandboxes": list(boxes) or [SANDBOX], "pins": [], "host": []}
    return asked | wanted


def test_who_is_open_and_cannot_be_read_is_no_answer_that_nobody_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel, of = granted()
    assert of.handle(1000, body(open=[OPEN_SOURCE]))["open"]
    with monkeypatch.context() as broken:
        broken.setattr(kernel, "opened", unreadable)
        for request in (body(open=[]), {"v": 2, "op": "read"}):
            answer = of.handle(1000, request)
            assert (answer["ok"], answer["error"]) == (False, "list open: the rules change all the time")
            assert "open" not in answer
        # What else the caller takes back is gone all the same.
        assert kernel.entries(PINS) == {}
    assert "192.0.2.2" in kernel.opened()
    assert of.handle(1000, body(open=[]))["open"] == []
    assert kernel.opened() == {}


def test_while_who_is_open_cannot_be_read_all_else_is_pruned_and_the_addresses_stay_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel, of = granted()
    assert of.handle(1000, body(pins=[PIN], open=[OPEN_SOURCE]))["open"]
    kernel.interfaces.clear()
    other = "corral-0a0b0c0e"
    kernel.interfaces.append(Link(other, 10, (IPv4Interface("192.0.2.1/26"),)))
    with monkeypatch.context() as broken:
        broken.setattr(kernel, "opened", unreadable)
        with caplog.at_level(logging.ERROR):
            of.prune()
        assert "who is open cannot be read, all else is pruned" in caplog.text
        assert kernel.entries(PINS) == {}
        assert of.handle(1001, body({**SANDBOX, "bridge": other}))["ok"] is False
        assert set(of.claims) == {BRIDGE}
    answer = of.handle(1001, body({**SANDBOX, "bridge": other}))
    assert (answer["ok"], answer["open"], set(of.claims)) == (True, [], {other})
    assert kernel.opened() == {}


ODD = {"bridge": "corral-0a0b0c0e", "subnet": "192.0.2.128/30", "gateway": "192.0.2.129"}


@pytest.mark.parametrize("subnet", ["192.0.2.128/30", "192.0.0.0/8"])
def test_a_network_that_is_none_for_a_sandbox_takes_nothing_from_the_others(subnet: str) -> None:
    kernel, of = granted()
    prefix = subnet.partition("/")[2]
    odd = {**ODD, "subnet": str(IPv4Interface(f"192.0.2.129/{prefix}").network)}
    kernel.interfaces.append(Link(ODD["bridge"], 10, (IPv4Interface(f"192.0.2.129/{prefix}"),)))
    pin = ["192.0.2.130", "tcp", 443, "203.0.113.10", ""]
    door = ["192.0.2.130", "tcp", 8443, "192.0.2.129", ""]
    asked = body(odd, SANDBOX, pins=[PIN, pin], host=[door], open=[OPEN_SOURCE, ["192.0.2.130", ""]])
    answer = of.handle(1000, asked)
    assert answer["ok"]
    assert [row[0] for row in answer["pins"]] == ["192.0.2.2"]
    assert [row[0] for row in answer["open"]] == ["192.0.2.2"]
    assert answer["host"] == []
    said = (
        f"{ODD['bridge']}: {odd['subnet']} is no subnet for a sandbox (/16 to /29): nothing is granted there"
    )
    assert said in answer["refused"]
    assert sum("192.0.2.130" in text for text in answer["refused"]) == 3
    # Its gateway is closed to others, and its owner is nobody else, also after a restart.
    assert kernel.gateways == {"192.0.2.1", "192.0.2.129"}
    assert (ODD["bridge"], 1000) in kernel.owners
    assert from_rows(json.loads(json.dumps(to_rows(of.claims)))) == of.claims
    assert f"{ODD['bridge']}: belongs to uid 1000" in of.handle(1001, body(odd))["refused"]
    # A bare claim that goes takes nothing along.
    kernel.interfaces.pop()
    of.prune()
    assert set(kernel.opened()) == {"192.0.2.2"}
    assert len(kernel.entries(PINS)) == 1


def test_no_pin_leads_into_a_network_that_is_none_for_a_sandbox() -> None:
    kernel, of = granted()
    kernel.interfaces.append(Link(ODD["bridge"], 10, (IPv4Interface("192.0.2.129/30"),)))
    inside = ["192.0.2.2", "tcp", 443, "192.0.2.130", ""]
    answer = of.handle(1000, body(ODD, SANDBOX, pins=[PIN, inside]))
    assert [row[3] for row in answer["pins"]] == ["203.0.113.10"]
    assert "destination 192.0.2.130 is inside a sandbox" in answer["refused"]


def test_a_gateway_outside_its_subnet_refuses_that_bridge_alone() -> None:
    kernel, of = granted()
    kernel.interfaces.append(Link(ODD["bridge"], 10, (IPv4Interface("192.0.2.129/29"),)))
    odd = {**ODD, "subnet": "192.0.2.128/29", "gateway": "198.51.100.1"}
    answer = of.handle(1000, body(odd, SANDBOX, pins=[PIN]))
    assert len(answer["pins"]) == 1
    assert answer["refused"] == [
        f"{ODD['bridge']}: the interface does not have 198.51.100.1 in 192.0.2.128/29"
    ]
