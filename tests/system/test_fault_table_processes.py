"""Fault table: corral's own processes are killed, held still, or away while containers come and go."""

from __future__ import annotations

import json
import random
import time

import pytest

from .flooding import (
    ALLOWED_URL,
    controls,
    flooding,
    host_sink,
    image,
    pins,
    services_back,  # noqa: F401
    standing,
    stranger,
)
from .host import ENFORCER, FLOOD, Host, until

pytestmark = pytest.mark.usefixtures("services_back")

# A program that lives for a moment: a few datagrams at once, then the end.
BRIEF = "for i in 1 2 3 4 5 6 7 8 9 10; do echo x >/dev/udp/{address}/9; done"
STARTS = 400


def writer_pid(host: Host) -> str:
    return str(host.engine.writer_pid())


@pytest.mark.case(26)
@pytest.mark.fault("enforcer killed -9")
@pytest.mark.fault("writer killed")
@pytest.mark.fault("processes killed while a sandbox comes up")
def test_a_kill_at_any_moment_of_a_start_lets_nothing_out(host: Host) -> None:
    forbidden = host.internet.addresses["forbidden"]
    project = host.project("kills")
    project.write("flood.py", FLOOD)
    project.inside("true")
    host.internet.reset_counters()
    chance = random.Random(26)
    outcomes: dict[str, int] = {}
    for turn in range(12):
        marker = f"ran-{turn}"
        script = f"touch {marker}; python3 flood.py {forbidden} 0.2 > /dev/null"
        process = host.box.popen(["corral", "run", "--", "sh", "-c", script], cwd=project.path)
        project.started.append(process)
        # Between the command's first step and the program's: a start takes one to two seconds here.
        time.sleep(chance.uniform(0, 2))
        enforcer, writer = ((True, False), (False, True), (True, True))[turn % 3]
        if enforcer and (pid := host.enforcer_pid()):
            host.root("kill", "-9", str(pid), check=False)
        if writer and (other := writer_pid(host)) != "0":
            host.root("kill", "-9", other, check=False)
        code = process.wait(timeout=60)
        ran = project.exists(marker)
        outcomes[f"exit {code}, ran {ran}"] = outcomes.get(f"exit {code}, ran {ran}", 0) + 1
        # Refused or run to its end; never a success that did not happen.
        assert (code == 0) == ran or code == 1
        host.wait_enforcer()
    print(outcomes)
    assert host.internet.packets(forbidden) == 0, host.internet.all_packets()
    until(lambda: project.containers() == [], 20, "no container stays")
    until(lambda: pins(host) == [], 20, "no element stays")
    until(standing(host), 20, "the rules stand")
    assert "203.0.113.10" in project.inside("curl", "-sS", "-m", "10", ALLOWED_URL).stdout
    host.control(forbidden)


@pytest.mark.fault("both down while containers start, stop and reuse addresses")
def test_an_address_taken_over_while_nobody_looks_reaches_nothing_forbidden(host: Host) -> None:
    forbidden, allowed = (host.internet.addresses[name] for name in ("forbidden", "allowed1"))
    project = host.project("reuse")
    project.write("send.py", FLOOD)
    project.start("sh", "-c", "touch up; sleep 120", marker="up")
    network = project.sandbox["network"]
    address, container = (project.sandbox["sessions"][0][key] for key in ("address", "container"))
    host.user_systemctl("stop", ENFORCER)
    host.engine.systemctl("stop", *host.engine.writer_units)
    host.internet.reset_counters()
    host.box.run(["docker", "rm", "-f", container])
    with host_sink(host) as sink:
        for turn in range(3):
            flood = f"python3 -c '{FLOOD}' {{}} 0.3 2>&1"
            script = "; ".join(flood.format(target) for target in (forbidden, allowed, host.box.address))
            ident = stranger(host, network, "sh", "-c", script, options=("--ip", address))
            assert host.box.run(["docker", "wait", ident], timeout=60).stdout.strip() == "0"
            sent = [int(n) for n in host.box.run(["docker", "logs", ident]).stdout.split()]
            assert len(sent) == 3, turn
            assert min(sent) > 1000
            host.box.run(["docker", "rm", ident])
        assert host.internet.packets(forbidden) == host.internet.packets(allowed, "udp") == sink.heard == 0
        # The entries of the one who had the address before go as soon as somebody looks.
        last = stranger(host, network, "sleep", "300", options=("--ip", address))
        host.engine.systemctl("start", *host.engine.writer_units)
        host.user_systemctl("start", ENFORCER)
        until(lambda: not [pin for pin in pins(host) if pin.startswith(f"{address},")], 20, "entries go")
        until(
            lambda: (
                host.box.run(
                    ["docker", "inspect", "-f", "{{len .NetworkSettings.Networks}}", last]
                ).stdout.strip()
                == "0"
            ),
            20,
            "the stranger is off the network",
        )
        controls(host, sink)


@pytest.mark.case(8)
@pytest.mark.case(13)
@pytest.mark.fault("400 starts while the event stream is stalled")
def test_containers_that_live_for_a_moment_reach_nothing_while_nobody_listens(host: Host) -> None:
    """With over six events each they overrun Docker's ring of 256 many times."""
    forbidden = host.internet.addresses["forbidden"]
    project = host.project("stalled")
    project.start("sh", "-c", "touch up; sleep 3000", marker="up")
    network, before = project.sandbox["network"], sorted(pins(host))
    assert before
    host.internet.reset_counters()
    starts = (
        f"seq {STARTS} | xargs -P 4 -I N docker run --rm --label test=faults --network {network} "
        f"--entrypoint bash {image(host)} -c '{BRIEF.format(address=forbidden)}' 2>/dev/null || true"
    )
    host.root("kill", "-STOP", str(host.enforcer_pid()))
    try:
        since = int(time.time())
        host.shell(starts, timeout=1200)
    finally:
        host.root("kill", "-CONT", str(host.enforcer_pid()))
    events = host.box.run(
        [
            "docker",
            "events",
            "--since",
            str(since),
            "--until",
            str(int(time.time())),
            "--format",
            "{{.Action}}",
        ]
    ).stdout.split()
    # More happened than Docker's ring holds: some of it is lost to whoever was held still.
    assert 0 < events.count("create") < STARTS
    host.wait_enforcer()
    until(lambda: sorted(pins(host)) == before, 120, "the elements are what they were")
    until(
        lambda: json.loads(host.box.run(["corral", "status", "--json"]).stdout)["strangers"] == [],
        120,
        "no stranger is left over",
    )
    assert host.internet.packets(forbidden) == 0
    # The same program on Docker's own bridge is heard, and the service that was held still works.
    host.plain("bash", "-c", BRIEF.format(address=forbidden))
    assert host.internet.packets(forbidden, "udp") == 10
    assert "203.0.113.10" in project.inside("curl", "-sS", "-m", "10", ALLOWED_URL).stdout


@pytest.mark.case(13)
def test_many_brief_sandboxes_leave_nothing_behind(host: Host) -> None:
    forbidden = host.internet.addresses["forbidden"]
    project = host.project("brief")
    project.inside("true")
    host.internet.reset_counters()
    done = host.shell(
        f"cd {project.path}; seq 12 | xargs -P 4 -I N corral run -- bash -c "
        f"'touch ran-N; {BRIEF.format(address=forbidden)} 2>/dev/null; true'",
        timeout=240,
    )
    assert done.returncode == 0
    assert all(project.exists(f"ran-{number}") for number in range(1, 13))
    until(lambda: pins(host) == [], 20, "all elements are gone")
    assert project.containers() == []
    assert project.sandbox["sessions"] == []
    assert host.internet.packets(forbidden) == 0
    host.plain("bash", "-c", BRIEF.format(address=forbidden))
    assert host.internet.packets(forbidden, "udp") == 10


@pytest.mark.fault("enforcer killed -9")
@pytest.mark.fault("both down")
def test_a_flood_meets_the_rules_while_both_processes_are_down(host: Host) -> None:
    with flooding(host, "both-down") as flood:
        host.engine.systemctl("kill", "-s", "KILL", "corral-netfilter")
        host.user_systemctl("kill", "-s", "KILL", ENFORCER)
        host.engine.systemctl("stop", *host.engine.writer_units)
        host.user_systemctl("stop", ENFORCER)
        for command in (
            "iptables -F DOCKER-USER",
            "iptables -I FORWARD 1 -j ACCEPT",
            "iptables -I INPUT 1 -j ACCEPT",
        ):
            host.netadmin_shell(command)
        time.sleep(2)
        assert flood.leaked == (0, 0)
        host.engine.systemctl("start", *host.engine.writer_units)
        until(standing(host), 20, "the rules stand")
        host.netadmin_shell("iptables -D FORWARD -j ACCEPT; iptables -D INPUT -j ACCEPT")
        host.user_systemctl("start", ENFORCER)
        host.wait_enforcer()
        flood.works()
