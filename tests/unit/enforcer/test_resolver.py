"""The resolver against a real DNS server on loopback that says what each test needs."""

from __future__ import annotations

import asyncio
import itertools
import socket
from contextlib import AsyncExitStack

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import pytest

from enforcer.resolver import Answer, Failure, Limits, Resolver, Server
from tests.unit.enforcer.dns_server import DnsServer, Script, reply

# Long enough for any answer from loopback; tests of silence pass shorter ones.
PATIENT = Limits(per_try=10.0, tries=3, total=30.0)


def resolve(
    *scripts: Script, name: str = "api.example", limits: Limits = PATIENT
) -> tuple[Answer | Failure, list[DnsServer]]:
    async def run() -> tuple[Answer | Failure, list[DnsServer]]:
        async with AsyncExitStack() as stack:
            servers = [await stack.enter_async_context(DnsServer(script)) for script in scripts]
            resolver = Resolver(tuple(server.address for server in servers), lambda: 1234.5, limits=limits)
            return await resolver.resolve(name), servers

    return asyncio.run(run())


def always(*records: str, rcode: dns.rcode.Rcode = dns.rcode.NOERROR) -> Script:
    return lambda query, tcp: reply(query, *records, rcode=rcode)


def silent(query: dns.message.Message, tcp: bool) -> None:
    return None


def chain(length: int, *, ttl: int = 60) -> list[str]:
    """``length`` CNAMEs from api.example to an address."""
    owners = ["api.example", *(f"hop{n}.example" for n in range(1, length + 1))]
    records = [f"{owner} {ttl} CNAME {target}" for owner, target in itertools.pairwise(owners)]
    return [*records, f"{owners[-1]} {ttl} A 203.0.113.1"]


def from_wire(message: dns.message.Message) -> dns.message.Message:
    return dns.message.from_wire(message.to_wire())


def failure(result: Answer | Failure) -> tuple[str, str]:
    assert isinstance(result, Failure), result
    return result.kind, result.detail


def test_addresses_are_unique_and_in_numeric_order_with_the_ttl_and_the_time() -> None:
    result, _ = resolve(
        always(
            "api.example 77 A 203.0.113.10",
            "api.example 77 A 203.0.113.9",
            "api.example 77 A 203.0.113.10",
        )
    )
    assert result == Answer("api.example", ("203.0.113.9", "203.0.113.10"), 77, 1234.5)


def test_query_is_absolute_for_a_records_with_edns_1232() -> None:
    _, (server,) = resolve(always("api.example 60 A 203.0.113.1"))
    (query,) = server.messages
    assert server.queries == [("api.example.", "udp")]
    assert query.question[0].rdtype == dns.rdatatype.A
    assert (query.edns, query.payload) == (0, 1232)
    assert query.flags & dns.flags.RD


@pytest.mark.parametrize("ttl", [0, 1, 300, 2**31 - 1])
def test_ttl_is_reported_as_it_is(ttl: int) -> None:
    result, _ = resolve(always(f"api.example {ttl} A 203.0.113.1"))
    assert isinstance(result, Answer)
    assert result.ttl == ttl


def test_ttl_is_the_minimum_over_the_chain() -> None:
    result, _ = resolve(
        always(
            "api.example 300 CNAME edge.example",
            "edge.example 7 CNAME node.example",
            "node.example 60 A 203.0.113.1",
            "node.example 50 A 203.0.113.2",
        )
    )
    assert result == Answer("api.example", ("203.0.113.1", "203.0.113.2"), 7, 1234.5)


def test_ttl_is_the_minimum_over_records_too() -> None:
    result, _ = resolve(always("api.example 60 A 203.0.113.1", "api.example 5 A 203.0.113.2"))
    assert isinstance(result, Answer)
    assert result.ttl == 5


def test_eight_cnames_are_followed() -> None:
    result, servers = resolve(always(*chain(8)))
    assert result == Answer("api.example", ("203.0.113.1",), 60, 1234.5)
    assert len(servers[0].queries) == 1


def test_nine_cnames_are_too_many() -> None:
    kind, detail = failure(resolve(always(*chain(9)))[0])
    assert kind == "loop"
    assert "8" in detail


def test_nine_cnames_are_too_many_when_each_takes_a_query() -> None:
    records = {record.split()[0]: record for record in chain(9)}
    result, _ = resolve(lambda query, tcp: reply(query, records[str(query.question[0].name)[:-1]]))
    assert failure(result)[0] == "loop"


def test_order_of_records_does_not_matter() -> None:
    result, _ = resolve(always(*reversed(chain(4))))
    assert isinstance(result, Answer)


@pytest.mark.parametrize(
    "records",
    [
        ["api.example 60 CNAME api.example"],
        ["api.example 60 CNAME b.example", "b.example 60 CNAME api.example"],
        ["api.example 60 CNAME b.example", "b.example 60 CNAME c.example", "c.example 60 CNAME b.example"],
    ],
)
def test_loop_is_an_error(records: list[str]) -> None:
    assert failure(resolve(always(*records))[0])[0] == "loop"


def test_loop_over_several_queries_is_an_error() -> None:
    targets = {"api.example.": "b.example", "b.example.": "api.example"}

    def script(query: dns.message.Message, tcp: bool) -> dns.message.Message:
        owner = str(query.question[0].name)
        return reply(query, f"{owner[:-1]} 60 CNAME {targets[owner]}")

    result, (server,) = resolve(script)
    assert failure(result)[0] == "loop"
    assert len(server.queries) == 2


def test_chain_that_stops_early_is_asked_for_again() -> None:
    def script(query: dns.message.Message, tcp: bool) -> dns.message.Message:
        if str(query.question[0].name) == "api.example.":
            return reply(query, "api.example 20 CNAME edge.example")
        return reply(query, "edge.example 60 A 203.0.113.1")

    result, (server,) = resolve(script)
    assert result == Answer("api.example", ("203.0.113.1",), 20, 1234.5)
    assert [name for name, _ in server.queries] == ["api.example.", "edge.example."]


def test_cname_without_an_address_is_empty() -> None:
    def script(query: dns.message.Message, tcp: bool) -> dns.message.Message:
        if str(query.question[0].name) == "api.example.":
            return reply(query, "api.example 20 CNAME edge.example")
        return reply(query)

    kind, detail = failure(resolve(script)[0])
    assert kind == "empty"
    assert "edge.example" in detail


def test_records_of_owners_off_the_chain_are_ignored() -> None:
    result, _ = resolve(
        always(
            "evil.example 60 A 203.0.113.66",
            "api.example 60 CNAME edge.example",
            "edge.example 60 A 203.0.113.1",
            "other.example 1 CNAME edge.example",
            "api.example.evil.example 60 A 203.0.113.67",
        )
    )
    assert result == Answer("api.example", ("203.0.113.1",), 60, 1234.5)


def test_only_foreign_owners_is_empty() -> None:
    result, _ = resolve(always("evil.example 60 A 203.0.113.66"))
    assert failure(result)[0] == "empty"


def test_owner_matches_whatever_its_case() -> None:
    result, _ = resolve(always("API.Example 60 CNAME Edge.Example", "edge.EXAMPLE 60 A 203.0.113.1"))
    assert isinstance(result, Answer)


def test_truncated_answer_is_asked_for_over_tcp() -> None:
    def script(query: dns.message.Message, tcp: bool) -> dns.message.Message:
        if not tcp:
            return reply(query, "api.example 60 A 203.0.113.1", truncated=True)
        return reply(query, "api.example 60 A 203.0.113.2")

    result, (server,) = resolve(script)
    assert isinstance(result, Answer)
    assert result.addresses == ("203.0.113.2",)
    assert server.queries == [("api.example.", "udp"), ("api.example.", "tcp")]


def test_answer_truncated_over_tcp_too_is_not_taken_for_whole() -> None:
    result, _ = resolve(lambda query, tcp: reply(query, "api.example 60 A 203.0.113.1", truncated=True))
    kind, detail = failure(result)
    assert kind == "servfail"
    assert "truncated" in detail


def test_four_hundred_addresses_come_whole() -> None:
    records = [f"api.example 60 A 203.0.{n // 200}.{n % 200}" for n in range(400)]

    def script(query: dns.message.Message, tcp: bool) -> dns.message.Message:
        return reply(query, *records) if tcp else reply(query, truncated=True)

    result, _ = resolve(script)
    assert isinstance(result, Answer)
    assert len(result.addresses) == 400


def test_an_answer_that_takes_long_to_parse_is_none() -> None:
    records = [f"api.example 60 A 203.0.113.{number % 250}" for number in range(600)]

    def script(query: dns.message.Message, tcp: bool) -> dns.message.Message:
        return reply(query, *records) if tcp else reply(query, truncated=True)

    result, _ = resolve(script)
    assert failure(result)[0] == "servfail"


def test_second_server_is_asked_when_the_first_fails() -> None:
    result, (first, second) = resolve(
        always(rcode=dns.rcode.SERVFAIL), always("api.example 60 A 203.0.113.1")
    )
    assert isinstance(result, Answer)
    assert (len(first.queries), len(second.queries)) == (1, 1)


def test_every_server_gets_a_try_even_the_fifth() -> None:
    broken = [always(rcode=dns.rcode.REFUSED)] * 4
    result, _ = resolve(*broken, always("api.example 60 A 203.0.113.1"))
    assert isinstance(result, Answer)


def test_second_server_is_asked_when_the_first_is_silent() -> None:
    limits = Limits(per_try=0.3, tries=3, total=30)
    result, _ = resolve(silent, always("api.example 60 A 203.0.113.1"), limits=limits)
    assert isinstance(result, Answer)


def test_single_server_that_fails_is_asked_three_times() -> None:
    result, (server,) = resolve(always(rcode=dns.rcode.SERVFAIL))
    assert failure(result)[0] == "servfail"
    assert len(server.queries) == 3


@pytest.mark.parametrize(
    ("rcode", "kind"),
    [(dns.rcode.SERVFAIL, "servfail"), (dns.rcode.REFUSED, "refused"), (dns.rcode.NOTAUTH, "servfail")],
)
def test_errors_of_servers_are_told_apart(rcode: dns.rcode.Rcode, kind: str) -> None:
    found, detail = failure(resolve(always(rcode=rcode))[0])
    assert found == kind
    assert dns.rcode.to_text(rcode) in detail
    assert "127.0.0.1" in detail


def test_nxdomain_is_final_and_no_other_server_is_asked() -> None:
    result, (_, second) = resolve(always(rcode=dns.rcode.NXDOMAIN), always("api.example 60 A 203.0.113.1"))
    assert failure(result) == ("nxdomain", "api.example does not exist")
    assert second.queries == []


def test_nxdomain_at_the_end_of_a_chain_names_the_end() -> None:
    result, _ = resolve(always("api.example 60 CNAME gone.example", rcode=dns.rcode.NXDOMAIN))
    assert failure(result) == ("nxdomain", "gone.example does not exist")


def test_answer_without_records_is_empty() -> None:
    assert failure(resolve(always())[0])[0] == "empty"


def test_silence_is_a_timeout_after_three_tries() -> None:
    result, (server,) = resolve(silent, limits=Limits(per_try=0.1, tries=3, total=30))
    assert failure(result)[0] == "timeout"
    assert len(server.queries) == 3


def test_total_time_bounds_all_tries_and_hops() -> None:
    result, (server,) = resolve(silent, limits=Limits(per_try=30, tries=3, total=0.2))
    assert failure(result)[0] == "timeout"
    assert len(server.queries) == 1


def test_what_a_server_said_is_reported_when_the_time_runs_out_later() -> None:
    limits = Limits(per_try=30, tries=3, total=1.0)
    result, _ = resolve(always(rcode=dns.rcode.SERVFAIL), silent, limits=limits)
    assert failure(result)[0] == "servfail"


def test_tcp_connection_that_closes_without_an_answer_is_a_network_failure() -> None:
    def script(query: dns.message.Message, tcp: bool) -> dns.message.Message | None:
        return None if tcp else reply(query, truncated=True)

    assert failure(resolve(script)[0])[0] == "network"


def test_forged_datagrams_are_ignored_and_waiting_goes_on() -> None:
    """Wrong id, wrong question, garbage: each from the right server, before the right answer."""

    async def run() -> Answer | Failure:
        server = DnsServer(always("api.example 60 A 203.0.113.1"))
        async with server:
            answer = server.answer

            def forge(wire: bytes, tcp: bool) -> bytes | None:
                query = dns.message.from_wire(wire)
                other_id = reply(query, "api.example 60 A 203.0.113.66")
                other_id.id = query.id ^ 1
                question = dns.message.make_query("evil.example", "A", id=query.id)
                forged = [
                    other_id.to_wire(),
                    reply(question, "api.example 60 A 203.0.113.67").to_wire(),
                    b"garbage",
                    wire,
                ]
                for datagram in forged:
                    server._udp.sendto(datagram, peer[-1])
                return answer(wire, tcp)

            peer: list[tuple[str, int]] = []
            protocol = server._udp.get_protocol()
            received = protocol.datagram_received

            def note(data: bytes, addr: tuple[str, int]) -> None:
                peer.append(addr)
                received(data, addr)

            protocol.datagram_received = note
            server.answer = forge  # type: ignore[method-assign]
            return await Resolver((server.address,), lambda: 0.0, limits=PATIENT).resolve("api.example")

    assert asyncio.run(run()) == Answer("api.example", ("203.0.113.1",), 60, 0.0)


def test_datagram_from_another_port_is_ignored() -> None:
    def script(query: dns.message.Message, tcp: bool) -> None:
        stranger.sendto(reply(query, "api.example 60 A 203.0.113.66").to_wire(), peers[-1])

    peers: list[tuple[str, int]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:

        async def run() -> Answer | Failure:
            async with DnsServer(script) as server:
                protocol = server._udp.get_protocol()
                received = protocol.datagram_received

                def note(data: bytes, addr: tuple[str, int]) -> None:
                    peers.append(addr)
                    received(data, addr)

                protocol.datagram_received = note
                limits = Limits(per_try=0.2, tries=1, total=30)
                return await Resolver((server.address,), lambda: 0.0, limits=limits).resolve("api.example")

        assert failure(asyncio.run(run()))[0] == "timeout"
    assert peers


def test_server_from_before_edns_is_asked_without_it() -> None:
    def script(query: dns.message.Message, tcp: bool) -> dns.message.Message:
        if query.edns >= 0:
            return reply(query, rcode=dns.rcode.FORMERR)
        return reply(query, "api.example 60 A 203.0.113.1")

    assert isinstance(resolve(script)[0], Answer)


def test_lies_are_returned_as_they_are_for_the_pins_to_vet() -> None:
    result, _ = resolve(always("api.example 60 A 127.0.0.1", "api.example 60 A 169.254.169.254"))
    assert isinstance(result, Answer)
    assert result.addresses == ("127.0.0.1", "169.254.169.254")


def test_unreachable_network_is_told_from_silence() -> None:
    async def query(message: dns.message.Message, server: Server, timeout: float) -> dns.message.Message:
        raise OSError(101, "Network is unreachable")

    resolver = Resolver((Server("192.0.2.1"),), lambda: 0.0, query=query)
    kind, detail = failure(asyncio.run(resolver.resolve("api.example")))
    assert kind == "network"
    assert "unreachable" in detail


def test_without_a_server_nothing_is_asked() -> None:
    assert failure(asyncio.run(Resolver((), lambda: 0.0).resolve("api.example")))[0] == "network"


def test_servers_can_be_changed_between_queries() -> None:
    asked: list[Server] = []

    async def query(message: dns.message.Message, server: Server, timeout: float) -> dns.message.Message:
        asked.append(server)
        return from_wire(reply(message, "api.example 60 A 203.0.113.1"))

    async def run() -> None:
        resolver = Resolver((Server("192.0.2.1"),), lambda: 0.0, query=query)
        assert isinstance(await resolver.resolve("api.example"), Answer)
        resolver.servers = (Server("192.0.2.2"),)
        assert isinstance(await resolver.resolve("api.example"), Answer)

    asyncio.run(run())
    assert asked == [Server("192.0.2.1"), Server("192.0.2.2")]


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "api.example.",
        "api..example",
        "API.example",
        "bücher.example",
        "a\\000b.example",
        "x" * 64 + ".example",
    ],
)
def test_what_is_no_lower_case_dns_name_is_never_asked_for(name: str) -> None:
    async def query(message: dns.message.Message, server: Server, timeout: float) -> dns.message.Message:
        raise AssertionError("asked")

    resolver = Resolver((Server("192.0.2.1"),), lambda: 0.0, query=query)
    assert failure(asyncio.run(resolver.resolve(name)))[0] == "refused"


def test_fifty_names_take_as_long_as_the_slowest() -> None:
    """All wait for each other: resolved one after another this would never end."""
    waiting = 0

    async def run() -> list[Answer | Failure]:
        barrier = asyncio.Event()

        async def query(message: dns.message.Message, server: Server, timeout: float) -> dns.message.Message:
            nonlocal waiting
            waiting += 1
            if waiting == 50:
                barrier.set()
            await asyncio.wait_for(barrier.wait(), 20)
            return from_wire(reply(message, f"{str(message.question[0].name)[:-1]} 60 A 203.0.113.1"))

        resolver = Resolver((Server("192.0.2.1"),), lambda: 0.0, query=query, limits=PATIENT)
        return await asyncio.gather(*(resolver.resolve(f"n{n}.example") for n in range(50)))

    assert all(isinstance(result, Answer) for result in asyncio.run(run()))


def test_cancelling_a_resolution_cancels_it() -> None:
    async def run() -> None:
        async with DnsServer(silent) as server:
            task = asyncio.create_task(Resolver((server.address,), lambda: 0.0).resolve("api.example"))
            while not server.queries:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())
