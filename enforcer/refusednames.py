"""Names that sandboxes asked for and did not get, through a proxy or of the answerer. Pure.

A name is no packet: what is counted here is in no account of the kernel, and nothing there is counted here.
Who asks is an untrusted program, so a name is kept only in the one form that names are compared in, which no
terminal and no log can take for anything else; what has no such form is counted and not kept. Everything is
bounded: rows of one sandbox, sandboxes, and rows of all sandboxes together.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from enforcer.denied import SANDBOXES, Ledger, Place
from policy.hosts import HostError, canonical_wire_name

NAMES = 2000  # rows of one sandbox
ALL_NAMES = 20000  # rows of all sandboxes of a user

REASONS = frozenset(
    {
        "denied",
        "resolve",
        "refused-address",
        "sni-mismatch",
        "no-sni",
        "not-tls",
        "bad-hello",
        "second-hello",
        "busy",
    }
)

_Key = tuple[Place, str, int, str, bool]


@dataclass
class AskedRow:
    """One name, port and reason of one place. ``number`` grows with each change; ``ident`` stays.

    ``port`` 0: asked by DNS. ``check``: by ``corral verify``, not by the program.
    """

    ident: int
    place: Place
    name: str
    port: int
    reason: str
    check: bool
    first: float
    last: float
    number: int = 0
    count: int = 0


@dataclass
class AskedAccount:
    """What one sandbox asked for. ``total``: all of it, ``checks``: of that by ``corral verify``."""

    project: str = ""
    rows: OrderedDict[_Key, AskedRow] = field(default_factory=OrderedDict)
    total: int = 0
    checks: int = 0

    @property
    def unlisted(self) -> int:
        """How many questions no row has: the row had to go, or what was asked for was no name."""
        return self.total - sum(row.count for row in self.rows.values())


class RefusedNames:
    """Rows of all sandboxes of a user, which share their numbers with those of ``ledger``."""

    def __init__(self, ledger: Ledger) -> None:
        self.accounts: OrderedDict[str, AskedAccount] = OrderedDict()
        self._ledger = ledger
        self._size = 0

    def ask(self, place: Place, name: str, port: int, reason: str, at: float, *, check: bool = False) -> None:
        """Take in one question that was refused; never raises, whatever the question was."""
        account = self._account(place)
        account.total += 1
        account.checks += check
        try:
            wire = canonical_wire_name(name)
        except HostError:
            return
        if reason not in REASONS or not 0 <= port < 65536:
            return
        key = (place, wire, port, reason, check)
        row = account.rows.get(key)
        if row is None:
            row = AskedRow(self._ledger.next_ident(), place, wire, port, reason, check, at, at)
            account.rows[key] = row
            self._size += 1
            self._shrink(account)
        row.count += 1
        row.last = max(row.last, at)
        row.number = self._ledger.next_number()
        account.rows.move_to_end(key)

    def _account(self, place: Place) -> AskedAccount:
        account = self.accounts.setdefault(place.sandbox, AskedAccount())
        account.project = place.project or account.project
        self.accounts.move_to_end(place.sandbox)
        while len(self.accounts) > SANDBOXES:
            self._size -= len(self.accounts.popitem(last=False)[1].rows)
        return account

    def _shrink(self, account: AskedAccount) -> None:
        if len(account.rows) > NAMES:
            self._forget(account)
        while self._size > ALL_NAMES:
            # Who asks for most pays: one sandbox cannot make those of another be forgotten.
            self._forget(max(self.accounts.values(), key=lambda one: len(one.rows)))

    def _forget(self, account: AskedAccount) -> None:
        account.rows.popitem(last=False)
        self._size -= 1

    def rows(self, after: int = 0) -> list[AskedRow]:
        """Return the rows that changed after a number, the oldest change first."""
        found = [row for account in self.accounts.values() for row in account.rows.values()]
        return sorted((row for row in found if row.number > after), key=lambda row: row.number)
