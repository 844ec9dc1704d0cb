"""What was blocked: `corral denied`, its counts beside those of the far end, and who is told."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.lab import Box

from .host import BASE_POLICY, Host, Project, until
from .test_leaving import EVE, Eve

# argv: where. UDP floods, TCP knocks, ICMP asks; how many of each is written down.
THREE_KINDS = """\
import json, socket, sys
address = sys.argv[1]
sent = {"udp": 0, "tcp": 0, "icmp": 0}
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    for _ in range(20000):
        try: s.sendto(b"flood", (address, 9))
        except OSError: continue
        sent["udp"] += 1
for _ in range(25):
    with socket.socket() as s:
        s.settimeout(3)
        try: s.connect((address, 8443))
        except OSError as error: refused = type(error).__name__
    sent["tcp"] += 1
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP) as s:
    for _ in range(5):
        try: s.sendto(b"\\x08\\0\\0\\0\\0\\0\\0\\0", (address, 0))
        except OSError: continue
        sent["icmp"] += 1
json.dump({**sent, "refused": refused}, open("sent", "w"))
open("tried", "w").close()
"""
FLOOD_ON = """\
import os, socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
open("flooding", "w").close()
end = time.monotonic() + 150
while not os.path.exists("over") and time.monotonic() < end:
    # Many ports: each is a destination of its own.
    for port in range(20000, 20400):
        try: s.sendto(b"flood", (sys.argv[1], port))
        except OSError: pass
"""
ONE = """\
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.sendto(b"one", (sys.argv[1], int(sys.argv[2])))
"""
HOLD = "; while [ ! -e over ]; do sleep 0.1; done"


@pytest.fixture(autouse=True, scope="module")
def image(installed: Box) -> None:
    """The image is there before the first session: building it takes longer than a session may take to start."""
    project = Project(installed, f"{installed.home}/Projects/image")
    project.policy(BASE_POLICY)
    project.corral("build", timeout=400)
    project.end()


def report(project: Project, *words: str) -> dict[str, Any]:
    return dict(json.loads(project.corral("denied", "--json", *words).stdout))


def listed(project: Project, *words: str) -> dict[tuple[str, str, int | None], dict[str, Any]]:
    rows = report(project, *words)["rows"]
    return {(row["protocol"], row["address"], row["port"]): row for row in rows}


def found(project: Project, key: tuple[str, str, int | None], *words: str) -> dict[str, Any]:
    """Wait for a row, which the kernel sends within a tenth of a second."""
    until(lambda: key in listed(project, *words), 10, f"{key} is listed")
    return listed(project, *words)[key]


@pytest.mark.representative
def test_three_kinds_of_forbidden_packets_are_listed_with_their_exact_number(host: Host) -> None:
    forbidden = host.internet.addresses["forbidden"]
    project = host.project("kinds")
    project.write("kinds.py", THREE_KINDS)
    process = project.start("sh", "-c", f"python3 kinds.py {forbidden}{HOLD}", marker="tried")
    sent = json.loads(project.read("sent"))
    assert sent["udp"] > 15000
    assert sent["refused"] == "ConnectionRefusedError"
    udp = found(project, ("udp", forbidden, 9))
    rows = listed(project)
    assert set(rows) == {("udp", forbidden, 9), ("tcp", forbidden, 8443), ("icmp", forbidden, None)}
    assert {key[0]: row["count"] for key, row in rows.items()} == {
        kind: sent[kind] for kind in ("udp", "tcp", "icmp")
    }
    assert not any(row["at_least"] for row in rows.values())
    assert rows["icmp", forbidden, None]["icmp_type"] == 8
    session = project.sandbox["sessions"][0]
    assert (udp["service"], udp["session"], udp["sandbox"]) == (
        session["service"],
        session["session"],
        project.sandbox["sandbox"],
    )
    total = sum(sent[kind] for kind in ("udp", "tcp", "icmp"))
    (sandbox,) = report(project)["sandboxes"]
    assert (sandbox["denied"], sandbox["unlisted"]) == (total, 0)
    assert session["denied"] == total
    assert host.internet.packets(forbidden) == 0
    table = project.corral("denied").stdout
    assert "\033" not in table
    (line,) = [line for line in table.splitlines() if " udp " in line]
    # What comes behind depends on whether any policy ever resolved a name to this address.
    assert f" {forbidden} 9 {sent['udp']} " in " ".join(line.split())
    project.write("over", "")
    process.wait(timeout=30)
    # A session that has ended is told of all the same.
    assert listed(project)["udp", forbidden, 9]["count"] == sent["udp"]
    host.control(forbidden)


@pytest.mark.representative
def test_a_flood_hides_neither_another_sandbox_nor_the_same_ones_other_attempts(host: Host) -> None:
    forbidden = host.internet.addresses["forbidden"]
    loud, quiet = host.project("loud"), host.project("quiet")
    loud.write("flood.py", FLOOD_ON)
    quiet.write("one.py", ONE)
    process = loud.start("python3", "flood.py", forbidden, marker="flooding")
    quiet.inside("python3", "one.py", forbidden, "4444")
    row = found(quiet, ("udp", forbidden, 4444))
    assert (row["count"], row["at_least"]) == (1, False)
    assert process.poll() is None, "the flood was over too early to prove anything"
    # What the rate of the log leaves out is told as a number.
    (sandbox,) = report(loud)["sandboxes"]
    assert sandbox["unlisted"] > 0
    assert "of them not listed" in loud.corral("denied").stdout
    loud.write("over", "")
    process.wait(timeout=30)
    assert host.internet.packets(forbidden) == 0


def test_the_start_check_is_not_taken_for_the_programs_doing(host: Host) -> None:
    project = host.project("gate")
    project.inside("true")
    project.corral("verify", check=False)
    until(lambda: listed(project, "--all"), 10, "the gate's packets are told")
    assert listed(project) == {}
    assert project.corral("denied").stdout == "", "quiet in a pipe"
    rows = report(project, "--all")["rows"]
    mine = [row for row in rows if row["sandbox"].startswith("gate-")]
    assert {("tcp", 443), ("udp", 53), ("tcp", 53)} <= {(row["protocol"], row["port"]) for row in mine}
    assert all(row["check"] for row in mine)
    (sandbox,) = report(project)["sandboxes"]
    assert sandbox["denied"] == 0


def test_names_tell_what_to_allow_and_what_must_stay_closed(host: Host) -> None:
    lying = "    - {host: lying.corral.example, optional: true}\n"
    project = host.project("names", BASE_POLICY + lying)
    host.internet.set_name("lying.corral.example", ["198.18.0.9"])
    project.inside("true")
    # A policy that knew the name is enough, in another sandbox too.
    other = host.project(
        "other", "profile: opencode\negress: {profile_defaults: false}\nlimits: {best_effort: true}\n"
    )
    other.write("one.py", ONE)
    script = (
        "import socket\n"
        "for address, port in (('203.0.113.10', 443), ('198.18.0.9', 443), ('203.0.113.20', 8080)):\n"
        "    with socket.socket() as s:\n"
        "        s.settimeout(3)\n"
        "        try: s.connect((address, port))\n"
        "        except OSError: pass\n"
    )
    other.inside("python3", "-c", script)
    row = found(other, ("tcp", "203.0.113.10", 443))
    assert row["hint"] == "add allowed1.corral.example to egress.allow"
    refused = found(other, ("tcp", "198.18.0.9", 443))
    assert refused["note"].startswith("refused answer of lying.corral.example")
    assert refused["hint"] is None
    project.inside("python3", "-c", script)
    port = found(project, ("tcp", "203.0.113.20", 8080))
    assert port["hint"] == "allowed2.corral.example is allowed on 443: add port 8080 to it in egress.allow"


def test_questions_to_resolvers_are_listed_and_those_to_the_dead_one_counted(host: Host) -> None:
    project = host.project("dns")
    gateway_asks = "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto(b'x', ('203.0.113.66', 53))"
    project.write("ask.py", gateway_asks)
    script = "sleep 6; python3 ask.py; getent hosts forbidden.corral.example; touch asked" + HOLD
    mark = host.internet.mark()
    process = project.start("sh", "-c", script, marker="asked")
    row = found(project, ("udp", "203.0.113.66", 53))
    assert row["dns"]
    assert "DNS" in row["note"]

    def asked() -> int:
        return int(project.sandbox["sessions"][0]["dead_resolver"] or 0)

    until(lambda: asked() >= 2, 10, "the lookup at the dead resolver is counted")
    assert "dead resolver was asked" in project.corral("denied").stdout
    assert not [query for query in host.internet.queries(mark) if query.name == "forbidden.corral.example"]
    project.write("over", "")
    process.wait(timeout=30)


def test_following_survives_a_restart_of_the_enforcer_and_ends_when_told(host: Host) -> None:
    forbidden = host.internet.addresses["forbidden"]
    project = host.project("follow")
    project.write("one.py", ONE)
    script = (
        "touch up; while [ ! -e one ]; do sleep 0.1; done; python3 one.py $1 1001;"
        " while [ ! -e two ]; do sleep 0.1; done; python3 one.py $1 1002"
    )
    process = project.start("sh", "-c", script + HOLD, "sh", forbidden, marker="up")
    project.box.run(["rm", "-f", "followed", "notices"], cwd=project.path)
    following = project.box.popen(
        ["bash", "-c", "echo $$ >pid; exec corral denied --follow >followed 2>notices"], cwd=project.path
    )
    project.started.append(following)
    project.write("one", "")
    project.box.wait_for(lambda: " 1001 " in project.read("followed"), timeout=20)
    pid = host.enforcer_pid()
    host.root("kill", "-9", str(pid))
    host.box.wait_for(lambda: host.enforcer_pid() not in (0, pid), timeout=20)
    project.write("two", "")
    project.box.wait_for(lambda: " 1002 " in project.read("followed"), timeout=30)
    assert "the enforcer was restarted" in project.read("notices")
    # What was written before is not written again.
    assert project.read("followed").count(" 1001 ") == 1
    assert found(project, ("udp", forbidden, 1001))["session"] == project.sandbox["sessions"][0]["session"]
    project.box.run(["kill", "-INT", project.read("pid").strip()])
    assert following.wait(timeout=20) == 128 + signal.SIGINT
    assert "Traceback" not in project.read("notices")
    project.write("over", "")
    process.wait(timeout=30)


def test_following_ends_by_itself_when_the_reader_goes(host: Host) -> None:
    project = host.project("pipe")
    project.inside("true")
    done = project.box.run(
        ["bash", "-c", "(echo $BASHPID >pid; exec corral denied --all --follow) | head -n 2"],
        cwd=project.path,
        check=False,
        timeout=60,
    )
    assert len(done.stdout.splitlines()) == 2
    assert "Traceback" not in done.stderr
    until(
        lambda: host.box.run(["kill", "-0", project.read("pid").strip()], check=False).returncode != 0,
        20,
        "nobody follows any more",
    )


@pytest.fixture
def eve(host: Host) -> Iterator[Eve]:
    made = Eve(host.box)
    made.arrive()
    try:
        yield made
    finally:
        host.shell(f"loginctl disable-linger eve; systemctl stop user@{EVE}", user="root", check=False)


ASK = """\
import json, socket
s = socket.socket(socket.AF_UNIX); s.connect("/run/corral/netfilter.sock")
body = {"v": 2, "op": "denied", "epoch": "", "after": 0, "sources": ["%s"], "tallies": True}
s.sendall(json.dumps(body).encode() + b"\\n")
print(s.makefile().readline())
"""


def test_another_user_is_told_nothing(host: Host, eve: Eve) -> None:
    forbidden = host.internet.addresses["forbidden"]
    project = host.project("mine")
    project.write("flood.py", FLOOD_ON)
    process = project.start("python3", "flood.py", forbidden, marker="flooding")
    source = project.sandbox["sessions"][0]["address"]
    until(lambda: len(listed(project)) > 20, 20, "the owner is told")
    answer = json.loads(eve.run("python3", "-c", ASK % source).stdout)
    assert answer["ok"]
    assert (answer["records"], answer["tallies"], answer["totals"]) == ([], [], {})
    assert (answer["next"], answer["lost"]) == (0, 0)
    project.write("over", "")
    process.wait(timeout=30)


@pytest.mark.representative
def test_metrics_are_what_prometheus_reads_and_move_with_what_happens(host: Host) -> None:
    forbidden = host.internet.addresses["forbidden"]
    project = host.project("metrics")
    project.write("one.py", ONE)
    process = project.start(
        "sh", "-c", f"sleep 6; python3 one.py {forbidden} 77; touch sent{HOLD}", marker="sent"
    )
    found(project, ("udp", forbidden, 77))
    samples = scraped(host)
    sandbox = project.sandbox["sandbox"]
    assert samples[f'corral_denied_packets_total{{sandbox="{sandbox}"}}'] == 1
    assert samples["corral_pins"] >= 2
    assert samples['corral_sessions{state="running"}'] == 1
    assert samples["corral_writer_up"] == samples["corral_docker_up"] == 1
    assert samples['corral_refreshes_total{result="answered"}'] >= 2
    assert samples["corral_apply_seconds_count"] >= 1
    repairs = samples["corral_repairs_total"]
    host.netadmin("iptables", "-F", "DOCKER-USER")
    until(lambda: scraped(host)["corral_repairs_total"] > repairs, 10, "the repair is counted")
    told = project.corral("metrics").stdout
    assert told.startswith("# HELP corral_")
    project.write("over", "")
    process.wait(timeout=30)


def scraped(host: Host) -> dict[str, float]:
    done = host.shell(
        "curl -sS --unix-socket $XDG_RUNTIME_DIR/corral/enforcer.sock -D /tmp/heads http://corral/metrics"
    )
    assert "text/plain; version=0.0.4" in host.shell("cat /tmp/heads").stdout
    lines = [line for line in done.stdout.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


@pytest.mark.representative
def test_the_writers_unit_stays_as_closed_as_it_is_promised(host: Host) -> None:
    unit = "/etc/systemd/system/corral-netfilter.service"
    done = host.root("systemd-analyze", "security", "--offline=true", "--threshold=20", unit, check=False)
    assert done.returncode == 0, done.stdout
    # And it does read the log within that.
    assert (
        "refused packets"
        not in host.root("journalctl", "-b", "-u", "corral-netfilter", "--no-pager", "-o", "cat").stdout
    )
