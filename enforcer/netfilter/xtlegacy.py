"""Reading the legacy x_tables: the kernel is asked in its own words, no library and no program is needed.

Of a rule only what corral decides by is decoded: interfaces, the target, and the comment. The kernel makes a
table when it is first asked for; ``present`` looks without making one where it may.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SOL_IP, SOL_IPV6 = 0, 41
GET_INFO, GET_ENTRIES = 64, 65
HOOKS = ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING")
INFO = struct.Struct("=32sI5I5III")
# Where ipt_entry and ip6t_entry keep the interfaces, the protocol's end, and their offsets.
LAYOUT = {4: (16, 112, 88), 6: (64, 168, 140)}
INVERTED_IN, INVERTED_OUT = 1, 2
MODULES = {(4, "filter"): "iptable_filter", (4, "nat"): "iptable_nat", (6, "filter"): "ip6table_filter"}
NAMES = {4: "ip_tables_names", 6: "ip6_tables_names"}
VERDICTS = {-1: "DROP", -2: "ACCEPT", -4: "QUEUE", -5: "RETURN"}
TRIES = 5


class ReadError(OSError):
    """A table cannot be read."""


@dataclass(frozen=True)
class Entry:
    """One rule: interfaces as iptables writes them (``corral-+``), target, and comment; empty: none."""

    inbound: str
    outbound: str
    target: str
    comment: str

    @property
    def line(self) -> str:
        """The rule as far as it was decoded, in the words of ``iptables -S``."""
        parts = [("-i", self.inbound), ("-o", self.outbound)]
        words = [
            f"! {flag} {name[1:]}" if name[0] == "!" else f"{flag} {name}" for flag, name in parts if name
        ]
        if self.comment:
            words.append(f"-m comment --comment {self.comment}")
        if self.target:
            words.append(f"-j {self.target}")
        return " ".join(words)


@dataclass(frozen=True)
class Table:
    """The chains of a table, built-in ones too, with their rules in order."""

    chains: dict[str, list[Entry]] = field(default_factory=dict)

    @property
    def lines(self) -> dict[str, list[str]]:
        """The chains as ``plan.parse_save`` returns them."""
        return {name: [entry.line for entry in entries] for name, entries in self.chains.items()}


def present(family: int, table: str, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> bool:
    """Tell whether a table exists, as far as it can be told without making it."""
    try:
        names = (proc / "net" / NAMES[family]).read_text().split()
    except FileNotFoundError:
        return False
    except OSError:
        # Only root may read that. Without the module there is no table; built into the kernel it has no file.
        module = MODULES[family, table]
        return not (proc / "modules").exists() or (sys / "module" / module).exists()
    return table in names


def read(family: int, table: str) -> Table:
    """Read a table; one that this kernel does not know is empty.

    Raises:
        ReadError: the kernel refuses, or the table changes all the time.
    """
    level, kind = (SOL_IP, socket.AF_INET) if family == 4 else (SOL_IPV6, socket.AF_INET6)
    try:
        with socket.socket(kind, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.IPPROTO_RAW) as sock:
            for _ in range(TRIES):
                name = table.encode().ljust(32, b"\0")
                head = INFO.unpack(_ask(sock, level, GET_INFO, name, INFO.size))
                hooks, size = head[2:7], head[13]
                request = struct.pack("=32sI4x", name, size)
                try:
                    answer = _ask(sock, level, GET_ENTRIES, request, len(request) + size)
                except OSError as error:
                    # It grew or shrank between the two questions.
                    if error.errno not in (errno.EAGAIN, errno.EINVAL):
                        raise
                    continue
                return parse(answer[len(request) :], family, head[1], hooks)
    except OSError as error:
        if error.errno in (errno.ENOPROTOOPT, errno.ENOENT, errno.EAFNOSUPPORT):
            return Table()
        raise ReadError(error.errno, f"legacy table {table}: {os.strerror(error.errno or 0)}") from error
    raise ReadError(errno.EAGAIN, f"legacy table {table}: it changes all the time")


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _ask(sock: socket.socket, level: int, option: int, request: bytes, size: int) -> bytes:
    buffer = ctypes.create_string_buffer(request, max(size, len(request)))
    length = ctypes.c_uint32(size)
    # Loaded where it is needed, which is on few hosts.
    if _libc().getsockopt(sock.fileno(), level, option, buffer, ctypes.byref(length)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return buffer.raw[: length.value]


def parse(blob: bytes, family: int, valid: int, hooks: tuple[int, ...]) -> Table:
    """Return the chains in what the kernel calls the entries of a table."""
    _, head, offsets = LAYOUT[family]
    rows = list(_rows(blob, head, offsets))
    starts = {hooks[number]: name for number, name in enumerate(HOOKS) if valid >> number & 1}
    for _, following, _, target in rows:
        if target[2:7] == b"ERROR":
            # A user's chain begins after a rule that carries its name; the last of all carries "ERROR".
            name = target[32:62].partition(b"\0")[0].decode("ascii", "replace")
            if following < len(blob):
                starts[following] = name
    chains: dict[str, list[Entry]] = {name: [] for name in starts.values()}
    here = ""
    for start, _, entry, target in rows:
        here = starts.get(start, here)
        if target[2:7] != b"ERROR" and here:
            chains[here].append(_entry(entry, target, family, starts))
    # Each chain ends with its policy, which is no rule.
    return Table({name: entries[:-1] for name, entries in chains.items()})


def _rows(blob: bytes, head: int, offsets: int) -> Iterator[tuple[int, int, bytes, bytes]]:
    start = 0
    while start + head <= len(blob):
        target, following = struct.unpack_from("=HH", blob, start + offsets)
        if following < head or target < head:
            return
        yield (
            start,
            start + following,
            blob[start : start + following],
            blob[start + target : start + following],
        )
        start += following


def _entry(entry: bytes, target: bytes, family: int, starts: dict[int, str]) -> Entry:
    interfaces, head, _ = LAYOUT[family]
    names = [entry[interfaces + 16 * n : interfaces + 16 * (n + 1)] for n in range(4)]
    # Inversion flags are the last byte of the address part.
    inverted = entry[83] if family == 4 else entry[132]
    name = target[2:31].partition(b"\0")[0].decode("ascii", "replace")
    if not name:
        verdict = struct.unpack_from("=i", target, 32)[0]
        name = VERDICTS.get(verdict, "") if verdict < 0 else starts.get(verdict, "")
    return Entry(
        _interface(names[0], names[2], inverted & INVERTED_IN),
        _interface(names[1], names[3], inverted & INVERTED_OUT),
        name,
        _comment(entry[head : len(entry) - len(target)]),
    )


def _interface(name: bytes, mask: bytes, inverted: int) -> str:
    text = name.partition(b"\0")[0].decode("ascii", "replace")
    if not text:
        return ""
    # Of a whole name the end is compared too. iptables keeps the + of a pattern, python-iptables does not.
    pattern = len(text) < 15 and not mask[len(text)] and not text.endswith("+")
    return f"{'!' if inverted else ''}{text}{'+' if pattern else ''}"


def _comment(matches: bytes) -> str:
    while len(matches) >= 32:
        size = struct.unpack_from("=H", matches)[0]
        if size < 32:
            break
        if matches[2:31].partition(b"\0")[0] == b"comment":
            return matches[32:size].partition(b"\0")[0].decode("ascii", "replace")
        matches = matches[size:]
    return ""
