"""Which routes and rules take a sandbox's addresses away."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network
from typing import Any

import pytest

from corral.doctor.records import Routing
from corral.doctor.routes import detours, first_answer, overlapping

BRIDGE = "corral-0a1b2c3d"
SUBNET = IPv4Network("172.16.0.64/26")
ADDRESS = IPv4Address("172.16.0.66")
LOCAL = {"priority": 0, "src": "all", "table": "local"}
MAIN = {"priority": 32766, "src": "all", "table": "main"}


def rule(priority: int, table: str = "52", **more: Any) -> dict[str, Any]:
    return {"priority": priority, "src": "all", "table": table, **more}


EXIT_NODE = [{"dst": "default", "dev": "tailscale0", "table": "52"}]


@pytest.mark.parametrize(
    ("rules", "routes", "answer"),
    [
        ([], [], ""),
        ([rule(5270)], EXIT_NODE, "at tailscale0 in table 52 (rule 5270)"),
        # Tables that say nothing about sandboxes.
        ([rule(5270)], [{"dst": "100.64.0.0/10", "dev": "tailscale0", "table": "52"}], ""),
        ([rule(5270)], [*EXIT_NODE, {"dst": "172.16.0.0/12", "type": "throw", "table": "52"}], ""),
        ([rule(5270)], [{"dst": "default", "dev": "eth0"}], ""),
        # Rules that are not asked about packets without a mark, or only about others' addresses.
        ([rule(5270, fwmark="0x80000", fwmask="0xff0000")], EXIT_NODE, ""),
        ([rule(5270, dst="192.0.2.0", dstlen=24)], EXIT_NODE, ""),
        ([{**rule(5270), "src": "192.0.2.0", "srclen": 24}], EXIT_NODE, ""),
        ([rule(5270, iif="eth0")], EXIT_NODE, ""),
        ([rule(40000)], EXIT_NODE, ""),
        # wg-quick: main is asked first for everything but its default route.
        ([rule(32764, "main", suppress_prefixlen=0), rule(32765, "51820", **{"not": None}, fwmark="0xca6c")],
         [{"dst": "default", "dev": "wg0", "table": "51820"}], ""),
        ([rule(32765, "51820", **{"not": None}, fwmark="0xca6c")],
         [{"dst": "default", "dev": "wg0", "table": "51820"}], "at wg0 in table 51820 (rule 32765)"),
        ([rule(5270, dst="172.16.0.0", dstlen=12)], EXIT_NODE, "at tailscale0 in table 52 (rule 5270)"),
        # The remedy.
        ([rule(5270), rule(100, "main", dst="172.16.0.0", dstlen=16)], EXIT_NODE, ""),
        ([{"priority": 9, "src": "all", "action": "unreachable"}], [], "nowhere: rule 9 is unreachable"),
        ([rule(5270)], [{"dst": "172.16.0.0/16", "type": "blackhole", "table": "52"}], "at blackhole in table 52 (rule 5270)"),
    ],
)  # fmt: skip
def test_what_answers_before_table_main(rules: list[Any], routes: list[Any], answer: str) -> None:
    assert first_answer([LOCAL, MAIN, *rules], routes, ADDRESS) == answer


def bridged(*routes: dict[str, Any], way: dict[str, Any] | None = None) -> Routing:
    own = {"dst": str(SUBNET), "dev": BRIDGE}
    return Routing({BRIDGE: SUBNET}, {BRIDGE: way or {"dev": BRIDGE}}, (LOCAL, MAIN), (own, *routes))


@pytest.mark.parametrize(
    ("route", "shadowing", "wider"),
    [
        ({"dst": "172.16.0.64/27", "dev": "tun0"}, True, False),
        ({"dst": "172.16.0.66", "dev": "tun0"}, True, False),
        ({"dst": "172.16.0.64/26", "dev": "tun0"}, True, False),
        ({"dst": "172.16.0.64/27", "type": "blackhole"}, True, False),
        ({"dst": "172.16.0.0/12", "dev": "tun0"}, False, True),
        ({"dst": "172.16.1.0/24", "dev": "tun0"}, False, False),
        ({"dst": "default", "dev": "tun0"}, False, False),
        ({"dst": "0.0.0.0/1", "dev": "tun0"}, False, False),
        ({"dst": "128.0.0.0/1", "dev": "tun0"}, False, False),
        ({"dst": "172.16.0.65", "dev": BRIDGE, "type": "local", "table": "local"}, False, False),
        ({"dst": "172.16.0.64/27", "dev": "tun0", "table": "52"}, False, False),
    ],
)
def test_routes_that_overlap_a_sandbox(route: dict[str, Any], shadowing: bool, wider: bool) -> None:
    routing = bridged(route)
    assert bool(overlapping(routing, shadowing=True)) is shadowing
    assert bool(overlapping(routing, shadowing=False)) is wider


def test_the_kernel_s_own_answer_counts_where_there_is_a_sandbox() -> None:
    assert detours(bridged(), [SUBNET]) == []
    elsewhere = {"dev": "tailscale0", "table": "52"}
    assert detours(bridged(way=elsewhere), []) == [
        f"172.16.0.64/26 of {BRIDGE} is looked for at tailscale0 in table 52"
    ]
    # What a route of table main explains is not said twice.
    assert detours(bridged({"dst": "172.16.0.64/27", "dev": "tun0"}, way={"dev": "tun0"}), []) == []


def test_without_a_sandbox_the_next_one_s_network_is_asked_for() -> None:
    routing = Routing({}, {}, (LOCAL, rule(5270), MAIN), tuple(EXIT_NODE))
    assert detours(routing, [IPv4Network("172.16.0.0/16")]) == [
        "172.16.0.0/16 would be looked for at tailscale0 in table 52 (rule 5270)"
    ]
    assert detours(Routing({}, {}, (LOCAL, MAIN)), [IPv4Network("172.16.0.0/16")]) == []
