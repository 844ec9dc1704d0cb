"""Settings of the engine that many hosts have: corral works with them, or says which one it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .host import Host

SETTINGS: dict[str, object] = {
    "default-ulimits": {"memlock": {"Name": "memlock", "Hard": 65536, "Soft": 65536}},
    "log-driver": "json-file",
    "log-opts": {"compress": "true", "max-size": "5m"},
    "default-shm-size": "128M",
    "default-network-opts": {"bridge": {"com.docker.network.driver.mtu": "1400"}},
    "live-restore": True,
    "icc": False,
}


@pytest.fixture
def configured(host: Host) -> Iterator[Host]:
    with host.engine_options(**SETTINGS):
        yield host


@pytest.mark.fault("dockerd restart")
@pytest.mark.smoke
def test_common_settings_of_the_engine_do_not_stand_in_the_way(configured: Host) -> None:
    project = configured.project("defaults")
    assert "203.0.113.10" in project.inside("curl", "-sS", "https://allowed1.corral.example/").stdout
    assert project.corral("verify").returncode == 0
    assert project.inside("true").returncode == 0
