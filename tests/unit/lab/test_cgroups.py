"""Control groups: what is decided from a machine's mounts, and groups in a directory that stands for a hierarchy."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.lab import cgroups, provision
from tests.lab.cgroups import Arrangement, Groups, Hierarchy, arrangement, hierarchies
from tests.lab.engines import ENGINES
from tests.lab.execute import LabError

LEGACY = """\
22 1 254:0 / / rw,relatime - ext4 /dev/root rw
30 29 0:26 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:4 - cgroup cgroup rw,cpu,cpuacct
31 29 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
32 29 0:28 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
33 29 0:29 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset,clone_children
34 29 0:30 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd
35 29 0:31 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate
90 29 0:28 / /mnt/again rw - cgroup cgroup rw,pids
"""
UNIFIED = "30 29 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n"


def test_each_hierarchy_is_found_once_by_its_controllers() -> None:
    assert {hierarchy.options: str(hierarchy.mount) for hierarchy in hierarchies(LEGACY)} == {
        "cpu,cpuacct": "/sys/fs/cgroup/cpu,cpuacct",
        "memory": "/sys/fs/cgroup/memory",
        "pids": "/sys/fs/cgroup/pids",
        "cpuset": "/sys/fs/cgroup/cpuset",
        "name=systemd": "/sys/fs/cgroup/systemd",
        "": "/sys/fs/cgroup/unified",
    }
    assert hierarchies(UNIFIED) == [Hierarchy(Path("/sys/fs/cgroup"))]
    assert hierarchies("22 1 254:0 / / rw - ext4 /dev/root rw\n") == []


@pytest.mark.parametrize(
    ("engine", "mountinfo", "expected"),
    [
        ("bookworm", LEGACY, Arrangement.HYBRID),
        ("trixie", LEGACY, Arrangement.SPLIT),
        ("sid", LEGACY, Arrangement.SPLIT),
        ("bookworm", UNIFIED, Arrangement.UNIFIED),
        ("trixie", UNIFIED, Arrangement.UNIFIED),
        # Without the controller of one limit in cgroup 1 it may be in cgroup 2: nothing is gained by looking away.
        ("bookworm", LEGACY.replace("pids", "blkio"), Arrangement.UNIFIED),
    ],
)
def test_arrangement_follows_from_engine_and_machine(
    engine: str, mountinfo: str, expected: Arrangement
) -> None:
    assert arrangement(ENGINES[engine], hierarchies(mountinfo)) is expected


def groups(directory: Path) -> Groups:
    (directory / "v2").mkdir()
    (directory / "pids").mkdir()
    return Groups("labs/one", (Hierarchy(directory / "v2"), Hierarchy(directory / "pids", ("pids",))))


def test_groups_have_the_same_path_in_every_hierarchy_and_go_together(tmp_path: Path) -> None:
    lab = groups(tmp_path)
    assert lab.unified() == tmp_path / "v2/labs/one"
    assert lab.make("box") == [tmp_path / "v2/labs/one/box", tmp_path / "pids/labs/one/box"]
    (tmp_path / "pids/labs/one/box/docker/0").mkdir(parents=True)
    (tmp_path / "v2/labs/other").mkdir()
    lab.clear("box")
    assert list((tmp_path / "pids/labs/one/box").iterdir()) == []
    lab.remove()
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == [
        "pids",
        "v2",
        "v2/labs",
        "v2/labs/other",
    ]


def test_a_visitor_belongs_below_what_the_box_sees_as_the_root(tmp_path: Path) -> None:
    lab = groups(tmp_path)
    assert lab.visitors("box") == []
    lab.make("box")
    (tmp_path / "v2/labs/one/box/payload").mkdir()
    assert lab.visitors("box") == [
        tmp_path / "v2/labs/one/box/payload/lab-visitors",
        tmp_path / "pids/labs/one/box",
    ]


def test_a_group_that_is_lived_in_stays(tmp_path: Path) -> None:
    (tmp_path / "group" / "below").mkdir(parents=True)
    (tmp_path / "group" / "somebody").write_text("")
    cgroups.remove(tmp_path / "group", timeout=0)
    assert [path.name for path in (tmp_path / "group").iterdir()] == ["somebody"]


def test_members_below_a_group_are_killed(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    with subprocess.Popen(["/bin/sleep", "60"]) as sleeper:
        (tmp_path / "below" / "cgroup.procs").write_text(f"{sleeper.pid}\n")
        assert cgroups.kill_members(tmp_path)
        assert sleeper.wait(10) == -9
    assert not cgroups.kill_members(tmp_path)


def test_a_new_cpuset_gets_what_its_parent_has_level_by_level(tmp_path: Path) -> None:
    mount = tmp_path / "cpuset"
    group = mount / "labs" / "one"
    group.mkdir(parents=True)
    for level, given in ((mount, "0-1\n"), (mount / "labs", "\n"), (group, "\n")):
        (level / "cpuset.cpus").write_text(given)
        (level / "cpuset.mems").write_text(given and "0\n" if level == mount else "\n")
    cgroups._open_cpuset(mount, group)
    assert (group / "cpuset.cpus").read_text() == "0-1\n"
    assert (group / "cpuset.mems").read_text() == "0\n"


def test_the_engine_sees_every_controller_and_a_joint_one_under_each_name() -> None:
    script = cgroups.engine_script(hierarchies(LEGACY))
    assert "mount -t cgroup -o memory,nosuid,nodev,noexec cgroup /sys/fs/cgroup/memory\n" in script
    assert "mount -t cgroup -o cpu,cpuacct,nosuid" in script
    assert "ln -s cpu,cpuacct /sys/fs/cgroup/cpuacct\n" in script
    assert "name=" not in script
    assert "cgroup2" not in script
    assert script.index("--make-private") < script.index("mount -t tmpfs")


def test_a_unit_is_wrapped_whole_under_its_own_name() -> None:
    unit = "[Service]\nExecStartPre=-/sbin/modprobe overlay\nExecStart=/usr/sbin/dockerd -H fd:// $OPTS\n"
    assert cgroups.wrapped_unit(unit, "/wrap", "--more") == (
        "[Service]\nSyslogIdentifier=dockerd\nExecStart=\nExecStart=/wrap /usr/sbin/dockerd -H fd:// $OPTS --more\n"
    )
    with pytest.raises(LabError, match="no ExecStart"):
        cgroups.wrapped_unit("[Service]\n", "/wrap")


def test_only_a_split_box_wraps_its_engine(tmp_path: Path) -> None:
    units = tmp_path / "usr/lib/systemd/system"
    units.mkdir(parents=True)
    for unit in ("docker", "containerd"):
        (units / f"{unit}.service").write_text(f"[Service]\nExecStart=/usr/bin/{unit}\n")
    trixie = ENGINES["trixie"]
    provision.arrange(tmp_path, trixie, Arrangement.UNIFIED, [])
    assert not (tmp_path / "etc/systemd").exists()
    provision.arrange(tmp_path, trixie, Arrangement.SPLIT, hierarchies(LEGACY))
    dropin = tmp_path / "etc/systemd/system/docker.service.d/10-cgroup1.conf"
    assert "with-cgroup1 /usr/bin/docker --default-cgroupns-mode=private\n" in dropin.read_text()
    assert (tmp_path / "usr/local/lib/corral-lab/with-cgroup1").stat().st_mode & 0o111


@pytest.mark.parametrize(
    ("engine", "arranged", "does"),
    [
        ("bookworm", Arrangement.HYBRID, ["remount"]),
        ("trixie", Arrangement.SPLIT, []),
        ("trixie", Arrangement.UNIFIED, []),
        ("sid", Arrangement.SPLIT, ["boot_id"]),
    ],
)
def test_pid_1_puts_right_what_its_box_needs(engine: str, arranged: Arrangement, does: list[str]) -> None:
    script = provision.init_script(ENGINES[engine], arranged)
    assert [what for what in ("remount", "boot_id") if what in script] == does
    assert script.endswith("\nexec /lib/systemd/systemd\n")
