"""The gate in worlds that are right in every way but one. Its sockets: test_tries.py."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agent_image.files.entrypoint import gate, questions
from agent_image.files.entrypoint.tries import Try
from policy.container import UNLISTED_NAME

GATEWAY, PROBE, RESOLVER = "198.51.100.1", "192.0.2.1", "203.0.113.53"
HOSTS = {
    "localhost": ["127.0.0.1"],
    "corral-host": [GATEWAY],
    "api.example": ["203.0.113.10", "203.0.113.11"],
    "quiet.example": ["203.0.113.20"],
}
BODY: dict[str, Any] = {
    "probe": {"address": PROBE, "port": 443},
    "resolver": RESOLVER,
    "names": [
        {"host": "api.example", "ports": [443, 22], "liveness": True, "optional": False},
        {"host": "quiet.example", "ports": [443], "liveness": False, "optional": False},
        {"host": "later.example", "ports": [443], "liveness": True, "optional": True},
    ],
    "services": [8081],
    "beside": False,
}
GOOD = [
    "pinned api.example -> 203.0.113.10 203.0.113.11",
    "pinned quiet.example -> 203.0.113.20",
    "OK: unlisted host blocked",
    "OK: DNS closed",
    "OK: allowlisted host api.example (203.0.113.10) reachable",
    "OK: host service 8081 reachable",
    "egress policy applied",
]

Reply = tuple[str, float, bytes] | str
Answer = Reply | Callable[[Try], Reply]


def dns(code: int, answers: int = 0) -> Callable[[Try], Reply]:
    """A server that answers every question so."""

    def answer(one: Try) -> Reply:
        asked = one.payload if one.udp else one.payload[2:]
        data = asked[:2] + struct.pack("!HHHHH", 0x8180 | code, 1, answers, 0, 0) + asked[12:]
        return "data", 0.01, data if one.udp else struct.pack("!H", len(data)) + data

    return answer


class World:
    """What tries come to: (address, port, "udp" or "tcp") -> answer, or a list of answers, one a round."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, int, str], Answer | list[Answer]] = {
            ("203.0.113.10", 443, "tcp"): "connected",
            (GATEWAY, 8081, "tcp"): "connected",
        }
        for way in ("udp", "tcp"):
            self.answers["127.0.0.11", 53, way] = dns(2)
        self.rounds: list[list[tuple[str, int, str]]] = []
        self.lingering: set[tuple[str, int]] = set()

    def attempt(self, tries: Sequence[Try]) -> None:
        self.rounds.append([])
        self.lingering |= {(one.address, one.port) for one in tries if one.linger}
        for one in tries:
            key = (one.address, one.port, "udp" if one.udp else "tcp")
            self.rounds[-1].append(key)
            answer = self.answers.get(key, ("refused", 0.001, b""))
            if isinstance(answer, list):
                answer = answer[len(self.rounds) - 1]
            reply = answer(one) if callable(answer) else answer
            one.kind, one.seconds, one.data = (reply, 0.01, b"") if isinstance(reply, str) else reply

    def lines(self, hosts: dict[str, list[str]] = HOSTS, **changes: Any) -> list[str]:
        told: list[str] = []
        policy = gate.parse_policy(json.dumps({**BODY, **changes}))
        passed = gate.run(policy, hosts, say=told.append, attempt=self.attempt)
        assert passed == (told[-1:] == ["egress policy applied"])
        assert passed != any(line.startswith("ERROR: ") for line in told)
        return told

    def errors(self, hosts: dict[str, list[str]] = HOSTS, **changes: Any) -> list[str]:
        lines = self.lines(hosts, **changes)
        return [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]


@pytest.fixture
def world() -> World:
    return World()


def test_a_fence_that_holds_is_told_in_this_order(world: World) -> None:
    assert world.lines() == GOOD
    assert [len(tried) for tried in world.rounds] == [2 + 12 + 1 + 1, 0, 0]


def test_beside_a_running_session_it_says_that_it_checks_again_and_what_that_came_to(world: World) -> None:
    again = "rules already present for this sandbox; re-checking"
    assert world.lines(beside=True) == [again, *GOOD]
    world.answers[PROBE, 443, "tcp"] = "connected"
    world.rounds.clear()
    lines = world.lines(beside=True)
    assert (lines[0], lines[-1]) == (again, "ERROR: re-check failed against existing rules")
    assert "ERROR: unlisted host reachable — isolation broken" in lines


def test_everything_that_must_stay_closed_is_tried(world: World) -> None:
    world.lines()
    for way in ("udp", "tcp"):
        assert (PROBE, 443, way) in world.rounds[0]
        for server in ("127.0.0.11", GATEWAY, RESOLVER):
            # A and TXT.
            assert world.rounds[0].count((server, 53, way)) == 2


# --- names that are answered


def asked_for(one: Try) -> str:
    message = one.payload if one.udp else one.payload[2:]
    labels, at = [], 12
    while message[at]:
        labels.append(message[at + 1 : at + 1 + message[at]].decode())
        at += 1 + message[at]
    return ".".join(labels)


def permitting(*names: str, other: int = 3, records: int = 0) -> Callable[[Try], Reply]:
    """A server that knows these names, and says ``other`` with ``records`` of all else."""

    def answer(one: Try) -> Reply:
        return (dns(0, 1) if asked_for(one) in names else dns(other, records))(one)

    return answer


@pytest.fixture
def answering(world: World) -> World:
    for way in ("udp", "tcp"):
        for server in ("127.0.0.11", GATEWAY):
            world.answers[server, 53, way] = permitting("api.example")
    return world


def test_where_names_are_answered_the_permitted_are_and_no_others(answering: World) -> None:
    lines = answering.lines(dns="answer")
    assert lines[3:5] == ["OK: DNS outside closed", "OK: names of the policy are answered, others are not"]
    assert lines[-1] == "egress policy applied"
    # The control: what is right there is wrong in a sandbox without DNS.
    assert any(line.startswith("DNS reachable: 127.0.0.11") for line in answering.errors())


@pytest.mark.parametrize("server", ["127.0.0.11", GATEWAY])
@pytest.mark.parametrize("way", ["udp", "tcp"])
@pytest.mark.parametrize("records", [0, 1])
def test_a_name_that_no_policy_has_and_that_is_answered_is_a_hole(
    answering: World, server: str, way: str, records: int
) -> None:
    answering.answers[server, 53, way] = permitting("api.example", other=0, records=records)
    (problem,) = answering.errors(dns="answer")
    assert problem.startswith(f"a name that is not allowed is answered: {server} says NOERROR")
    assert problem.endswith("isolation broken")


@pytest.mark.parametrize("server", ["127.0.0.11", GATEWAY])
def test_a_resolver_that_knows_nobody_does_not_answer_names(answering: World, server: str) -> None:
    answering.answers[server, 53, "udp"] = dns(2)
    problems = answering.errors(dns="answer")
    assert f"names are not answered: {server} over UDP: SERVFAIL; see: corral status" in problems


def test_an_answer_that_comes_late_is_waited_for(answering: World) -> None:
    answering.answers[GATEWAY, 53, "udp"] = ["timeout", dns(2), permitting()]
    assert answering.errors(dns="answer") == []


def test_a_listed_name_has_to_be_known_where_names_are_answered(answering: World) -> None:
    answering.answers["127.0.0.11", 53, "udp"] = permitting()
    assert answering.errors(dns="answer") == [
        "allowlisted host api.example is not answered by DNS: NXDOMAIN; see: corral status"
    ]


def test_a_resolver_outside_has_to_be_closed_where_names_are_answered(answering: World) -> None:
    answering.answers[RESOLVER, 53, "tcp"] = "connected"
    assert any(RESOLVER in line for line in answering.errors(dns="answer"))


def test_the_service_and_the_gate_mean_the_same_name_that_nobody_has() -> None:
    assert gate.UNLISTED_NAME == UNLISTED_NAME


# --- an unlisted host


@pytest.mark.parametrize("way", ["tcp", "udp"])
def test_a_reachable_unlisted_host_is_exactly_the_isolation_sentence(world: World, way: str) -> None:
    world.answers[PROBE, 443, way] = "connected" if way == "tcp" else dns(0, 1)
    assert world.errors() == ["unlisted host reachable — isolation broken"]
    assert "OK: unlisted host blocked" not in world.lines()


def test_one_connection_to_an_unlisted_host_is_not_outvoted_by_later_refusals(world: World) -> None:
    world.answers[PROBE, 443, "tcp"] = [("refused", 0.3, b""), "connected", ("refused", 0.001, b"")]
    assert world.errors() == ["unlisted host reachable — isolation broken"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (("timeout", 1.2, b""), "timed out"),
        (("no-route", 0.0, b""), "no route"),
        (("unreachable", 0.01, b""), "no route"),
        (("refused", 0.25, b""), "took 250 ms, more than 100 ms"),
    ],
)
def test_only_a_prompt_refusal_proves_that_an_unlisted_host_is_blocked(
    world: World, answer: Reply, words: str
) -> None:
    world.answers[PROBE, 443, "tcp"] = answer
    (told,) = world.errors()
    assert told.startswith("unlisted host not refused: ")
    assert words in told
    assert len([key for tried in world.rounds for key in tried if key == (PROBE, 443, "tcp")]) == 3


def test_the_best_of_three_tries_counts_on_a_busy_machine(world: World) -> None:
    slow: Reply = ("refused", 0.4, b"")
    world.answers[PROBE, 443, "tcp"] = [slow, ("timeout", 1.2, b""), ("refused", 0.09, b"")]
    assert world.lines() == GOOD
    world = World()
    world.answers[PROBE, 443, "tcp"] = [slow, ("timeout", 1.2, b""), ("refused", 0.11, b"")]
    assert "took 110 ms" in world.errors()[0]


# --- DNS


@pytest.mark.parametrize("way", ["tcp", "udp"])
@pytest.mark.parametrize(("code", "name"), [(0, "NOERROR"), (3, "NXDOMAIN")])
def test_a_resolver_in_the_container_that_asked_somebody_is_found(
    world: World, way: str, code: int, name: str
) -> None:
    world.answers["127.0.0.11", 53, way] = dns(code)
    (told,) = world.errors()
    assert told == f"DNS reachable: 127.0.0.11 answers {name} over {way.upper()} — isolation broken"


@pytest.mark.parametrize("code", [1, 2, 4, 5])
def test_a_resolver_in_the_container_that_knows_nobody_is_closed(world: World, code: int) -> None:
    for way in ("tcp", "udp"):
        world.answers["127.0.0.11", 53, way] = dns(code)
    assert world.lines() == GOOD
    for way in ("tcp", "udp"):
        world.answers["127.0.0.11", 53, way] = dns(code, answers=1)
    assert len(world.errors()) == 1


def test_records_of_one_type_are_enough_to_be_found(world: World) -> None:
    txt = questions.query("example.com", "TXT")[-4:]
    refused, answered = dns(2), dns(0, 1)
    world.answers["127.0.0.11", 53, "udp"] = lambda one: (answered if txt in one.payload else refused)(one)
    assert "NOERROR over UDP" in world.errors()[0]


@pytest.mark.parametrize("server", [GATEWAY, RESOLVER])
@pytest.mark.parametrize(
    ("way", "answer"),
    [
        ("udp", dns(5)),
        ("udp", ("data", 0.1, b"x")),
        ("tcp", dns(2)),
        ("tcp", ("connected", 0.5, b"")),
        ("tcp", ("closed", 0.01, b"")),
    ],
)
def test_whatever_comes_back_from_a_server_elsewhere_is_a_hole(
    world: World, server: str, way: str, answer: Answer
) -> None:
    world.answers[server, 53, way] = answer
    (told,) = world.errors()
    assert told.startswith(f"DNS reachable: {server} a")
    assert told.endswith(" — isolation broken")


@pytest.mark.parametrize("kind", ["timeout", "refused", "unreachable", "no-route"])
def test_silence_and_refusal_are_both_closed(world: World, kind: str) -> None:
    for server in ("127.0.0.11", GATEWAY, RESOLVER):
        for way in ("udp", "tcp"):
            world.answers[server, 53, way] = (kind, 0.5, b"")
    assert world.lines() == GOOD


def test_a_declared_service_on_the_port_of_DNS_may_accept_but_not_answer(world: World) -> None:
    world.answers[GATEWAY, 53, "tcp"] = "connected"
    assert world.errors(services=[8081, 53]) == []
    assert world.errors() == [f"DNS reachable: {GATEWAY} accepts connections over TCP — isolation broken"]
    world.answers[GATEWAY, 53, "tcp"] = dns(0, 1)
    assert any("DNS reachable" in told for told in world.errors(services=[8081, 53]))


# --- allowed names


def test_any_address_on_any_port_of_a_name_will_do(world: World) -> None:
    del world.answers["203.0.113.10", 443, "tcp"]
    world.answers["203.0.113.11", 22, "tcp"] = "connected"
    assert "OK: allowlisted host api.example (203.0.113.11) reachable" in world.lines()


def test_a_name_that_answers_nowhere_is_told_with_the_fix(world: World) -> None:
    world.answers["203.0.113.10", 443, "tcp"] = "refused"
    world.answers["203.0.113.11", 443, "tcp"] = "timeout"
    (told,) = world.errors()
    assert told == (
        "allowlisted host api.example not reachable: 203.0.113.10 203.0.113.11 on ports 443, 22: refused, timeout; "
        "if it is not meant to answer there, set liveness: false for it in corral.yaml"
    )
    tried = {key for made in world.rounds for key in made}
    assert {(address, port, "tcp") for address in HOSTS["api.example"] for port in (443, 22)} <= tried


def test_a_lost_packet_does_not_stop_a_start(world: World) -> None:
    only = [{"host": "quiet.example", "ports": [443], "liveness": True, "optional": False}]
    world.answers["203.0.113.20", 443, "tcp"] = ["timeout", "timeout", "connected"]
    assert "OK: allowlisted host quiet.example (203.0.113.20) reachable" in world.lines(names=only)


@pytest.mark.parametrize("liveness", [True, False])
def test_a_name_without_an_address_is_skipped_only_when_it_is_optional(world: World, liveness: bool) -> None:
    name = {"host": "missing.example", "ports": [443], "liveness": liveness, "optional": True}
    assert not any("missing.example" in line for line in world.lines(names=[name]))
    (told,) = world.errors(names=[{**name, "optional": False}])
    assert "missing.example" in told and "no address" in told


def test_names_with_very_many_places_are_tried_in_bounded_numbers(world: World) -> None:
    addresses = [f"203.0.113.{number}" for number in range(100, 116)]
    names = [
        {"host": f"n{i}.example", "ports": list(range(1, 65)), "liveness": True, "optional": False}
        for i in range(200)
    ]
    assert (
        len(world.errors({**HOSTS, **{f"n{i}.example": addresses for i in range(200)}}, names=names)) == 200
    )
    assert max(len(tried) for tried in world.rounds) < 700
    # Nothing is tried twice as long as there is something else.
    first, second, third = (set(tried) for tried in world.rounds)
    places = {(address, port, "tcp") for address in addresses for port in range(1, 65)}
    assert not first & second & places
    assert not second & third & places


# --- host services


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("closed", "nothing listens on 127.0.0.1:8081 of the host"),
        ("refused", "corral-host:8081 refused"),
        ("timeout", "corral-host:8081 timeout"),
    ],
)
def test_a_host_service_that_is_not_there_is_told(world: World, kind: str, words: str) -> None:
    world.answers[GATEWAY, 8081, "tcp"] = kind
    (told,) = world.errors()
    assert told.startswith("host service 8081 not reachable: ")
    assert words in told


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("closed", "it does not take connections"),
        ("refused", "proxy:8443 refused"),
        ("timeout", "proxy:8443 timeout"),
    ],
)
def test_a_proxy_that_is_not_there_is_told(world: World, kind: str, words: str) -> None:
    world.answers[GATEWAY, 8443, "tcp"] = kind
    (told,) = world.errors(proxy=8443)
    assert told.startswith("the sandbox's proxy not reachable: ")
    assert words in told


def test_the_proxy_is_tried_only_where_there_is_one(world: World) -> None:
    world.answers[GATEWAY, 8443, "tcp"] = "connected"
    assert world.lines() == GOOD
    assert world.lines(proxy=8443) == [*GOOD[:-1], "OK: the sandbox's proxy reachable", GOOD[-1]]
    assert (GATEWAY, 8443) in world.lingering


def test_a_connection_to_a_host_service_has_to_last(world: World) -> None:
    world.lines()
    assert world.lingering == {(GATEWAY, 8081)}


def test_a_host_service_that_speaks_first_is_there(world: World) -> None:
    world.answers[GATEWAY, 8081, "tcp"] = ("data", 0.01, b"220 ready\r\n")
    assert world.lines() == GOOD


def test_without_the_gateway_nothing_about_it_is_believed(world: World) -> None:
    hosts = {name: found for name, found in HOSTS.items() if name != "corral-host"}
    told = world.errors(hosts)
    assert len(told) == 2
    assert all("corral-host" in line for line in told)


def test_all_that_is_wrong_is_told_at_once(world: World) -> None:
    world.answers = {(PROBE, 443, "tcp"): "connected", ("127.0.0.11", 53, "udp"): dns(0, 1)}
    told = world.errors()
    assert [line.split()[0] for line in told] == ["unlisted", "DNS", "allowlisted", "host"]


# --- what the gate is told


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{",
        "{}",
        *(
            json.dumps({**BODY, **change})
            for change in (
                {"probe": None},
                {"probe": {"address": "example.com", "port": 443}},
                {"probe": {"address": PROBE, "port": "443"}},
                {"probe": {"address": PROBE, "port": True}},
                {"probe": {"address": PROBE, "port": 0}},
                {"resolver": ""},
                {"resolver": 7},
                {"names": {}},
                {"names": [{"host": "api.example", "ports": [443]}]},
                {"names": [{**BODY["names"][0], "ports": []}]},
                {"names": [{**BODY["names"][0], "host": ""}]},
                {"names": [{**BODY["names"][0], "liveness": "no"}]},
                {"services": None},
                {"services": [70000]},
                {"proxy": 0},
                {"proxy": "8443"},
                {"dns": "dead"},
                {"dns": True},
                {"beside": None},
                {"beside": 1},
                {"more": 1},
            )
        ),
        *(json.dumps({key: value for key, value in BODY.items() if key != left}) for left in BODY),
    ],
)
def test_what_is_not_exactly_understood_is_refused(text: str) -> None:
    assert gate.parse_policy(json.dumps(BODY)).services == [8081]
    with pytest.raises((ValueError, TypeError, OSError)):
        gate.parse_policy(text)


def test_the_hosts_file_is_read_as_the_service_writes_it() -> None:
    text = "127.0.0.1 localhost\n198.51.100.1    corral-host   \n#  api.example\n203.0.113.9 API.example\n"
    assert gate.parse_hosts(text + "203.0.113.8 api.example # x\n203.0.113.8 api.example\n") == {
        "localhost": ["127.0.0.1"],
        "corral-host": ["198.51.100.1"],
        "api.example": ["203.0.113.9", "203.0.113.8"],
    }
