"""Fault table: what the host itself is set up like, and limits that are reached."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.lab import execute, network
from tests.lab.layout import Layout, netns_path

from .flooding import flooding, host_sink
from .host import Host, until

RULES_OF_A_HOST = (
    "-t mangle -I PREROUTING 1 -j CONNMARK --restore-mark",
    "-t mangle -I POSTROUTING 1 -j CONNMARK --save-mark",
)


@pytest.mark.fault("connmark restore")
def test_a_host_that_saves_and_restores_marks_hands_ours_to_nobody(host: Host) -> None:
    try:
        for rule in RULES_OF_A_HOST:
            host.netadmin_shell(f"iptables {rule}")
        with flooding(host, "connmark") as flood:
            # A flow that passed, whose mark the host saved and restores to each of its packets.
            script = (
                "import socket, sys, time, os\n"
                "s = socket.create_connection(('allowed1.corral.example', 443), timeout=5)\n"
                "open('open', 'w').close()\n"
                "while not os.path.exists('go'): time.sleep(0.05)\n"
                "s.settimeout(3)\n"
                "try:\n  s.sendall(b'x' * 100); s.recv(10); print('alive')\n"
                "except OSError as error: print('cut', error)\n"
            )
            flood.project.write("flow.py", script)
            process = flood.project.start("sh", "-c", "python3 flow.py > flow", marker="open")
            host.netadmin("ipset", "flush", "corral-pins")
            # Past our own chains: what is left is the mark. Older engines move DOCKER-USER to the top with each network.
            host.netadmin("iptables", "-I", "FORWARD", "1", "-j", "ACCEPT")
            before = host.internet.packets("203.0.113.10", "tcp")
            flood.project.write("go", "")
            process.wait(30)
            assert flood.project.read("flow").startswith("cut")
            assert host.internet.packets("203.0.113.10", "tcp") == before
            host.netadmin("iptables", "-D", "FORWARD", "-j", "ACCEPT")
            host.engine.systemctl("restart", "corral-netfilter")
            host.wait_enforcer()
            flood.works()
    finally:
        for rule in RULES_OF_A_HOST:
            undo = rule.replace("-I PREROUTING 1", "-D PREROUTING").replace(
                "-I POSTROUTING 1", "-D POSTROUTING"
            )
            host.netadmin_shell(f"iptables {undo}", check=False)
        host.netadmin("iptables", "-D", "FORWARD", "-j", "ACCEPT", check=False)


LISTEN = """\
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(("0.0.0.0", 7777)); s.settimeout(0.2)
open("listening", "w").close()
count, end = 0, time.monotonic() + 60
import os
while time.monotonic() < end and not os.path.exists("enough"):
    try: s.recv(100); count += 1
    except TimeoutError: pass
print(count)
"""


@pytest.mark.fault("bridge-nf-call-iptables set to 0")
def test_two_sessions_of_one_bridge_stay_apart_while_bridge_filtering_is_off(host: Host) -> None:
    with flooding(host, "bridge-nf") as flood:
        flood.project.write("listen.py", LISTEN)
        process = flood.project.start("sh", "-c", "python3 listen.py > heard", marker="listening")
        other = next(
            s
            for s in flood.project.sandbox["sessions"]
            if s["state"] == "running" and flood.project.exists("listening")
        )
        address = max(s["address"] for s in flood.project.sandbox["sessions"])
        assert other
        host.netadmin("sysctl", "-w", "net.bridge.bridge-nf-call-iptables=0")
        flood.project.inside(
            "bash", "-c", f"for i in $(seq 200); do echo x >/dev/udp/{address}/7777; done 2>/dev/null; true"
        )
        value = ["sysctl", "-n", "net.bridge.bridge-nf-call-iptables"]
        until(lambda: host.netadmin(*value).stdout.strip() == "1", 10, "bridge filtering is on again")
        # The listener hears: root on the host reaches it.
        host.from_host(f"for i in 1 2 3 4 5; do echo x >/dev/udp/{address}/7777; done")
        flood.project.write("enough", "")
        process.wait(30)
        assert flood.project.read("heard").strip() == "5"
        assert flood.leaked == (0, 0)


CONNECTIONS = """\
import os, socket, struct, time
context = struct.pack("ii", 1, 0)
opened = failed = 0
held = []
end = time.monotonic() + 15
while time.monotonic() < end and opened + failed < 12000:
    s = socket.socket()
    s.setblocking(False)
    try:
        s.connect(("203.0.113.10", 443))
    except BlockingIOError:
        pass
    except OSError:
        failed += 1
        s.close()
        continue
    opened += 1
    held.append(s)
    if len(held) > 900:
        held.pop(0).close()
print(opened, failed, flush=True)
open("opened", "w").close()
time.sleep(60)
"""


@pytest.mark.fault("conntrack flood")
def test_one_sandbox_cannot_fill_the_table_of_connections(host: Host) -> None:
    with flooding(host, "tracking") as flood:
        greedy = host.project("greedy")
        greedy.write("open.py", CONNECTIONS)
        process = greedy.start("sh", "-c", "python3 open.py > counted", marker="opened")
        address = greedy.sandbox["sessions"][0]["address"]
        host.box.wait_for(lambda: greedy.read("counted").strip(), timeout=10)
        tracked = host.netadmin("sh", "-c", f"conntrack -L -s {address} 2>/dev/null | wc -l").stdout
        print("tried", greedy.read("counted").strip(), "tracked", tracked.strip())
        # A burst of 2,048, then a hundred a second for the fifteen seconds it tries.
        assert 500 < int(tracked) <= 2048 + 15 * 100 + 64
        # What one uses up is its own alone.
        flood.works()
        host.box.kill(process)


@pytest.mark.fault("set full")
def test_a_full_set_refuses_a_start_and_cuts_nobody(host: Host) -> None:
    with flooding(host, "set-full") as flood:
        fresh = host.project("no-room")
        fresh.inside("true")
        saved = host.netadmin("ipset", "save", "corral-pins").stdout
        # As root, with the same content and room for nothing more.
        count = saved.count("\nadd ")
        create = saved.splitlines()[0].replace("create corral-pins", "create corral-small")
        words = create.split()
        words[words.index("maxelem") + 1] = str(max(count, 1))
        adds = [
            line.replace("add corral-pins", "add corral-small")
            for line in saved.splitlines()
            if line.startswith("add ")
        ]
        host.netadmin("ipset", "restore", input="\n".join([" ".join(words), *adds]) + "\n")
        host.netadmin("ipset", "swap", "corral-small", "corral-pins")
        try:
            done = fresh.inside("touch", "ran", check=False)
            assert done.returncode == 1
            assert not fresh.exists("ran")
            assert "full" in done.stderr.lower()
            assert fresh.containers() == []
            assert flood.leaked == (0, 0)
        finally:
            host.netadmin("ipset", "swap", "corral-small", "corral-pins")
            host.netadmin("ipset", "destroy", "corral-small")
        fresh.inside("touch", "ran")
        assert fresh.exists("ran")
        flood.works()


@pytest.fixture
def narrow(host: Host) -> Iterator[str]:
    """An address behind a router of the internet whose next link carries packets of 1,280 bytes."""
    lab = Layout.of(None)
    far, address = f"corral-{lab.name}-far", "203.0.113.77"
    ip, inet = execute.tool("ip"), lab.inet_netns

    def run(*words: str) -> None:
        execute.run([ip, *words])

    run("netns", "add", far)
    server = None
    try:
        run("-n", inet, "link", "add", "narrow", "type", "veth", "peer", "name", "eth0", "netns", far)
        for name, device, own in ((inet, "narrow", "192.0.2.65/30"), (far, "eth0", "192.0.2.66/30")):
            run("-n", name, "link", "set", device, "up")
            run("-n", name, "address", "add", own, "dev", device)
        # The server's own end is as wide as any: nobody but the router knows of the narrow link.
        run("-n", inet, "link", "set", "narrow", "mtu", "1280")
        run("-n", far, "link", "set", "lo", "up")
        run("-n", far, "address", "add", f"{address}/32", "dev", "lo")
        run("-n", far, "route", "add", "default", "via", "192.0.2.65")
        # Into the table that has the servers' whole range as its own: the longer prefix wins.
        run("-n", inet, "route", "add", f"{address}/32", "via", "192.0.2.66", "table", "local")
        network.in_netns(inet, ["/bin/sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward"])
        code = (
            "import socket\ns = socket.create_server(('0.0.0.0', 443))\n"
            "print('ready', flush=True)\n"
            "while True:\n  c, _ = s.accept(); n = 0\n"
            "  while n < 500000 and (d := c.recv(65536)): n += len(d)\n"
            "  c.sendall(str(n).encode()); c.close()\n"
        )
        import subprocess
        import sys

        server = subprocess.Popen(
            [execute.tool("nsenter"), f"--net={netns_path(far)}", sys.executable, "-c", code],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        host.internet.set_name("narrow.corral.example", [address])
        yield address
    finally:
        if server is not None:
            server.kill()
            server.wait()
        for words in (
            ("-n", inet, "route", "del", f"{address}/32", "via", "192.0.2.66", "table", "local"),
            ("-n", inet, "link", "del", "narrow"),
            ("netns", "del", far),
        ):
            execute.run([ip, *words], check=False)
        network.in_netns(inet, ["/bin/sh", "-c", "echo 0 >/proc/sys/net/ipv4/ip_forward"])


UPLOAD = """\
import socket, sys
s = socket.create_connection((sys.argv[1], 443), timeout=15)
s.sendall(b"x" * 500000)
print(s.recv(20).decode())
print(s.getsockopt(socket.IPPROTO_IP, 14))
"""


@pytest.mark.fault("router with a smaller MTU")
def test_a_large_transfer_through_a_narrow_router_finds_its_size(host: Host, narrow: str) -> None:
    policy = "profile: opencode\negress:\n  profile_defaults: false\n  allow:\n    - narrow.corral.example\n"
    project = host.project("narrow", policy + "limits:\n  best_effort: true\n")
    project.write("upload.py", UPLOAD)
    received, size = project.inside("python3", "upload.py", "narrow.corral.example").stdout.split()
    assert received == "500000"
    # What the router said came back to the sandbox, through the rules; or to slirp4netns, which ends the flows of a
    # rootless engine's containers and opens its own on the host.
    assert (int(size) == 1280) is not host.box.engine.rootless


PUBLISHED = pytest.mark.engine(
    "trixie",
    "sid",
    "bookworm",
    reason="a rootless engine publishes with rootlesskit's proxy alone: without one no port of the host is open to try",
)


@pytest.mark.case(2)
@pytest.mark.fault("userland-proxy=false")
@pytest.mark.parametrize(
    "proxy", [True, pytest.param(False, marks=PUBLISHED)], ids=["userland proxy", "no userland proxy"]
)
def test_ports_that_other_containers_publish_are_closed_to_a_sandbox(host: Host, proxy: bool) -> None:
    options: dict[str, object] = {} if proxy else {"userland-proxy": False}
    project = host.project("published")
    project.inside("true")
    image = host.box.run(["docker", "images", "-q", "corral/*"]).stdout.split()[0]
    with host.engine_options(**options) if options else contextlib.nullcontext():
        serve = ["--entrypoint", "python3", image, "-m", "http.server", "80"]
        ident = host.box.run(
            ["docker", "run", "-d", "-p", "18080:80", "-p", "127.0.0.1:18081:80", *serve]
        ).stdout.strip()
        try:
            gateway = project.sandbox["gateway"]
            curl = ["curl", "-s", "-o", "/dev/null", "-m", "3", "--noproxy", "*"]
            for url in (f"http://{host.box.address}:18080/", "http://127.0.0.1:18081/"):
                host.box.wait_for([*curl, url], timeout=20)
            inner = host.box.run(
                ["docker", "inspect", "-f", "{{.NetworkSettings.IPAddress}}", ident]
            ).stdout.strip()
            targets = [f"{a}:{p}" for a in (gateway, "172.17.0.1", host.box.address) for p in (18080, 18081)]
            script = "; ".join(
                f"curl -s -o /dev/null -m 3 http://{target}/; echo $?" for target in [*targets, f"{inner}:80"]
            )
            codes = project.inside("sh", "-c", script).stdout.split()
            # Refused, each of them: 28 would be a timeout.
            assert codes[:-1] == ["7"] * len(targets)
            # Engines since 28 let no packet to a container's own address in from another bridge, before any of our rules.
            dropped = host.netadmin("iptables", "-t", "raw", "-S", "PREROUTING").stdout
            assert codes[-1] == ("28" if f"-d {inner}/32" in dropped else "7")
            assert host.plain(*curl, f"http://{inner}/").returncode == 0
        finally:
            host.box.run(["docker", "rm", "-f", ident])


@pytest.mark.fault("route_localnet=1")
def test_loopback_of_the_host_is_out_of_reach_where_it_is_routed(host: Host) -> None:
    name = "net.ipv4.conf.all.route_localnet"
    former = host.netadmin("sysctl", "-n", name).stdout.strip()
    host.netadmin("sysctl", "-w", f"{name}=1")
    try:
        with flooding(host, "localnet") as flood, host_sink(host, 9997) as loopback:
            # Root inside, with raw frames: to the gateway's hardware address, for 127.0.0.1.
            container = flood.project.sandbox["sessions"][0]["container"]
            code = FRAME.format(port=9997)
            host.root_inside(container, "python3", "-c", code)
            assert loopback.heard == 0
            # The same frames from a container on Docker's own bridge do arrive.
            image = host.box.run(["docker", "images", "-q", "corral/*"]).stdout.split()[0]
            host.box.run(["docker", "run", "--rm", "-u", "0:0", "--entrypoint", "python3", image, "-c", code])
            until(lambda: loopback.heard > 0, 10, "a plain container reaches the host's loopback")
    finally:
        host.netadmin("sysctl", "-w", f"{name}={former}")


FRAME = """
import socket, struct, subprocess, time
route = [l.split() for l in open("/proc/net/route")][1:]
gw = next(socket.inet_ntoa(struct.pack("<I", int(r[2], 16))) for r in route if r[1] == "00000000")
try:
    socket.create_connection((gw, 1), timeout=1)
except OSError: pass
arp = [l.split() for l in open("/proc/net/arp")][1:]
mac = bytes.fromhex(next(a[3] for a in arp if a[0] == gw).replace(":", ""))
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.connect((gw, 9)); src = u.getsockname()[0]
def total(b):
    s = sum(struct.unpack("!%dH" % (len(b) // 2), b)); s = (s >> 16) + (s & 0xffff); return ~(s + (s >> 16)) & 0xffff
udp = struct.pack("!HHHH", 4000, {port}, 9, 0) + b"x"
head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(udp), 1, 0, 64, 17, 0, socket.inet_aton(src), socket.inet_aton("127.0.0.1"))
ip = head[:10] + struct.pack("!H", total(head)) + head[12:] + udp
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW); s.bind(("eth0", 0)); own = s.getsockname()[4]
for _ in range(20): s.send(mac + own + b"\\x08\\x00" + ip)
"""
