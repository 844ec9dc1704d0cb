"""A sandbox whose policy says ``egress.dns: answer``: programs that know no proxy reach names of a zone."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from .host import BASE_POLICY, ENFORCER, Host, Project, until
from .nameserver import name_server

ZONE = "zone.corral.example"
ONE, TWO, LIES, HALF = (f"{label}.{ZONE}" for label in ("one", "two", "lies", "half"))
LISTED, OTHER = "allowed1.corral.example", "forbidden.corral.example"
FIRST, SECOND = "203.0.113.170", "203.0.113.171"
POLICY = f"""\
profile: opencode
limits:
  best_effort: true
egress:
  profile_defaults: false
  dns: answer
  allow:
    - {LISTED}
    - {{host: "*.{ZONE}", ports: [443, 7]}}
"""
CURL = ("curl", "--noproxy", "*", "-sk", "-m", "5", "-o", "/dev/null", "-w", "%{remote_ip} %{http_code}")

# Sends and waits for the echo ten times a second; says on which place it is, and when it was cut.
STREAM = """\
import os, socket, sys, time
name, port = sys.argv[1], int(sys.argv[2])
s = socket.create_connection((name, port), timeout=5)
beats = 0
try:
    while True:
        s.sendall(b"x")
        if not s.recv(1): raise OSError("ended")
        beats += 1
        with open("beats.new", "w") as f: f.write(str(beats))
        os.replace("beats.new", "beats")
        time.sleep(0.1)
except OSError as error:
    with open("cut", "w") as f: f.write(type(error).__name__)
time.sleep(300)
"""
# Asks a server itself for a name, past the container's resolver: what comes of TCP, and whether UDP is answered.
ASK = """\
import os, socket, struct, sys
server, name = sys.argv[1:]
body = b"".join(bytes([len(x)]) + x.encode() for x in name.split(".")) + bytes(1) + struct.pack("!HH", 1, 1)
message = os.urandom(2) + struct.pack("!HHHHH", 256, 1, 0, 0, 0) + body
def said(data): return f"{data[3] & 15}/{struct.unpack('!H', data[6:8])[0]}"
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); udp.settimeout(3); udp.connect((server, 53))
try:
    udp.send(message); print("udp", said(udp.recv(4096)))
except OSError as error: print("udp", type(error).__name__)
try:
    tcp = socket.create_connection((server, 53), timeout=3)
    tcp.sendall(struct.pack("!H", len(message)) + message)
    print("tcp", said(tcp.makefile("rb").read(2 + 12)[2:]))
except OSError as error: print("tcp", type(error).__name__)
"""


def resolved(project: Project, name: str, *before: str) -> list[str]:
    """Return the addresses the C library has for a name; none: it does not exist."""
    done = project.inside(*before, "getent", "ahostsv4", name, check=False)
    assert done.returncode in (0, 2), done
    return list(dict.fromkeys(line.split()[0] for line in done.stdout.splitlines() if line[:1].isdigit()))


def in_session(host: Host, project: Project, *argv: str) -> Any:
    """Run a program in the session that runs already."""
    sessions = [row for row in project.sandbox["sessions"] if row["service"] == "main"]
    command = ["docker", "exec", "-w", project.path, sessions[0]["container"], *argv]
    return host.box.run(command, check=False, timeout=60)


def asked_for(host: Host, mark: int) -> set[str]:
    """Return the names that the far end was asked for since; the listed one is asked for all the time."""
    return {query.name for query in host.internet.queries(mark)} - {LISTED}


def asked_rows(project: Project) -> str:
    return project.corral("denied", "--json").stdout


@pytest.mark.engine("rootless", reason="elsewhere the gateway is the host's, where names are answered")
def test_with_an_engine_of_the_users_own_it_is_refused_and_nothing_is_started(host: Host) -> None:
    project = host.project("answered", POLICY)
    done = project.inside("touch", "ran", check=False)
    assert done.returncode == 1, done
    assert not project.exists("ran")
    assert project.containers() == []
    # The control: without it the same project starts.
    project.policy(BASE_POLICY)
    assert project.inside("touch", "ran").returncode == 0


@pytest.mark.representative
def test_a_program_without_a_proxy_reaches_names_of_the_zone_and_nothing_else(host: Host) -> None:
    host.internet.set_name(ONE, [FIRST])
    host.internet.set_name(TWO, [SECOND])
    project = host.project("answered", POLICY)
    project.corral("build", timeout=400)
    first = project.inside(*CURL, f"https://{ONE}/")
    assert first.stdout.splitlines()[-1] == f"{FIRST} 200"
    assert "OK: names of the policy are answered, others are not" in first.stderr
    assert project.inside(*CURL, f"https://{LISTED}/").stdout.splitlines()[-1].endswith("200")
    assert resolved(project, TWO, "env", "RES_OPTIONS=use-vc") == [SECOND]
    # A name that is not permitted does not exist, and nobody outside hears of it.
    mark = host.internet.mark()
    secret = "s3cr3t.corral.example"
    for name in (OTHER, secret, ZONE, f"{ZONE}.evil.example.com"):
        assert resolved(project, name) == []
        assert resolved(project, name, "env", "RES_OPTIONS=use-vc") == []
    # An address that nobody was told is closed, though it is of a name in the policy.
    host.internet.reset_counters()
    for address in (SECOND, host.internet.addresses["forbidden"]):
        refused = project.inside(*CURL, f"https://{address}/", check=False)
        assert refused.returncode == 7, refused
        assert host.internet.packets(address) == 0
    # The control of both zeros.
    three = f"three.{ZONE}"
    host.internet.set_name(three, [SECOND])
    assert project.inside(*CURL, f"https://{three}/").stdout.splitlines()[-1] == f"{SECOND} 200"
    assert host.internet.packets(SECOND, "tcp", 443) > 0
    assert asked_for(host, mark) == {three}
    told = asked_rows(project)
    for name in (OTHER, secret, ZONE):
        assert name in told
    assert "corral-gate" not in told


@pytest.mark.representative
def test_resolvers_outside_hear_nothing_and_the_gateway_answers_as_the_container_s_own_does(
    host: Host,
) -> None:
    host.internet.set_name(ONE, [FIRST])
    project = host.project("asked", POLICY)
    project.start("sh", "-c", "touch up; sleep 300", marker="up")
    gateway, resolver = project.sandbox["gateway"], host.internet.addresses["resolver"]
    for server in ("127.0.0.11", gateway):
        assert in_session(host, project, "python3", "-c", ASK, server, ONE).stdout == "udp 0/1\ntcp 0/1\n"
        refused = in_session(host, project, "python3", "-c", ASK, server, OTHER).stdout
        assert refused == "udp 3/0\ntcp 3/0\n"
    public = host.internet.addresses["forbidden"]
    host.internet.reset_counters()
    mark = host.internet.mark()
    for server in (resolver, public):
        said = in_session(host, project, "python3", "-c", ASK, server, "leak.corral.example").stdout
        assert "/" not in said, said
    assert host.internet.packets(public) == 0
    assert asked_for(host, mark) == set()
    # The control: from a container that is not fenced it is heard.
    host.plain("python3", "-c", ASK, resolver, "leak.corral.example")
    assert asked_for(host, mark) == {"leak.corral.example"}


def test_addresses_rotate_and_an_open_stream_lives_through_that_and_a_restart(host: Host) -> None:
    host.internet.set_name(ONE, [FIRST], ttl=1)
    project = host.project("rotates", POLICY)
    project.write("stream.py", STREAM)
    project.start("python3", "stream.py", ONE, "7", marker="beats")
    host.internet.set_name(ONE, [SECOND], ttl=1)

    def turned() -> bool:
        done = in_session(host, project, "getent", "ahostsv4", ONE)
        print(f"{time.monotonic():.1f}", done.returncode, done.stdout.split())
        return SECOND in done.stdout

    until(turned, 60, "the new address is told")
    assert in_session(host, project, *CURL, f"https://{ONE}/").stdout == f"{SECOND} 200"
    before = int(project.read("beats"))
    host.user_systemctl("restart", ENFORCER)
    host.wait_enforcer()
    until(turned, 60, "names are answered again")
    until(lambda: int(project.read("beats")) > before + 20, 20, "the stream goes on")
    assert not project.exists("cut")


def test_a_name_that_leads_inside_is_not_told_and_is_shown(host: Host) -> None:
    project = host.project("lied", POLICY)
    public = host.internet.addresses["forbidden"]
    with name_server(host) as server:
        server.modes({LIES: "lie:10.9.9.9,169.254.169.254", HALF: f"lie:10.9.9.9,{public}"})
        assert resolved(project, LIES) == []
        assert resolved(project, HALF) == [public]
        for address in ("10.9.9.9", "169.254.169.254"):
            refused = project.inside(*CURL, f"https://{address}/", check=False)
            assert refused.returncode == 7, refused
            assert host.internet.packets(address) == 0
        report = json.loads(asked_rows(project))
        assert LIES in json.dumps(report), report
        shown = project.corral("denied").stdout
        assert LIES in shown
        assert "10.9.9.9" in shown


def test_denying_a_name_cuts_its_streams_and_it_is_not_answered_any_more(host: Host) -> None:
    # Two names have one address.
    host.internet.set_name(ONE, [FIRST])
    host.internet.set_name(TWO, [FIRST])
    project = host.project("denies", POLICY)
    project.write("stream.py", STREAM)
    project.start("python3", "stream.py", ONE, "7", marker="beats")
    assert FIRST in in_session(host, project, "getent", "ahostsv4", ONE).stdout
    project.corral("deny", ONE)
    started = time.monotonic()
    until(lambda: project.exists("cut"), 10, "the stream was cut")
    print(f"cut {time.monotonic() - started:.1f} s after the command")
    mark = host.internet.mark()
    assert in_session(host, project, "getent", "ahostsv4", ONE).returncode == 2
    host.internet.reset_counters()
    assert in_session(host, project, *CURL, f"https://{FIRST}/").returncode == 7
    assert host.internet.packets(FIRST) == 0
    # What is denied is the name: the other still opens the address, and it itself has none all the same.
    assert in_session(host, project, *CURL, f"https://{TWO}/").stdout == f"{FIRST} 200"
    assert in_session(host, project, "getent", "ahostsv4", ONE).returncode == 2
    assert asked_for(host, mark) == {TWO}
    # And back.
    project.corral("allow", ONE)
    assert in_session(host, project, *CURL, f"https://{ONE}/").stdout == f"{FIRST} 200"


def test_a_flood_of_questions_stops_neither_the_service_nor_another_sandbox(host: Host) -> None:
    host.internet.set_name(ONE, [FIRST])
    project, other = host.project("floods", POLICY), host.project("beside", POLICY)
    flood = (
        "import os, socket, struct, threading\n"
        "def ask(n):\n"
        "    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        f"    z = b''.join(bytes([len(x)]) + x.encode() for x in '{ZONE}'.split('.'))\n"
        "    while True:\n"
        "        label = os.urandom(8).hex().encode()\n"
        "        q = os.urandom(2) + struct.pack('!HHHHH', 256, 1, 0, 0, 0) + bytes([16]) + label + z + bytes(1)\n"
        "        try: s.sendto(q + struct.pack('!HH', 1, 1), ('GATEWAY', 53))\n"
        "        except OSError: pass\n"
        "open('up', 'w').close()\n"
        "for n in range(4): threading.Thread(target=ask, args=(n,), daemon=True).start()\n"
        "import time; time.sleep(300)\n"
    )
    project.inside("true")
    project.write("flood.py", flood.replace("GATEWAY", project.sandbox["gateway"]))
    pid = host.enforcer_pid()
    mark = host.internet.mark()
    project.start("python3", "flood.py", marker="up")
    started = time.monotonic()
    assert other.inside(*CURL, f"https://{ONE}/").stdout.splitlines()[-1] == f"{FIRST} 200"
    spent = time.monotonic() - started
    asked = len(host.internet.queries(mark))
    print(f"{asked} questions came through, and the other sandbox took {spent:.1f} s")
    assert host.enforcer_pid() == pid
    # 100 a second and 200 at once, for as long as it took, and what is asked on without an answer.
    assert asked < 100 * (spent + 10) + 300


def test_verify_knows_it(host: Host) -> None:
    host.internet.set_name(ONE, [FIRST])
    project = host.project("verified", POLICY)
    project.start("sh", "-c", "touch up; sleep 300", marker="up")
    assert FIRST in in_session(host, project, "getent", "ahostsv4", ONE).stdout
    done = project.corral("verify", check=False)
    assert [line for line in done.stdout.splitlines() if line.startswith("FAIL")] == [], done.stdout
    for check in ("live-rules", "dns-answers-only-permitted", "dns-answers-permitted", "dns-outside-closed"):
        assert f"ok   {check}" in done.stdout, done.stdout
