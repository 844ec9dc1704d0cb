from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from ipaddress import ip_network
from pathlib import Path

import pytest

from agent_image.files.entrypoint.gate import parse_hosts
from agent_image.files.verify.expectations import Expectations
from corral import checks, livecheck
from corral.checks import Check
from corral.livecheck import Sight, live_rules
from enforcer.vetting import Vetting
from policy.container import Limits
from policy.declaration import Declaration, HostService, Name
from policy.loader import LoadedPolicy

ADDRESS, GATEWAY = "172.16.0.2", "172.16.0.1"
DECLARATION = Declaration(
    names=(Name(host="api.example.com"), Name(host="git.example.com", ports=(22, 443), optional=True)),
    host_services=(HostService(name="llama", port=8081),),
)
HOSTS = {
    "localhost": ["127.0.0.1"],
    "main": [ADDRESS],
    "corral-host": [GATEWAY],
    "api.example.com": ["203.0.113.10", "203.0.113.11"],
    "git.example.com": ["203.0.113.20"],
}
NAMES = {name: addresses for name, addresses in HOSTS.items() if "." in name}
TRUE = Sight(
    declaration=DECLARATION,
    address=ADDRESS,
    gateway=GATEWAY,
    hostname="main",
    hosts=HOSTS,
    published=NAMES,
    lingering={},
    pins=frozenset(
        {
            (ADDRESS, "tcp", 443, "203.0.113.10"),
            (ADDRESS, "tcp", 443, "203.0.113.11"),
            (ADDRESS, "tcp", 22, "203.0.113.20"),
            (ADDRESS, "tcp", 443, "203.0.113.20"),
        }
    ),
    host=frozenset({(ADDRESS, "tcp", 8081, GATEWAY)}),
)


def test_three_equal_sides_have_no_difference() -> None:
    assert live_rules(TRUE) == []


def test_an_element_that_no_name_has_is_named() -> None:
    for row, shown in (
        ((ADDRESS, "tcp", 443, "192.0.2.1"), "192.0.2.1:443"),
        ((ADDRESS, "udp", 53, "203.0.113.10"), "203.0.113.10:53/udp"),
        ((ADDRESS, "tcp", 22, "203.0.113.10"), "203.0.113.10:22"),
    ):
        assert live_rules(replace(TRUE, pins=TRUE.pins | {row})) == [
            f"the kernel allows {shown}, which no name has"
        ]


def test_an_element_that_is_missing_is_named() -> None:
    sight = replace(TRUE, pins=TRUE.pins - {(ADDRESS, "tcp", 22, "203.0.113.20")})
    assert live_rules(sight) == ["git.example.com: the kernel does not allow 203.0.113.20:22"]


def test_an_address_that_only_lingers_for_open_flows_is_no_difference() -> None:
    pins = TRUE.pins | {(ADDRESS, "tcp", 443, "203.0.113.12")}
    assert live_rules(replace(TRUE, pins=pins, lingering={"api.example.com": ["203.0.113.12"]})) == []
    assert live_rules(replace(TRUE, pins=pins, lingering={"git.example.com": ["203.0.113.13"]}))


def test_hosts_file_and_enforcer_must_agree() -> None:
    sight = replace(TRUE, published={**NAMES, "api.example.com": ["203.0.113.10"]})
    assert live_rules(sight) == [
        "api.example.com: the hosts file says 203.0.113.10, 203.0.113.11, the enforcer 203.0.113.10"
    ]


def test_a_name_without_address_is_a_difference_unless_it_is_optional() -> None:
    def without(name: str) -> Sight:
        hosts = {key: value for key, value in HOSTS.items() if key != name}
        published = {key: value for key, value in NAMES.items() if key != name}
        gone = set(HOSTS[name])
        return replace(
            TRUE,
            hosts=hosts,
            published=published,
            pins=frozenset(row for row in TRUE.pins if row[3] not in gone),
        )

    assert live_rules(without("api.example.com")) == ["api.example.com: the hosts file has no address for it"]
    assert live_rules(without("git.example.com")) == []


def test_the_hosts_file_has_nothing_else() -> None:
    sight = replace(TRUE, hosts={**HOSTS, "evil.example.com": ["203.0.113.66"]})
    assert live_rules(sight) == ["the hosts file has evil.example.com, which the policy has not"]
    sight = replace(TRUE, hosts={**HOSTS, "corral-host": ["203.0.113.66"]})
    assert live_rules(sight) == ["the hosts file says 203.0.113.66 for corral-host, not 172.16.0.1"]


def test_host_services_are_exactly_the_declared_ones() -> None:
    assert live_rules(replace(TRUE, host=frozenset())) == [
        "host service llama: the kernel does not allow 172.16.0.1:8081"
    ]
    extra = (ADDRESS, "tcp", 22, GATEWAY)
    assert live_rules(replace(TRUE, host=TRUE.host | {extra})) == [
        "the kernel allows 172.16.0.1:22 of this host, which no service is"
    ]


GOOD = {"jump": True, "backstop": True, "input": True, "ipv6": True, "problems": []}


def statuses(found: list[Check]) -> dict[str, str]:
    return {check.name: check.status for check in found}


def test_each_part_of_the_skeleton_can_fail_alone() -> None:
    names = {"skeleton-in-path": "ok", "backstop": "ok"}
    assert statuses(livecheck.skeleton_checks(GOOD)) == names
    for part in ("jump", "input", "ipv6"):
        told = {**GOOD, part: False, "problems": ["somebody was here"]}
        found = livecheck.skeleton_checks(told)
        assert statuses(found) == {**names, "skeleton-in-path": "fail"}
        assert "somebody was here" in found[0].detail
    other = livecheck.skeleton_checks({**GOOD, "problems": ["bridge-nf-call-iptables is 0, not 1"]})
    assert statuses(other) == {**names, "skeleton-in-path": "fail"}
    assert "bridge-nf-call-iptables is 0" in other[0].detail
    assert statuses(livecheck.skeleton_checks({**GOOD, "backstop": False})) == {**names, "backstop": "fail"}
    assert statuses(livecheck.skeleton_checks({})) == {"skeleton-in-path": "fail", "backstop": "fail"}


def test_one_line_a_check_and_the_sum() -> None:
    found = [
        Check("non-root", "ok", "uid 1000"),
        Check("env-file-not-mounted", "skip", "the policy has no env_file"),
        Check("dns-closed", "fail", "203.0.113.53 answers\nA queries", "0a1b2c3d"),
    ]
    assert checks.report(found).splitlines() == [
        "ok   non-root",
        "skip env-file-not-mounted: the policy has no env_file",
        "FAIL dns-closed@0a1b2c3d: 203.0.113.53 answers A queries",
        "1 passed, 1 skipped, 1 failed",
    ]
    body = checks.body("demo-0123abcd", found)
    assert (body["passed"], body["skipped"], body["failed"]) == (1, 1, 1)
    assert body["checks"][2] == {
        "check": "dns-closed",
        "status": "fail",
        "detail": "203.0.113.53 answers\nA queries",
        "session": "0a1b2c3d",
    }


def test_exit_code_is_1_on_any_failure_and_when_nothing_was_proven() -> None:
    ok, bad, skipped = Check("a", "ok"), Check("b", "fail"), Check("c", "skip")
    assert checks.exit_code([ok, skipped]) == 0
    assert checks.exit_code([ok, bad]) == 1
    assert checks.exit_code([skipped]) == 1
    assert checks.exit_code([]) == 1


def line(name: str, status: str) -> str:
    return json.dumps({"check": name, "status": status, "detail": "d"})


def test_the_checker_s_lines_become_results() -> None:
    text = "\n".join([line("a", "ok"), "", line("b", "skip"), line("c", "fail")])
    found = checks.parse_checker(text, "", 1, "0a1b2c3d")
    assert statuses(found) == {"a": "ok", "b": "skip", "c": "fail"}
    assert {check.session for check in found} == {"0a1b2c3d"}


@pytest.mark.parametrize(
    ("stdout", "stderr", "code"),
    [
        ("", "corral-entrypoint: ERROR: running as root", 1),
        ("", "", 0),
        (line("a", "ok"), "Traceback: killed", 137),
        (line("a", "ok"), "died", 1),
        (line("a", "fail"), "", 0),
        (line("a", "ok") + "\nnot json", "", 0),
        (line("a", "great"), "", 0),
        ('["a"]', "", 0),
    ],
)
def test_a_checker_that_dies_or_lies_is_a_failure(stdout: str, stderr: str, code: int) -> None:
    found = checks.parse_checker(stdout, stderr, code)
    assert any(check.name == "checker" and check.status == "fail" for check in found)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([line("a", "ok")], "it said nothing of b"),
        ([line("a", "ok"), line("b", "ok"), line("c", "ok")], "it told of c, unasked or twice"),
        ([line("a", "ok"), line("b", "ok"), line("b", "ok")], "it told of b, unasked or twice"),
    ],
    ids=["left-out", "unasked", "twice"],
)
def test_a_checker_answers_exactly_what_it_was_asked(lines: list[str], told: str) -> None:
    found = checks.parse_checker("\n".join(lines), "", 0, asked=["a", "b"])
    assert [check.detail for check in found if check.status == "fail"] == [told]


def test_a_checker_that_does_not_understand_the_question_says_only_that() -> None:
    found = checks.parse_checker(line("expectations", "fail"), "", 1, asked=["a", "b"])
    assert statuses(found) == {"expectations": "fail"}


def test_a_limit_that_nobody_asked_for_is_not_compared() -> None:
    assert checks.asked_limits(Limits(0, 0, 0)) == {"nofile": 16384}


def test_the_last_words_of_a_dead_checker_are_shown() -> None:
    (found,) = checks.parse_checker("", "x\ncorral-entrypoint: ERROR: running as root\n", 1)
    assert "running as root" in found.detail


def test_the_probe_is_an_address_nobody_may_reach() -> None:
    def probe(*ranges: str) -> str:
        return checks.probe_address([ip_network(text) for text in ranges])

    assert probe() == "192.0.2.1"
    assert probe("192.0.2.0/24") == "198.51.100.1"
    assert probe("192.0.2.0/24", "198.51.100.0/24", "203.0.113.1/32", "2001:db8::/32") == "203.0.113.254"
    last = probe("0.0.0.0/0", "::/0")
    assert not Vetting.of(permit=["0.0.0.0/0"]).check(last).ok


def test_what_the_gate_said_is_a_failure_of_its_own_for_each_problem() -> None:
    said = (
        "corral-firewall: pinned api.example.com -> 203.0.113.10\n"
        "corral-firewall: ERROR: unlisted host reachable — isolation broken\n"
        "corral-firewall: OK: DNS closed\n"
        "corral-firewall: ERROR: host service 8081 not reachable: x\n"
    )
    found = checks.parse_checker("", said, 1)
    assert [check.line() for check in found] == [
        "FAIL gate: unlisted host reachable — isolation broken",
        "FAIL gate: host service 8081 not reachable: x",
    ]
    # A checker that ran is believed about itself.
    row = '{"check": "a", "status": "ok", "detail": ""}'
    assert [check.name for check in checks.parse_checker(row, said, 0)] == ["a"]


def test_the_checker_understands_what_it_is_told(
    loaded_of: Callable[[str], LoadedPolicy], home: Path
) -> None:
    (home / "notes").mkdir()
    secrets = home / "secrets.env"
    secrets.touch(mode=0o600)
    loaded = loaded_of(
        f"profile: opencode\nname: demo\nmounts: {{ro: [{home}/notes]}}\nsecrets: {{env_file: {secrets}}}\n"
        "host_services:\n  - {name: llama, port: 8081}\n"
    )
    told = checks.expectations(
        loaded,
        uid=1000,
        gid=1001,
        home=home,
        gateway=GATEWAY,
        probe="192.0.2.1",
        names=NAMES,
        resolvers=["203.0.113.53"],
        peers={"corral-other-main": "172.16.0.66"},
        limits=Limits(4096, 2 << 30, 1_500_000_000),
    )
    understood = Expectations(json.loads(json.dumps(told)))
    assert (understood.uid, understood.gid, understood.home) == (1000, 1001, str(home))
    assert understood.mounts_rw == [str(loaded.project)]
    assert understood.mounts_ro == [str(home / "notes"), "/home/agent/.config/opencode"]
    assert understood.host_services == [8081]
    assert understood.probe == ("192.0.2.1", 443)
    assert understood.env_file == str(secrets)
    assert understood.tmpfs == ["/tmp", "/var/tmp"]
    assert understood.peers == {"corral-other-main": "172.16.0.66"}
    assert understood.limits == {"pids": 4096, "memory": 2 << 30, "cpus": 1.5, "nofile": 16384}
    assert not understood.limits_best_effort
    assert understood.resolvers == ["203.0.113.53"]
    assert understood.names["api.example.com"] == ["203.0.113.10", "203.0.113.11"]
    assert len(understood.profile) == len(loaded.profile.verify)
    assert len(understood.state) == 1 + len(loaded.profile.state_dirs)


def test_resolvers_are_those_that_a_sandbox_could_ask_itself() -> None:
    files = [
        "# stub\nnameserver 127.0.0.53\n",
        "nameserver 203.0.113.53\nnameserver 2001:db8::53\nnameserver 203.0.113.53\n",
    ]
    assert checks.resolvers(files, ["203.0.113.54", "203.0.113.55#5353"]) == [
        "203.0.113.54",
        "203.0.113.55",
        "203.0.113.53",
    ]
    assert checks.resolvers([], []) == []


def test_only_a_name_resolved_anew_is_measured_again() -> None:
    pins = [Check("a", "ok"), Check("pinned-name:api.example.com", "fail"), Check("live-rules", "fail")]
    assert checks.only_pins_failed(pins)
    assert not checks.only_pins_failed([*pins, Check("dns-closed", "fail")])
    assert not checks.only_pins_failed([Check("a", "ok")])


def test_hosts_are_read_as_the_container_reads_them() -> None:
    text = (
        "127.0.0.1       localhost\n#\n203.0.113.1 A.example b.example # c.example\n203.0.113.1 a.example\n"
    )
    assert parse_hosts(text) == {
        "localhost": ["127.0.0.1"],
        "a.example": ["203.0.113.1"],
        "b.example": ["203.0.113.1"],
    }


def test_the_verdict_of_a_gate_beside_a_running_session_is_no_problem_of_its_own() -> None:
    verdict = "corral-firewall: ERROR: re-check failed against existing rules\n"
    said = f"corral-firewall: OK: DNS closed\ncorral-firewall: ERROR: unlisted host reachable\n{verdict}"
    assert checks.gate_problems(said) == ["unlisted host reachable"]
    # Alone it is still a failure.
    assert checks.gate_problems(verdict) == ["re-check failed against existing rules"]
