"""What is said of a refused name, and which line of a policy would allow it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ruamel.yaml import YAML

from enforcer.nameadvice import WORDS, Advice, Reach, advice, reach
from enforcer.overrides import Overrides
from enforcer.refusednames import REASONS
from policy.declaration import Declaration, Name, Pattern

from .test_denied import session

NAME = "files.example.com"


def living(**reached: dict[str, set[int]]) -> list[tuple[str, Reach]]:
    return [
        (called.replace("_", "-"), Reach({host: frozenset(ports) for host, ports in hosts.items()}))
        for called, hosts in reached.items()
    ]


def test_every_reason_has_words() -> None:
    assert set(WORDS) == REASONS


@pytest.mark.parametrize(
    ("port", "line", "command"),
    [
        (443, "- files.example.com", "corral allow files.example.com"),
        (0, "- files.example.com", "corral allow files.example.com"),
        (8443, "- {host: files.example.com, ports: [8443]}", "corral allow files.example.com:8443"),
    ],
)
def test_a_name_that_is_not_allowed_comes_with_what_allows_it(port: int, line: str, command: str) -> None:
    assert advice(NAME, port, "denied") == Advice("not allowed", line, command)


def test_what_only_the_policy_file_can_say_has_a_line_and_no_command() -> None:
    assert advice(NAME, 443, "no-sni").line == "- {host: files.example.com, sni: false}"
    assert advice(NAME, 22, "not-tls").line == "- {host: files.example.com, ports: [22], protocol: tcp}"
    assert advice(NAME, 443, "no-sni").command is advice(NAME, 22, "not-tls").command is None


@pytest.mark.parametrize("reason", sorted(REASONS - {"denied", "no-sni", "not-tls"}))
def test_what_no_policy_can_allow_has_a_reason_and_nothing_else(reason: str) -> None:
    assert advice(NAME, 443, reason) == Advice(WORDS[reason])


@pytest.mark.parametrize(
    ("name", "port", "why"),
    [
        ("intranet", 443, "a single label"),
        ("host.docker.internal", 443, "a name of this host"),
        ("dns.google", 443, "DNS-over-HTTPS"),
        ("-x.example.com", 443, "begins or ends with '-'"),
        (NAME, 853, "a port of DNS"),
    ],
)
def test_no_line_is_given_that_a_policy_would_refuse(name: str, port: int, why: str) -> None:
    told = advice(name, port, "denied")
    assert why in told.note
    assert told.line is told.command is None


def test_a_line_is_the_name_whatever_yaml_takes_a_name_for() -> None:
    for name in ("1.e5", "0x1.example", "null.example", NAME):
        (found,) = YAML(typ="safe").load(advice(name, 443, "denied").line)
        assert found == name


def test_the_ports_that_are_allowed_are_told_by_names_and_by_zones() -> None:
    told = advice(
        NAME, 8443, "denied", living(main_a={NAME: {443}, "*.example.com": {22}, "*.files.example.com": {9}})
    )
    assert told.note == "not allowed on port 8443, only on 22, 443"
    assert told.command == "corral allow files.example.com:8443"


def test_a_session_that_lacks_it_is_named_when_another_has_it() -> None:
    told = advice(
        NAME, 443, "denied", living(main_a={"*.example.com": {443}}, main_b={"*.example.org": {443}})
    )
    assert (told.note, told.command) == ("not allowed in main-b", "corral allow files.example.com")


def test_what_was_allowed_meanwhile_needs_no_advice() -> None:
    told = advice(NAME, 443, "denied", living(main_a={NAME: {443}}))
    assert told == Advice("not allowed at that time; it is now")


def test_a_zone_does_not_hold_its_own_name_nor_one_that_was_taken_back() -> None:
    reached = Reach({"*.example.com": frozenset({443})}, frozenset({NAME}))
    assert reached.of("example.com") == frozenset()
    assert reached.of("a.b.example.com") == {443}
    assert reached.of(NAME) == frozenset()


def test_what_was_taken_back_is_given_back_and_not_written_down() -> None:
    reached = Reach({"*.example.com": frozenset({443})}, frozenset({NAME}))
    told = advice(NAME, 443, "denied", [("main-a", reached)])
    assert told == Advice("not allowed: taken back by corral deny", None, "corral allow files.example.com")


def test_an_entry_that_is_there_is_replaced_because_of_two_the_strict_one_wins() -> None:
    told = advice(NAME, 443, "no-sni", living(main_a={NAME: {22}, "*.example.com": {443}}))
    assert told.line == "- {host: files.example.com, ports: [22, 443], sni: false}"
    assert "in the place of" in told.note
    assert "place" not in advice(NAME, 443, "no-sni", living(main_a={"*.example.com": {443}})).note


def test_what_a_session_reaches_is_declared_and_granted_and_not_denied() -> None:
    declaration = Declaration(
        names=(Name(host="api.example.com"),),
        patterns=(Pattern(host="api.example.com"), Pattern(host="*.example.org", ports=(443, 22))),
    )
    overrides = Overrides(
        granted={NAME: {8443: None}},
        denied=frozenset({"api.example.com"}),
        patterns={"*.example.net": {443: None}},
    )
    assert reach(replace(session(), declaration=declaration, overrides=overrides)) == Reach(
        {
            NAME: frozenset({8443}),
            "*.example.org": frozenset({22, 443}),
            "*.example.net": frozenset({443}),
        },
        frozenset({"api.example.com"}),
    )
