"""What sandboxes tried and the fence refused, by session, protocol, address and port. Pure.

Two accounts meet here. The kernel's log says when and where the first packet to a destination went, at a
limited rate for each container; the kernel's counters say how many went there from then on, and how many of a
container were refused in all. So a row's count is exact while its destination was counted without a break,
else a lower bound; and what no row accounts for is told as a number.

Everything is bounded: rows per sandbox, sandboxes, and who had an address. What does not fit is counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address

from enforcer.sessions import Network, Session
from policy.identity import NETWORK_PREFIX

ROWS = 2000  # of one sandbox
SANDBOXES = 256
CONTAINERS = 512  # of one sandbox whose kernel counts are kept apart
HOLDERS = 4  # of one address
ADDRESSES = 8192

TCP, UDP, ICMP = 6, 17, 1
# No packet: an answer for a name that an open sandbox asked for, with an address that it was not told.
ANSWER = 0
DNS_PORTS = frozenset({53, 853})
PROBE_PORT = 443
# Seconds after its start in which a session's gate asks resolvers.
GATE_LASTS = 5.0
START_LASTS = 30.0  # between creation and start, while Docker has not told of the start
VERIFY = "verify"

Flow = tuple[str, int, int, str]  # source, protocol number, port, destination


@dataclass(frozen=True)
class Heard:
    """A record of the kernel's log; ``at`` is wall time."""

    at: float
    flow: Flow


@dataclass(frozen=True)
class Counted:
    """The kernel's count for a destination, in packets; ``left``: seconds until it is logged anew."""

    flow: Flow
    packets: int
    left: int


@dataclass(frozen=True)
class Place:
    """Where a row belongs. Without a session known for the moment, ``service`` and ``session`` are empty."""

    sandbox: str
    project: str = ""
    service: str = ""
    session: str = ""
    container: str = ""


@dataclass
class Row:
    """One destination of one session. ``number`` grows with each change; ``ident`` stays.

    ``check``: corral's own doing, not the program's: the gate at the start, or ``corral verify``.
    ``elements``: how many of the kernel's counters ``counted`` comes from; each began with a record.
    """

    ident: int
    place: Place
    flow: Flow
    check: bool
    first: float
    last: float
    number: int = 0
    logged: int = 0
    counted: int = 0
    elements: int = 0
    broken: bool = False

    @property
    def count(self) -> int:
        """How many packets, at least: those counted, and those logged whose counter nobody saw."""
        return self.counted + max(0, self.logged - self.elements)

    @property
    def doubtful(self) -> bool:
        """Whether packets may have come that this row did not see; ``Ledger.at_least`` knows more."""
        return self.broken or self.logged > self.elements


@dataclass
class Account:
    """What is known of one sandbox.

    ``total``: the kernel's count of each container. ``dropped``: packets of rows that had to go; ``past``:
    those of containers that had to go which no row had.
    """

    project: str = ""
    rows: OrderedDict[tuple[object, ...], Row] = field(default_factory=OrderedDict)
    total: OrderedDict[str, int] = field(default_factory=OrderedDict)
    dropped: int = 0
    past: int = 0

    def listed(self) -> dict[str, int]:
        """Return how many packets the rows of each container have."""
        found: dict[str, int] = {}
        for row in self.rows.values():
            found[row.place.container] = found.get(row.place.container, 0) + row.count
        return found

    def add(self, container: str, packets: int) -> None:
        """Add to the kernel's count of a container."""
        self.total[container] = self.total.pop(container, 0) + packets
        if len(self.total) > CONTAINERS:
            oldest, total = self.total.popitem(last=False)
            self.past += max(0, total - self.listed().get(oldest, 0))


class Ledger:
    """Rows of all sandboxes of a user. Times are wall time."""

    def __init__(self) -> None:
        self.accounts: OrderedDict[str, Account] = OrderedDict()
        self.number = 0
        self._idents = 0
        self._holders: OrderedDict[str, list[Session]] = OrderedDict()
        self._networks: dict[str, Network] = {}
        self._packets: dict[Flow, tuple[Counted, Row]] = {}
        self._heard: dict[Flow, float] = {}
        self._totals: dict[str, int] = {}

    def next_number(self) -> int:
        """Return the number of one more change, of a row here or in an account beside this one."""
        self.number += 1
        return self.number

    def next_ident(self) -> int:
        """Return what tells one more row from all others."""
        self._idents += 1
        return self._idents

    # -- who is who

    def notice(self, sessions: Iterable[Session], networks: Iterable[Network]) -> None:
        """Remember who has which address; before a container starts, so that nobody is missed."""
        self._networks = {network.name: network for network in networks}
        for session in sessions:
            holders = self._holders.setdefault(session.address, [])
            if holders and holders[-1] is session:
                continue
            others = [one for one in holders if one.container != session.container]
            self._holders[session.address] = [*others, session][-HOLDERS:]
            self._holders.move_to_end(session.address)
        while len(self._holders) > ADDRESSES:
            self._holders.popitem(last=False)

    def holder(self, address: str, at: float) -> Session | None:
        """Return who had an address at a time: the last one created before."""
        found = [one for one in self._holders.get(address, ()) if one.life.created <= at]
        return max(found, key=lambda one: one.life.created, default=None)

    def session(self, row: Row) -> Session | None:
        """Return the session of a row, as it was seen last."""
        held = self._holders.get(row.flow[0], ())
        return next((one for one in held if one.container == row.place.container), None)

    def neighbour(self, address: str) -> str | None:
        """Return the sandbox whose network an address is in."""
        found = (net.name for net in self._networks.values() if IPv4Address(address) in net.subnet)
        return next((name.removeprefix(NETWORK_PREFIX) for name in found), None)

    # -- what the writer tells

    def hear(self, records: Iterable[Heard]) -> None:
        """Take in records of the log, oldest first."""
        for record in records:
            row = self._row(record.flow, record.at)
            before = row.count
            row.logged += 1
            self._heard[record.flow] = record.at
            self._touch(row, record.at, before)

    def count(self, tallies: Iterable[Counted], now: float) -> None:
        """Take in the kernel's counters: all there are, as they are at this moment."""
        before, self._packets = self._packets, {}
        for tally in tallies:
            last = before.pop(tally.flow, None)
            if last is not None and (tally.left > last[0].left or tally.packets < last[0].packets):
                last[1].broken, last = True, None
            more = tally.packets - (last[0].packets if last is not None else 0)
            if last is not None and not more:
                self._packets[tally.flow] = (tally, last[1])
                continue
            # What was logged is the first of what is counted.
            at = self._heard.get(tally.flow, now) if last is None else now
            row = self._row(tally.flow, at)
            self._packets[tally.flow] = (tally, row)
            known = row.count
            row.counted += more
            row.elements += last is None
            self._touch(row, at, known)
        # What ended between two looks may have counted more after the first of them.
        for _, row in before.values():
            row.broken = True
        self._heard = {flow: at for flow, at in self._heard.items() if flow in self._packets}

    def totals(self, totals: Mapping[str, int], now: float) -> None:
        """Take in how many packets of each address were refused since it is counted."""
        for address, packets in totals.items():
            before = self._totals.get(address, 0)
            more = packets - before if packets >= before else packets
            session = self.holder(address, now)
            if more and session is not None:
                self._account(session.sandbox.id, session.project).add(session.container, more)
        self._totals = dict(totals)

    def _row(self, flow: Flow, at: float) -> Row:
        session = self.holder(flow[0], at)
        if session is None:
            place = Place(self.neighbour(flow[0]) or "-")
        else:
            place = Place(
                session.sandbox.id, session.project, session.service, session.session, session.container
            )
        check = session is not None and is_check(session, flow, at)
        account = self._account(place.sandbox, place.project)
        key = (place, flow, check)
        row = account.rows.get(key)
        if row is None:
            row = account.rows[key] = Row(self.next_ident(), place, flow, check, at, at)
            if len(account.rows) > ROWS:
                account.dropped += account.rows.popitem(last=False)[1].count
        return row

    def _touch(self, row: Row, at: float, before: int) -> None:
        row.last = max(row.last, at)
        if row.count != before:
            # The second account of the same packet is no news.
            row.number = self.next_number()
        rows = self.accounts[row.place.sandbox].rows
        key = (row.place, row.flow, row.check)
        if key in rows:
            rows.move_to_end(key)

    def _account(self, sandbox: str, project: str) -> Account:
        account = self.accounts.setdefault(sandbox, Account())
        account.project = project or account.project
        self.accounts.move_to_end(sandbox)
        while len(self.accounts) > SANDBOXES:
            self.accounts.popitem(last=False)
        return account

    # -- what is asked for

    def rows(self, after: int = 0) -> list[Row]:
        """Return the rows that changed after a number, the oldest change first."""
        found = [row for account in self.accounts.values() for row in account.rows.values()]
        return sorted((row for row in found if row.number > after), key=lambda row: row.number)

    def at_least(self, row: Row) -> bool:
        """Tell whether there may have been more packets than a row counts.

        There were not when the kernel's count of the whole session is what its rows have together.
        """
        if not row.doubtful:
            return False
        account = self.accounts.get(row.place.sandbox, Account())
        container = row.place.container
        return account.total.get(container) != account.listed().get(container)

    def of_session(self, container: str, sandbox: str) -> int:
        """Return how many packets of a session were refused, corral's own checks left out."""
        account = self.accounts.get(sandbox)
        if account is None:
            return 0
        rows = [row for row in account.rows.values() if row.place.container == container]
        listed = sum(row.count for row in rows)
        return max(account.total.get(container, 0), listed) - sum(row.count for row in rows if row.check)

    def of_sandbox(self, sandbox: str) -> tuple[int, int]:
        """Return packets refused to a sandbox without corral's checks, and how many of those no row has."""
        account = self.accounts[sandbox]
        listed = account.listed()
        known = {*listed, *account.total}
        total = sum(max(account.total.get(one, 0), listed.get(one, 0)) for one in known)
        # What was dropped is in the kernel's counts too, where there are any.
        total = max(total, sum(listed.values()) + account.dropped) + account.past
        checks = sum(row.count for row in account.rows.values() if row.check)
        return total - checks, total - sum(listed.values())


def is_check(session: Session, flow: Flow, at: float) -> bool:
    """Tell whether a refused packet is corral's own: what the checker and the gate try must be refused.

    Programs ask resolvers too, so only what comes while the gate is at work is taken for its question.
    """
    _, proto, port, destination = flow
    if session.purpose == VERIFY:
        return True
    gateway = str(session.network.gateway) if session.network is not None else ""
    asked = port == 53 and destination in {gateway, *session.life.tried}
    probed = port == PROBE_PORT and destination in session.life.tried
    started = session.life.started or session.life.created + START_LASTS
    return proto in (TCP, UDP) and (asked or probed) and at <= started + GATE_LASTS
