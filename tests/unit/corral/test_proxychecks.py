"""What is asked of names that are not pinned ahead, and what is wrong with what was opened for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agent_image.files.verify.expectations import Answered, Proxy
from corral.livecheck import Sight, live_rules
from corral.proxychecks import (
    EXISTING,
    Opened,
    denied_name,
    elements,
    opened,
    told_of_answers,
    told_of_proxy,
)
from policy.container import resolver_rows
from policy.declaration import Declaration, HostService, Name, Pattern

OWN, GATEWAY, SESSION = "172.16.0.61", "172.16.0.1", "172.16.0.2"
EXACT, ZONE = Pattern(host="api.example.org"), Pattern(host="*.example.net", ports=(443, 8443))
PATTERNS = (EXACT, ZONE)
HELD = (
    Opened("203.0.113.7", 443, ("api.example.org",)),
    Opened("203.0.113.8", 8443, ("x.y.example.net", "z.example.net")),
)
PINS = frozenset({(OWN, "tcp", 443, "203.0.113.7"), (OWN, "tcp", 8443, "203.0.113.8")})


def test_what_was_asked_for_and_is_permitted_is_right() -> None:
    assert elements(PATTERNS, OWN, HELD, PINS, ()) == []
    # What has ended in the kernel, and not in the account yet, opens nothing.
    assert elements(PATTERNS, OWN, HELD, (), ()) == []


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ((OWN, "tcp", 443, "203.0.113.66"), "203.0.113.66:443 is open for nothing"),
        ((OWN, "tcp", 80, "203.0.113.7"), "203.0.113.7:80 is open for nothing"),
        ((OWN, "udp", 443, "203.0.113.7"), "203.0.113.7:443/udp is open for nothing"),
    ],
)
def test_an_element_that_nobody_asked_for_is_found(row: Any, told: str) -> None:
    assert elements(PATTERNS, OWN, HELD, {*PINS, row}, ()) == [told]


@pytest.mark.parametrize(
    "wrong",
    [
        Opened("203.0.113.7", 443, ("www.example.org",)),
        Opened("203.0.113.7", 443, ("example.net",)),
        Opened("203.0.113.7", 443, ("api.example.org.example.com",)),
        Opened("203.0.113.7", 443, ()),
    ],
)
def test_an_element_for_a_name_that_no_entry_means_is_found(wrong: Opened) -> None:
    (told,) = elements(PATTERNS, OWN, (wrong, HELD[1]), PINS, ())
    assert told.startswith("203.0.113.7:443 is open for ")


def test_a_name_is_permitted_on_its_own_ports_alone() -> None:
    wrong = Opened("203.0.113.7", 8443, ("api.example.org",))
    assert len(elements(PATTERNS, OWN, (wrong,), {(OWN, "tcp", 8443, "203.0.113.7")}, ())) == 1


def test_of_two_names_of_an_address_one_has_to_be_permitted() -> None:
    both = Opened("203.0.113.7", 443, ("gone.example.com", "api.example.org"))
    assert elements(PATTERNS, OWN, (both,), {(OWN, "tcp", 443, "203.0.113.7")}, ()) == []


def test_the_proxy_reaches_nothing_of_this_host() -> None:
    host = {(OWN, "tcp", 8081, GATEWAY)}
    assert elements(PATTERNS, OWN, HELD, PINS, host) == ["172.16.0.1:8081 of this host is open"]


def test_what_was_opened_is_read_from_the_status() -> None:
    row = {"opened": [{"address": "203.0.113.7", "port": 443, "names": ["api.example.org"]}]}
    assert opened(row) == [HELD[0]]
    assert opened({}) == []


# -- what the checker is told


def test_a_sandbox_whose_names_are_pinned_is_told_of_neither() -> None:
    declaration = Declaration(names=(Name(host="api.example.org"),))
    assert told_of_proxy(declaration) is None
    assert told_of_answers(declaration) is None


@pytest.mark.parametrize("zone", ["*.example.com", "example.com"])
def test_the_name_that_is_refused_is_one_that_no_entry_means(zone: str) -> None:
    assert denied_name(Declaration(patterns=(ZONE,))) == "example.com"
    # The name below a zone is not in it.
    wanted = "example.com" if zone.startswith("*") else "example.net"
    assert denied_name(Declaration(patterns=(Pattern(host=zone),))) == wanted
    every = tuple(Pattern(host=name) for name in EXISTING)
    assert denied_name(Declaration(patterns=every), "nobody.example") == "nobody.example"


@pytest.mark.parametrize(
    ("patterns", "names", "wanted"),
    [
        ((ZONE, EXACT), (), ["api.example.org", 443]),
        ((ZONE,), (), None),
        # Whoever speaks something else than TLS, or names nobody, is not looked at.
        ((Pattern(host="api.example.org", protocol="tcp"), ZONE), (), None),
        ((Pattern(host="api.example.org", sni=False), ZONE), (), None),
        # It need not answer.
        ((ZONE, EXACT), (Name(host="api.example.org", optional=True),), None),
        ((ZONE, EXACT), (Name(host="api.example.org", liveness=False),), None),
    ],
)
def test_the_name_that_is_connected_is_one_entry_that_has_to_answer(
    patterns: Any, names: Any, wanted: Any
) -> None:
    told = told_of_proxy(Declaration(names=names, patterns=patterns))
    assert told is not None
    assert told["permitted"] == wanted
    # The checker understands it.
    Proxy(told)


def test_what_a_session_reaches_as_well_is_not_the_proxys_alone() -> None:
    pins = {*PINS, (SESSION, "tcp", 443, "203.0.113.7"), (SESSION, "tcp", 443, "203.0.113.8")}
    told = told_of_proxy(Declaration(patterns=PATTERNS), OWN, pins)
    assert told is not None
    assert (told["address"], told["only"]) == (OWN, [["203.0.113.8", 8443]])


def test_where_names_are_answered_the_first_that_has_to_answer_is_tried() -> None:
    names = (Name(host="a.example.org", optional=True), Name(host="api.example.org", ports=(8443, 443)))
    told = told_of_answers(Declaration(names=names, patterns=(ZONE,), dns="answer"))
    assert told == {"denied": "example.com", "permitted": ["api.example.org", 8443]}
    Answered(told)
    assert told_of_answers(Declaration(mode="open")) is None
    only = told_of_answers(Declaration(patterns=(ZONE,), dns="answer"))
    assert only is not None
    assert only["permitted"] is None


# -- a session's own side

HOSTS = {
    "localhost": ["127.0.0.1"],
    "main": [SESSION],
    "corral-host": [GATEWAY],
    "proxy": [GATEWAY],
    "api.example.org": ["203.0.113.7"],
}
PROXIED = Sight(
    declaration=Declaration(
        names=(Name(host="api.example.org"),),
        patterns=PATTERNS,
        host_services=(HostService(name="x", port=80),),
    ),
    address=SESSION,
    gateway=GATEWAY,
    hostname="main",
    hosts=HOSTS,
    published={"api.example.org": ["203.0.113.7"]},
    lingering={},
    pins=frozenset({(SESSION, "tcp", 443, "203.0.113.7")}),
    host=frozenset({(SESSION, "tcp", 8443, GATEWAY), (SESSION, "tcp", 80, GATEWAY)}),
)


def test_a_session_with_a_proxy_has_its_own_names_and_the_way_to_it() -> None:
    assert live_rules(PROXIED) == []


def test_the_way_to_the_proxy_has_to_be_there_and_only_where_there_is_one() -> None:
    without = replace(PROXIED, host=frozenset({(SESSION, "tcp", 80, GATEWAY)}))
    assert live_rules(without) == ["the sandbox's proxy: the kernel does not allow 172.16.0.1:8443"]
    plain = PROXIED.declaration.model_copy(update={"patterns": ()})
    found = live_rules(replace(PROXIED, declaration=plain))
    assert "the kernel allows 172.16.0.1:8443 of this host, which no service is" in found
    assert "the hosts file has proxy, which the policy has not" in found


@pytest.mark.parametrize("addresses", [[], ["203.0.113.9"], [GATEWAY, "203.0.113.9"]])
def test_another_address_of_the_proxy_in_the_hosts_file_is_found(addresses: list[str]) -> None:
    (told,) = live_rules(replace(PROXIED, hosts={**HOSTS, "proxy": addresses}))
    assert told.endswith("for proxy, not 172.16.0.1")


def test_with_the_proxy_alone_a_session_reaches_no_address_itself() -> None:
    alone = replace(
        PROXIED,
        declaration=Declaration(mode="proxy", patterns=PATTERNS),
        hosts={name: found for name, found in HOSTS.items() if name != "api.example.org"},
        published={},
        host=frozenset({(SESSION, "tcp", 8443, GATEWAY)}),
    )
    assert live_rules(alone) == ["the kernel allows 203.0.113.7:443, which no name has"]
    assert live_rules(replace(alone, pins=frozenset())) == []
    # That something was opened for the proxy is no reason.
    assert live_rules(replace(alone, opened=HELD)) == live_rules(alone)


ANSWERED = replace(
    PROXIED,
    declaration=Declaration(patterns=(EXACT, ZONE), mode="allowlist", dns="answer"),
    hosts={name: found for name, found in HOSTS.items() if name != "api.example.org"},
    published={},
    pins=frozenset((SESSION, *row[1:]) for row in PINS),
    host=frozenset({(SESSION, "tcp", 8443, GATEWAY), *resolver_rows(SESSION, GATEWAY)}),
    opened=HELD,
)


def test_what_was_answered_is_open_and_nothing_else() -> None:
    assert live_rules(ANSWERED) == []
    more = replace(ANSWERED, pins=ANSWERED.pins | {(SESSION, "tcp", 443, "203.0.113.66")})
    assert live_rules(more) == ["the kernel allows 203.0.113.66:443, which no name has"]
    wrong = replace(ANSWERED, opened=(replace(HELD[0], names=("www.example.com",)), HELD[1]))
    (told,) = live_rules(wrong)
    assert "www.example.com" in told
    # An answer opens nothing where names are not answered.
    dead = replace(
        ANSWERED, declaration=ANSWERED.declaration.model_copy(update={"dns": "dead"}), host=PROXIED.host
    )
    assert "the kernel allows 203.0.113.7:443, which no name has" in live_rules(dead)
