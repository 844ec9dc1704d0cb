"""System calls that make, enter or change what a container is held by. Their arguments do no harm where they pass."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import stat
import struct

from .tools import Given, Probe, call, descriptor, each, made, route_message, said, status

NAMESPACES = {
    "mount": 0x00020000,
    "cgroup": 0x02000000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
NEWUSER = 0x10000000


def capabilities(given: Given) -> str:
    sets = {name: int(status(name), 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
    return ", ".join(f"{name} {value:x}" for name, value in sets.items() if value) or "all five empty"


def no_new_privs(given: Given) -> str:
    return status("NoNewPrivs")


def seccomp(given: Given) -> str:
    return {"0": "off", "1": "strict", "2": "filter"}.get(status("Seccomp"), "unknown")


def ids(given: Given) -> str:
    return (
        "your uid" if set(status("Uid").split()) == {str(given["uid"])} else f"uid {status('Uid').split()[0]}"
    )


def become_root(given: Given) -> str:
    return each(
        {
            "setuid": lambda: os.setuid(0),
            "setgid": lambda: os.setgid(0),
            "setgroups": lambda: os.setgroups([0]),
        }
    )


def unshare_user(given: Given) -> str:
    return said(lambda: call("unshare", NEWUSER))


def unshare_others(given: Given) -> str:
    return each({name: lambda flag=flag: call("unshare", flag) for name, flag in NAMESPACES.items()})  # type: ignore[misc]


def _in_a_child(result: int) -> None:
    if result == 0:
        os._exit(0)
    os.waitpid(result, 0)


def clone_user(given: Given) -> str:
    return said(lambda: _in_a_child(call("clone", NEWUSER | signal.SIGCHLD, 0, 0, 0, 0)))


def clone3(given: Given) -> str:
    arguments = ctypes.create_string_buffer(struct.pack("=8Q", NEWUSER, 0, 0, 0, signal.SIGCHLD, 0, 0, 0), 64)
    return said(lambda: _in_a_child(call("clone3", arguments, 64)))


def setns(given: Given) -> str:
    with descriptor(os.open("/proc/1/ns/net", os.O_RDONLY)) as namespace:
        return said(lambda: call("setns", namespace, 0))


def _aside() -> None:
    """Where it is possible, keep what is mounted to this child."""
    said(lambda: call("unshare", NAMESPACES["mount"]))
    said(lambda: call("mount", None, b"/", None, 1 << 18 | 1 << 14, None))


def mount(given: Given) -> str:
    os.makedirs("/tmp/mounted", exist_ok=True)
    _aside()
    return each(
        {
            "tmpfs": lambda: call("mount", b"x", b"/tmp/mounted", b"tmpfs", 0, None),
            "bind": lambda: call("mount", b"/tmp", b"/tmp/mounted", None, 4096, None),
            "fsopen": lambda: call("fsopen", b"tmpfs", 0),
            "open_tree": lambda: call("open_tree", -100, b"/tmp", 1),
        }
    )


def remount(given: Given) -> str:
    """As who wants to write where it is read-only."""
    _aside()
    return each(
        {
            "remount": lambda: call("mount", None, b"/", None, 32 | 4096, None),
            "umount": lambda: call("umount2", b"/proc", 2),
        }
    )


def change_root(given: Given) -> str:
    return said(lambda: os.chroot("/tmp"))


def make_device(given: Given) -> str:
    # The numbers of /dev/null.
    def make() -> None:
        os.mknod("/dev/shm/node", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        os.remove("/dev/shm/node")

    return said(make)


def keyrings(given: Given) -> str:
    return each(
        {
            "keyctl": lambda: call("keyctl", 0, -3, 1),
            "add_key": lambda: call("add_key", b"user", b"corral-probe", b"x", 1, -2),
            "request_key": lambda: call("request_key", b"user", b"corral-probe", None, -2),
        }
    )


def bpf(given: Given) -> str:
    attributes = ctypes.create_string_buffer(struct.pack("=4I", 2, 4, 4, 1), 72)
    return said(lambda: os.close(call("bpf", 0, attributes, 72)))


def perf(given: Given) -> str:
    # A software event of this process alone.
    attributes = ctypes.create_string_buffer(struct.pack("=IIQ", 1, 112, 0), 112)
    return said(lambda: os.close(call("perf_event_open", attributes, 0, -1, -1, 0)))


def userfaultfd(given: Given) -> str:
    return said(lambda: os.close(call("userfaultfd", 1)))


def io_uring(given: Given) -> str:
    return said(lambda: os.close(call("io_uring_setup", 1, ctypes.create_string_buffer(120))))


def kexec(given: Given) -> str:
    # More segments than there can be: refused after the question who asks.
    return said(lambda: call("kexec_load", 0, 17, 0, 0))


def modules(given: Given) -> str:
    return each(
        {
            "init_module": lambda: call("init_module", None, 0, b""),
            "finit_module": lambda: call("finit_module", -1, b"", 0),
            "delete_module": lambda: call("delete_module", b"corral-probe-no-such-module", 0),
        }
    )


def file_handles(given: Given) -> str:
    """The way of "shocker": a file by its number, whatever is mounted where."""
    path = "/dev/shm/by-handle"
    with made(path):
        handle = ctypes.create_string_buffer(struct.pack("=Ii", 128, 0), 8 + 128)
        call("name_to_handle_at", -100, path.encode(), handle, ctypes.create_string_buffer(4), 0)
        with descriptor(os.open("/dev/shm", os.O_RDONLY)) as directory:
            return said(lambda: os.close(call("open_by_handle_at", directory, handle, os.O_RDONLY)))


def kernel_log(given: Given) -> str:
    return said(lambda: call("syslog", 10, None, 0))


def ports(given: Given) -> str:
    return said(lambda: call("iopl", 3))


def reboot(given: Given) -> str:
    # Without its magic numbers: refused after the question who asks.
    return said(lambda: call("reboot", 0, 0, 0, None))


def accounting(given: Given) -> str:
    return said(lambda: call("acct", b"/no/such/file"))


def host_name(given: Given) -> str:
    return said(lambda: socket.sethostname(socket.gethostname()))


def trace_own(given: Given) -> str:
    """A child of one's own."""
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        return said(lambda: call("ptrace", 0x4206, child, 0, 0))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def trace_others(given: Given) -> str:
    pid = int(given["pid"])
    memory = ctypes.create_string_buffer(8)
    local = ctypes.create_string_buffer(struct.pack("=QQ", ctypes.addressof(memory), 8))
    # Nothing is there; whether that is looked at says that the process was found.
    remote = ctypes.create_string_buffer(struct.pack("=QQ", 0, 8))
    return each(
        {
            "ptrace": lambda: call("ptrace", 0x4206, pid, 0, 0),
            "process_vm_readv": lambda: call("process_vm_readv", pid, local, 1, remote, 1, 0),
            "kill": lambda: os.kill(pid, 0),
            "pidfd": lambda: os.close(os.pidfd_open(pid)),
        }
    )


def raw_sockets(given: Given) -> str:
    return each(
        {
            "raw": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).close(),
            "packet": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close(),
        }
    )


def families(given: Given) -> str:
    """Which families of sockets can be opened, of those that a program on the network has no use for."""
    opened = []
    known = {family.value: family.name for family in socket.AddressFamily} | {44: "AF_XDP", 43: "AF_SMC"}
    usual = {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6}
    for number, name in sorted(known.items()):
        if number in usual or number == 0:
            continue
        for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_RAW):
            if said(lambda number=number, kind=kind: socket.socket(number, kind).close()) == "done":  # type: ignore[misc]
                opened.append(name.removeprefix("AF_"))
                break
    return ", ".join(opened) or "none"


def vsock(given: Given) -> str:
    return said(lambda: socket.socket(40, socket.SOCK_STREAM).close())


def crypto(given: Given) -> str:
    return said(lambda: socket.socket(38, socket.SOCK_SEQPACKET).close())


def _asks(protocol: int, message: bytes) -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as link:
        link.settimeout(5)
        link.bind((0, 0))
        link.send(message)
        answer = link.recv(65536)
        if struct.unpack_from("=H", answer, 4)[0] == 2 and (code := struct.unpack_from("=i", answer, 16)[0]):
            raise OSError(-code, "netlink")


def netlink_writes(given: Given) -> str:
    """An address more on the loopback, which is taken away again."""
    body = struct.pack("=BBBBi", socket.AF_INET, 32, 0, 254, 1)
    for kind in (2, 1):
        body += struct.pack("=HH4s", 8, kind, socket.inet_aton("127.1.2.3"))
    answer = said(lambda: _asks(0, route_message(20, 0x400, body)))
    if answer == "done":
        _asks(0, route_message(21, 0, body))
    return answer


def firewall(given: Given) -> str:
    """The tables of nftables are asked for."""
    generation = (10 << 8) | 16
    return said(lambda: _asks(12, route_message(generation, 0, struct.pack("=BBH", 0, 0, 0))))


PROBES: dict[str, Probe] = {
    "capabilities": capabilities,
    "no_new_privs": no_new_privs,
    "seccomp": seccomp,
    "ids": ids,
    "become-root": become_root,
    "unshare-user": unshare_user,
    "unshare-others": unshare_others,
    "clone-user": clone_user,
    "clone3": clone3,
    "setns": setns,
    "mount": mount,
    "remount": remount,
    "chroot": change_root,
    "mknod": make_device,
    "keyrings": keyrings,
    "bpf": bpf,
    "perf": perf,
    "userfaultfd": userfaultfd,
    "io_uring": io_uring,
    "kexec": kexec,
    "modules": modules,
    "file-handles": file_handles,
    "kernel-log": kernel_log,
    "iopl": ports,
    "reboot": reboot,
    "accounting": accounting,
    "host-name": host_name,
    "trace-own": trace_own,
    "trace-others": trace_others,
    "raw-sockets": raw_sockets,
    "families": families,
    "vsock": vsock,
    "crypto": crypto,
    "netlink-writes": netlink_writes,
    "firewall": firewall,
}
