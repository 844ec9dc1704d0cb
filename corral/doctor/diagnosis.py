"""Running the probes, applying the rules, and telling what came of it."""

from __future__ import annotations

import enum
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from corral import __version__
from corral.console import BOLD, RED, YELLOW, paint
from corral.doctor import rules_engine, rules_fence, rules_host, rules_service
from corral.doctor.effects import PROBES, Host, Probe
from corral.doctor.model import PROBE_FAILED, CannotTell, Check, Found, Severity
from corral.doctor.table import TABLE
from policy.errors import CorralError

# Imported for the rows they add.
RULES = (rules_engine, rules_fence, rules_host, rules_service)
# Seconds all probes may take together, each at the same time as the others.
PATIENCE = 20.0


@TABLE.check(
    PROBE_FAILED,
    "a look at this host failed",
    Severity.BROKEN,
    probe="The probes of all other checks: each has to end in time and without an error.",
    cause="What the checks named with it would have found is not known.",
    fix="the error says; corral -v doctor shows more. If it does not help you, please report it",
    note="Tested with probes made to fail.",
)
def probes_fail() -> Found | None:
    """The row of the table; ``diagnose`` finds these itself."""
    return None


class State(enum.StrEnum):
    """OK: looked at and fine. FOUND: wrong. UNKNOWN: could not be looked at, for a reason found elsewhere."""

    OK = "ok"
    FOUND = "found"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Result:
    """What came of one check. ``text`` is what was found, or why nothing is known."""

    check: Check
    state: State
    text: str = ""
    fix: str = ""

    @property
    def broken(self) -> bool:
        """Whether sandboxes cannot start or would not be protected."""
        return self.state is State.FOUND and self.check.severity is Severity.BROKEN


def select(idents: Sequence[str]) -> list[Check]:
    """Return the named checks, all without names.

    Raises:
        LookupError: there is no such check.
    """
    known = {check.id: check for check in TABLE.checks}
    wanted = [ident.upper() for ident in idents]
    for ident in wanted:
        if ident not in known:
            raise LookupError(f"there is no check {ident}; docs/doctor.md lists them")
    return [known[ident] for ident in sorted(set(wanted) or known)]


@dataclass(frozen=True)
class _Failed:
    """A probe that raised or is late."""

    text: str


def look(
    host: Host,
    wanted: Iterable[type],
    probes: Mapping[type, Probe],
    patience: float = PATIENCE,
    clock: Callable[[], float] = time.monotonic,
) -> dict[type, Any]:
    """Run probes at the same time; return each one's record, CannotTell, or _Failed.

    A probe that does not end in time is left behind in its thread, which does not keep the process.
    """
    heard: queue.SimpleQueue[tuple[type, Any]] = queue.SimpleQueue()

    def run(kind: type) -> None:
        try:
            heard.put((kind, probes[kind](host)))
        except CannotTell as unknown:
            heard.put((kind, unknown))
        except CorralError as error:
            heard.put((kind, _Failed(error.message)))
        except Exception as error:
            heard.put((kind, _Failed(f"{type(error).__name__}: {error}")))

    found: dict[type, Any] = {}
    kinds = set(wanted)
    for kind in kinds:
        threading.Thread(target=run, args=(kind,), daemon=True).start()
    end = clock() + patience
    while len(found) < len(kinds) and (left := end - clock()) > 0:
        try:
            kind, record = heard.get(timeout=left)
        except queue.Empty:
            break
        found[kind] = record
    late = _Failed(f"did not end within {patience:g} s")
    return {kind: found.get(kind, late) for kind in kinds}


def diagnose(
    host: Host,
    checks: Sequence[Check],
    probes: Mapping[type, Probe] = PROBES,
    patience: float = PATIENCE,
) -> list[Result]:
    """Make these checks, in their order."""
    records = look(host, {need for check in checks for need in check.needs}, probes, patience)
    results = [_apply(check, records) for check in checks if check.id != PROBE_FAILED]
    row = next(check for check in TABLE.checks if check.id == PROBE_FAILED)
    failed = [
        Result(row, State.FOUND, f"{probes[kind].__name__}: {record.text}", row.fix)
        for kind, record in records.items()
        if isinstance(record, _Failed)
    ]
    failed += [
        Result(row, State.FOUND, f"{result.check.id}: {result.text}", row.fix)
        for result in results
        if result.state is State.UNKNOWN and result.text.startswith(RAISED)
    ]
    if not failed and row in checks:
        failed = [Result(row, State.OK)]
    return results + sorted(failed, key=lambda result: result.text)


RAISED = "the rule raised "


def _apply(check: Check, records: Mapping[type, Any]) -> Result:
    given = [records[need] for need in check.needs]
    for record in given:
        if isinstance(record, CannotTell):
            return Result(check, State.UNKNOWN, str(record))
        if isinstance(record, _Failed):
            return Result(check, State.UNKNOWN, "a probe failed")
    try:
        found = check.rule(*given)
    except CannotTell as unknown:
        return Result(check, State.UNKNOWN, str(unknown))
    except Exception as error:
        return Result(check, State.UNKNOWN, f"{RAISED}{type(error).__name__}: {error}")
    if found is None:
        return Result(check, State.OK)
    return Result(check, State.FOUND, found.text, found.fix or check.fix)


def exit_code(results: Iterable[Result]) -> int:
    """Return 1 when something is broken, else 0."""
    return int(any(result.broken for result in results))


def body(results: Sequence[Result]) -> dict[str, Any]:
    """Return everything, for programs."""
    rows = [
        {
            "id": result.check.id,
            "title": result.check.title,
            "severity": result.check.severity.value,
            "state": result.state.value,
            "found": result.text if result.state is State.FOUND else None,
            "unknown": result.text if result.state is State.UNKNOWN else None,
            "probe": result.check.probe,
            "cause": result.check.cause,
            "fix": result.fix or result.check.fix,
        }
        for result in results
    ]
    return {"version": __version__, **_count(results), "checks": rows}


def _count(results: Sequence[Result]) -> dict[str, int]:
    found = [result for result in results if result.state is State.FOUND]
    return {
        "ok": sum(result.state is State.OK for result in results),
        "broken": sum(result.broken for result in found),
        "advice": sum(not result.broken for result in found),
        "unknown": sum(result.state is State.UNKNOWN for result in results),
    }


def render(results: Sequence[Result], *, every: bool, colour: bool) -> str:
    """Return the text for people: what is wrong, broken first; with ``every`` what is not as well."""
    order = {Severity.BROKEN: 0, Severity.ADVICE: 1}
    found = [result for result in results if result.state is State.FOUND]
    blocks = [
        _block(result, colour)
        for result in sorted(found, key=lambda r: (order[r.check.severity], r.check.id))
    ]
    if every:
        blocks += [
            f"{result.check.id} fine\n  not so: {result.check.title}\n  looked at: {result.check.probe}"
            for result in results
            if result.state is State.OK
        ]
    unknown: dict[str, list[str]] = {}
    for result in results:
        if result.state is State.UNKNOWN:
            unknown.setdefault(result.text, []).append(result.check.id)
    lines = [f"not checked: {', '.join(idents)} ({reason})" for reason, idents in unknown.items()]
    count = _count(results)
    lines.append(
        f"{len(results)} checks: {count['ok']} fine, {count['broken']} broken, {count['advice']} advice, "
        f"{count['unknown']} not checked"
    )
    return "\n\n".join([*blocks, "\n".join(lines)])


def _block(result: Result, colour: bool) -> str:
    broken = result.broken
    head = f"{result.check.id} {result.check.severity.value}: {result.check.title}"
    found = result.text.replace("\n", "\n    ")
    return "\n".join(
        (
            paint(paint(head, BOLD, colour), RED if broken else YELLOW, colour),
            f"  found: {found}",
            f"  cause: {result.check.cause}",
            f"  fix: {result.fix}",
        )
    )
