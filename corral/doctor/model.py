"""The table of checks: an id that never changes its meaning, what is looked at, what it means, what helps."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# The id of a look that failed itself.
PROBE_FAILED = "COR-099"


class Severity(enum.StrEnum):
    """BROKEN: sandboxes cannot start, or would not be protected. ADVICE: they do, and are."""

    BROKEN = "broken"
    ADVICE = "advice"


class CannotTell(Exception):
    """What a probe or a rule needs is not there, which another check reports; the text says what it is."""


@dataclass(frozen=True)
class Found:
    """What is wrong here. ``fix`` replaces the table's when this host needs another one."""

    text: str
    fix: str | None = None


Rule = Callable[..., Found | None]


@dataclass(frozen=True)
class Check:
    """One row. ``needs`` are the records (see ``records``) that the rule is called with, in order.

    ``probe`` says what is looked at, ``cause`` how it comes about and what it does to sandboxes, ``fix`` what
    to do, ``note`` how far it has been tried.
    """

    id: str
    title: str
    severity: Severity
    needs: tuple[type, ...]
    rule: Rule
    probe: str
    cause: str
    fix: str
    note: str = ""


class Table:
    """All checks, by id."""

    def __init__(self) -> None:
        self._checks: dict[str, Check] = {}

    def add(self, check: Check) -> None:
        """Add a row; an id is given once."""
        if check.id in self._checks:
            raise ValueError(f"{check.id} is given twice")
        self._checks[check.id] = check

    def check(
        self, ident: str, title: str, severity: Severity, *needs: type, **texts: Any
    ) -> Callable[[Rule], Rule]:
        """Decorate a rule with the rest of its row."""

        def decorate(rule: Rule) -> Rule:
            self.add(Check(ident, title, severity, needs, rule, **texts))
            return rule

        return decorate

    @property
    def checks(self) -> list[Check]:
        """The rows in the order of their ids."""
        return [self._checks[ident] for ident in sorted(self._checks)]
