"""Hosts files that say what the kernel holds, and nothing that it does not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Set as AbstractSet

from enforcer import desired, hostsfile, pins
from enforcer.sessions import Session
from enforcer.writerclient import Held, rows_of
from policy.errors import EnforcerError


def publish(
    sessions: Collection[Session], state: pins.State, rows: AbstractSet[desired.Row]
) -> tuple[dict[str, Mapping[str, tuple[str, ...]]], list[str]]:
    """Bring the hosts files to what ``state`` wants and the kernel holds of it, ``rows``.

    ``sessions`` are all known to ``state``.

    Returns:
        Container id -> name -> addresses, of the containers whose file says all that is wanted; and why the
        files of others could not be written.
    """
    wanted, live = pins.published(state), desired.live(rows, sessions)
    done: dict[str, Mapping[str, tuple[str, ...]]] = {}
    failed = []
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
            failed.append(f"{session.name}: {error}")
            continue
        if not waiting and shown == own:
            done[session.container] = own
    return done, failed


def satisfied(
    sessions: Collection[Session],
    done: Mapping[str, Mapping[str, tuple[str, ...]]],
    rules: desired.Ruleset,
    held: Held,
    opened: Callable[[Session, Held], bool],
    serves: Callable[[str], bool],
) -> dict[str, Mapping[str, tuple[str, ...]]]:
    """Return those of ``done`` that have all that is wanted, and so may start.

    While the rules are not what they should be nobody new may start, also who needs no element: what keeps a
    container from everything else may be what is wrong. What runs is not asked to end.

    Args:
        sessions: all.
        done: see ``publish``.
        rules: what was asked of the kernel.
        held: what it has.
        opened: whether a session of open mode is open, and any other is not.
        serves: whether the proxy of a sandbox (its id) can ask.
    """
    host = rows_of(held.host)
    return {
        session.container: done[session.container]
        for session in sessions
        if session.container in done
        and (session.running or not held.standing)
        and {row for row in rules.host if row[0] == session.address} <= host
        and opened(session, held)
        and (not session.proxy or serves(session.sandbox.id))
    }
