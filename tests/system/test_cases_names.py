"""Field cases about names, against a name server that plays a script: lies, chains, twins, truncation, many."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from .host import Host, Project
from .scriptdns import ScriptDns, always, script_dns, steps

HEAD = "profile: opencode\nlimits:\n  best_effort: true\negress:\n  profile_defaults: false\n"
GOOD, TWIN = "good.corral.example", "twin.corral.example"
# Seconds a resolution may take in all, and what a start of a container and a busy machine add to it.
RESOLVING, STARTING = 6.0, 25.0


@pytest.fixture
def dns(host: Host) -> Iterator[ScriptDns]:
    with script_dns(host) as made:
        yield made


def policy(*names: str, more: str = "") -> str:
    return HEAD + more + "  allow:\n" + "".join(f"    - {name}\n" for name in names)


def held(host: Host, project: Project) -> set[tuple[str, int]]:
    """Return (destination, port) of what the kernel holds for the project's sandbox."""
    name = project.path.rpartition("/")[2]
    listed = host.netadmin("ipset", "list", "corral-pins").stdout.partition("Members:\n")[2]
    rows = [line.split()[0].split(",") for line in listed.splitlines() if f'"{name}-' in line]
    return {(row[2], int(row[1].removeprefix("tcp:"))) for row in rows}


def names_of(project: Project) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in project.sandbox["sessions"][0]["names"]}


def reached(project: Project, name: str) -> str:
    """Return which server answers for a name from inside."""
    done = project.inside("curl", "-sS", "-m", "5", f"https://{name}/")
    return str(json.loads(done.stdout)["server"])


@pytest.mark.case(15)
def test_bad_addresses_beside_a_good_one_are_refused_named_and_reported(host: Host, dns: ScriptDns) -> None:
    project = host.project("lies", policy(GOOD))
    dns.play({GOOD: always("203.0.113.140")})
    project.start("sh", "-c", "touch up; sleep 100", marker="up")
    gateway = project.sandbox["gateway"]
    lies = ["169.254.169.254", "127.0.0.1", "10.0.0.5", "0.0.0.0", "100.64.0.1", gateway, host.box.address]
    since = time.time()
    dns.play({GOOD: always("203.0.113.141", *lies)})
    told = json.loads(project.corral("refresh", "--json").stdout)["names"][0]
    assert told["addresses"] == ["203.0.113.141"]
    shown = names_of(project)[GOOD]
    assert shown["addresses"] == ["203.0.113.141"]
    assert held(host, project) == {("203.0.113.140", 443), ("203.0.113.141", 443)}
    # Four are named, and how many there are beside them.
    assert sum(lie in shown["error"] for lie in lies) == 4
    assert "and 3 more" in shown["error"]
    fields = ["CORRAL_EVENT=refused", f"CORRAL_NAME={GOOD}"]
    words = ["journalctl", "--user", "-o", "json", "--no-pager", f"--since=@{since:.3f}", *fields]
    events = [json.loads(line) for line in host.box.run(words).stdout.splitlines()]
    assert len(events) == 1
    assert events[0]["CORRAL_DETAIL"] in events[0]["MESSAGE"]
    assert events[0]["CORRAL_ALARM"] == "0"
    for lie in ("169.254.169.254", "10.0.0.5", "100.64.0.1"):
        assert project.inside("curl", "-s", "-m", "3", f"http://{lie}:443/", check=False).returncode != 0
        assert host.internet.packets(lie) == 0
    assert reached(project, GOOD) == "203.0.113.141"
    # Only forbidden ones: an alarm, nothing is added, what stands is not renewed.
    dns.play({GOOD: always(*lies)})
    assert project.corral("refresh", check=False).returncode == 1
    assert names_of(project)[GOOD]["state"] == "REFUSED"
    assert held(host, project) == {("203.0.113.140", 443), ("203.0.113.141", 443)}


@pytest.mark.case(17)
def test_one_address_of_two_names_stays_until_both_have_gone(host: Host, dns: ScriptDns) -> None:
    # A server that says the same address twice is one that the library makes one of; two names share it.
    dns.play({GOOD: always("203.0.113.142"), TWIN: always("203.0.113.142", "203.0.113.143")})
    project = host.project("twins", policy(GOOD, TWIN))
    project.start("sh", "-c", "touch up; sleep 100", marker="up")
    assert held(host, project) == {("203.0.113.142", 443), ("203.0.113.143", 443)}
    project.corral("deny", TWIN)
    assert held(host, project) == {("203.0.113.142", 443)}
    assert names_of(project)[TWIN]["state"] == "REVOKED"
    project.corral("deny", GOOD)
    assert held(host, project) == set()


@pytest.mark.case(19)
def test_chains_of_cnames_lead_to_addresses_or_to_a_refusal_with_the_reason(
    host: Host, dns: ScriptDns
) -> None:
    hops = [f"hop{number}.cdn.example" for number in range(9)]
    dns.play(
        {
            GOOD: always("203.0.113.144", chain=hops[:2]),
            "eight.corral.example": always("203.0.113.145", chain=hops[:8]),
            "stops.corral.example": steps({"chain": ["late.cdn.example"]}),
            "late.cdn.example": always("203.0.113.146"),
            "nine.corral.example": always("203.0.113.147", chain=hops),
            "loop.corral.example": steps({"chain": ["hop0.cdn.example", "loop.corral.example"]}),
            "bare.corral.example": steps({"chain": ["hop0.cdn.example"]}),
            "hop0.cdn.example": steps({}),
        }
    )
    good = [GOOD, "eight.corral.example", "stops.corral.example"]
    bad = {"nine": "more than 8 CNAMEs", "loop": "leads back", "bare": "has no IPv4 address"}
    entries = [f"{{host: {label}.corral.example, optional: true}}" for label in bad]
    project = host.project("chains", policy(*good, *entries))
    project.start("sh", "-c", "touch up; sleep 100", marker="up")
    assert held(host, project) == {(f"203.0.113.14{number}", 443) for number in (4, 5, 6)}
    shown = names_of(project)
    for label, why in bad.items():
        assert why in shown[f"{label}.corral.example"]["error"]
        assert shown[f"{label}.corral.example"]["addresses"] == []
    assert reached(project, GOOD) == "203.0.113.144"


def test_truncated_answers_and_four_hundred_addresses_are_taken_in_whole_and_capped(
    host: Host, dns: ScriptDns
) -> None:
    public = [f"203.0.113.{number}" for number in range(120, 250)]
    # The others are no documentation range: they are vetted out or public, and nothing is sent to them.
    private = [f"10.9.{number // 200}.{number % 200}" for number in range(270)]
    dns.play(
        {
            GOOD: always("203.0.113.150", tc=True, ttl=0),
            TWIN: always(*public, *private, tc=True, ttl=300),
            "flap.corral.example": steps(
                {"a": ["203.0.113.151"]}, {"rcode": "NXDOMAIN"}, {"rcode": "SERVFAIL"}, cycle=True
            ),
        }
    )
    project = host.project("many", policy(GOOD, TWIN, "flap.corral.example"))
    project.start("sh", "-c", "touch up; sleep 100", marker="up")
    shown = names_of(project)
    assert shown[GOOD]["addresses"] == ["203.0.113.150"]
    # One container's share: at most 64 of a name, the same ones every time.
    assert shown[TWIN]["addresses"] == public[:64]
    for _ in range(3):
        project.corral("refresh", check=False)
    flap = names_of(project)["flap.corral.example"]
    assert flap["addresses"] == ["203.0.113.151"]
    assert flap["state"] in ("OK", "STALE")
    assert ("203.0.113.151", 443) in held(host, project)


@pytest.mark.case(18)
def test_three_bad_names_of_fifty_are_named_at_once_in_bounded_time(host: Host, dns: ScriptDns) -> None:
    good = [f"n{number}.corral.example" for number in range(47)]
    bad = {
        "silent.corral.example": "no answer",
        "gone.corral.example": "does not exist",
        "sick.corral.example": "SERVFAIL",
    }
    script: dict[str, Any] = {name: always(f"203.0.113.{150 + number}") for number, name in enumerate(good)}
    script["silent.corral.example"] = steps({"drop": True})
    script["sick.corral.example"] = steps({"rcode": "SERVFAIL"})
    dns.play(script)
    project = host.project("fifty", policy(*good))
    project.inside("true")
    project.policy(policy(*good[:20], *bad, *good[20:]))
    began = time.monotonic()
    done = project.inside("touch", "ran", check=False)
    took = time.monotonic() - began
    print(f"refused after {took:.1f} s")
    assert took < RESOLVING + STARTING
    assert done.returncode == 1
    assert not project.exists("ran")
    for name, why in bad.items():
        line = next(line for line in done.stderr.splitlines() if name in line)
        assert why in line
    assert not [name for name in good if f" {name}:" in done.stderr]


def test_without_a_resolver_a_new_session_is_refused_or_starts_on_stale_where_that_is_allowed(
    host: Host, dns: ScriptDns
) -> None:
    dns.play({GOOD: always("203.0.113.152")})
    project = host.project("stale", policy(GOOD))
    assert reached(project, GOOD) == "203.0.113.152"
    dns.play({GOOD: steps({"drop": True})})
    refused = project.inside("touch", "ran", check=False)
    assert refused.returncode == 1
    assert GOOD in refused.stderr
    assert not project.exists("ran")
    project.policy(policy(GOOD, more="  allow_stale: true\n"))
    done = project.inside("sh", "-c", f"touch ran; curl -sS -m 20 https://{GOOD}/")
    assert json.loads(done.stdout)["server"] == "203.0.113.152"
    assert GOOD in done.stderr
