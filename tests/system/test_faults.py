"""What breaks while a sandbox runs, and what leaves it meanwhile."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from .flooding import SENDER
from .host import ENFORCER, FLOOD, Host, until

pytestmark = pytest.mark.representative

STREAM = """\
import json, os, socket, ssl, time
context = ssl.create_default_context()
raw = socket.create_connection(("allowed1.corral.example", 443), timeout=10)
gaps, last, count = [], None, 0
with context.wrap_socket(raw, server_hostname="allowed1.corral.example") as s:
    s.settimeout(5)
    s.sendall(b"GET /stream?interval=0.1&count=120 HTTP/1.0\\r\\nHost: allowed1.corral.example\\r\\n\\r\\n")
    open("streaming", "w").close()
    error = None
    try:
        while (data := s.recv(1)):
            now = time.monotonic()
            if last is not None: gaps.append(now - last)
            last, count = now, count + 1
            if count > 100 and os.path.exists("stop"): break
    except OSError as e:
        error = repr(e)
json.dump({"count": count, "gap": max(gaps), "error": error}, open("stream.json", "w"))
"""


@pytest.mark.fault("enforcer killed -9")
def test_killing_the_enforcer_opens_nothing_and_breaks_no_stream(host: Host) -> None:
    forbidden = host.internet.addresses["forbidden"]
    project = host.project("kill")
    project.write("send.py", SENDER)
    project.write("stream.py", STREAM.replace("count=120", "count=1200"))
    script = f"python3 stream.py & touch up; python3 send.py stop {forbidden}:9 > flooded; wait; touch done"
    process = project.start("sh", "-c", script, marker="streaming")
    before = project.sandbox["sessions"][0]
    for _ in range(3):
        pid = host.enforcer_pid()
        host.root("kill", "-9", str(pid))
        host.box.wait_for(lambda pid=pid: host.enforcer_pid() not in (0, pid), timeout=20)
        host.wait_enforcer()
    host.box.wait_for(lambda: project.sandbox["sessions"], timeout=10)
    after = project.sandbox["sessions"][0]
    assert after["state"] == "running"
    assert after["address"] == before["address"]
    assert {n["name"]: n["addresses"] for n in after["names"]} == {
        n["name"]: n["addresses"] for n in before["names"]
    }
    project.write("stop", "")
    host.box.wait_for(lambda: project.exists("done"), timeout=40)
    process.wait(timeout=30)
    stream = json.loads(project.read("stream.json"))
    assert stream["error"] is None, stream
    assert stream["count"] > 100
    assert stream["gap"] < 1
    assert int(project.read("flooded")) > 1000
    assert host.internet.packets(forbidden) == 0
    host.control(forbidden)


@pytest.mark.case(12)
@pytest.mark.fault("iptables -F DOCKER-USER")
def test_a_flushed_docker_user_lets_nothing_out_and_is_mended_at_once(host: Host) -> None:
    forbidden = host.internet.addresses["forbidden"]
    project = host.project("flush")
    project.write("flood.py", FLOOD)
    process = project.start("sh", "-c", f"touch up; python3 flood.py {forbidden} 8 > flooded", marker="up")
    since = time.time()
    took = []
    for _ in range(3):
        host.netadmin("iptables", "-F", "DOCKER-USER")
        took.append(
            until(
                lambda: "CORRAL-OUT" in host.netadmin("iptables", "-S", "DOCKER-USER").stdout,
                10,
                "the jump is back",
            )
        )
    process.wait(timeout=30)
    print("healed after", [f"{seconds:.2f} s" for seconds in took])
    assert int(project.read("flooded")) > 1000
    assert host.internet.packets(forbidden) == 0, host.internet.all_packets()
    told = host.writer_journal(since)
    assert "healed after a change by others" in told
    assert told.count("DOCKER-USER (IPv4 filter) lacks our rules") >= 3
    host.control(forbidden)


@pytest.mark.fault("enforcer stopped")
def test_with_the_enforcer_stopped_a_run_is_refused_with_the_command_that_starts_it(host: Host) -> None:
    project = host.project("stopped")
    project.inside("true")
    host.user_systemctl("stop", ENFORCER)
    done = project.inside("touch", "ran", check=False)
    assert done.returncode == 1
    assert "systemctl --user start corral-enforcer" in done.stderr
    assert not project.exists("ran")
    assert project.containers() == []
    host.user_systemctl("start", ENFORCER)
    host.wait_enforcer()
    project.inside("touch", "ran")
    assert project.exists("ran")


@pytest.mark.fault("enforcer stopped")
def test_a_running_sandbox_stays_fenced_while_the_enforcer_is_stopped(host: Host) -> None:
    forbidden = host.internet.addresses["forbidden"]
    since = time.time()
    project = host.project("orphan")
    project.write("flood.py", FLOOD)
    script = "touch up; while [ ! -e go ]; do sleep 0.1; done; " \
        f"python3 flood.py {forbidden} 1 > flooded; curl -sS -m 20 https://allowed1.corral.example/ > got 2>&1; touch done"  # fmt: skip
    process = project.start("sh", "-c", script, marker="up")
    host.user_systemctl("stop", ENFORCER)
    project.write("go", "")
    host.box.wait_for(lambda: project.exists("done"), timeout=60)
    assert host.internet.packets(forbidden) == 0, host.internet.all_packets()
    assert int(project.read("flooded")) > 1000
    got = project.read("got")
    assert "203.0.113.10" in got, (got, host.internet.all_packets(), host.journal(since=since))
    host.control(forbidden)
    host.user_systemctl("start", ENFORCER)
    host.box.kill(process)


def test_entries_are_withdrawn_when_the_container_dies(host: Host) -> None:
    project = host.project("die")
    process = project.start("sh", "-c", "touch up; sleep 60", marker="up")
    session = project.sandbox["sessions"][0]
    assert f"{session['address']},tcp:443," in host.netadmin("ipset", "list", "corral-pins").stdout
    host.box.run(["docker", "kill", session["container"]])
    host.box.wait_for(
        lambda: f"{session['address']}," not in host.netadmin("ipset", "list", "corral-pins").stdout,
        timeout=10,
    )
    process.wait(timeout=20)
    assert process.returncode == 137
    assert project.containers() == []


@pytest.mark.fault("writer killed")
def test_killing_the_writer_opens_nothing_and_keeps_claims(host: Host) -> None:
    forbidden = host.internet.addresses["forbidden"]
    project = host.project("writer")
    project.write("flood.py", FLOOD)
    # It stays until it is told to end: on a slow machine the flood is over before the claims are looked at.
    flood = f"python3 flood.py {forbidden} 5 > flooded; until [ -e end ]; do sleep 0.1; done"
    process = project.start("sh", "-c", f"touch up; {flood}", marker="up")
    pid = str(host.engine.writer_pid())
    host.root("kill", "-9", pid)
    host.box.wait_for(
        lambda: str(host.engine.writer_pid()) not in ("0", pid),
        timeout=20,
    )
    host.wait_enforcer()
    elements = host.netadmin("ipset", "list", "corral-pins").stdout
    assert f"{project.sandbox['sessions'][0]['address']},tcp:443,203.0.113.10" in elements
    project.write("end", "")
    process.wait(timeout=30)
    assert int(project.read("flooded")) > 1000
    assert host.internet.packets(forbidden) == 0
    host.control(forbidden)


@pytest.mark.fault("writer stopped and started")
def test_stopping_and_starting_the_writer_cuts_no_stream(host: Host) -> None:
    project = host.project("writer-stop")
    project.write("stream.py", STREAM.replace("count=120", "count=40"))
    process = project.start("python3", "stream.py", marker="streaming")
    host.engine.systemctl("stop", "corral-netfilter.service")
    host.engine.systemctl("start", "corral-netfilter.service")
    process.wait(timeout=30)
    stream = json.loads(project.read("stream.json"))
    assert stream["error"] is None, stream
    assert stream["gap"] < 1


@pytest.mark.case(14)
def test_a_restarted_container_gets_its_entries_again(host: Host) -> None:
    project = host.project("restart")
    process = project.start("sh", "-c", "touch up; sleep 120", marker="up")
    session = project.sandbox["sessions"][0]
    since = time.time()
    # Held still, the command line cannot remove the container when it sees it end.
    os.killpg(process.pid, signal.SIGSTOP)
    try:
        host.box.run(["docker", "restart", "-t", "1", session["container"]])
        element = f"{session['address']},tcp:443,203.0.113.10"
        host.box.wait_for(lambda: element in host.netadmin("ipset", "list", "corral-pins").stdout, timeout=10)
        networks = ["docker", "inspect", "-f", "{{json .NetworkSettings.Networks}}", session["container"]]
        assert list(json.loads(host.box.run(networks).stdout)) == [project.sandbox["network"]]
        assert "disconnected" not in host.user_journal(since)
    finally:
        os.killpg(process.pid, signal.SIGCONT)
    host.box.kill(process)


@pytest.mark.fault("skeleton unit run three times")
def test_the_skeleton_unit_is_idempotent(host: Host) -> None:
    def state() -> str:
        return host.netadmin_shell(
            "iptables -S; iptables -t nat -S; ip6tables -S; nft list table inet corral | sed 's/packets.*drop/drop/'"
            "; ipset list -n"
        ).stdout

    before = state()
    for _ in range(3):
        host.engine.systemctl("restart", host.engine.loader)
    assert state() == before
