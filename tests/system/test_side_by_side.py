"""Several sessions of one project, several projects: all work, and none reaches another."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from .host import ENFORCER, FLOOD, Host, Project, until

PORTS = (443, 8080, 8081, 8765)
# Serves TCP and UDP on every port, counts what comes in, works a little, and tells when told to.
PEER = """\
import json, os, socket, ssl, sys, threading, time, urllib.request
name, ports = sys.argv[1], [int(text) for text in sys.argv[2].split(",")]
heard = []
def tcp(s):
    while True: heard.append(("tcp", s.accept()[1][0]))
def udp(s):
    while True: heard.append(("udp", s.recvfrom(2000)[1][0]))
for port in ports:
    t = socket.create_server(("0.0.0.0", port + 20000)); threading.Thread(target=tcp, args=(t,), daemon=True).start()
    u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(("0.0.0.0", port + 20000))
    threading.Thread(target=udp, args=(u,), daemon=True).start()
body = urllib.request.urlopen("https://allowed1.corral.example/", timeout=10).read().decode()
open(f"{name}.up", "w").close()
while not os.path.exists(f"{name}.go"): time.sleep(0.05)
peers, tried = json.load(open(f"{name}.peers")), {}
for peer in peers:
    for port in ports:
        with socket.socket() as s:
            s.settimeout(1)
            try: s.connect((peer, port + 20000)); tried[f"tcp {peer}:{port}"] = "open"
            except OSError as error: tried[f"tcp {peer}:{port}"] = type(error).__name__
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            for _ in range(20):
                try: s.sendto(b"x", (peer, port + 20000))
                except OSError: pass
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP) as s:
            s.settimeout(0.5); s.sendto(b"\\x08\\0\\0\\0\\0\\0\\0\\0", (peer, 0)); s.recv(100); tried[f"icmp {peer}"] = "open"
    except OSError as error: tried[f"icmp {peer}"] = type(error).__name__
body2 = urllib.request.urlopen("https://allowed1.corral.example/", timeout=10).read().decode()
json.dump({"body": body, "again": body2, "tried": tried}, open(f"{name}.tried", "w"))
while not os.path.exists(f"{name}.tell"): time.sleep(0.05)
json.dump(heard, open(f"{name}.heard", "w"))
open(f"{name}.told", "w").close()
time.sleep(60)
"""
# Frames to a neighbour by its hardware address, past ARP and routes. argv: its MAC, its IPv4, how many.
FRAMES = """\
import fcntl, socket, struct, sys
mac, target, count = bytes.fromhex(sys.argv[1].replace(":", "")), sys.argv[2], int(sys.argv[3])
plain = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
own = fcntl.ioctl(plain, 0x8927, struct.pack("256s", b"eth0"))[18:24]
here = fcntl.ioctl(plain, 0x8915, struct.pack("256s", b"eth0"))[20:24]
def checksum(data):
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16: total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 33, 1, 0, 64, 17, 0, here, socket.inet_aton(target))
head = head[:10] + struct.pack("!H", checksum(head)) + head[12:]
frame = mac + own + b"\\x08\\0" + head + struct.pack("!HHHH", 9, 9, 13, 0) + b"frame"
raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
raw.bind(("eth0", 0))
print(sum(raw.send(frame) > 0 for _ in range(count)))
"""


def pid(host: Host, container: str) -> str:
    return host.box.run(["docker", "inspect", "-f", "{{.State.Pid}}", container]).stdout.strip()


def inside(host: Host, container: str, *argv: str) -> str:
    """Run a program of the host in a container's network namespace, as root."""
    return host.root("nsenter", "-n", "-t", pid(host, container), *argv).stdout


def link(host: Host, container: str) -> tuple[str, str]:
    """The name of a container's port on its bridge, and the hardware address inside."""
    row = json.loads(inside(host, container, "ip", "-j", "link", "show", "eth0"))[0]
    ports = json.loads(host.netadmin("ip", "-j", "link", "show", "type", "veth").stdout)
    return next(p["ifname"] for p in ports if p["ifindex"] == row["link_index"]), row["address"]


def received(host: Host, container: str) -> int:
    """Datagrams to port 9 that reached a container's interface; see ``counting``."""
    rows = json.loads(inside(host, container, "nft", "-j", "list", "table", "netdev", "witness"))["nftables"]
    rule = next(row["rule"] for row in rows if "rule" in row)
    return int(next(part["counter"]["packets"] for part in rule["expr"] if "counter" in part))


def counting(host: Host, container: str) -> None:
    """Count what arrives at a container's interface, before any rule of IP."""
    rule = "type filter hook ingress device eth0 priority -500; udp dport 9 counter"
    table = f"table netdev witness {{\nchain c {{ {rule}; }}\n}}"
    inside(host, container, "nft", table)


@contextmanager
def unfiltered(host: Host) -> Iterator[None]:
    """Whatever the writer does about it, bridged packets pass no rule meanwhile."""
    files = "/proc/sys/net/bridge/bridge-nf-call-iptables /proc/sys/net/bridge/bridge-nf-call-ip6tables"
    loop = f"while :; do for f in {files}; do echo 0 > $f; done; done"
    vandal = host.box.popen([*host.engine.entering(), "sh", "-c", loop], user="root")
    try:
        yield
    finally:
        host.box.kill(vandal)
        # The kernel default, and what the writer keeps: it looks once a second.
        value = ["cat", "/proc/sys/net/bridge/bridge-nf-call-iptables"]
        until(
            lambda: host.netadmin(*value).stdout.strip() == "1",
            10,
            "the writer filters bridged packets again",
        )


def isolated(host: Host, port: str) -> bool:
    row = json.loads(host.netadmin("ip", "-j", "-d", "link", "show", port).stdout)[0]
    return bool(row["linkinfo"]["info_slave_data"]["isolated"])


def sessions(project: Project, *names: str) -> dict[str, str]:
    """Start sessions and return name -> container."""
    found: dict[str, str] = {}
    for name in names:
        before = set(project.containers())
        project.start("sh", "-c", f"touch {name}.up; sleep 300", marker=f"{name}.up")
        (found[name],) = set(project.containers()) - before
    return found


@pytest.mark.representative
def test_sessions_of_one_and_of_several_projects_all_work_and_reach_one_another_by_no_protocol(
    host: Host,
) -> None:
    first, second = host.project("side-one"), host.project("side-two")
    crew = {"a": first, "b": first, "c": first, "d": second, "e": second}
    for name, project in crew.items():
        project.write("peer.py", PEER)
        ports = ",".join(map(str, PORTS))
        project.start("python3", "peer.py", name, ports, marker=f"{name}.up")
    rows = [row["address"] for project in (first, second) for row in project.sandbox["sessions"]]
    assert len(set(rows)) == len(crew)
    own = {}
    for name, project in crew.items():
        (container,) = [c for c in project.containers() if runs(host, c, name)]
        own[name] = address(host, container)
    for name, project in crew.items():
        # The marker comes last: what it announces is whole, and readable by its owner.
        project.write(f"{name}.peers", json.dumps([own[peer] for peer in crew if peer != name]))
        project.write(f"{name}.go", "")
    for name, project in crew.items():
        finished(host, project, name)
        told = json.loads(project.read(f"{name}.tried"))
        assert "203.0.113.10" in told["body"]
        assert "203.0.113.10" in told["again"]
        assert len(told["tried"]) == (len(PORTS) + 1) * (len(crew) - 1)
        assert "open" not in told["tried"].values(), told
    # The positive control: each listener hears whoever is not kept from it.
    for name, project in crew.items():
        (container,) = [c for c in project.containers() if runs(host, c, name)]
        knock = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3).close()"
        inside(host, container, "python3", "-c", knock, own[name], str(PORTS[0] + 20000))
        project.write(f"{name}.tell", "")
    for name, project in crew.items():
        host.box.wait_for(lambda p=project, n=name: p.exists(f"{n}.told"), timeout=20)
        assert json.loads(project.read(f"{name}.heard")) == [["tcp", own[name]]]


def finished(host: Host, project: Project, name: str) -> None:
    """Wait until a session has tried everything; one that ended instead is told with what it said."""

    def there() -> bool:
        for process in project.started:
            if process.poll() is not None:
                raise AssertionError(f"{name}: a session ended early: {process.communicate()[0]}")
        return project.exists(f"{name}.tried")

    host.box.wait_for(there, timeout=120)


def runs(host: Host, container: str, name: str) -> bool:
    shown = host.box.run(["docker", "inspect", "-f", "{{json .Args}}", container]).stdout
    return "peer.py" in shown and name in json.loads(shown)


def address(host: Host, container: str) -> str:
    form = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    return host.box.run(["docker", "inspect", "-f", form, container]).stdout.strip()


@pytest.mark.representative
@pytest.mark.fault("bridge-nf-call-iptables set to 0")
def test_without_bridge_filtering_sessions_of_one_sandbox_still_do_not_reach_each_other(host: Host) -> None:
    project = host.project("bridged")
    made = sessions(project, "from", "to")
    target = address(host, made["to"])
    port, mac = link(host, made["to"])
    other, _ = link(host, made["from"])
    assert isolated(host, port)
    assert isolated(host, other)
    counting(host, made["to"])
    with unfiltered(host):
        inside(host, made["from"], "python3", "-c", FLOOD, target, "1")
        assert int(inside(host, made["from"], "python3", "-c", FRAMES, mac, target, "500")) == 500
        assert received(host, made["to"]) == 0
        # The positive control: without the flag, and with nobody to set it again, they do arrive.
        host.engine.systemctl("kill", "-s", "STOP", "corral-netfilter.service")
        try:
            host.netadmin("ip", "link", "set", port, "type", "bridge_slave", "isolated", "off")
            inside(host, made["from"], "python3", "-c", FRAMES, mac, target, "500")
            assert received(host, made["to"]) >= 500
        finally:
            host.engine.systemctl("kill", "-s", "CONT", "corral-netfilter.service")
        until(lambda: isolated(host, port), 10, "the port is isolated again")
        before = received(host, made["to"])
        inside(host, made["from"], "python3", "-c", FRAMES, mac, target, "500")
        assert received(host, made["to"]) == before


@pytest.mark.fault("bridge port no longer isolated")
def test_a_port_that_somebody_opened_is_isolated_again_and_the_journal_names_it(host: Host) -> None:
    project = host.project("opened")
    port, _ = link(host, sessions(project, "one")["one"])
    since = time.time()
    host.netadmin("ip", "link", "set", port, "type", "bridge_slave", "isolated", "off")
    took = until(lambda: isolated(host, port), 10, "the port is isolated again")
    print(f"isolated again within {took * 1000:.0f} ms")
    until(
        lambda: f"mended: port {port} of" in host.writer_journal(since),
        10,
        "the journal names the port",
    )
    assert json.loads(project.corral("status", "--json").stdout)["problems"] == []


@pytest.mark.fault("bridge-nf-call-iptables set to 0")
def test_a_second_start_without_bridge_filtering_is_refused_with_the_reason_or_is_fenced(host: Host) -> None:
    project = host.project("second")
    made = sessions(project, "first")
    counting(host, made["first"])
    target = address(host, made["first"])
    _, mac = link(host, made["first"])
    project.write("flood.py", FLOOD)
    refused = 0
    with unfiltered(host):
        for _ in range(2):
            done = project.inside("python3", "flood.py", target, "0.5", check=False)
            if done.returncode != 0:
                refused += 1
                assert done.returncode == 1
                # By who starts it; or, when the setting went in between, by the gate, to which nothing was granted.
                said = done.stderr
                assert "bridge-nf-call-ip" in said or "/etc/hosts has no address for it" in said, said
    print(f"{refused} of 2 starts were refused")
    assert received(host, made["first"]) == 0
    # And afterwards it works again, and the counter does count.
    assert int(project.inside("python3", "flood.py", target, "0.2").stdout.splitlines()[-1]) > 100
    other = sessions(project, "other")["other"]
    port, _ = link(host, made["first"])
    host.user_systemctl("kill", "-s", "STOP", ENFORCER)
    host.engine.systemctl("kill", "-s", "STOP", "corral-netfilter.service")
    try:
        host.netadmin("sh", "-c", "echo 0 > /proc/sys/net/bridge/bridge-nf-call-iptables")
        host.netadmin("ip", "link", "set", port, "type", "bridge_slave", "isolated", "off")
        inside(host, other, "python3", "-c", FRAMES, mac, target, "50")
        assert received(host, made["first"]) >= 50
    finally:
        host.engine.systemctl("kill", "-s", "CONT", "corral-netfilter.service")
        host.user_systemctl("kill", "-s", "CONT", ENFORCER)
