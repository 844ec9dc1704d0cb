"""What the rules do to the packets of a sandbox that may reach all public addresses."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from enforcer.netfilter.detect import LEGACY, OWN
from enforcer.netfilter.ipsets import Sets
from enforcer.netfilter.kernel import RealKernel
from enforcer.netfilter.model import HALF, PROTOCOL_VERSION, Element
from enforcer.netfilter.opening import RESOLVER_PORT
from enforcer.netfilter.skeleton import OPENED, Skeleton
from enforcer.netfilter.writer import Writer

from .conftest import sh
from .test_packets import (
    ALLOWED,
    BRIDGE,
    FAR,
    FORBIDDEN,
    GATEWAY,
    INSIDE,
    NEIGHBOUR,
    SKELETON,
    UPLINK,
    Hosts,
    cuts_the_flow,
    grant,
    hosts,
    writer,
)

__all__ = ["hosts", "writer"]
pytestmark = pytest.mark.netns

# One address of each kind that is closed, and that a host would have a route to.
CLOSED = (
    "10.9.9.9",
    "172.20.0.9",
    "192.168.9.9",
    "100.64.9.9",
    "169.254.169.254",
    "168.63.129.16",
    "198.18.0.9",
)


def opened(of: Writer, *sources: str, host: tuple[Element, ...] = (), uid: int = 1000) -> Mapping[str, Any]:
    return of.handle(
        uid,
        {
            "v": PROTOCOL_VERSION,
            "op": "apply",
            "sandboxes": [{"bridge": BRIDGE, "subnet": "192.0.2.0/26", "gateway": GATEWAY}],
            "pins": [],
            "host": [[*e.row(), ""] for e in host],
            "open": [[source, "box main open"] for source in sources],
        },
    )


def count(at: Hosts, *addresses: str) -> None:
    """Give the far end these addresses, and count what arrives for them."""
    for address in addresses:
        sh(f"ip -n {at.tag}-far addr add {address}/32 dev lo 2>/dev/null || true")
    # Every one of them is routed: what does not arrive was stopped.
    rules = "".join(f'ip daddr {a} counter comment "{a}"\n' for a in addresses)
    script = f"table ip more {{ chain c {{ type filter hook prerouting priority raw; policy accept;\n{rules}}}\n}}\n"
    command = ["nsenter", f"--net=/run/netns/{at.tag}-far", "nft", "-f", "-"]
    subprocess.run(command, input=script, text=True, check=True)


def arrived(at: Hosts, address: str) -> int:
    listing = sh(f"ip netns exec {at.tag}-far nft list table ip more")
    line = next(line for line in listing.splitlines() if f'"{address}"' in line)
    return int(line.split("packets ")[1].split()[0])


@pytest.fixture
def ways(hosts: Hosts) -> Iterator[Hosts]:
    count(hosts, *CLOSED)
    yield hosts


def test_an_open_source_reaches_public_addresses_on_every_port_but_those_of_dns(
    hosts: Hosts, writer: Writer
) -> None:
    hosts.serve("far", 443, 8123, 53, 853)
    answer = opened(writer, INSIDE)
    assert answer["ok"], answer
    assert [row[0] for row in answer["open"]] == [INSIDE]
    for port in (443, 8123):
        assert hosts.connect(ALLOWED, port) == "open"
    hosts.send(ALLOWED, 4000)
    assert hosts.arrived(ALLOWED) >= 100
    before = hosts.arrived(FORBIDDEN)
    for port in (53, 853):
        assert hosts.connect(FORBIDDEN, port).startswith("refused")
        hosts.send(FORBIDDEN, port)
    assert hosts.arrived(FORBIDDEN) == before == 0
    # Its neighbour is not open.
    assert hosts.connect(ALLOWED, 443, "two").startswith("refused")


def test_what_is_closed_receives_nothing_beside_what_is_open(ways: Hosts, writer: Writer) -> None:
    opened(writer, INSIDE)
    for address in (*CLOSED, FAR):
        ways.send(address)
        assert ways.connect(address, 443).startswith("refused"), address
    assert {address: arrived(ways, address) for address in CLOSED} == dict.fromkeys(CLOSED, 0)
    # The far end's address in the network this host is attached to.
    assert ways.arrived(FAR) == 0
    ways.send(ALLOWED)
    assert ways.arrived(ALLOWED) == 100
    # The control: without the rules each of them arrives.
    sh("nft delete table inet corral")
    ways.sh(
        f"iptables-nft -F; iptables-nft -P FORWARD ACCEPT; iptables-nft -t nat -A POSTROUTING -s {INSIDE} -j MASQUERADE"
    )
    for address in CLOSED:
        ways.send(address)
    assert {address: arrived(ways, address) for address in CLOSED} == dict.fromkeys(CLOSED, 100)


def test_the_host_and_neighbours_stay_closed(hosts: Hosts, writer: Writer) -> None:
    hosts.serve(None, 9000)
    hosts.serve("two", 8080)
    opened(writer, INSIDE, NEIGHBOUR)
    for address in (GATEWAY, UPLINK):
        assert hosts.connect(address, 9000).startswith("refused")
    assert hosts.connect(NEIGHBOUR, 8080).startswith(("refused", "timeout"))
    # Nobody outside opens a connection to it.
    hosts.serve("in", 3000)
    sh(f"ip -n {hosts.tag}-far route add {INSIDE}/32 via {UPLINK}")
    assert hosts.connect(INSIDE, 3000, "far") == "timeout"


def test_a_network_that_the_host_comes_to_is_closed(hosts: Hosts, writer: Writer) -> None:
    opened(writer, INSIDE)
    hosts.send(ALLOWED)
    assert hosts.arrived(ALLOWED) == 100
    sh("ip link add other0 type bridge && ip addr add 203.0.113.11/28 dev other0 && ip link set other0 up")
    sh(f"ip route add {ALLOWED}/32 via {FAR}")
    writer.prune()
    hosts.send(ALLOWED)
    assert hosts.arrived(ALLOWED) == 100
    sh("ip link del other0")
    writer.prune()
    hosts.send(ALLOWED)
    assert hosts.arrived(ALLOWED) == 200


@pytest.mark.parametrize(
    "tamper",
    [
        "nft flush set inet corral closed",
        "nft flush set inet corral open",
        "nft flush chain inet corral open_out",
        "nft flush chain inet corral forward_clear",
        "nft delete table inet corral",
    ],
)
def test_what_is_flushed_opens_nothing(ways: Hosts, writer: Writer, tamper: str) -> None:
    if (ways.driver, tamper) == (OWN, "nft delete table inet corral"):
        pytest.skip("there the table is all there is")
    opened(writer, INSIDE)
    ways.send(ALLOWED)
    assert ways.arrived(ALLOWED) == 100
    sh(tamper)
    for address in (ALLOWED, FORBIDDEN, *CLOSED):
        ways.send(address)
    assert ways.arrived(ALLOWED) == 100
    assert ways.arrived(FORBIDDEN) == 0
    assert {address: arrived(ways, address) for address in CLOSED} == dict.fromkeys(CLOSED, 0)
    # It is mended, and the source is open again for the rest of its time.
    writer.heal("the test")
    if tamper.endswith("set inet corral open"):
        opened(writer, INSIDE)
    ways.send(ALLOWED)
    assert ways.arrived(ALLOWED) == 200


def test_a_single_range_taken_out_of_the_set_opens_no_private_one(ways: Hosts, writer: Writer) -> None:
    opened(writer, INSIDE)
    sh("nft delete element inet corral closed { 198.51.100.0/24 }")
    for address in CLOSED:
        ways.send(address)
    assert {address: arrived(ways, address) for address in CLOSED} == dict.fromkeys(CLOSED, 0)
    ways.send(FAR)
    assert ways.arrived(FAR) == 100
    writer.heal("the test")
    ways.send(FAR)
    assert ways.arrived(FAR) == 100


def live(of: Writer) -> set[str]:
    return {source for source, row in of.kernel.opened().items() if row.timeout != HALF}


def test_an_element_that_ends_closes(hosts: Hosts, writer: Writer) -> None:
    opened(writer, INSIDE)
    sh(
        f"nft 'delete element inet corral open {{ {INSIDE} }}; add element inet corral open {{ {INSIDE} timeout 1s }}'"
    )
    hosts.send(ALLOWED)
    assert hosts.arrived(ALLOWED) == 100
    end = 0
    while live(writer):
        end += 1
        assert end < 100
        sh("sleep 0.05")
    hosts.send(ALLOWED)
    assert hosts.arrived(ALLOWED) == 100


def test_taking_it_back_cuts_the_flow(hosts: Hosts, writer: Writer) -> None:
    hosts.serve("far", 443)
    opened(writer, INSIDE)
    cuts_the_flow(hosts, lambda: opened(writer))


def test_only_the_owner_of_a_bridge_opens_its_sources(hosts: Hosts, writer: Writer) -> None:
    opened(writer, uid=1000)
    answer = opened(writer, INSIDE, uid=1001)
    assert answer["refused"]
    assert writer.kernel.opened() == {}
    answer = opened(writer, GATEWAY, "192.0.2.0", "198.51.100.9", uid=1000)
    assert len(answer["refused"]) == 3
    assert writer.kernel.opened() == {}


def test_nothing_opens_while_the_rules_do_not_stand(hosts: Hosts, writer: Writer) -> None:
    opened(writer)
    sh("ip link del up0")
    real = writer.kernel.carry_out
    writer.kernel.carry_out = lambda _plan: None  # type: ignore[method-assign]
    answer = opened(writer, INSIDE)
    assert any("nothing new is granted" in text for text in answer["refused"])
    assert writer.kernel.opened() == {}
    writer.kernel.carry_out = real  # type: ignore[method-assign]
    answer = opened(writer, INSIDE)
    assert list(writer.kernel.opened()) == [INSIDE]


@pytest.mark.parametrize("sources", [(INSIDE,), ()], ids=["open", "answered"])
def test_questions_to_the_gateway_are_led_to_the_service(
    hosts: Hosts, writer: Writer, sources: tuple[str, ...]
) -> None:
    hosts.serve(None, RESOLVER_PORT, 53)
    led = tuple(Element(INSIDE, proto, 53, INSIDE) for proto in ("tcp", "udp"))
    dns = tuple(Element(INSIDE, proto, RESOLVER_PORT, GATEWAY) for proto in ("tcp", "udp"))
    opened(writer, *sources, host=(*led, *dns))
    assert hosts.connect(GATEWAY, 53) == "open"
    asked = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(1); s.connect((sys.argv[1], 53))
try:
    s.send(b"question"); print(s.recv(100).decode())
except OSError as error: print(type(error).__name__)
"""
    assert hosts.python("in", asked, GATEWAY) == "question"
    # One that is not open does not get there, and no other address of the host answers.
    assert hosts.connect(GATEWAY, 53, "two").startswith("refused")
    assert hosts.connect(UPLINK, 53).startswith("refused")
    assert hosts.python("two", asked, GATEWAY) != "question"


def test_who_may_ask_opens_no_port_of_this_host_while_the_redirection_is_missing(
    hosts: Hosts, writer: Writer
) -> None:
    if hosts.driver == OWN:
        pytest.skip("there it is in the table that decides")
    hosts.serve(None, RESOLVER_PORT, 53)
    led = tuple(Element(INSIDE, proto, 53, INSIDE) for proto in ("tcp", "udp"))
    opened(writer, host=(*led, Element(INSIDE, "tcp", RESOLVER_PORT, GATEWAY)))
    assert hosts.connect(GATEWAY, 53) == "open"
    tool = "iptables-legacy" if hosts.driver == LEGACY else "iptables-nft"
    sh(f"{tool} -t nat -F PREROUTING")
    assert hosts.connect(GATEWAY, 53).startswith("refused")
    assert hosts.connect(GATEWAY, RESOLVER_PORT) == "open"


def test_a_service_of_the_host_on_the_port_of_names_is_reached_by_who_has_no_names(
    hosts: Hosts, writer: Writer
) -> None:
    hosts.serve(None, 53)
    opened(writer, host=(Element(INSIDE, "tcp", 53, GATEWAY),))
    assert hosts.connect(GATEWAY, 53) == "open"


def test_a_range_that_root_permits_is_open_and_metadata_is_not(hosts: Hosts) -> None:
    from ipaddress import IPv4Network

    count(hosts, *CLOSED)
    kernel = RealKernel(driver=hosts.driver)
    lifted = (IPv4Network("10.9.0.0/16"), IPv4Network("169.254.0.0/16"), IPv4Network("168.63.0.0/16"))
    of = Writer(kernel, Skeleton(permitted=lifted), "test", lifted)
    try:
        of.heal("the start")
        opened(of, INSIDE)
        for address in CLOSED:
            hosts.send(address)
        assert {address: arrived(hosts, address) for address in CLOSED} == {
            **dict.fromkeys(CLOSED, 0),
            "10.9.9.9": 100,
        }
    finally:
        kernel.close()


def test_a_set_that_is_full_of_others_opens_nothing_more(hosts: Hosts, writer: Writer) -> None:
    """Closed ranges are constants and a handful of networks: there is no limit that they could reach."""
    listing = sh("nft list set inet corral closed")
    assert "size" not in listing
    listing = sh("nft list chain inet corral open_out")
    assert "10.0.0.0/8" in listing
    assert "169.254.0.0/16" in listing


def forge(mark: int = SKELETON.mark) -> None:
    """Set our bit on everything, as another program could: before routing, and as late as it can be done."""
    chains = "".join(
        f"chain {hook}{place} {{ type filter hook {hook} priority {priority}; meta mark set meta mark | {mark:#x}\n}}\n"
        for hook in ("prerouting", "forward", "input")
        for place, priority in (("a", -150), ("b", -1), ("c", 0))
    )
    subprocess.run(["nft", "-f", "-"], input=f"table inet foreign {{\n{chains}}}\n", text=True, check=True)


@pytest.mark.parametrize("gone", [False, True], ids=["table-stands", "table-gone"])
def test_a_bit_that_others_set_opens_nothing_for_a_sandbox_with_names(
    ways: Hosts, writer: Writer, gone: bool
) -> None:
    if ways.driver == OWN and gone:
        pytest.skip("there the table is all there is")
    ways.serve("far", 443, 80)
    ways.serve(None, 53, RESOLVER_PORT)
    grant(writer, Element(INSIDE, "tcp", 443, ALLOWED))
    forge()
    if gone:
        sh("nft delete table inet corral")
    for address in (FORBIDDEN, *CLOSED):
        ways.send(address)
    assert ways.connect(ALLOWED, 80).startswith("refused")
    assert ways.arrived(FORBIDDEN) == 0
    assert {address: arrived(ways, address) for address in CLOSED} == dict.fromkeys(CLOSED, 0)
    for port in (53, RESOLVER_PORT):
        assert ways.connect(GATEWAY, port).startswith("refused")
    # The control: what it may reach, it does.
    assert ways.connect(ALLOWED, 443) == "open"


@pytest.mark.parametrize("gone", [False, True], ids=["table-stands", "table-gone"])
def test_a_bit_that_others_set_opens_nothing_that_is_closed_for_all(
    ways: Hosts, writer: Writer, gone: bool
) -> None:
    if ways.driver == OWN:
        pytest.skip("there the rules of the table are all there is, and what comes after them drops nothing")
    opened(writer, INSIDE)
    forge()
    if gone:
        sh("nft delete table inet corral")
    for address in (ALLOWED, *CLOSED):
        ways.send(address)
    assert ways.arrived(ALLOWED) == 100
    assert {address: arrived(ways, address) for address in CLOSED} == dict.fromkeys(CLOSED, 0)


def ipsets() -> Sets:
    """The sets as another program sees them: the test's thread is where they are."""
    return Sets()


def raw(of: Hosts) -> set[str]:
    """Return the sources that any set of ours has as open."""
    found = sh("nft list set inet corral open")
    if of.driver != OWN:
        found += "\n".join(ipsets().sources(OPENED))
    return {address for address in (INSIDE, NEIGHBOUR) if address in found}


def test_what_nobody_asked_for_is_taken_out(hosts: Hosts, writer: Writer) -> None:
    opened(writer, INSIDE)
    sh(f"nft add element inet corral open {{ {NEIGHBOUR} }}")
    if hosts.driver != OWN:
        # One set alone opens nothing.
        hosts.send(ALLOWED, where="two")
        assert hosts.arrived(ALLOWED) == 0
        ipsets().put_source(OPENED, NEIGHBOUR)
    hosts.send(ALLOWED, where="two")
    assert hosts.arrived(ALLOWED) == 100
    writer.prune()
    assert raw(hosts) == {INSIDE}
    hosts.send(ALLOWED, where="two")
    assert hosts.arrived(ALLOWED) == 100


def test_a_half_of_it_is_taken_out_or_completed(hosts: Hosts, writer: Writer) -> None:
    if hosts.driver == OWN:
        pytest.skip("there is one set")
    opened(writer, INSIDE)
    ipsets().put_source(OPENED, NEIGHBOUR)
    ipsets().drop_source(OPENED, INSIDE)
    hosts.send(ALLOWED)
    assert hosts.arrived(ALLOWED) == 0
    answer = opened(writer, INSIDE)
    assert [row[0] for row in answer["open"]] == [INSIDE]
    assert raw(hosts) == {INSIDE}
    hosts.send(ALLOWED)
    assert hosts.arrived(ALLOWED) == 100
    ipsets().drop_source(OPENED, INSIDE)
    assert writer.read(1000)["open"] == []
    opened(writer)
    assert raw(hosts) == set()


def test_a_writer_that_starts_anew_takes_out_what_is_no_longer_wanted(hosts: Hosts, writer: Writer) -> None:
    opened(writer, INSIDE, NEIGHBOUR)
    kernel = RealKernel(driver=hosts.driver)
    later = Writer(kernel, SKELETON, "test", claims=dict(writer.claims))
    try:
        later.heal("the start")
        later.prune()
        # Until the service says what it wants, nobody is cut off.
        assert raw(hosts) == {INSIDE, NEIGHBOUR}
        opened(later, INSIDE)
        assert raw(hosts) == {INSIDE}
        hosts.send(ALLOWED, where="two")
        assert hosts.arrived(ALLOWED) == 0
    finally:
        kernel.close()


def grant_as(of: Writer, uid: int, *pins: Element) -> Mapping[str, Any]:
    return of.handle(
        uid,
        {
            "v": PROTOCOL_VERSION,
            "op": "apply",
            "sandboxes": [{"bridge": BRIDGE, "subnet": "192.0.2.0/26", "gateway": GATEWAY}],
            "pins": [[*e.row(), ""] for e in pins],
            "host": [],
        },
    )


@pytest.mark.parametrize("uid", [1000, 1001])
def test_a_bridge_that_was_made_anew_has_nothing_of_the_old_one(
    hosts: Hosts, writer: Writer, uid: int
) -> None:
    opened(writer, INSIDE, NEIGHBOUR)
    assert raw(hosts) == {INSIDE, NEIGHBOUR}
    seen: list[set[str]] = []
    writer.save = lambda _claims: seen.append(raw(hosts))
    sh(f"ip link del {BRIDGE}; ip link add {BRIDGE} type bridge; ip addr add {GATEWAY}/26 dev {BRIDGE}")
    sh(f"ip link set {BRIDGE} up")
    # The same subnet, and a list of names.
    answer = grant_as(writer, uid, Element(INSIDE, "tcp", 443, ALLOWED))
    assert answer["ok"], answer
    # They were gone before the addresses were anybody else's.
    assert seen[0] == set()
    assert raw(hosts) == set()


def test_a_sandbox_with_names_is_as_closed_as_before(ways: Hosts, writer: Writer) -> None:
    pin = Element(INSIDE, "tcp", 443, ALLOWED)
    grant(writer, pin)
    for address in (FORBIDDEN, *CLOSED):
        ways.send(address)
    assert ways.arrived(FORBIDDEN) == 0
    assert {address: arrived(ways, address) for address in CLOSED} == dict.fromkeys(CLOSED, 0)
    assert SKELETON.permitted == ()
