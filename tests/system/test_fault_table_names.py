"""Fault table: the resolver is down, slow, lying, flapping, or fails for one name of many."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from .flooding import ALLOWED_URL
from .host import BASE_POLICY, Host, until
from .nameserver import NameServer, name_server, restart_enforcer

BOUND = 20.0  # seconds; three tries of two seconds each, and the rest of a refused start on a busy machine


@pytest.fixture
def names(host: Host) -> Iterator[NameServer]:
    with name_server(host) as made:
        yield made


def addresses(host: Host, name: str) -> list[str]:
    """Return what the kernel holds for the sandbox's names: the destinations of its elements."""
    listed = host.netadmin("ipset", "list", "corral-pins").stdout.partition("Members:\n")[2]
    return sorted({line.split()[0].split(",")[2] for line in listed.splitlines() if name in line})


@pytest.mark.fault("resolver down")
def test_without_a_resolver_a_start_is_refused_and_what_runs_goes_on(host: Host, names: NameServer) -> None:
    project, other = host.project("down"), host.project("down-too")
    other.inside("true")
    script = "touch up; while [ ! -e go ]; do sleep 0.1; done; " \
        f"curl -sS -m 20 {ALLOWED_URL} > got; touch done; sleep 60"  # fmt: skip
    process = project.start("sh", "-c", script, marker="up")
    before = addresses(host, "down")
    names.modes({"*": "silent"})
    # With its knowledge gone too: a service that starts anew and hears nobody takes nothing away.
    restart_enforcer(host)
    assert addresses(host, "down") == before == ["203.0.113.10", "203.0.113.20"]
    project.write("go", "")
    host.box.wait_for(lambda: project.exists("done"), timeout=30)
    assert "203.0.113.10" in project.read("got")
    fresh = host.project("down-new", BASE_POLICY.replace("allowed2", "several"))
    started = time.monotonic()
    done = fresh.inside("touch", "ran", check=False)
    assert time.monotonic() - started < BOUND + 20  # the image of a new sandbox is built first
    assert done.returncode == 1
    assert "several.corral.example" in done.stderr
    assert not fresh.exists("ran")
    assert fresh.containers() == []
    names.modes({})
    fresh.inside("touch", "ran")
    assert fresh.exists("ran")
    host.box.kill(process)


@pytest.mark.fault("resolver slow")
@pytest.mark.fault("resolver flapping")
def test_a_slow_or_flapping_resolver_delays_a_start_and_does_not_fail_it(
    host: Host, names: NameServer
) -> None:
    project = host.project("slow")
    project.inside("true")
    for mode in ("slow:1.2", "flap"):
        names.modes({"*": mode})
        restart_enforcer(host)
        done = project.inside("curl", "-sS", "-m", "5", ALLOWED_URL)
        assert "203.0.113.10" in done.stdout, mode


@pytest.mark.fault("resolver lying")
def test_a_lie_about_a_name_in_use_adds_nothing_and_takes_nothing_away(host: Host, names: NameServer) -> None:
    project = host.project("liar")
    project.start("sh", "-c", "touch up; sleep 200", marker="up")
    gateway = project.sandbox["gateway"]
    lies = ["169.254.169.254", "127.0.0.1", "10.0.0.5", "0.0.0.0", "100.64.0.1", gateway, host.box.address]
    names.modes({"allowed1.corral.example": "lie:" + ",".join(lies)})
    since = time.time()
    # A new session asks again, and everybody hears the answer.
    refused = project.inside("touch", "ran", check=False)
    # Good addresses that are still valid serve; without one the start is refused. Nothing in between.
    assert (refused.returncode == 0) == project.exists("ran")
    restart_enforcer(host)

    def told() -> str:
        rows = project.sandbox["sessions"][0]["names"]
        return str(next(row["error"] for row in rows if row["name"] == "allowed1.corral.example") or "")

    until(lambda: any(lie in told() for lie in lies), 60, "the lie was heard and is reported")
    print(told())
    held = addresses(host, "liar")
    assert held == ["203.0.113.10", "203.0.113.20"], host.user_journal(since)
    assert not set(lies) & set(held)
    for address in lies:
        done = project.inside("curl", "-s", "-m", "3", f"http://{address}:443/", check=False)
        assert done.returncode != 0
    assert host.internet.packets("169.254.169.254") == 0
    assert host.internet.packets("10.0.0.5") == host.internet.packets("100.64.0.1") == 0
    host.box.run(["bash", "-c", "echo x >/dev/udp/10.0.0.5/443"])
    assert host.internet.packets("10.0.0.5") == 1


@pytest.mark.case(18)
@pytest.mark.fault("one name of many failing")
@pytest.mark.parametrize("mode", ["silent", "servfail"])
def test_one_name_of_five_that_fails_is_named_in_bounded_time_and_optional_ones_are_not_missed(
    host: Host, names: NameServer, mode: str
) -> None:
    bad, good = "third.corral.example", ["n1", "n2", "n4", "n5"]
    for number, label in enumerate(good, 1):
        host.internet.set_name(f"{label}.corral.example", [f"203.0.113.{40 + number}"])
    head = "profile: opencode\negress:\n  profile_defaults: false\n  allow:\n"
    listed = "".join(f"    - {label}.corral.example\n" for label in good)
    tail = "limits:\n  best_effort: true\n"
    names.modes({bad: mode})
    project = host.project("five", f"{head}{listed}{tail}")
    project.inside("true")
    project.policy(f"{head}{listed}    - {bad}\n{tail}")
    started = time.monotonic()
    done = project.inside("touch", "ran", check=False)
    assert time.monotonic() - started < BOUND
    assert done.returncode == 1
    assert bad in done.stderr
    assert not [label for label in good if f"{label}.corral.example" in done.stderr]
    assert not project.exists("ran")
    project.policy(f"{head}{listed}    - {{host: {bad}, optional: true}}\n{tail}")
    done = project.inside("sh", "-c", "touch ran; curl -sS -m 20 https://n5.corral.example/")
    assert "203.0.113.44" in done.stdout
    assert bad in done.stderr
