"""``corral verify``: prove the policy from inside a container, and from the kernel's side.

A throw-away container gets exactly what ``run`` gives a session, only its command differs; then the same
checker runs in every session that is running. What the kernel holds is read while each of them exists.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from corral import checks, engine
from corral.checks import Check, Sight
from corral.context import Invocation, new_session
from corral.lifecycle import Prepared, created, prepare, resolvers
from corral.session import SERVICE, Request, mounts
from policy.container import HOSTS_TARGET
from policy.declaration import LABEL_EGRESS, LABEL_PURPOSE, LABEL_SESSION
from policy.errors import CorralError, EngineError

CHECKER = "/usr/local/bin/corral-verify"
# Seconds the checker may take; it limits itself to less.
PATIENCE = 90


def verify(invocation: Invocation) -> list[Check]:
    """Return the result of every check.

    Raises:
        CorralError: a check could not even be made.
    """
    prepared = prepare(invocation)
    with invocation.console.step("checking a fresh container"):
        found = _twice(partial(_throw_away, invocation, prepared))
    for entry in _running(invocation):
        session = str((entry.get("Labels") or {}).get(LABEL_SESSION, ""))
        with invocation.console.step(f"checking session {session}"):
            found += _twice(partial(_in_session, invocation, prepared, entry))
    return found


def _twice(measure: Callable[[], list[Check]]) -> list[Check]:
    """Measure again when a name may just have been resolved anew between two looks at it."""
    found = measure()
    return measure() if checks.only_pins_failed(found) else found


def _throw_away(invocation: Invocation, prepared: Prepared) -> list[Check]:
    told = _expectations(invocation, prepared, {})
    request = Request("verify", (CHECKER, json.dumps(told)), new_session())
    with created(invocation, prepared, request) as container:
        hosts = Path(container.spec.hosts_file)
        # What the kernel holds before the first instruction is what it holds during it.
        host_side = _host_side(invocation, prepared, container.ident, container.spec.address, hosts)
        inside = checks.parse_checker(*_run_to_end(invocation, container.ident))
    return [*inside, *host_side]


def _expectations(
    invocation: Invocation, prepared: Prepared, names: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    return checks.expectations(
        invocation.loaded,
        uid=invocation.user.uid,
        gid=invocation.user.gid,
        home=Path(invocation.user.home).resolve(),
        gateway=str(prepared.plan.gateway),
        probe=checks.probe_address(invocation.config.permit_ranges),
        names=names,
        resolvers=resolvers(invocation),
    )


def _run_to_end(invocation: Invocation, ident: str) -> tuple[str, str, int]:
    api = invocation.api
    with engine.errors("running the checker"):
        api.start(ident)
        code = int(api.wait(ident, timeout=PATIENCE)["StatusCode"])
        stdout = api.logs(ident, stdout=True, stderr=False)
        stderr = api.logs(ident, stdout=False, stderr=True)
    return _text(stdout), _text(stderr), code


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode("utf-8", "replace")


def _running(invocation: Invocation) -> list[dict[str, Any]]:
    """Return the sandbox's running sessions, in the order of their names."""
    entries = engine.sandbox_containers(
        invocation.api, invocation.loaded.sandbox.id, invocation.user.uid, running=True
    )
    sessions = [entry for entry in entries if (entry.get("Labels") or {}).get(LABEL_PURPOSE) != "verify"]
    return sorted(sessions, key=engine.container_name)


def _in_session(invocation: Invocation, prepared: Prepared, entry: Mapping[str, Any]) -> list[Check]:
    ident = str(entry["Id"])
    labels = entry.get("Labels") or {}
    session = str(labels.get(LABEL_SESSION, ""))
    with engine.errors(f"looking at the session {session}"):
        inspect = invocation.api.inspect_container(ident)
    stale = started_differently(invocation, inspect)
    if stale:
        # What it was started with is not what the checker would compare with.
        return [Check("session-policy", "fail", stale, session)]
    published, _ = names_of(invocation.enforcer.status(), ident)
    told = _expectations(invocation, prepared, published)
    inside = checks.parse_checker(*_execute(invocation, ident, (CHECKER, json.dumps(told))), session=session)
    address = _address(inspect, invocation.loaded.sandbox.network)
    hosts = invocation.paths.hosts(session)
    host_side = _host_side(invocation, prepared, ident, address, hosts, session)
    return [Check("session-policy", "ok", "", session), *inside, *host_side]


def started_differently(invocation: Invocation, inspect: Mapping[str, Any]) -> str:
    """Return how a running container differs from what ``run`` would start now, or nothing."""
    loaded, config = invocation.loaded, inspect.get("Config") or {}
    labels = config.get("Labels") or {}
    session = str(labels.get(LABEL_SESSION, ""))
    if labels.get(LABEL_EGRESS) != loaded.declaration.to_label():
        return "it was started under another version of the policy: egress differs; end it and run it again"
    actual = {
        (str(row.get("Source")), str(row.get("Target")), bool(row.get("ReadOnly")))
        for row in (inspect.get("HostConfig") or {}).get("Mounts") or ()
        if row.get("Target") != HOSTS_TARGET
    }
    wanted = {(row.source, row.target, row.read_only) for row in mounts(loaded, invocation.paths, session)}
    if actual != wanted:
        changed = sorted({target for _, target, _ in actual ^ wanted})
        return f"it was started under another version of the policy: mounts differ: {', '.join(changed)}"
    return ""


def _address(inspect: Mapping[str, Any], network: str) -> str:
    endpoint = ((inspect.get("NetworkSettings") or {}).get("Networks") or {}).get(network) or {}
    try:
        return str(IPv4Address(endpoint.get("IPAddress") or ""))
    except ValueError as error:
        raise EngineError(
            f"a running session is not on its network {network}", "end it and run it again"
        ) from error


def _execute(invocation: Invocation, ident: str, argv: Sequence[str]) -> tuple[str, str, int]:
    api, user = invocation.api, invocation.user
    with engine.errors("running the checker in a session"):
        made = api.exec_create(ident, list(argv), user=f"{user.uid}:{user.gid}")
        stdout, stderr = api.exec_start(made["Id"], demux=True)
        code = api.exec_inspect(made["Id"]).get("ExitCode")
    return _text(stdout), _text(stderr), -1 if code is None else int(code)


def names_of(status: Mapping[str, Any], ident: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return name -> published addresses and name -> lingering ones of a container, from the status."""
    for sandbox in status.get("sandboxes") or ():
        for session in sandbox.get("sessions") or ():
            if session.get("container") == ident:
                rows = session.get("names") or ()
                published = {str(row["name"]): list(row.get("addresses") or ()) for row in rows}
                return published, {str(row["name"]): list(row.get("lingering") or ()) for row in rows}
    return {}, {}


def _host_side(
    invocation: Invocation, prepared: Prepared, ident: str, address: str, hosts: Path, session: str = ""
) -> list[Check]:
    loaded = invocation.loaded
    live = invocation.enforcer.live(loaded.sandbox.id)
    published, lingering = names_of(invocation.enforcer.status(), ident)
    try:
        text = hosts.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CorralError(f"cannot read the hosts file {hosts}: {error.strerror}") from error
    sight = Sight(
        declaration=loaded.declaration,
        address=address,
        gateway=str(prepared.plan.gateway),
        hostname=SERVICE,
        hosts=checks.parse_hosts(text),
        published=published,
        lingering=lingering,
        pins=rows(live.get("pins"), address),
        host=rows(live.get("host"), address),
    )
    return checks.host_checks(live.get("skeleton") or {}, checks.live_rules(sight), session)


def rows(listed: Any, address: str) -> frozenset[checks.Row]:
    """Return the elements of one source from the enforcer's answer."""
    return frozenset(
        (str(src), str(proto), int(port), str(dst))
        for src, proto, port, dst in listed or ()
        if src == address
    )
