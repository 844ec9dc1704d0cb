"""The writer and the log of refused packets: opened, read between requests, tried again; told to its owner."""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Iterator
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Any

import pytest

from enforcer.netfilter.claims import Link
from enforcer.netfilter.fake import FakeKernel
from enforcer.netfilter.kernel import KernelError
from enforcer.netfilter.nflog import Log
from enforcer.netfilter.refusals import Tally
from enforcer.netfilter.server import AUDIT_EVERY, Server
from enforcer.netfilter.skeleton import Skeleton
from enforcer.netfilter.writer import RENEW_BELOW, Writer

from .test_nflog import ip, logged, message

BRIDGE, OTHER = "corral-0a0b0c0d", "corral-0a0b0c0e"
BOX = {"bridge": BRIDGE, "subnet": "172.16.0.0/26", "gateway": "172.16.0.1"}
OTHER_BOX = {"bridge": OTHER, "subnet": "172.16.1.0/26", "gateway": "172.16.1.1"}
SOURCE = "172.16.0.2"
TALLY = Tally(SOURCE, 17, 9, "203.0.113.66", 5, 60)


class Group:
    """The kernel's side of the log: a pair of sockets, or a refusal."""

    def __init__(self) -> None:
        self.free = True
        self.kernel: socket.socket | None = None

    def connect(self) -> socket.socket:
        if not self.free:
            raise PermissionError("taken")
        ours, self.kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for _ in range(4):
            self.kernel.send(message(2, struct.pack("=i", 0)))
        return ours

    def send(self, port: int, interface: int = 7) -> None:
        assert self.kernel is not None
        self.kernel.send(logged(ip(17, struct.pack("!HH", 1, port)), interface))


class Turns:
    """A server whose turns the test counts. ``now`` is its clock."""

    def __init__(self, tmp_path: Path, group: Group) -> None:
        self.now = 100.0
        self.kernel = FakeKernel()
        self.kernel.interfaces.append(Link(BRIDGE, 7, (IPv4Interface("172.16.0.1/26"),)))
        self.kernel.interfaces.append(Link(OTHER, 8, (IPv4Interface("172.16.1.1/26"),)))
        self.writer = Writer(
            self.kernel,
            Skeleton(),
            "test",
            sleep=lambda _: None,
            clock=lambda: self.now,
            journal=Log(4010, group.connect),
            wall=lambda: 5.0,
        )
        self.writer.heal("the test")
        self.pairs = [socket.socketpair() for _ in range(2)]
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "sock"))
        listener.listen()
        rules, links = (pair[0] for pair in self.pairs)
        for sock in (rules, links):
            sock.setblocking(False)
        self.server = Server(self.writer, listener, rules, links, clock=lambda: self.now)
        self.apply(1000, BOX)
        self.apply(1001, OTHER_BOX)

    def apply(self, uid: int, *boxes: dict[str, str], pins: list[Any] | None = None) -> None:
        body = {"v": 2, "op": "apply", "sandboxes": list(boxes), "pins": pins or [], "host": []}
        answer = self.writer.handle(uid, body)
        assert answer["ok"], answer

    def ask(self, uid: int = 1000, **changes: Any) -> dict[str, Any]:
        body = {"v": 2, "op": "denied", "epoch": "", "after": 0, "sources": [SOURCE], "tallies": True}
        answer = self.writer.handle(uid, {**body, **changes})
        assert answer["ok"], answer
        return answer

    def turn(self, passed: float = 0.0) -> None:
        self.now += passed
        self.pairs[1][1].send(b"x")  # so that no turn waits
        self.server.turn()


@pytest.fixture
def group() -> Group:
    return Group()


@pytest.fixture
def turns(tmp_path: Path, group: Group) -> Iterator[Turns]:
    made = Turns(tmp_path, group)
    yield made
    for pair in made.pairs:
        for sock in pair:
            sock.close()


def test_a_packet_that_came_in_by_anothers_bridge_is_told_to_nobody(turns: Turns, group: Group) -> None:
    group.send(9, interface=8)
    turns.turn()
    assert turns.ask()["records"] == turns.ask(1001)["records"] == []
    assert turns.ask()["problem"] == ""


def test_a_packet_of_ones_own_is_told_once_it_was_heard(turns: Turns, group: Group) -> None:
    group.send(9)
    turns.turn()
    assert [row[1:] for row in turns.ask()["records"]] == [[5.0, SOURCE, 17, 9, "203.0.113.66"]]
    assert turns.ask(1001)["records"] == []


def test_a_log_that_is_taken_is_told_and_tried_again_with_each_audit(
    tmp_path: Path, group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    group.free = False
    with caplog.at_level(logging.WARNING, "corral.netfilter"):
        turns = Turns(tmp_path, group)
        turns.turn(AUDIT_EVERY + 1)
    assert "cannot be read" in turns.ask()["problem"]
    assert sum("cannot be read" in line for line in caplog.messages) == 1
    group.free = True
    turns.turn(AUDIT_EVERY + 1)
    assert turns.ask()["problem"] == ""
    group.send(9)
    turns.turn()
    assert len(turns.ask()["records"]) == 1


def test_a_log_that_breaks_off_is_left_and_opened_anew(turns: Turns, group: Group) -> None:
    journal = turns.writer.journal
    assert journal is not None
    group.send(9)
    journal.read = lambda: (journal._fail(OSError(5, "broken")), [])[1]  # type: ignore[method-assign]
    turns.turn()
    assert journal.sock is None
    assert "broke off" in turns.ask()["problem"]
    del journal.read
    turns.turn(AUDIT_EVERY + 1)
    group.send(9)
    turns.turn()
    assert len(turns.ask()["records"]) == 1


def test_counts_are_told_to_the_owner_of_the_source_alone(turns: Turns) -> None:
    turns.kernel.counted = [TALLY]
    assert turns.ask()["tallies"] == [TALLY.row()]
    assert turns.ask(1001)["tallies"] == []
    assert "tallies" not in turns.ask(tallies=False)


def test_sources_are_counted_from_the_first_question_until_nobody_asks(turns: Turns) -> None:
    assert turns.ask()["totals"] == {SOURCE: 0}
    assert turns.ask(1001)["totals"] == {}
    turns.apply(1000, BOX)
    assert turns.ask()["totals"] == {SOURCE: 0}
    turns.ask(sources=[])
    turns.apply(1000, BOX)
    assert turns.ask(sources=[])["totals"] == {}


def test_elements_that_count_are_renewed_before_they_end(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns.ask()
    renewed: list[set[str]] = []
    monkeypatch.setattr(turns.kernel, "watch", lambda sources, _forget: renewed.append(set(sources)))
    turns.ask()
    assert renewed == []
    turns.now += RENEW_BELOW + 1
    turns.ask()
    assert renewed == [{SOURCE}]


def test_counts_of_a_bridge_that_is_gone_are_forgotten(turns: Turns) -> None:
    turns.ask()
    other = Tally("172.16.1.2", 17, 9, "203.0.113.66", 5, 60)
    turns.kernel.counted = [TALLY, other]
    turns.kernel.interfaces = [link for link in turns.kernel.interfaces if link.name != BRIDGE]
    turns.writer.prune()
    assert turns.kernel.counted == [other]
    assert SOURCE not in turns.kernel.denied()


def test_a_kernel_that_does_not_count_is_an_error_to_the_caller_alone(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> list[Tally]:
        raise KernelError("list corral-seen: no such set")

    monkeypatch.setattr(turns.kernel, "tallies", broken)
    body = {"v": 2, "op": "denied", "epoch": "", "after": 0, "sources": [], "tallies": True}
    assert "corral-seen" in turns.writer.handle(1000, body)["error"]
