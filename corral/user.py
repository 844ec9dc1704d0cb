"""Who runs corral, and whether the host service is of the same version: what a command that only asks needs.

It imports neither the policy's schema nor Docker's client, which take longer than the answer.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from corral import __version__, relay, rootless
from policy import versions
from policy.errors import CorralError, EnforcerError
from policy.records import dataclass


@dataclass(frozen=True)
class User:
    """Who runs corral: ids, home directory, environment, and the name and email Git commits with.

    ``rootless``: the engine is this user's own.
    """

    uid: int
    gid: int
    home: Path
    environ: Mapping[str, str]
    git: Mapping[str, str] = field(default_factory=dict)
    zone: str = ""
    rootless: bool = False


def current_user(environ: Mapping[str, str], uid: int | None = None) -> User:
    """Return who runs corral. HOME may be unset (cron), the primary group is the account's (not newgrp's).

    Raises:
        CorralError: there is neither HOME nor an account with a home directory.
    """
    uid = os.geteuid() if uid is None else uid
    try:
        account = pwd.getpwuid(uid)
        home, gid = account.pw_dir, account.pw_gid
    except KeyError:
        home, gid = "", os.getegid()
    home = environ.get("HOME", "") or home
    if not home.startswith("/"):
        raise CorralError("your home directory is not known", "set HOME")
    found = relay.environment(environ, uid)
    return User(uid=uid, gid=gid, home=Path(home), environ=found, rootless=rootless.chosen(found))


def user_units(home: Path, environ: Mapping[str, str]) -> Path:
    """Return where a user's own unit files lie."""
    base = environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base.startswith("/") else home / ".config") / "systemd" / "user"


def check_same(answer: Mapping[str, Any]) -> None:
    """Compare versions alone; a writer that cannot be reached is no difference.

    Raises:
        EnforcerError: naming both versions.
    """
    told = answer.get("writer")
    heard = isinstance(told, Mapping) and told.get("reachable")
    problem = versions.mismatch(
        versions.parse("corral", versions.describe(__version__)),
        versions.parse("the enforcer", answer),
        versions.parse("the netfilter writer", told) if heard and isinstance(told, Mapping) else None,
    )
    if problem is not None:
        raise EnforcerError(*problem)
