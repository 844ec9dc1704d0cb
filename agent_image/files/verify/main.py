"""`corral-verify '<expectations as JSON>'`: the list of checks, and how it is run and printed.

One JSON object per line: {"check": name, "status": "ok" | "fail" | "skip", "detail": text}. Exit code 0 when
nothing failed, else 1. A check that raises, or does not end in time, has failed.
"""

from __future__ import annotations

import functools
import json
import os
import sys

from . import answered, apart, files, identity, limits, mounting, mounts, opened, ownership, proxied, reach
from .expectations import Expectations
from .outcome import Failed, Skipped
from .system import System
from .tasks import together

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import NoReturn

    from .system import Check

SOCKETS = ("/var/run/docker.sock", "/run/docker.sock")
CREDENTIALS = (".ssh", ".aws", ".gnupg", ".kube", ".docker", ".netrc")
PROFILE_CHECKS = {
    "root-owned": ownership.root_owned,
    "ro-unwritable": files.ro_unwritable,
    "exec-dir": files.exec_dir,
    "runs": files.runs,
}
TOTAL_WAIT = 40.0


def checks(expected: Expectations) -> list[tuple[str, Check]]:
    """Return every check that these expectations call for, each once, in the order they are printed."""
    listed = [
        ("non-root", identity.non_root),
        ("uid-matches-host", identity.uid_matches_host),
        ("no-sudo", identity.no_sudo),
        ("no-capabilities", identity.no_capabilities),
        ("seccomp", identity.seccomp),
        ("iptables-refused", identity.iptables_refused),
        *((f"no-docker-socket:{path}", files.no_docker_socket(path)) for path in SOCKETS),
        *((f"no-credential-dir:{name}", files.no_credential_dir(name)) for name in CREDENTIALS),
        ("host-home-only-mounts", files.host_home_only_mounts),
        ("mounts-equal-policy", mounts.mounts_equal_policy),
        ("env-file-not-mounted", files.env_file_not_mounted),
        ("read-only-root", files.read_only_root),
        *((f"root-owned:{path}", ownership.root_owned(path)) for path in ownership.GUARDS),
        *((f"{kind}:{target}", profile_check(kind, target)) for kind, target in expected.profile),
        *((f"rw-writable:{path}", files.rw_writable(path)) for path in expected.mounts_rw),
        *(
            (f"ro-unwritable:{path}", files.ro_unwritable(path))
            for path in (*expected.mounts_ro, *expected.shadows)
        ),
        *((f"state-writable:{path}", files.state_writable(path)) for path in expected.state),
        ("limits", limits.limits),
        *(apart.checked(expected.connection, name, check) for name, check in _network(expected)),
    ]
    return [
        (name, apart.of_this_kernel(expected.runtime, name, check)) for name, check in dict(listed).items()
    ]


def _network(expected: Expectations) -> list[tuple[str, Check]]:
    return [
        *([("only-loopback", apart.only_loopback)] if expected.connection == "none" else []),
        ("unlisted-host-blocked", reach.unlisted_host_blocked),
        *_dns(expected),
        *(proxied.checks(expected.proxy) if expected.proxy is not None else []),
        ("ipv6-disabled", reach.ipv6_disabled),
        ("no-ipv6-address", reach.no_ipv6_address),
        *((f"pinned-name:{name}", reach.pinned_name(name)) for name in sorted(expected.names)),
        *((f"host-service:{port}", reach.host_service(port)) for port in expected.host_services),
        *(
            (f"peer-unreachable:{name}", reach.peer_unreachable(address))
            for name, address in sorted(expected.peers.items())
        ),
    ]


def _dns(expected: Expectations) -> list[tuple[str, Check]]:
    if expected.answered is not None:
        return answered.checks(expected.answered)
    if expected.closed is None:
        return [("dns-closed", reach.dns_closed), ("embedded-dns-closed", reach.embedded_dns_closed)]
    return [
        *((f"closed-address:{address}", opened.closed_address(address)) for address in expected.closed),
        ("host-closed", opened.host_closed),
        ("dns-closed", opened.replaced),
        ("embedded-dns-closed", opened.replaced),
        ("dns-outside-closed", opened.dns_outside_closed),
        ("public-name", opened.public_name),
    ]


def profile_check(kind: str, target: str) -> Check:
    """Return one of the harness's own checks. An unknown kind fails: what it asserts is not proven."""

    def unknown(_: Expectations, __: System) -> str:
        raise Failed("this checker does not know that kind of check")

    make = PROFILE_CHECKS.get(kind)
    return make(target) if make else unknown


def judge(check: Check, expected: Expectations, system: System) -> tuple[str, str]:
    """Run one check; return (status, detail)."""
    try:
        return "ok", check(expected, system)
    except Skipped as nothing:
        return "skip", str(nothing)
    except Failed as broken:
        return "fail", str(broken)
    except Exception as problem:
        return "fail", f"the check itself failed: {type(problem).__name__}: {problem}"


def verify(body: object, system: System, wait: float = TOTAL_WAIT) -> Iterator[dict[str, str]]:
    """Yield the results for expectations as parsed from JSON; all checks run at the same time."""
    try:
        if not isinstance(body, dict):
            raise TypeError(f"an object is expected, not {type(body).__name__}")
        expected = Expectations(body)
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        yield {"check": "expectations", "status": "fail", "detail": f"{type(problem).__name__}: {problem}"}
        return
    listed = checks(expected)
    tasks = [functools.partial(judge, check, expected, system) for _, check in listed]
    found = together(tasks, wait, ("fail", f"did not end within {wait:g} s"))
    for index, (name, _) in enumerate(listed):
        status, detail = found[index]
        yield {"check": name, "status": status, "detail": detail}


def run(argv: Sequence[str], system: System) -> int:
    """Print the results for one argument; return the exit code."""
    try:
        body: object = json.loads(argv[0]) if len(argv) == 1 else f"{len(argv)} arguments"
    except (ValueError, RecursionError):
        body = "no JSON"
    failed = False
    for result in verify(body, system):
        failed = failed or result["status"] not in {"ok", "skip"}
        sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    return 1 if failed else 0


def main() -> NoReturn:
    """Run as a program."""
    mounting.undumpable()
    # Without the usual way out: a check that hangs in the kernel must not keep the process.
    os._exit(run(sys.argv[1:], System()))
