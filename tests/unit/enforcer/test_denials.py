"""Asking the writer for what was refused: order, failures, restarts; and what the dead resolver heard."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from enforcer import pins
from enforcer.denials import Denials, unheard
from enforcer.denied import Place
from enforcer.netfilter.claims import Claim
from enforcer.netfilter.model import parse_denied
from enforcer.netfilter.nflog import Packet
from enforcer.netfilter.refusals import Refusals
from enforcer.pinmodel import Pin, Record
from enforcer.sessions import Life, Session
from policy.declaration import Declaration
from policy.errors import EnforcerError

from .test_denied import FORBIDDEN, NET, START, session

SNMP = """\
Ip: Forwarding DefaultTTL
Ip: 1 64
Udp: InDatagrams NoPorts InErrors
Udp: 12 {} 0
UdpLite: InDatagrams NoPorts InErrors
UdpLite: 0 9 0
"""


class Writer:
    """The writer's own account, asked as over its socket."""

    def __init__(self) -> None:
        self.refusals = Refusals("one")
        self.claims = {"b": Claim(1000, "b", 7, NET.subnet, NET.gateway)}
        self.broken = ""
        self.tallies: list[list[object]] = []
        self.asked: list[dict[str, Any]] = []
        self.total: dict[str, int] = {}
        self.odd: dict[str, Any] = {}

    def refuse(self, *ports: int, at: float = START + 50) -> None:
        packets = [Packet(7, "172.16.0.2", 17, port, FORBIDDEN) for port in ports]
        self.refusals.add(packets, self.claims, at)

    def denied(self, epoch: str, after: int, sources: Collection[str], tallies: bool) -> Mapping[str, Any]:
        if self.broken:
            raise EnforcerError(self.broken)
        body = {"epoch": epoch, "after": after, "sources": sorted(sources), "tallies": tallies}
        self.asked.append(body)
        answer = self.refusals.since(1000, parse_denied({"v": 2, "op": "denied", **body}))
        answer |= {"totals": self.total, "problem": ""}
        return json.loads(json.dumps(answer | ({"tallies": self.tallies} if tallies else {}) | self.odd))  # type: ignore[no-any-return]


class World:
    def __init__(self, tmp_path: Path) -> None:
        self.writer = Writer()
        self.sessions: list[Session] = [session()]
        self.state = pins.State()
        self.now = START + 100
        self.looked = asyncio.Event()
        self.looked.set()
        self.proc = tmp_path / "proc"
        self.store = tmp_path / "state" / "addresses.json"
        self.of = self.make()

    def make(self) -> Denials:
        return Denials(
            self.writer,
            self.store,
            lambda: (self.sessions, [NET], self.state),
            lambda: self.now,
            lambda: self.now,
            self.looked,
            self.proc,
        )

    def poll(self, tallies: bool = True) -> None:
        asyncio.run(self.of.poll(tallies))

    def ports(self) -> dict[int, int]:
        return {row.flow[2]: row.count for row in self.of.ledger.rows()}

    def process(self, pid: int, questions: int, namespace: str = "container") -> None:
        place = self.proc / str(pid)
        (place / "ns").mkdir(parents=True, exist_ok=True)
        (place / "net").mkdir(exist_ok=True)
        (self.proc / "namespaces").mkdir(exist_ok=True)
        kept = self.proc / "namespaces" / namespace
        kept.touch()
        (place / "ns" / "net").unlink(missing_ok=True)
        os.link(kept, place / "ns" / "net")
        (place / "net" / "snmp").write_text(SNMP.format(questions))


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    made.process(1, 0, "host")
    (made.proc / "self").symlink_to("1")
    return made


def test_each_record_is_taken_in_once(world: World) -> None:
    world.writer.refuse(1, 2, 2)
    world.poll()
    world.poll()
    assert world.ports() == {1: 1, 2: 2}
    assert [(row["epoch"], row["after"]) for row in world.writer.asked] == [("", 0), ("one", 3)]
    assert world.writer.asked[0]["sources"] == ["172.16.0.2"]


@pytest.mark.parametrize("odd", ["", "none", "172.16.0.03", "2001:db8::3"])
def test_a_session_without_an_address_hides_nothing_of_the_others(world: World, odd: str) -> None:
    refused = session("c3", "172.16.0.4", problems=("it differs",))
    world.sessions += [session("c2", odd, problems=("it differs",)), refused]
    world.writer.refuse(1)
    world.poll()
    assert (world.of.problem, world.ports()) == ("", {1: 1})
    assert world.writer.asked[0]["sources"] == ["172.16.0.2", "172.16.0.4"]


def test_a_writer_that_began_anew_is_asked_from_its_start(world: World) -> None:
    world.writer.refuse(1, 2)
    world.poll()
    world.writer.refusals = Refusals("two")
    world.writer.refuse(3)
    world.poll()
    assert world.ports() == {1: 1, 2: 1, 3: 1}
    assert world.of.lost == 0


def test_a_long_list_is_asked_for_to_its_end(world: World) -> None:
    for index in range(8, 16):
        world.writer.claims[f"b{index}"] = Claim(1000, f"b{index}", index, NET.subnet, NET.gateway)
        packets = [Packet(index, "172.16.0.2", 17, index, FORBIDDEN)] * 1000
        world.writer.refusals.add(packets, world.writer.claims, START + 50)
    world.poll()
    assert world.ports() == dict.fromkeys(range(8, 16), 1000)
    # The counters once are enough.
    assert [row["tallies"] for row in world.writer.asked] == [True, *[False] * 4]


def test_lost_records_are_counted_only_when_this_service_could_have_had_them(world: World) -> None:
    world.writer.refuse(*[5] * 2000)
    world.poll()
    assert world.of.lost == 0
    world.writer.refuse(*[6] * 1500)
    world.poll()
    assert world.of.lost == 1500 - 1024


def test_a_writer_that_does_not_answer_is_told_and_waited_for(world: World) -> None:
    world.writer.broken = "the writer does not answer"
    world.poll()
    assert asyncio.run(world.of.report())["problem"] == "the writer does not answer"
    world.writer.broken = ""
    world.writer.refuse(1)
    assert asyncio.run(world.of.report())["problem"] == ""
    assert world.ports() == {1: 1}


@pytest.mark.parametrize(
    "odd",
    [
        {"records": None},
        {"records": [[1, 2]]},
        {"records": [["x", 0, "a", 1, 1, "b"]]},
        {"totals": []},
        {"tallies": [[1]]},
        {"next": "x"},
        {"epoch": 1, "lost": None},
    ],
    ids=str,
)
def test_an_answer_that_is_not_understood_is_a_problem_not_an_end(world: World, odd: dict[str, Any]) -> None:
    world.writer.odd = odd
    world.poll()
    assert "not understood" in world.of.problem
    world.writer.odd = {}
    world.writer.refuse(1)
    world.poll()
    assert world.ports() == {1: 1}


def test_before_docker_was_looked_at_nothing_is_taken_in_as_nobodys(world: World) -> None:
    world.looked.clear()
    sessions, world.sessions = world.sessions, []
    world.writer.refuse(1)
    world.poll()
    assert asyncio.run(world.of.report())["problem"] == "Docker was not looked at yet"
    world.looked.set()
    world.sessions = sessions
    world.poll()
    assert [row.place.container for row in world.of.ledger.rows()] == ["c1"]


def test_a_session_that_came_and_went_between_two_questions_is_known(world: World) -> None:
    world.of.notice()
    world.sessions = []
    world.writer.refuse(1)
    world.poll()
    assert [row.place.container for row in world.of.ledger.rows()] == ["c1"]


def test_names_are_remembered_across_restarts(world: World) -> None:
    pin = {FORBIDDEN: Pin(0, 0, 60, 0)}
    world.state = replace(world.state, names={"x.example.com": Record("x.example.com", pins=pin)})
    world.of.notice()
    world.of.save()
    world.state = pins.State()
    world.of = world.make()
    world.writer.refuse(443)
    (row,) = asyncio.run(world.of.report())["rows"]
    assert [one["name"] for one in row["names"]] == ["x.example.com"]


def test_a_damaged_file_of_names_is_done_without(world: World) -> None:
    world.store.parent.mkdir(parents=True)
    world.store.write_text("{")
    assert world.make().book.names(FORBIDDEN) == ()


def test_a_directory_that_cannot_be_written_ends_nothing(world: World) -> None:
    world.store.parent.parent.mkdir(exist_ok=True)
    world.store.parent.write_text("a file")
    world.state = replace(world.state, names={"x": Record("x", pins={FORBIDDEN: Pin(0, 0, 60, 0)})})
    world.of.notice()
    world.of.save()


# -- the dead resolver


def test_what_the_dead_resolver_was_asked_is_counted_without_the_gates_questions(world: World) -> None:
    world.process(4242, 7)
    world.poll()
    assert world.of.lookups("c1") == 5
    assert asyncio.run(world.of.report())["sandboxes"] == []
    world.writer.refuse(1)
    (sandbox,) = asyncio.run(world.of.report())["sandboxes"]
    assert sandbox["dead_resolver"] == 5


def test_only_the_gates_questions_are_none(world: World) -> None:
    world.process(4242, 1)
    world.poll()
    assert world.of.lookups("c1") == 0


def test_a_session_that_ended_keeps_its_number(world: World) -> None:
    world.process(4242, 7)
    world.poll()
    world.sessions = []
    world.poll()
    assert world.of.lookups("c1") == 5


def test_the_hosts_own_namespace_and_a_reused_number_are_not_taken_for_the_container(world: World) -> None:
    world.process(4242, 1_000_000, "host")
    world.poll()
    assert world.of.lookups("c1") is None
    world.process(4242, 7)
    world.poll()
    world.process(4242, 1_000_000, "another")
    world.poll()
    assert world.of.lookups("c1") == 5
    # A restart of the container is another process in another namespace.
    world.sessions = [session(life=Life(START, START + 9, 4343))]
    world.process(4343, 4, "later")
    world.poll()
    assert world.of.lookups("c1") == 2


@pytest.mark.parametrize("text", ["", "Udp: NoPorts\n", "Udp: A\nUdp: 1\n", "Udp: NoPorts\nUdp: x\n"])
def test_what_cannot_be_read_is_unknown(text: str) -> None:
    assert unheard(text) is None


def test_a_process_that_is_gone_is_unknown(world: World) -> None:
    world.poll()
    assert world.of.lookups("c1") is None


# -- names that were asked for


def test_a_refused_name_is_told_with_the_session_that_asked_the_answerer(world: World) -> None:
    world.of.asked("demo-0a0b0c0d", "c1", "Files.example.com.", 0, "denied")
    (row,) = world.of.names.rows()
    assert (row.name, row.port, row.reason, row.last) == ("files.example.com", 0, "denied", world.now)
    assert row.place == Place("demo-0a0b0c0d", "/home/dev/demo", "main", "5e55c1", "c1")


def test_what_was_asked_of_two_lives_of_a_proxy_is_one_row(world: World) -> None:
    for container in ("p1", "p2"):
        world.sessions = [session(), session(container, "172.16.0.3", service="proxy", purpose="proxy")]
        world.of.asked("demo-0a0b0c0d", container, "files.example.com", 443, "denied")
    (row,) = world.of.names.rows()
    assert (row.place, row.count) == (Place("demo-0a0b0c0d", "/home/dev/demo", "proxy"), 2)


def test_a_container_of_another_sandbox_is_not_taken_for_one_of_this(world: World) -> None:
    world.of.asked("other-0a0b0c0e", "c1", "files.example.com", 443, "denied")
    (row,) = world.of.names.rows()
    assert row.place == Place("other-0a0b0c0e", "", "proxy")


def test_what_a_checking_session_asks_for_is_marked(world: World) -> None:
    world.sessions = [session(purpose="verify")]
    world.of.asked("demo-0a0b0c0d", "c1", "files.example.com", 0, "denied")
    assert [row.check for row in world.of.names.rows()] == [True]


def asked_of(world: World, **words: Any) -> dict[str, Any]:
    return asyncio.run(world.of.report(**words))


def test_a_refused_name_is_told_with_what_allows_it_and_packets_are_not_counted_with_it(world: World) -> None:
    world.writer.refuse(9)
    world.of.asked("demo-0a0b0c0d", "c1", "files.example.com", 0, "denied")
    world.of.asked("demo-0a0b0c0d", "c1", "\x1b[2J", 0, "denied")
    body = asked_of(world)
    (row,) = body["asked"]
    assert {key: row[key] for key in ("name", "protocol", "address", "port", "count", "reason", "dns")} == {
        "name": "files.example.com",
        "protocol": "dns name",
        "address": None,
        "port": None,
        "count": 1,
        "reason": "denied",
        "dns": True,
    }
    assert (row["note"], row["line"], row["command"]) == (
        "not allowed",
        "- files.example.com",
        "corral allow files.example.com",
    )
    (sandbox,) = body["sandboxes"]
    assert (sandbox["denied"], sandbox["asked"], sandbox["asked_unlisted"]) == (1, 2, 1)
    assert [one["name"] for one in body["rows"][0]["names"]] == []
    assert world.of.counts()["asked"] == {"demo-0a0b0c0d": 2}
    assert world.of.counts()["denied"] == {"demo-0a0b0c0d": 1}


def test_rows_of_both_kinds_are_asked_for_by_one_number(world: World) -> None:
    world.of.asked("demo-0a0b0c0d", "c1", "a.example.com", 443, "denied")
    world.writer.refuse(9)
    first = asked_of(world)
    assert (len(first["rows"]), len(first["asked"]), first["next"]) == (1, 1, 2)
    world.of.asked("demo-0a0b0c0d", "c1", "b.example.com", 443, "denied")
    second = asked_of(world, after=first["next"])
    assert (second["rows"], [row["name"] for row in second["asked"]]) == ([], ["b.example.com"])
    assert asked_of(world, after=second["next"])["asked"] == []


def test_a_sandbox_that_only_asked_for_names_is_told_with_its_directory(world: World) -> None:
    world.of.asked("demo-0a0b0c0d", "c1", "a.example.com", 443, "denied")
    body = asked_of(world, project="/home/dev/demo")
    assert [(one["sandbox"], one["project"]) for one in body["sandboxes"]] == [
        ("demo-0a0b0c0d", "/home/dev/demo")
    ]
    assert len(body["asked"]) == 1
    elsewhere = asked_of(world, project="/elsewhere")
    assert (elsewhere["asked"], elsewhere["sandboxes"]) == ([], [])


def test_the_proxy_is_no_session_whose_policy_has_to_allow_a_name(world: World) -> None:
    proxy = session("p1", "172.16.0.3", service="proxy", purpose="proxy", declaration=Declaration())
    world.sessions = [session(), proxy]
    world.of.asked("demo-0a0b0c0d", "p1", "api.example.com", 8443, "denied")
    (row,) = asked_of(world)["asked"]
    assert (row["protocol"], row["session"], row["service"]) == ("proxy", None, "proxy")
    assert row["note"] == "not allowed on port 8443, only on 443"


def test_what_a_check_asked_for_is_in_no_number_of_the_program(world: World) -> None:
    world.sessions = [session(purpose="verify")]
    world.of.asked("demo-0a0b0c0d", "c1", "files.example.com", 443, "denied")
    assert asked_of(world)["sandboxes"][0]["asked"] == 0
    assert world.of.counts()["asked"] == {"demo-0a0b0c0d": 0}


@pytest.mark.parametrize(
    ("name", "reason", "marked"),
    [
        ("example.com", "denied", True),
        ("api.example.com", "sni-mismatch", True),
        ("files.example.com", "denied", False),
        ("example.com", "no-sni", False),
    ],
)
def test_what_a_check_tries_at_the_proxy_is_marked_while_it_runs(
    world: World, name: str, reason: str, marked: bool
) -> None:
    proxy = session("p1", "172.16.0.3", service="proxy", purpose="proxy")
    checking = session("c2", "172.16.0.4", purpose="verify")
    for sessions in ([session(), proxy], [session(), proxy, checking]):
        world.sessions = sessions
        world.of.asked("demo-0a0b0c0d", "p1", name, 443, reason)
    assert sorted(row.check for row in world.of.names.rows()) == ([False, True] if marked else [False])


def test_a_proxy_that_is_not_known_any_more_is_the_sandboxs_proxy_all_the_same(world: World) -> None:
    world.of.asked("demo-0a0b0c0d", "", "files.example.com", 443, "no-sni")
    (row,) = world.of.names.rows()
    assert row.place == Place("demo-0a0b0c0d", "/home/dev/demo", "proxy")
