"""Refused packets in the real kernel: logged by destination, counted, told to their owner alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from enforcer.netfilter.detect import OWN
from enforcer.netfilter.kernel import RealKernel
from enforcer.netfilter.model import Element
from enforcer.netfilter.nflog import Log
from enforcer.netfilter.writer import Writer

from .conftest import sh
from .test_packets import ALLOWED, BRIDGE, FORBIDDEN, GATEWAY, INSIDE, NEIGHBOUR, SKELETON, Hosts, hosts

__all__ = ["hosts"]
pytestmark = pytest.mark.netns

OWNER, OTHER = 1000, 1001
SECOND = "corral-0e0f0e0f"
ICMP = """
import os, socket, struct, sys
s = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
head = struct.pack("!BBHHH", 8, 0, 0, 1, 1)
total = sum(struct.unpack("!4H", head)); total = (total & 0xffff) + (total >> 16)
s.sendto(struct.pack("!BBHHH", 8, 0, ~total & 0xffff, 1, 1), (sys.argv[1], 0))
"""
SCAN = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for port in range(int(sys.argv[2]), int(sys.argv[3])):
    try: s.sendto(b"x", (sys.argv[1], port))
    except OSError: pass
"""


@pytest.fixture
def writer(hosts: Hosts) -> Iterator[Writer]:
    kernel = RealKernel(driver=hosts.driver)
    journal = Log(SKELETON.nflog_group)
    of = Writer(kernel, SKELETON, "test", journal=journal)
    of.heal("the test's start")
    assert journal.open(), journal.problem
    apply(of, OWNER, BRIDGE, "192.0.2.0/26", GATEWAY)
    try:
        yield of
    finally:
        journal.close()
        kernel.close()


def apply(of: Writer, uid: int, bridge: str, subnet: str, gateway: str, *pins: Element) -> None:
    boxes = [{"bridge": bridge, "subnet": subnet, "gateway": gateway}]
    rows = [[*e.row(), ""] for e in pins]
    answer = of.handle(uid, {"v": 2, "op": "apply", "sandboxes": boxes, "pins": rows, "host": []})
    assert answer["ok"], answer
    assert answer["refused"] == []


def ask(of: Writer, uid: int = OWNER, **changes: Any) -> dict[str, Any]:
    body = {"v": 2, "op": "denied", "epoch": "", "after": 0, "sources": [INSIDE], "tallies": True, **changes}
    answer = of.handle(uid, body)
    assert answer["ok"], answer
    return answer


def heard(of: Writer, condition: Callable[[dict[str, Any]], object], uid: int = OWNER) -> dict[str, Any]:
    """Return the answer once the kernel has sent what the condition waits for."""
    end = time.monotonic() + 5
    while True:
        of.hear()
        answer = ask(of, uid)
        if condition(answer):
            return answer
        assert time.monotonic() < end, answer
        time.sleep(0.02)


def records(answer: dict[str, Any]) -> set[tuple[Any, ...]]:
    return {tuple(row[2:]) for row in answer["records"]}


def tallies(answer: dict[str, Any]) -> dict[tuple[Any, ...], int]:
    return {tuple(row[:4]): row[4] for row in answer["tallies"]}


def test_each_kind_of_packet_is_recorded_with_protocol_port_and_address(hosts: Hosts, writer: Writer) -> None:
    ask(writer)
    hosts.send(FORBIDDEN, 9, 3)
    assert hosts.connect(FORBIDDEN, 443).startswith("refused")
    hosts.python("in", ICMP, FORBIDDEN)
    hosts.send(GATEWAY, 53, 1)
    wanted = {
        (INSIDE, 17, 9, FORBIDDEN),
        (INSIDE, 6, 443, FORBIDDEN),
        (INSIDE, 1, 8 << 8, FORBIDDEN),
        (INSIDE, 17, 53, GATEWAY),
    }
    answer = heard(writer, lambda answer: records(answer) >= wanted)
    assert records(answer) == wanted
    assert answer["problem"] == ""
    # One of the three datagrams was logged, all are counted.
    assert sum(row[5:] == [FORBIDDEN] and row[4] == 9 for row in answer["records"]) == 1
    assert tallies(answer)[INSIDE, 17, 9, FORBIDDEN] == 3
    assert answer["totals"] == {INSIDE: 6}


def test_a_flood_is_counted_to_the_packet_and_hides_nothing_of_the_same_source(
    hosts: Hosts, writer: Writer
) -> None:
    ask(writer)
    hosts.send(FORBIDDEN, 9, 5000)
    # With one rate for all packets of a source, this one would be lost.
    hosts.send(FORBIDDEN, 10, 1)
    answer = heard(writer, lambda answer: (INSIDE, 17, 10, FORBIDDEN) in records(answer))
    assert tallies(answer)[INSIDE, 17, 9, FORBIDDEN] == 5000
    assert answer["totals"] == {INSIDE: 5001}


def test_a_scan_is_logged_at_the_limited_rate_and_counted_in_the_total(hosts: Hosts, writer: Writer) -> None:
    ask(writer)
    hosts.python("in", SCAN, FORBIDDEN, 1000, 4000)
    hosts.send(FORBIDDEN, 9, 1, where="two")
    answer = heard(writer, lambda answer: (NEIGHBOUR, 17, 9, FORBIDDEN) in records(answer))
    assert answer["totals"] == {INSIDE: 3000}
    # Each one logged was added to the set: what one container can put there is bounded by the same rate.
    count = len(answer["tallies"])
    assert 50 <= count < 500


def test_another_user_is_told_nothing(hosts: Hosts, writer: Writer) -> None:
    sh(
        f"ip link add {SECOND} type bridge; ip addr add 198.51.100.129/26 dev {SECOND}; ip link set {SECOND} up"
    )
    apply(writer, OTHER, SECOND, "198.51.100.128/26", "198.51.100.129")
    ask(writer)
    hosts.send(FORBIDDEN, 9, 10)
    assert records(heard(writer, records)) == {(INSIDE, 17, 9, FORBIDDEN)}
    other = ask(writer, OTHER)
    assert (other["records"], other["tallies"], other["totals"]) == ([], [], {})
    assert (other["next"], other["lost"]) == (0, 0)
    # Asking for sources that are not one's own counts nothing and tells nothing.
    assert ask(writer, OTHER, sources=[INSIDE, NEIGHBOUR])["totals"] == {}


def test_who_takes_over_a_subnet_learns_nothing_of_the_one_before(hosts: Hosts, writer: Writer) -> None:
    ask(writer)
    hosts.send(FORBIDDEN, 9, 10)
    assert tallies(heard(writer, records)) == {(INSIDE, 17, 9, FORBIDDEN): 10}
    sh(f"""
    ip link del {BRIDGE}; ip link add {SECOND} type bridge; ip addr add {GATEWAY}/26 dev {SECOND}
    ip link set {SECOND} up
    """)
    apply(writer, OTHER, SECOND, "192.0.2.0/26", GATEWAY)
    other = ask(writer, OTHER)
    assert (other["records"], other["tallies"], other["totals"]) == ([], [], {INSIDE: 0})
    assert ask(writer, OWNER)["records"] == []


def test_a_source_without_a_permission_is_counted_when_asked_for_and_stays_so(
    hosts: Hosts, writer: Writer
) -> None:
    ask(writer)
    hosts.send(FORBIDDEN, 9, 10)
    apply(writer, OWNER, BRIDGE, "192.0.2.0/26", GATEWAY, Element(NEIGHBOUR, "tcp", 443, ALLOWED))
    hosts.send(FORBIDDEN, 9, 10)
    assert ask(writer)["totals"] == {INSIDE: 20, NEIGHBOUR: 0}
    ask(writer, sources=[])
    apply(writer, OWNER, BRIDGE, "192.0.2.0/26", GATEWAY)
    assert ask(writer, sources=[])["totals"] == {}


def test_a_group_that_somebody_else_reads_is_a_problem_that_is_told_and_tried_again(
    hosts: Hosts, writer: Writer
) -> None:
    assert writer.journal is not None
    late = Log(SKELETON.nflog_group)
    assert not late.open()
    assert f"NFLOG group {SKELETON.nflog_group}" in late.problem
    assert "another program listens there" in late.problem
    writer.journal.close()
    assert late.open()
    late.close()


def test_the_rules_stay_the_same_when_they_are_read_back(hosts: Hosts, writer: Writer) -> None:
    assert writer.audit().steps == ()
    if hosts.driver == OWN:
        listed = sh("nft list chain inet corral record")
        assert "log prefix" in listed
        assert "add @seen" in listed
    else:
        listed = hosts.sh("iptables-nft -S CORRAL-LOG")
        assert "NFLOG" in listed
        assert "SET" in listed
