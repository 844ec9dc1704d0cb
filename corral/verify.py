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

from agent_image.files.entrypoint.gate import parse_hosts
from corral import apart, checks, engine, existing, livecheck, proxychecks
from corral.checks import CHECKER, GATE, Check
from corral.context import Invocation, new_session
from corral.insession import Unfinished, execute
from corral.lifecycle import Created, Prepared, created, prepare, probe_address, resolvers
from corral.livecheck import Sight
from corral.names import changed_since
from corral.outdated import started_differently
from corral.session import SERVICE, Request
from corral.subnets import Plan
from policy import proxying
from policy.connection import HOST
from policy.container import user as as_user
from policy.declaration import (
    LABEL_PURPOSE,
    LABEL_SESSION,
    OPEN,
    Declaration,
    Pattern,
)
from policy.errors import CorralError, EngineError, NotReadyError

PROGRAM = "/usr/local/bin/corral-verify"
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
    status = invocation.enforcer.status() if prepared.plan is not None else {}
    told = _expectations(invocation, prepared, {}, status, "")
    request = Request("verify", (PROGRAM, json.dumps(told)), new_session())
    try:
        with created(invocation, prepared, request) as container:
            return _seen(invocation, prepared, container, told)
    except NotReadyError as refused:
        # What can be said of the kernel all the same is perhaps the reason.
        detail = f"{refused.message}; {refused.hint}" if refused.hint else refused.message
        live = invocation.enforcer.live(invocation.loaded.sandbox.id)
        return [
            Check("session-ready", "fail", detail),
            *livecheck.skeleton_checks(live.get("skeleton") or {}),
        ]


def _seen(
    invocation: Invocation, prepared: Prepared, container: Created, told: Mapping[str, Any]
) -> list[Check]:
    hosts = Path(container.spec.hosts_file)
    loaded = invocation.loaded
    if prepared.plan is None:
        with engine.errors("looking at the container"):
            inspect = invocation.api.inspect_container(container.ident)
        ready, host_side = apart.ready(loaded.connection), apart.host_side(inspect, loaded.connection)
    else:
        # What the kernel holds before the first instruction is what it holds during it.
        address = container.spec.address
        host_side = _host_side(invocation, prepared.plan, container.ident, address, hosts)
        ready = Check("session-ready", "ok")
    try:
        answer = _run_to_end(invocation, container.ident)
    except Unfinished as late:
        inside = [Check(CHECKER, "fail", str(late))]
    else:
        inside = checks.parse_checker(*answer, asked=asked(told))
    if not any(check.name in {GATE, CHECKER} for check in inside):
        if loaded.policy.image is not None:
            # Everything inside is the word of an image that corral did not make.
            detail = existing.warning(loaded.policy.image, prepared.foreign)
            host_side = [*host_side, Check("foreign-image", "skip", detail)]
        told_of = loaded.connection == HOST
        inside.insert(0, Check(GATE, "skip", ready.detail) if told_of else Check(GATE, "ok"))
    return [ready, *inside, *host_side]


def asked(told: Mapping[str, Any]) -> list[str]:
    """Return the names of the checks that a checker of this version makes when it is told that."""
    from agent_image.files.verify.expectations import Expectations
    from agent_image.files.verify.main import checks as made

    return [name for name, _ in made(Expectations(told))]


def _expectations(
    invocation: Invocation,
    prepared: Prepared,
    names: Mapping[str, Sequence[str]],
    status: Mapping[str, Any],
    ident: str,
) -> dict[str, Any]:
    """Return what the checker in a container is told; ``ident`` is empty for one that does not exist yet."""
    sandbox, declaration = invocation.loaded.sandbox.id, invocation.loaded.declaration
    # The proxy is asked for what any of its sessions may be asked for, and is the same for all of them.
    known = of_all(declaration, status, sandbox)
    proxy = None
    if declaration.proxied:
        pins = pinned_rows(invocation.enforcer.live(sandbox).get("pins"))
        address = str(proxy_row(status, sandbox).get("address") or "")
        proxy = proxychecks.told_of_proxy(known, address, pins)
    return checks.expectations(
        invocation.loaded,
        uid=invocation.user.uid,
        gid=invocation.user.gid,
        home=Path(invocation.user.home).resolve(),
        gateway=str(prepared.plan.gateway) if prepared.plan is not None else "",
        probe=probe_address(invocation),
        names=names,
        resolvers=resolvers(invocation),
        peers=peers(status, ident),
        limits=prepared.limits,
        closed=_closed(invocation),
        proxy=proxy,
        answered=proxychecks.told_of_answers(known),
    )


def _closed(invocation: Invocation) -> list[str] | None:
    if invocation.loaded.declaration.mode != OPEN:
        return None
    return [*checks.CLOSED, *checks.private_addresses(invocation.config.permit_ranges)]


def _run_to_end(invocation: Invocation, ident: str) -> tuple[str, str, int]:
    import requests

    api = invocation.api
    with engine.errors("running the checker"):
        api.start(ident)
        try:
            code = int(api.wait(ident, timeout=PATIENCE)["StatusCode"])
        except requests.RequestException as error:
            if not isinstance(error, requests.Timeout) and "timed out" not in str(error).lower():
                raise
            raise Unfinished(f"it did not end within {PATIENCE} s") from error
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
    others = {"verify", proxying.PURPOSE}
    sessions = [entry for entry in entries if (entry.get("Labels") or {}).get(LABEL_PURPOSE) not in others]
    return sorted(sessions, key=engine.container_name)


def _in_session(invocation: Invocation, prepared: Prepared, entry: Mapping[str, Any]) -> list[Check]:
    ident = str(entry["Id"])
    labels = entry.get("Labels") or {}
    session = str(labels.get(LABEL_SESSION, ""))
    with engine.errors(f"looking at the session {session}"):
        inspect = invocation.api.inspect_container(ident)
    plan = prepared.plan
    status = invocation.enforcer.status() if plan is not None else {}
    stale = started_differently(invocation, inspect, prepared.limits, session_row(status, ident))
    if stale:
        # What it was started with is not what the checker would compare with.
        return [Check("session-policy", "fail", stale, session)]
    told = _expectations(invocation, prepared, names_of(status, ident)[0], status, ident)
    who = invocation.user
    user = as_user(who.uid, who.gid, rootless=who.rootless)
    try:
        answer = execute(invocation.api, ident, (PROGRAM, json.dumps(told)), user=user, wait=PATIENCE)
    except Unfinished as late:
        inside = [Check(CHECKER, "fail", str(late), session)]
    else:
        inside = checks.parse_checker(*answer, session=session, asked=asked(told))
    if plan is None:
        host_side = apart.host_side(inspect, invocation.loaded.connection, session)
    else:
        address = _address(inspect, invocation.loaded.sandbox.network)
        hosts = invocation.paths.hosts(session)
        host_side = _host_side(invocation, plan, ident, address, hosts, session)
    return [Check("session-policy", "ok", "", session), *inside, *host_side]


def _address(inspect: Mapping[str, Any], network: str) -> str:
    endpoint = ((inspect.get("NetworkSettings") or {}).get("Networks") or {}).get(network) or {}
    try:
        return str(IPv4Address(endpoint.get("IPAddress") or ""))
    except ValueError as error:
        raise EngineError(
            f"a running session is not on its network {network}", "end it and run it again"
        ) from error


def names_of(status: Mapping[str, Any], ident: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return name -> published addresses and name -> lingering ones of a container, from the status."""
    rows = [row for row in session_row(status, ident).get("names") or () if row.get("state") != "REVOKED"]
    published = {str(row["name"]): list(row.get("addresses") or ()) for row in rows}
    return published, {str(row["name"]): list(row.get("lingering") or ()) for row in rows}


def session_row(status: Mapping[str, Any], ident: str) -> Mapping[str, Any]:
    """Return a container's part of the status; empty when it has none."""
    return next((row for row in _sessions(status) if row.get("container") == ident), {})


def of_all(declaration: Declaration, status: Mapping[str, Any], sandbox: str) -> Declaration:
    """Return a declaration that may ask for what any running session of the sandbox may, by hand included."""
    every = [changed_since(declaration, row).patterns for row in _rows_of(status, sandbox)]
    patterns = dict.fromkeys((*declaration.patterns, *(one for found in every for one in found)))
    return declaration.model_copy(update={"patterns": tuple(patterns)})


def _rows_of(status: Mapping[str, Any], sandbox: str) -> list[Mapping[str, Any]]:
    of_sandbox = [row for row in status.get("sandboxes") or () if row.get("sandbox") == sandbox]
    return [session for row in of_sandbox for session in row.get("sessions") or ()]


def proxy_row(status: Mapping[str, Any], sandbox: str) -> Mapping[str, Any]:
    """Return the part of the status of a sandbox's proxy; empty when it has none that runs."""
    return next(
        (
            row
            for row in _rows_of(status, sandbox)
            if row.get("service") == proxying.SERVICE and row.get("state") == "running"
        ),
        {},
    )


def peers(status: Mapping[str, Any], ident: str) -> dict[str, str]:
    """Return name -> address of every running sandbox container of the user but one, from the status."""
    return {
        str(session.get("name")): str(session.get("address"))
        for session in _sessions(status)
        if session.get("container") != ident and session.get("state") == "running" and session.get("address")
    }


def _sessions(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [session for row in status.get("sandboxes") or () for session in row.get("sessions") or ()]


def _host_side(
    invocation: Invocation, plan: Plan, ident: str, address: str, hosts: Path, session: str = ""
) -> list[Check]:
    loaded = invocation.loaded
    live = invocation.enforcer.live(loaded.sandbox.id)
    status = invocation.enforcer.status()
    published, lingering = names_of(status, ident)
    try:
        text = hosts.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CorralError(f"cannot read the hosts file {hosts}: {error.strerror}") from error
    row = session_row(status, ident)
    declaration = changed_since(loaded.declaration, row)
    sight = Sight(
        declaration=declaration,
        address=address,
        gateway=str(plan.gateway),
        hostname=SERVICE,
        hosts=parse_hosts(text),
        published=published,
        lingering=lingering,
        pins=rows(live.get("pins"), address),
        host=rows(live.get("host"), address),
        open=address in (live.get("open") or ()),
        opened=proxychecks.opened(row),
    )
    differences = "; ".join(livecheck.live_rules(sight))
    found = [Check("live-rules", "fail" if differences else "ok", differences, session)]
    if session:
        return found
    # The proxy is one for all sessions, and so are the constant rules.
    if declaration.proxied:
        known = of_all(loaded.declaration, status, loaded.sandbox.id).patterns
        found.append(_proxy_elements(known, proxy_row(status, loaded.sandbox.id), live))
    return [*found, *livecheck.skeleton_checks(live.get("skeleton") or {})]


def _proxy_elements(patterns: Sequence[Pattern], row: Mapping[str, Any], live: Mapping[str, Any]) -> Check:
    address = str(row.get("address") or "")
    problems = [f"the proxy: {text}" for text in row.get("problems") or ()]
    if not address:
        problems.append("the enforcer knows of no proxy of this sandbox")
    held, pins, host = (
        proxychecks.opened(row),
        rows(live.get("pins"), address),
        rows(live.get("host"), address),
    )
    problems += proxychecks.elements(patterns, address, held, pins, host)
    return Check("proxy-elements", "fail" if problems else "ok", "; ".join(problems))


def rows(listed: Any, address: str) -> frozenset[livecheck.Row]:
    """Return the elements of one source from the enforcer's answer."""
    return frozenset(row for row in pinned_rows(listed) if row[0] == address)


def pinned_rows(listed: Any) -> frozenset[livecheck.Row]:
    """Return the elements of the enforcer's answer."""
    return frozenset((str(src), str(proto), int(port), str(dst)) for src, proto, port, dst in listed or ())
