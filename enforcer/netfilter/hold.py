"""Holding our nft table: while it is held, nobody else can flush, change or delete it.

The kernel ties a table to the netlink socket of the process that owns it (``flags owner``); ``persist``
(Linux 6.9, nft 1.1) keeps the table when that process goes, and lets the next one take it over. ``nft flush
ruleset``, which firewalls run when they reload, passes over a table that somebody else owns, so the backstop
in it stands while all other rules are gone. Where kernel or nft are older, the table can be flushed and is
mended.
"""

from __future__ import annotations

import os
import socket
import struct

NETLINK_NETFILTER = 12
NFNL_SUBSYS_NFTABLES, NFT_MSG_NEWTABLE = 10, 0
NFNL_MSG_BATCH_BEGIN, NFNL_MSG_BATCH_END = 16, 17
NFPROTO_UNSPEC, NFPROTO_INET = 0, 1
NFTA_TABLE_NAME, NFTA_TABLE_FLAGS = 1, 2
NFT_TABLE_F_OWNER, NFT_TABLE_F_PERSIST = 2, 4
NLM_F_REQUEST, NLM_F_ACK, NLMSG_ERROR = 1, 4, 2
HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
TIMEOUT = 5.0

# What a host can do about it, and how a table stands.
NO, PLAIN, FREE, HELD = "no", "plain", "free", "held"

FLAGS = "flags owner, persist"
PROBE = f"table inet corral_probe {{\n  {FLAGS}\n}}\n"
"""Checked with ``nft -c``: it passes where both nft and the kernel know the flags."""


class TableHold:
    """Ownership of the table ``name`` of family inet, for this process and its network namespace."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._socket: socket.socket | None = None

    @property
    def held(self) -> bool:
        """Whether this process owns the table."""
        return self._socket is not None

    @property
    def socket(self) -> socket.socket | None:
        """The socket through which an owned table can be changed."""
        return self._socket

    def take(self) -> None:
        """Own the table from now on. A missing one is made, empty.

        Raises:
            OSError: another process owns it, it lacks the flag ``persist``, or the kernel is too old.
        """
        if self._socket is not None:
            return
        sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER)
        try:
            sock.settimeout(TIMEOUT)
            sock.bind((0, 0))
            sock.send(_request(self._name))
            _acknowledged(sock.recv(1 << 16))
        except BaseException:
            sock.close()
            raise
        self._socket = sock

    def release(self) -> None:
        """Own it no more; the table stays as it is, and anybody may change it until it is taken again."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _message(kind: int, flags: int, sequence: int, family: int, resource: int, body: bytes = b"") -> bytes:
    content = struct.pack("!BBH", family, 0, resource) + body
    return HEADER.pack(HEADER.size + len(content), kind, flags, sequence, 0) + content


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def _request(name: str) -> bytes:
    flags = struct.pack("!I", NFT_TABLE_F_OWNER | NFT_TABLE_F_PERSIST)
    body = _attribute(NFTA_TABLE_NAME, name.encode() + b"\0") + _attribute(NFTA_TABLE_FLAGS, flags)
    kind = NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_NEWTABLE
    return (
        _message(NFNL_MSG_BATCH_BEGIN, NLM_F_REQUEST, 1, NFPROTO_UNSPEC, NFNL_SUBSYS_NFTABLES)
        + _message(kind, NLM_F_REQUEST | NLM_F_ACK, 2, NFPROTO_INET, 0, body)
        + _message(NFNL_MSG_BATCH_END, NLM_F_REQUEST, 3, NFPROTO_UNSPEC, NFNL_SUBSYS_NFTABLES)
    )


def _acknowledged(answer: bytes) -> None:
    _, kind, *_ = HEADER.unpack_from(answer)
    (code,) = struct.unpack_from("=i", answer, HEADER.size)
    if kind == NLMSG_ERROR and code:
        raise OSError(-code, os.strerror(-code))
