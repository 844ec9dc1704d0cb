"""Sandboxes without a network of their own: nothing at all (none), or the host's (host)."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from .host import ENFORCER, EVERY_ENGINE, FLOOD, OWN_NAMESPACES, Host, Project

NONE = "profile: opencode\nlimits: {best_effort: true}\negress: {mode: none}\n"
HOST = NONE.replace("none", "host")
LISTED = NONE.replace("mode: none", "profile_defaults: false")
LISTENER = """\
import socket
s = socket.create_server(("127.0.0.1", 8899))
while True:
    c, _ = s.accept()
    c.sendall(b"the host's own")
    c.close()
"""
CONNECT = "import socket; c = socket.create_connection(('127.0.0.1', 8899), 5); print(c.recv(99).decode())"


def by_name(project: Project) -> dict[str, tuple[str, str]]:
    done = project.corral("verify", "--json", check=False, timeout=300)
    return {row["check"]: (row["status"], row["detail"]) for row in json.loads(done.stdout)["checks"]}


@contextmanager
def listening(host: Host, *, with_engine: bool = True) -> Iterator[None]:
    """A listener on the loopback interface of the host, or of the namespaces in which its user has an engine."""
    enter = OWN_NAMESPACES if with_engine and host.box.engine.rootless else ""
    process = host.box.popen(["bash", "-c", f"exec {enter}python3 -c {shlex.quote(LISTENER)}"])
    try:
        host.box.wait_for(lambda: ":8899" in host.shell(f"{enter}ss -Hltn").stdout)
        yield
    finally:
        host.box.kill(process)


@pytest.mark.representative
@EVERY_ENGINE
def test_without_a_network_there_is_only_lo_and_no_service_is_needed(host: Host) -> None:
    forbidden = host.internet.addresses["forbidden"]
    project = host.project("alone", NONE)
    host.user_systemctl("stop", ENFORCER)
    done = project.inside("cut", "-d:", "-f1", "/proc/net/dev")
    assert [line.strip() for line in done.stdout.splitlines()[2:]] == ["lo"]
    assert "OK: only lo, no route, nothing can be reached" in done.stderr
    assert "NOT ENFORCED" not in done.stderr
    with listening(host):
        # Its loopback interface is its own.
        assert "refused" in project.inside("python3", "-c", CONNECT, check=False).stderr
    project.inside("python3", "-c", FLOOD, forbidden, "0.2")
    assert host.internet.packets(forbidden) == 0
    found = by_name(project)
    assert not {name for name, (status, _) in found.items() if status == "fail"}, found
    assert found["only-loopback"][0] == found["no-network"][0] == found["gate"][0] == "ok"
    for name in ("unlisted-host-blocked", "dns-closed", "live-rules", "skeleton-in-path", "backstop"):
        status, detail = found[name]
        assert (status, "egress.mode is none" in detail) == ("skip", True), name
    assert not host.box.run(["docker", "network", "ls", "-q", "--filter", "name=corral-alone"]).stdout
    host.user_systemctl("start", ENFORCER)
    host.wait_enforcer()
    host.control(forbidden)


@EVERY_ENGINE
def test_what_needs_a_network_is_an_error_without_one_with_its_place_and_the_fix(host: Host) -> None:
    project = host.project("alone2", NONE)
    text = NONE.replace("mode: none", "mode: none, allow: [a.corral.example], from_host: [git]")
    project.policy(text + "host_services:\n  - {name: llama, port: 8081}\n", approve=False)
    done = project.inside("true", check=False)
    assert done.returncode == 2
    file = f"{project.path}/corral.yaml"
    assert f"{file}:3:29: egress.allow: egress.mode is none" in done.stderr
    assert f"{file}:5:3: host_services: egress.mode is none" in done.stderr
    assert "egress.from_host" in done.stderr
    assert "remove it, or use egress.mode: allowlist" in done.stderr
    project.policy(NONE.replace("none", "bridge"), approve=False)
    done = project.inside("true", check=False)
    assert (done.returncode, "open comes nearest" in done.stderr) == (2, True)


@pytest.mark.representative
@EVERY_ENGINE
def test_the_hosts_network_is_said_at_each_start_and_nothing_is_claimed_of_it(host: Host) -> None:
    project = host.project("wide", NONE)
    project.policy(HOST, approve=False)
    refused = project.inside("true", check=False)
    assert refused.returncode == 2
    assert "+ network all of this host's" in refused.stderr
    project.policy(HOST)
    with listening(host):
        done = project.inside("python3", "-c", CONNECT)
    assert done.stdout == "the host's own\n"
    if host.box.engine.rootless:
        # What such an engine calls the host's network is its own, behind slirp4netns.
        with listening(host, with_engine=False):
            assert "refused" in project.inside("python3", "-c", CONNECT, check=False).stderr
    assert "NOT ENFORCED" in done.stderr
    assert "127.0.0.1" in done.stderr
    assert "abstract unix sockets" in done.stderr
    # What is no part of the network holds.
    status = project.inside("grep", "-E", "^(CapBnd|NoNewPrivs):", "/proc/self/status").stdout
    assert status.split() == ["CapBnd:", "0000000000000000", "NoNewPrivs:", "1"]
    found = by_name(project)
    assert not {name for name, (status, _) in found.items() if status == "fail"}, found
    reach = ("unlisted-host-blocked", "dns-closed", "embedded-dns-closed", "ipv6-disabled", "no-ipv6-address")
    for name in (*reach, "live-rules", "skeleton-in-path", "backstop", "gate", "session-ready"):
        state, detail = found[name]
        assert (state, "NOT ENFORCED" in detail) == ("skip", True), name
    assert found["no-capabilities"][0] == found["mounts-equal-policy"][0] == "ok"


@EVERY_ENGINE
def test_status_tells_both_and_the_service_takes_neither_for_a_session(host: Host) -> None:
    alone, wide = host.project("alone3", NONE), host.project("wide3", HOST)
    for project in (alone, wide):
        project.start("sh", "-c", "touch up; sleep 300", marker="up")
    host.box.wait_for(lambda: len(json.loads(alone.corral("status", "--json").stdout)["apart"]) == 2)
    found = json.loads(alone.corral("status", "--json").stdout)
    assert not found["strangers"]
    assert not found["errors"]
    assert not [row for sandbox in found["sandboxes"] for row in sandbox["sessions"]]
    assert {(row["connection"], row["enforced"]) for row in found["apart"]} == {
        ("none", True),
        ("host", False),
    }
    text = alone.corral("status").stdout
    assert "NOT ENFORCED: on this host's own network" in text
    assert "no network (egress.mode: none)" in text
    # A restart of the service finds them again, and fails on neither.
    host.user_systemctl("restart", ENFORCER)
    host.wait_enforcer()
    host.box.wait_for(lambda: len(json.loads(alone.corral("status", "--json").stdout)["apart"]) == 2)
    # The control: beside them the fence of another sandbox is made as ever.
    other = host.project("listed3", LISTED)
    assert other.inside("echo", "ran").stdout == "ran\n"
    for project in (alone, wide):
        project.corral("down")
        assert not project.containers()
    host.box.wait_for(lambda: not json.loads(alone.corral("status", "--json").stdout)["apart"])


@EVERY_ENGINE
def test_a_network_that_somebody_connects_is_taken_away(host: Host) -> None:
    project = host.project("alone4", NONE)
    project.start("sh", "-c", "touch up; sleep 300", marker="up")
    (name,) = project.containers()
    joined = host.box.run(["docker", "network", "connect", "bridge", name], check=False)
    assert joined.returncode != 0
    host.box.run(["docker", "network", "disconnect", "none", name])
    host.box.run(["docker", "network", "connect", "bridge", name], check=False)
    shown = "{{range $name, $_ := .NetworkSettings.Networks}}{{$name}} {{end}}"

    def networks() -> list[str]:
        return host.box.run(["docker", "inspect", "-f", shown, name]).stdout.split()

    host.box.wait_for(lambda: "bridge" not in networks())


@EVERY_ENGINE
def test_leaving_none_is_a_widening_and_going_there_is_not(host: Host) -> None:
    project = host.project("alone5", LISTED)
    project.policy(NONE, approve=False)
    done = project.inside("echo", "ran")
    assert done.stdout == "ran\n"
    assert "egress.networks: one -> none" in done.stderr
    project.policy(LISTED, approve=False)
    done = project.inside("true", check=False)
    assert done.returncode == 2
    assert "egress.networks: none -> one" in done.stderr
