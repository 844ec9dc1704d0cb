"""Questions for names that the gate asks, and what is said to them."""

from __future__ import annotations

import os
import struct

from .tries import Try

DNS_PORT = 53
OUTSIDE_NAME = "example.com"
# What no policy permits; the service on the host knows that the gate asks for it (policy.container).
UNLISTED_NAME = "unlisted.corral-gate.example"
RECORD_TYPES = {"A": 1, "TXT": 16}
RCODES = ("NOERROR", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED")
ANSWERED = frozenset({"NOERROR", "NXDOMAIN"})
# What a resolver says that has learnt nothing about the name. After NXDOMAIN, somebody has been asked.
CLOSED = frozenset({"FORMERR", "SERVFAIL", "NOTIMP", "REFUSED"})
# Seconds. The kernel sends few ICMP errors a second to one address, so a refused datagram may look lost.
UDP_WAIT = 0.3


def query(name: str, record: str) -> bytes:
    """Return a recursive DNS query for ``record`` ("A", "TXT")."""
    labels = b"".join(bytes([len(label)]) + label.encode("ascii") for label in name.split("."))
    head = struct.pack("!HHHHHH", int.from_bytes(os.urandom(2), "big"), 0x0100, 1, 0, 0, 0)
    return head + labels + b"\0" + struct.pack("!HH", RECORD_TYPES[record], 1)


def answer_of(asked: bytes, data: bytes, udp: bool) -> tuple[str, int]:
    """Return the response code's name and the number of answer records; what is no answer is "MALFORMED".

    Over TCP both messages have their length before them.
    """
    asked, data = (asked, data) if udp else (asked[2:], data[2:])
    if len(data) < 12 or data[:2] != asked[:2]:
        return "MALFORMED", 0
    flags, _, answers = struct.unpack_from("!HHH", data, 2)
    code = flags & 15
    return RCODES[code] if code < len(RCODES) else f"RCODE{code}", answers


def question(
    server: str,
    record: str,
    *,
    udp: bool,
    port: int = DNS_PORT,
    wait: float = UDP_WAIT,
    name: str = OUTSIDE_NAME,
) -> Try:
    """Return the try that asks a server for records of a name; ``wait`` is in seconds."""
    message = query(name, record)
    if not udp:
        message = struct.pack("!H", len(message)) + message
    return Try(server, port, message, udp=udp, wait=wait)
