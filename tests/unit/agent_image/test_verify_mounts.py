"""The mounts of containers that have the policy's, and of some that have others. Real text: container.py."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from agent_image.files.verify.mounts import mounts_equal_policy
from agent_image.files.verify.system import Mount, System
from tests.unit.agent_image.container import (
    DOCKERS_MOUNTS,
    ENGINE_FILES,
    NOTES,
    POLICYS_MOUNTS,
    PROJECT,
    STATE,
    Container,
    bound,
    outcome,
)

MOUNTS = DOCKERS_MOUNTS + POLICYS_MOUNTS


def judged(container: Container, text: str, **changes: Any) -> tuple[str, str]:
    container.put("/proc/self/mountinfo", text)
    return outcome(mounts_equal_policy, container, **changes)


def socket(container: Container, path: str) -> None:
    real = container.real(path)
    real.parent.mkdir(parents=True, exist_ok=True)
    os.mknod(real, stat.S_IFSOCK | 0o666)


def test_mounts_of_the_policy_and_of_docker_are_all_there_is(container: Container) -> None:
    assert judged(container, MOUNTS)[0] == "ok"


@pytest.mark.parametrize(
    ("point", "kind"),
    [
        ("/host-etc", "ext4"),
        ("/", "proc"),
        ("/run/data", "tmpfs"),
        ("/home/agent/.cache", "ext4"),
        (f"{STATE}/more", "ext4"),
        ("/etc", "ext4"),
        ("/etc/passwd", "ext4"),
        ("/home/zoe", "ext4"),
        ("/dev/data", "ext4"),
        ("/dev/null", "ext4"),
        ("/proc/data", "ext4"),
        ("/sys/data", "sysfs"),
        ("/sys/fs/cgroup/data", "tmpfs"),
        ("/usr/bin", "ext4"),
    ],
)
def test_each_other_mount_is_named(container: Container, point: str, kind: str) -> None:
    named = point if point != "/" else "/procs"
    status, detail = judged(container, MOUNTS + bound(named, kind=kind) + bound("/second"))
    assert status == "fail"
    assert detail == f"{named} is mounted ({kind}); /second is mounted (ext4)"


@pytest.mark.parametrize(
    "line",
    [
        bound("/proc", kind="proc", root="/1"),
        bound("/dev", kind="ext4", root="/"),
        bound("/dev/shm", kind="tmpfs", root="/secrets"),
        bound("/sys", kind="ext4", root="/"),
        bound("/sys/fs/cgroup", kind="ext4", root="/"),
        bound("/dev/console", kind="ext4"),
        bound("/etc/resolv.conf"),
        bound("/etc/hostname", root="/etc/shadow"),
        bound("/etc/hostname", root=f"{ENGINE_FILES}/resolv.conf"),
        bound("/etc/hosts", root="/etc/shadow"),
        bound("/usr/sbin/docker-init", "rw"),
        bound("/proc/acpi", "rw", "tmpfs", "/"),
        bound("/proc/acpi", "ro", "tmpfs", "/secrets"),
        bound("/proc/keys", "ro", "ext4", "/null"),
    ],
)
def test_place_of_docker_does_not_excuse_something_else(container: Container, line: str) -> None:
    point = Mount(line.rstrip()).point
    status, detail = judged(container, MOUNTS + line)
    assert status == "fail"
    assert f"{point} is mounted" in detail


def test_mask_with_something_in_it_is_none(container: Container) -> None:
    container.put("/sys/firmware/secret")
    assert judged(container, MOUNTS) == ("fail", "/sys/firmware is mounted (tmpfs)")


def test_terminals_older_control_groups_and_bound_devices_are_dockers(container: Container) -> None:
    container.devices["/dev/urandom"] = (1, 9)
    more = (
        bound("/dev/console", kind="devpts", root="/0")
        + bound("/sys/fs/cgroup", "ro", "tmpfs", "/")
        + bound("/sys/fs/cgroup/cpu,cpuacct", "ro", "cgroup", "/docker/0f")
        + bound("/dev/urandom", kind="devtmpfs", root="/urandom")
        + bound("/sbin/docker-init", "ro", root="/usr/libexec/docker/docker-init")
    )
    assert judged(container, MOUNTS + more)[0] == "ok"


def test_a_bound_device_is_known_by_its_number_wherever_the_host_keeps_it(container: Container) -> None:
    more = bound("/dev/null", kind="tmpfs", root="/null")
    assert judged(container, MOUNTS + more)[0] == "fail"
    container.devices["/dev/null"] = (1, 5)
    assert judged(container, MOUNTS + more)[0] == "fail"
    container.devices["/dev/null"] = (1, 3)
    assert judged(container, MOUNTS + more)[0] == "ok"


@pytest.mark.parametrize("path", [PROJECT, NOTES, STATE])
def test_mount_of_the_policy_that_is_missing_is_named(container: Container, path: str) -> None:
    lines = [line for line in MOUNTS.splitlines(keepends=True) if f" {path} rw" not in line]
    lines = [line for line in lines if f" {path} ro" not in line]
    assert judged(container, "".join(lines)) == ("fail", f"{path} is not mounted")


def test_what_is_covered_up_is_mounted(container: Container) -> None:
    changes = {"shadows": ["/home/agent/.env"]}
    assert judged(container, MOUNTS, **changes) == ("fail", "/home/agent/.env is not mounted")
    text = MOUNTS + bound("/home/agent/.env", "ro", root="/empty")
    assert judged(container, text, **changes)[0] == "ok"
    assert judged(container, text)[0] == "fail"


def test_what_lies_in_memory_is_a_file_system_of_its_own(container: Container) -> None:
    assert judged(container, MOUNTS, tmpfs=["/tmp", "/var/tmp"]) == ("fail", "/var/tmp is not mounted")
    for line in (
        bound("/var/tmp", "rw,nosuid,nodev"),
        bound("/var/tmp", "rw,nodev", kind="tmpfs", root="/"),
        bound("/var/tmp", "rw,nosuid", kind="tmpfs", root="/"),
        bound("/var/tmp", "rw,nosuid,nodev", kind="tmpfs", root="/secrets"),
    ):
        status, detail = judged(container, MOUNTS + line, tmpfs=["/tmp", "/var/tmp"])
        assert status == "fail"
        assert detail.startswith("/var/tmp is not a file system in memory")
    text = MOUNTS + bound("/var/tmp", "rw,nosuid,nodev,relatime", kind="tmpfs", root="/")
    assert judged(container, text, tmpfs=["/tmp", "/var/tmp"])[0] == "ok"
    assert judged(container, text)[0] == "fail"


def test_mounts_that_a_mount_brings_along_are_counted(container: Container) -> None:
    status, detail = judged(container, MOUNTS + bound(f"{PROJECT}/data") + bound(f"{NOTES}/disk", "ro"))
    assert status == "ok"
    assert "2 below" in detail


@pytest.mark.parametrize("point", ["/x.sock", f"{PROJECT}/x.sock", PROJECT, "/etc/hostname", "/dev/log"])
def test_socket_is_found_wherever_it_is_mounted(container: Container, point: str) -> None:
    if point == PROJECT:
        container.real(PROJECT).rmdir()
    container.real(point).unlink(missing_ok=True)
    socket(container, point)
    status, detail = judged(container, MOUNTS + bound(point, root="/run/docker.sock"))
    assert status == "fail"
    assert f"{point} is a socket" in detail


def test_mount_points_are_read_as_the_kernel_writes_them(container: Container) -> None:
    status, detail = judged(container, MOUNTS + bound("/a\\040b") + bound("/c\u2003d\u2028e"))
    assert status == "fail"
    assert detail == "/a b is mounted (ext4); /c\u2003d\u2028e is mounted (ext4)"


def test_optional_fields_are_skipped() -> None:
    mount = Mount("919 911 0:133 /a /- ro,relatime shared:1 master:608 - overlay x rw")
    assert (mount.device, mount.root, mount.point, mount.kind, mount.ro) == (
        "0:133",
        "/a",
        "/-",
        "overlay",
        True,
    )


def test_the_kernel_s_own_table_is_understood(tmp_path: Path) -> None:
    system = System()
    assert "proc" in {mount.kind for mount in system.mount_table() if mount.point == "/proc"}
    os.mknod(tmp_path / "socket", stat.S_IFSOCK | 0o600)
    assert system.is_socket(str(tmp_path / "socket"))
    assert not system.is_socket(str(tmp_path))
    assert not system.is_socket(str(tmp_path / "none"))
