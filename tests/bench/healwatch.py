"""Runs in the box as root: tampers with a chain again and again and times how long the kernel goes without the rules.

Both moments are told by the kernel itself, as the generation of its ruleset in which rules went and in which they
came: nothing is polled, and no tool's own run time is in it. Prints JSON: {"what": [seconds, ...], "tool": [seconds,
...]}, the latter being one listing of a chain by iptables. Standard library only.
"""

from __future__ import annotations

import json
import shlex
import socket
import struct
import subprocess
import sys
import time

CHAIN = "DOCKER-USER"
NFNLGRP_NFTABLES = 7
NEWRULE, DELRULE, NEWGEN = 6, 8, 15
SUBSYSTEM = 10
RULE_CHAIN = 2
GIVE_UP = 30.0


def messages(data: bytes) -> list[tuple[int, bytes]]:
    """Return (type, payload after the nfgenmsg) of the nf_tables messages in a datagram."""
    found = []
    while len(data) >= 20:
        length, kind = struct.unpack_from("=IH", data)
        if length < 16:
            break
        if kind >> 8 == SUBSYSTEM:
            found.append((kind & 0xFF, data[20:length]))
        data = data[(length + 3) & ~3 :]
    return found


def chain_of(payload: bytes) -> str:
    """Return the chain a rule message is about."""
    while len(payload) >= 4:
        length, kind = struct.unpack_from("=HH", payload)
        if length < 4:
            break
        if kind & 0x3FFF == RULE_CHAIN:
            return payload[4:length].split(b"\0")[0].decode()
        payload = payload[(length + 3) & ~3 :]
    return ""


class Watch:
    """Hears of every change of the ruleset."""

    def __init__(self) -> None:
        self._sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12)
        self._sock.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
        self._sock.bind((0, 1 << (NFNLGRP_NFTABLES - 1)))

    def gap(self, rules: int) -> float:
        """Return the seconds between the generation in which rules of the chain went and the one with ``rules`` new."""
        self._sock.settimeout(GIVE_UP)
        gone, pending, new = 0.0, 0, 0
        while True:
            data = self._sock.recv(1 << 20)
            now = time.monotonic()
            for kind, payload in messages(data):
                if kind == DELRULE and chain_of(payload) == CHAIN:
                    pending += 1
                elif kind == NEWRULE and chain_of(payload) == CHAIN:
                    new += 1
                elif kind == NEWGEN:
                    if gone and new >= rules:
                        return now - gone
                    if pending:
                        gone = gone or now
                    pending, new = 0, 0

    def quiet(self, seconds: float) -> None:
        """Wait until nothing has changed for so long."""
        self._sock.settimeout(seconds)
        try:
            while True:
                self._sock.recv(1 << 20)
        except TimeoutError:
            return


def main() -> None:
    """Time ``argv[1]`` repairs of each kind."""
    count = int(sys.argv[1])
    listing = ["iptables-nft", "-w", "-S", CHAIN]
    rules = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()
    first = shlex.split(next(line for line in rules if "CORRAL-OUT" in line))[1:]
    kinds = {"chain flushed": (["-F", CHAIN], 2), "jump deleted": (["-D", *first], 1)}
    watch = Watch()
    told: dict[str, list[float]] = {what: [] for what in kinds} | {"tool": []}
    for _ in range(count):
        for what, (words, new) in kinds.items():
            watch.quiet(0.3)
            subprocess.run(["iptables-nft", "-w", *words], check=True)
            told[what].append(watch.gap(new))
        began = time.monotonic()
        subprocess.run(listing, capture_output=True, check=True)
        told["tool"].append(time.monotonic() - began)
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main()
