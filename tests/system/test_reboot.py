"""The host is rebooted: the rules are there before Docker, the service comes back by itself."""

from __future__ import annotations

import pytest

from .engine_side import WRITER
from .host import Host


@pytest.mark.case(10)
@pytest.mark.fault("reboot")
def test_after_a_reboot_the_fence_stands_before_docker_and_runs_work(host: Host) -> None:
    project = host.project("reboot")
    project.inside("true")
    host.box.reboot()
    units = ["docker", WRITER, host.engine.loader]
    host.box.wait_for(
        lambda: host.engine.systemctl("is-active", *units, check=False).returncode == 0, timeout=60
    )
    assert host.engine.guarded()
    assert "CORRAL-OUT" in host.netadmin("iptables", "-S", "DOCKER-USER").stdout.splitlines()[1]
    host.wait_enforcer()
    assert "203.0.113.10" in project.inside("curl", "-sS", "https://allowed1.corral.example/").stdout
    assert project.inside("curl", "-sS", "-m", "5", "https://203.0.113.66/", check=False).returncode == 7
    assert host.internet.packets("203.0.113.66") == 0
