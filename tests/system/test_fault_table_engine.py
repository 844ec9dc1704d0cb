"""Fault table: Docker is restarted or killed under a flooding sandbox; boots without the service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .engine_side import WRITER
from .flooding import ALLOWED_URL, controls, flooding, host_sink, standing
from .host import ENFORCER, FLOOD, LIVE_RESTORE, Host, until


@pytest.fixture
def live_restore(host: Host) -> Iterator[Host]:
    """The engine keeps containers running while it is away itself."""
    with host.engine_options(**{"live-restore": True}):
        yield host


@LIVE_RESTORE
@pytest.mark.representative
@pytest.mark.case(11)
@pytest.mark.fault("dockerd restarted with live-restore")
@pytest.mark.fault("dockerd killed -9")
def test_nothing_leaves_while_the_engine_restarts_under_a_running_sandbox(live_restore: Host) -> None:
    host = live_restore
    with flooding(host, "live-restore") as flood:
        for _ in range(2):
            host.restart_docker()
        host.engine.kill()
        host.engine.await_up()
        until(standing(host), 20, "the rules stand")
        assert flood.leaked == (0, 0)
        host.wait_enforcer()
        host.box.wait_for(lambda: flood.project.sandbox["sessions"], timeout=30)
        assert flood.project.sandbox["sessions"][0]["state"] == "running"
        flood.works()


@pytest.mark.fault("dockerd restarted without live-restore")
@pytest.mark.parametrize(
    "how", ["restart", pytest.param("kill", marks=pytest.mark.fault("dockerd killed -9"))]
)
def test_nothing_leaves_while_the_engine_takes_its_containers_along(host: Host, how: str) -> None:
    forbidden = host.internet.addresses["forbidden"]
    project = host.project("restarted")
    project.write("flood.py", FLOOD)
    project.inside("true")
    with host_sink(host) as sink:
        host.internet.reset_counters()
        process = project.start(
            "sh", "-c", f"trap '' TERM; touch up; python3 flood.py {forbidden} 60", marker="up"
        )
        if how == "restart":
            host.restart_docker()
        else:
            before = host.engine.network()
            host.engine.kill()
            host.engine.await_up(other_than=before)
        assert process.wait(60) != 0
        assert host.internet.packets(forbidden) == 0
        host.wait_enforcer()
        project.corral("down")
        assert host.netadmin("ipset", "list", "corral-pins").stdout.rstrip().endswith("Members:")
        assert "203.0.113.10" in project.inside("curl", "-sS", "-m", "10", ALLOWED_URL).stdout
        controls(host, sink)


@pytest.mark.case(10)
@pytest.mark.fault("boot with restart=always containers and a late enforcer")
def test_a_container_that_starts_at_boot_reaches_nothing_before_the_service_runs(host: Host) -> None:
    forbidden = host.internet.addresses["forbidden"]
    project = host.project("boot")
    project.inside("true")
    network = project.sandbox["network"]
    image = host.box.run(["docker", "images", "-q", "corral/*"]).stdout.split()[0]
    # The service would take it off the network at once: it is late, before and after the boot.
    host.user_systemctl("disable", "--now", ENFORCER)
    try:
        run = ["docker", "run", "-d", "--restart", "always", "--network", network, "--entrypoint", "python3"]
        ident = host.box.run([*run, image, "-c", FLOOD, forbidden, "20"]).stdout.strip()
        try:
            host.internet.reset_counters()
            host.box.reboot()
            host.box.wait_for(
                lambda: host.engine.systemctl("is-active", "docker", WRITER, check=False).returncode == 0,
                timeout=60,
            )

            def logged() -> list[str]:
                return host.box.run(["docker", "logs", ident], check=False).stdout.split()

            # One whole round of it after the boot: some twenty seconds.
            before = len(logged())
            until(lambda: len(logged()) > before, 60, "it flooded for twenty seconds")
            assert int(logged()[-1]) > 10_000
            assert host.user_systemctl("is-active", ENFORCER, check=False).returncode != 0
            assert host.internet.packets(forbidden) == 0, host.internet.all_packets()
            host.user_systemctl("enable", "--now", ENFORCER)
            host.wait_enforcer()
            until(
                lambda: (
                    network
                    not in host.box.run(
                        ["docker", "inspect", "-f", "{{json .NetworkSettings.Networks}}", ident]
                    ).stdout
                ),
                30,
                "it is taken off the network",
            )
            assert host.internet.packets(forbidden) == 0
        finally:
            host.box.run(["docker", "rm", "-f", ident])
        assert "203.0.113.10" in project.inside("curl", "-sS", "-m", "10", ALLOWED_URL).stdout
        host.control(forbidden)
    finally:
        host.user_systemctl("enable", "--now", ENFORCER)
