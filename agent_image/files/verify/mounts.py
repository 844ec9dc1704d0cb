"""Whether this container has the policy's mounts, Docker's own, and no others."""

from __future__ import annotations

import re

from .expectations import below
from .outcome import Failed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .expectations import Expectations
    from .system import Mount, System

    Own = Callable[[Mount], bool]

CGROUPS = "/sys/fs/cgroup"


def _whole(kind: str) -> Own:
    return lambda mount: mount.kind == kind and mount.root == "/"


def _file(path: str) -> Own:
    return lambda mount: re.search(path + r"\Z", mount.root) is not None


def _device(name: str) -> Own:
    # A host that is a container itself has its devices in a tmpfs; ``dockers_own`` looks at the device too.
    return lambda mount: mount.kind in {"devtmpfs", "tmpfs"} and mount.root == f"/{name}"


# Mounted one by one where a user namespace forbids to make them: path -> major and minor number.
DEVICES = {
    "/dev/null": (1, 3),
    "/dev/zero": (1, 5),
    "/dev/full": (1, 7),
    "/dev/random": (1, 8),
    "/dev/urandom": (1, 9),
    "/dev/tty": (5, 0),
}
# What Docker mounts in every container that is not privileged: where, and how to know it.
DOCKERS: dict[str, Own] = {
    "/": lambda _: True,
    "/proc": _whole("proc"),
    "/dev": _whole("tmpfs"),
    "/dev/pts": _whole("devpts"),
    "/dev/shm": _whole("tmpfs"),  # noqa: S108 - looked at, not used
    "/dev/mqueue": _whole("mqueue"),
    "/dev/console": lambda mount: mount.kind == "devpts",
    **{path: _device(path.rpartition("/")[2]) for path in DEVICES},
    "/sys": _whole("sysfs"),
    # Asked for by corral: where programs write what nobody keeps.
    CGROUPS: lambda mount: mount.kind in {"cgroup2", "tmpfs"},
    "/etc/resolv.conf": _file(r"/containers/[0-9a-f]{64}/resolv\.conf"),
    "/etc/hostname": _file(r"/containers/[0-9a-f]{64}/hostname"),
    "/etc/hosts": _file("/hosts"),
    "/sbin/docker-init": lambda mount: mount.ro,
    "/usr/sbin/docker-init": lambda mount: mount.ro,
}


def mounts_equal_policy(expected: Expectations, system: System) -> str:
    """Each mount is the policy's, corral's or Docker's, none is missing, and none is a socket.

    What is read-only or writable is for ``ro-unwritable``, ``rw-writable`` and ``state-writable`` to try.
    """
    table = system.mount_table()
    # Of several at one place the last one is what is seen.
    found = {mount.point: mount for mount in table}
    wanted = {*expected.mounts, *expected.state, *expected.shadows, *expected.tmpfs}
    problems = [f"{point} is not mounted" for point in sorted(wanted - set(found))]
    problems += [
        f"{point} is not a file system in memory without set-id files and devices"
        for point in expected.tmpfs
        if point in found and not _in_memory(found[point])
    ]
    brought = 0
    for mount in table:
        if system.is_socket(mount.point):
            problems.append(f"{mount.point} is a socket")
        elif mount.point in wanted or dockers_own(mount, found, system):
            continue
        elif any(below(mount.point, path) for path in expected.mounts):
            # A bind mount brings the host's mounts below it along.
            brought += 1
        else:
            problems.append(f"{mount.point} is mounted ({mount.kind})")
    if problems:
        raise Failed("; ".join(dict.fromkeys(problems)))
    return f"{len(wanted)} of the policy and corral's own, {brought} below them, the others are Docker's"


def _in_memory(mount: Mount) -> bool:
    return mount.kind == "tmpfs" and mount.root == "/" and {"nosuid", "nodev"} <= mount.options


def dockers_own(mount: Mount, found: Mapping[str, Mount], system: System) -> bool:
    """Say whether Docker itself mounts that there."""
    point = mount.point
    if point in DOCKERS:
        real = point not in DEVICES or system.device(point) == DEVICES[point]
        return real and DOCKERS[point](mount)
    if below(point, CGROUPS):
        return mount.kind == "cgroup"
    for whole in ("/proc", "/sys"):
        if below(point, whole):
            # A part of the same file system, which is there a second time to be read-only, or a mask.
            same = whole in found and mount.device == found[whole].device
            return (same and mount.root == point[len(whole) :]) or _is_mask(mount, system)
    return False


def _is_mask(mount: Mount, system: System) -> bool:
    """Say whether nothing can be seen there: /dev/null for a file, nothing for a directory."""
    if mount.root == "/null":
        return mount.kind in {"tmpfs", "devtmpfs"}
    if mount.kind != "tmpfs" or mount.root != "/" or not mount.ro:
        return False
    try:
        return not system.listing(mount.point)
    except PermissionError:
        return True
