"""Positive controls: what the lab promises is so, and its instruments can see what they are there to see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import Box, Internet, Lab, LabError
from tests.lab.execute import Process, wait_until
from tests.lab.facts import describe
from tests.lab.layout import BASE_IMAGE, BOX, GATEWAY, PROXY_PORT, Layout
from tests.lab.network import netns_exists
from tests.lab.product import PROJECT, interpreter, sources
from tests.lab.registries import read_registries
from tests.lab.state import State, remains

pytestmark = pytest.mark.representative

LIMITS = {name: Path(name).read_text() for name in ("/proc/sys/fs/nr_open", "/proc/sys/fs/file-max")}
"""As they are before a lab comes up."""

DIAL = """
import socket, sys
kind, address, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
family = socket.AF_INET6 if ":" in address else socket.AF_INET
s = socket.socket(family, socket.SOCK_DGRAM if kind == "udp" else socket.SOCK_STREAM)
s.settimeout(5)
s.connect((address, port))
s.send(b"x")
"""


FORKS = """
import os, time
forked = 0
while forked < 200:
    try:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
    except BlockingIOError:
        break
    forked += 1
print(forked, flush=True)
"""

HOG = """
kept = [b"x" * 1048576 for _ in range(200)]
print("kept", flush=True)
"""

SPIN = """
import glob, time
end = time.process_time() + 0.2
while time.process_time() < end:
    pass
for path in glob.glob("/sys/fs/cgroup/cpu.stat") + glob.glob("/sys/fs/cgroup/cpu/cpu.stat"):
    print(*(line.split()[1] for line in open(path) if line.startswith("nr_throttled")))
"""


def dial(box: Box, kind: str, address: str, port: int) -> None:
    box.run(["python3", "-c", DIAL, kind, address, str(port)])


def in_container(box: Box, program: str, *limits: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program in a plain container with these limits; the Python is the box's own."""
    command = ["docker", "run", "--rm", "--network", "none", "-v", "/usr:/usr:ro", *limits]
    return box.run([*command, BASE_IMAGE, "/usr/bin/python3", "-c", program], check=False)


def test_engine_is_the_one_its_debian_ships(box: Box) -> None:
    running = box.run(["docker", "version", "--format", "{{.Server.Version}}"]).stdout.strip()
    shipped = box.run(["dpkg-query", "-W", "-f", "${Version}", "docker.io"]).stdout
    assert running.partition("+")[0] == shipped.partition("+")[0]
    assert running.startswith(box.engine.version or "")
    assert describe(box)["engine"] == f"Docker Engine {running}"


def test_engine_discards_no_limit(box: Box) -> None:
    assert box.unlimited() == []


@pytest.mark.smoke
def test_processes_of_a_container_are_bounded(box: Box) -> None:
    assert in_container(box, FORKS).stdout.strip() == "200"
    held = int(in_container(box, FORKS, "--pids-limit", "50").stdout)
    assert 0 < held < 50


@pytest.mark.smoke
def test_memory_of_a_container_is_bounded(box: Box) -> None:
    assert in_container(box, HOG, "--memory", "512m").stdout.strip() == "kept"
    killed = in_container(box, HOG, "--memory", "64m", "--memory-swap", "64m")
    assert (killed.returncode, killed.stdout) == (137, "")


@pytest.mark.smoke
def test_processor_time_of_a_container_is_bounded(box: Box) -> None:
    assert int(in_container(box, SPIN, "--cpus", "0.1").stdout) > 0
    assert int(in_container(box, SPIN).stdout) == 0


def test_mounts_of_the_engine_are_seen_in_the_box(box: Box) -> None:
    """As on a host: neither the engine nor its containerd lives in a mount namespace that hides them."""
    box.run(["docker", "run", "-d", "--rm", "--name", "seen", "--network", "none", BASE_IMAGE, "sleep", "60"])
    try:
        where = box.run(["docker", "inspect", "-f", "{{.GraphDriver.Data.MergedDir}}", "seen"]).stdout.strip()
        assert "bash" in box.run(["ls", f"{where}/bin"], user="root").stdout
    finally:
        box.run(["docker", "rm", "-f", "seen"])


def test_ordinary_user_has_docker_and_sudo_and_no_capability(box: Box) -> None:
    said = box.run(["sh", "-c", "id -un; id -Gn; sudo -n id -u; grep CapEff /proc/self/status"]).stdout.split(
        "\n"
    )
    assert said[0] == "dev"
    assert "docker" in said[1].split()
    assert said[2] == "0"
    assert said[3].split()[1].strip("0") == ""


def test_user_manager_runs_without_a_terminal(box: Box) -> None:
    assert box.run(["systemctl", "--user", "is-system-running"]).stdout.strip() == "running"
    told = box.run(
        ["systemd-run", "--user", "--pipe", "--wait", "-q", "sh", "-c", "echo $XDG_RUNTIME_DIR; tty"],
        check=False,
    )
    assert told.stdout.split("\n")[0] == "/run/user/1000"
    assert "not a tty" in told.stdout


def test_user_manager_has_control_groups_of_its_own(box: Box) -> None:
    scope = ["systemd-run", "--user", "--scope", "-q", "--unit=own", "cat", "/proc/self/cgroup"]
    assert "/user.slice/user-1000.slice/user@1000.service/app.slice/own.scope" in box.run(scope).stdout


def test_counter_sees_a_plain_container_reach_the_forbidden_address(box: Box, internet: Internet) -> None:
    forbidden = internet.addresses["forbidden"]
    send = f"for n in 1 2 3; do echo x >/dev/udp/{forbidden}/{internet.sink_port}; done"
    box.run(["docker", "run", "--rm", BASE_IMAGE, "bash", "-c", send])
    assert internet.packets(forbidden, "udp") == 3
    assert internet.packets(forbidden, "udp", port=internet.sink_port) == 3
    assert internet.packets(forbidden, "tcp") == 0


def test_counter_sees_what_nothing_listens_to(box: Box, internet: Internet) -> None:
    forbidden = internet.addresses["forbidden"]
    dial(box, "udp", forbidden, 9999)
    with pytest.raises(LabError):
        dial(box, "tcp", forbidden, 9998)
    assert internet.packets(forbidden, port=9999) == 1
    assert internet.packets(forbidden, "tcp", port=9998) >= 1


def test_counter_sees_addresses_beyond_the_servers(box: Box, internet: Internet) -> None:
    dial(box, "udp", "192.0.2.1", 53)
    assert internet.packets("192.0.2.1", "udp", port=53) == 1


def test_counter_sees_ipv6(box: Box, internet: Internet) -> None:
    forbidden = internet.addresses["forbidden6"]
    dial(box, "udp", forbidden, internet.sink_port)
    assert internet.packets(forbidden, "udp") == 1


def test_counters_start_at_zero_after_a_reset(box: Box, internet: Internet) -> None:
    dial(box, "udp", internet.addresses["forbidden"], internet.sink_port)
    internet.reset_counters()
    assert internet.packets(internet.addresses["forbidden"]) == 0


def test_what_a_server_sends_to_a_client_that_is_gone_ends_with_the_test_whose_client_it_was(
    box: Box, internet: Internet
) -> None:
    forbidden = internet.addresses["forbidden"]
    refuse = ["INPUT", "-s", forbidden, "-j", "REJECT", "--reject-with", "icmp-host-unreachable"]
    url = f"http://{forbidden}/stream?interval=0.1&count=1000"
    client = box.popen(["curl", "-sN", url], stdout=subprocess.DEVNULL)
    try:
        box.wait_for(lambda: internet.packets(forbidden, "tcp") > 5, timeout=20)
        box.run(["iptables", "-I", *refuse], user="root")
        # It sends again, and is answered each time.
        box.wait_for(lambda: internet.packets(forbidden, "icmp") > 1, timeout=20)
        assert internet.all_packets()["destination-unreachable", forbidden, "host-unreachable"] > 1
        box.wait_for(lambda: len(internet.stuck()) == 1, timeout=20)
        internet.end_stuck()
        assert internet.stuck() == []
    finally:
        box.kill(client)
        box.run(["iptables", "-D", *refuse], user="root", check=False)


def test_query_log_records_who_asked_for_what(box: Box, internet: Internet) -> None:
    mark = internet.mark()
    box.flush_dns()
    box.run(["getent", "ahostsv4", "allowed1.corral.example"])
    asked = internet.queries(mark, "allowed1.corral.example")
    assert asked
    assert {query.source for query in asked} == {BOX}
    assert "A" in {query.type for query in asked}


def test_query_log_records_a_container_that_asks(box: Box, internet: Internet) -> None:
    mark = internet.mark()
    box.run(
        ["docker", "run", "--rm", BASE_IMAGE, "getent", "hosts", "asked-by-container.corral.example"],
        check=False,
    )
    assert internet.queries(mark, "asked-by-container.corral.example")


def test_names_change_while_the_box_runs(box: Box, internet: Internet) -> None:
    internet.set_name("moving.corral.example", ["203.0.113.40", "203.0.113.41"], ttl=1)
    answer = box.run(["getent", "ahostsv4", "moving.corral.example"]).stdout
    assert {line.split()[0] for line in answer.splitlines()} == {"203.0.113.40", "203.0.113.41"}
    internet.remove_name("moving.corral.example")
    box.flush_dns()
    assert box.run(["getent", "ahostsv4", "moving.corral.example"], check=False).returncode == 2


def test_record_carries_its_ttl(box: Box, internet: Internet) -> None:
    internet.set_name("brief.corral.example", ["203.0.113.42"], ttl=7)
    box.flush_dns()
    raw = box.run(["python3", "-c", ASK_TTL, internet.addresses["resolver"], "brief.corral.example"]).stdout
    assert raw.strip() == "7"


def test_no_question_is_lost_while_names_change(box: Box, internet: Internet) -> None:
    asking = box.popen(
        ["python3", "-c", ASK_ON, internet.addresses["resolver"]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert asking.stdout
    assert asking.stdin
    try:
        assert asking.stdout.readline() == b"asking\n"
        for last in range(50, 60):
            internet.set_name("moving.corral.example", [f"203.0.113.{last}"])
        out, _ = asking.communicate(b"\n", timeout=20)
    finally:
        box.kill(asking)
    answered, failed = map(int, out.split())
    assert answered > 20
    assert failed == 0


def test_names_change_while_a_question_over_tcp_is_open(box: Box, internet: Internet) -> None:
    hold = box.popen(["python3", "-c", HOLD, internet.addresses["resolver"]], stdout=subprocess.PIPE)
    try:
        assert hold.stdout
        assert hold.stdout.readline() == b"connected\n"
        for last in range(70, 73):
            internet.set_name("moving.corral.example", [f"203.0.113.{last}"])
        box.flush_dns()
        assert box.run(["getent", "ahostsv4", "moving.corral.example"]).stdout.startswith("203.0.113.72 ")
    finally:
        box.kill(hold)


def test_resolver_switches_between_stub_and_routable(box: Box, internet: Internet) -> None:
    assert "nameserver 127.0.0.53" in box.read("/etc/resolv.conf")
    with box.resolver("routable"):
        assert box.read("/etc/resolv.conf") == f"nameserver {internet.addresses['resolver']}\n"
        box.run(["getent", "ahostsv4", "allowed1.corral.example"])
    assert "nameserver 127.0.0.53" in box.read("/etc/resolv.conf")


@pytest.mark.parametrize("name", ["allowed1.corral.example", "allowed2.corral.example", "openrouter.ai"])
def test_https_with_the_test_ca_works_from_the_box(box: Box, internet: Internet, name: str) -> None:
    told = json.loads(box.run(["curl", "-sS", f"https://{name}/"]).stdout)
    assert told["host"] == name
    assert [told["server"]] == internet.names[name]


def test_server_unknown_to_the_ca_is_refused_by_clients(box: Box) -> None:
    empty = box.run(
        ["curl", "-sS", "--cacert", "/etc/machine-id", "https://allowed1.corral.example/"], check=False
    )
    assert empty.returncode != 0


def test_https_with_the_test_ca_works_from_a_plain_container(box: Box, internet: Internet) -> None:
    box.write("/home/dev/tls/ca.crt", internet.ca_pem)
    box.write("/home/dev/tls/fetch.py", FETCH)
    python = ["-v", "/usr:/usr:ro", "-v", "/home/dev/tls:/tls:ro"]  # the box's python, for the base has none
    command = [
        "docker",
        "run",
        "--rm",
        *python,
        BASE_IMAGE,
        "/usr/bin/python3",
        "/tls/fetch.py",
        "allowed1.corral.example",
    ]
    assert json.loads(box.run(command).stdout)["host"] == "allowed1.corral.example"


def test_stream_sends_a_byte_at_a_time(box: Box) -> None:
    url = "https://allowed1.corral.example/stream?interval=0.01&count=12"
    assert box.run(["curl", "-sSN", url]).stdout == "012345678901"


def test_files_are_served_and_nothing_outside_their_directory(box: Box, internet: Internet) -> None:
    (internet.files / "a directory").mkdir(exist_ok=True)
    (internet.files / "a directory/index.html").write_text("listed\n")
    fetch = ["curl", "-sS", "--path-as-is", "-w", "%{http_code}", "https://allowed1.corral.example/files/"]
    assert box.run([*fetch[:-1], fetch[-1] + "a%20directory/"]).stdout == "listed\n200"
    for path in ("none", "../ca.key", "%2e%2e/ca.key", "%00"):
        assert box.run([*fetch[:-1], fetch[-1] + path]).stdout == "404", path


def test_echo_answers_from_the_address_that_was_asked(box: Box, internet: Internet) -> None:
    for kind in ("udp", "tcp"):
        script = DIAL + "print(s.recv(10), s.getpeername()[0])"
        told = box.run(
            ["python3", "-c", script, kind, internet.addresses["allowed2"], str(internet.echo_port)]
        )
        assert told.stdout == f"b'x' {internet.addresses['allowed2']}\n"


def test_registry_proxy_allows_a_registry_and_refuses_everything_else(box: Box) -> None:
    registries = read_registries()
    assert registries.hosts
    code = ["curl", "-sS", "-o", "/dev/null", "-w", "%{http_code} %{http_connect}", "--noproxy", ""]
    index = box.run([*code, f"{registries.mirror}/dists/bookworm/InRelease"]).stdout
    assert index.split()[0] == "200"
    tunnels = {
        box.run([*code, f"https://{host}/"], check=False).stdout.split()[1] for host in registries.hosts
    }
    assert "200" in tunnels
    assert "403" not in tunnels
    refused = box.run([*code, "https://forbidden.corral.example/"], check=False)
    assert refused.stdout.split()[1] == "403"
    assert box.run([*code, "http://forbidden.corral.example/"]).stdout.split()[0] == "403"


def test_docker_build_reaches_the_registries_through_the_proxy(box: Box) -> None:
    proxy = f"http://{GATEWAY}:{PROXY_PORT}"
    box.write(
        "/home/dev/build/Dockerfile",
        f"FROM {BASE_IMAGE}\nRUN apt-get update -q && apt-cache policy ripgrep\n",
    )
    arguments = [f"--build-arg={name}={proxy}" for name in ("http_proxy", "https_proxy")]
    for builder in ("0", "1"):
        command = ["docker", "build", "--no-cache", "-q", *arguments, "/home/dev/build"]
        assert box.run(command, env={"DOCKER_BUILDKIT": builder}, timeout=120).stdout.startswith("sha256:")


def test_corral_is_installed_with_the_boxs_python_and_once(lab: Lab, box: Box, tmp_path: Path) -> None:
    for file in sources(PROJECT):
        copy = tmp_path / file.relative_to(PROJECT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    assert lab.install_corral(project=tmp_path).startswith("corral ")
    python = interpreter(box)
    where = box.run([python, "-c", "import corral, sys; print(sys.version_info[:2], corral.__file__)"]).stdout
    own = box.run(["/usr/bin/python3", "-c", "import sys; print(sys.version_info[:2])"]).stdout.strip()
    assert where.startswith(f"{own} {python.removesuffix('/bin/python')}/lib/")
    before = box.run(["stat", "-c", "%i %Y", python, where.split()[-1]]).stdout
    lab.install_corral(project=tmp_path)
    assert box.run(["stat", "-c", "%i %Y", python, where.split()[-1]]).stdout == before


def test_there_is_no_way_out_but_the_proxy(box: Box, internet: Internet) -> None:
    """The gateway of the box forwards nothing: the packet arrives in the lab's internet and ends there."""
    host = next(iter(read_registries().hosts))
    assert box.run(["getent", "ahosts", host], check=False).returncode == 2
    with pytest.raises(LabError):
        box.run(["curl", "-sS", "--noproxy", "*", "--max-time", "2", "http://192.0.2.2/"])
    assert internet.packets("192.0.2.2", "tcp") >= 1


def test_a_late_command_is_killed_with_its_children(box: Box) -> None:
    with pytest.raises(LabError, match=r"did not end within 1 s"):
        box.run(["sh", "-c", "sleep 4711 & sleep 4711"], timeout=1)
    box.wait_for(lambda: box.run(["pgrep", "-f", "^sleep 4711"], check=False).returncode == 1)


def test_reboot_loses_network_state_and_keeps_the_disk(box: Box, internet: Internet) -> None:
    box.write("/home/dev/kept", "on disk")
    box.run(["nft", "add", "table", "inet", "lost"], user="root")
    box.reboot()
    assert box.read("/home/dev/kept") == "on disk"
    assert "lost" not in box.run(["nft", "list", "tables"], user="root").stdout
    assert box.run(["curl", "-sS", "-o", "/dev/null", "https://allowed1.corral.example/"]).returncode == 0
    assert BASE_IMAGE.split(":")[0] in box.run(["docker", "images"]).stdout


def test_kernel_wide_limits_are_as_they_were(lab: Lab) -> None:
    """systemd raises these for the whole kernel when it boots; the machine gets its own back."""
    lab.box.reboot(hard=True)
    assert {name: Path(name).read_text() for name in LIMITS} == LIMITS


def test_a_second_process_cannot_take_a_lab_that_is_held(lab: Lab) -> None:
    script = "import sys; from tests.lab import Lab; Lab.up(sys.argv[1])"
    second = subprocess.run(
        [sys.executable, "-c", script, lab.name], capture_output=True, text=True, check=False
    )
    assert second.returncode == 1
    assert f"lab {lab.name} is in use by process {os.getpid()}" in second.stderr
    assert lab.ready()


class TestLifeOfAnotherLab:
    """A second lab beside the first: killed, interrupted, taken down."""

    NAME = f"{Layout.of().name}-2"

    @pytest.fixture(autouse=True)
    def _nothing_stays(self) -> Iterator[None]:
        yield
        Lab.named(self.NAME).down()

    def test_recovers_from_kill_9_of_everything_and_leaves_nothing(self) -> None:
        layout = Layout.of(self.NAME)
        Lab.up(self.NAME, keep=True).close()
        first = State(layout).processes()
        for process in first.values():
            process.kill()
        wait_until(lambda: not any(process.alive() for process in first.values()), "they end", 20)
        assert not Lab.named(self.NAME).ready()
        again = Lab.up(self.NAME, keep=False)
        assert not set(first.values()) & set(State(layout).processes().values())
        assert again.box.run(["docker", "ps", "-q"]).stdout == ""
        second = State(layout).processes()
        again.close()
        assert not remains(layout)
        assert not any(process.alive() for process in second.values())
        assert not netns_exists(layout.box_netns)
        assert str(layout.run) not in Path("/proc/self/mountinfo").read_text()

    def test_kept_lab_is_used_again_only_while_healthy(self) -> None:
        one = Lab.up(self.NAME, keep=True)
        leader = one.box.leader
        one.internet.set_name("extra.corral.example", ["203.0.113.99"])
        one.close()
        two = Lab.up(self.NAME)
        assert two.box.leader == leader
        assert "extra.corral.example" not in two.internet.names
        two.box.run(["systemctl", "kill", "-s", "KILL", "docker.service"], user="root")
        two.box.run(["systemctl", "stop", "docker.socket", "docker.service"], user="root")
        two.close()
        three = Lab.up(self.NAME, keep=True)
        third = three.box.leader
        assert third != leader
        three.close()
        nspawn = State(Layout.of(self.NAME)).get("nspawn")
        assert nspawn
        nspawn.kill()
        wait_until(lambda: not nspawn.alive(), "it ends", 20)
        with Lab.up(self.NAME, keep=False) as four:
            assert four.box.leader != third
            assert four.box.healthy()

    def test_interrupted_start_leaves_nothing(self) -> None:
        layout = Layout.of(self.NAME)
        starting = subprocess.Popen(
            [sys.executable, "-m", "tests.lab", "up", "--name", self.NAME], stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        while not State(layout).get("nspawn"):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        nspawn = State(layout).get("nspawn")
        starting.terminate()
        assert starting.wait(30) == 130
        assert not remains(layout)
        assert isinstance(nspawn, Process)
        assert not nspawn.alive()


ASK_TTL = """
import socket, struct, sys
def question(name, number=1):
    labels = b"".join(bytes([len(l)]) + l.encode() for l in name.split("."))
    return struct.pack("!6H", number, 256, 1, 0, 0, 0) + labels + b"\\0" + struct.pack("!2H", 1, 1)
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(5)
s.sendto(question(sys.argv[2]), (sys.argv[1], 53))
answer = s.recv(512)[len(question(sys.argv[2])):]
print(struct.unpack("!I", answer[6:10])[0])
"""

ASK_ON = """
import select, socket, struct, sys
name = "allowed1.corral.example"
labels = b"".join(bytes([len(l)]) + l.encode() for l in name.split("."))
answered = failed = 0
print("asking", flush=True)
while not select.select([sys.stdin], [], [], 0.005)[0]:
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.settimeout(2)
    try:
        s.connect((sys.argv[1], 53))
        s.send(struct.pack("!6H", 1, 256, 1, 0, 0, 0) + labels + b"\\0" + struct.pack("!2H", 1, 1))
        answered += struct.unpack("!H", s.recv(512)[6:8])[0] == 1
    except OSError:
        failed += 1
    s.close()
print(answered, failed)
"""

HOLD = """
import socket, sys, time
held = socket.create_connection((sys.argv[1], 53), timeout=5)
print("connected", flush=True)
time.sleep(60)
"""

FETCH = """
import ssl, sys, urllib.request
context = ssl.create_default_context(cafile="/tls/ca.crt")
print(urllib.request.urlopen(f"https://{sys.argv[1]}/", context=context, timeout=5).read().decode())
"""
