"""What a sandbox's proxy may be asked for: what every session that can reach it allows."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enforcer import asking
from enforcer.asking import Permit, Refused, askers, judge, narrowed, permission, ports
from enforcer.overrides import Overrides
from enforcer.sessions import Session
from policy.declaration import Declaration, Name, Pattern
from policy.identity import Sandbox

from .sessionbench import proxy, session

ZONE, OTHER = Pattern(host="*.example.com"), Pattern(host="*.example.net")
EXACT = Pattern(host="db.example.com", ports=(443, 5432), protocol="tcp")
REGEX = Pattern(host=r"regex:api[0-9]\.example\.com")


def test_nobody_who_may_ask_means_no() -> None:
    assert isinstance(judge([], "a.example.com", 443), Refused)


@pytest.mark.parametrize(
    ("name", "port", "good"),
    [
        ("a.example.com", 443, True),
        ("a.b.example.com", 443, True),
        ("example.com", 443, False),
        ("a.example.com", 80, False),
        ("a.example.com.example.org", 443, False),
        ("aexample.com", 443, False),
        ("db.example.com", 5432, True),
        ("api1.example.com", 443, True),
    ],
)
def test_a_name_and_a_port_are_judged_together(name: str, port: int, good: bool) -> None:
    one = session(1, ZONE, EXACT, REGEX)
    assert isinstance(judge([one], name, port), Permit) == good


def test_all_have_to_allow_and_the_strictest_terms_hold() -> None:
    wide, narrow = session(1, ZONE), session(2, EXACT)
    assert isinstance(judge([wide, narrow], "a.example.com", 443), Refused)
    found = judge([wide, narrow], "db.example.com", 443)
    assert isinstance(found, Permit)
    assert (found.protocol, found.sni) == ("tls", True)
    found = judge([narrow, narrow], "db.example.com", 443)
    assert isinstance(found, Permit)
    assert found.protocol == "tcp"
    bare = session(3, replace_sni(ZONE))
    assert judge([bare], "a.example.com", 443) == Permit("tls", False, inf, "*.example.com")
    assert judge([bare, wide], "a.example.com", 443) == Permit("tls", True, inf, "*.example.com")


def replace_sni(pattern: Pattern) -> Pattern:
    return pattern.model_copy(update={"sni": False})


def test_an_entry_that_no_policy_may_have_matches_nothing() -> None:
    for text in ("*.com", "regex:.*", "regex:(", "*", "*.", "regex:.*\\.com"):
        assert isinstance(judge([session(1, Pattern(host=text))], "a.example.com", 443), Refused)


def test_who_may_ask_is_who_is_proxied_and_as_it_should_be() -> None:
    good = session(1, ZONE)
    others = [
        session(2, ZONE, problems=("it differs",)),
        session(3, ZONE, network=None),
        session(4, ZONE, sandbox=Sandbox("other-0a0b0c0e")),
        session(5, declaration=Declaration(names=(Name(host="a.example.com"),))),
        session(6, declaration=Declaration(mode="open")),
        session(7, declaration=Declaration(dns="answer", patterns=(EXACT,))),
        proxy(declaration=Declaration(mode="proxy", patterns=(ZONE,))),
    ]
    assert askers([*others, good], good.sandbox.id) == [good]


def test_permissions_are_those_of_the_sandbox_for_its_proxy_and_ones_own_for_the_answered() -> None:
    one, own = session(1, ZONE), session(2, declaration=Declaration(dns="answer", patterns=(EXACT,)))
    known = [one, own, proxy()]
    of = permission(known)
    assert of(proxy())("a.example.com", 443) == inf
    assert of(proxy())("a.example.com", 80) is None
    assert of(own)("db.example.com", 5432) == inf
    assert of(own)("a.example.com", 443) is None
    # What is asked of the proxy is never opened for who asks.
    assert of(one)("a.example.com", 443) is None
    assert ports(own, "db.example.com") == (443, 5432)
    assert ports(own, "a.example.com") == ports(one, "a.example.com") == ()


def test_what_was_judged_by_the_same_sessions_is_not_judged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = asking.judge

    def counted(judges: list[Session], name: str, port: int) -> Permit | Refused:
        asked.append(name)
        return real(judges, name, port)

    monkeypatch.setattr(asking, "judge", counted)
    one, memory = session(1, ZONE), asking.Memory()
    for _ in range(3):
        assert permission([one, proxy()], memory)(proxy())("a.example.com", 443) == inf
    assert asked == ["a.example.com"]
    # Whatever of them changes, nothing that was said before is true for long.
    denied = replace(one, overrides=Overrides().deny("a.example.com", one.declaration, matched=True))
    assert permission([denied, proxy()], memory)(proxy())("a.example.com", 443) is None
    assert permission([one, session(2, EXACT), proxy()], memory)(proxy())("a.example.com", 443) is None
    assert permission([proxy()], memory)(proxy())("a.example.com", 443) is None
    assert permission([one, proxy()], memory)(proxy())("b.example.com", 443) == inf
    # What is not asked for any more is forgotten.
    assert [list(said) for _, said in memory.values()] == [[("b.example.com", 443)]]
    permission([one], memory)
    assert not memory


def test_what_ends_ends_for_all() -> None:
    timed = session(1, ZONE, overrides=Overrides().allow_asking(OTHER.host, (443,), 50.0))
    assert judge([timed], "a.example.net", 443) == Permit("tls", True, 50.0, OTHER.host)
    also = session(2, overrides=Overrides().allow_asking(OTHER.host, (443,), 20.0))
    found = judge([timed, also], "a.example.net", 443)
    assert isinstance(found, Permit)
    assert found.until == 20.0


def test_a_name_that_was_taken_back_is_open_by_its_own_grant_alone() -> None:
    one = session(1, ZONE, EXACT)
    denied = replace(one, overrides=Overrides().deny("a.example.com", one.declaration, matched=True))
    assert isinstance(judge([denied], "a.example.com", 443), Refused)
    assert isinstance(judge([denied], "b.example.com", 443), Permit)
    again = replace(denied, overrides=denied.overrides.allow_asking("a.example.com", (443,), None))
    assert isinstance(judge([again], "a.example.com", 443), Permit)
    gone = replace(one, overrides=Overrides().deny(ZONE.host, one.declaration))
    assert isinstance(judge([gone], "b.example.com", 443), Refused)
    assert isinstance(judge([gone], "db.example.com", 443), Permit)


def test_what_others_close_is_told_and_nothing_else() -> None:
    one = session(1, ZONE, EXACT, REGEX)
    assert narrowed(one, [one]) == []
    assert narrowed(one, [one, session(2, ZONE, Pattern(host="db.example.com", ports=(5432,)))]) == []
    assert len(narrowed(one, [session(3, OTHER)])) == 4
    assert narrowed(session(4, Pattern(host="*.a.example.com")), [session(5, ZONE)]) == []
    assert narrowed(session(4, Pattern(host="a.example.com")), [session(5, ZONE)]) == []
    text = narrowed(session(4, ZONE), [session(5, Pattern(host="*.a.example.com"))])
    assert text == [
        "*.example.com: port 443 is closed while session 00000005 of this sandbox runs, whose policy does not "
        "allow it: they share a proxy"
    ]


HOSTS = st.sampled_from(
    ["*.example.com", "*.a.example.com", "a.example.com", r"regex:[ab]\.example\.com", "*.example.net"]
)
PATTERNS = st.builds(
    Pattern,
    host=HOSTS,
    ports=st.sets(st.sampled_from([80, 443]), min_size=1).map(tuple),
    protocol=st.sampled_from(["tls", "tcp"]),
    sni=st.booleans(),
)
POLICIES = st.lists(st.lists(PATTERNS, max_size=3), min_size=1, max_size=3)
WIRE = st.sampled_from(["a.example.com", "b.example.com", "x.a.example.com", "example.com", "n.example.net"])


@given(POLICIES, WIRE, st.sampled_from([80, 443]))
def test_one_more_session_never_opens_anything(policies: list[list[Pattern]], name: str, port: int) -> None:
    every = [session(number, *patterns) for number, patterns in enumerate(policies, 1)]
    found = judge(every, name, port)
    alone = [asking.own(one, name, port) for one in every]
    assert isinstance(found, Permit) == all(isinstance(one, Permit) for one in alone)
    fewer = judge(every[1:], name, port) if len(every) > 1 else None
    if isinstance(found, Permit) and fewer is not None:
        assert isinstance(fewer, Permit)
        assert not (found.protocol == "tcp" and fewer.protocol == "tls")
        if found.protocol == fewer.protocol == "tls":
            assert found.sni or not fewer.sni
