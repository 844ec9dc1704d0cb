"""Other runtimes: one that Docker has not, and runc under another name, which shows the plumbing and no more."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from .host import BASE_POLICY, FLOOD, Host

DAEMON = "/etc/docker/daemon.json"


def policy(runtime: str) -> str:
    return f"runtime: {runtime}\n{BASE_POLICY}"


@pytest.fixture
def named(host: Host) -> Iterator[None]:
    """Docker knows a runtime runsc."""
    before = host.root("cat", DAEMON, check=False).stdout
    body = {**json.loads(before or "{}"), "runtimes": {"runsc": {"path": "runc"}}}
    host.box.write(DAEMON, json.dumps(body), owner="root")
    host.root("systemctl", "reload", "docker")
    try:
        host.box.wait_for(lambda: "runsc" in host.root("docker", "info", "-f", "{{.Runtimes}}").stdout)
        yield
    finally:
        host.end_projects()
        if before:
            host.box.write(DAEMON, before, owner="root")
        else:
            host.root("rm", DAEMON)
        host.root("systemctl", "reload", "docker")


def test_a_runtime_that_docker_has_not_starts_nothing(host: Host) -> None:
    project = host.project("kata", policy("kata"))
    done = project.inside("true", check=False)
    assert done.returncode == 1
    assert "Docker has no runtime kata" in done.stderr
    assert "sudo systemctl reload docker" in done.stderr
    assert not project.containers()


@pytest.mark.usefixtures("named")
def test_one_that_it_has_is_behind_the_same_fence_and_what_it_hides_is_said(host: Host) -> None:
    forbidden = host.internet.addresses["forbidden"]
    project = host.project("runsc", policy("runsc"))
    done = project.inside("python3", "-c", FLOOD, forbidden, "0.2", timeout=400)
    assert "runtime runsc: corral was never tried with it" in done.stderr
    assert "egress policy applied" in done.stderr
    assert host.internet.packets(forbidden) == 0
    host.control(forbidden)
    project.start("sh", "-c", "touch up; sleep 300", marker="up")
    (name,) = project.containers()
    used = host.box.run(["docker", "inspect", "-f", "{{.HostConfig.Runtime}}", name]).stdout.strip()
    assert used == "runsc"
    verified = project.corral("verify", "--json", check=False, timeout=300)
    rows = {row["check"]: row for row in json.loads(verified.stdout)["checks"] if not row["session"]}
    assert not [row for row in rows.values() if row["status"] == "fail"], rows
    for check in ("seccomp", "iptables-refused", "limits", "mounts-equal-policy"):
        assert rows[check]["status"] == "skip"
        assert "proves nothing of this host's" in rows[check]["detail"]
    assert rows["live-rules"]["status"] == rows["unlisted-host-blocked"]["status"] == "ok"
