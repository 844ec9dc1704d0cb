"""What the constant rules do to packets: three namespaces, the real kernel, counts at the far end.

``box`` plays the host with a sandbox bridge and an uplink, ``inside`` a container, ``far`` the internet. A
chain FORWARD like Docker's leads through DOCKER-USER and then accepts what its bridges send.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest

from enforcer.netfilter.detect import LEGACY, NFT, OWN
from enforcer.netfilter.kernel import RealKernel
from enforcer.netfilter.model import Element
from enforcer.netfilter.skeleton import HOST, PINS, Skeleton
from enforcer.netfilter.writer import Writer

from .conftest import DRIVERS, program, sh

pytestmark = pytest.mark.netns

BRIDGE = "corral-0a0b0c0d"
INSIDE, GATEWAY, NEIGHBOUR = "192.0.2.2", "192.0.2.1", "192.0.2.3"
UPLINK, FAR, ALLOWED = "198.51.100.2", "198.51.100.1", "203.0.113.10"
FORBIDDEN = "203.0.113.66"
SKELETON = Skeleton()

SERVER = """
import socket, sys, threading
def tcp(s):
    while True:
        c, _ = s.accept()
        def talk(c=c):
            try:
                while (d := c.recv(100)): c.sendall(d)
            except OSError: pass
        threading.Thread(target=talk, daemon=True).start()
def udp(s):
    while True:
        d, a = s.recvfrom(2000)
        s.sendto(d, a)
for port in map(int, sys.argv[1:]):
    s = socket.create_server(("0.0.0.0", port)); threading.Thread(target=tcp, args=(s,), daemon=True).start()
    u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(("0.0.0.0", port))
    threading.Thread(target=udp, args=(u,), daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""

CONNECT = """
import socket, sys, time
started = time.monotonic()
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3) as s:
        s.sendall(b"x"); print("open" if s.recv(1) == b"x" else "closed")
except TimeoutError: print("timeout")
except OSError as error: print("refused" if time.monotonic() - started < 1 else "slow", error.errno)
"""

SEND = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(int(sys.argv[3])):
    try: s.sendto(b"x", (sys.argv[1], int(sys.argv[2])))
    except OSError: pass
"""


class Talk:
    """A program in a namespace that is spoken to line by line."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True)

    def say(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


class Hosts:
    """The three namespaces. The test's thread is in ``box``. ``driver``: which rules Docker would have there."""

    def __init__(self, driver: str = NFT) -> None:
        self.driver = driver
        self.tag = f"corral-t{os.getpid()}"
        self.servers: list[subprocess.Popen[str]] = []

    def up(self) -> None:
        tag = self.tag
        sh(f"""
        ip netns add {tag}-in; ip netns add {tag}-two; ip netns add {tag}-far
        ip link add {BRIDGE} type bridge; ip addr add {GATEWAY}/26 dev {BRIDGE}; ip link set {BRIDGE} up
        for n in in two; do
          ip link add v$n type veth peer name eth0 netns {tag}-$n
          ip link set v$n master {BRIDGE}; ip link set v$n up
          ip -n {tag}-$n link set lo up; ip -n {tag}-$n link set eth0 up
        done
        ip -n {tag}-in addr add {INSIDE}/26 dev eth0; ip -n {tag}-two addr add {NEIGHBOUR}/26 dev eth0
        ip -n {tag}-in route add default via {GATEWAY}; ip -n {tag}-two route add default via {GATEWAY}
        ip link add up0 type veth peer name eth0 netns {tag}-far
        ip addr add {UPLINK}/24 dev up0; ip link set up0 up; ip route add default via {FAR}
        ip -n {tag}-far link set lo up; ip -n {tag}-far link set eth0 up
        ip -n {tag}-far addr add {FAR}/24 dev eth0
        for a in {ALLOWED} {FORBIDDEN}; do ip -n {tag}-far addr add $a/32 dev lo; done
        echo 1 > /proc/sys/net/ipv4/ip_forward
        """)
        if self.driver != OWN:
            self.sh(f"""
            iptables-nft -N DOCKER-USER; iptables-nft -A FORWARD -j DOCKER-USER
            iptables-nft -A FORWARD -i {BRIDGE} -j ACCEPT; iptables-nft -P FORWARD DROP
            iptables-nft -A FORWARD -o {BRIDGE} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
            """)
        script = "table ip count { chain c { type filter hook prerouting priority raw; policy accept;\n"
        script += (
            "".join(f'ip daddr {a} counter comment "{a}"\n' for a in (ALLOWED, FORBIDDEN, FAR)) + "}\n}\n"
        )
        subprocess.run(
            ["nsenter", f"--net=/run/netns/{tag}-far", "nft", "-f", "-"], input=script, text=True, check=True
        )

    def sh(self, command: str) -> str:
        """Run a command; what it does to iptables-nft is done to the tables of this test's driver."""
        return sh(command.replace("iptables-nft", program(self.driver)))

    def serve(self, where: str | None, *ports: int) -> None:
        command = [sys.executable, "-c", SERVER, *map(str, ports)]
        server = subprocess.Popen(self._in(where, command), stdin=-1, stdout=-1, text=True)
        self.servers.append(server)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"

    def _in(self, where: str | None, command: list[str]) -> list[str]:
        return command if where is None else ["nsenter", f"--net=/run/netns/{self.tag}-{where}", *command]

    def python(self, where: str | None, code: str, *words: object) -> str:
        command = self._in(where, [sys.executable, "-c", textwrap.dedent(code), *map(str, words)])
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    def talk(self, where: str | None, code: str) -> Talk:
        made = Talk(self._in(where, [sys.executable, "-c", code]))
        self.servers.append(made.process)
        return made

    def connect(self, address: str, port: int, where: str | None = "in") -> str:
        return self.python(where, CONNECT, address, port)

    def send(self, address: str, port: int = 9, count: int = 100, where: str | None = "in") -> None:
        self.python(where, SEND, address, port, count)

    def arrived(self, address: str) -> int:
        command = self._in("far", ["nft", "-j", "list", "table", "ip", "count"])
        import json

        rows = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)[
            "nftables"
        ]
        for row in rows:
            if row.get("rule", {}).get("comment") == address:
                return next(e["counter"]["packets"] for e in row["rule"]["expr"] if "counter" in e)
        raise AssertionError(address)

    def down(self) -> None:
        for server in self.servers:
            server.kill()
            server.wait()
        for name in ("in", "two", "far"):
            subprocess.run(["ip", "netns", "del", f"{self.tag}-{name}"], check=False, capture_output=True)


@pytest.fixture(params=DRIVERS)
def hosts(request: pytest.FixtureRequest, netns: None) -> Iterator[Hosts]:
    if request.param == LEGACY:
        request.getfixturevalue("python_iptables")
    made = Hosts(request.param)
    try:
        made.up()
        yield made
    finally:
        made.down()


@pytest.fixture
def writer(hosts: Hosts) -> Iterator[Writer]:
    kernel = RealKernel(driver=hosts.driver)
    of = Writer(kernel, SKELETON, "test")
    of.heal("the test's start")
    try:
        yield of
    finally:
        kernel.close()


def grant(of: Writer, *pins: Element, host: tuple[Element, ...] = (), uid: int = 1000) -> None:
    answer = of.handle(
        uid,
        {
            "v": 2,
            "op": "apply",
            "sandboxes": [{"bridge": BRIDGE, "subnet": "192.0.2.0/26", "gateway": GATEWAY}],
            "pins": [[*e.row(), ""] for e in pins],
            "host": [[*e.row(), ""] for e in host],
        },
    )
    assert answer["ok"], answer
    assert answer["refused"] == []


PIN = Element(INSIDE, "tcp", 443, ALLOWED)


def test_without_rules_the_far_end_counts(hosts: Hosts) -> None:
    # The positive control of every zero below: the same packets do arrive when nothing of ours is loaded.
    hosts.sh(f"iptables-nft -t nat -A POSTROUTING -s {INSIDE} -j MASQUERADE")
    hosts.serve("far", 443)
    hosts.send(FORBIDDEN)
    assert hosts.arrived(FORBIDDEN) == 100
    assert hosts.connect(FORBIDDEN, 443) == "open"


def test_nothing_passes_before_anything_is_granted(hosts: Hosts, writer: Writer) -> None:
    hosts.serve("far", 443)
    hosts.send(FORBIDDEN)
    hosts.send(ALLOWED)
    assert hosts.connect(ALLOWED, 443).startswith("refused")
    assert hosts.arrived(FORBIDDEN) == hosts.arrived(ALLOWED) == 0


def test_a_granted_port_of_a_granted_address_passes_and_nothing_else(hosts: Hosts, writer: Writer) -> None:
    hosts.serve("far", 443, 80)
    grant(writer, PIN)
    assert hosts.connect(ALLOWED, 443) == "open"
    before = hosts.arrived(ALLOWED)
    assert hosts.connect(ALLOWED, 80).startswith("refused")
    assert hosts.connect(FORBIDDEN, 443).startswith("refused")
    hosts.send(ALLOWED, 443)
    assert hosts.arrived(ALLOWED) == before
    assert hosts.arrived(FORBIDDEN) == 0


@pytest.mark.case(5)
def test_icmp_to_an_allowed_address_is_refused_at_once(hosts: Hosts, writer: Writer) -> None:
    grant(writer, PIN)
    done = subprocess.run(
        hosts._in("in", [sys.executable, "-c", """
import socket, struct
s = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP); s.settimeout(3)
s.sendto(struct.pack("!BBHHH", 8, 0, 0xf7fe, 1, 0), ("203.0.113.10", 0))
print(s.recv(100)[20])"""]),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "3"
    assert hosts.arrived(ALLOWED) == 0


def cuts_the_flow(hosts: Hosts, withdraw: Callable[[], object]) -> None:
    """A connection that has said something is cut, and nothing more of it arrives."""
    flow = hosts.talk(
        "in",
        f"""
import socket, sys
s = socket.create_connection(("{ALLOWED}", 443), timeout=2)
s.sendall(b"1"); print(s.recv(1).decode(), flush=True)
sys.stdin.readline()
try:
    s.sendall(b"2"); print(s.recv(1) or "end", flush=True)
except OSError as error: print("cut", error.errno, flush=True)
""",
    )
    assert flow.hear() == "1"
    withdraw()
    before = hosts.arrived(ALLOWED)
    flow.say()
    assert flow.hear().startswith("cut")
    assert hosts.arrived(ALLOWED) == before


@pytest.mark.case(9)
def test_a_withdrawn_pin_cuts_the_flow(hosts: Hosts, writer: Writer) -> None:
    hosts.serve("far", 443)
    grant(writer, PIN)
    cuts_the_flow(hosts, lambda: grant(writer))


def test_a_withdrawn_udp_flow_receives_nothing_more(hosts: Hosts, writer: Writer) -> None:
    grant(writer, Element(INSIDE, "udp", 4000, ALLOWED))
    far = hosts.talk(
        "far",
        f"""
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(("{ALLOWED}", 4000))
print("ready", flush=True)
_, peer = s.recvfrom(10)
print("asked", flush=True)
while sys.stdin.readline():
    for _ in range(30): s.sendto(b"x", peer)
    print("sent", flush=True)
""",
    )
    assert far.hear() == "ready"
    inside = hosts.talk(
        "in",
        f"""
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(0.5); s.bind(("", 4001))
s.sendto(b"1", ("{ALLOWED}", 4000))
while sys.stdin.readline():
    n = 0
    try:
        while True: s.recv(10); n += 1
    except TimeoutError: print(n, flush=True)
""",
    )
    assert far.hear() == "asked"
    far.say()
    assert far.hear() == "sent"
    inside.say()
    assert inside.hear() == "30"
    grant(writer)
    far.say()
    assert far.hear() == "sent"
    inside.say()
    assert inside.hear() == "0"


@pytest.mark.case(1)
def test_no_address_of_the_host_answers_a_sandbox(hosts: Hosts, writer: Writer) -> None:
    hosts.serve(None, 9000)
    assert hosts.connect(UPLINK, 9000, "far") == "open"
    for address in (GATEWAY, UPLINK):
        assert hosts.connect(address, 9000).startswith("refused")


def test_a_host_service_answers_its_sandbox_alone(hosts: Hosts, writer: Writer) -> None:
    hosts.serve(None, 8081, 8082)
    grant(writer, host=(Element(INSIDE, "tcp", 8081, GATEWAY),))
    assert hosts.connect(GATEWAY, 8081) == "open"
    assert hosts.connect(GATEWAY, 8082).startswith("refused")
    assert hosts.connect(UPLINK, 8081).startswith("refused")
    assert hosts.connect(GATEWAY, 8081, "two").startswith("refused")
    # From the uplink the gateway's address is as closed as if it did not exist.
    sh(f"ip -n {hosts.tag}-far route add {GATEWAY}/32 via {UPLINK}")
    assert hosts.connect(GATEWAY, 8081, "far") == "timeout"
    assert hosts.connect(UPLINK, 8081, "far") == "open"


def test_neighbours_on_one_bridge_do_not_reach_each_other(hosts: Hosts, writer: Writer) -> None:
    hosts.serve("two", 8080)
    assert hosts.connect(NEIGHBOUR, 8080).startswith(("refused", "timeout"))
    writer.kernel.remove(SKELETON)
    hosts.sh("iptables-nft -P FORWARD ACCEPT")
    assert hosts.connect(NEIGHBOUR, 8080) == "open"


@pytest.mark.case(7)
def test_a_borrowed_source_address_is_dropped(hosts: Hosts, writer: Writer) -> None:
    grant(writer, Element("192.0.2.9", "udp", 9, ALLOWED))
    for source in ("198.51.100.77", "0.0.0.0"):
        hosts.python(
            "in",
            """
import socket, struct, sys
s = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
src, dst = socket.inet_aton(sys.argv[1]), socket.inet_aton(sys.argv[2])
udp = struct.pack("!HHHH", 1, 9, 8, 0)
ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 28, 1, 0, 64, 17, 0, src, dst)
for _ in range(20): s.sendto(ip + udp, (sys.argv[2], 0))
""",
            source,
            ALLOWED,
        )
    assert hosts.arrived(ALLOWED) == 0


CHAINS = (
    "iptables-nft -F DOCKER-USER",
    "iptables-nft -F DOCKER-USER; iptables-nft -P FORWARD ACCEPT; iptables-nft -F FORWARD",
    "iptables-nft -I FORWARD 1 -j ACCEPT",
    "iptables-nft -I DOCKER-USER 1 -j ACCEPT",
    "iptables-nft -F CORRAL-OUT; iptables-nft -A CORRAL-OUT -j ACCEPT",
    "iptables-nft -D FORWARD -j DOCKER-USER",
    "iptables-nft -F; iptables-nft -P FORWARD ACCEPT",
)
OWN_TABLE = (
    "nft flush chain inet corral sandbox_out",
    "nft flush chain inet corral forward_decision",
    "nft insert rule inet corral sandbox_out accept",
    "nft insert rule inet corral forward_decision accept",
    "iptables-nft -I FORWARD 1 -j ACCEPT",
)


@pytest.mark.fault("iptables -F DOCKER-USER")
@pytest.mark.parametrize(
    ("hosts", "tamper"),
    [(name, tamper) for name in (NFT, LEGACY) for tamper in CHAINS] + [(OWN, tamper) for tamper in OWN_TABLE],
    indirect=["hosts"],
)
def test_the_backstop_holds_when_the_chains_do_not(hosts: Hosts, writer: Writer, tamper: str) -> None:
    grant(writer, PIN)
    hosts.sh(f"iptables-nft -t nat -A POSTROUTING -s {INSIDE} -j MASQUERADE")
    hosts.sh(tamper)
    hosts.send(FORBIDDEN, count=200)
    hosts.send(ALLOWED, count=200)
    assert hosts.arrived(FORBIDDEN) == hosts.arrived(ALLOWED) == 0
    # Without the backstop the same tampering lets them out: what counts is counted.
    sh("nft delete table inet corral")
    hosts.send(FORBIDDEN, count=200)
    assert hosts.arrived(FORBIDDEN) == 200


def test_an_accept_above_our_input_hook_opens_nothing(hosts: Hosts, writer: Writer) -> None:
    hosts.serve(None, 9000)
    hosts.sh("iptables-nft -I INPUT 1 -j ACCEPT")
    # Our own table has a say of its own, and refuses; else the backstop drops.
    wanted = "refused" if hosts.driver == OWN else "timeout"
    assert hosts.connect(GATEWAY, 9000).startswith(wanted)
    sh("nft delete table inet corral")
    assert hosts.connect(GATEWAY, 9000) == "open"


@pytest.mark.fault("connmark restore")
def test_a_restored_mark_opens_nothing(hosts: Hosts, writer: Writer) -> None:
    hosts.sh("iptables-nft -t mangle -A PREROUTING -j MARK --set-xmark 0x1000/0x1000")
    hosts.sh("iptables-nft -I FORWARD 1 -j ACCEPT; iptables-nft -P FORWARD ACCEPT")
    hosts.send(FORBIDDEN)
    assert hosts.arrived(FORBIDDEN) == 0


@pytest.mark.case(2)
def test_a_published_port_is_no_way_around_the_set(hosts: Hosts, writer: Writer) -> None:
    hosts.serve("two", 8080)
    hosts.sh(
        f"iptables-nft -t nat -A PREROUTING -p tcp --dport 18080 -j DNAT --to-destination {NEIGHBOUR}:8080"
    )
    for address in (GATEWAY, UPLINK):
        assert hosts.connect(address, 18080).startswith(("refused", "timeout"))


def test_only_root_and_the_owner_reach_a_sandbox_from_the_host(hosts: Hosts, writer: Writer) -> None:
    hosts.serve("in", 3000)
    grant(writer, uid=1000)
    drop = "import os, socket, encodings.idna\nos.setgid(int(os.environ['WHO'])); os.setuid(int(os.environ['WHO']))\n"
    code = drop + CONNECT
    seen = {}
    for uid in (0, 1000, 1001):
        done = subprocess.run(
            [sys.executable, "-c", code, INSIDE, "3000"],
            capture_output=True, text=True, check=True, env={**os.environ, "WHO": str(uid)},
        )  # fmt: skip
        seen[uid] = done.stdout.strip().split()[0]
    assert seen == {0: "open", 1000: "open", 1001: "timeout"}


def test_denied_packets_are_counted_for_their_source(hosts: Hosts, writer: Writer) -> None:
    grant(writer, PIN)
    hosts.send(FORBIDDEN, count=25)
    answer = writer.handle(1000, {"v": 2, "op": "read"})
    assert answer["denied"] == {INSIDE: 25}


def test_counters_survive_a_renewal(hosts: Hosts, writer: Writer) -> None:
    hosts.serve("far", 443)
    grant(writer, PIN)
    assert hosts.connect(ALLOWED, 443) == "open"
    counted = writer.kernel.entries(PINS)[PIN].packets
    assert counted > 0
    writer.kernel.change(PINS, {PIN: "renewed"}, ())
    assert writer.kernel.entries(PINS)[PIN].packets == counted
    assert writer.kernel.entries(HOST) == {}
