"""Group docker: who is in it by the accounts, and who runs without knowing it yet. One place for the fix."""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Mapping
from pathlib import Path

from policy.records import dataclass

GROUP = "docker"
PROC = Path("/proc")


@dataclass(frozen=True)
class Membership:
    """What the accounts say now. ``group`` is the gid of group docker, None when there is no such group."""

    uid: int
    user: str
    group: int | None
    member: bool


def membership(uid: int) -> Membership:
    """Look a user up in the accounts; processes that run since before a change know nothing of it."""
    try:
        account = pwd.getpwuid(uid)
        user, groups = account.pw_name, os.getgrouplist(account.pw_name, account.pw_gid)
    except KeyError:
        user, groups = str(uid), os.getgroups()
    try:
        group = grp.getgrnam(GROUP).gr_gid
    except KeyError:
        return Membership(uid, user, None, member=False)
    return Membership(uid, user, group, member=group in groups)


def restart_manager(found: Membership) -> str:
    """Return how the user's service manager gets the groups of today; it outlives logins."""
    return (
        f"sudo systemctl restart user@{found.uid}.service (it ends what runs in it, a desktop too), "
        "or log out everywhere"
    )


def join(found: Membership) -> str:
    """Return how a user becomes a member, and how what runs already takes notice."""
    return f"sudo usermod -aG {GROUP} {found.user}, then {restart_manager(found)}"


def service_fix(found: Membership, error: str) -> str | None:
    """Return the fix for a service of the user that may not do what group docker may; None: not the cause.

    Args:
        found: the user.
        error: what the service met.
    """
    if found.group is None:
        return "there is no group docker: install Docker Engine, then run: corral install"
    if not found.member:
        return join(found)
    return restart_manager(found) if "permission" in error.lower() else None


def login_fix(found: Membership) -> str:
    """Return the fix for a command line that may not use Docker."""
    if found.group is not None and found.member:
        return f"you joined group {GROUP} after this login: log in again, or: newgrp {GROUP}"
    return join(found)


def writer_problem(answer: Mapping[str, object], found: Membership) -> tuple[str, str] | None:
    """Return (what is wrong, the fix) when the enforcer cannot reach the netfilter writer, else None.

    Args:
        answer: the enforcer's ``version``.
        found: the user it runs as.
    """
    writer = answer.get("writer")
    if not isinstance(writer, Mapping) or writer.get("reachable", True):
        return None
    error = str(writer.get("error") or "")
    what = "the enforcer cannot reach the netfilter writer, so nothing would be enforced"
    look = "systemctl status corral-netfilter.socket; if it is missing: corral install"
    fix = service_fix(found, error) or look
    return f"{what}: {error}" if error else what, fix


def process_groups(pid: int, proc: Path = PROC) -> set[int] | None:
    """Return the groups a process runs with, None when they cannot be read."""
    try:
        text = (proc / str(pid) / "status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = dict(line.partition(":")[::2] for line in text.splitlines())
    return {int(number) for number in (*fields["Groups"].split(), *fields["Gid"].split())}
