"""Checks of who the agent is, and of what it holds or could get."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path

from .outcome import Failed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from .expectations import Expectations
    from .system import System

PROGRAM_DIRS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
BECOMING_ROOT = ("sudo", "doas", "pkexec")
FIREWALLS = {
    "iptables": ("-S",),
    "iptables-nft": ("-S",),
    "iptables-legacy": ("-S",),
    "ip6tables": ("-S",),
    "nft": ("list", "ruleset"),
    "ipset": ("list", "-n"),
}
CAPABILITY_SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
TOOL_WAIT = 2.0


def non_root(_: Expectations, system: System) -> str:
    """None of the real, effective, saved and file-system ids is the host's root's, and no group is."""
    for kind in ("Uid", "Gid"):
        ids = _host_ids(system, kind)
        if len(ids) != 4 or 0 in ids:
            raise Failed(f"{kind}: {' '.join(map(str, ids)) or 'unknown'}")
    groups = _host_ids(system, "Groups")
    if 0 in groups:
        raise Failed(f"Groups: {' '.join(map(str, groups))}")
    return f"uid {_host_ids(system, 'Uid')[0]} on the host"


def _host_ids(system: System, field: str) -> list[int]:
    """Return a field's ids as the host knows them."""
    kind = "uid" if field == "Uid" else "gid"
    return [system.on_host(kind, int(text)) for text in system.status().get(field, "").split()]


def uid_matches_host(expected: Expectations, system: System) -> str:
    """The agent's ids, as the host knows them, are the user's; so the files it writes are the user's."""
    uids, gids = set(_host_ids(system, "Uid")), set(_host_ids(system, "Gid"))
    if (uids, gids) != ({expected.uid}, {expected.gid}):
        found = f"{'/'.join(map(str, sorted(uids)))}:{'/'.join(map(str, sorted(gids)))}"
        raise Failed(f"is {found}, the host user is {expected.uid}:{expected.gid}")
    return f"{expected.uid}:{expected.gid}"


def no_sudo(_: Expectations, system: System) -> str:
    """No program to become root with, and no file that changes ids or brings capabilities when executed."""
    for directory in PROGRAM_DIRS:
        for name in BECOMING_ROOT:
            if system.there(f"{directory}/{name}"):
                raise Failed(f"{directory}/{name} is there")
    count = 0
    for path, mode in regular_files(system.real("/")):
        count += 1
        if mode & (stat.S_ISUID | stat.S_ISGID):
            raise Failed(f"{system.shown(path)} is set-{'uid' if mode & stat.S_ISUID else 'gid'}")
        if mode & 0o111 and _has_capabilities(path):
            raise Failed(f"{system.shown(path)} carries capabilities")
    return f"none among {count} files"


def regular_files(top: Path) -> Iterator[tuple[str, int]]:
    """Yield (path, mode) of the regular files of one file system that this process can get at."""
    device, waiting = top.lstat().st_dev, [str(top)]
    while waiting:
        try:
            entries = list(os.scandir(waiting.pop()))
        except OSError:
            continue  # what cannot be entered cannot be executed
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(found.st_mode):
                    yield entry.path, found.st_mode
                elif stat.S_ISDIR(found.st_mode) and found.st_dev == device:
                    waiting.append(entry.path)


def _has_capabilities(path: str) -> bool:
    try:
        return "security.capability" in os.listxattr(path, follow_symlinks=False)
    except OSError:
        return False


def no_capabilities(_: Expectations, system: System) -> str:
    """All five sets are empty, and no execution can fill them."""
    status = system.status()
    for name in CAPABILITY_SETS:
        value = status.get(name, "")
        if not value or value.strip("0"):
            raise Failed(f"{name}: {value or 'unknown'}")
    if status.get("NoNewPrivs") != "1":
        raise Failed(f"NoNewPrivs: {status.get('NoNewPrivs', 'unknown')}")
    return "all sets are empty, NoNewPrivs is 1"


def seccomp(_: Expectations, system: System) -> str:
    """The engine's filter of system calls is on, and what it must refuse is refused."""
    mode = system.status().get("Seccomp", "unknown")
    if mode != "2":
        raise Failed(f"Seccomp: {mode}; system calls are not filtered")
    if system.mount_over()["namespaces"]:
        raise Failed("new user namespaces are allowed")
    return "filtering; user namespaces are refused"


def iptables_refused(_: Expectations, system: System) -> str:
    """The packet filter cannot even be read, raw sockets are refused, and a tool that is there fails."""
    code = system.ask_netfilter()
    if code == 0:
        raise Failed("the packet filter answers")
    if code != errno.EPERM:
        raise Failed(f"the packet filter gives an unclear answer: {errno.errorcode.get(code, code)}")
    for name, family, protocol in (
        ("IP", socket.AF_INET, socket.IPPROTO_RAW),
        ("packet", socket.AF_PACKET, 0),
    ):
        try:
            system.open_raw(family, protocol)
        except PermissionError:
            continue
        raise Failed(f"a raw {name} socket can be opened")
    for directory in PROGRAM_DIRS:
        for name, arguments in FIREWALLS.items():
            path = f"{directory}/{name}"
            if system.there(path) and system.execute((str(system.real(path)), *arguments), TOOL_WAIT) == 0:
                raise Failed(f"{path} works")
    return "netlink and raw sockets: EPERM"
