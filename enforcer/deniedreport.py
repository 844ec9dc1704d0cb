"""What is told about refused packets: rows with names and advice, as JSON-able values. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from enforcer.addressbook import AddressBook, Known
from enforcer.denied import ANSWER, DNS_PORTS, ICMP, TCP, UDP, VERIFY, Ledger, Row
from enforcer.nameadvice import Reach, advice, reach
from enforcer.refusednames import AskedAccount, AskedRow, RefusedNames
from enforcer.sessions import Session
from policy import proxying

PROTOCOLS = {TCP: "tcp", UDP: "udp", ICMP: "icmp", 132: "sctp", 136: "udplite"}
WITHOUT_PORT = frozenset({ICMP, ANSWER})
OPEN_DNS_NOTE = "DNS: names are asked of 127.0.0.11, which is answered by corral; other resolvers are closed"
CLOSED_NOTE = "egress.mode is open: public addresses only"
MAX_ROWS = 5000
DNS_NOTE = "DNS: a sandbox has no resolver, allowed names are in its hosts file"


def protocol(number: int) -> str:
    """Return the name of an IP protocol, ``ip-47`` for one without a common one."""
    return "dns answer" if number == ANSWER else PROTOCOLS.get(number, f"ip-{number}")


def report(
    ledger: Ledger,
    book: AddressBook,
    lookups: Mapping[str, int],
    names: RefusedNames | None = None,
    sessions: Iterable[Session] = (),
    *,
    epoch: str,
    after: int = 0,
    project: str | None = None,
    lost: int = 0,
    problem: str = "",
) -> dict[str, Any]:
    """Return the body of ``GET /v1/denied``.

    Args:
        ledger: what was refused.
        book: names of addresses.
        lookups: sandbox -> how often its dead resolver was asked, where that can be seen.
        names: what was asked for by name; its numbers are the ledger's.
        sessions: those of now, whose policies advice is given by.
        epoch: tells one life of the service from another; numbers of rows mean nothing across lives.
        after: only rows that changed after this number.
        project: only sandboxes of this directory.
        lost: records of the kernel's log that nobody saw.
        problem: why the log cannot be read now, or empty.
    """
    asked = names.accounts if names is not None else {}
    projects = {name: account.project for name, account in asked.items()}
    # An account without a project has not met a session yet.
    projects.update({name: one.project for name, one in ledger.accounts.items() if one.project})
    for name in ledger.accounts:
        projects.setdefault(name, "")
    wanted = sorted(name for name, where in projects.items() if project in (None, where))
    rows = [row for row in ledger.rows(after) if row.place.sandbox in wanted]
    found = [row for row in names.rows(after) if row.place.sandbox in wanted] if names is not None else []
    living = reaches(sessions) if found else {}
    sandboxes = []
    for name in wanted:
        denied, unlisted = ledger.of_sandbox(name) if name in ledger.accounts else (0, 0)
        account = asked.get(name, AskedAccount())
        sandboxes.append(
            {
                "sandbox": name,
                "project": projects[name],
                "denied": denied,
                "unlisted": unlisted,
                "dead_resolver": lookups.get(name),
                "asked": account.total - account.checks,
                "asked_unlisted": account.unlisted,
            }
        )
    return {
        "epoch": epoch,
        "next": ledger.number,
        "problem": problem,
        "lost": lost,
        "left_out": max(0, len(rows) - MAX_ROWS) + max(0, len(found) - MAX_ROWS),
        "sandboxes": sandboxes,
        "rows": [row_report(row, ledger, book) for row in rows[-MAX_ROWS:]],
        "asked": [asked_report(row, living.get(row.place.sandbox, ())) for row in found[-MAX_ROWS:]],
    }


def reaches(sessions: Iterable[Session]) -> dict[str, list[tuple[str, Reach]]]:
    """Return sandbox -> (what a session is called, what it may reach) of those that count in advice."""
    found: dict[str, list[tuple[str, Reach]]] = {}
    for one in sessions:
        if not one.problems and one.service != proxying.SERVICE and one.purpose != VERIFY:
            found.setdefault(one.sandbox.id, []).append((f"{one.service}-{one.session}", reach(one)))
    return found


def asked_report(row: AskedRow, living: Iterable[tuple[str, Reach]]) -> dict[str, Any]:
    """Return one row of what was asked for by name, with the fields that all rows have."""
    told = advice(row.name, row.port, row.reason, living)
    return {
        "id": row.ident,
        "number": row.number,
        "first": row.first,
        "last": row.last,
        "sandbox": row.place.sandbox,
        "project": row.place.project,
        "service": row.place.service or None,
        "session": row.place.session or None,
        "container": row.place.container or None,
        "protocol": "proxy" if row.port else "dns name",
        "address": None,
        "port": row.port or None,
        "icmp_type": None,
        "count": row.count,
        "at_least": False,
        "name": row.name,
        "reason": row.reason,
        "dns": not row.port,
        "check": row.check,
        "note": told.note,
        "line": told.line,
        "command": told.command,
    }


def row_report(row: Row, ledger: Ledger, book: AddressBook) -> dict[str, Any]:
    """Return one row."""
    _, proto, port, address = row.flow
    session = ledger.session(row)
    known = book.names(address)
    note, hint = explained(row, session, known, ledger.neighbour(address))
    return {
        "id": row.ident,
        "number": row.number,
        "first": row.first,
        "last": row.last,
        "sandbox": row.place.sandbox,
        "project": row.place.project,
        "service": row.place.service or None,
        "session": row.place.session or None,
        "container": row.place.container or None,
        "protocol": protocol(proto),
        "address": address,
        "port": port if proto in PROTOCOLS and proto not in WITHOUT_PORT else None,
        "icmp_type": port >> 8 if proto == ICMP else None,
        "count": row.count,
        "at_least": ledger.at_least(row),
        "names": [{"name": one.name, "refused": one.refused or None} for one in known],
        "dns": is_dns(proto, port),
        "check": row.check,
        "note": note,
        "hint": hint,
    }


def is_dns(proto: int, port: int) -> bool:
    """Tell whether a packet asks a resolver: port 53, or 853 for DNS over TLS and QUIC."""
    return proto in (TCP, UDP) and port in DNS_PORTS


def explained(
    row: Row, session: Session | None, known: Iterable[Known], neighbour: str | None
) -> tuple[str | None, str | None]:
    """Return what a destination is and what would allow it; None where there is nothing to say."""
    _, proto, port, address = row.flow
    if row.check:
        return "corral's own check: it must be refused", None
    gateway = str(session.network.gateway) if session is not None and session.network is not None else None
    opened = session is not None and session.open
    if is_dns(proto, port):
        return OPEN_DNS_NOTE if opened else DNS_NOTE, None
    if address == gateway:
        hint = f"add port {port} to host_services" if proto == TCP else None
        return "this host", hint
    if neighbour is not None:
        return (
            f"sandbox {neighbour}" if neighbour != row.place.sandbox else "a session of the same sandbox",
            None,
        )
    note, hint = _named(proto, port, session, list(known))
    if opened and proto != ANSWER:
        return f"{note}; {CLOSED_NOTE}" if note else CLOSED_NOTE, None
    return note, hint


def _named(
    proto: int, port: int, session: Session | None, known: list[Known]
) -> tuple[str | None, str | None]:
    own = {name.host: name.ports for name in session.names} if session is not None else {}
    usable = [one for one in known if not one.refused]
    if not usable:
        refused = next(iter(known), None)
        return (f"refused answer of {refused.name}: {refused.refused}" if refused is not None else None), None
    best = next((one for one in usable if one.name in own), usable[0])
    if proto != TCP:
        return f"{best.name}: names are opened for TCP only", None
    if best.name not in own:
        return best.name, f"add {best.name} to egress.allow"
    if port not in own[best.name]:
        ports = ", ".join(map(str, own[best.name]))
        return best.name, f"{best.name} is allowed on {ports}: add port {port} to it in egress.allow"
    return (
        f"{best.name}: an earlier address, too many connections, or not allowed any more at that time",
        None,
    )
