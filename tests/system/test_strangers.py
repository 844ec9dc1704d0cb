"""Containers that corral did not start, on its networks; and a sandbox that somebody connects elsewhere."""

from __future__ import annotations

import json
import time

import pytest

from .host import FLOOD, Host, until

pytestmark = pytest.mark.representative

ASK = """\
import socket, sys, time
end = time.monotonic() + float(sys.argv[2])
asked = 0
while time.monotonic() < end:
    asked += 1
    try:
        socket.getaddrinfo(f"{asked}.{sys.argv[1]}", 443)
    except OSError:
        time.sleep(0.01)
print(asked)
"""


def strangers(host: Host) -> list[dict[str, object]]:
    return list(json.loads(host.box.run(["corral", "status", "--json"]).stdout)["strangers"])


@pytest.mark.case(6)
@pytest.mark.parametrize("resolver", ["stub", "routable"])
def test_a_stranger_on_a_corral_network_is_expelled_and_asks_nobody_for_long(
    host: Host, resolver: str
) -> None:
    forbidden = host.internet.addresses["forbidden"]
    project = host.project("expel")
    project.inside("true")
    network = project.sandbox["network"]
    since = time.time()
    host.internet.reset_counters()
    mark = host.internet.mark()
    domain = f"leak-{resolver}-{time.time_ns()}.corral.example"
    with host.box.resolver(resolver):
        host.plain("python3", "-c", ASK, domain, "3", network=network, check=False)
        host.plain("python3", "-c", FLOOD, forbidden, "0.5", network=network, check=False)
        leaked = [query for query in host.internet.queries(mark) if query.name.endswith(domain)]
        # The positive control: from Docker's own bridge the same program's questions do arrive.
        host.plain("python3", "-c", ASK, f"control.{domain}", "1")
        control = [q for q in host.internet.queries(mark) if q.name.endswith(f"control.{domain}")]
    print(f"{len(leaked)} questions through Docker's resolver before the stranger was off the network")
    assert host.internet.packets(forbidden) == 0
    assert len(control) > 20
    assert len({query.name for query in leaked}) < 20
    told = host.user_journal(since)
    assert "corral did not start it; disconnected" in told


def test_a_stranger_that_stays_is_shown_in_status_without_a_network(host: Host) -> None:
    project = host.project("shown")
    project.inside("true")
    network = project.sandbox["network"]
    image = host.box.run(["docker", "images", "-q", "corral/*"]).stdout.split()[0]
    ident = host.box.run(
        ["docker", "run", "-d", "--network", network, "--entrypoint", "sleep", image, "300"]
    ).stdout.strip()
    try:
        until(
            lambda: any(row["container"] == ident for row in strangers(host)), 10, "the stranger is reported"
        )

        def attached() -> dict[str, object]:
            shown = host.box.run(
                ["docker", "inspect", "-f", "{{json .NetworkSettings.Networks}}", ident]
            ).stdout
            return dict(json.loads(shown))

        until(lambda: network not in attached(), 10, "the stranger is off the network")
        assert (
            "not started by corral" in project.corral("status").stdout
            or "did not start" in project.corral("status").stdout
        )
    finally:
        host.box.run(["docker", "rm", "-f", ident])
    until(lambda: not strangers(host), 10, "a removed stranger is forgotten")


@pytest.mark.case(6)
def test_a_sandbox_connected_to_the_bridge_is_taken_back_and_works_on(host: Host) -> None:
    forbidden = host.internet.addresses["forbidden"]
    project = host.project("connected")
    project.write("flood.py", FLOOD)
    script = (
        f"touch up; python3 flood.py {forbidden} 6 > flooded; "
        "curl -sS -m 5 https://allowed1.corral.example/ > got; touch done; sleep 60"
    )
    process = project.start("sh", "-c", script, marker="up")
    container = project.containers()[0]
    since = time.time()
    host.internet.reset_counters()
    host.box.run(["docker", "network", "connect", "bridge", container])
    window = host.internet.packets(forbidden)

    def networks() -> list[str]:
        shown = host.box.run(
            ["docker", "inspect", "-f", "{{json .NetworkSettings.Networks}}", container]
        ).stdout
        return sorted(json.loads(shown))

    until(lambda: networks() == [project.sandbox["network"]], 10, "the sandbox is on its own network alone")
    after = host.internet.packets(forbidden)
    host.box.wait_for(lambda: project.exists("done"), timeout=30)
    # What went out in the window is Docker's doing and cannot be prevented; afterwards nothing goes.
    assert host.internet.packets(forbidden) <= after + 500
    print(f"{after} datagrams in the window ({window} when docker network connect returned)")
    assert "203.0.113.10" in project.read("got")
    told = host.user_journal(since)
    assert "alone; disconnected" in told
    host.box.kill(process)
