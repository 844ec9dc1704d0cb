"""What ``corral verify`` proves: results, what the checker is told, the checks made from the host. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address
from pathlib import Path
from typing import Any, Literal

from policy.container import HOME, HOST_ALIAS
from policy.declaration import Declaration
from policy.loader import LoadedPolicy

Status = Literal["ok", "fail", "skip"]
Row = tuple[str, str, int, str]
"""A kernel element: source, protocol, port, destination."""

# Documentation addresses: routed like any other, and nobody's.
PROBES = ("192.0.2.1", "198.51.100.1", "203.0.113.1", "192.0.2.254", "198.51.100.254", "203.0.113.254")
# No configuration can permit this one.
RESERVED = "240.0.0.1"
PROBE_PORT = 443
GATE = "gate"
GATE_ERROR = "corral-firewall: ERROR: "
SCHEMA = 1


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


def report_json(sandbox: str, checks: Sequence[Check]) -> str:
    """Return the same as one JSON object."""
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
    body = {"schema": SCHEMA, "sandbox": sandbox, "checks": rows}
    return json.dumps({**body, "passed": passed, "skipped": skipped, "failed": failed}, indent=2)


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


def resolvers(resolv_confs: Iterable[str], configured: Iterable[str]) -> list[str]:
    """Return the IPv4 addresses that answer DNS to this host, loopback excepted, each once.

    Args:
        resolv_confs: contents of resolv.conf files.
        configured: servers of the service configuration, optionally with a port after '#' or ':'.
    """
    listed = [re.split("[#:]", server)[0] for server in configured]
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
) -> dict[str, Any]:
    """Return what the checker in the container compares with (see ``agent_image.files.verify.Expectations``).

    Args:
        loaded: the policy.
        uid, gid, home: the host user's.
        gateway: the host's address on the sandbox's network.
        probe: an address that no policy allows.
        names: pinned name -> addresses, empty to leave them to ``live-rules``.
        resolvers: addresses that answer DNS to the host.
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
        "state": [HOME, *(profile.state_path(directory) for directory in profile.state_dirs)],
        "shadows": [f"{HOME}/{part}" for part in profile.shadow],
        "host_services": sorted({service.port for service in loaded.declaration.host_services}),
        "gateway": gateway,
        "probe": {"address": probe, "port": PROBE_PORT},
        "names": {name: list(addresses) for name, addresses in names.items()},
        "resolvers": list(resolvers),
        "env_file": str(loaded.env_file) if loaded.env_file is not None else None,
        "profile": [{"kind": check.kind, "target": check.target} for check in profile.verify],
    }


def parse_checker(stdout: str, stderr: str, code: int, session: str = "") -> list[Check]:
    """Return the checker's results. A checker that died, or says something else than JSON, is a failure."""
    found = []
    for line in stdout.splitlines():
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            name, status, detail = str(row["check"]), row["status"], str(row.get("detail") or "")
            if status not in {"ok", "fail", "skip"}:
                raise ValueError(status)
        except (ValueError, KeyError, TypeError, AttributeError):
            found.append(
                Check("checker", "fail", f"it printed something else than a result: {line[:100]}", session)
            )
            continue
        found.append(Check(name, status, detail, session))
    refused = gate_problems(stderr)
    if refused and not found:
        # The checker was never started, and the gate has said why.
        return [Check(GATE, "fail", problem, session) for problem in refused]
    failed = any(check.status == "fail" for check in found)
    if not found or code not in {0, 1} or (code == 1) != failed:
        last = (stderr.strip().splitlines() or ["it printed nothing"])[-1]
        found.append(Check("checker", "fail", f"ended with exit code {code}: {last[:200]}", session))
    return found


def gate_problems(stderr: str) -> list[str]:
    """Return what the gate of a container said was wrong."""
    lines = (line.rstrip() for line in stderr.splitlines())
    return [line.removeprefix(GATE_ERROR) for line in lines if line.startswith(GATE_ERROR)]


def parse_hosts(text: str) -> dict[str, list[str]]:
    """Return name -> addresses of a hosts file, in its order."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        address, *names = line.partition("#")[0].split() or [""]
        for name in names:
            known = found.setdefault(name.lower(), [])
            if address not in known:
                known.append(address)
    return found


@dataclass(frozen=True)
class Sight:
    """One container as three sides see it.

    Args:
        declaration: what its labels say it may reach.
        address, gateway: its own and the host's on its network; ``hostname`` is its own name.
        hosts: name -> addresses in its hosts file.
        published, lingering: name -> addresses in the enforcer's account: what the hosts file should say, and
            what stays allowed beside it for flows that are open.
        pins, host: kernel elements with this source.
    """

    declaration: Declaration
    address: str
    gateway: str
    hostname: str
    hosts: Mapping[str, Sequence[str]]
    published: Mapping[str, Sequence[str]]
    lingering: Mapping[str, Sequence[str]]
    pins: frozenset[Row]
    host: frozenset[Row]


def live_rules(sight: Sight) -> list[str]:
    """Compare policy, hosts file and kernel element by element; return every difference."""
    found: list[str] = []
    expected: set[Row] = set()
    lingering: set[Row] = set()
    for name in sight.declaration.names:
        addresses = sight.hosts.get(name.host, ())
        if not addresses and not name.optional:
            found.append(f"{name.host}: the hosts file has no address for it")
        if sorted(addresses) != sorted(sight.published.get(name.host, ())):
            told = ", ".join(sight.published.get(name.host, ())) or "nothing"
            found.append(
                f"{name.host}: the hosts file says {', '.join(addresses) or 'nothing'}, the enforcer {told}"
            )
        for port in name.ports:
            expected |= {(sight.address, "tcp", port, address) for address in addresses}
            lingering |= {(sight.address, "tcp", port, a) for a in sight.lingering.get(name.host, ())}
            found += [
                f"{name.host}: the kernel does not allow {address}:{port}"
                for address in addresses
                if (sight.address, "tcp", port, address) not in sight.pins
            ]
    found += [
        f"the kernel allows {_row(row)}, which no name has"
        for row in sorted(sight.pins - expected - lingering)
    ]
    found += _hosts_differences(sight)
    services = {
        (sight.address, "tcp", service.port, sight.gateway): service.name
        for service in sight.declaration.host_services
    }
    for row, service in services.items():
        if row not in sight.host:
            found.append(f"host service {service}: the kernel does not allow {_row(row)}")
    found += [
        f"the kernel allows {_row(row)} of this host, which no service is"
        for row in sorted(sight.host - set(services))
    ]
    return found


def _row(row: Row) -> str:
    _, proto, port, destination = row
    return f"{destination}:{port}" if proto == "tcp" else f"{destination}:{port}/{proto}"


def _hosts_differences(sight: Sight) -> list[str]:
    fixed = {"localhost": ["127.0.0.1"], sight.hostname: [sight.address], HOST_ALIAS: [sight.gateway]}
    found = []
    for name, addresses in fixed.items():
        told = list(sight.hosts.get(name, ()))
        if told != addresses:
            found.append(f"the hosts file says {', '.join(told) or 'nothing'} for {name}, not {addresses[0]}")
    known = {name.host for name in sight.declaration.names} | set(fixed)
    found += [
        f"the hosts file has {name}, which the policy has not" for name in sorted(set(sight.hosts) - known)
    ]
    return found


def host_checks(skeleton: Mapping[str, Any], differences: Sequence[str], session: str = "") -> list[Check]:
    """Return ``live-rules`` and, once for all sessions, ``skeleton-in-path`` and ``backstop``."""
    rules = Check("live-rules", "fail" if differences else "ok", "; ".join(differences), session)
    if session:
        return [rules]
    problems = "; ".join(map(str, skeleton.get("problems") or ()))
    parts = {"jump": "the jumps from Docker's chain", "input": "the way into this host", "ipv6": "IPv6"}
    broken = [what for part, what in parts.items() if not skeleton.get(part)]
    backstop = bool(skeleton.get("backstop"))
    return [
        rules,
        Check(
            "skeleton-in-path",
            "fail" if broken else "ok",
            f"not as it must be: {', '.join(broken)}" + (f" ({problems})" if problems else ""),
        ),
        Check(
            "backstop",
            "ok" if backstop else "fail",
            problems or "nothing drops what Docker's own rules would let through",
        ),
    ]


def only_pins_failed(checks: Iterable[Check]) -> bool:
    """Say whether everything that failed can be a name that was resolved anew at that very moment."""
    failed = [check.name for check in checks if check.status == "fail"]
    return bool(failed) and all(name == "live-rules" or name.startswith("pinned-name:") for name in failed)
