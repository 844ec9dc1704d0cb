"""Connections of the internet's servers whose other end is gone.

A sandbox that ends in the middle of a download leaves a server that sends again and again for a quarter of an hour,
and the box answers each time, with ICMP, to the server's address: packets of a former test in the next one's counters.
"""

from __future__ import annotations

import re

from . import execute, network
from .layout import Layout

_ADDRESS = r"(\S+):(\d+)"
_ROW = re.compile(rf"^\S+ +\d+ +\d+ +{_ADDRESS} +{_ADDRESS} +timer:\(on,[^,]*,(\d+)\)")


def stuck(lab: Layout) -> list[tuple[str, str, str, str]]:
    """(address, port, peer, peer's port) of each connection that sends something a second time at least."""
    return parse(network.in_netns(lab.inet_netns, [execute.tool("ss"), "-tnoaH"]))


def parse(text: str) -> list[tuple[str, str, str, str]]:
    """Rows of `ss -tnoaH` whose timer is that of a retransmission, with one made already."""
    found = [match.groups() for line in text.splitlines() if (match := _ROW.match(line))]
    return [(address, port, peer, other) for address, port, peer, other, again in found if int(again)]


def end_stuck(lab: Layout) -> None:
    """End them at once. (A kernel without INET_DIAG_DESTROY ends none.)"""
    for address, port, peer, other in stuck(lab):
        chosen = ["src", f"{address}:{port}", "dst", f"{peer}:{other}"]
        network.in_netns(lab.inet_netns, [execute.tool("ss"), "-KtnaH", *chosen])
