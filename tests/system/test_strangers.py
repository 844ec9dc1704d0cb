"""Containers that corral did not start, on its networks; and a sandbox that somebody connects elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from .host import ENFORCER, FLOOD, Host, Project, until
from .intrusion import ASK, ATTACK, BOUND

pytestmark = pytest.mark.representative


def strangers(host: Host) -> list[dict[str, object]]:
    return list(json.loads(host.box.run(["corral", "status", "--json"]).stdout)["strangers"])


def image(host: Host) -> str:
    return host.box.run(["docker", "images", "-q", "corral/*"]).stdout.split()[0]


def attached(host: Host, container: str) -> list[str]:
    shown = host.box.run(["docker", "inspect", "-f", "{{json .NetworkSettings.Networks}}", container]).stdout
    return sorted(json.loads(shown))


def route(host: Host, container: str) -> str:
    """The default route inside a container."""
    pid = host.box.run(["docker", "inspect", "-f", "{{.State.Pid}}", container]).stdout.strip()
    return host.root("nsenter", "-n", "-t", pid, "ip", "-4", "route", "show", "default").stdout.strip()


@contextmanager
def frozen(host: Host, *, writer: bool = False) -> Iterator[None]:
    """Nobody of ours reacts meanwhile."""
    host.user_systemctl("kill", "-s", "STOP", ENFORCER)
    if writer:
        host.engine.systemctl("kill", "-s", "STOP", "corral-netfilter.service")
    try:
        yield
    finally:
        if writer:
            host.engine.systemctl("kill", "-s", "CONT", "corral-netfilter.service")
        host.user_systemctl("kill", "-s", "CONT", ENFORCER)


@contextmanager
def witness(host: Host, *addresses: str) -> Iterator[None]:
    """Count datagrams to port 9 of these addresses wherever they arrive on the host, bridged ones too."""
    rules = "".join(f'ip daddr {a} udp dport 9 counter comment "{a}"\n' for a in addresses)
    table = f"table ip witness {{ chain c {{ type filter hook prerouting priority -350;\n{rules}}}\n}}"
    host.netadmin("nft", "-f", "-", input=table)
    try:
        yield
    finally:
        host.netadmin("nft", "delete", "table", "ip", "witness")


def seen(host: Host, address: str) -> int:
    rows = json.loads(host.netadmin("nft", "-j", "list", "table", "ip", "witness").stdout)["nftables"]
    rule = next(row["rule"] for row in rows if row.get("rule", {}).get("comment") == address)
    return int(next(part["counter"]["packets"] for part in rule["expr"] if "counter" in part))


def sitting(host: Host, project: Project, script: str = "touch up; sleep 120") -> str:
    """Start a session and return its container's name."""
    project.start("sh", "-c", script, marker="up")
    return project.containers()[0]


@pytest.mark.case(6)
@pytest.mark.parametrize("resolver", ["stub", "routable"])
def test_a_stranger_on_a_corral_network_is_expelled_and_asks_nobody_for_long(
    host: Host, resolver: str
) -> None:
    forbidden = host.internet.addresses["forbidden"]
    project = host.project("expel")
    project.inside("true")
    network = project.sandbox["network"]
    since = time.time()
    host.internet.reset_counters()
    mark = host.internet.mark()
    domain = f"leak-{resolver}-{time.time_ns()}.corral.example"
    with host.box.resolver(resolver):
        host.plain("python3", "-c", ASK, domain, "3", network=network, check=False)
        host.plain("python3", "-c", FLOOD, forbidden, "0.5", network=network, check=False)
        leaked = [query for query in host.internet.queries(mark) if query.name.endswith(domain)]
        # The positive control: from Docker's own bridge the same program's questions do arrive.
        host.plain("python3", "-c", ASK, f"control.{domain}", "1")
        control = [q for q in host.internet.queries(mark) if q.name.endswith(f"control.{domain}")]
    print(f"{len(leaked)} questions through Docker's resolver before the stranger was off the network")
    assert host.internet.packets(forbidden) == 0
    assert len(control) > 20
    assert len({query.name for query in leaked}) < 20
    told = host.user_journal(since)
    assert "corral did not start it; disconnected" in told


def test_a_stranger_that_stays_is_shown_in_status_without_a_network(host: Host) -> None:
    project = host.project("shown")
    project.inside("true")
    network = project.sandbox["network"]
    command = ["docker", "run", "-d", "--network", network, "--entrypoint", "sleep", image(host), "300"]
    ident = host.box.run(command).stdout.strip()
    try:
        until(
            lambda: any(row["container"] == ident for row in strangers(host)), 10, "the stranger is reported"
        )

        until(lambda: network not in attached(host, ident), 10, "the stranger is off the network")
        assert "corral did not start it; disconnected" in project.corral("status").stdout
    finally:
        host.box.run(["docker", "rm", "-f", ident])
    until(lambda: not strangers(host), 10, "a removed stranger is forgotten")


@pytest.mark.engine("bookworm", reason="newer engines ask nobody for a container without a network")
def test_a_stranger_whose_questions_would_go_on_is_stopped_and_one_with_its_own_network_is_not(
    host: Host,
) -> None:
    project = host.project("silenced")
    project.inside("true")
    network = project.sandbox["network"]
    since = time.time()

    def running(ident: str) -> str:
        return host.box.run(["docker", "inspect", "-f", "{{.State.Running}}", ident]).stdout.strip()

    def sleeping(*options: str) -> str:
        words = ["docker", "run", "-d", *options, "--entrypoint", "sleep", image(host), "300"]
        return host.box.run(words).stdout.strip()

    left, kept = sleeping("--network", network, "--restart", "always"), sleeping()
    try:
        until(lambda: running(left) == "false", 10, "the one without a network is stopped")
        host.box.run(["docker", "network", "connect", network, kept])
        until(lambda: network not in attached(host, kept), 10, "the other is off the network")
        told = {row["container"]: row for row in strangers(host)}
        assert "and stopped: its engine's resolver would go on to ask" in str(told[left])
        assert "stopped" not in str(told[kept])
        assert (running(left), running(kept)) == ("false", "true")
        assert "disconnected, and stopped" in host.user_journal(since)
    finally:
        host.box.run(["docker", "rm", "-f", left, kept])


@pytest.mark.case(6)
def test_a_flooding_sandbox_connected_to_the_bridge_sends_nothing_through_it(host: Host) -> None:
    forbidden = host.internet.addresses["forbidden"]
    project = host.project("connected")
    project.write("flood.py", FLOOD)
    docker0 = host.netadmin_shell("ip -4 -o addr show docker0").stdout.split()[3].partition("/")[0]
    script = (
        f"touch up; python3 flood.py {forbidden} 8 > flooded & python3 flood.py {docker0} 8 > flooded0; wait; "
        "curl -sS -m 20 https://allowed1.corral.example/ > got; touch done; sleep 60"
    )
    container = sitting(host, project, script)
    since = time.time()
    rounds = []
    with witness(host, docker0):
        for _ in range(3):
            # Until it reaches the rules the flood to docker0's address is counted too: those are denied.
            host.netadmin("nft", "flush", "chain", "ip", "witness", "c")
            rule = f"iifname docker0 ip daddr {docker0} udp dport 9 counter"
            host.netadmin("sh", "-c", f"""nft 'add rule ip witness c {rule} comment "{docker0}"'""")
            host.box.run(["docker", "network", "connect", "bridge", container])
            until(
                lambda: attached(host, container) == [project.sandbox["network"]],
                10,
                "the sandbox is on its own network alone",
            )
            rounds.append(seen(host, docker0))
        host.plain("python3", "-c", FLOOD, docker0, "0.2")
        assert seen(host, docker0) > rounds[-1] + 100
    print(f"{rounds} datagrams reached docker0's own address while the sandbox was on the bridge")
    host.box.wait_for(lambda: project.exists("done"), timeout=30)
    assert int(project.read("flooded")) > 1000
    assert host.internet.packets(forbidden) == 0
    assert "203.0.113.10" in project.read("got")
    rows = [row for row in strangers(host) if row["name"] == container]
    assert [row["network"] for row in rows] == ["bridge"]
    assert f"{container} on bridge" in project.corral("status").stdout
    assert "alone; disconnected" in host.user_journal(since)
    assert "to docker0" in host.writer_journal(since)
    host.control(forbidden)


@pytest.mark.case(6)
@pytest.mark.parametrize("other", ["bridge", "app"])
def test_with_both_services_frozen_a_connected_sandbox_still_keeps_its_default_route(
    host: Host, other: str
) -> None:
    forbidden = host.internet.addresses["forbidden"]
    project = host.project("frozen")
    project.write("flood.py", FLOOD)
    project.write("bound.py", BOUND)
    script = (
        "touch up; while [ ! -e go ]; do sleep 0.05; done; "
        f"python3 flood.py {forbidden} 1 > flooded; python3 bound.py eth1 {forbidden} 1; touch done; sleep 60"
    )
    container = sitting(host, project, script)
    before, network = route(host, container), project.sandbox["network"]
    if other != "bridge":
        host.box.run(["docker", "network", "create", other])
    try:
        with frozen(host, writer=True):
            host.box.run(["docker", "network", "connect", other, container])
            assert attached(host, container) == sorted([other, network])
            assert route(host, container) == before
            project.write("go", "")
            host.box.wait_for(lambda: project.exists("done"), timeout=20)
            assert int(project.read("flooded")) > 1000
            assert host.internet.packets(forbidden) == 0
        until(lambda: len(attached(host, container)) == 1, 10, "the sandbox is on its own network alone")
        host.control(forbidden)
    finally:
        if other != "bridge":
            host.box.run(["docker", "network", "rm", other])


@pytest.mark.case(6)
def test_with_the_enforcer_frozen_the_writer_alone_cuts_the_link_out_of_a_sandbox(host: Host) -> None:
    project = host.project("cut")
    container = sitting(host, project)
    network = project.sandbox["network"]
    neighbour = host.box.run(
        ["docker", "run", "-d", "--entrypoint", "sleep", image(host), "300"]
    ).stdout.strip()
    address = host.box.run(
        ["docker", "inspect", "-f", "{{.NetworkSettings.IPAddress}}", neighbour]
    ).stdout.strip()
    try:
        with witness(host, address), frozen(host):
            host.box.run(["docker", "network", "connect", "bridge", container])
            exec_ = ["docker", "exec", container, "python3", "-c", FLOOD, address, "0.5"]
            host.box.run(exec_)
            assert attached(host, container) == sorted([network, "bridge"])
            assert seen(host, address) == 0
            host.plain("python3", "-c", FLOOD, address, "0.2")
            assert seen(host, address) > 100
    finally:
        host.box.run(["docker", "rm", "-f", neighbour])
    until(lambda: attached(host, container) == [network], 10, "the sandbox is on its own network alone")
    # What is wrong with a session takes its names from it, and they come back when it is right again.
    curl = ["docker", "exec", container, "curl", "-sS", "-m", "5", "https://allowed1.corral.example/"]
    until(lambda: host.box.run(curl, check=False).returncode == 0, 20, "the sandbox's name works again")


@pytest.mark.case(6)
def test_a_foreign_container_connected_to_a_corral_network_reaches_nobody_on_it_and_keeps_its_own(
    host: Host,
) -> None:
    project = host.project("visited")
    listen = (
        "import socket; u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(('0.0.0.0', 9)); "
        "u.settimeout(90); open('up', 'w').close(); print(len(u.recv(9)), file=open('got', 'w'))"
    )
    project.start("python3", "-c", listen, marker="up")
    session = project.sandbox["sessions"][0]
    network, victim = project.sandbox["network"], session["address"]
    foreign = host.box.run(
        ["docker", "run", "-d", "--entrypoint", "sleep", image(host), "300"]
    ).stdout.strip()
    server = host.internet.addresses["forbidden"]
    flood = host.box.popen(["docker", "exec", foreign, "python3", "-c", FLOOD, victim, "6"])
    try:
        before = route(host, foreign)
        with witness(host, victim):
            host.box.run(["docker", "network", "connect", network, foreign])
            until(
                lambda: attached(host, foreign) == ["bridge"], 10, "the foreign container is off the network"
            )
            print(f"{seen(host, victim)} datagrams for the session arrived at the host from the flood")
        flood.wait(timeout=20)
        until(lambda: route(host, foreign) == before, 5, "its default route is its own again")
        host.internet.reset_counters()
        host.box.run(["docker", "exec", foreign, "python3", "-c", FLOOD, server, "0.2"])
        assert host.internet.packets(server) > 100
        assert not project.exists("got")
        rows = [row for row in strangers(host) if row["container"] == foreign]
        assert [row["network"] for row in rows] == [network]
        assert "corral did not start it; disconnected" in project.corral("status").stdout
        # The positive control: the listener hears what does arrive.
        pid = host.box.run(["docker", "inspect", "-f", "{{.State.Pid}}", session["container"]]).stdout.strip()
        host.root("nsenter", "-n", "-t", pid, "python3", "-c", FLOOD, victim, "0.2")
        host.box.wait_for(lambda: project.exists("got"), timeout=10)
    finally:
        host.box.kill(flood)
        host.box.run(["docker", "rm", "-f", foreign])


@pytest.mark.case(6)
def test_who_shares_a_sandboxs_network_is_stopped_and_asks_nobody(host: Host) -> None:
    forbidden = host.internet.addresses["forbidden"]
    project = host.project("shared")
    container = sitting(host, project)
    since, mark = time.time(), host.internet.mark()
    domain = f"joined-{time.time_ns()}.corral.example"
    tries = "import socket\nfor _ in range(100000):\n  s = socket.create_connection(('203.0.113.10', 443), 2); s.close()"
    host.internet.reset_counters()
    names = []
    try:
        for number, (code, *words) in enumerate(([FLOOD, forbidden, "60"], [ASK, domain, "60"], [tries])):
            names.append(f"joiner-{number}")
            command = ["docker", "run", "-d", "--name", names[-1], "--network", f"container:{container}"]
            command += [
                "--restart",
                "always",
                "--cap-add",
                "NET_ADMIN",
                "--user",
                "0",
                "--entrypoint",
                "python3",
            ]
            host.box.run([*command, image(host), "-c", code, *words])

        def running() -> list[str]:
            return host.box.run(["docker", "ps", "-q", "--filter", "name=joiner-"]).stdout.split()

        until(lambda: not running(), 10, "all of them are stopped")
        assert host.internet.packets(forbidden) == 0
        assert [query for query in host.internet.queries(mark) if query.name.endswith(domain)] == []
        print(
            f"{host.internet.packets('203.0.113.10', 'tcp', 443)} packets to an address of the sandbox's own list"
        )
        told = {row["name"]: row["reasons"] for row in strangers(host)}
        for name in names:
            assert told[name] == [
                f"it shares the network of {container}, and corral did not start it",
                "stopped",
            ]
        shown = project.corral("status").stdout
        assert all(name in shown for name in names)
        journal = host.user_journal(since)
        assert all(
            f"{name} on {project.sandbox['network']}: it shares the network" in journal for name in names
        )
        # The session itself is untouched.
        host.box.run(
            ["docker", "exec", container, "curl", "-sS", "-m", "5", "https://allowed1.corral.example/"]
        )
        host.plain("python3", "-c", ASK, f"control.{domain}", "1")
        assert [q for q in host.internet.queries(mark) if q.name.endswith(f"control.{domain}")]
        host.control(forbidden)
    finally:
        host.box.run(["docker", "rm", "-f", *names], check=False)


@pytest.mark.case(6)
def test_a_joiner_that_nobody_stops_reaches_what_the_sandbox_may_and_nothing_else(host: Host) -> None:
    forbidden = host.internet.addresses["forbidden"]
    project = host.project("joined")
    container = sitting(host, project)
    host.internet.reset_counters()
    mark = host.internet.mark()
    with frozen(host):
        command = [
            "docker",
            "run",
            "--rm",
            "--network",
            f"container:{container}",
            # All of the network's. --privileged asks 20.10 for capabilities that a machine around the box may lack.
            *("--cap-add", "NET_ADMIN", "--cap-add", "NET_RAW", "--cap-add", "SYS_ADMIN"),
            *("--security-opt", "seccomp=unconfined"),
            "--user",
            "0",
        ]
        command += ["--entrypoint", "python3", image(host), "-c"]
        host.box.run([*command, FLOOD, forbidden, "0.5"])
        host.box.run([*command, ASK, f"frozen-{time.time_ns()}.corral.example", "1"])
        assert host.internet.packets(forbidden) == 0
        assert host.internet.queries(mark) == []
        host.box.run([*command, "import socket; socket.create_connection(('203.0.113.10', 443), 5).close()"])
    host.control(forbidden)


@pytest.mark.case(6)
@pytest.mark.case(7)
@pytest.mark.engine(
    "trixie",
    "sid",
    "rootless",
    reason="Docker 20.10 refuses a privileged exec in a container without capabilities",
)
def test_root_by_exec_in_a_sandbox_reaches_nothing_with_other_addresses_frames_and_ipv6(host: Host) -> None:
    forbidden, forbidden6 = host.internet.addresses["forbidden"], host.internet.addresses["forbidden6"]
    project = host.project("entered")
    container = sitting(host, project)
    gateway = project.sandbox["gateway"]
    borrowed = f"{gateway.rpartition('.')[0]}.{int(gateway.rpartition('.')[2]) + 20}"
    mark = host.internet.mark()
    host.internet.reset_counters()
    # A privileged exec has every capability, but the container's /proc/sys stays read-only: root of the host
    # does that part in the same namespace.
    pid = host.box.run(["docker", "inspect", "-f", "{{.State.Pid}}", container]).stdout.strip()
    six = "for key in all default eth0; do echo 0 > /proc/sys/net/ipv6/conf/$key/disable_ipv6; done"
    host.root("nsenter", "-n", "-t", pid, "sh", "-c", six)
    enter = ["docker", "exec", "--privileged", "--user", "0", container, "python3", "-c"]
    told = json.loads(host.box.run([*enter, ATTACK, forbidden, forbidden6, gateway, borrowed]).stdout)
    domain = f"entered-{time.time_ns()}.corral.example"
    host.box.run([*enter, ASK, domain, "1"])
    assert told["raw"] == 250, told
    assert told["raw6"] == 50, told
    assert host.internet.all_packets().get(("udp", forbidden), 0) == 0, host.internet.all_packets()
    assert host.internet.packets(forbidden) == 0
    assert host.internet.packets(forbidden6) == 0
    assert [query for query in host.internet.queries(mark) if query.name.endswith(domain)] == []
    rows = [row for row in strangers(host) if row["name"] == container]
    assert rows
    assert all(row["reasons"][0].startswith("docker exec --privileged as 0") for row in rows), rows
    assert "docker exec --privileged as 0" in project.corral("status").stdout
    # The positive control: the same program in a container that is not fenced does reach it, by each way.
    docker0 = host.netadmin_shell("ip -4 -o addr show docker0").stdout.split()[3].partition("/")[0]
    other = f"{docker0.rpartition('.')[0]}.77"
    command = [
        "docker",
        "run",
        "--rm",
        "--privileged",
        "--user",
        "0",
        "--entrypoint",
        "python3",
        "--sysctl",
        "net.ipv6.conf.all.disable_ipv6=0",
        "--sysctl",
        "net.ipv6.conf.default.disable_ipv6=0",
        image(host),
    ]
    host.internet.reset_counters()
    # Engines since 28 switch IPv6 off for each interface of a network without it.
    attack = f"open('/proc/sys/net/ipv6/conf/eth0/disable_ipv6', 'w').write('0')\n{ATTACK}"
    free = json.loads(host.box.run([*command, "-c", attack, forbidden, forbidden6, docker0, other]).stdout)
    assert host.internet.packets(forbidden, "udp") >= free["own"] + free["borrowed"] + 50
    host.plain("python3", "-c", ASK, f"control.{domain}", "1")
    assert [query for query in host.internet.queries(mark) if query.name.endswith(f"control.{domain}")]
