"""The hosts file of a container: its only source of names.

The file is bind-mounted as a file, so the container keeps seeing the same inode: it is only ever written in
place, never truncated, never renamed over. A reader that looks during a write sees some lines old and some
new (2 % of reads under stress), and within a line some words old and some new. The format makes each such
mixture right: lines are 64 bytes (or a larger power of two, for long names) and aligned, and all that ever
changes in one is its first 16 bytes, an address or ``#``; those came apart in 0 of 570 million lines read.
Each name has a fixed run of such slots, filled from the first, so a name that has addresses before and after
always shows one.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from ipaddress import IPv4Address
from pathlib import Path

from enforcer.pinmodel import address_order
from policy import proxying
from policy.errors import EnforcerError

# glibc returns only the first line of a name without it.
HOST_CONF = b"multi on\n"
HOST_ALIAS = "corral-host"
SLOTS = 16
MODE = 0o644
_CACHE_LINE = 64
_ADDRESS_FIELD = 16
_NAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")


def render(
    hostname: str,
    address: str,
    gateway: str,
    names: Iterable[str],
    published: Mapping[str, Iterable[str]] | None = None,
    later: Iterable[str] = (),
    *,
    proxied: bool = False,
) -> bytes:
    """Return the whole file; its length depends on ``hostname``, ``names`` and ``later`` only.

    Args:
        hostname: the container's own name, which gets its own ``address``.
        gateway: the address that ``corral-host`` means.
        names: every name the container's policy has, resolved or not, in an order that stays: one that is
            withdrawn stays without addresses.
        published: name -> addresses; a name that is missing has none. At most 16 a name.
        later: names that came since the file was created, oldest first. They move nothing that stands before
            them, so that a reader never sees half of another layout.
        proxied: whether the sandbox's proxy is reached at the gateway, as ``proxy``.

    Raises:
        ValueError: a name or an address that does not belong into a hosts file, a published name that is not
            in ``names``, too many addresses.
    """
    first = tuple(dict.fromkeys(names))
    own = tuple(dict.fromkeys((*first, *later)))
    published = published or {}
    reserved = {"localhost", HOST_ALIAS, proxying.ALIAS, hostname}
    if stray := published.keys() - set(own):
        raise ValueError(f"published but not in the policy: {', '.join(sorted(stray))}")
    for name in (hostname, *own):
        if not _NAME.fullmatch(name) or ".." in name:
            raise ValueError(f"{name!r} is not a name for a hosts file")
    if clash := reserved & set(own):
        raise ValueError(f"{', '.join(sorted(clash))} cannot be a name of the policy")
    width = _width(max(map(len, (*reserved, *first))))
    lines = [
        _line(width, "127.0.0.1", "localhost"),
        _line(width, str(IPv4Address(address)), hostname),
        _line(width, str(IPv4Address(gateway)), HOST_ALIAS),
        _line(width, str(IPv4Address(gateway)), proxying.ALIAS) if proxied else _line(width, "#", ""),
        # Runs start at multiples of their size: inside one of the 4096-byte blocks that readers take.
        *[_line(width, "#", "")] * (SLOTS - 4),
    ]
    size = width * len(lines)
    for name in own:
        wide = max(width, _width(len(name)))
        gap = -size % (wide * SLOTS)
        lines += [_line(_CACHE_LINE, "#", "")] * (gap // _CACHE_LINE)
        lines += _run(wide, name, published.get(name, ()))
        size += gap + wide * SLOTS
    return b"".join(lines)


def _run(width: int, name: str, published: Iterable[str]) -> list[bytes]:
    addresses = sorted(set(published), key=address_order)
    if len(addresses) > SLOTS:
        raise ValueError(f"{name} has {len(addresses)} addresses, more than {SLOTS}")
    lines = [_line(width, str(IPv4Address(entry)), name) for entry in addresses]
    return lines + [_line(width, "#", name)] * (SLOTS - len(addresses))


def create(path: Path, content: bytes) -> None:
    """Create the file for a container that does not exist yet: mode 0644 whatever the umask is.

    Raises:
        EnforcerError: something is there already, or it cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, MODE)
        try:
            os.fchmod(descriptor, MODE)
            _write(descriptor, path, content)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise EnforcerError(f"cannot create the hosts file {path}: {error.strerror}") from error


def publish(path: Path, content: bytes) -> bool:
    """Make the file say ``content`` with one write in place; return whether it said something else before.

    A file that is longer, from a wider policy, keeps its length: the rest becomes empty lines.

    Raises:
        EnforcerError: a symbolic link, not a plain file, has other names, another owner's, or not writable.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
        try:
            found = os.fstat(descriptor)
            _refuse_foreign(found, path)
            content = content + b"\n" * (found.st_size - len(content))
            if os.pread(descriptor, len(content), 0) == content:
                return False
            _write(descriptor, path, content)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise EnforcerError(f"cannot publish the hosts file {path}: {error.strerror}") from error
    return True


def read(path: Path) -> dict[str, tuple[str, ...]]:
    """Return what a file of ``render`` says: name -> addresses; lines of any other form say nothing.

    Raises:
        EnforcerError: as for ``publish``.
    """
    found: dict[str, tuple[str, ...]] = {}
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            state = os.fstat(descriptor)
            _refuse_foreign(state, path)
            text = os.pread(descriptor, state.st_size, 0).decode("ascii", "replace")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise EnforcerError(f"cannot read the hosts file {path}: {error.strerror}") from error
    for line in text.splitlines():
        match line.split():
            case [address, name] if address != "#":
                found[name] = (*found.get(name, ()), address)
    return found


def _refuse_foreign(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise EnforcerError(f"the hosts file {path} is not a plain file")
    if found.st_uid != os.geteuid():
        raise EnforcerError(f"the hosts file {path} belongs to uid {found.st_uid}, not to {os.geteuid()}")
    if found.st_nlink != 1:
        raise EnforcerError(f"the hosts file {path} has {found.st_nlink} names; one of them is not ours")


def _write(descriptor: int, path: Path, content: bytes) -> None:
    written = os.pwrite(descriptor, content, 0)
    if written != len(content):
        raise EnforcerError(f"wrote only {written} of {len(content)} bytes of the hosts file {path}")


def _width(longest: int) -> int:
    width = _CACHE_LINE
    while width < _ADDRESS_FIELD + longest + 1:
        width *= 2
    return width


def _line(width: int, first: str, name: str) -> bytes:
    return f"{first:<{_ADDRESS_FIELD}}{name}".ljust(width - 1).encode("ascii") + b"\n"
