"""Answers about what was refused: denied."""

from __future__ import annotations

from typing import Annotated, TypedDict


class Refused(TypedDict):
    """What rows about packets and rows about names have in common."""

    id: Annotated[int, "names the row within one life of the service"]
    number: Annotated[int, "grows with each change of any row"]
    first: Annotated[float, "when it was refused first, in seconds since 1970"]
    last: Annotated[float, "when it was refused last, in seconds since 1970"]
    sandbox: Annotated[str, "the id of the sandbox"]
    project: Annotated[str, "the directory of its policy; empty when that is not known"]
    service: Annotated[str | None, "which service of the sandbox: `main`, or `proxy`; null when not known"]
    session: Annotated[
        str | None, "the id of the session; null when it is not known: who asked a proxy is not"
    ]
    container: Annotated[str | None, "the id of its container; null when it is not known"]
    address: Annotated[str | None, "where it was to go; null for a name"]
    port: Annotated[int | None, "the port; null where there is none"]
    icmp_type: Annotated[int | None, "of ICMP alone"]
    count: Annotated[int, "how often"]
    at_least: Annotated[bool, "whether it may have been more often"]
    dns: Annotated[bool, "whether a resolver was asked"]
    check: Annotated[bool, "whether corral's own checks did it; such rows are for `--all` alone"]


class KnownName(TypedDict):
    """A name that resolved to an address."""

    name: Annotated[str, "the name"]
    refused: Annotated[str | None, "why the address may not be used for it; null when it may"]


class RefusedPackets(Refused):
    """Packets to one address and port."""

    protocol: Annotated[str, "`tcp`, `udp`, `icmp`, `sctp`, `udplite`, `ip-NUMBER`, or `dns answer`"]
    names: Annotated[list[KnownName], "names that are known to resolve to the address"]
    note: Annotated[str | None, "what is known of the destination, for people"]
    hint: Annotated[str | None, "what would allow it, for people; null when nothing does"]


class RefusedName(Refused):
    """A name that was asked for, of the proxy or by DNS."""

    protocol: Annotated[str, "`proxy` or `dns name`"]
    name: Annotated[str, "the name"]
    reason: Annotated[str, "why, in one word of the table in [observe.md](observe.md)"]
    note: Annotated[str, "the same, for people"]
    line: Annotated[str | None, "the entry of `egress.allow` that allows it; null when none does"]
    command: Annotated[str | None, "the command that allows it now; null when none does"]


class Account(TypedDict):
    """The sums of one sandbox, without corral's own checks."""

    sandbox: Annotated[str, "its id"]
    project: Annotated[str, "the directory of its policy; empty when that is not known"]
    denied: Annotated[int, "packets that were refused"]
    unlisted: Annotated[int, "of them those that are in no row"]
    dead_resolver: Annotated[
        int | None, "how often the resolver that answers nothing was asked; null when that cannot be seen"
    ]
    asked: Annotated[int, "how often a name was refused"]
    asked_unlisted: Annotated[int, "of them those that are in no row"]


class Denied(TypedDict):
    """What was refused, as far as the service remembers."""

    epoch: Annotated[str, "tells one life of the service from another: numbers mean nothing across lives"]
    next: Annotated[int, "the highest number so far"]
    problem: Annotated[str, "why newer rows are missing; empty when none are"]
    lost: Annotated[int, "records of the kernel that nobody read; their packets are counted"]
    left_out: Annotated[int, "older rows that are not in this answer"]
    sandboxes: Annotated[list[Account], "each sandbox"]
    rows: Annotated[list[RefusedPackets], "packets"]
    asked: Annotated[list[RefusedName], "names"]
