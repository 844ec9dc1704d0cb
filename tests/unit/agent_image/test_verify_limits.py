from __future__ import annotations

import pytest

from agent_image.files.verify.limits import limits
from tests.unit.agent_image.container import Container, outcome

CGROUP = "/sys/fs/cgroup"


def test_limits_in_force_are_those_asked_for(container: Container) -> None:
    status, detail = outcome(limits, container)
    assert status == "ok"
    assert "pids 4096" in detail


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("pids.max", "max", "pids is unlimited, not 4096"),
        ("pids.max", "4097", "pids is 4097, not 4096"),
        ("memory.max", "max", "memory is unlimited, not 2147483648"),
        ("memory.max", str(1 << 30), "memory is 1073741824, not 2147483648"),
        ("cpu.max", "max 100000", "cpus is unlimited, not 1.5"),
        ("cpu.max", "200000 100000", "cpus is 2, not 1.5"),
    ],
)
def test_another_limit_is_named(container: Container, name: str, text: str, told: str) -> None:
    container.put(f"{CGROUP}/{name}", f"{text}\n")
    assert outcome(limits, container) == ("fail", told)


@pytest.mark.parametrize("found", [(1024, 1 << 20), (16384, -1), (16384, 20000)])
def test_open_files_are_limited_for_good(container: Container, found: tuple[int, int]) -> None:
    container.nofile = found
    status, detail = outcome(limits, container)
    assert status == "fail"
    assert detail.startswith("nofile is ")


def test_limit_without_a_controller_fails_unless_it_is_excused(container: Container) -> None:
    container.real(f"{CGROUP}/pids.max").unlink()
    assert outcome(limits, container) == ("fail", "nothing limits pids: its controller is missing here")
    status, detail = outcome(limits, container, limits_best_effort=True)
    assert status == "skip"
    assert "no controller for pids" in detail
    # What has a controller is compared all the same.
    container.put(f"{CGROUP}/memory.max", "max\n")
    assert outcome(limits, container, limits_best_effort=True)[0] == "fail"


def test_control_groups_of_version_1_are_read(container: Container) -> None:
    for name in ("pids.max", "memory.max", "cpu.max"):
        container.real(f"{CGROUP}/{name}").unlink()
    container.put(f"{CGROUP}/pids/pids.max", "4096\n")
    container.put(f"{CGROUP}/memory/memory.limit_in_bytes", f"{2 << 30}\n")
    container.put(f"{CGROUP}/cpu/cpu.cfs_quota_us", "150000\n")
    container.put(f"{CGROUP}/cpu/cpu.cfs_period_us", "100000\n")
    assert outcome(limits, container)[0] == "ok"
    container.put(f"{CGROUP}/memory/memory.limit_in_bytes", "9223372036854771712\n")
    container.put(f"{CGROUP}/cpu/cpu.cfs_quota_us", "-1\n")
    assert outcome(limits, container) == (
        "fail",
        "cpus is unlimited, not 1.5; memory is unlimited, not 2147483648",
    )


def test_only_what_was_asked_for_is_compared(container: Container) -> None:
    container.put(f"{CGROUP}/memory.max", "max\n")
    assert outcome(limits, container, limits={"pids": 4096, "nofile": 16384})[0] == "ok"
