"""What can be seen and written from a container: files, devices, mounts, namespaces, processes."""

from __future__ import annotations

import functools
import os
import re
import socket
import stat
from collections.abc import Iterator
from typing import IO

from .calls import NEWUSER
from .tools import Given, Probe, call, each, first, made, said, some

NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "uts")
RUNTIME_SOCKETS = (
    "docker.sock",
    "containerd.sock",
    "podman.sock",
    "crio.sock",
    "cri-dockerd.sock",
    "buildkitd.sock",
    "system_bus_socket",
)
CREDENTIALS = re.compile(
    r"/(\.aws/credentials|\.ssh/id_\w+|\.docker/config\.json|\.kube/config|\.netrc|\.git-credentials|"
    r"\.config/gh/hosts\.yml|serviceaccount/token|\.config/gcloud/.*\.db|\.azure/.*\.json|\.npmrc|\.pypirc)$"
)
# Of these a container may have those that Docker makes; what is in them besides are terminals of its own.
TERMINALS = ("/dev/pts", "/dev/console")
GROUPS = {"cgroup", "cgroup2"}
KERNELS = {*GROUPS, "proc", "sysfs", "tmpfs", "devpts", "mqueue"}
TRIGGERS = {
    "core-pattern": ("/proc/sys/kernel/core_pattern",),
    "helpers": (
        "/proc/sys/kernel/modprobe",
        "/proc/sys/kernel/poweroff_cmd",
        "/proc/sys/fs/binfmt_misc/register",
        "/sys/kernel/uevent_helper",
    ),
    # The first two only where the kernel has them.
    "panic": (
        "/proc/sysrq-trigger",
        "/proc/sys/kernel/sysrq",
        "/proc/sys/vm/panic_on_oom",
        "/proc/sys/kernel/panic",
        "/proc/sys/kernel/panic_on_oops",
    ),
    "hardening": (
        "/proc/sys/kernel/randomize_va_space",
        "/proc/sys/kernel/dmesg_restrict",
        "/proc/sys/vm/mmap_min_addr",
        "/proc/sys/fs/suid_dumpable",
    ),
    "network-settings": ("/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv4/ping_group_range"),
}


def there(paths: tuple[str, ...]) -> list[str]:
    return [path for path in paths if os.path.lexists(path)]


def opened_to_write(paths: tuple[str, ...]) -> str:
    """Open to write, and write nothing."""
    return each({path: lambda path=path: os.close(os.open(path, os.O_WRONLY)) for path in there(paths)})  # type: ignore[misc]


def kernel_memory(given: Given) -> str:
    """What tells of the kernel and of its memory: the first bytes, if there are any that say something."""
    found = []
    for path in there(("/proc/kcore", "/proc/keys", "/proc/timer_list", "/dev/mem", "/dev/kmsg")):
        try:
            flags = os.O_RDONLY | os.O_NONBLOCK
            number = os.open(path, flags)
        except OSError:
            continue
        try:
            if os.read(number, 64):
                found.append(path)
        except OSError:
            pass
        finally:
            os.close(number)
    return some(found)


def kernel_addresses(given: Given) -> str:
    line = first("/proc/kallsyms", 64).split()
    return "hidden" if not line or int(line[0], 16) == 0 else "shown"


def hidden_directories(given: Given) -> str:
    found = [
        path
        for path in ("/sys/firmware", "/proc/scsi", "/proc/acpi", "/sys/kernel/security", "/sys/kernel/debug")
        if os.path.isdir(path) and said(lambda path=path: os.listdir(path)) == "done" and os.listdir(path)  # type: ignore[misc]
    ]
    return some(found)


def _below(*tops: str) -> Iterator[tuple[str, os.stat_result]]:
    for top in tops:
        for directory, directories, files in os.walk(top):
            for name in (*directories, *files):
                path = os.path.join(directory, name)
                try:
                    yield path, os.lstat(path)
                except OSError:
                    continue


@functools.cache
def all_files() -> list[tuple[str, os.stat_result]]:
    """Everything that is not the kernel's."""
    found = []
    for name in sorted(os.listdir("/")):
        if name not in {"proc", "sys"}:
            path = f"/{name}"
            found.append((path, os.lstat(path)))
            found += _below(path)
    return found


def kernel_settings(given: Given) -> str:
    """Files of /proc and /sys that could be written, beside those of processes."""
    tops = [
        f"/proc/{name}"
        for name in os.listdir("/proc")
        if not name.isdigit() and name not in {"self", "thread-self"}
    ]
    found = [
        path
        for path, at in _below(*tops, "/proc", "/sys")
        if not re.match(r"/proc/(\d+|self|thread-self)(/|$)", path)
        if stat.S_ISREG(at.st_mode) and os.access(path, os.W_OK)
    ]
    return some(sorted(set(found)))


def set_id(given: Given) -> str:
    """Programs that change who executes them, in the whole image and what is mounted."""
    found = [path for path, at in all_files() if stat.S_ISREG(at.st_mode) and at.st_mode & 0o6000]
    return some([path for path in found if path != given["set_id"]])


def file_capabilities(given: Given) -> str:
    found = []
    for path, at in all_files():
        if stat.S_ISREG(at.st_mode) and at.st_mode & 0o111:
            try:
                os.getxattr(path, "security.capability", follow_symlinks=False)
                found.append(path)
            except OSError:
                continue
    return some(found)


def give_capability(given: Given) -> str:
    """A capability for a file of one's own."""
    path = "/dev/shm/given"
    with made(path):
        return said(lambda: set_capability(path))


def set_capability(path: str) -> None:
    """Give a file CAP_NET_RAW, effective, in the second version of the attribute."""
    value = bytes.fromhex("0100000200200000000000000000000000000000")
    os.setxattr(path, "security.capability", value)


def writable(given: Given) -> str:
    """Directories in which a file can be made, each where it begins."""
    found: list[str] = []
    for path, at in all_files():
        inside = any(path.startswith(f"{top}/") for top in found)
        if not inside and stat.S_ISDIR(at.st_mode) and os.access(path, os.W_OK):
            found.append(path)
    return ", ".join(_named(path, given) for path in found) if len(found) <= 20 else "many"


def _named(path: str, given: Given) -> str:
    """Return a path with the places that differ from user to user by name."""
    for name in ("project", "user_home"):
        place = str(given[name])
        if path == place or path.startswith(f"{place}/"):
            return f"<{name.replace('_', ' ')}>{path.removeprefix(place)}"
    return path


def write_system(given: Given) -> str:
    def write(place: str) -> None:
        with made(f"{place}/corral-probe"):
            pass

    return each({place: lambda place=place: write(place) for place in ("/usr/bin", "/etc", "/")})  # type: ignore[misc]


def devices(given: Given) -> str:
    found = [
        path
        for path, at in all_files()
        if (stat.S_ISCHR(at.st_mode) or stat.S_ISBLK(at.st_mode)) and not path.startswith(TERMINALS)
    ]
    return some(sorted(found), 12)


def runtime_sockets(given: Given) -> str:
    """Sockets with the name of a container engine's, wherever they are."""
    found = [path for path, at in all_files() if stat.S_ISSOCK(at.st_mode)]
    return some([path for path in found if path.rpartition("/")[2] in RUNTIME_SOCKETS], 2)


def any_sockets(given: Given) -> str:
    return some([path for path, at in all_files() if stat.S_ISSOCK(at.st_mode)], 2)


def credentials(given: Given) -> str:
    found = [path for path, at in all_files() if stat.S_ISREG(at.st_mode) and CREDENTIALS.search(path)]
    shadow = [path for path in there(("/etc/shadow",)) if os.access(path, os.R_OK)]
    return some(found + shadow)


def mounts(given: Given) -> str:
    return "\n".join(mount_table(given))


def mount_table(given: Given) -> list[str]:
    """Return "TARGET TYPE ro|rw" of each mount that is there, in the order of the targets."""
    rows = []
    for line in first("/proc/self/mountinfo", 1 << 20).splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        kind = right.split()[0]
        target = _named(fields[4], given)
        if kind in GROUPS:
            target = "/sys/fs/cgroup"
        # What lies below the host's files is the machine's.
        if kind not in KERNELS and target != "/":
            kind = "file system"
        rows.append(f"{target} {'cgroup' if kind in GROUPS else kind} {fields[5].split(',')[0]}")
    return sorted(set(rows))


def propagation(given: Given) -> str:
    """Mounts that tell others of what is mounted below them, or hear of it."""
    found = [
        line.split()[4]
        for line in first("/proc/self/mountinfo", 1 << 20).splitlines()
        if re.search(r" (shared|master|propagate_from):\d+", line.partition(" - ")[0])
    ]
    return some(found)


def namespaces(given: Given) -> str:
    """Which namespaces are the host's."""
    shared = [
        name for name in NAMESPACES if os.readlink(f"/proc/self/ns/{name}") == given["namespaces"][name]
    ]
    return some(shared)


def user_namespace(given: Given) -> str:
    """After an attempt to leave it."""
    said(lambda: call("unshare", NEWUSER))
    return "the host's" if os.readlink("/proc/self/ns/user") == given["namespaces"]["user"] else "its own"


def processes(given: Given) -> str:
    """Whether a process of the host can be seen, by what it was called with."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if str(given["mark"]) in first(f"/proc/{name}/cmdline").split("\0"):
                    return "seen"
            except OSError:
                continue
    return "none"


def roots(given: Given) -> str:
    """Where the root of any process leads, by the mark that the host's has."""
    tried = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            tried += 1
            if os.path.exists(f"/proc/{name}/root{given['host_file']}") or os.path.exists(
                f"/proc/{name}/cwd{given['host_file']}"
            ):
                return "the host's"
    return "its own" if tried else "no process"


def descriptors(given: Given) -> str:
    """Directories that somebody left open, as runc once did."""
    found = []
    for process in ("self", "1"):
        try:
            numbers = os.listdir(f"/proc/{process}/fd")
        except OSError:
            continue
        for number in numbers:
            path = f"/proc/{process}/fd/{number}"
            try:
                at = os.stat(path)
            except OSError:
                continue
            if (
                stat.S_ISDIR(at.st_mode)
                and os.path.samestat(at, os.stat("/")) is False
                and "/proc/" not in os.readlink(path)
            ):
                found.append(os.readlink(path))
    return some(sorted(set(found)))


def cgroup_path(given: Given) -> str:
    paths = {line.split(":", 2)[2].strip() for line in first("/proc/self/cgroup").splitlines()}
    return "its own root" if paths == {"/"} else "a place among the host's"


def cgroup_writes(given: Given) -> str:
    """A group of one's own, and what the kernel would execute when a group is empty."""
    groups = {path for path, _ in _below("/sys/fs/cgroup") if path.endswith("/cgroup.procs")}
    tops = sorted(path.rpartition("/")[0] for path in groups)[:3]
    agents = there(tuple(f"{top}/release_agent" for top in tops))
    attempts = {f"mkdir {top}": lambda top=top: os.rmdir(_directory(f"{top}/corral-probe")) for top in tops}
    attempts |= {path: lambda path=path: os.close(os.open(path, os.O_WRONLY)) for path in agents}
    return each(attempts)


def _directory(path: str) -> str:
    os.mkdir(path)
    return path


def set_id_works(given: Given) -> str:
    """A program with the bit that root of the host put into the project: as whom it runs."""
    child = os.fork()
    if child == 0:
        # Whoever is root here goes back to being the user first.
        if os.getuid() == 0:
            os.setgid(int(given["uid"]))
            os.setuid(int(given["uid"]))
        os.execv(given["set_id"], [given["set_id"], "-r", "/etc/shadow"])
    return "as root" if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 else "as the user"


def abstract(given: Given) -> str:
    """A unix socket without a file, which belongs to the host's network."""
    with socket.socket(socket.AF_UNIX) as client:
        return said(lambda: client.connect("\0" + str(given["abstract"])), "connected")


def abstract_listed(given: Given) -> str:
    return "listed" if f"@{given['abstract']}" in first("/proc/net/unix", 1 << 20) else "not listed"


def listening(given: Given) -> str:
    """What listens inside, beside Docker's resolver."""
    found = []
    for name in ("tcp", "tcp6"):
        if os.path.exists(f"/proc/net/{name}"):
            for line in first(f"/proc/net/{name}", 1 << 20).splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and not fields[1].startswith("0B00007F"):
                    found.append(fields[1])
    return some(found, 0)


def secret_on_disk(given: Given) -> str:
    """Files with the value of the secret that the program has in its environment."""
    value = os.environ["API_KEY"].encode()
    found = []
    for path, at in all_files():
        if stat.S_ISREG(at.st_mode) and os.access(path, os.R_OK):
            try:
                with open(path, "rb") as file:
                    if any(value in part for part in _parts(file)):
                        found.append(path)
            except OSError:
                continue
    return some(found)


def _parts(file: IO[bytes], size: int = 1 << 24) -> Iterator[bytes]:
    """Yield a file in parts that overlap, so that nothing is missed at their ends."""
    last = b""
    while part := file.read(size):
        yield last + part
        last = part[-256:]


PROBES: dict[str, Probe] = {
    **{name: (lambda given, paths=paths: opened_to_write(paths)) for name, paths in TRIGGERS.items()},  # type: ignore[misc]
    "kernel-memory": kernel_memory,
    "kernel-addresses": kernel_addresses,
    "hidden-directories": hidden_directories,
    "kernel-settings": kernel_settings,
    "set-id": set_id,
    "set-id-works": set_id_works,
    "file-capabilities": file_capabilities,
    "give-capability": give_capability,
    "writable": writable,
    "write-system": write_system,
    "devices": devices,
    "runtime-sockets": runtime_sockets,
    "any-sockets": any_sockets,
    "credentials": credentials,
    "mounts": mounts,
    "propagation": propagation,
    "namespaces": namespaces,
    "user-namespace": user_namespace,
    "processes": processes,
    "roots": roots,
    "descriptors": descriptors,
    "cgroup-path": cgroup_path,
    "cgroup-writes": cgroup_writes,
    "abstract": abstract,
    "abstract-listed": abstract_listed,
    "listening": listening,
    "secret-on-disk": secret_on_disk,
}
