"""Names of answered sandboxes: who hears of them, what is opened before it is told, and what is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import dns.message
import dns.rcode
import dns.rdatatype
import pytest

from enforcer.answering import ADDRESSES, Answerer
from enforcer.doors import ClosedError
from enforcer.gatewaydns import RATE, SHARE, GatewayDns, Place, Reply
from enforcer.lookups import Lookups
from enforcer.opendns import Refusal, Vetted
from enforcer.overrides import Overrides
from enforcer.pinmodel import Answer, Failure
from enforcer.sessions import Network, Session
from enforcer.vetting import Vetting
from policy.container import UNLISTED_NAME
from policy.declaration import Declaration, Name, Pattern
from policy.identity import Sandbox

SOURCE, GATEWAY = "172.16.0.2", "172.16.0.1"
PUBLIC, OTHER, PRIVATE = "198.51.100.7", "198.51.100.8", "10.0.0.7"
VETTING = Vetting.of(permit=["198.51.100.0/24"])
NETWORK = Network("0-corral-demo", "corral-0a0b0c0d", IPv4Network("172.16.0.0/26"), IPv4Address(GATEWAY))
DECLARATION = Declaration(
    dns="answer",
    names=(Name(host="api.example.com", ports=(443,)),),
    patterns=(
        Pattern(host="api.example.com", ports=(443,)),
        Pattern(host="*.example.org", ports=(443, 8443)),
        Pattern(host="db.example.org", ports=(5432,), protocol="tcp"),
        Pattern(host=r"regex:(eu|us)-[0-9]+\.example\.net", ports=(443,)),
    ),
)


def session(declaration: Declaration = DECLARATION, **changes: Any) -> Session:
    made = Session(
        container="c1", name="c", sandbox=Sandbox("demo-0a0b0c0d"), service="main", session="0000000a",
        address=SOURCE, hostname="main", hosts_file=Path("/nowhere"), declaration=declaration,
        network=NETWORK, running=True,
    )  # fmt: skip
    return replace(made, **changes)


class Bench:
    """An answerer; ``asked`` went upstream, ``opened`` to the kernel, ``told`` and ``refused`` to a person."""

    def __init__(self) -> None:
        self.session: Session | None = session()
        self.pinned: dict[str, tuple[str, ...]] = {"api.example.com": (OTHER,)}
        self.results: dict[str, Answer | Failure] = {}
        self.closed: ClosedError | None = None
        self.asked: list[str] = []
        self.opened: list[tuple[str, str, tuple[int, ...], tuple[str, ...]]] = []
        self.told: list[Refusal] = []
        self.refused: list[tuple[str, str]] = []
        self.meanwhile: Callable[[], None] = lambda: None
        self.now = 0.0
        lookups = Lookups(self.ask, lambda: self.now)
        self.of = Answerer(
            lambda source: self.session if source == SOURCE else None,
            lambda _session, name: self.pinned.get(name, ()),
            Vetted(lookups.find, VETTING.check, self.told.append),
            self.open,
            lambda _session, name, reason: self.refused.append((name, reason)),
        )

    async def ask(self, name: str) -> Answer | Failure:
        self.asked.append(name)
        return self.results.get(name, Failure(name, "nxdomain", ""))

    async def open(
        self, container: str, name: str, ports: Iterable[int], addresses: Iterable[str], ttl: float
    ) -> tuple[str, ...]:
        self.opened.append((container, name, tuple(ports), tuple(addresses)))
        self.meanwhile()
        if self.closed is not None:
            raise self.closed
        return tuple(addresses)

    def answers(self, name: str, *addresses: str, ttl: int = 300) -> None:
        self.results[name] = Answer(name, addresses, ttl, 0.0)

    def says(self, name: str, kind: str = "A", source: str = SOURCE) -> Reply:
        async def run() -> Reply:
            said = self.of.decide(source, dns.message.make_query(name, kind))
            return said if isinstance(said, Reply) else await said

        return asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "ports"),
    [
        ("a.example.org", (443, 8443)),
        ("a.b.example.org", (443, 8443)),
        ("db.example.org", (443, 5432, 8443)),
        ("EU-7.example.net", (443,)),
    ],
)
def test_a_name_that_a_pattern_means_is_opened_on_its_ports_and_then_told(
    name: str, ports: tuple[int, ...]
) -> None:
    bench = Bench()
    bench.answers(name.lower(), PUBLIC, OTHER)
    assert bench.says(name) == Reply(dns.rcode.NOERROR, (PUBLIC, OTHER), 60)
    assert bench.opened == [("c1", name.lower(), ports, (PUBLIC, OTHER))]
    assert bench.refused == []


@pytest.mark.parametrize(
    "name",
    [
        "example.org",
        "evil.example.com",
        "aexample.org",
        "a.example.org.evil.example.com",
        "eu-7.example.net.example.com",
        "xeu-7.example.net",
        "localhost",
        "10.0.0.1",
        "7.0.0.10.in-addr.arpa",
    ],
)
@pytest.mark.parametrize("kind", ["A", "AAAA"])
def test_a_name_that_no_pattern_means_does_not_exist_and_nobody_hears_of_it(name: str, kind: str) -> None:
    bench = Bench()
    bench.answers(name, PUBLIC)
    assert bench.says(name, kind) == Reply(dns.rcode.NXDOMAIN)
    assert (bench.asked, bench.opened) == ([], [])
    # One attempt of a program is two questions.
    assert [reason for _, reason in bench.refused] == (["denied"] if kind == "A" else [])


def test_what_the_gate_asks_for_is_not_told_to_anybody() -> None:
    bench = Bench()
    assert bench.says(UNLISTED_NAME) == Reply(dns.rcode.NXDOMAIN)
    assert bench.refused == bench.asked == []


@pytest.mark.parametrize(
    ("name", "kind", "code", "told"),
    [
        ("a.example.org", "AAAA", dns.rcode.NOERROR, []),
        ("a.example.org", "TXT", dns.rcode.NOTIMP, []),
        ("a.example.org", "HTTPS", dns.rcode.NOTIMP, []),
        ("a.example.org", "ANY", dns.rcode.NOTIMP, []),
        ("evil.example.com", "TXT", dns.rcode.NXDOMAIN, [("evil.example.com", "denied")]),
    ],
)
def test_questions_for_anything_but_addresses_go_nowhere(
    name: str, kind: str, code: dns.rcode.Rcode, told: list[tuple[str, str]]
) -> None:
    bench = Bench()
    bench.answers(name, PUBLIC)
    assert bench.says(name, kind) == Reply(code)
    assert (bench.asked, bench.opened, bench.refused) == ([], [], told)


def test_a_name_that_was_taken_back_is_not_answered_though_another_has_its_address() -> None:
    bench = Bench()
    for name in ("a.example.org", "b.example.org"):
        bench.answers(name, PUBLIC)
    bench.session = session(overrides=Overrides().deny("a.example.org", DECLARATION, matched=True))
    assert bench.says("a.example.org") == Reply(dns.rcode.NXDOMAIN)
    assert bench.says("b.example.org").addresses == (PUBLIC,)
    assert bench.asked == ["b.example.org"]


def test_a_name_that_was_allowed_since_is_answered_on_its_port() -> None:
    bench = Bench()
    bench.answers("new.example.com", PUBLIC)
    assert bench.says("new.example.com").code == dns.rcode.NXDOMAIN
    bench.session = session(overrides=Overrides().allow("new.example.com", (8080,), None))
    assert bench.says("new.example.com").addresses == (PUBLIC,)
    assert bench.opened == [("c1", "new.example.com", (8080,), (PUBLIC,))]


def test_a_pinned_name_is_told_as_the_hosts_file_has_it_and_nobody_is_asked() -> None:
    bench = Bench()
    bench.answers("api.example.com", PUBLIC)
    assert bench.says("api.example.com") == Reply(dns.rcode.NOERROR, (OTHER,), 60)
    assert bench.asked == bench.opened == []
    # Until there is something in the file, it is like any other.
    bench.pinned.clear()
    assert bench.says("api.example.com").addresses == (PUBLIC,)
    assert bench.opened == [("c1", "api.example.com", (443,), (PUBLIC,))]


def test_a_pinned_name_is_opened_on_ports_that_a_pattern_adds() -> None:
    bench = Bench()
    own = DECLARATION.model_copy(update={"names": (Name(host="db.example.org", ports=(5432,)),)})
    bench.session, bench.pinned = session(own), {"db.example.org": (OTHER,)}
    assert bench.says("db.example.org").addresses == (OTHER,)
    assert bench.opened == [("c1", "db.example.org", (443, 8443), (OTHER,))]
    # The pinned port is open, whatever comes of the others.
    bench.closed = ClosedError("busy", "")
    assert bench.says("db.example.org").addresses == (OTHER,)


def test_private_addresses_are_left_out_and_a_name_of_those_alone_does_not_exist_and_is_told() -> None:
    bench = Bench()
    bench.answers("half.example.org", PRIVATE, PUBLIC)
    bench.answers("lies.example.org", PRIVATE)
    assert bench.says("half.example.org").addresses == (PUBLIC,)
    assert bench.says("lies.example.org") == Reply(dns.rcode.NXDOMAIN, (), 300)
    assert [name for _, name, _, _ in bench.opened] == ["half.example.org"]
    assert [(one.name, one.address) for one in bench.told] == [
        ("half.example.org", PRIVATE),
        ("lies.example.org", PRIVATE),
    ]
    assert bench.refused == [("lies.example.org", "refused-address")]


@pytest.mark.parametrize(
    ("kind", "code", "told"),
    [
        ("nxdomain", dns.rcode.NXDOMAIN, []),
        ("empty", dns.rcode.NOERROR, []),
        ("timeout", dns.rcode.SERVFAIL, [("gone.example.org", "resolve")]),
    ],
)
def test_a_name_that_is_not_resolved_says_why(
    kind: str, code: dns.rcode.Rcode, told: list[tuple[str, str]]
) -> None:
    bench = Bench()
    bench.results["gone.example.org"] = Failure("gone.example.org", kind, "")  # type: ignore[arg-type]
    reply = bench.says("gone.example.org")
    assert (reply.code, reply.addresses, bench.opened, bench.refused) == (code, (), [], told)


@pytest.mark.parametrize(
    ("kind", "code", "told"),
    [
        ("busy", dns.rcode.SERVFAIL, [("a.example.org", "busy")]),
        ("unready", dns.rcode.SERVFAIL, []),
        ("denied", dns.rcode.NXDOMAIN, [("a.example.org", "denied")]),
    ],
)
def test_an_address_that_could_not_be_opened_is_not_told(
    kind: Any, code: dns.rcode.Rcode, told: list[tuple[str, str]]
) -> None:
    bench = Bench()
    bench.answers("a.example.org", PUBLIC)
    bench.closed = ClosedError(kind, "")
    reply = bench.says("a.example.org")
    assert (reply.code, reply.addresses, bench.refused) == (code, (), told)


@pytest.mark.parametrize("change", ["taken-back", "other-container", "gone"])
def test_what_changed_while_it_was_opened_is_not_told(change: str) -> None:
    bench = Bench()
    bench.answers("a.example.org", PUBLIC)
    taken = session(overrides=Overrides().deny("a.example.org", DECLARATION, matched=True))
    after = {"taken-back": taken, "other-container": session(container="c2"), "gone": None}[change]

    def meanwhile() -> None:
        bench.session = after

    bench.meanwhile = meanwhile
    assert bench.says("a.example.org") == Reply(dns.rcode.NXDOMAIN)


def test_of_very_many_addresses_as_many_are_told_as_were_opened() -> None:
    bench = Bench()
    bench.answers("a.example.org", *(f"198.51.100.{number}" for number in range(1, 15)))
    assert len(bench.says("a.example.org").addresses) == ADDRESSES
    assert len(bench.opened[0][3]) == ADDRESSES


@pytest.mark.parametrize(("ttl", "told"), [(5, 5), (60, 60), (3600, 60)])
def test_nobody_keeps_an_answer_for_longer_than_a_minute(ttl: int, told: int) -> None:
    bench = Bench()
    bench.answers("a.example.org", PUBLIC, ttl=ttl)
    assert bench.says("a.example.org").ttl == told


@pytest.mark.parametrize(
    "changes",
    [{"problems": ("it is another",)}, {"network": None}, {"declaration": Declaration(mode="open")}],
)
def test_a_session_that_is_not_answered_has_no_names(changes: dict[str, Any]) -> None:
    bench = Bench()
    bench.answers("a.example.org", PUBLIC)
    bench.session = replace(session(), **changes)
    assert bench.says("a.example.org").addresses == ()
    assert bench.says("a.example.org", source="172.16.0.9").code == dns.rcode.SERVFAIL
    assert bench.asked == bench.opened == []


def test_comparing_names_that_take_long_is_bounded_for_each_source() -> None:
    """Of ten seconds of questions, each of which takes a tenth to judge, it does about one second's."""
    now, spent = [0.0], [0.0]

    def slow(_source: str, _query: dns.message.Message) -> Reply | Awaitable[Reply]:
        now[0] += 0.1
        spent[0] += 0.1
        return Reply(dns.rcode.NXDOMAIN)

    async def run() -> None:
        of = GatewayDns(slow, lambda: now[0])
        listener: Any = type("L", (), {"place": Place("b", GATEWAY, frozenset({SOURCE}))})
        of._listeners["b"] = listener
        wire = dns.message.make_query("a.example.org", "A").to_wire()
        while now[0] < 10:
            of.heard("b", wire, SOURCE, lambda _answer: None)
            while of._tasks:
                await asyncio.sleep(0)
            now[0] += 1 / RATE

    asyncio.run(run())
    burst = 200 / (RATE / SHARE)
    assert spent[0] <= 10 * SHARE + burst + 0.2
