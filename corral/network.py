"""The Docker network of a sandbox: made once, kept, and exactly ``policy.container.network_body``."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral import oserrors, process, rootless, subnets
from corral.engine import errors, missing
from corral.limits import judge_warnings
from corral.subnets import Plan, Taken
from policy import proxying
from policy.container import network_body, network_differences
from policy.declaration import LABEL_SANDBOX, LABEL_SERVICE, LABEL_UID
from policy.errors import CorralError, EngineError
from policy.identity import Sandbox

if TYPE_CHECKING:
    from docker.api.client import APIClient

RESOLV_CONFS = (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf"))
# Another user of this engine may take the subnet between choosing and creating.
ATTEMPTS = 8
# Seconds between two looks whether a lock is free.
PAUSE = 0.1


@contextlib.contextmanager
def locked(path: Path, waits: Callable[[], bool] | None = None) -> Iterator[None]:
    """Hold an exclusive lock on a file of ours; it is made when missing and never removed.

    Args:
        path: the file.
        waits: asked while another has it, whether to go on waiting; None: as long as it takes.

    Raises:
        CorralError: the file cannot be opened, or another kept it.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise CorralError(f"cannot open the lock {path}: {error.strerror}", oserrors.hint(error)) from error
    try:
        if waits is None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        else:
            _take(descriptor, path, waits)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, path: Path, waits: Callable[[], bool]) -> None:
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if not waits():
            raise CorralError(f"another command keeps the lock {path}", f"to see which: fuser -v {path}")
        time.sleep(PAUSE)


def host_ranges(environ: Mapping[str, str]) -> list[Taken]:
    """Return what the host itself uses: its routes and addresses, and the DNS servers it asks.

    An engine of the user's own has routes of its own beside them.

    Raises:
        ProgramError: ``ip`` is missing or failed.
    """
    argv = ("ip", "-j", "-4", "route", "show", "table", "all")
    found = []
    inside = rootless.entering(environ)
    for command in (argv, (*inside, *argv)) if inside else (argv,):
        found += subnets.taken_by_routes(
            process.run(command, environ=environ, hint="sudo apt install iproute2").stdout
        )
    for file in RESOLV_CONFS:
        with contextlib.suppress(OSError):
            found += subnets.taken_by_resolvers(file.read_text(encoding="utf-8", errors="replace"))
    return found


def inspect(api: APIClient, sandbox: Sandbox) -> dict[str, Any] | None:
    """Return the inspect of a sandbox's network, None when there is none."""
    with errors(f"looking for the network {sandbox.network}"):
        try:
            found: dict[str, Any] = api.inspect_network(sandbox.network)
        except Exception as error:
            if missing(error):
                return None
            raise
        return found


def ensure(
    api: APIClient,
    sandbox: Sandbox,
    uid: int,
    *,
    ranges: Sequence[IPv4Network],
    lock: Path,
    environ: Mapping[str, str],
) -> Plan:
    """Make sure that the sandbox has its network and return how its addresses are laid out.

    Args:
        ranges: where a new subnet may come from, the preferred one first.
        lock: a file that all invocations of this user share.
        environ: the user's environment.

    Raises:
        EngineError: the network exists and is not what corral makes, no subnet is free, or Docker refuses.
    """
    found = inspect(api, sandbox)
    if found is None:
        with locked(lock):
            found = inspect(api, sandbox) or _create(api, sandbox, uid, ranges, host_ranges(environ))
    return _verified(found, sandbox, uid)


def _create(
    api: APIClient, sandbox: Sandbox, uid: int, ranges: Sequence[IPv4Network], taken: Sequence[Taken]
) -> dict[str, Any]:
    from docker.errors import APIError

    refused: list[Taken] = []
    for _ in range(ATTEMPTS):
        with errors("listing networks"):
            known = subnets.taken_by_networks(api.networks())
        plan = subnets.choose(ranges, [*known, *taken, *refused])
        with errors(f"creating the network {sandbox.network}"):
            try:
                _post(api, network_body(sandbox, uid, *map(str, (plan.subnet, plan.gateway, plan.strangers))))
            except APIError as error:
                if "overlaps" not in str(error.explanation):
                    raise
                refused.append(Taken(plan.subnet, "refused by Docker"))
                continue
        found = inspect(api, sandbox)
        if found is not None:
            return found
    raise EngineError(
        f"Docker refused {len(refused)} subnets for the network {sandbox.network}: each overlaps another one",
        'name a free range in ~/.config/corral/enforcer.toml: subnet_range = "10.66.0.0/16"',
    )


def _post(api: APIClient, body: Mapping[str, Any]) -> None:
    """Send the body; every part of it has to have a place in docker-py's call."""
    rest = dict(body)
    options = {
        "name": rest.pop("Name"),
        "driver": rest.pop("Driver"),
        "options": rest.pop("Options"),
        "ipam": rest.pop("IPAM"),
        "check_duplicate": rest.pop("CheckDuplicate"),
        "internal": rest.pop("Internal"),
        "labels": rest.pop("Labels"),
        "enable_ipv6": rest.pop("EnableIPv6"),
        "attachable": rest.pop("Attachable"),
    }
    if rest:
        raise EngineError(f"the network's {', '.join(sorted(rest))} cannot be sent to Docker")
    answer = api.create_network(**options)
    judge_warnings(
        f"the network {body['Name']}", [answer["Warning"]] if answer.get("Warning") else [], best_effort=False
    )


def _verified(found: Mapping[str, Any], sandbox: Sandbox, uid: int) -> Plan:
    plan = subnets.plan_for(found)
    if plan is None:
        problems = ["its addresses are not laid out as corral does it"]
    else:
        wanted = network_body(sandbox, uid, *map(str, (plan.subnet, plan.gateway, plan.strangers)))
        problems = network_differences(found, wanted)
    if problems or plan is None:
        fix = "corral down" if _is_ours(found, sandbox, uid) else f"docker network rm {sandbox.network}"
        raise EngineError(
            f"the network {sandbox.network} is not what corral makes: {'; '.join(problems)}",
            f"{fix}; the next run makes it anew",
        )
    return plan


def _is_ours(found: Mapping[str, Any], sandbox: Sandbox, uid: int) -> bool:
    labels = found.get("Labels") or {}
    return labels.get(LABEL_UID) == str(uid) and labels.get(LABEL_SANDBOX) == sandbox.id


def free_address(api: APIClient, sandbox: Sandbox, plan: Plan, turn: Path) -> tuple[IPv4Address, bool]:
    """Return the next address that no container holds, and whether any session's holds one.

    Call it and create the container under one lock.

    Args:
        turn: a file of ours that says which one was given last.

    Raises:
        EngineError: none is free, or Docker does not answer.
    """
    with errors("listing containers"):
        entries = api.containers(all=True, filters={"network": sandbox.network})
    used = subnets.addresses_in_use(entries, sandbox.network)
    sessions = [row for row in entries if (row.get("Labels") or {}).get(LABEL_SERVICE) != proxying.SERVICE]
    last = ""
    # It only saves time, so a disk that refuses stands in nobody's way.
    with contextlib.suppress(OSError):
        last = turn.read_text(encoding="ascii", errors="replace").strip()
    found = subnets.allocate(plan, used, last)
    with contextlib.suppress(OSError):
        turn.write_text(f"{found}\n", encoding="ascii")
    return found, bool(subnets.addresses_in_use(sessions, sandbox.network))


def remove(api: APIClient, sandbox: Sandbox, uid: int) -> list[str] | None:
    """Remove the sandbox's network, disconnecting whatever is still on it.

    Returns:
        names of the containers that had to be disconnected, None when there was no network.

    Raises:
        EngineError: it belongs to somebody else, or Docker refuses.
    """
    from docker.errors import NotFound

    found = inspect(api, sandbox)
    if found is None:
        return None
    if not _is_ours(found, sandbox, uid):
        raise EngineError(
            f"the network {sandbox.network} was not made by this user's corral; it stays",
            f"look at it, then remove it yourself: docker network rm {sandbox.network}",
        )
    strangers = []
    with errors(f"removing the network {sandbox.network}"):
        for ident, entry in (found.get("Containers") or {}).items():
            with contextlib.suppress(NotFound):
                api.disconnect_container_from_network(ident, sandbox.network, force=True)
                strangers.append(str(entry.get("Name") or ident[:12]))
        with contextlib.suppress(NotFound):
            api.remove_network(sandbox.network)
    return strangers
