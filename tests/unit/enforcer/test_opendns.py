"""DNS for open sandboxes: what is answered, to whom, and what is left out."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from ipaddress import ip_network

import dns.message
import dns.opcode
import dns.rcode
import dns.rdatatype
import pytest

from enforcer import gatewaydns, opendns
from enforcer.budget import Budget
from enforcer.gatewaydns import BURST, GatewayDns, Place, Reply
from enforcer.lookups import Lookups
from enforcer.netfilter import opening
from enforcer.netfilter.model import ABSOLUTE
from enforcer.opendns import OpenNames, Refusal, Vetted
from enforcer.pinmodel import Answer, Failure
from enforcer.vetting import _V4, Verdict, Vetting
from policy.container import RESOLVER_PORT

PUBLIC, PRIVATE = "198.51.100.7", "10.0.0.7"
VETTING = Vetting.of(permit=["198.51.100.0/24"])
LOCAL = "127.0.0.1"


class Bench:
    """A service on loopback; ``asked`` are the names it had resolved, ``told`` what it refused."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.told: list[Refusal] = []
        self.results: dict[str, Answer | Failure] = {}
        self.now = 0.0
        self.port = 0
        self.gate: asyncio.Event | None = None
        self.vetting = VETTING
        self.lookups = lookups = Lookups(self.ask, lambda: self.now)
        names = OpenNames(Vetted(lookups.find, self.judge, self.told.append))
        self.of = GatewayDns(names.decide, lambda: self.now, make=self.make, index=lambda _name: 1)

    def make(self, kind: socket.SocketKind, _place: Place) -> socket.socket:
        sock = socket.socket(socket.AF_INET, kind | socket.SOCK_NONBLOCK)
        sock.bind((LOCAL, self.port))
        self.port = sock.getsockname()[1]
        return sock

    async def ask(self, name: str) -> Answer | Failure:
        self.asked.append(name)
        if self.gate is not None:
            await self.gate.wait()
        return self.results.get(name, Failure(name, "nxdomain", ""))

    def judge(self, address: str) -> Verdict:
        return self.vetting.check(address)

    def answers(self, name: str, *addresses: str, ttl: int = 60) -> None:
        self.results[name] = Answer(name, addresses, ttl, 0.0)

    async def udp(self, name: str, kind: str = "A") -> dns.message.Message:
        return dns.message.from_wire(await self.raw(dns.message.make_query(name, kind).to_wire()))

    async def raw(self, wire: bytes, wait: float = 2.0) -> bytes:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.connect((LOCAL, self.port))
            await loop.sock_sendall(sock, wire)
            return await asyncio.wait_for(loop.sock_recv(sock, 65535), wait)

    async def tcp(self, name: str) -> dns.message.Message:
        reader, writer = await asyncio.open_connection(LOCAL, self.port)
        wire = dns.message.make_query(name, "A").to_wire()
        writer.write(struct.pack("!H", len(wire)) + wire)
        size = int.from_bytes(await reader.readexactly(2), "big")
        answer = dns.message.from_wire(await reader.readexactly(size))
        writer.close()
        return answer


def addresses(message: dns.message.Message) -> list[str]:
    return [row.address for rrset in message.answer for row in rrset]


def served(work: Callable[[Bench], Awaitable[None]], *sources: str) -> None:
    async def run() -> None:
        bench = Bench()
        await bench.of.follow([Place("lo", LOCAL, frozenset(sources or (LOCAL,)))])
        try:
            await work(bench)
        finally:
            bench.of.close()

    asyncio.run(run())


def test_a_public_address_is_told_over_udp_and_tcp_with_its_time_to_live() -> None:
    async def work(bench: Bench) -> None:
        bench.answers("api.example.com", PUBLIC)
        answer = await bench.udp("API.example.com")
        assert addresses(answer) == [PUBLIC]
        assert answer.answer[0].ttl == 60
        assert addresses(await bench.tcp("api.example.com")) == [PUBLIC]
        # What is known is not asked again, until its time is over.
        assert bench.asked == ["api.example.com"]
        bench.now = 61.0
        await bench.udp("api.example.com")
        assert bench.asked == ["api.example.com"] * 2

    served(work)


def test_refused_addresses_are_left_out_and_told_and_a_name_of_those_alone_does_not_exist() -> None:
    async def work(bench: Bench) -> None:
        bench.answers("half.example.com", PRIVATE, PUBLIC)
        assert addresses(await bench.udp("half.example.com")) == [PUBLIC]
        bench.answers("lies.example.com", PRIVATE, "169.254.169.254")
        answer = await bench.udp("lies.example.com")
        assert (answer.rcode(), addresses(answer)) == (dns.rcode.NXDOMAIN, [])
        assert [(one.name, one.address) for one in bench.told] == [
            ("half.example.com", PRIVATE),
            ("lies.example.com", PRIVATE),
            ("lies.example.com", "169.254.169.254"),
        ]
        # What became this host's since is not told out of memory.
        bench.vetting = Vetting.of(permit=["198.51.100.0/24"], host_addresses=[PUBLIC])
        assert addresses(await bench.udp("half.example.com")) == []

    served(work)


@pytest.mark.parametrize(
    ("name", "kind", "code"),
    [
        ("api.example.com", "AAAA", dns.rcode.NOERROR),
        ("api.example.com", "TXT", dns.rcode.NOTIMP),
        ("api.example.com", "ANY", dns.rcode.NOTIMP),
        ("api.example.com", "CNAME", dns.rcode.NOTIMP),
        ("api.example.com", "HTTPS", dns.rcode.NOTIMP),
        ("7.0.0.10.in-addr.arpa", "PTR", dns.rcode.NOTIMP),
        ("localhost", "A", dns.rcode.NXDOMAIN),
        ("10.0.0.1", "A", dns.rcode.NXDOMAIN),
    ],
)
def test_other_questions_are_answered_without_asking_anybody(name: str, kind: str, code: int) -> None:
    async def work(bench: Bench) -> None:
        bench.answers("api.example.com", PUBLIC)
        answer = await bench.udp(name, kind)
        assert (answer.rcode(), answer.answer) == (code, [])
        assert bench.asked == []

    served(work)


@pytest.mark.parametrize(
    ("kind", "code"),
    [("nxdomain", dns.rcode.NXDOMAIN), ("empty", dns.rcode.NOERROR), ("timeout", dns.rcode.SERVFAIL)],
)
def test_a_name_that_is_not_resolved_says_why(kind: str, code: int) -> None:
    async def work(bench: Bench) -> None:
        bench.results["gone.example.com"] = Failure("gone.example.com", kind, "")  # type: ignore[arg-type]
        assert (await bench.udp("gone.example.com")).rcode() == code

    served(work)


def test_garbage_and_answers_and_long_questions_are_not_answered() -> None:
    answer = dns.message.make_response(dns.message.make_query("api.example.com", "A")).to_wire()
    for wire in (b"", b"x" * 11, answer, b"\0" * 600, dns.message.Message().to_wire()):
        assert gatewaydns.question_of(wire) is None
    update = dns.message.make_query("api.example.com", "A")
    update.set_opcode(dns.opcode.STATUS)
    assert opendns.refused_kind(update) == dns.rcode.NOTIMP


def test_a_source_that_is_no_open_session_gets_no_answer() -> None:
    async def work(bench: Bench) -> None:
        bench.answers("api.example.com", PUBLIC)
        with pytest.raises(TimeoutError):
            await bench.raw(dns.message.make_query("api.example.com", "A").to_wire(), wait=0.2)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await bench.tcp("api.example.com")
        assert bench.asked == []

    served(work, "192.0.2.9")


def test_a_flood_is_answered_at_a_rate_and_holds_up_nothing() -> None:
    async def work(bench: Bench) -> None:
        bench.gate = asyncio.Event()
        wire = dns.message.make_query("api.example.com", "A").to_wire()
        for _ in range(1000):
            bench.of.heard("lo", wire, LOCAL, lambda _answer: None)
        assert len(bench.of._tasks) == gatewaydns.PENDING
        bench.gate.set()
        while bench.of._tasks:
            await asyncio.sleep(0)
        assert bench.asked == ["api.example.com"]
        for _ in range(1000):
            bench.of.heard("lo", wire, LOCAL, lambda _answer: None)
            await asyncio.sleep(0)
        assert not bench.of._sources[LOCAL].budget.take(bench.now)
        assert BURST < 1000

    served(work)


def test_connections_arrive_at_a_rate() -> None:
    async def work(bench: Bench) -> None:
        bench.answers("api.example.com", PUBLIC)
        await bench.tcp("api.example.com")
        bench.of._listeners["lo"].arriving = Budget(0.001, 3, 1)
        # One had its turn before.
        for _ in range(4):
            assert addresses(await bench.tcp("api.example.com")) == [PUBLIC]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(bench.tcp("api.example.com"), 0.3)

    served(work)


def test_a_connection_ends_with_its_bridge_and_what_it_held_is_free_again() -> None:
    async def work(bench: Bench) -> None:
        reader, writer = await asyncio.open_connection(LOCAL, bench.port)
        bench.answers("api.example.com", PUBLIC)
        await bench.tcp("api.example.com")
        source = bench.of._sources[LOCAL]
        assert source.connections >= 1
        await bench.of.follow([])
        assert await asyncio.wait_for(reader.read(), 5) == b""
        while source.connections:
            await asyncio.sleep(0)
        writer.close()
        bench.port = 0
        await bench.of.follow([Place("lo", LOCAL, frozenset({LOCAL}))])
        assert addresses(await bench.tcp("api.example.com")) == [PUBLIC]

    served(work)


def test_reading_what_a_server_said_counts_against_who_asked() -> None:
    async def work(bench: Bench) -> None:
        async def ask(name: str) -> Answer | Failure:
            await asyncio.sleep(0)
            bench.now += 2 * BURST / gatewaydns.RATE * gatewaydns.SHARE
            return Answer(name, (PUBLIC,), 60, 0.0)

        bench.of._sources[LOCAL] = own = gatewaydns._Source()
        bench.lookups._ask = ask
        assert addresses(await bench.udp("slow.example.com")) == [PUBLIC]
        assert not own.budget.take(bench.now)

    served(work)


def test_a_bridge_that_is_no_more_and_one_that_cannot_be_bound() -> None:
    async def run() -> None:
        bench = Bench()
        place = Place("lo", LOCAL, frozenset({LOCAL}))
        await bench.of.follow([place])
        assert bench.of.serves("lo")
        await bench.of.follow([])
        assert not bench.of.serves("lo")

        def busy(_kind: socket.SocketKind, _place: Place) -> socket.socket:
            raise OSError(98, "Address already in use")

        bench.of._make = busy
        await bench.of.follow([place])
        assert not bench.of.serves("lo")
        assert "Address already in use" in bench.of.problems["lo"]
        bench.of.close()

    asyncio.run(run())


def test_the_longest_answer_fits_a_datagram() -> None:
    name = ".".join(["a" * 63] * 3 + ["b" * 59])
    query = dns.message.make_query(name, "A")
    rows = tuple(f"198.51.100.{number}" for number in range(1, 40))
    assert len(gatewaydns.response(query, Reply(dns.rcode.NOERROR, rows, 60))) <= 512


def test_kernel_and_service_mean_the_same_port() -> None:
    assert opening.RESOLVER_PORT == RESOLVER_PORT


def test_what_vetting_refuses_is_closed_in_the_kernel_but_for_documentation() -> None:
    closed = opening.never(())
    for row in _V4:
        within = any(row.network.subnet_of(network) for network in closed)  # type: ignore[arg-type]
        assert within or row.what == "documentation", row
    lifted = opening.never([ip_network("0.0.0.0/0"), ip_network("10.0.0.0/8")])  # type: ignore[list-item]
    assert all(any(net.subnet_of(network) for network in lifted) for net in ABSOLUTE)
    assert not any(ip_network("10.0.0.0/8").subnet_of(network) for network in lifted)  # type: ignore[arg-type]


def test_networks_are_the_same_however_nft_lists_them() -> None:
    told = [
        "192.0.2.1",
        {"prefix": {"addr": "198.51.100.0", "len": 24}},
        {"range": ["203.0.113.0", "203.0.113.2"]},
    ]
    assert opening.listed(told) == {"192.0.2.1/32", "198.51.100.0/24", "203.0.113.0/31", "203.0.113.2/32"}
