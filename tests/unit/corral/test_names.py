from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from corral import approval, namecommands, names
from corral.cli import main
from corral.context import Invocation
from corral.targets import Target, parse_duration, parse_ports, parse_target
from policy.declaration import Declaration, Name, Pattern
from policy.errors import ArgumentError, EnforcerError, NotReadyError
from policy.loader import LoadedPolicy, load
from policy.revision import revision
from tests.unit.corral.fakes import FakeEnforcer


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("API.example.com", Target("api.example.com", None)),
        ("api.example.com:8443", Target("api.example.com", 8443)),
        ("api.example.com.:1", Target("api.example.com", 1)),
    ],
)
def test_a_target_is_a_name_with_or_without_a_port(text: str, target: Target) -> None:
    assert parse_target(text) == target


@pytest.mark.parametrize(
    "text",
    ["", ":443", "api", "api.example.com:0", "api.example.com:70000", "api.example.com:", "api.example.com:x", "192.0.2.1",
     "*.example.com", "https://api.example.com", "a b.example", "dns.google", "x\x1b[2J.example.com", "corral-host:80"],
)  # fmt: skip
def test_what_is_no_target_is_exit_code_2(text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse_target(text)
    assert "\x1b" not in caught.value.render()


def test_a_question_may_be_about_an_address_or_a_host_service() -> None:
    assert parse_target("192.0.2.1:80", address=True) == Target("192.0.2.1", 80)
    assert parse_target("corral-host:8081", address=True) == Target("corral-host", 8081)
    with pytest.raises(ArgumentError):
        parse_target("[2001:db8::1]:80", address=True)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("1h", 3600), ("2d", 172800)])
def test_a_duration_has_a_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "1", "h", "0s", "-1h", "1.5h", "31d", "1w", "1h30m", "٣h"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="not a length of time"):
        parse_duration(text)


def allow(invocation: Invocation, host: str = "new.example.com", **options: Any) -> dict[str, Any]:
    words: dict[str, Any] = {"lasting": None, "keep": False, "force": False} | options
    target = parse_target(host, many=True)
    words.setdefault("ports", parse_ports(None, target.port))
    return names.allow(invocation, target, invocation.loaded.sandbox.id, **words)


def running(enforcer: FakeEnforcer, invocation: Invocation) -> None:
    session = {"state": "running", "session": "00000001", "container": "c1"}
    enforcer.status_answer["sandboxes"] = [{"sandbox": invocation.loaded.sandbox.id, "sessions": [session]}]


def test_allowing_says_where_and_for_how_long(invocation: Invocation, enforcer: FakeEnforcer) -> None:
    answer = allow(invocation, "new.example.com:8443", lasting=3600.0)
    assert enforcer.changes == [
        ("allow", invocation.loaded.sandbox.id, "new.example.com", (8443,), 3600.0, False)
    ]
    assert (
        names.told_allow(answer)
        == "new.example.com port 8443 is allowed in main-00000001 for 1h: 203.0.113.9"
    )


def test_saving_writes_the_file_and_allows_it_where_something_runs(
    invocation: Invocation, enforcer: FakeEnforcer
) -> None:
    running(enforcer, invocation)
    answer = allow(invocation, keep=True)
    assert [change[0] for change in enforcer.changes] == ["allow"]
    assert "    - new.example.com\n" in invocation.loaded.path.read_text()
    assert names.told_allow(answer).splitlines()[1].startswith("saved in ")


@pytest.mark.parametrize("approved", [True, False])
def test_what_is_saved_is_approved_if_what_was_there_was(
    invocation: Invocation, enforcer: FakeEnforcer, approved: bool
) -> None:
    running(enforcer, invocation)
    before = invocation.loaded
    if approved:
        approval.write(invocation.paths, revision(before), before)
    else:
        (invocation.paths.root / approval.FILE).unlink(missing_ok=True)
    allow(invocation, keep=True)
    after = load(
        before.path, home=invocation.user.home, environ=dict(invocation.user.environ), uid=invocation.user.uid
    )
    assert "new.example.com" in {name.host for name in after.declaration.names}
    assert approval.pending(after, invocation.paths).widens is not approved


@pytest.mark.parametrize("alive", [True, False])
def test_saving_needs_nothing_that_runs(invocation: Invocation, enforcer: FakeEnforcer, alive: bool) -> None:
    enforcer.running = alive
    answer = allow(invocation, keep=True)
    assert enforcer.changes == []
    assert answer["saved"] == str(invocation.loaded.path)
    assert "new.example.com" in invocation.loaded.path.read_text()


def test_a_name_that_does_not_resolve_is_not_saved(invocation: Invocation, enforcer: FakeEnforcer) -> None:
    running(enforcer, invocation)
    enforcer.refusal = "new.example.com is not allowed"
    before = invocation.loaded.path.read_text()
    with pytest.raises(NotReadyError):
        allow(invocation, keep=True)
    assert invocation.loaded.path.read_text() == before


def test_what_is_saved_does_not_end_and_dns_is_never_allowed(invocation: Invocation) -> None:
    with pytest.raises(ArgumentError, match="does not end"):
        allow(invocation, keep=True, lasting=60.0)
    with pytest.raises(ArgumentError, match="no DNS"):
        allow(invocation, "new.example.com:853")


def test_refreshing_tells_what_moved() -> None:
    rows = [
        {
            "name": "a.example",
            "state": "OK",
            "before": ["203.0.113.1"],
            "addresses": ["203.0.113.2"],
            "error": None,
        },
        {
            "name": "b.example",
            "state": "OK",
            "before": ["203.0.113.1"],
            "addresses": ["203.0.113.1"],
            "error": None,
        },
        {"name": "c.example", "state": "STALE", "before": [], "addresses": [], "error": "timeout: \x1b[2J"},
    ]
    text = names.told_refresh({"names": rows})
    assert text.splitlines()[:2] == [
        "a.example: OK, +203.0.113.2 -203.0.113.1",
        "b.example: OK, same addresses",
    ]
    assert "\x1b" not in text
    assert names.failed({"names": rows})
    assert not names.failed({"names": rows[:2]})
    assert not names.failed({"names": [{**row, "optional": True} for row in rows]})


def test_without_a_session_a_declared_name_is_resolved_and_vetted(
    invocation: Invocation, enforcer: FakeEnforcer
) -> None:
    host = invocation.loaded.declaration.names[0].host
    answer = names.check(invocation, Target(host, 443), None)
    assert answer["allowed"]
    assert [change[-1] for change in enforcer.changes] == [False, True]
    assert names.told_check(answer).splitlines() == [
        f"{host}:443: allowed",
        f"  policy: {answer['policy']['reason']}",
        "  resolves to 203.0.113.9",
        "  refused: 10.0.0.5 is private (10.0.0.0/8)",
    ]


def test_a_name_that_is_not_allowed_is_not_even_resolved(
    invocation: Invocation, enforcer: FakeEnforcer
) -> None:
    answer = names.check(invocation, Target("other.example.com", None), None)
    assert not answer["allowed"]
    assert "to allow it: corral allow other.example.com" in answer["policy"]["reason"]
    assert all(change[-1] is False for change in enforcer.changes)


def test_what_runs_outranks_what_the_policy_says_now(invocation: Invocation, enforcer: FakeEnforcer) -> None:
    row = {
        "service": "main", "session": "00000001", "allowed": True, "reason": "allowed on port 443",
        "addresses": ["203.0.113.9"], "seconds": 3000.0,
    }  # fmt: skip
    enforcer.check_answer = {"sessions": [row]}
    answer = names.check(invocation, Target("other.example.com", None), None)
    assert answer["allowed"]
    assert "main-00000001: allowed: allowed on port 443 (203.0.113.9), for 50m more" in names.told_check(
        answer
    )


def test_the_policy_is_judged_when_the_enforcer_is_down(
    invocation: Invocation, enforcer: FakeEnforcer
) -> None:
    enforcer.running = False
    host = invocation.loaded.declaration.names[0].host
    answer = names.check(invocation, Target(host, 443), None)
    assert answer["policy"]["allowed"]
    assert not answer["allowed"]
    assert "the enforcer is not running" in names.told_check(answer)


def test_the_origin_of_a_name_is_told(invocation: Invocation) -> None:
    loaded = invocation.loaded
    told = {name.host: names.origin(loaded, name.host) for name in loaded.declaration.names}
    assert set(told.values()) <= {"egress.allow", "the opencode profile"}
    assert told[loaded.policy.egress.allow[0].host] == "egress.allow"


def test_what_changed_since_a_session_started_is_part_of_what_it_may_reach() -> None:
    declared = Declaration(names=(Name(host="a.example"), Name(host="b.example")))
    row = {
        "withdrawn": ["b.example"],
        "names": [
            {"name": "a.example", "granted": {"8443": None}},
            {"name": "c.example", "granted": {"443": 10.0}},
            {"name": "b.example", "granted": {}},
        ],
    }
    found = names.changed_since(declared, row)
    assert {name.host: name.ports for name in found.names} == {"a.example": (443, 8443), "c.example": (443,)}
    assert names.changed_since(declared, {}) == declared


# -- the command line


@pytest.fixture
def command_line(invocation: Invocation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namecommands, "_invocation", lambda: invocation)


@pytest.mark.usefixtures("command_line")
@pytest.mark.parametrize(
    ("words", "change"),
    [
        (["refresh"], ("refresh", True, ())),
        (["refresh", "api.example.com"], ("refresh", True, ("api.example.com",))),
        (["refresh", "--all"], ("refresh", None, ())),
        (["refresh", "--sandbox", "x-01234567"], ("refresh", "x-01234567", ())),
        (["allow", "n.example.com"], ("allow", True, "n.example.com", (443,), None, False)),
        (["allow", "n.example.com:1", "--for", "1h"], ("allow", True, "n.example.com", (1,), 3600.0, False)),
        (["allow", "dns.google", "--force"], ("allow", True, "dns.google", (443,), None, True)),
        (["deny", "n.example.com"], ("deny", True, "n.example.com")),
    ],
)
def test_commands_ask_the_enforcer_about_this_directory_s_sandbox(
    invocation: Invocation, enforcer: FakeEnforcer, words: list[str], change: tuple[Any, ...]
) -> None:
    wanted = (change[0], invocation.loaded.sandbox.id if change[1] is True else change[1], *change[2:])
    for extra in ([], ["--json"]):
        enforcer.changes.clear()
        result = CliRunner().invoke(namecommands.app, [*words, *extra])
        assert result.exit_code == 0, result.output
        assert enforcer.changes == [wanted]
        if extra:
            assert next(iter(json.loads(result.output))) == "schema"


@pytest.mark.usefixtures("command_line")
def test_a_denied_target_is_exit_code_1_and_has_json(enforcer: FakeEnforcer) -> None:
    result = CliRunner().invoke(namecommands.app, ["policy", "check", "other.example.com:443", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.output)["policy"]["allowed"] is False


@pytest.mark.parametrize(
    "words",
    [
        ["allow", "192.0.2.1"], ["allow", "a.example.com", "--for", "soon"], ["allow", "dns.google"], ["deny", "a.example.com:443"],
        ["policy", "check", "localhost"], ["refresh", "*.example.com"], ["allow", "a.example.com", "--save", "--sandbox", "x"],
    ],
)  # fmt: skip
@pytest.mark.usefixtures("command_line")
def test_invalid_arguments_are_exit_code_2(
    words: list[str],
    enforcer: FakeEnforcer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("corral.cli._end_on_signals", lambda: None)
    assert main(words) == 2
    assert "argument error" in capsys.readouterr().err
    assert enforcer.changes == []


def test_every_command_has_help() -> None:
    for words in (["refresh"], ["allow"], ["deny"], ["policy"], ["policy", "check"]):
        assert CliRunner().invoke(namecommands.app, [*words, "--help"]).exit_code == 0


def denied(invocation: Invocation, host: str = "new.example.com") -> dict[str, Any]:
    return names.deny(invocation, host, invocation.loaded.sandbox.id, keep=True)


def has(enforcer: FakeEnforcer, invocation: Invocation, state: str = "OK") -> None:
    running(enforcer, invocation)
    (session,) = enforcer.status_answer["sandboxes"][0]["sessions"]
    session["names"] = [{"name": "new.example.com", "state": state}]


def written(invocation: Invocation) -> Invocation:
    allow(invocation, keep=True)
    user = invocation.user
    again = load(invocation.loaded.path, home=user.home, environ=dict(user.environ), uid=user.uid)
    invocation.__dict__["loaded"] = again
    return invocation


def test_a_saved_denial_closes_what_runs_and_leaves_the_file_without(
    invocation: Invocation, enforcer: FakeEnforcer
) -> None:
    on = written(invocation)
    has(enforcer, on)
    answer = denied(on)
    assert enforcer.changes[-1] == ("deny", on.loaded.sandbox.id, "new.example.com")
    assert answer["saved"] == str(on.loaded.path)
    assert "new.example.com" not in on.loaded.path.read_text()
    assert "is taken out of" in names.told_deny(answer)


@pytest.mark.parametrize("state", ["nothing runs", "REVOKED"])
def test_a_denial_is_saved_though_nothing_runs_that_has_the_name(
    invocation: Invocation, enforcer: FakeEnforcer, state: str
) -> None:
    on = written(invocation)
    if state == "REVOKED":
        has(enforcer, on, state)
    enforcer.changes.clear()
    assert denied(on)["saved"]
    assert enforcer.changes == []


def test_a_denial_that_fails_is_told_and_saved_all_the_same(
    invocation: Invocation, enforcer: FakeEnforcer, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = written(invocation)
    has(enforcer, on)

    def fails(*_words: Any) -> dict[str, Any]:
        raise EnforcerError("no space left")

    monkeypatch.setattr(enforcer, "deny", fails)
    with pytest.raises(EnforcerError, match="no space left"):
        denied(on)
    assert "new.example.com" not in on.loaded.path.read_text()


def test_a_name_that_is_not_in_the_file_is_closed_where_it_runs(
    invocation: Invocation, enforcer: FakeEnforcer
) -> None:
    has(enforcer, invocation)
    assert denied(invocation)["saved"] is None
    assert enforcer.changes[-1][0] == "deny"


# -- zones and regular expressions


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("*.Example.com", Target("*.example.com", None)),
        ("*.example.com:8443", Target("*.example.com", 8443)),
        (r"regex:^(api|www)\.example\.com$", Target(r"regex:(api|www)\.example\.com", None)),
        (r"^(?:api|www)\.example\.com$:22", Target(r"regex:(?:api|www)\.example\.com", 22)),
        (r"regex:a{2}\.example\.com:22", Target(r"regex:a{2}\.example\.com", 22)),
        ("api.example.com", Target("api.example.com", None)),
    ],
)
def test_a_target_may_stand_for_many_names(text: str, target: Target) -> None:
    assert parse_target(text, many=True) == target
    assert parse_target(text, many=True).many is (target.host != "api.example.com")


@pytest.mark.parametrize(
    "text",
    ["*example.com", "*.com", "*.github.io", "*", "^api.example.com$", "^api", "api*", "regex:443", "regex:", "*.x\x1b[2J.com"],
)  # fmt: skip
def test_a_pattern_that_no_policy_may_have_is_told_with_how_it_is_quoted(text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse_target(text, many=True)
    assert "single quotes" in (caught.value.hint or "")
    assert "\x1b" not in caught.value.render()


def test_a_plain_name_that_is_wrong_is_told_nothing_of_shells() -> None:
    with pytest.raises(ArgumentError) as caught:
        parse_target("localhost", many=True)
    assert "quotes" not in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "given", "ports"),
    [(None, None, (443,)), (None, 22, (22,)), ("443,8443,443", None, (443, 8443))],
)
def test_ports_are_given_in_one_place(text: str | None, given: int | None, ports: tuple[int, ...]) -> None:
    assert parse_ports(text, given) == ports


@pytest.mark.parametrize(
    ("text", "given", "told"),
    [
        ("22", 443, "given twice"),
        ("", None, "nothing is not a port"),
        ("443,0", None, "0 is not a port"),
        ("443,\x1b", None, "is not a port"),
        ("70000", None, "is not a port"),
        (",".join(map(str, range(1000, 1065))), None, "more than 64"),
        ("443,853", None, "no DNS"),
        (None, 53, "no DNS"),
    ],
)
def test_what_are_no_ports_is_refused(text: str | None, given: int | None, told: str) -> None:
    with pytest.raises(ArgumentError, match=told) as caught:
        parse_ports(text, given)
    assert "\x1b" not in caught.value.render()


def with_egress(invocation: Invocation, egress: str) -> LoadedPolicy:
    path, user = invocation.loaded.path, invocation.user
    path.write_text(f"profile: opencode\nname: demo\negress: {egress}\n")
    return load(path, home=user.home, environ=dict(user.environ), uid=user.uid)


def test_many_names_need_somebody_who_asks_for_them(invocation: Invocation) -> None:
    with pytest.raises(ArgumentError, match="no proxy") as caught:
        names.refuse_many(invocation.loaded, parse_target("*.example.com", many=True))
    assert "corral allow '*.example.com' --save" in (caught.value.hint or "")
    names.refuse_many(invocation.loaded, parse_target("api.example.com"))
    for egress in ("{mode: proxy}", "{dns: answer}", "{allow: ['*.example.org']}"):
        names.refuse_many(with_egress(invocation, egress), parse_target("*.example.com", many=True))


def test_a_zone_is_allowed_where_it_runs(invocation: Invocation, enforcer: FakeEnforcer) -> None:
    answer = allow(invocation, "*.example.com", ports=(443, 8443))
    assert enforcer.changes == [
        ("allow", invocation.loaded.sandbox.id, "*.example.com", (443, 8443), None, False)
    ]
    answer["sessions"] = [{**row, "addresses": []} for row in answer["sessions"]]
    assert names.told_allow(answer) == (
        "*.example.com port 443, 8443 is allowed in main-00000001 until it ends: "
        "it is resolved when it is asked for"
    )


@pytest.mark.parametrize("asks", [True, False])
def test_a_saved_zone_is_opened_only_where_names_are_asked_for(
    invocation: Invocation, enforcer: FakeEnforcer, asks: bool
) -> None:
    running(enforcer, invocation)
    enforcer.status_answer["sandboxes"][0]["sessions"][0]["asks"] = asks
    answer = allow(invocation, "*.example.com:8443", keep=True)
    assert bool(enforcer.changes) is asks
    assert "    - {host: '*.example.com', ports: [8443]}\n" in invocation.loaded.path.read_text()
    assert ("those that run have no proxy" in names.told_allow(answer)) is not asks


def test_a_saved_denial_is_asked_of_sessions_that_ask_for_names(
    invocation: Invocation, enforcer: FakeEnforcer
) -> None:
    running(enforcer, invocation)
    session = enforcer.status_answer["sandboxes"][0]["sessions"][0]
    session["asked"] = [{"host": "*.example.com", "ports": [443]}, {"host": "not one", "ports": [443]}]
    for host in ("files.example.com", "*.example.com", "example.com"):
        names.deny(invocation, host, invocation.loaded.sandbox.id, keep=True)
    assert [change[2] for change in enforcer.changes] == ["files.example.com", "*.example.com"]


@pytest.mark.parametrize(
    ("egress", "host", "port", "verdict", "reason"),
    [
        ("{mode: proxy, allow: ['*.example.com']}", "a.example.com", 443, True, "allowed on port 443 by *.example.com of egress.allow, through the sandbox's proxy"),
        ("{mode: proxy, allow: ['*.example.com']}", "a.example.com", 22, False, "allowed on port 443, not on 22"),
        ("{mode: proxy, allow: ['*.example.com']}", "example.com", 443, False, "not in the policy"),
        ("{mode: proxy, allow: [a.example.com]}", "a.example.com", 443, True, "by egress.allow, through the sandbox's proxy"),
        ("{allow: [a.example.com, {host: '*.example.com', ports: [22]}]}", "a.example.com", 443, True, "allowed on port 443 by egress.allow"),
        ("{allow: [a.example.com, {host: '*.example.com', ports: [22]}]}", "a.example.com", 22, True, "by *.example.com of egress.allow"),
        ("{allow: [a.example.com, {host: '*.example.com', ports: [22]}]}", "a.example.com", 80, False, "allowed on port 22, 443, not on 80"),
        ("{dns: answer, allow: ['a.example.com']}", "a.example.com", 443, True, "allowed on port 443 by egress.allow"),
    ],
)  # fmt: skip
def test_the_policy_is_judged_by_what_may_be_asked_for_too(
    invocation: Invocation, egress: str, host: str, port: int, verdict: bool, reason: str
) -> None:
    allowed, told = names.by_policy(with_egress(invocation, egress), host, port)
    assert (allowed, reason in told) == (verdict, True), told


def test_what_may_be_asked_for_since_a_session_started_is_what_it_declared_and_what_came_or_went() -> None:
    declaration = Declaration(
        mode="proxy",
        patterns=(
            Pattern(host="*.example.com", protocol="tcp"),
            Pattern(host="gone.example.org"),
        ),
    )
    session = {
        "withdrawn": ["gone.example.org"],
        "asked": [
            {"host": "*.example.com", "ports": [443], "seconds": None},
            {"host": "*.example.com", "ports": [8443], "seconds": 60.0},
            {"host": "new.example.org", "ports": [22], "seconds": None},
        ],
    }
    assert names.changed_since(declaration, session).patterns == (
        Pattern(host="*.example.com", protocol="tcp"),
        Pattern(host="*.example.com", ports=(8443,)),
        Pattern(host="new.example.org", ports=(22,)),
    )
