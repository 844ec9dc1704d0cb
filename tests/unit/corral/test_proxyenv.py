"""What leads a session's programs to its proxy, and which names go past it."""

from __future__ import annotations

import pytest

from corral import proxyenv
from policy.declaration import Declaration, Name, Pattern


def declaration(names: tuple[str, ...], *patterns: str) -> Declaration:
    return Declaration(
        names=tuple(Name(host=host) for host in names),
        patterns=tuple(Pattern(host=host) for host in (*names, *patterns)),
    )


def test_without_a_proxy_no_variable_is_set() -> None:
    assert proxyenv.variables(Declaration(names=(Name(host="api.example.com"),))) == {}
    # The answerer's patterns alone make no proxy.
    answered = Declaration(patterns=(Pattern(host="api.example.com"),), dns="answer")
    assert proxyenv.variables(answered) == {}


def test_programs_are_told_in_both_cases_and_node_that_it_may_look() -> None:
    found = proxyenv.variables(declaration(("api.example.org",), "*.example.com"))
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY"):
        assert found[name] == found[name.lower()] == "http://proxy:8443"
    assert found["NODE_USE_ENV_PROXY"] == "1"
    assert found["NO_PROXY"] == found["no_proxy"]
    assert found["NO_PROXY"] == "localhost,127.0.0.1,::1,corral-host,proxy,api.example.org"
    assert set(found) == proxyenv.NAMES


def test_in_mode_proxy_nothing_goes_past_it_but_what_is_local() -> None:
    made = Declaration(mode="proxy", patterns=(Pattern(host="api.example.com"),))
    assert proxyenv.variables(made)["NO_PROXY"] == "localhost,127.0.0.1,::1,corral-host,proxy"


@pytest.mark.parametrize(
    ("name", "pattern", "direct"),
    [
        ("api.example.org", "*.example.com", True),
        # curl and others take the name for all that lies below it.
        ("example.com", "*.example.com", False),
        ("example.com", "*.cdn.example.com", False),
        ("api.example.com", "*.example.com", False),
        ("notexample.com", "*.example.com", True),
        ("example.com", "*.notexample.com", True),
        ("example.com", r"regex:^x-[a-z]+\.example\.com$", False),
        ("api.example.com", r"^x-[a-z]+\.example\.com$", False),
        ("example.org", r"regex:x-[a-z]+\.example\.com", True),
    ],
)
def test_a_pinned_name_goes_past_the_proxy_unless_a_pattern_may_lie_below_it(
    name: str, pattern: str, direct: bool
) -> None:
    assert proxyenv.direct(declaration((name,), pattern)) == ([name] if direct else [])


def test_pinned_names_below_each_other_all_go_past_it() -> None:
    names = ("example.com", "api.example.com")
    assert proxyenv.direct(declaration(names, "*.example.org")) == list(names)
