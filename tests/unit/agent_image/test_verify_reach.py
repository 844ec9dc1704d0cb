from __future__ import annotations

import errno

import pytest

from agent_image.files.verify import network, reach
from agent_image.files.verify.network import Reply
from tests.unit.agent_image.container import GATEWAY, PEER, PROBE, RESOLVER, Container, dns_reply, outcome

EMBEDDED = ("127.0.0.11", 53)


def test_refusal_at_once_is_a_blocked_host(container: Container) -> None:
    assert outcome(reach.unlisted_host_blocked, container)[0] == "ok"


@pytest.mark.parametrize(
    "reply",
    [
        Reply("connected", 0.01),
        Reply("data", 0.01, b"x"),
        Reply("timeout", 0.9),
        Reply("unreachable", 0.01, code=errno.EHOSTUNREACH),
        Reply("unreachable", 0.01, code=errno.EACCES),
        Reply("closed", 0.01),
        Reply("refused", 1.2, code=errno.ECONNREFUSED),
        Reply("no-route", 0.0, code=errno.ENETUNREACH),
    ],
)
def test_host_that_is_not_refused_at_once_is_found(container: Container, reply: Reply) -> None:
    container.open_tcp[PROBE, 443] = reply
    assert outcome(reach.unlisted_host_blocked, container)[0] == "fail"


def test_router_that_knows_no_way_is_not_the_fence(container: Container) -> None:
    container.open_tcp[PROBE, 443] = Reply("unreachable", 0.01, code=errno.EHOSTUNREACH)
    status, detail = outcome(reach.unlisted_host_blocked, container)
    assert status == "fail"
    assert "unreachable behind it, so nothing is proven: unreachable (EHOSTUNREACH)" in detail


def test_time_out_is_told_from_a_reachable_host(container: Container) -> None:
    container.open_tcp[PROBE, 443] = Reply("timeout", 0.9)
    assert "left waiting" in outcome(reach.unlisted_host_blocked, container)[1]
    container.open_tcp[PROBE, 443] = Reply("connected", 0.01)
    assert "is reachable" in outcome(reach.unlisted_host_blocked, container)[1]


def test_datagram_that_is_answered_is_found(container: Container) -> None:
    container.open_udp[PROBE, 443] = Reply("data", 0.01, b"x")
    assert outcome(reach.unlisted_host_blocked, container) == ("fail", f"{PROBE}:443 answers over UDP")


def test_silence_over_udp_is_no_answer(container: Container) -> None:
    container.open_udp[PROBE, 443] = Reply("timeout", 0.9)
    assert outcome(reach.unlisted_host_blocked, container)[0] == "ok"


def test_dns_without_answers_is_closed(container: Container) -> None:
    container.open_tcp[GATEWAY, 53] = Reply("timeout", 0.9)
    assert outcome(reach.dns_closed, container) == (
        "ok",
        f"no answer from {GATEWAY}, {PROBE}, {RESOLVER}; {PROBE}:53 is refused",
    )


@pytest.mark.parametrize("resolvers", [[], ["127.0.0.53"], [RESOLVER]])
@pytest.mark.parametrize(
    "reply",
    [
        Reply("timeout", 0.9),
        Reply("unreachable", 0.01, code=errno.EHOSTUNREACH),
        Reply("no-route", 0.0, code=errno.ENETUNREACH),
    ],
)
def test_silence_that_nobody_enforces_is_no_closed_dns(
    container: Container, resolvers: list[str], reply: Reply
) -> None:
    container.open_tcp[PROBE, 53] = reply
    status, detail = outcome(reach.dns_closed, container, resolvers=resolvers)
    assert status == "fail"
    assert f"{PROBE}:53" in detail


def test_one_refusal_of_two_is_enough_on_a_lossy_way(container: Container) -> None:
    replies = iter([Reply("timeout", 0.9)])
    refused = Reply("refused", 0.001, code=errno.ECONNREFUSED)
    container.tcp = (  # type: ignore[method-assign]
        lambda address, *_, **__: next(replies, refused) if address == PROBE else refused
    )
    assert outcome(reach.dns_closed, container)[0] == "ok"


@pytest.mark.parametrize("server", [GATEWAY, PROBE, RESOLVER])
@pytest.mark.parametrize("way", ["udp", "tcp"])
def test_any_answer_opens_dns(container: Container, server: str, way: str) -> None:
    replies = container.open_udp if way == "udp" else container.open_tcp
    replies[server, 53] = Reply("data", 0.01, b"whatever")
    status, detail = outcome(reach.dns_closed, container)
    assert status == "fail"
    assert server in detail


def test_port_53_that_takes_connections_is_not_closed(container: Container) -> None:
    for kind in ("connected", "closed"):
        container.open_tcp[GATEWAY, 53] = Reply(kind, 0.01)
        assert outcome(reach.dns_closed, container)[0] == "fail"


def test_resolver_of_the_container_is_asked_too(container: Container) -> None:
    container.put("/etc/resolv.conf", "nameserver 203.0.113.99\n# nameserver 203.0.113.98\nnameserver\n")
    container.open_udp["203.0.113.99", 53] = Reply("data", 0.01, b"x")
    assert outcome(reach.dns_closed, container)[0] == "fail"


def test_number_of_resolvers_that_are_asked_is_bounded(container: Container) -> None:
    container.put("/etc/resolv.conf", "".join(f"nameserver 203.0.113.{n}\n" for n in range(100, 200)))
    assert outcome(reach.dns_closed, container)[1].partition(";")[0].count(",") == reach.MAX_SERVERS - 1


def answering(container: Container, code: int, answers: int, way: str = "udp") -> None:
    def udp(address: str, port: int, payload: bytes) -> Reply:
        assert (address, port) == EMBEDDED
        return Reply("data", 0.001, dns_reply(code, answers, payload))

    def tcp(address: str, port: int, payload: bytes = b"", linger: float = 0.0) -> Reply:
        assert (address, port) == EMBEDDED
        return Reply("data", 0.001, b"\0\x0c" + dns_reply(code, answers, payload[2:]))

    setattr(container, way, udp if way == "udp" else tcp)


@pytest.mark.parametrize("way", ["udp", "tcp"])
@pytest.mark.parametrize(("code", "name"), [(2, "SERVFAIL"), (5, "REFUSED")])
def test_embedded_resolver_that_knows_nobody_is_closed(
    container: Container, way: str, code: int, name: str
) -> None:
    answering(container, code, 0, way)
    assert outcome(reach.embedded_dns_closed, container) == ("ok", name)


@pytest.mark.parametrize("way", ["udp", "tcp"])
@pytest.mark.parametrize(("code", "answers"), [(0, 1), (0, 0), (3, 0), (2, 1), (15, 0)])
def test_embedded_resolver_that_asked_somebody_is_open(
    container: Container, way: str, code: int, answers: int
) -> None:
    answering(container, code, answers, way)
    status, detail = outcome(reach.embedded_dns_closed, container)
    assert status == "fail"
    assert "outside.example" in detail


def test_silent_embedded_resolver_is_closed(container: Container) -> None:
    container.open_tcp[EMBEDDED] = Reply("connected", 0.9)
    assert outcome(reach.embedded_dns_closed, container) == ("ok", "no answer")


def test_answer_to_another_question_is_not_taken_for_a_refusal(container: Container) -> None:
    container.open_udp[EMBEDDED] = Reply("data", 0.001, b"\0\0\x81\x82")
    assert "MALFORMED" in outcome(reach.embedded_dns_closed, container)[1]


def test_host_service_is_reached_by_its_name(container: Container) -> None:
    assert outcome(reach.host_service(8081), container)[0] == "ok"


def test_relay_with_nothing_behind_it_is_no_host_service(container: Container) -> None:
    container.open_tcp[GATEWAY, 8081] = Reply("closed", 0.002)
    status, detail = outcome(reach.host_service(8081), container)
    assert status == "fail"
    assert "nothing listens on 127.0.0.1:8081 of the host" in detail
    assert container.lingered[GATEWAY, 8081] >= 0.3


def test_host_service_may_speak_first(container: Container) -> None:
    container.open_tcp[GATEWAY, 8081] = Reply("data", 0.002, b"220 ready")
    assert outcome(reach.host_service(8081), container)[0] == "ok"


def test_host_service_that_is_not_there_is_found(container: Container) -> None:
    assert outcome(reach.host_service(8082), container)[0] == "fail"


@pytest.mark.parametrize(
    "hosts", ["", "203.0.113.7 corral-host\n", f"{GATEWAY} corral-host\n203.0.113.7 corral-host\n"]
)
def test_name_of_the_host_must_be_the_gateway_alone(container: Container, hosts: str) -> None:
    container.put("/etc/hosts", hosts)
    assert outcome(reach.host_service(8081), container)[0] == "fail"


def test_pinned_name_has_the_addresses_of_the_kernel(container: Container) -> None:
    assert outcome(reach.pinned_name("api.example"), container) == ("ok", "203.0.113.10, 203.0.113.11")


@pytest.mark.parametrize("found", [["203.0.113.10"], ["203.0.113.10", "203.0.113.11", "203.0.113.12"], []])
def test_pinned_name_with_other_addresses_is_found(container: Container, found: list[str]) -> None:
    container.put("/etc/hosts", "".join(f"{address} API.example other\n" for address in found))
    assert outcome(reach.pinned_name("api.example"), container)[0] == "fail"


def test_ipv6_is_off_everywhere(container: Container) -> None:
    assert outcome(reach.ipv6_disabled, container) == ("ok", "off for all, eth0")


@pytest.mark.parametrize("interface", ["all", "eth0", "default"])
def test_one_interface_with_ipv6_is_found(container: Container, interface: str) -> None:
    container.put(f"/proc/sys/net/ipv6/conf/{interface}/disable_ipv6", "0\n")
    assert outcome(reach.ipv6_disabled, container) == ("fail", f"on for {interface}")


def test_kernel_without_ipv6_is_fine(container: Container) -> None:
    for path in sorted(container.real("/proc/sys/net").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    container.real("/proc/net/if_inet6").unlink()
    assert outcome(reach.ipv6_disabled, container) == ("ok", "the kernel has no IPv6")
    assert outcome(reach.no_ipv6_address, container) == ("ok", "the kernel has no IPv6")


@pytest.mark.parametrize(
    "line",
    [
        "00000000000000000000000000000001 01 80 10 80       lo",
        "fe800000000000000042acfffe100502 02 40 20 80     eth0",
    ],
)
def test_any_ipv6_address_is_found(container: Container, line: str) -> None:
    assert outcome(reach.no_ipv6_address, container) == ("ok", "none")
    container.put("/proc/net/if_inet6", line + "\n")
    assert outcome(reach.no_ipv6_address, container)[0] == "fail"


def test_query_is_a_dns_message() -> None:
    from dns.message import from_wire

    for record in network.RECORD_TYPES:
        message = from_wire(network.query("one.example.", record))
        assert message.question[0].to_text() == f"one.example. IN {record}"


@pytest.mark.parametrize("kind", ["refused", "unreachable", "timeout"])
def test_peer_that_takes_no_connection_is_unreachable(container: Container, kind: str) -> None:
    for port in reach.PEER_PORTS:
        container.open_tcp[PEER, port] = Reply(kind, 0.001)
    assert outcome(reach.peer_unreachable(PEER), container)[0] == "ok"


@pytest.mark.parametrize("kind", ["connected", "data", "closed"])
@pytest.mark.parametrize("port", reach.PEER_PORTS)
def test_each_port_of_a_peer_is_tried(container: Container, port: int, kind: str) -> None:
    container.open_tcp[PEER, port] = Reply(kind, 0.001)
    assert outcome(reach.peer_unreachable(PEER), container) == ("fail", f"{PEER}:{port} is reachable")


def test_missing_route_to_a_peer_proves_nothing(container: Container) -> None:
    container.open_tcp[PEER, 443] = Reply("no-route", 0.001)
    status, detail = outcome(reach.peer_unreachable(PEER), container)
    assert status == "fail"
    assert "nothing is proven" in detail
