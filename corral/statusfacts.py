"""What ``corral status`` knows beside the enforcer: who looks after a session, and what keeps an agent up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corral import attended, notes
from corral.user import User, user_units
from policy.errors import CorralError
from policy.identity import SANDBOX_ID, SESSION_ID, Sandbox, StatePaths

UNITS = "corral-sandbox-*.service"


def added(status: Mapping[str, Any], user: User, data: Path) -> dict[str, Any]:
    """Return the enforcer's account with more in it.

    Each session has ``attended`` (null: not known, or of no matter) and ``called``, its name; each sandbox
    ``unit`` ({"unit", "enabled", "active", "sub"}) and ``lingers``, both null when it has none.

    Args:
        status: the enforcer's.
        user: whose it is.
        data: where the sandboxes have their files.
    """
    rows = status.get("sandboxes") or ()
    return {**status, "sandboxes": [_sandbox(row, user, data) for row in rows]}


def _sandbox(row: Mapping[str, Any], user: User, data: Path) -> dict[str, Any]:
    ident = str(row.get("sandbox"))
    found = dict(row)
    if not SANDBOX_ID.fullmatch(ident):
        return found
    found["sessions"] = [_session(one, StatePaths(data / ident)) for one in row.get("sessions") or ()]
    found["unit"] = found["lingers"] = None
    # systemd is asked only when there is something to ask for, and this is cheaper than to import how.
    if not any(user_units(user.home, user.environ).glob(UNITS)):
        return found
    from corral import units

    sandbox, manager = Sandbox(ident), units.Manager(user)
    if manager.file(sandbox).exists():
        found["lingers"] = units.lingers(user.uid)
        try:
            found["unit"] = manager.state(sandbox).body()
        except CorralError:
            found["unit"] = units.State(units.unit_of(sandbox), active="unknown", sub="unknown").body()
    return found


def _session(row: Mapping[str, Any], paths: StatePaths) -> dict[str, Any]:
    session = str(row.get("session"))
    if not SESSION_ID.fullmatch(session):
        return dict(row)
    note = notes.read_note(paths, session)
    # Nobody has to look after an agent that is always on.
    looked = attended.attended(paths.session(session)) if note.purpose in notes.LEAVABLE else None
    return {**row, "called": note.name or session, "attended": looked}
