"""Hosts files that say what the kernel holds, and nothing that it does not."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet

from enforcer import desired, hostsfile, pins
from enforcer.sessions import Session
from policy.errors import EnforcerError

log = logging.getLogger("corral.enforcer")


def publish(
    sessions: Collection[Session], state: pins.State, rows: AbstractSet[desired.Row]
) -> dict[str, Mapping[str, tuple[str, ...]]]:
    """Bring the hosts files to what ``state`` wants and the kernel holds of it, ``rows``.

    ``sessions`` are all known to ``state``.

    Returns:
        Container id -> name -> addresses, of the containers whose file says all that is wanted.
    """
    wanted, live = pins.published(state), desired.live(rows, sessions)
    done: dict[str, Mapping[str, tuple[str, ...]]] = {}
    for session in sessions:
        own, waiting = wanted[session.container], pins.readiness(state, session.container).pending
        try:
            shown = desired.shown_names(
                session,
                own,
                hostsfile.read(session.hosts_file),
                waiting,
                live[session.container],
                lambda text: bool(state.vetting.check(text)),
            )
            hostsfile.publish(session.hosts_file, desired.hosts_content(session, shown))
        except (EnforcerError, ValueError) as error:
            log.error("%s: %s", session.name, error)
            continue
        if not waiting and shown == own:
            done[session.container] = own
    return done
