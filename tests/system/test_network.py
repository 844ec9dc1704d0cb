"""What leaves a sandbox: counted at the far end, next to the same packets from a container that is not fenced."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from . import slirp
from .host import BASE_POLICY, FLOOD, Host, starts, until

pytestmark = pytest.mark.representative


@pytest.mark.smoke
@pytest.mark.fault("packets before policy")
def test_a_flood_as_the_first_act_reaches_nothing_in_any_start(host: Host) -> None:
    forbidden = host.internet.addresses["forbidden"]
    project = host.project("first-act")
    project.inside("true")
    network = project.sandbox["network"]
    host.internet.reset_counters()
    # Nothing runs before the program: neither the entrypoint nor what it checks.
    sent = [host.stray(forbidden, "0.3", network) for _ in range(starts(50))]
    assert sum(sent) > 100 * starts(50)
    assert host.internet.packets(forbidden) == 0, host.internet.all_packets()
    host.plain("python3", "-c", FLOOD, forbidden, "0.3")
    assert host.internet.packets(forbidden, "udp") > 100


def test_a_flood_right_after_the_gate_reaches_nothing_in_ten_starts(host: Host) -> None:
    forbidden = host.internet.addresses["forbidden"]
    project = host.project("second-act")
    project.write("flood.py", FLOOD)
    project.inside("true")
    host.internet.reset_counters()
    sent = [int(project.inside("python3", "flood.py", forbidden, "0.3").stdout) for _ in range(10)]
    assert sum(sent) > 10_000
    assert host.internet.packets(forbidden) == 0, host.internet.all_packets()
    host.plain("python3", "-c", FLOOD, forbidden, "0.3")
    assert host.internet.packets(forbidden, "udp") > 100


def test_a_container_that_corral_did_not_start_reaches_nothing_from_a_corral_network(host: Host) -> None:
    forbidden = host.internet.addresses["forbidden"]
    project = host.project("stranger")
    project.inside("true")
    host.internet.reset_counters()
    allowed = host.internet.addresses["allowed1"]
    assert host.stray(forbidden, "0.5", project.sandbox["network"]) > 100
    assert host.stray(allowed, "0.2", project.sandbox["network"]) > 100
    assert host.internet.packets(forbidden) == host.internet.packets(allowed) == 0


@pytest.mark.smoke
def test_allowed_tls_works_at_the_first_attempt(host: Host) -> None:
    project = host.project("first-tls")
    for _ in range(3):
        done = project.inside("curl", "-sS", "--retry", "0", "-m", "5", "https://allowed1.corral.example/")
        assert '"server": "203.0.113.10"' in done.stdout
    assert host.internet.packets("203.0.113.10", "tcp", 443) > 0


LOOK_UP = """\
import json, subprocess, sys, time
seen = {}
for name in sys.argv[1:]:
    for tool, argv in {
        "getent": ["getent", "hosts", name],
        "curl": ["curl", "-sS", "-m", "5", "-o", "/dev/null", f"https://{name}/"],
        "python": ["python3", "-c", f"import socket; socket.getaddrinfo('{name}', 443)"],
    }.items():
        started = time.monotonic()
        code = subprocess.run(argv, capture_output=True).returncode
        seen[f"{tool} {name}"] = [code, time.monotonic() - started]
print(json.dumps(seen))
"""


@pytest.mark.case(3)
@pytest.mark.parametrize("resolver", ["stub", "routable"])
def test_names_that_are_not_listed_fail_at_once_and_nobody_is_asked(host: Host, resolver: str) -> None:
    import json

    project = host.project("dns")
    project.write("look.py", LOOK_UP)
    unlisted = f"unlisted-{resolver}-{time.time_ns()}.corral.example"
    with host.box.resolver(resolver):
        project.inside("true")
        mark = host.internet.mark()
        # The positive control: the same question from the host does reach the far end's log.
        host.box.run(["getent", "hosts", f"control-{unlisted}"], check=False)
        seen = json.loads(project.inside("python3", "look.py", unlisted, "allowed1.corral.example").stdout)
        asked = host.internet.queries(mark)
    for what, (code, seconds) in seen.items():
        if unlisted in what:
            assert code != 0, what
            # Docker's resolver of 20.10 says nothing instead of no: a second for each of two questions.
            assert seconds < (3 if host.box.engine.suite == "bookworm" else 1), what
        else:
            assert code == 0, what
    assert [query for query in asked if query.name == f"control-{unlisted}"]
    # The service asks for what the policy lists, the sandbox for nothing.
    others = {query.name for query in asked} - {f"control-{unlisted}"}
    assert others <= {"allowed1.corral.example", "allowed2.corral.example"}


RAW_DNS = """\
import socket, struct, sys
def question(name, kind):
    body = b"".join(bytes([len(p)]) + p.encode() for p in name.split(".")) + b"\\0"
    return struct.pack("!HHHHHH", 7, 0x100, 1, 0, 0, 0) + body + struct.pack("!HH", kind, 1)
answers = 0
for server in sys.argv[2:]:
    for kind in (1, 16, 28):
        q = question(sys.argv[1], kind)
        try:
            u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.settimeout(0.5); u.connect((server, 53))
            u.send(q); r = u.recv(2000); answers += struct.unpack("!H", r[6:8])[0]
        except OSError: pass
        try:
            with socket.create_connection((server, 53), timeout=0.5) as t:
                t.sendall(struct.pack("!H", len(q)) + q); r = t.recv(2000)
                answers += struct.unpack("!H", r[8:10])[0] if len(r) > 10 else 0
        except OSError: pass
print(answers)
"""


@pytest.mark.case(3)
@pytest.mark.parametrize("resolver", ["stub", "routable"])
def test_no_name_server_answers_a_sandbox(host: Host, resolver: str) -> None:
    project = host.project("raw-dns")
    project.write("ask.py", RAW_DNS)
    listed, secret = "forbidden.corral.example", f"exfil-{resolver}-{time.time_ns()}.corral.example"
    with host.box.resolver(resolver):
        project.inside("true")
        servers = [
            "127.0.0.11",
            project.sandbox["gateway"],
            host.internet.addresses["resolver"],
            "127.0.0.53",
        ]
        # Where the engine is the user's own, the host's resolver has an address on its network.
        behind = [slirp.RESOLVER] if host.box.engine.rootless else []
        mark = host.internet.mark()
        for name in (listed, secret):
            assert project.inside("python3", "ask.py", name, *servers, *behind).stdout.strip() == "0"
        assert not [q for q in host.internet.queries(mark) if q.name in (listed, secret)]
        # The same program in a plain container gets its answer, and the log has the question.
        for server in [host.internet.addresses["resolver"], *behind]:
            mark = host.internet.mark()
            host.box.flush_dns()
            assert int(host.plain("python3", "-c", RAW_DNS, listed, server).stdout) > 0
            assert host.internet.queries(mark, listed)


@pytest.mark.case(15)
def test_of_a_lying_answer_only_the_good_address_is_pinned(host: Host) -> None:
    project = host.project("lies")
    project.inside("true")
    gateway = project.sandbox["gateway"]
    private = slirp.LOOPBACK if host.box.engine.rootless else "10.0.0.5"
    lies = ["127.0.0.1", "169.254.169.254", gateway, host.box.address, "172.17.0.1", private, "0.0.0.0"]
    host.internet.set_name("liar.corral.example", [*lies, "203.0.113.10"])
    host.box.flush_dns()
    project.policy(BASE_POLICY + "    - liar.corral.example\n")
    process = project.start(
        "sh", "-c", "getent ahostsv4 liar.corral.example > seen; touch up; sleep 60", marker="up"
    )
    assert {line.split()[0] for line in project.read("seen").splitlines()} == {"203.0.113.10"}
    session = project.sandbox["sessions"][0]
    row = next(name for name in session["names"] if name["name"] == "liar.corral.example")
    assert row["addresses"] == ["203.0.113.10"]
    assert "169.254.169.254 is link-local/metadata" in row["error"]
    assert "and 3 more" in row["error"]
    elements = host.netadmin("ipset", "list", "corral-pins").stdout
    for address in lies:
        assert f",{address} " not in elements
    assert ",203.0.113.10 " in elements
    host.box.kill(process)


@pytest.mark.case(15)
def test_a_name_with_nothing_but_lies_stops_the_start_and_is_named(host: Host) -> None:
    host.internet.set_name("liar.corral.example", ["169.254.169.254", "127.0.0.1"])
    host.box.flush_dns()
    project = host.project("only-lies", BASE_POLICY + "    - liar.corral.example\n")
    done = project.inside("touch", "ran", check=False)
    assert done.returncode == 1
    assert "liar.corral.example" in done.stderr
    assert "169.254.169.254" in done.stderr
    assert not project.exists("ran")
    assert project.containers() == []


@pytest.mark.case(18)
def test_all_names_that_do_not_resolve_are_named_at_once(host: Host) -> None:
    extra = "    - missing1.corral.example\n    - missing2.corral.example\n"
    optional = "    - {host: missing3.corral.example, optional: true}\n"
    project = host.project("missing", BASE_POLICY + extra + optional)
    done = project.inside("touch", "ran", check=False)
    assert done.returncode == 1
    assert "missing1.corral.example" in done.stderr
    assert "missing2.corral.example" in done.stderr
    assert "missing3.corral.example" not in done.stderr
    project.policy(BASE_POLICY + optional)
    done = project.inside("touch", "ran")
    assert "missing3.corral.example" in done.stderr
    assert project.exists("ran")


SERVICE = BASE_POLICY + "host_services:\n  - {name: llama, port: 8081}\n"
HELLO = "import http.server; http.server.ThreadingHTTPServer(('127.0.0.1', 8081), type('H', (http.server.BaseHTTPRequestHandler,), {'do_GET': lambda s: (s.send_response(200), s.end_headers(), s.wfile.write(b'llama'))})).serve_forever()"


@pytest.mark.case(1)
def test_a_host_service_is_reachable_inside_and_nowhere_else(host: Host) -> None:
    curl = ["curl", "-sS", "--noproxy", "*", "-m", "3"]
    with slirp.with_loopback(host), served(host, "python3", "-c", HELLO):
        project, other = host.project("service", SERVICE), host.project("no-service")
        assert project.inside(*curl, "http://corral-host:8081/").stdout == "llama"
        process = project.start("sh", "-c", "touch up; sleep 60", marker="up")
        gateway = project.sandbox["gateway"]
        url = f"http://{gateway}:8081/"
        # From the host itself it is there; from everywhere else it is not.
        assert slirp.near(host, *curl, url).stdout == "llama"
        assert other.inside(*curl, url, check=False).returncode != 0
        assert host.plain(*curl, url, check=False).returncode != 0
        assert other.inside(*curl, "http://corral-host:8081/", check=False).returncode != 0
        for address in (host.box.address, "172.17.0.1"):
            assert project.inside(*curl, f"http://{address}:8081/", check=False).returncode != 0
        if host.box.engine.rootless:
            # A way past the relay, which is open to whoever is not fenced.
            past = f"http://{slirp.LOOPBACK}:8081/"
            assert host.plain(*curl, past).stdout == "llama"
            assert project.inside(*curl, past, check=False).returncode == 7
            assert other.inside(*curl, past, check=False).returncode == 7
        assert "203.0.113" not in gateway
        host.box.kill(process)


@contextmanager
def served(host: Host, *argv: str) -> Iterator[None]:
    """A server on the host."""
    server = host.box.popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        host.box.kill(server)


@contextmanager
def served_near(host: Host, *argv: str) -> Iterator[None]:
    """The same in the engine's network, where that is not the host's."""
    entering = host.engine.entering()
    server = host.box.popen([*entering, *argv], user="root") if entering else None
    try:
        yield
    finally:
        if server is not None:
            host.box.kill(server)


@pytest.mark.case(1)
def test_a_server_on_all_addresses_of_the_host_is_closed_to_a_sandbox(host: Host) -> None:
    serve = ["python3", "-m", "http.server", "9000", "--bind", "0.0.0.0"]
    curl = ["curl", "-s", "--noproxy", "*", "-m", "3", "-o", "/dev/null"]
    with slirp.with_loopback(host), served(host, *serve), served_near(host, *serve):
        project = host.project("host-ports")
        project.inside("true")
        gateway = project.sandbox["gateway"]
        local = "http://127.0.0.1:9000/"
        host.box.wait_for([*curl, local])
        host.box.wait_for(lambda: slirp.near(host, *curl, local, check=False).returncode == 0)
        # Each with who reaches it: the host itself, and on a network of the engine's own any container.
        addresses = {gateway: slirp.near, "172.17.0.1": slirp.near, host.box.address: slirp.near}
        if host.box.engine.rootless:
            behind = (slirp.LOOPBACK, slirp.OWN, "172.17.0.1", host.box.address)
            addresses |= dict.fromkeys(behind, Host.plain)
        for address, reaches in addresses.items():
            url = f"http://{address}:9000/"
            assert reaches(host, *curl, url).returncode == 0, address
            assert project.inside(*curl, url, check=False).returncode == 7, address


@pytest.mark.case(4)
def test_ipv6_is_closed(host: Host) -> None:
    forbidden = host.internet.addresses["forbidden6"]
    project = host.project("six")
    send = (
        "import socket,sys\ns=socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)\n"
        "for _ in range(20):\n  s.sendto(b'x',(sys.argv[1],9))\n"
    )
    with slirp.with_ipv6(host):
        host.internet.reset_counters()
        # Whoever is where the engine's bridges are gets out.
        slirp.near(host, "python3", "-c", send, forbidden)
        until(lambda: host.internet.packets(forbidden) >= 20, 10, "the control arrives")
        host.internet.reset_counters()
        assert project.inside("python3", "-c", send, forbidden, check=False).returncode != 0
        assert host.internet.packets(forbidden) == 0
