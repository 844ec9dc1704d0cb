"""corral on an engine that the user runs without root: no step of it is root's, and nothing gets past it.

The engine is in a network namespace of its own, behind slirp4netns. Its user has neither sudo nor group docker.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.lab import Box

from .engine_side import WRITER
from .flooding import host_sink
from .host import BASE_POLICY, ENFORCER, FLOOD, OWN_NAMESPACES, Done, Host, starts, until

pytestmark = pytest.mark.engine("rootless", reason="it is about an engine of the user's own")

DROP_INS = "/home/dev/.config/systemd/user/docker.service.d"
LOOPBACK = "10.0.2.2"
RESOLVER = "10.0.2.3"
HOST_PORT = 8099
# Sends until it is ended, and says so once a second's worth is out.
STREAM = """\
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for sent in range(10 ** 9):
    try:
        s.sendto(b"flood", (sys.argv[1], 9))
    except OSError:
        pass
    if sent == 1000:
        print("sending", flush=True)
    time.sleep(0.0005)
"""
ASK = """\
import socket, sys
from struct import pack
labels = b"".join(bytes([len(part)]) + part.encode() for part in sys.argv[2].split("."))
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(2)
try:
    s.sendto(pack("!HHHHHH", 7, 0x100, 1, 0, 0, 0) + labels + pack("!BHH", 0, 1, 1), (sys.argv[1], 53))
    print("answered", len(s.recv(512)))
except OSError as error:
    print("refused", error)
"""
TO_HOST = """\
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(50):
    try:
        s.sendto(b"x", (sys.argv[1], int(sys.argv[2])))
    except OSError:
        pass
"""


def within(host: Host, *argv: str, check: bool = True) -> Done:
    """Run a program in the engine's namespaces."""
    return host.shell(OWN_NAMESPACES + shlex.join(argv), check=check)


def restart_engine(host: Host) -> None:
    host.user_systemctl("daemon-reload")
    host.engine.restart()


def services(host: Host, verb: str) -> None:
    host.user_systemctl(verb, WRITER, ENFORCER)


@pytest.fixture
def own(host: Host) -> Iterator[Host]:
    """The host, which has corral and a guarded engine again afterwards, whatever a test did to them."""
    yield host
    host.engine.await_up()
    for name in host.box.run(["docker", "ps", "-aq", "--filter", "name=stranger"]).stdout.split():
        host.box.run(["docker", "rm", "-f", name], check=False)
    host.end_projects()
    host.box.run(["corral", "install"], timeout=180)
    host.wait_enforcer()


@contextlib.contextmanager
def stream(host: Host, network: str, address: str) -> Iterator[None]:
    """A container of somebody else's on a network, which sends, and is started by Docker whenever it can be."""
    image = host.box.run(["docker", "images", "-q", "corral/*"]).stdout.split()[0]
    command = ["docker", "run", "-d", "--name", "stranger", "--restart", "always", "--network", network]
    command += ["--entrypoint", "python3", image, "-c", STREAM, address]
    host.box.run(command)
    try:
        yield
    finally:
        host.box.run(["docker", "rm", "-f", "stranger"], check=False)


def started(host: Host) -> str:
    return host.box.run(["docker", "inspect", "-f", "{{.State.StartedAt}}", "stranger"], check=False).stdout


def await_sending(host: Host, since: str) -> None:
    """Wait until the stranger was started (again) and has sent a thousand datagrams."""

    def sends() -> bool:
        now = started(host).strip()
        said = host.box.run(["docker", "logs", "--since", now or "0", "stranger"], check=False).stdout
        return bool(now) and now != since and "sending" in said

    until(sends, 60, "the stranger sends")


@pytest.mark.case(25)
def test_an_ordinary_user_installs_verifies_and_runs_without_root_and_owns_all_files(host: Host) -> None:
    assert host.box.run(["sudo", "-n", "true"], check=False).returncode != 0
    assert "docker" not in host.box.run(["id", "-nG"]).stdout.split()
    project = host.project("own")
    told = json.loads(project.corral("verify", "--json").stdout)
    by_name = {row["check"]: row for row in told["checks"]}
    assert told["failed"] == 0, [row for row in told["checks"] if row["status"] == "fail"]
    assert by_name["uid-matches-host"]["detail"] == "1000:1000"
    assert by_name["root-owned:/usr/local/bin/corral-entrypoint"]["detail"].startswith("mounted read-only")
    fetched = project.inside("curl", "-sS", "https://allowed1.corral.example/")
    assert "203.0.113.10" in fetched.stdout
    project.inside("sh", "-c", "id -u; mkdir made && touch made/file && chmod 0777 made/file && touch /tmp/x")
    assert project.inside("id", "-u").stdout.strip() == "0"
    places = [project.path, "/home/dev/.local/share/corral", "/run/user/1000/corral"]
    assert host.root("find", *places, "!", "-uid", "1000").stdout == ""
    assert project.exists("made/file")
    rows = host.root("ps", "-eo", "uid=,args=").stdout.splitlines()
    ours = [row.split() for row in rows if "corral-" in row and "ps -eo" not in row]
    assert len(ours) >= 2
    assert {row[0] for row in ours} == {"1000"}, ours


@pytest.mark.fault("packets before policy, rootless")
def test_what_floods_from_its_first_instruction_gets_nothing_out_in_any_start(host: Host) -> None:
    forbidden = host.internet.addresses["forbidden"]
    project = host.project("first")
    project.inside("true")
    host.internet.reset_counters()
    sent = 0
    for _ in range(starts(20)):
        sent += int(project.inside("python3", "-c", FLOOD, forbidden, "0.2").stdout.split()[-1])
    assert sent > 1000 * starts(20)
    assert host.internet.packets(forbidden) == 0
    host.control(forbidden)


@pytest.mark.fault("rootless engine restarted with restart=always containers")
def test_a_container_that_the_engine_starts_before_us_meets_the_rules(own: Host) -> None:
    host, forbidden = own, own.internet.addresses["forbidden"]
    project = host.project("always")
    project.inside("true")
    network = f"0-corral-{project.sandbox['sandbox']}"
    # Nobody is there to take it off the network, or to load anything.
    services(host, "stop")
    host.internet.reset_counters()
    with stream(host, network, forbidden):
        await_sending(host, "")
        before = started(host).strip()
        host.user_systemctl("disable", WRITER, ENFORCER)
        restart_engine(host)
        await_sending(host, before)
        assert host.user_systemctl("is-active", WRITER, check=False).stdout.strip() == "inactive"
        assert host.internet.packets(forbidden) == 0
        # The control: the same engine without the guard. slirp4netns needs no masquerade to let it out.
        before = started(host).strip()
        host.box.run(["mv", f"{DROP_INS}/corral.conf", "/home/dev/corral.conf.off"])
        restart_engine(host)
        await_sending(host, before)
        assert host.internet.packets(forbidden) > 100
        refused = project.corral("run", "--", "true", check=False)
        # The writer does not enter such a namespace at all.
        assert host.user_systemctl("start", WRITER, check=False).returncode != 0
        host.user_systemctl("start", ENFORCER)
        doctor = json.loads(host.box.run(["corral", "doctor", "--json"], check=False).stdout)
    assert refused.returncode == 1
    until(
        lambda: "without corral's rules" in project.corral("run", "--", "true", check=False).stderr,
        30,
        "the refusal names the reason",
    )
    assert "COR-019" in {row["id"] for row in doctor["checks"] if row["state"] == "found"}, doctor


def test_after_a_restart_of_the_engine_the_writer_is_in_the_new_namespace(own: Host) -> None:
    host = own
    project = host.project("again")
    project.inside("true")
    old = host.engine.network()
    host.engine.kill()
    host.engine.await_up(other_than=old)
    host.wait_enforcer()
    writer = host.root("readlink", f"/proc/{host.engine.writer_pid()}/ns/net").stdout.strip()
    assert writer == host.engine.network() != old
    assert "203.0.113.20" in project.inside("curl", "-sS", "https://allowed2.corral.example/").stdout


@pytest.mark.case(11)
@pytest.mark.fault("dockerd restarted with live-restore")
@pytest.mark.parametrize("how", ["restart", "kill"])
def test_live_restore_keeps_no_container_of_such_an_engine_and_nothing_leaves(own: Host, how: str) -> None:
    """Why the tests of sessions that outlive an engine are not for this one."""
    host, forbidden = own, own.internet.addresses["forbidden"]
    project = host.project("outlives")
    project.write("flood.py", FLOOD)
    with host.engine_options(**{"live-restore": True}):
        told = host.box.run(["docker", "info", "-f", "{{.LiveRestoreEnabled}}"]).stdout
        assert told.strip() == "true"
        host.internet.reset_counters()
        script = f"trap '' TERM; touch up; python3 flood.py {forbidden} 120"
        process = project.start("sh", "-c", script, marker="up")
        before = host.engine.network()
        if how == "restart":
            host.engine.restart()
        else:
            host.engine.kill()
            host.engine.await_up(other_than=before)
        assert process.wait(60) != 0
        assert host.box.run(["docker", "ps", "-q"]).stdout == ""
        assert host.box.run(["pgrep", "-f", "flood.py"], check=False).stdout == ""
        assert host.internet.packets(forbidden) == 0
        host.control(forbidden)


@pytest.mark.case(1)
def test_a_host_service_is_reached_by_the_sandbox_that_lists_it_and_by_nobody_else(host: Host) -> None:
    serve = ["python3", "-m", "http.server", str(HOST_PORT), "--bind", "127.0.0.1", "--directory", "/etc/apt"]
    server = host.box.popen(serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        has = host.project("has", f"{BASE_POLICY}host_services:\n  - {{name: web, port: {HOST_PORT}}}\n")
        url = f"http://corral-host:{HOST_PORT}/"
        assert "apt.conf.d" in has.inside("curl", "-sS", "--noproxy", "*", url).stdout
        lacks = host.project("lacks")
        code = lacks.inside("curl", "-sS", "-m", "3", "--noproxy", "*", url, check=False).returncode
        assert code == 7
        gateway = has.sandbox["gateway"]
        outside = ["curl", "-sS", "-m", "3", "--noproxy", "*", f"http://{gateway}:{HOST_PORT}/"]
        assert host.plain(*outside, check=False).returncode != 0
        # A new namespace has a new bridge: the relay follows it.
        restart_engine(host)
        host.wait_enforcer()
        assert "apt.conf.d" in has.inside("curl", "-sS", "--noproxy", "*", url).stdout
    finally:
        Box.kill(server)


@pytest.fixture
def loopback(own: Host) -> Iterator[Host]:
    """An engine whose slirp4netns leads to the host's loopback: the least closed one there is."""
    text = "[Service]\nEnvironment=DOCKERD_ROOTLESS_ROOTLESSKIT_DISABLE_HOST_LOOPBACK=false\n"
    own.box.write(f"{DROP_INS}/loopback.conf", text)
    restart_engine(own)
    own.wait_enforcer()
    try:
        yield own
    finally:
        own.box.run(["rm", "-f", f"{DROP_INS}/loopback.conf"])
        restart_engine(own)


@pytest.mark.case(3)
def test_neither_the_hosts_loopback_nor_its_resolver_is_behind_slirps_addresses(loopback: Host) -> None:
    host = loopback
    project = host.project("slirp")
    project.inside("true")
    with host_sink(host) as sink:
        port = "9998"
        project.inside("python3", "-c", TO_HOST, LOOPBACK, port)
        asked = project.inside("python3", "-c", ASK, RESOLVER, "sandbox.corral.example").stdout
        assert "refused" in asked
        assert sink.heard == 0
        assert host.internet.queries(name="sandbox.corral.example") == []
        # The same from a container that is not fenced.
        host.plain("python3", "-c", TO_HOST, LOOPBACK, port)
        until(lambda: sink.heard > 0, 10, "the host's loopback hears the control")
        assert "answered" in host.plain("python3", "-c", ASK, RESOLVER, "plain.corral.example").stdout
        assert host.internet.queries(name="plain.corral.example") != []


def traces(host: Host) -> dict[str, Any]:
    """Everything of ours that there is."""
    return {
        "rules": [
            line
            for command in (
                ["iptables-nft", "-S"],
                ["iptables-nft", "-t", "nat", "-S"],
                ["nft", "list", "tables"],
            )
            for line in within(host, *command).stdout.splitlines()
            if "corral" in line.lower()
        ],
        "sets": within(host, "ipset", "list", "-n").stdout.split(),
        "units": host.shell("ls ~/.config/systemd/user ~/.config/systemd/user/*.d || true").stdout.split(),
        "loaded": host.user_systemctl("list-units", "--all", "--plain", "--no-legend", "corral*").stdout,
        "code": host.shell("ls ~/.local/share/corral/netfilter 2>/dev/null || true").stdout.split(),
        "runtime": host.shell("ls $XDG_RUNTIME_DIR/corral 2>/dev/null || true").stdout.split(),
        "networks": host.shell("docker network ls --format '{{.Name}}' | grep corral || true").stdout.split(),
        "processes": host.shell("pgrep -af 'corral-(enforcer|netfilter)' | grep -v pgrep || true").stdout,
    }


def test_uninstalling_needs_no_root_and_leaves_nothing_but_the_users_state(own: Host) -> None:
    host = own
    host.project("leave").start("sh", "-c", "touch up; sleep 300", marker="up")
    assert all(traces(host)[key] for key in ("rules", "sets", "code", "runtime", "networks", "processes"))
    refused = host.box.run(["corral", "uninstall", "--yes"], check=False, timeout=120)
    assert (refused.returncode, "corral uninstall --force" in refused.stderr) == (1, True)
    host.box.run(["corral", "uninstall", "--yes", "--force"], timeout=120)
    left = traces(host)
    units = [name for name in left.pop("units") if "corral" in name]
    assert not units
    assert not any(left.values()), left
    assert host.box.run(["docker", "version"]).returncode == 0
    # The engine that runs is not started again for it, and starts without us from now on.
    restart_engine(host)
    assert "corral" not in within(host, "iptables-nft", "-S").stdout.lower()
