"""Field cases about reach: protocols, addresses, names and frames that are none of a sandbox's business."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from . import slirp
from .flooding import ALLOWED_URL, image, services_back, stranger  # noqa: F401
from .host import FLOOD, Host, until
from .test_network import RAW_DNS

pytestmark = pytest.mark.usefixtures("services_back")

# As root with raw sockets, from the sandbox's own address: one packet of each kind, and what came back.
KINDS = """
import json, socket, struct, sys, time
target, took = sys.argv[1], {}
def raw(name, number, body):
    s = socket.socket(socket.AF_INET, socket.SOCK_RAW, number)
    i = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP); i.settimeout(2)
    best = None
    for _ in range(3):
        time.sleep(0.3)
        started = time.monotonic()
        s.sendto(body, (target, 0))
        try:
            while True:
                answer = i.recv(500)
                if answer[20] == 3 and answer[28 + 9] == number: break
            spent = time.monotonic() - started
            best = spent if best is None else min(best, spent)
        except TimeoutError: pass
    took[name] = best
raw("icmp", 1, struct.pack("!BBHHH", 8, 0, 0xf7fe - 0, 1, 0))
raw("udp443", 17, struct.pack("!HHHH", 4000, 443, 8, 0))
raw("sctp", 132, struct.pack("!HHII", 4000, 443, 0, 0) + b"\\1\\0\\0\\4")
raw("gre", 47, struct.pack("!HH", 0, 0x800))
for port in (22, 853, 80, 8443):
    started = time.monotonic()
    try:
        socket.create_connection((target, port), timeout=3).close(); took[f"tcp{port}"] = None
    except ConnectionRefusedError: took[f"tcp{port}"] = time.monotonic() - started
    except OSError: took[f"tcp{port}"] = None
socket.create_connection((target, 443), timeout=3).close()
print(json.dumps(took))
"""


@pytest.mark.case(5)
@pytest.mark.fault("other protocols to an allowed address")
def test_of_an_allowed_address_only_the_declared_port_answers_and_the_rest_is_refused(host: Host) -> None:
    allowed = host.internet.addresses["allowed1"]
    project = host.project("protocols")
    project.start("sh", "-c", "touch up; sleep 120", marker="up")
    container = project.sandbox["sessions"][0]["container"]
    with leaving(host, allowed) as left:
        host.internet.reset_counters()
        took = json.loads(host.root_inside(container, "python3", "-c", KINDS, allowed, timeout=90).stdout)
        print(took)
        # What got there is TCP to 443 alone.
        assert left() == {"tcp"}
        assert host.internet.packets(allowed, "tcp", 443) == host.internet.packets(allowed, "tcp") > 0
        # Nothing hangs: each kind was refused, and at least one of three tries at once.
        assert {kind: spent for kind, spent in took.items() if spent is None} == {}
        # The control: from the host each kind arrives.
        plain = KINDS.replace("socket.create_connection((target, 443), timeout=3).close()", "")
        host.netadmin("python3", "-c", plain, allowed, timeout=90)
        assert {"icmp", "udp", "sctp", "gre"} <= left(), left()


@contextmanager
def leaving(host: Host, address: str) -> Iterator[Callable[[], set[str]]]:
    """Which protocols got to an address, at the far end or out of the engine's own network.

    slirp4netns takes TCP, UDP and ICMP echo to the far end, and the rest no further.
    """
    kinds = ("icmp", "tcp", "udp", "sctp", "gre")

    def arrived() -> set[str]:
        return {key[0] for key in host.internet.all_packets() if key[1] == address}

    if not host.box.engine.rootless:
        yield arrived
        return

    def left() -> set[str]:
        rows = json.loads(host.netadmin("nft", "-j", "list", "table", "ip", "leaving").stdout)["nftables"]
        rules = [row["rule"] for row in rows if "rule" in row]
        counted = {
            rule["comment"]: part["counter"]["packets"]
            for rule in rules
            for part in rule["expr"]
            if "counter" in part
        }
        return arrived() | {kind for kind, count in counted.items() if count}

    counters = "".join(
        f'oifname "tap0" ip daddr {address} meta l4proto {kind} counter comment "{kind}"\n' for kind in kinds
    )
    table = f"table ip leaving {{ chain c {{ type filter hook postrouting priority 350;\n{counters}}}\n}}"
    host.netadmin("nft", "-f", "-", input=table)
    try:
        yield left
    finally:
        host.netadmin("nft", "delete", "table", "ip", "leaving")


@pytest.mark.case(7)
@pytest.mark.fault("raw frames with a neighbour's source address")
def test_frames_with_the_address_of_another_sandbox_are_dropped(host: Host) -> None:
    allowed = host.internet.addresses["allowed1"]
    project, neighbour = host.project("spoofer"), host.project("neighbour")
    project.start("sh", "-c", "touch up; sleep 120", marker="up")
    neighbour.start("sh", "-c", "touch up; sleep 120", marker="up")
    own = project.sandbox["sessions"][0]["container"]
    lent = neighbour.sandbox["sessions"][0]["address"]
    assert f"{lent},tcp:443,{allowed}" in host.netadmin("ipset", "list", "corral-pins").stdout
    spoof = f"""
import socket, struct
def syn(src, dst):
    tcp = struct.pack("!HHIIBBHHH", 4000, 443, 1, 0, 0x50, 2, 1000, 0, 0)
    pseudo = socket.inet_aton(src) + socket.inet_aton(dst) + struct.pack("!BBH", 0, 6, len(tcp)) + tcp
    s = sum(struct.unpack("!%dH" % (len(pseudo) // 2), pseudo)); s = (s >> 16) + (s & 0xffff)
    tcp = tcp[:16] + struct.pack("!H", ~(s + (s >> 16)) & 0xffff) + tcp[18:]
    return struct.pack("!BBHHHBBH4s4s", 0x45, 0, 40, 1, 0, 64, 6, 0, socket.inet_aton(src), socket.inet_aton(dst)) + tcp
s = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
for _ in range(50): s.sendto(syn("{lent}", "{allowed}"), ("{allowed}", 0))
"""
    host.internet.reset_counters()
    host.root_inside(own, "python3", "-c", spoof)
    assert host.internet.packets(allowed) == 0
    counted = host.netadmin("nft", "list", "chain", "inet", "corral", "anti_spoof").stdout
    dropped = [line for line in counted.splitlines() if "fib saddr" in line]
    assert any(" packets 0 " not in line for line in dropped), counted
    # The control: from the one whose address it is, the same frames arrive.
    host.root_inside(neighbour.sandbox["sessions"][0]["container"], "python3", "-c", spoof)
    until(lambda: host.internet.packets(allowed, "tcp", 443) > 0, 10, "the owner's frames arrive")


@pytest.mark.case(3)
@pytest.mark.fault("container names across sandboxes")
def test_names_of_other_containers_are_not_answered(host: Host) -> None:
    project, other = host.project("asks"), host.project("asked")
    project.write("ask.py", RAW_DNS)
    other.start("sh", "-c", "touch up; sleep 120", marker="up")
    names = other.containers()
    assert len(names) == 1
    mark = host.internet.mark()
    for name in names:
        assert project.inside("getent", "hosts", name, check=False).returncode == 2
        asked = project.inside("python3", "ask.py", name, "127.0.0.11", project.sandbox["gateway"])
        assert asked.stdout.strip() == "0"
    assert not [query for query in host.internet.queries(mark) if query.name in names]
    # The control: on a network of Docker's own making such names are answered.
    host.box.run(["docker", "network", "create", "plain"])
    try:
        run = ["docker", "run", "-d", "--rm", "--network", "plain", "--name", "someone", "--entrypoint"]
        ident = host.box.run([*run, "sleep", image(host), "60"]).stdout.strip()
        assert int(host.plain("python3", "-c", RAW_DNS, "someone", "127.0.0.11", network="plain").stdout) > 0
        host.box.run(["docker", "rm", "-f", ident])
    finally:
        host.box.run(["docker", "network", "rm", "plain"])


SIX = """
import socket, sys, time
s = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
for _ in range(200):
    for target in sys.argv[1:]:
        try: s.sendto(b"x", socket.getaddrinfo(target, 9, socket.AF_INET6, socket.SOCK_DGRAM)[0][4])
        except OSError: pass
    time.sleep(0.005)
"""


@pytest.mark.case(4)
@pytest.mark.fault("network made with --ipv6")
def test_on_a_bridge_of_ours_made_with_ipv6_nothing_of_ipv6_passes(host: Host) -> None:
    forbidden = host.internet.addresses["forbidden6"]
    found = {}
    made = ("corral-0a0b0c0d", "2001:db8:9::/64"), ("plain6", "2001:db8:a::/64")
    host.plain("true")
    with slirp.with_ipv6(host):
        for bridge, subnet in made:
            create = ["docker", "network", "create", "--ipv6", "--subnet", subnet]
            host.box.run([*create, "-o", f"com.docker.network.bridge.name={bridge}", "six"])
            try:
                host.internet.reset_counters()
                run = [
                    "docker",
                    "run",
                    "--rm",
                    "--sysctl",
                    "net.ipv6.conf.all.disable_ipv6=0",
                    "--network",
                    "six",
                ]
                host.box.run(
                    [*run, "--entrypoint", "python3", image(host), "-c", SIX, forbidden, "fe80::1%eth0"]
                )
                found[bridge] = host.internet.packets(forbidden)
            finally:
                host.box.run(["docker", "network", "rm", "six"])
    assert found["corral-0a0b0c0d"] == 0
    assert found["plain6"] > 100


@pytest.mark.case(9)
@pytest.mark.fault("policy tightened under open flows")
def test_flows_end_when_the_name_they_went_to_leaves_the_policy(host: Host) -> None:
    project = host.project("tightened")
    flow = (
        "import os, socket, time\n"
        "s = socket.create_connection(('203.0.113.20', 443), timeout=5)\n"
        "open('open', 'w').close()\n"
        "while not os.path.exists('go'): time.sleep(0.05)\n"
        "s.settimeout(3)\n"
        "try:\n  s.sendall(b'x' * 100); s.recv(10); print('alive')\n"
        "except OSError as error: print('cut', error)\n"
    )
    project.write("flow.py", flow)
    process = project.start("sh", "-c", "python3 flow.py > flow; sleep 60", marker="open")
    session = project.sandbox["sessions"][0]
    element = f"{session['address']},tcp:443,203.0.113.20"
    assert element in host.netadmin("ipset", "list", "corral-pins").stdout
    before = host.internet.packets("203.0.113.20")
    # A session's policy is what its labels say; it ends with the session, here while the flow is open.
    socket_path = "/run/user/1000/corral/enforcer.sock"
    code = (
        "from pathlib import Path\nfrom enforcer.client import Client\n"
        f"Client(Path({socket_path!r}), 10).withdraw({session['container']!r})\n"
    )
    from .host import PYTHON

    host.box.run([PYTHON, "-c", code])
    until(
        lambda: element not in host.netadmin("ipset", "list", "corral-pins").stdout, 10, "the entry is gone"
    )
    after = host.internet.packets("203.0.113.20")
    project.write("go", "")
    host.box.wait_for(lambda: project.exists("flow") and project.read("flow"), timeout=20)
    assert project.read("flow").startswith("cut")
    assert host.internet.packets("203.0.113.20") == after >= before
    host.box.kill(process)


@pytest.mark.case(6)
def test_an_unlisted_container_on_a_sandboxs_network_gets_none_of_its_reach(host: Host) -> None:
    allowed = host.internet.addresses["allowed1"]
    project = host.project("not-mine")
    project.start("sh", "-c", "touch up; sleep 120", marker="up")
    host.internet.reset_counters()
    script = f"curl -sk -m 3 https://{allowed}/; echo code $?; python3 -c '{FLOOD}' {allowed} 0.3 2>&1"
    ident = stranger(host, project.sandbox["network"], "sh", "-c", script)
    host.box.run(["docker", "wait", ident], timeout=60)
    time.sleep(0.2)
    assert "code 0" not in host.box.run(["docker", "logs", ident]).stdout
    assert host.internet.packets(allowed) == 0
    assert "203.0.113.10" in project.inside("curl", "-sS", "-m", "5", ALLOWED_URL).stdout
