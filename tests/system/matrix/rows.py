"""The table: a technique, who knows it, the probe, and what it has to say in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .running import Answers

EMPTY = "—"


@dataclass(frozen=True)
class Row:
    """One technique.

    known: tools in whose lists it is: C(DK), D(eepce), B(OtB), A(micontained), S(ection 5 of docker-bench).
    probe: of ``probe`` or ``running``. expected: what it says in a sandbox. limit: it is open, and said to be;
    then nothing has to differ in the containers beside it.
    """

    technique: str
    known: str
    probe: str
    expected: str
    limit: bool = False


AREAS: Mapping[str, tuple[Row, ...]] = {
    "Privileges": (
        Row("capability sets: CapInh, CapPrm, CapEff, CapBnd, CapAmb", "C D A S", "capabilities", "all five empty"),
        Row("`no_new_privs`", "A S", "no_new_privs", "1"),
        Row("uid and gid of the program", "C D S", "ids", "your uid"),
        Row("`setuid(0)`, `setgid(0)`, `setgroups`", "", "become-root", "EPERM"),
        Row("set-id programs, searched in the whole image and all mounts", "", "set-id", "none"),
        Row("a set-id program of root's that lies in the project, executed", "", "set-id-works", "as the user"),
        Row("programs with file capabilities, searched likewise", "", "file-capabilities", "none"),
        Row("`security.capability` put on a file of one's own", "", "give-capability", "EPERM"),
    ),
    "System calls": (
        Row("filter of system calls", "A S", "seccomp", "filter"),
        Row("`unshare(CLONE_NEWUSER)`", "C A", "unshare-user", "EPERM"),
        Row("`clone(CLONE_NEWUSER)`", "A", "clone-user", "EPERM"),
        Row("`clone3` with CLONE_NEWUSER, whose flags no filter can read", "", "clone3", "ENOSYS"),
        Row("`unshare` of mount, cgroup, uts, ipc, pid, net", "A", "unshare-others", "EPERM"),
        Row("`setns` to the first process's network", "A", "setns", "EPERM"),
        Row("`mount` of a tmpfs and of a directory, `fsopen`, `open_tree`", "C A", "mount", "EPERM"),
        Row("the root remounted for writing, `umount` of /proc", "A", "remount", "EPERM"),
        Row("`chroot`", "A", "chroot", "EPERM"),
        Row("`mknod` of a character device", "A", "mknod", "EPERM"),
        Row("`open_by_handle_at`, the way of \"shocker\"", "C A", "file-handles", "EPERM"),
        Row("`keyctl`, `add_key`, `request_key`", "B A", "keyrings", "EPERM"),
        Row("`bpf`: a map", "C A", "bpf", "EPERM"),
        Row("`perf_event_open` of the process itself", "A", "perf", "EPERM"),
        Row("`userfaultfd`, for faults of the user's own only", "A", "userfaultfd", "EPERM"),
        Row("`io_uring_setup`", "", "io_uring", "EPERM"),
        Row("`kexec_load`", "A", "kexec", "EPERM"),
        Row("`init_module`, `finit_module`, `delete_module`", "C A", "modules", "EPERM"),
        Row("`ptrace`, `process_vm_readv`, `kill`, `pidfd_open` of a process of the host", "C A", "trace-others", "ESRCH"),
        Row("`ptrace` of a child of one's own", "", "trace-own", "done", limit=True),
        Row("`syslog`: the kernel's log", "A", "kernel-log", "EPERM"),
        Row("`iopl`: the machine's ports", "A", "iopl", "EPERM"),
        Row("`reboot`", "A", "reboot", "EPERM"),
        Row("`acct`: process accounting", "A", "accounting", "EPERM"),
        Row("`sethostname`", "A", "host-name", "EPERM"),
    ),
    "Sockets": (
        Row("raw and packet sockets", "A", "raw-sockets", "EPERM"),
        Row("AF_VSOCK, to the hypervisor", "", "vsock", "EPERM"),
        Row("AF_ALG, the kernel's cryptography: this kernel has none, the filter would let it through", "", "crypto", "EAFNOSUPPORT", limit=True),
        Row("families beside AF_UNIX, AF_INET and AF_INET6 that can be opened", "", "families", "NETLINK"),
        Row("rtnetlink: an address more", "", "netlink-writes", "EPERM"),
        Row("nfnetlink: the tables of nftables", "", "firewall", "EPERM"),
        Row("an abstract unix socket of the host", "C", "abstract", "ECONNREFUSED"),
        Row("abstract unix sockets of the host listed in /proc/net/unix", "C", "abstract-listed", "not listed"),
        Row("docker.sock, containerd.sock, podman.sock, crio.sock and others, searched by name everywhere", "C D B S", "runtime-sockets", "none"),
        Row("any unix socket that is a file", "B", "any-sockets", "none"),
    ),
    "Kernel files": (
        Row("/proc/sys/kernel/core_pattern opened to write", "C", "core-pattern", "EACCES"),
        Row("modprobe, poweroff_cmd, binfmt_misc, uevent_helper likewise", "", "helpers", "EACCES"),
        Row("sysrq-trigger where the kernel has it, panic settings likewise", "", "panic", "EACCES"),
        Row("randomize_va_space, dmesg_restrict, mmap_min_addr, suid_dumpable likewise", "C", "hardening", "EACCES"),
        Row("ip_forward, ping_group_range likewise", "C", "network-settings", "EACCES"),
        Row("files of /proc and /sys that the mode lets write, all looked at", "", "kernel-settings", "/proc/pressure/cpu, /proc/pressure/io, /proc/pressure/memory"),
        Row("/proc/kcore, /proc/keys, /proc/timer_list, /dev/mem, /dev/kmsg: those that say something", "", "kernel-memory", "none"),
        Row("addresses in /proc/kallsyms", "", "kernel-addresses", "hidden"),
        Row("/sys/firmware, /proc/scsi, /proc/acpi, securityfs, debugfs: those with something in them", "", "hidden-directories", "none"),
        Row("a control group made, `release_agent` opened to write", "C", "cgroup-writes", "EROFS"),
    ),
    "Namespaces and processes": (
        Row("namespaces that are the host's: cgroup, ipc, mnt, net, pid, uts", "C A S", "namespaces", "none"),
        Row("the user namespace, after an attempt to leave it", "A S", "user-namespace", "the host's"),
        Row("the path in /proc/self/cgroup", "C D A", "cgroup-path", "its own root"),
        Row("a process of the host in /proc", "C", "processes", "none"),
        Row("/proc/PID/root and /proc/PID/cwd of /proc/1 and all others", "", "roots", "its own"),
        Row("directories that a runtime left open for the first process", "", "descriptors", "none"),
    ),
    "Files": (
        Row("all mounts, against the list below", "C D S", "mounts", "as listed below"),
        Row("mounts that hear of what is mounted on the host", "S", "propagation", "/usr/sbin/docker-init"),
        Row("directories that can be written, all looked at", "S", "writable", "/dev/shm, /dev/mqueue, /home/agent, <project>, /tmp, /var/tmp"),
        Row("a file in /usr/bin, /etc and /", "S", "write-system", "EROFS"),
        Row("device nodes, everywhere", "C S", "devices", "/dev/full, /dev/null, /dev/random, /dev/tty, /dev/urandom, /dev/zero"),
        Row("keys and logins by the names they usually have, /etc/shadow", "C D", "credentials", "none"),
        Row("files, all read, with the sandbox's own secret in them", "D", "secret-on-disk", "none"),
        Row("that secret outside: inspect and labels, arguments, the first process, Docker's files", "", "secret-outside", "nowhere"),
    ),
    "Network": (
        Row("169.254.169.254, 168.63.129.16, 100.100.100.200: datagrams and a connection", "C B", "metadata", "ECONNREFUSED; 0 packets"),
        Row("fd00:ec2::254 likewise", "", "metadata-six", "EADDRNOTAVAIL; 0 packets"),
        Row("an address that no policy names likewise", "", "forbidden", "ECONNREFUSED; 0 packets"),
        Row("one of IPv6 likewise", "", "forbidden-six", "EADDRNOTAVAIL; 0 packets"),
        Row("everybody on the link, ff02::1", "D", "all-nodes", "EADDRNOTAVAIL; 0 packets"),
        Row("an echo request from an unprivileged ping socket", "D", "ping", "silence; 0 packets"),
        Row("bytes in the labels of names: the C library, Docker's resolver, the host's, UDP and TCP", "C", "names", "no answer; 0 questions"),
        Row("a service of the host on 0.0.0.0, at each of its addresses", "C D", "host-port", "ECONNREFUSED"),
        Row("a service of the host on 127.0.0.1", "C D", "host-loopback", "ECONNREFUSED"),
        Row("what listens inside, beside Docker's resolver", "S", "listening", "none"),
        Row("published ports", "S", "published", "none"),
        Row("whose bridge it is on", "S", "bridge", "its own"),
    ),
    "Configuration": (
        Row("restart policy", "S", "restart", "no"),
        Row("number of processes", "S", "processes-limit", "limited"),
    ),
}  # fmt: skip
# Both as "TARGET TYPE ro|rw".
MOUNTS = {
    "the image": ("/ overlay ro",),
    "the policy's and corral's own": (
        "/etc/hosts file system ro",
        "/home/agent file system rw",
        "/home/agent/.cache/opencode file system rw",
        "/home/agent/.config/opencode file system ro",
        "/home/agent/.local/share/opencode file system rw",
        "/home/agent/.local/state/opencode file system rw",
        "/tmp tmpfs rw",
        "/var/tmp tmpfs rw",
        "<project> file system rw",
    ),
    "Docker's": (
        "/dev tmpfs rw",
        "/dev/mqueue mqueue rw",
        "/dev/pts devpts rw",
        "/dev/shm tmpfs rw",
        "/etc/hostname file system ro",
        "/etc/resolv.conf file system ro",
        "/proc proc rw",
        "/proc/acpi tmpfs ro",
        "/proc/bus proc ro",
        "/proc/fs proc ro",
        "/proc/irq proc ro",
        "/proc/keys tmpfs rw",
        "/proc/sys proc ro",
        "/proc/timer_list tmpfs rw",
        "/sys sysfs ro",
        "/sys/firmware tmpfs ro",
        # The second where the groups are of the first version.
        "/sys/fs/cgroup cgroup ro",
        "/sys/fs/cgroup tmpfs rw",
        "/usr/sbin/docker-init file system ro",
    ),
}
ROWS = tuple(row for rows in AREAS.values() for row in rows)


def seen(answers: Mapping[str, Answers]) -> dict[str, Answers]:
    """Return the answers as the page has them: a table of mounts that is as listed says so."""
    listed = "\n".join(sorted(mount for mounts in MOUNTS.values() for mount in mounts))
    told = dict(answers)

    def compared(table: str) -> str:
        more = sorted(set(table.splitlines()) ^ set(listed.splitlines()))
        return "as listed below" if not more else f"{len(more)} differ: {', '.join(more)}"

    of = told["mounts"]
    others = (compared(of.plain), compared(of.everything))
    told["mounts"] = Answers(compared(of.sandbox), *(other.partition(":")[0] for other in others))
    return told


def problems(answers: Mapping[str, Answers]) -> list[str]:
    """Return what is not as it has to be: an answer, a probe that could not fail, a row or a probe too many."""
    known = {row.probe for row in ROWS}
    found = [f"{name}: no row" for name in sorted(answers.keys() - known)]
    for row in ROWS:
        answer = answers.get(row.probe)
        if answer is None:
            found.append(f"{row.probe}: not probed")
        elif answer.sandbox != row.expected:
            found.append(f"{row.probe}: {answer.sandbox}, not {row.expected}")
        elif not row.limit and {answer.plain, answer.everything} <= {answer.sandbox, ""}:
            found.append(f"{row.probe}: says {answer.sandbox} everywhere, so it could not fail")
    return found
