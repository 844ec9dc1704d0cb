"""What a running sandbox may reach: refreshed, allowed for a while, denied, and asked about.

Declaring stays corral.yaml's; these commands talk to the enforcer about the sessions that run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from ipaddress import IPv4Address
from typing import TYPE_CHECKING, Any

from corral import apart, approval
from corral.plain import cleaned
from corral.policyedit import save, unsave
from corral.targets import DEFAULT_PORT, DNS_PORTS, Target, duration
from policy import asking
from policy.container import HOST_ALIAS
from policy.declaration import ANSWER, OPEN, Declaration, Name, Pattern
from policy.errors import ArgumentError, EnforcerError
from policy.hosts import HostError, is_address
from policy.loader import LoadedPolicy, load
from policy.patterns import declared

if TYPE_CHECKING:
    from corral.context import Invocation

# -- allow and deny


def allow(
    invocation: Invocation,
    target: Target,
    sandbox: str,
    *,
    ports: tuple[int, ...] = (DEFAULT_PORT,),
    lasting: float | None,
    keep: bool,
    force: bool,
) -> dict[str, Any]:
    """Let the running sessions of a sandbox reach a name; with ``keep`` write it into corral.yaml.

    Args:
        target: a name, or what stands for many where names are asked for.
        sandbox: an id.
        ports: from ``targets.parse_ports``.
        lasting: seconds; None: until each session ends.
        keep: write it.
        force: accept a public DNS-over-HTTPS endpoint.

    Returns:
        The enforcer's answer and ``saved``: the file, or None.

    Raises:
        ArgumentError: ``keep`` for a time; many names where nothing asks for names.
        EnforcerError: nothing runs and nothing is to be kept, or the name has no usable address.
    """
    if keep and lasting is not None:
        raise ArgumentError("what is saved does not end", "leave out --for or --save")
    answer: dict[str, Any] = {"host": target.host, "ports": list(ports), "seconds": lasting, "sessions": []}
    sessions = _sessions(invocation, sandbox) if keep else []
    # A session that began without a proxy gets none, and the next one has it.
    if not keep or (sessions and not (target.many and not any(map(_asks, sessions)))):
        answer = invocation.enforcer.allow(sandbox, target.host, ports, lasting, force=force)
    elif sessions:
        answer["waiting"] = True
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


def refuse_many(loaded: LoadedPolicy, target: Target) -> None:
    """Refuse what stands for many names where each name is pinned.

    Raises:
        ArgumentError: nobody asks for names in the sandbox of this policy.
    """
    declaration = loaded.declaration
    if target.many and not (declaration.proxied or declaration.dns == ANSWER):
        raise ArgumentError(
            f"{target.host} stands for many names, and this sandbox has no proxy that is asked for them",
            f"corral allow '{target.host}' --save, and a new session has one; or allow the names one by one",
        )


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
    """Tell whether a running session may reach a name or ask for it, as far as that can be told."""
    for session in _sessions(invocation, sandbox):
        rows = session.get("names") or ()
        if any(row["name"] == host and row.get("state") != "REVOKED" for row in rows):
            return True
        patterns = session.get("asked") or ()
        if any(row["host"] == host or _means(row["host"], host) for row in patterns):
            return True
    return False


def _means(entry: str, host: str) -> bool:
    try:
        return declared(entry).matches(host)
    except HostError:
        return False


def _asks(session: Mapping[str, Any]) -> bool:
    """Tell whether a session asks for names: of a proxy, or of the answerer."""
    return bool(session.get("asks"))


def _loader(invocation: Invocation) -> Callable[[Any], LoadedPolicy]:
    user = invocation.user
    return lambda path: load(path, home=user.home, environ=dict(user.environ), uid=user.uid)


def _sessions(invocation: Invocation, sandbox: str) -> list[Mapping[str, Any]]:
    """Return the sessions of a sandbox that get something; none when that cannot be told."""
    try:
        return sessions_of(invocation.enforcer.status(), sandbox)
    except EnforcerError:
        return []


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
        + (", ".join(row.get("addresses") or ()) or "it is resolved when it is asked for")
        for row in answer.get("sessions") or ()
    ]
    if answer.get("saved"):
        only = "; those that run have no proxy, and do not" if answer.get("waiting") else ""
        lines.append(f"saved in {answer['saved']}; new sessions have it{only}")
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
    if name is not None and port in name.ports:
        return True, f"allowed on port {_ports(name.ports)} by {origin(loaded, host)}"
    patterns = loaded.declaration.patterns
    entries = asking.matching(patterns, host)
    fit = [entry for entry in entries if port in entry.ports]
    if fit:
        by = origin(loaded, host) if fit[0].exact else f"{fit[0].host} of egress.allow"
        return True, f"allowed on port {_ports(fit[0].ports)} by {by}, {_how(loaded.declaration)}"
    known = {*(name.ports if name is not None else ()), *(asking.ports(patterns, host))}
    if not known:
        return False, f"not in the policy; to allow it: corral allow {host}"
    return (
        False,
        f"allowed on port {_ports(sorted(known))}, not on {port}; to allow it: corral allow {host}:{port}",
    )


def _ports(ports: Iterable[int]) -> str:
    return ", ".join(map(str, ports))


def _how(declaration: Declaration) -> str:
    """Say how a name is reached that is not pinned."""
    if declaration.proxied:
        return "through the sandbox's proxy"
    return "opened when it is asked for by DNS"


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
    patterns = [one for one in declaration.patterns if one.host not in withdrawn]
    listed = {(one.host, port) for one in patterns for port in one.ports}
    for row in session.get("asked") or ():
        more = tuple(port for port in row["ports"] if (row["host"], port) not in listed)
        patterns += [Pattern(host=row["host"], ports=more)] if more else []
    changes = {"names": tuple(names.values()), "patterns": tuple(patterns)}
    return declaration.model_copy(update=changes)
