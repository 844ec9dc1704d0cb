"""Flows that are forgotten with their entries, on the real kernel."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.nfnetlink.nfctsocket import NFCTAttrTuple, NFCTSocket

from enforcer.netfilter import flows as module
from enforcer.netfilter.kernel import RealKernel
from enforcer.netfilter.model import Element

from .conftest import sh

pytestmark = pytest.mark.netns

Flow = tuple[str, str, int, int]  # source, destination, protocol, destination port

ONE, TWO, HERE, THERE = "192.0.2.2", "192.0.2.3", "203.0.113.10", "203.0.113.20"
TCP, UDP = socket.IPPROTO_TCP, socket.IPPROTO_UDP
FLOWS = [
    (src, dst, *kind)
    for src in (ONE, TWO)
    for dst in (HERE, THERE)
    for kind in ((TCP, 443), (TCP, 80), (UDP, 443))
]
EACH = 10


@pytest.fixture
def tracked(netns: None) -> Iterator[Callable[[], dict[Flow, int]]]:
    """The namespace's flows: every combination of two sources, two destinations, three ports, ten times."""
    # Loading a rule that looks at flows turns tracking on in this namespace.
    sh("iptables-nft -A INPUT -m conntrack --ctstate NEW -j ACCEPT")
    table = NFCTSocket()
    try:
        for source, destination, proto, port in FLOWS:
            for sport in range(40000, 40000 + EACH):
                there = NFCTAttrTuple(saddr=source, daddr=destination, proto=proto, sport=sport, dport=port)
                state = {"tcpi_state": 3} if proto == TCP else {}
                table.entry("add", timeout=600, tuple_orig=there, tuple_reply=there.reverse(), **state)

        def count() -> dict[Flow, int]:
            found: dict[Flow, int] = {}
            for row in table.dump():
                original = row.get_attr("CTA_TUPLE_ORIG")
                ends, kind = original.get_attr("CTA_TUPLE_IP"), original.get_attr("CTA_TUPLE_PROTO")
                key = (
                    ends.get_attr("CTA_IP_V4_SRC"),
                    ends.get_attr("CTA_IP_V4_DST"),
                    kind.get_attr("CTA_PROTO_NUM"),
                    kind.get_attr("CTA_PROTO_DST_PORT"),
                )
                found[key] = found.get(key, 0) + 1
            return found

        yield count
    finally:
        table.close()


class Older(NFCTSocket):
    """A kernel that deletes by complete tuples only."""

    def entry(self, cmd: str, **words: Any) -> Any:
        if cmd == "del" and words["tuple_orig"].sport is None:
            raise NetlinkError(errno.EINVAL)
        return super().entry(cmd, **words)


@pytest.mark.parametrize("older", [False, True], ids=["this kernel", "an older kernel"])
def test_of_all_flows_exactly_those_of_withdrawn_elements_are_forgotten(
    tracked: Callable[[], dict[Flow, int]], older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tracked() == dict.fromkeys(FLOWS, EACH)
    if older:
        monkeypatch.setattr(module, "NFCTSocket", Older)
    kernel = RealKernel()
    try:
        kernel.forget_flows([])
        kernel.forget_flows([Element(ONE, "tcp", 8443, HERE)])
        assert tracked() == dict.fromkeys(FLOWS, EACH)
        kernel.forget_flows([Element(ONE, "tcp", 443, HERE), Element(TWO, "udp", 443, THERE)])
        gone = {(ONE, HERE, TCP, 443), (TWO, THERE, UDP, 443)}
        assert tracked() == dict.fromkeys(set(FLOWS) - gone, EACH)
    finally:
        kernel.close()
