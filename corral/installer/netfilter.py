"""Taking everything of ours out of netfilter, whichever version put it there. Stdlib only, runs as root.

Ours is: a rule with corral's hash in its comment, a chain named CORRAL-*, a set named corral-*, a table named
corral that holds such rules only. Nothing else is touched, and no rule text is interpreted.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping

from corral.installer import legacy
from corral.installer.common import Run, StopError, fail

TAG = re.compile(r"\bcorral:[0-9a-f]{12}\b")
CHAIN, SET, TABLE = "CORRAL-", "corral-", "corral"
FAMILIES = {"ip": "iptables-nft", "ip6": "ip6tables-nft"}
TABLES = ("filter", "nat", "mangle", "raw", "security")
BUILTIN = frozenset({"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"})
# Somebody else may change the rules between our look and our write.
TRIES = 5


def parse(listing: str) -> dict[str, list[str]]:
    """Split the output of ``iptables -S`` into chains; rules stay as they are printed."""
    chains: dict[str, list[str]] = {}
    for line in listing.splitlines():
        word, _, rest = line.partition(" ")
        name, _, rule = rest.partition(" ")
        if word in ("-P", "-N", "-A"):
            chains.setdefault(name, [])
        if word == "-A":
            chains[name].append(rule)
    return chains


def script(table: str, chains: Mapping[str, list[str]]) -> str | None:
    """Return one transaction that takes ours out of a table, None when nothing is."""
    own = [name for name in chains if name.startswith(CHAIN)]
    lines = [
        f"-D {chain} {rule}"
        for chain, rules in chains.items()
        if chain not in own
        for rule in rules
        if TAG.search(rule)
    ]
    lines += [f"-F {name}" for name in own] + [f"-X {name}" for name in own]
    return "\n".join([f"*{table}", *lines, "COMMIT", ""]) if lines else None


def foreign_jumps(chains: Mapping[str, list[str]]) -> list[str]:
    """Return rules of others that lead into our chains: as long as they do, those cannot be deleted."""
    return [
        f"{chain} {rule}"
        for chain, rules in chains.items()
        if not chain.startswith(CHAIN)
        for rule in rules
        if re.search(rf"-[jg] {CHAIN}", rule) and not TAG.search(rule)
    ]


def remove(
    run: Run, before: Iterable[str] | None = None, sleep: Callable[[float], None] = time.sleep
) -> list[str]:
    """Take everything out: jumps and chains, then sets, the dropping table last. Return what was removed.

    Args:
        run: runs a program.
        before: ``base_chains`` as it was before the first installation, None when nobody knows.
        sleep: waits so many seconds.

    Raises:
        StopError: a tool failed, or a foreign rule leads into our chains. What remains denies.
    """
    there = _tables(run)
    removed = []
    for family, tool in FAMILIES.items():
        for table in TABLES:
            if (family, table) in there and _clean(run, tool, table, sleep):
                removed.append(f"rules and chains in {family} {table}")
    for family, (tool, _) in legacy.FAMILIES.items():
        for table in legacy.tables(family):
            if table in TABLES and _clean(run, tool, table, sleep):
                removed.append(f"rules and chains in the legacy {family} {table}")
    removed += [f"set {name}" for name in _destroy_sets()]
    for family, table in sorted(there):
        if table == TABLE and _only_ours(run, family):
            run(["nft", "delete", "table", family, TABLE], None)
            removed.append(f"table {family} {TABLE}")
    if before is not None:
        _drop_base_chains(run, before)
    return removed


def _tables(run: Run) -> set[tuple[str, str]]:
    rows = json.loads(run(["nft", "-j", "list", "tables"], None))["nftables"]
    return {(row["table"]["family"], row["table"]["name"]) for row in rows if "table" in row}


def _clean(run: Run, tool: str, table: str, sleep: Callable[[float], None]) -> bool:
    tries = 0
    while True:
        chains = parse(run([tool, "-t", table, "-S"], None))
        foreign = foreign_jumps(chains)
        if foreign:
            fail(
                f"a rule that is not corral's leads into its chains: {foreign[0]}",
                f"{tool} -t {table} -D {foreign[0]}; then: corral uninstall",
            )
        text = script(table, chains)
        if text is None:
            return tries > 0
        if tries == TRIES:
            fail(f"rules of corral come back into the table {table}", "systemctl status corral-netfilter")
        tries += 1
        try:
            run([f"{tool}-restore", "--noflush", "-w"], text)
        except StopError:
            if tries == TRIES:
                raise
            sleep(0.2)


def _only_ours(run: Run, family: str) -> bool:
    rows = json.loads(run(["nft", "-j", "list", "table", family, TABLE], None))["nftables"]
    comments = [str(row["rule"].get("comment", "")) for row in rows if "rule" in row]
    return all(TAG.fullmatch(comment) for comment in comments)


def base_chains(run: Run) -> list[str]:
    """Return the base chains of iptables that exist, as ``family table chain``.

    iptables makes them when they are first named. Those that installing brought, and nobody else filled, go
    again with it.
    """
    rows = json.loads(run(["nft", "-j", "list", "chains"], None))["nftables"]
    chains = [row["chain"] for row in rows if "chain" in row]
    return sorted(
        f"{chain['family']} {chain['table']} {chain['name']}"
        for chain in chains
        if chain["family"] in FAMILIES and chain["table"] in TABLES and chain["name"] in BUILTIN
    )


def _drop_base_chains(run: Run, before: Iterable[str]) -> None:
    for text in set(base_chains(run)) - set(before):
        family, table, chain = text.split()
        listing = parse(run([FAMILIES[family], "-t", table, "-S"], None))
        if not listing.get(chain):
            # Of a chain that has got a rule meanwhile, the kernel refuses this.
            with contextlib.suppress(StopError):
                run([FAMILIES[family], "-w", "-t", table, "-X", chain], None)


# -- sets: ipset's own tool need not be installed, so the kernel is asked in its own words

NETLINK_NETFILTER, IPSET, VERSION = 12, 6, 6
DESTROY, LIST = 3, 7
REQUEST, ACK, DUMP = 0x1, 0x4, 0x300
ATTR_PROTOCOL, ATTR_NAME, ATTR_FLAGS = 1, 2, 6
NAMES_ONLY, NETWORK_ORDER = 2, 0x4000
ERROR, DONE = 2, 3


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def _message(command: int, flags: int, attributes: bytes) -> bytes:
    body = (
        struct.pack("=BBH", socket.AF_INET, 0, 0) + _attribute(ATTR_PROTOCOL, bytes([VERSION])) + attributes
    )
    return struct.pack("=IHHII", 16 + len(body), IPSET << 8 | command, REQUEST | flags, 1, 0) + body


def _ask(command: int, flags: int, attributes: bytes) -> list[bytes]:
    """Send a request and return the messages of its answer; OSError with the kernel's reason."""
    answers: list[bytes] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER) as sock:
        sock.settimeout(10)
        sock.bind((0, 0))
        sock.send(_message(command, flags, attributes))
        while True:
            data = sock.recv(1 << 18)
            while len(data) >= 16:
                length, kind = struct.unpack_from("=IH", data)
                payload, data = data[16:length], data[(length + 3) & ~3 :]
                if kind == DONE:
                    return answers
                if kind == ERROR:
                    code = -struct.unpack_from("=i", payload)[0]
                    if code:
                        raise OSError(code, f"ipset: {errno.errorcode.get(code, code)}")
                    return answers
                answers.append(payload)


def set_names(messages: Iterable[bytes]) -> list[str]:
    """Return the names in the answer to a request for them."""
    names = []
    for message in messages:
        rest = message[4:]
        while len(rest) >= 4:
            length, kind = struct.unpack_from("=HH", rest)
            if length < 4:
                break
            if kind & 0x3FFF == ATTR_NAME:
                names.append(rest[4:length].rstrip(b"\0").decode("ascii", "replace"))
            rest = rest[(length + 3) & ~3 :]
    return names


def _destroy_sets() -> list[str]:
    flags = _attribute(ATTR_FLAGS | NETWORK_ORDER, struct.pack(">I", NAMES_ONLY))
    try:
        found = set_names(_ask(LIST, DUMP, flags))
    except OSError:
        # A kernel without ipset has no sets.
        return []
    own = sorted(name for name in found if name.startswith(SET))
    for name in own:
        try:
            _ask(DESTROY, ACK, _attribute(ATTR_NAME, name.encode() + b"\0"))
        except OSError as error:
            fail(
                f"the set {name} cannot be destroyed: {error}",
                "look which rule still names it: nft list ruleset",
            )
    return own
