"""Answers that come from the host service: status, refresh, allow, deny, policy check, version, metrics."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

NameStates = Literal["NEW", "OK", "STALE", "REFUSED", "GONE", "REVOKED"]


class PinnedName(TypedDict):
    """One name that a session may reach."""

    name: Annotated[str, "the name"]
    state: Annotated[
        NameStates,
        "`NEW`: no answer yet. `OK`: fresh. `STALE`: the last good answer is kept. `REFUSED`: only forbidden "
        "addresses. `GONE`: no such name any more. `REVOKED`: taken back",
    ]
    addresses: Annotated[list[str], "what it may reach now"]
    lingering: Annotated[list[str], "what it may reach still, and is not in the last answer"]
    packets: Annotated[int, "packets that went there since the addresses were opened"]
    age: Annotated[float | None, "seconds since the last answer; null without one"]
    next_refresh: Annotated[float | None, "seconds until it is asked for again; null when it is not"]
    error: Annotated[str | None, "why there is no fresh answer"]
    optional: Annotated[bool, "whether a session starts without it"]
    granted: Annotated[
        dict[str, float | None],
        "port that was allowed by hand: seconds that are left; null: until the session ends",
    ]


class HostService(TypedDict):
    """A service of this host."""

    name: Annotated[str, "what the policy calls it"]
    port: Annotated[int, "its TCP port, at `corral-host`"]


class Asked(TypedDict):
    """What a session may ask for by name."""

    host: Annotated[str, "a name, a zone (`*.ZONE`) or a regular expression"]
    ports: Annotated[list[int], "TCP ports"]
    seconds: Annotated[float | None, "seconds that are left; null: until the session ends"]


class Opened(TypedDict):
    """An address that is open because a name was asked for."""

    address: Annotated[str, "the address"]
    port: Annotated[int, "the TCP port"]
    names: Annotated[list[str], "the names it is open for"]


class Proxy(TypedDict):
    """What a sandbox's proxy did."""

    socket: Annotated[bool, "whether it can ask the host service"]
    allowed: Annotated[int, "names it asked for and was given, since the service started"]
    refused: Annotated[dict[str, int], "result: how often a name was refused with it"]
    open: Annotated[int, "addresses that are open for it now"]


class RunningSession(TypedDict):
    """A container that gets what it declares; a sandbox's proxy is one, too."""

    container: Annotated[str, "the id of its container"]
    name: Annotated[str, "the name of its container"]
    service: Annotated[str, "which service of the sandbox it is: `main`, or `proxy`"]
    session: Annotated[str, "its id, eight hexadecimal digits"]
    called: Annotated[str, "what its user calls it; its id when it was given no name"]
    attended: Annotated[
        bool | None, "whether somebody's corral looks after it; null when not known, or of no matter"
    ]
    address: Annotated[str, "its address on the sandbox's network"]
    state: Annotated[
        Literal["pending", "ready", "running", "refused"],
        "`pending`: what it declares is not in the kernel yet. `ready`: it is, and it may start. `refused`: "
        "it gets nothing, for its `problems`",
    ]
    problems: Annotated[list[str], "why it is refused"]
    denied: Annotated[int, "packets of it that were refused, without corral's own checks"]
    dead_resolver: Annotated[
        int | None, "how often it asked the resolver that answers nothing; null when that cannot be seen"
    ]
    host_services: Annotated[list[HostService], "services of this host that it may reach"]
    names: Annotated[list[PinnedName], "names that it may reach"]
    asks: Annotated[bool, "whether it asks for names: of a proxy, or by DNS"]
    asked: Annotated[list[Asked], "what it may ask for"]
    opened: Annotated[list[Opened], "what is open for it since it asked"]
    withdrawn: Annotated[list[str], "names that `corral deny` took from it"]
    mode: Annotated[Literal["allowlist", "open", "proxy"], "egress.mode of its policy"]
    proxied: Annotated[bool, "whether it may ask its sandbox's proxy"]
    answered: Annotated[bool, "whether names are answered by DNS"]
    open_packets: Annotated[int, "packets to public addresses, of a session with egress.mode: open"]
    proxy: NotRequired[Annotated[Proxy, "of a sandbox's proxy alone"]]


class Unit(TypedDict):
    """The unit that keeps an agent up."""

    unit: Annotated[str, "its name"]
    enabled: Annotated[bool, "whether it starts with the machine"]
    active: Annotated[str, "systemd's ActiveState; `unknown` when systemd does not answer"]
    sub: Annotated[str, "systemd's SubState; `unknown` when systemd does not answer"]


class RunningSandbox(TypedDict):
    """A sandbox that has a network."""

    sandbox: Annotated[str, "its id"]
    network: Annotated[str, "the name of its network"]
    bridge: Annotated[str, "the network's interface on this host"]
    subnet: Annotated[str, "the network, in CIDR notation"]
    gateway: Annotated[str, "this host's address on it"]
    problems: Annotated[list[str], "how the network differs from corral's own"]
    sessions: Annotated[list[RunningSession], "its containers"]
    unit: Annotated[Unit | None, "the unit that keeps its agent up; null when it has none"]
    lingers: Annotated[bool | None, "whether your units run without a login; null without a unit"]


class Apart(TypedDict):
    """A container without a network of its own."""

    container: Annotated[str, "the id of its container"]
    name: Annotated[str, "the name of its container"]
    sandbox: Annotated[str, "the id of its sandbox"]
    service: Annotated[str, "which service of the sandbox it is"]
    session: Annotated[str, "its id, eight hexadecimal digits"]
    connection: Annotated[Literal["none", "host"], "egress.mode of its policy"]
    enforced: Annotated[bool, "false: it is on this host's own network, and nothing is denied"]
    state: Annotated[Literal["ready", "running"], "whether it runs"]


class Stranger(TypedDict):
    """A container on a sandbox's network that is no session."""

    container: Annotated[str, "its id"]
    name: Annotated[str, "its name"]
    network: Annotated[str, "the network it is on"]
    reasons: Annotated[list[str], "why it gets nothing"]


class Status(TypedDict):
    """All your sandboxes that have a network or a container."""

    version: Annotated[str, "the version of the host service"]
    api: Annotated[int, "the number of the service's own interface, which is another than `schema`"]
    permit_ranges: Annotated[list[str], "networks that the service's settings open for names"]
    problems: Annotated[list[str], "what is wrong with the rules in the kernel"]
    errors: Annotated[list[str], "what the service fails at now"]
    sandboxes: Annotated[list[RunningSandbox], "sandboxes with a network"]
    apart: Annotated[list[Apart], "containers without a network of their own (egress.mode: none, host)"]
    strangers: Annotated[list[Stranger], "containers that do not belong on a sandbox's network"]


class Which(TypedDict):
    """A session, as changes and questions name it."""

    container: Annotated[str, "the id of its container"]
    sandbox: Annotated[str, "the id of its sandbox"]
    service: Annotated[str, "which service of the sandbox it is: `main`"]
    session: Annotated[str, "its id, eight hexadecimal digits"]


class RefreshedName(TypedDict):
    """One name that was resolved again."""

    name: Annotated[str, "the name"]
    state: Annotated[NameStates, "as in `corral status`; with anything but `OK` there is no fresh answer"]
    before: Annotated[list[str], "addresses of the answer before"]
    addresses: Annotated[list[str], "addresses of the last good answer"]
    error: Annotated[str | None, "why there is no fresh answer"]
    optional: Annotated[bool, "whether it is optional in every session; else exit code 1 without an answer"]


class Refreshed(TypedDict):
    """What became of the names."""

    names: Annotated[list[RefreshedName], "each name"]
    sessions: Annotated[list[Which], "the sessions whose names they are"]


class AllowedIn(Which):
    """A session that may reach more now."""

    addresses: Annotated[list[str], "what is open; empty when it is resolved as it is asked for"]


class Allowed(TypedDict):
    """What was allowed, and where."""

    host: Annotated[str, "the name, the zone or the regular expression"]
    ports: Annotated[list[int], "TCP ports"]
    seconds: Annotated[float | None, "how long for; null: until each session ends"]
    sessions: Annotated[list[AllowedIn], "sessions that may reach it now"]
    saved: Annotated[str | None, "the policy's file that has it now, with `--save`"]
    waiting: NotRequired[
        Annotated[bool, "true: sessions run, and none of them has a proxy that could be asked for it"]
    ]


class DeniedName(TypedDict):
    """What was taken back, and where."""

    host: Annotated[str, "the name, the zone or the regular expression"]
    sessions: Annotated[list[Which], "sessions that had it"]
    saved: Annotated[str | None, "the policy's file that does not have it any more, with `--save`"]


class Verdict(TypedDict):
    """What the policy says."""

    allowed: Annotated[bool, "whether it allows the connection"]
    reason: Annotated[str, "which part of it, or what is missing"]


class CheckedSession(Which):
    """A session's own verdict, from the kernel and its hosts file."""

    allowed: Annotated[bool, "whether the connection would be let through"]
    reason: Annotated[str, "why"]
    addresses: Annotated[list[str], "where it would go"]
    seconds: Annotated[float | None, "how much longer, when it was allowed for a time"]


class Resolution(TypedDict):
    """What the name resolves to, when no session runs that could tell."""

    addresses: Annotated[list[str], "what may be used"]
    refused: Annotated[dict[str, str], "address that may not: why"]
    error: Annotated[str | None, "why there is none"]


class Checked(TypedDict):
    """What would happen to a connection."""

    host: Annotated[str, "the name or address"]
    port: Annotated[int, "the TCP port"]
    allowed: Annotated[bool, "the verdict of all together; exit code 1 when false"]
    policy: Annotated[
        Verdict | None, "what the policy says; null with `--sandbox`, which does not look at it"
    ]
    sessions: Annotated[list[CheckedSession], "each running session"]
    resolution: Annotated[Resolution | None, "null when the name was not resolved"]
    problem: Annotated[str | None, "why what runs could not be asked"]


class Writer(TypedDict):
    """The part of the service that writes the kernel's rules, as it was reached."""

    reachable: Annotated[bool, "whether it answers"]
    version: Annotated[str | None, "its version; null when it does not answer or does not tell"]
    schemas: NotRequired[
        Annotated[dict[str, int] | None, "numbers of its own interfaces; absent as it is silent"]
    ]
    skeleton: NotRequired[Annotated[str | None, "the hash of its constant rules; absent as it is silent"]]
    error: NotRequired[Annotated[str, "why it does not answer"]]
    hint: NotRequired[Annotated[str | None, "what helps"]]


class Enforcer(TypedDict):
    """The host service. One of another version may leave fields out."""

    version: Annotated[str, "its version"]
    schemas: Annotated[dict[str, int], "numbers of its own interfaces, which are others than `schema`"]
    api: Annotated[int, "the number of what the command line asks it by"]
    rootless: Annotated[bool, "whether it is for an engine of the user's own"]
    writer: Annotated[Writer, "what writes the kernel's rules"]


class Version(TypedDict):
    """Versions."""

    version: Annotated[str, "the version of this program"]
    enforcer: Annotated[Enforcer | None, "the host service; null when it does not run"]


class Sample(TypedDict):
    """One number."""

    name: Annotated[str, "the family's name, or that with `_sum` (seconds) or `_count`"]
    labels: Annotated[dict[str, str], "label: its value"]
    value: Annotated[float, "the number; counters begin at 0 when the service starts"]


class Family(TypedDict):
    """One counter, gauge or summary."""

    name: Annotated[str, "its name"]
    type: Annotated[str, "`counter`, `gauge` or `summary`"]
    help: Annotated[str, "what it counts"]
    samples: Annotated[list[Sample], "one for each set of labels; empty when nothing was counted yet"]


class Metrics(TypedDict):
    """The service's counters; names and labels are those that Prometheus reads."""

    metrics: Annotated[list[Family], "each family"]
