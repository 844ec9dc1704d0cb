from __future__ import annotations

import json
from ipaddress import IPv4Address, IPv4Network
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral import subnets
from corral.subnets import DEFAULT_RANGES, Plan, Taken, allocate, choose
from policy.container import network_body
from policy.container import network_differences as differences
from policy.errors import EngineError
from policy.identity import Sandbox

RANGES = [IPv4Network(text) for text in DEFAULT_RANGES]
SANDBOX = Sandbox("demo-0123abcd")


def taken(*texts: str) -> list[Taken]:
    return [Taken(IPv4Network(text), "route of eth0") for text in texts]


def test_gateway_is_the_first_address_and_strangers_get_the_top_quarter() -> None:
    plan = Plan(IPv4Network("172.16.4.64/26"))
    assert str(plan.gateway) == "172.16.4.65"
    assert str(plan.strangers) == "172.16.4.112/28"
    assert (str(plan.addresses[0]), str(plan.addresses[-1])) == ("172.16.4.66", "172.16.4.111")
    assert len(plan.addresses) == 46


def test_the_first_free_subnet_of_the_first_range_is_taken() -> None:
    assert str(choose(RANGES, []).subnet) == "172.16.0.0/26"
    assert str(choose(RANGES, taken("172.16.0.0/26", "172.16.0.64/27")).subnet) == "172.16.0.128/26"


def test_a_route_over_a_whole_range_moves_on_to_the_next() -> None:
    assert str(choose(RANGES, taken("172.16.0.0/12")).subnet) == "10.213.0.0/26"
    assert str(choose(RANGES, taken("172.16.0.0/12", "10.0.0.0/8")).subnet) == "192.168.128.0/26"


def test_no_free_subnet_says_what_is_in_the_way_of_each_range() -> None:
    with pytest.raises(EngineError) as caught:
        choose(RANGES, taken("172.16.0.0/12", "10.0.0.0/8", "192.168.0.0/16"))
    for text in ("172.16.0.0/16 overlaps 172.16.0.0/12 (route of eth0)", "192.168.128.0/17 overlaps"):
        assert text in caught.value.message
    assert "subnet_range" in (caught.value.hint or "")


def test_a_range_smaller_than_a_subnet_is_explained() -> None:
    with pytest.raises(EngineError, match=r"10\.0\.0\.0/27 is smaller than a /26"):
        choose([IPv4Network("10.0.0.0/27")], [])


NETWORKS = st.builds(
    lambda base, prefix: IPv4Network((int(IPv4Address("172.16.0.0")) + base, prefix), strict=False),
    st.integers(0, 2**16 - 1),
    st.integers(18, 32),
)


@given(st.lists(NETWORKS, max_size=12))
def test_the_choice_never_overlaps_anything_in_use(used: list[IPv4Network]) -> None:
    chosen = choose(RANGES, [Taken(network, "x") for network in used]).subnet
    assert not any(chosen.overlaps(network) for network in used)


def test_routes_addresses_and_blackholes_count_but_default_routes_do_not() -> None:
    output = json.dumps(
        [
            {"dst": "default", "dev": "eth0"},
            {"dst": "0.0.0.0/1", "dev": "tun0"},
            {"dst": "128.0.0.0/1", "dev": "tun0"},
            {"dst": "172.16.3.0/24", "dev": "tun0"},
            {"type": "local", "dst": "172.16.9.1", "dev": "lo", "table": "local"},
            {"type": "blackhole", "dst": "172.16.128.0/17"},
            {"type": "broadcast", "dst": "172.16.77.255", "dev": "eth0", "table": "local"},
        ]
    )
    found = {str(row.network): row.by for row in subnets.taken_by_routes(output)}
    assert found == {
        "172.16.3.0/24": "route of tun0",
        "172.16.9.1/32": "address of lo",
        "172.16.128.0/17": "route of blackhole",
    }


def test_docker_networks_and_dns_servers_are_avoided() -> None:
    networks = [
        {"Name": "bridge", "IPAM": {"Config": [{"Subnet": "172.17.0.0/16"}, {"Subnet": "fd00::/64"}]}},
        {"Name": "host", "IPAM": {"Config": None}},
    ]
    assert [str(row.network) for row in subnets.taken_by_networks(networks)] == ["172.17.0.0/16"]
    found = subnets.taken_by_resolvers("# x\nnameserver 172.16.0.53\nnameserver fd00::1\nsearch example\n")
    assert [str(row.network) for row in found] == ["172.16.0.53/32"]
    assert str(choose(RANGES, found).subnet) == "172.16.0.64/26"


def container(address: str = "", promised: str = "") -> dict[str, Any]:
    endpoint = {"IPAddress": address, "IPAMConfig": {"IPv4Address": promised} if promised else None}
    return {"NetworkSettings": {"Networks": {"net": endpoint}}}


def test_an_address_promised_to_a_stopped_container_is_not_given_again() -> None:
    plan = Plan(IPv4Network("172.16.0.0/26"))
    used = subnets.addresses_in_use(
        [container(promised="172.16.0.2"), container("172.16.0.3"), container()], "net"
    )
    assert str(allocate(plan, used)) == "172.16.0.4"


def test_the_lowest_free_address_is_given_and_a_full_network_is_an_error() -> None:
    plan = Plan(IPv4Network("172.16.0.0/26"))
    assert str(allocate(plan, plan.addresses[1:])) == "172.16.0.2"
    with pytest.raises(EngineError, match="all 46 addresses"):
        allocate(plan, plan.addresses)


def test_a_session_gets_another_address_than_the_one_before_it() -> None:
    plan = Plan(IPv4Network("172.16.0.0/26"))
    given = ["172.16.0.2"]
    while len(given) < len(plan.addresses):
        given.append(str(allocate(plan, [], given[-1])))
    assert given == [str(address) for address in plan.addresses]
    # Round again, past what is held.
    assert str(allocate(plan, [IPv4Address("172.16.0.2")], given[-1])) == "172.16.0.3"
    for odd in ("", "172.16.0.1", "10.0.0.1", "nonsense\0"):
        assert str(allocate(plan, [], odd)) == "172.16.0.2"


def inspect_of(plan: Plan, **changes: Any) -> dict[str, Any]:
    body = network_body(SANDBOX, 1000, *map(str, (plan.subnet, plan.gateway, plan.strangers)))
    found = {key: value for key, value in body.items() if key != "CheckDuplicate"}
    found["IPAM"] = {"Options": None, **body["IPAM"]}
    return {**found, **changes}


def test_what_docker_reports_for_our_own_network_has_no_differences() -> None:
    plan = Plan(IPv4Network("172.16.0.0/26"))
    wanted = network_body(SANDBOX, 1000, *map(str, (plan.subnet, plan.gateway, plan.strangers)))
    assert differences(inspect_of(plan), wanted) == []
    assert subnets.plan_for(inspect_of(plan)) == plan


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("Internal", True),
        ("EnableIPv6", True),
        ("Attachable", True),
        ("Driver", "macvlan"),
        ("Labels", {}),
        ("Options", {"com.docker.network.bridge.enable_icc": "true"}),
    ],
)
def test_each_field_that_differs_is_named(key: str, value: Any) -> None:
    plan = Plan(IPv4Network("172.16.0.0/26"))
    wanted = network_body(SANDBOX, 1000, *map(str, (plan.subnet, plan.gateway, plan.strangers)))
    (difference,) = differences(inspect_of(plan, **{key: value}), wanted)
    assert difference.startswith(f"{key} is ")


@pytest.mark.parametrize(
    "config",
    [
        [],
        [{"Subnet": "172.16.0.0/24", "Gateway": "172.16.0.1", "IPRange": "172.16.0.240/28"}],
        [{"Subnet": "172.16.0.0/26", "Gateway": "172.16.0.9", "IPRange": "172.16.0.48/28"}],
        [{"Subnet": "172.16.0.0/26", "Gateway": "172.16.0.1"}],
        [{"Subnet": "fd00::/64"}],
    ],
)
def test_a_network_that_is_laid_out_differently_has_no_plan(config: list[dict[str, str]]) -> None:
    assert subnets.plan_for({"IPAM": {"Config": config}}) is None


def test_an_mtu_that_the_engine_gives_every_network_is_no_difference() -> None:
    plan = Plan(IPv4Network("172.16.0.0/26"))
    wanted = network_body(SANDBOX, 1000, str(plan.subnet), str(plan.gateway), str(plan.strangers))
    options = {**wanted["Options"], "com.docker.network.driver.mtu": "1400"}
    assert differences(inspect_of(plan, Options=options), wanted) == []
    options["com.docker.network.bridge.host_binding_ipv4"] = "192.0.2.1"
    assert len(differences(inspect_of(plan, Options=options), wanted)) == 1
