"""Names of running sessions: changed by hand, rotated by a CDN, watched from outside all the while."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import ipsetdump

from .host import ENFORCER, PYTHON, Host, Project, until
from .scriptdns import LOG, ScriptDns, always, script_dns, steps, warm
from .test_cases_names import GOOD, TWIN, held, names_of, policy

CDN = "cdn.corral.example"
# Never the name of another test: what was answered to one within ten minutes may still linger.
ROVING = "roving.corral.example"
POOL = [f"203.0.113.{number}" for number in range(150, 190)]
ROTATIONS = 100
CLIENTS, STREAMS = 20, 5

# Connects as any program does: a lookup, TLS, a request. Says how many did and did not work, and why.
CLIENT = """\
import asyncio, json, os, ssl, sys, time
name, clients, streams = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
context = ssl.create_default_context()
told = {"connected": 0, "failed": [], "streams": 0, "broken": []}
def going():
    return not os.path.exists("stop")
async def request(path):
    reader, writer = await asyncio.wait_for(asyncio.open_connection(name, 443, ssl=context), 20)
    writer.write(f"GET {path} HTTP/1.1\\r\\nHost: {name}\\r\\nConnection: close\\r\\n\\r\\n".encode())
    return reader, writer
async def client():
    while going():
        began = time.monotonic()
        try:
            reader, writer = await request("/")
            data = await asyncio.wait_for(reader.read(), 20)
            assert b"200 OK" in data, data
            writer.close()
            told["connected"] += 1
        except Exception as error:
            told["failed"].append(repr(error))
        await asyncio.sleep(max(0.0, 0.1 - (time.monotonic() - began)))
async def stream():
    try:
        reader, writer = await request("/stream?interval=0.2&count=100000")
        told["streams"] += 1
        while going():
            assert await asyncio.wait_for(reader.read(100), 20), "ended"
        writer.close()
    except Exception as error:
        told["broken"].append(repr(error))
async def main():
    held = [asyncio.create_task(stream()) for _ in range(streams)]
    while told["streams"] < streams and not told["broken"]:
        await asyncio.sleep(0.05)
    open("up", "w").close()
    await asyncio.gather(*held, *(client() for _ in range(clients)))
asyncio.run(main())
with open("told.new", "w") as file:
    json.dump(told, file)
os.rename("told.new", "told")
"""

# From outside, as fast as it can: the hosts file, then the kernel, then what the name server has answered.
SAMPLER = """
import json, os, sys, time
hosts, source, log, stop, wanted = sys.argv[1:6]
wanted = set(wanted.split(","))
kernel, answered, lines = Dump("corral-pins"), set(), open(log)
samples, bad, bare, began = 0, [], 0, time.monotonic()
while not os.path.exists(stop):
    text = open(hosts).read()
    rows = [line.split() for line in text.splitlines()]
    shown = {row[0] for row in rows if len(row) == 2 and row[1] in wanted and row[0] != "#"}
    names = {row[1] for row in rows if len(row) == 2 and row[0] != "#"}
    allowed = {destination for element, destination in kernel.pairs() if element == source}
    for line in lines:
        answered.update(line.split()[2].split(","))
    samples += 1
    if not shown <= allowed:
        bad.append(["published, not allowed", sorted(shown - allowed)])
    if not allowed <= answered:
        bad.append(["allowed, never answered", sorted(allowed - answered)])
    if not wanted <= names:
        bare += 1
seconds = time.monotonic() - began
print(json.dumps({"samples": samples, "rate": samples / seconds, "bad": bad[:5], "violations": len(bad), "bare": bare}))
"""

# Many refreshes in a row, without a process for each.
REFRESH = """\
import os, sys, time
from pathlib import Path
from enforcer.client import Client, socket_path
client, sandbox = Client(socket_path(os.environ)), sys.argv[1]
for number in range(int(sys.argv[2])):
    client.refresh(sandbox)
    time.sleep(0.05)
print("done")
"""


@pytest.fixture
def dns(host: Host) -> Iterator[ScriptDns]:
    with script_dns(host) as made:
        yield made


class Sampler:
    """Watches one session from outside until it is asked what it saw."""

    def __init__(self, host: Host, project: Project, *wanted: str) -> None:
        self.host, self.stop = host, "/tmp/sampler.stop"
        host.root("rm", "-f", self.stop)
        row = project.sandbox
        session = row["sessions"][0]
        data = f"{host.box.home}/.local/share/corral/{row['sandbox']}"
        found = host.root("find", data, "-path", f"*{session['session']}*", "-name", "hosts").stdout.strip()
        text = Path(ipsetdump.__file__).read_text() + SAMPLER
        argv = [
            *host.engine.entering(),
            PYTHON,
            "-c",
            text,
            found,
            session["address"],
            LOG,
            self.stop,
            ",".join(wanted),
        ]
        self.process = host.box.popen(argv, user="root", stdout=subprocess.PIPE, text=True)

    def seen(self) -> dict[str, Any]:
        self.host.root("touch", self.stop)
        out, _ = self.process.communicate(timeout=30)
        found: dict[str, Any] = json.loads(out)
        print(
            f"I1, I2: {found['samples']} samples, {found['rate']:.0f} a second, {found['violations']} violations, "
            f"{found['bare']} times without an address"
        )
        return found


def finished(project: Project) -> dict[str, Any]:
    project.write("stop", "")
    project.box.wait_for(lambda: project.exists("told"), timeout=60)
    told: dict[str, Any] = json.loads(project.read("told"))
    print({key: len(value) if isinstance(value, list) else value for key, value in told.items()})
    return told


@pytest.mark.case(16)
def test_a_hundred_rotations_of_a_cdn_fail_no_connection_and_break_no_stream(
    host: Host, dns: ScriptDns
) -> None:
    dns.play({CDN: steps({"a": POOL, "window": 3, "ttl": 5})})
    project = host.project("rotating", policy(CDN))
    project.write("client.py", CLIENT)
    project.start("python3", "client.py", CDN, str(CLIENTS), str(STREAMS), marker="up")
    sampler = Sampler(host, project, CDN)
    host.internet.reset_counters()
    done = host.box.run([PYTHON, "-c", REFRESH, project.sandbox["sandbox"], str(ROTATIONS)], timeout=240)
    assert done.stdout == "done\n"
    seen, told = sampler.seen(), finished(project)
    assert (seen["violations"], seen["bad"], seen["bare"]) == (0, [], 0)
    assert seen["samples"] > 100
    assert told["failed"] == []
    assert told["broken"] == []
    assert told["streams"] == STREAMS
    assert told["connected"] > ROTATIONS
    answered = dns.answered(CDN)
    assert len(answered) >= len(POOL)
    # The box itself asks its own resolver for what it needs.
    sent = {key[1] for key in host.internet.all_packets() if key[1].startswith("203.0.113.")}
    sent.discard(host.internet.addresses["resolver"])
    assert sent - answered == set()
    assert len(sent & answered) > 10
    # The positive control: a packet to an address that no answer had is counted.
    host.box.run(["bash", "-c", "echo x >/dev/udp/203.0.113.250/9"])
    assert host.internet.packets("203.0.113.250") == 1


def test_published_is_allowed_and_allowed_was_answered_through_kills_and_an_outage(
    host: Host, dns: ScriptDns
) -> None:
    pool = {"a": POOL[:8], "pick": 1, "ttl": 5}
    dns.play({ROVING: steps(pool)})
    project = host.project("sampled", policy(ROVING))
    download = f"touch up; curl -sS -m 200 --limit-rate 200k -o got 'https://{ROVING}/bytes?count=6000000'; echo $? > code; sleep 100"
    project.start("sh", "-c", download, marker="up")
    ident = project.sandbox["sandbox"]
    sampler = Sampler(host, project, ROVING)
    for turn in range(6):
        host.box.run([PYTHON, "-c", REFRESH, ident, "8"], timeout=120)
        if turn % 2:
            dns.play({ROVING: steps({"drop": True})})
            project.corral("refresh", check=False)
            dns.play({ROVING: steps(pool)})
        else:
            host.user_systemctl("reset-failed", ENFORCER, check=False)
            host.root("kill", "-9", str(host.enforcer_pid()))
            host.wait_enforcer()
    project.box.wait_for(lambda: project.exists("code"), timeout=120)
    seen = sampler.seen()
    assert (seen["violations"], seen["bad"], seen["bare"]) == (0, [], 0)
    assert project.read("code") == "0\n"
    assert host.box.run(["stat", "-c", "%s", f"{project.path}/got"]).stdout == "6000000\n"
    assert len(dns.answered(ROVING)) > 4


# Asks about each HOST:PORT in one process, as corral policy check does.
CHECK = """\
import json, os, sys
from enforcer.client import Client, socket_path
client = Client(socket_path(os.environ))
for target in sys.argv[2:]:
    host, _, port = target.rpartition(":")
    (row,) = client.check(sys.argv[1], host, int(port))["sessions"]
    print(target, int(row["allowed"]))
"""
PROBE = """\
for target in "$@"; do
    timeout 5 bash -c "exec 3<>/dev/tcp/${target%:*}/${target##*:}" 2>/dev/null && echo "$target 1" || echo "$target 0"
done
"""


def probed(host: Host, project: Project, *targets: str) -> dict[str, bool]:
    """Say what a program in the running session can connect to, asked from outside with docker exec."""
    name = project.containers()[0]
    words = ["docker", "exec", "-u", host.engine.agent, name, "bash", "-c", PROBE, "probe", *targets]
    return answers(host.box.run(words, timeout=120).stdout)


def answers(text: str) -> dict[str, bool]:
    return {target: answer == "1" for target, answer in (line.split() for line in text.splitlines())}


def check(project: Project, target: str) -> dict[str, Any]:
    done = project.corral("policy", "check", target, "--json", check=False)
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == int(not found["allowed"])
    return found


def test_a_running_session_is_changed_by_hand_and_every_answer_agrees_with_a_real_probe(
    host: Host, dns: ScriptDns
) -> None:
    late = "late.corral.example"
    script = {GOOD: always("203.0.113.160"), TWIN: always("203.0.113.161"), late: always("203.0.113.162")}
    dns.play(script)
    project = host.project("changed", policy(GOOD, f"{{host: {TWIN}, ports: [443, 80]}}"))
    before = check(project, f"{GOOD}:443")
    assert before["allowed"]
    assert before["resolution"]["addresses"] == ["203.0.113.160"]
    stream = f"curl -sSN --speed-limit 1 --speed-time 3 'https://{TWIN}/stream?interval=0.1&count=100000' > stream; echo $? > cut"
    project.start(
        "sh", "-c", f"({stream}) & until [ -s stream ]; do sleep 0.1; done; touch up; sleep 300", marker="up"
    )
    started, ident = project.containers(), project.sandbox["sandbox"]
    hosts = [GOOD, TWIN, late, "other.corral.example", *(f"203.0.113.16{number}" for number in (0, 1, 2))]
    targets = [
        *(f"{name}:{port}" for name in hosts for port in (443, 80)),
        "203.0.113.66:443",
        "169.254.169.254:80",
    ]

    def agrees() -> set[str]:
        """Return what can be reached; what is said and what a program finds are the same."""
        real = probed(host, project, *targets)
        said = answers(host.box.run([PYTHON, "-c", CHECK, ident, *targets], timeout=120).stdout)
        assert said == real
        return {target for target, reached in real.items() if reached}

    first = agrees()
    assert first == {
        f"{GOOD}:443", f"{TWIN}:443", f"{TWIN}:80", "203.0.113.160:443", "203.0.113.161:443", "203.0.113.161:80",
    }  # fmt: skip
    assert not check(project, f"{late}:443")["allowed"]
    done = project.corral("allow", late, "--for", "1h")
    assert "203.0.113.162" in done.stdout
    assert agrees() - first == {f"{late}:443", "203.0.113.162:443"}
    assert check(project, f"{late}:443")["allowed"]
    assert 3500 < names_of(project)[late]["granted"]["443"] <= 3600
    assert "was allowed by hand" in project.corral("status").stdout
    # A process that knows nothing of it takes over: still so.
    host.user_systemctl("restart", ENFORCER)
    host.wait_enforcer()
    until(lambda: ("203.0.113.162", 443) in held(host, project), 20, "the restarted service has it")
    project.corral("deny", late)
    assert not project.exists("cut")
    project.corral("deny", TWIN)
    took = until(lambda: project.exists("cut"), 10, "the open connection is cut")
    print(f"cut after {took:.2f} s")
    assert project.read("cut") != "0\n"
    assert agrees() == {f"{GOOD}:443", "203.0.113.160:443"}
    dns.play({**script, GOOD: always("203.0.113.170")})
    assert "+203.0.113.170" in project.corral("refresh", GOOD).stdout
    assert probed(host, project, f"{GOOD}:443") == {f"{GOOD}:443": True}
    project.corral("allow", late, "--for", "3s")
    until(lambda: not probed(host, project, f"{late}:443")[f"{late}:443"], 15, "a temporary permission ends")
    project.corral("allow", late, "--save")
    assert project.read("corral.yaml").endswith(f"    - {late}\n")
    assert project.containers() == started
    refused = project.corral("allow", "nowhere.corral.example", check=False)
    assert refused.returncode == 1
    assert "nowhere.corral.example is not allowed" in refused.stderr


@pytest.mark.representative
def test_a_name_follows_its_answers_and_a_temporary_permission_ends_though_the_enforcer_is_dead(
    host: Host, dns: ScriptDns
) -> None:
    late = "later.corral.example"
    dns.play({GOOD: always("203.0.113.180"), late: always("203.0.113.181")})
    project = host.project("ending", policy(GOOD))
    project.start("sh", "-c", "touch up; sleep 300", marker="up")
    sampler = Sampler(host, project, GOOD)
    assert probed(host, project, f"{GOOD}:443", f"{late}:443") == {f"{GOOD}:443": True, f"{late}:443": False}
    dns.play({GOOD: always("203.0.113.182"), late: always("203.0.113.181")})
    assert "+203.0.113.182" in project.corral("refresh", GOOD).stdout
    seen = sampler.seen()
    assert (seen["violations"], seen["bad"], seen["bare"]) == (0, [], 0)
    project.corral("allow", late, "--for", "15s")
    assert probed(host, project, f"{GOOD}:443", f"{late}:443") == {f"{GOOD}:443": True, f"{late}:443": True}
    host.user_systemctl("stop", ENFORCER)
    try:
        assert ("203.0.113.181", 443) in held(host, project)
        until(lambda: ("203.0.113.181", 443) not in held(host, project), 40, "the kernel lets go of it")
        # Closed, and what has no end stays.
        assert probed(host, project, f"{GOOD}:443", f"{late}:443") == {
            f"{GOOD}:443": True,
            f"{late}:443": False,
        }
    finally:
        host.user_systemctl("start", ENFORCER)
        host.wait_enforcer()
    assert probed(host, project, f"{late}:443") == {f"{late}:443": False}


def test_an_interface_with_the_address_of_a_name_revokes_it_at_once(host: Host, dns: ScriptDns) -> None:
    dns.play({GOOD: always("203.0.113.171"), TWIN: always("203.0.113.172")})
    project = host.project("revoked", policy(GOOD, TWIN))
    project.start("sh", "-c", "touch up; sleep 300", marker="up")
    assert held(host, project) == {("203.0.113.171", 443), ("203.0.113.172", 443)}
    host.shell(
        "ip tuntap add vpn1 mode tun; ip link set vpn1 up; ip addr add 203.0.113.171/32 dev vpn1", user="root"
    )
    try:
        took = until(lambda: held(host, project) == {("203.0.113.172", 443)}, 5, "it is revoked")
        print(f"revoked after {took:.2f} s")
        assert names_of(project)[GOOD]["state"] in ("REVOKED", "REFUSED")
    finally:
        host.root("ip", "link", "del", "vpn1")
    until(lambda: ("203.0.113.171", 443) in held(host, project), 60, "it is allowed again")


def test_another_resolver_is_asked_for_everything_at_once(host: Host) -> None:
    """The host's resolv.conf changes, as a VPN does it."""
    name = "allowed1.corral.example"
    warm(host)
    with host.box.resolver("stub"):
        host.user_systemctl("restart", ENFORCER)
        host.wait_enforcer()
        project = host.project("moved")
        project.start("sh", "-c", "touch up; sleep 300", marker="up")
        mark = host.internet.mark()
        host.box.use_resolver("routable")
        until(lambda: host.internet.queries(mark, name), 10, "the new resolver is asked")
        assert names_of(project)[name]["state"] == "OK"
