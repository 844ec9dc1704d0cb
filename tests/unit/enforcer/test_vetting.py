"""No name opens the host, Docker, a private network or a metadata service."""

from __future__ import annotations

import json
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enforcer.vetting import Vetting

VECTORS = json.loads((Path(__file__).parents[2] / "data" / "host-vectors.json").read_text())["addresses"]


def test_all_vectors_are_there() -> None:
    assert len(VECTORS) == 43
    assert {vector["expect"] for vector in VECTORS} == {"ok", "refuse"}


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["addr"])
def test_vector(vector: dict[str, str]) -> None:
    verdict = Vetting().check(vector["addr"])
    assert verdict.ok == (vector["expect"] == "ok")
    assert bool(verdict.reason) == (not verdict.ok)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("10.1.1.1", "private (10.0.0.0/8)"),
        ("127.0.0.1", "loopback (127.0.0.0/8)"),
        ("169.254.169.254", "link-local/metadata (169.254.0.0/16)"),
        ("168.63.129.16", "cloud metadata (168.63.129.16/32)"),
        ("100.100.100.200", "cloud metadata (100.100.100.200/32)"),
        ("203.0.113.9", "documentation (203.0.113.0/24)"),
        ("::ffff:8.8.8.8", "IPv4-mapped (::ffff:0:0/96)"),
        ("64:ff9b::808:808", "NAT64 (64:ff9b::/96)"),
        ("5f00::1", "outside global unicast (2000::/3)"),
        ("2606:4700::1%eth0", "bound to one interface (it has a zone index)"),
        ("8.8.8.999", "not an IP address"),
        ("08.8.8.8", "not an IP address"),
        ("8.8.8.8\n", "not an IP address"),
        (" 8.8.8.8", "not an IP address"),
        ("134744072", "not an IP address"),
        ("٨.8.8.8", "not an IP address"),
        ("", "not an IP address"),
    ],
)
def test_reason_names_the_range(address: str, reason: str) -> None:
    assert Vetting().check(address).reason == reason


def test_a_number_is_not_an_address() -> None:
    assert not Vetting().check(134744072)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "last", "below", "above"),
    [
        ("10.0.0.0", "10.255.255.255", "9.255.255.255", "11.0.0.0"),
        ("172.16.0.0", "172.31.255.255", "172.15.255.255", "172.32.0.0"),
        ("100.64.0.0", "100.127.255.255", "100.63.255.255", "100.128.0.0"),
        ("198.18.0.0", "198.19.255.255", "198.17.255.255", "198.20.0.0"),
        ("192.88.99.0", "192.88.99.255", "192.88.98.255", "192.88.100.0"),
        ("224.0.0.0", "255.255.255.255", "223.255.255.255", None),
        ("0.0.0.0", "0.255.255.255", None, "1.0.0.0"),
        ("2001::", "2001:1ff:ffff:ffff:ffff:ffff:ffff:ffff", None, "2001:200::"),
        ("3fff::", "3fff:fff:ffff:ffff:ffff:ffff:ffff:ffff", "3ffe:ffff::", "3fff:1000::"),
        ("2002::", "2002:ffff:ffff:ffff:ffff:ffff:ffff:ffff", None, "2003::"),
    ],
)
def test_edges_of_ranges(first: str, last: str, below: str | None, above: str | None) -> None:
    vetting = Vetting()
    assert not vetting.check(first)
    assert not vetting.check(last)
    for outside in filter(None, (below, above)):
        assert vetting.check(outside), outside


def test_permit_lifts_only_its_own_range() -> None:
    vetting = Vetting.of(permit=["203.0.113.0/24"])
    assert vetting.check("203.0.113.10")
    assert not vetting.check("198.51.100.10")
    assert not vetting.check("10.0.0.1")


def test_service_configuration_may_lift_a_private_range() -> None:
    vetting = Vetting.of(permit=["10.20.0.0/16"])
    assert vetting.check("10.20.3.4")
    assert vetting.check("10.21.0.1").reason == "private (10.0.0.0/8)"


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "0.0.0.0",
        "169.254.169.254",
        "168.63.129.16",
        "100.100.100.200",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "fe80::1",
        "ff02::1",
        "fd00:ec2::254",
        "::ffff:8.8.8.8",
        "64:ff9b::808:808",
        "2002:7f00:1::",
    ],
)
def test_permitting_everything_never_opens_the_host_the_link_or_metadata(address: str) -> None:
    assert not Vetting.of(permit=["0.0.0.0/0", "::/0"]).check(address)


def test_host_docker_and_corral_addresses_stay_closed_inside_a_permitted_range() -> None:
    vetting = Vetting.of(
        permit=["172.16.0.0/12", "203.0.113.0/24"],
        host_addresses=["203.0.113.1", "fe80::2%eth0", "8.8.4.4"],
        docker_subnets=["172.17.0.0/16"],
        corral_subnets=["172.16.0.0/26"],
    )
    assert vetting.check("203.0.113.1").reason == "an address of this host"
    assert vetting.check("8.8.4.4").reason == "an address of this host"
    assert vetting.check("172.17.0.2").reason == "Docker network 172.17.0.0/16"
    assert vetting.check("172.16.0.3").reason == "corral network 172.16.0.0/26"
    assert vetting.check("172.18.0.1")


def test_a_public_docker_subnet_is_closed_without_any_permit() -> None:
    assert not Vetting.of(docker_subnets=["8.8.8.0/24"]).check("8.8.8.8")


def test_equal_knowledge_in_another_order_compares_equal() -> None:
    one = Vetting.of(
        ["10.0.0.0/8", "203.0.113.0/24"], ["10.0.0.1", "10.0.0.2"], ["172.17.0.0/16", "10.9.0.0/16"]
    )
    two = Vetting.of(
        ["203.0.113.0/24", "10.0.0.0/8"], ["10.0.0.2", "10.0.0.1"], ["10.9.0.0/16", "172.17.0.0/16"]
    )
    assert one == two
    assert one != Vetting.of(["10.0.0.0/8"])


def test_a_network_with_host_bits_is_an_error() -> None:
    with pytest.raises(ValueError, match="host bits"):
        Vetting.of(permit=["203.0.113.1/24"])


@given(st.ip_addresses())
def test_nothing_the_standard_library_calls_private_or_special_passes(
    address: IPv4Address | IPv6Address,
) -> None:
    special = address.is_private or address.is_loopback or address.is_link_local or address.is_multicast
    if special or address.is_reserved or address.is_unspecified:
        assert not Vetting().check(str(address))


@given(st.text(max_size=40))
def test_any_text_gets_a_verdict(text: str) -> None:
    verdict = Vetting().check(text)
    if verdict:
        assert ip_address(text)
