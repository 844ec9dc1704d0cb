"""What ``corral verify`` says: its results, what the checker is told, what it answered. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address
from pathlib import Path
from typing import Any, Literal

from corral.runtimes import RUNC
from policy.connection import OWN
from policy.container import HOME, NOFILE, TMPFS, WORKSPACE, Limits
from policy.loader import LoadedPolicy
from policy.records import dataclass

Status = Literal["ok", "fail", "skip"]

# Documentation addresses: routed like any other, and nobody's.
PROBES = ("192.0.2.1", "198.51.100.1", "203.0.113.1", "192.0.2.254", "198.51.100.254", "203.0.113.254")
# No configuration can permit this one.
RESERVED = "240.0.0.1"
PROBE_PORT = 443
# Closed to a sandbox that reaches all public addresses; nobody can permit the first ones.
METADATA = "169.254.169.254"
CLOSED = ("168.63.129.16", "100.100.100.200")
PRIVATE = ("10.255.255.1", "172.31.255.1", "192.168.255.1")
NO_LIMITS = Limits(0, 0, 0)
GATE = "gate"
CHECKER = "checker"
GATE_ERROR = "corral-firewall: ERROR: "
# What the gate says at last beside a running session: a verdict, not one more thing that is wrong.
GATE_VERDICT = "re-check failed against existing rules"


@dataclass(frozen=True)
class Check:
    """One result. ``session`` is the running session it was made in, empty for the throw-away container."""

    name: str
    status: Status
    detail: str = ""
    session: str = ""

    @property
    def shown_name(self) -> str:
        """The name as printed."""
        return f"{self.name}@{self.session}" if self.session else self.name

    def line(self) -> str:
        """Return the one line of the check."""
        detail = " ".join(self.detail.split())
        if self.status == "ok":
            return f"ok   {self.shown_name}"
        return f"{'FAIL' if self.status == 'fail' else 'skip'} {self.shown_name}: {detail}"


def report(checks: Sequence[Check]) -> str:
    """Return one line per check and the sum, without a final newline."""
    passed, skipped, failed = counts(checks)
    return "\n".join(
        [*(check.line() for check in checks), f"{passed} passed, {skipped} skipped, {failed} failed"]
    )


def body(sandbox: str, checks: Sequence[Check]) -> dict[str, Any]:
    """Return the same for programs."""
    passed, skipped, failed = counts(checks)
    rows = [
        {
            "check": check.name,
            "status": check.status,
            "detail": check.detail,
            "session": check.session or None,
        }
        for check in checks
    ]
    return {"sandbox": sandbox, "checks": rows, "passed": passed, "skipped": skipped, "failed": failed}


def counts(checks: Iterable[Check]) -> tuple[int, int, int]:
    """Return how many passed, were skipped, failed."""
    statuses = [check.status for check in checks]
    return statuses.count("ok"), statuses.count("skip"), statuses.count("fail")


def exit_code(checks: Sequence[Check]) -> int:
    """Return 0 when something was proven and nothing failed."""
    passed, _, failed = counts(checks)
    return 0 if passed and not failed else 1


def probe_address(permitted: Iterable[IPv4Network | IPv6Network]) -> str:
    """Return an address that no policy can ever allow.

    Args:
        permitted: ranges that the service configuration opens for names.
    """
    ranges = list(permitted)
    outside = [address for address in PROBES if not any(ip_address(address) in network for network in ranges)]
    return next(iter(outside), RESERVED)


def private_addresses(permitted: Iterable[IPv4Network | IPv6Network]) -> list[str]:
    """Return private addresses that are closed to an open sandbox as well."""
    ranges = list(permitted)
    return [text for text in PRIVATE if not any(ip_address(text) in network for network in ranges)]


def resolvers(resolv_confs: Iterable[str], configured: Iterable[str]) -> list[str]:
    """Return the IPv4 addresses that answer DNS to this host, loopback excepted, each once.

    Args:
        resolv_confs: contents of resolv.conf files.
        configured: servers of the service configuration, optionally with a port after '#' or ':', or as
            tls://ADDRESS#NAME.
    """
    listed = [re.split("[#:]", server.removeprefix("tls://"))[0] for server in configured]
    for text in resolv_confs:
        words = [line.split() for line in text.splitlines()]
        listed += [found[1] for found in words if len(found) > 1 and found[0] == "nameserver"]
    addresses = []
    for text in dict.fromkeys(listed):
        try:
            address = IPv4Address(text)
        except ValueError:
            continue
        if not address.is_loopback:
            addresses.append(str(address))
    return addresses


def expectations(
    loaded: LoadedPolicy,
    *,
    uid: int,
    gid: int,
    home: Path,
    gateway: str,
    probe: str,
    names: Mapping[str, Sequence[str]],
    resolvers: Sequence[str] = (),
    peers: Mapping[str, str] | None = None,
    limits: Limits = NO_LIMITS,
    closed: Sequence[str] | None = None,
    proxy: Mapping[str, Any] | None = None,
    answered: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what the checker in the container compares with (see ``agent_image.files.verify.Expectations``).

    Args:
        loaded: the policy.
        uid, gid, home: the host user's.
        gateway: the host's address on the sandbox's network.
        probe: an address that no policy allows.
        names: pinned name -> addresses, empty to leave them to ``live-rules``.
        resolvers: addresses that answer DNS to the host.
        peers: name -> address of every other sandbox container of the user.
        limits: those that Docker was asked for.
        closed: addresses that are closed to an open sandbox; None for any other.
        proxy, answered: see ``corral.proxychecks``; None where there is none.
    """
    profile = loaded.profile
    return {
        "uid": uid,
        "gid": gid,
        "home": str(home),
        "mounts_rw": [mount.target for mount in loaded.mounts if not mount.read_only],
        "mounts_ro": [
            *(mount.target for mount in loaded.mounts if mount.read_only),
            *(f"{HOME}/{managed.path}" for managed in profile.managed_dirs),
        ],
        "state": [
            HOME,
            *([WORKSPACE] if loaded.workspace else []),
            *(profile.state_path(directory) for directory in profile.state_dirs),
        ],
        "shadows": [f"{HOME}/{part}" for part in profile.shadow],
        "tmpfs": sorted(TMPFS),
        "limits": asked_limits(limits),
        "limits_best_effort": loaded.policy.limits.best_effort,
        "peers": dict(peers or {}),
        "host_services": sorted({service.port for service in loaded.declaration.host_services}),
        "gateway": gateway,
        "probe": {"address": probe, "port": PROBE_PORT},
        "names": {name: list(addresses) for name, addresses in names.items()},
        "resolvers": list(resolvers),
        "env_file": str(loaded.env_file) if loaded.env_file is not None else None,
        "closed": None if closed is None else list(closed),
        "proxy": proxy,
        "answered": answered,
        "profile": [{"kind": check.kind, "target": check.target} for check in profile.verify],
        **({"connection": loaded.connection} if loaded.connection != OWN else {}),
        **({"runtime": loaded.policy.runtime} if loaded.policy.runtime != RUNC else {}),
    }


def asked_limits(limits: Limits) -> dict[str, float]:
    """Return the limits that there are, in the checker's words and units."""
    asked = {"pids": limits.pids, "memory": limits.memory, "cpus": limits.nano_cpus / 10**9, "nofile": NOFILE}
    return {name: value for name, value in asked.items() if value}


def parse_checker(
    stdout: str, stderr: str, code: int, session: str = "", asked: Collection[str] = ()
) -> list[Check]:
    """Return the checker's results. One that died, or says something else than it was asked, is a failure.

    Args:
        stdout, stderr, code: what came of it.
        session: the running session it ran in, if any.
        asked: the names of all checks that it was to make.
    """
    found: dict[str, Check] = {}
    odd = []
    for line in stdout.splitlines():
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            name, status, detail = str(row["check"]), row["status"], str(row.get("detail") or "")
            if status not in {"ok", "fail", "skip"}:
                raise ValueError(status)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            odd.append(f"it printed something else than a result: {line[:100]}")
            continue
        if name in found or (asked and name not in {*asked, "expectations"}):
            odd.append(f"it told of {name[:100]}, unasked or twice")
        else:
            found[name] = Check(name, status, detail, session)
    refused = gate_problems(stderr)
    if refused and not found and not odd:
        # The checker was never started, and the gate has said why.
        return [Check(GATE, "fail", problem, session) for problem in refused]
    failed = any(check.status == "fail" for check in found.values())
    if not found or code not in {0, 1} or (code == 1) != failed:
        last = (stderr.strip().splitlines() or ["it printed nothing"])[-1]
        odd.append(f"ended with exit code {code}: {last[:200]}")
    missing = [name for name in asked if name not in found and "expectations" not in found]
    if found and missing:
        odd.append(f"it said nothing of {', '.join(missing)}")
    return [*found.values(), *(Check(CHECKER, "fail", text, session) for text in odd)]


def gate_problems(stderr: str) -> list[str]:
    """Return what the gate of a container said was wrong."""
    lines = (line.rstrip() for line in stderr.splitlines())
    told = [line.removeprefix(GATE_ERROR) for line in lines if line.startswith(GATE_ERROR)]
    return [problem for problem in told if problem != GATE_VERDICT] or told


def only_pins_failed(checks: Iterable[Check]) -> bool:
    """Say whether everything that failed can be a name that was resolved anew at that very moment."""
    failed = [check.name for check in checks if check.status == "fail"]
    moved = {"live-rules", "pinned-name", "proxy-elements", "proxy-is-the-only-way"}
    return bool(failed) and all(name.partition(":")[0] in moved for name in failed)
