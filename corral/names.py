"""What a running sandbox may reach: refreshed, allowed for a while, denied, and asked about.

Declaring stays corral.yaml's; these commands talk to the enforcer about the sessions that run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import TYPE_CHECKING, Any

from corral import apart, approval
from corral.plain import cleaned
from corral.policyedit import save, unsave
from policy.container import HOST_ALIAS
from policy.declaration import OPEN, Declaration, Name
from policy.errors import EnforcerError, PolicyError
from policy.hosts import HostError, is_address, parse_host
from policy.loader import LoadedPolicy, load

if TYPE_CHECKING:
    from corral.context import Invocation

DEFAULT_PORT = 443
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"([0-9]{1,6})([smhd])")
LONGEST = 30 * 86400
DNS_PORTS = frozenset({53, 853})


@dataclass(frozen=True)
class Target:
    """A canonical name or an address, and a TCP port; None: not given."""

    host: str
    port: int | None


def parse_target(text: str, *, force: bool = False, address: bool = False) -> Target:
    """Read HOST or HOST:PORT.

    Args:
        text: the argument.
        force: accept public DNS-over-HTTPS endpoints.
        address: accept IPv4 addresses and corral-host too.

    Raises:
        PolicyError: anything that no policy could name.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not re.fullmatch(r"[0-9]{1,5}", port):
        host, port = text, ""
    number = int(port) if port else None
    if number is not None and not 0 < number < 65536:
        raise PolicyError(f"{port} is not a port", "write HOST:PORT")
    if address and (host == HOST_ALIAS or (is_address(host) and ":" not in host)):
        return Target(host, number)
    try:
        return Target(parse_host(host, force=force), number)
    except HostError as error:
        raise PolicyError(f"{cleaned(text)}: {error.what}", error.fix) from error


def parse_duration(text: str) -> float:
    """Return the seconds that ``90s``, ``30m``, ``1h`` or ``2d`` are.

    Raises:
        PolicyError: anything else, nothing at all, or over 30 days.
    """
    match = _DURATION.fullmatch(text)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= LONGEST:
        raise PolicyError(f"{cleaned(text)} is not a length of time", "write 30m, 1h or 2d; at most 30d")
    return float(seconds)


def duration(seconds: float) -> str:
    """Return a length of time as people say it."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size or seconds == size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


# -- allow and deny


def allow(
    invocation: Invocation, target: Target, sandbox: str, *, lasting: float | None, keep: bool, force: bool
) -> dict[str, Any]:
    """Let the running sessions of a sandbox reach a name; with ``keep`` write it into corral.yaml.

    Returns:
        The enforcer's answer and ``saved``: the file, or None.

    Raises:
        PolicyError: a port of DNS, or ``keep`` for a time.
        EnforcerError: nothing runs and nothing is to be kept, or the name has no usable address.
    """
    ports = (target.port or DEFAULT_PORT,)
    if DNS_PORTS.intersection(ports):
        raise PolicyError("a port of DNS: a sandbox has no DNS", "name another port")
    if keep and lasting is not None:
        raise PolicyError("what is saved does not end", "leave out --for or --save")
    answer: dict[str, Any] = {"host": target.host, "ports": list(ports), "seconds": lasting, "sessions": []}
    if not keep or _runs(invocation, sandbox):
        answer = invocation.enforcer.allow(sandbox, target.host, ports, lasting, force=force)
    saved = None
    if keep:
        made = save(
            invocation.loaded,
            target.host,
            ports,
            _loader(invocation),
            force=force,
            saved=lambda before, after: approval.follow(before, after, invocation.paths),
        )
        saved = str(made.path)
    return {**answer, "saved": saved}


def deny(invocation: Invocation, host: str, sandbox: str, *, keep: bool) -> dict[str, Any]:
    """Take a name from the running sessions of a sandbox; with ``keep`` take it out of corral.yaml too.

    Returns:
        The enforcer's answer and ``saved``: the file, or None.

    Raises:
        PolicyError: it is no entry of the file, or the file is not one that is edited.
        EnforcerError: nothing that runs has it and nothing is to be kept.
    """
    answer: dict[str, Any] = {"host": host, "sessions": []}
    failure = None
    # What runs is closed first, whatever becomes of the file.
    if not keep or _has(invocation, sandbox, host):
        try:
            answer = invocation.enforcer.deny(sandbox, host)
        except EnforcerError as error:
            failure = error
    if failure is not None and not keep:
        raise failure
    saved = None
    if keep:
        made = unsave(
            invocation.loaded,
            host,
            _loader(invocation),
            saved=lambda before, after: approval.follow(before, after, invocation.paths),
        )
        saved = str(made.path) if made is not invocation.loaded else None
    if failure is not None:
        raise failure
    return {**answer, "saved": saved}


def _has(invocation: Invocation, sandbox: str, host: str) -> bool:
    """Tell whether a running session may reach a name, as far as that can be told."""
    try:
        sessions = sessions_of(invocation.enforcer.status(), sandbox)
    except EnforcerError:
        return False
    rows = [row for session in sessions for row in session.get("names") or ()]
    return any(row["name"] == host and row.get("state") != "REVOKED" for row in rows)


def _loader(invocation: Invocation) -> Callable[[Any], LoadedPolicy]:
    user = invocation.user
    return lambda path: load(path, home=user.home, environ=dict(user.environ), uid=user.uid)


def _runs(invocation: Invocation, sandbox: str) -> bool:
    try:
        return bool(sessions_of(invocation.enforcer.status(), sandbox))
    except EnforcerError:
        return False


def sessions_of(status: Mapping[str, Any], sandbox: str) -> list[Mapping[str, Any]]:
    """Return the sessions of a sandbox that get something, from the enforcer's status."""
    return [
        session
        for row in status.get("sandboxes") or ()
        if row.get("sandbox") == sandbox
        for session in row.get("sessions") or ()
        if session.get("state") != "refused"
    ]


def told_allow(answer: Mapping[str, Any]) -> str:
    """Return what ``allow`` says."""
    answer = cleaned(answer)
    ports = ", ".join(map(str, answer["ports"]))
    seconds = answer.get("seconds")
    until = "until it ends" if seconds is None else f"for {duration(float(seconds))}"
    lines = [
        f"{answer['host']} port {ports} is allowed in {row['service']}-{row['session']} {until}: "
        + ", ".join(row.get("addresses") or ())
        for row in answer.get("sessions") or ()
    ]
    if answer.get("saved"):
        lines.append(f"saved in {answer['saved']}; new sessions have it")
    return "\n".join(lines)


def told_deny(answer: Mapping[str, Any]) -> str:
    """Return what ``deny`` says."""
    answer = cleaned(answer)
    lines = [
        f"{answer['host']} is denied in {row['service']}-{row['session']} until it ends; "
        "open connections to it are cut"
        for row in answer.get("sessions") or ()
    ]
    if answer.get("saved"):
        lines.append(f"{answer['host']} is taken out of {answer['saved']}")
    return "\n".join(lines or [f"{answer['host']} is not allowed by corral.yaml, and nothing runs"])


# -- refresh


def told_refresh(answer: Mapping[str, Any]) -> str:
    """Return what ``refresh`` says: each name, and what became of its addresses."""
    lines = []
    for row in cleaned(answer).get("names") or ():
        before, after = set(row.get("before") or ()), set(row.get("addresses") or ())
        parts = [f"{row['name']}: {row['state']}"]
        if row["state"] == "OK":
            parts.append("same addresses" if before == after else _moved(before, after))
        if row.get("error"):
            parts.append(str(row["error"]))
        lines.append(", ".join(parts))
    return "\n".join(lines) or "no names"


def _moved(before: Iterable[str], after: Iterable[str]) -> str:
    come, gone = sorted(set(after) - set(before)), sorted(set(before) - set(after))
    return " ".join([*(f"+{address}" for address in come), *(f"-{address}" for address in gone)])


def failed(answer: Mapping[str, Any]) -> bool:
    """Say whether a name that was refreshed, and is not optional, has no fresh answer."""
    return any(row.get("state") != "OK" and not row.get("optional") for row in answer.get("names") or ())


# -- check


def check(invocation: Invocation, target: Target, sandbox: str | None) -> dict[str, Any]:
    """Say what would happen to a TCP connection to ``target``: by the policy, and in each running session.

    Returns:
        {"host", "port", "policy": {"allowed", "reason"} or None, "sessions": [...], "resolution": {...} or
        None, "allowed"}. Asked by ``sandbox`` the policy is not looked at.
    """
    port = target.port or DEFAULT_PORT
    policy = None
    ident = sandbox
    if ident is None:
        loaded = invocation.loaded
        ident = loaded.sandbox.id
        allowed, reason = by_policy(loaded, target.host, port)
        policy = {"allowed": allowed, "reason": reason}
        if apart.verdict(loaded) is not None:
            return {
                "host": target.host,
                "port": port,
                "allowed": allowed,
                "policy": policy,
                "sessions": [],
                "resolution": None,
                "problem": None,
            }
    wanted = policy is not None and policy["allowed"] is True and target.host != HOST_ALIAS
    found: Mapping[str, Any] = {}
    problem = None
    try:
        found = invocation.enforcer.check(ident, target.host, port, resolve=False)
        if wanted and not found["sessions"]:
            found = invocation.enforcer.check(ident, target.host, port, resolve=True)
    except EnforcerError as error:
        if policy is None:
            raise
        problem = error.message
    sessions, resolution = list(found.get("sessions") or ()), found.get("resolution")
    if sessions:
        verdict = all(row["allowed"] for row in sessions)
    else:
        good = resolution is None or bool(resolution["addresses"])
        verdict = bool(policy and policy["allowed"] and good and problem is None)
    return {
        "host": target.host,
        "port": port,
        "allowed": verdict,
        "policy": policy,
        "sessions": sessions,
        "resolution": resolution,
        "problem": problem,
    }


def by_policy(loaded: LoadedPolicy, host: str, port: int) -> tuple[bool, str]:
    """Say whether the policy allows ``host`` on ``port``, and which part of it, or what is missing."""
    whole = apart.verdict(loaded)
    if whole is not None:
        return whole
    if host == HOST_ALIAS:
        names = [service.name for service in loaded.declaration.host_services if service.port == port]
        return bool(names), f"host service {names[0]}" if names else f"no host service has port {port}"
    return _by_open(host, port) if loaded.declaration.mode == OPEN else _by_list(loaded, host, port)


def _by_list(loaded: LoadedPolicy, host: str, port: int) -> tuple[bool, str]:
    if is_address(host):
        return False, "an address is reachable only while an allowed name has it, on that name's ports"
    name = next((name for name in loaded.declaration.names if name.host == host), None)
    if name is None:
        return False, f"not in the policy; to allow it: corral allow {host}"
    ports = ", ".join(map(str, name.ports))
    if port not in name.ports:
        return False, f"allowed on port {ports}, not on {port}; to allow it: corral allow {host}:{port}"
    return True, f"allowed on port {ports} by {origin(loaded, host)}"


def _by_open(host: str, port: int) -> tuple[bool, str]:
    if port in DNS_PORTS:
        return False, "a port of DNS: names are asked of the container's own resolver"
    if is_address(host) and not IPv4Address(host).is_global:
        return False, "egress.mode is open, and this is no public address"
    return True, "egress.mode is open: any public address"


def origin(loaded: LoadedPolicy, host: str) -> str:
    """Return what of the policy a name comes from."""
    if any(entry.host == host for entry in loaded.policy.egress.allow):
        return "egress.allow"
    client = loaded.from_host.client(host)
    if client is not None and host not in loaded.profile.default_egress:
        return f"egress.from_host: this host's {client} configuration"
    return f"the {loaded.profile.name} profile"


def told_check(answer: Mapping[str, Any]) -> str:
    """Return what ``policy check`` says."""
    answer = cleaned(answer)
    where = f"{answer['host']}:{answer['port']}"
    lines = [f"{where}: {'allowed' if answer['allowed'] else 'denied'}"]
    if answer.get("policy"):
        lines.append(f"  policy: {answer['policy']['reason']}")
    for row in answer.get("sessions") or ():
        verdict = "allowed" if row["allowed"] else "denied"
        line = f"  {row['service']}-{row['session']}: {verdict}: {row['reason']}"
        if row.get("addresses"):
            line += f" ({', '.join(row['addresses'])})"
        if row.get("seconds") is not None:
            line += f", for {duration(float(row['seconds']))} more"
        lines.append(line)
    found = answer.get("resolution")
    if found:
        lines.append(
            "  resolves to " + (", ".join(found["addresses"]) or f"nothing usable: {found['error']}")
        )
        lines += [f"  refused: {address} is {why}" for address, why in found["refused"].items()]
    if answer.get("problem"):
        lines.append(f"  what runs cannot be asked: {answer['problem']}")
    return "\n".join(lines)


# -- what changed since a session started


def changed_since(declaration: Declaration, session: Mapping[str, Any]) -> Declaration:
    """Return a declaration with what the user allowed and denied the session, from the enforcer's status."""
    withdrawn = set(session.get("withdrawn") or ())
    names = {name.host: name for name in declaration.names if name.host not in withdrawn}
    for row in session.get("names") or ():
        ports = sorted(map(int, row.get("granted") or ()))
        known = names.get(row["name"])
        if ports and known is None:
            names[row["name"]] = Name(host=row["name"], ports=tuple(ports), optional=True, liveness=False)
        elif ports and known is not None:
            names[known.host] = known.model_copy(update={"ports": tuple(sorted({*known.ports, *ports}))})
    return declaration.model_copy(update={"names": tuple(names.values())})
