"""What the writer does with requests and with the kernel's changes. No sockets here.

It holds three things true: the skeleton stands, the sets hold exactly what living claims asked for, and an
answer is always what was read back.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from typing import Any

from enforcer.netfilter import claims as claiming
from enforcer.netfilter.claims import Claim
from enforcer.netfilter.kernel import Kernel, KernelError
from enforcer.netfilter.model import (
    HALF,
    NO_LIVES,
    PROTOCOL_VERSION,
    ApplyRequest,
    DeniedRequest,
    Element,
    Entry,
    Lives,
    Open,
    Refused,
    parse_apply,
    parse_denied,
)
from enforcer.netfilter.nflog import Log
from enforcer.netfilter.plan import Plan, Problem
from enforcer.netfilter.ports import ISOLATE, judge
from enforcer.netfilter.refusals import Refusals
from enforcer.netfilter.skeleton import HOST, PINS, TIMEOUT, Skeleton

log = logging.getLogger("corral.netfilter")

RENEW_BELOW = TIMEOUT // 2
HEAL_TRIES = 10
HEAL_DELAY = 0.05


def _off(left: int, life: int) -> bool:
    """Tell whether an element has to be renewed, or cut short; both numbers are seconds, off by rounding."""
    return left < min(RENEW_BELOW, life - 2) or left > life + 2


def _standing(problems: Iterable[Problem]) -> list[Problem]:
    # A port that is not isolated still meets the rules, or the bridge filter is a problem of its own.
    return [problem for problem in problems if problem.part not in ("hook", "port", "hold")]


class GiveUp(Exception):
    """The skeleton could not be mended; ``sent`` is what was tried. The process ends, the backstop stays."""


@dataclass
class Writer:
    """State of the writer: claims, and how the skeleton fared.

    ``claiming`` is off for the boot-time run, which leaves the sets of a running writer alone. ``save``
    receives the claims whenever they change. ``sleep`` and ``clock`` take and return seconds, ``wall`` is the
    time of day. ``journal`` is where refused packets are read from, if at all.
    """

    kernel: Kernel
    skeleton: Skeleton
    version: str
    permitted: tuple[IPv4Network, ...] = ()
    claims: dict[str, Claim] = field(default_factory=dict)
    save: Callable[[dict[str, Claim]], None] = lambda _claims: None
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    claiming: bool = True
    journal: Log | None = None
    wall: Callable[[], float] = time.time
    refusals: Refusals = field(default_factory=lambda: Refusals(os.urandom(8).hex()))
    heals: int = 0
    unsettled: int = 0
    _unsettled_since: float = 0.0
    _saved: dict[str, Claim] | None = None
    _mended: list[str] = field(default_factory=list)
    _failure: str = ""
    _sent: str = ""
    _isolated: set[int] = field(default_factory=set)
    _asked: dict[tuple[str, int], frozenset[Element]] = field(default_factory=dict)
    _counted: dict[int, tuple[frozenset[str], float]] = field(default_factory=dict)
    _opened: dict[int, dict[str, tuple[str, float]]] = field(default_factory=dict)
    _attached: frozenset[str] = frozenset()

    def _gateways(self) -> frozenset[str]:
        return frozenset(str(claim.gateway) for claim in self.claims.values())

    def _owners(self) -> frozenset[tuple[str, int]]:
        return frozenset((claim.bridge, claim.uid) for claim in self.claims.values())

    def audit(self) -> Plan:
        """Return what differs from the skeleton now."""
        wanted = (self._gateways(), self._owners()) if self.claiming else None
        return self.kernel.audit(self.skeleton, wanted)

    def look(self) -> Plan:
        """Bring the table's two sets up to the claims (nobody else writes them); return what else differs."""
        todo = self.audit()
        own = tuple(step for step in todo.steps if step.part == "claims")
        if own:
            self.kernel.carry_out(Plan((), own))
            todo = self.audit()
        return todo

    def mend(self, why: str) -> tuple[Problem, ...]:
        """Look once, write what is missing, and return the problems that remain.

        Others may be writing too, so the caller looks again after ``delay`` seconds while ``unsettled`` is
        not 0.

        Raises:
            GiveUp: ten looks in a row found something to mend.
        """
        tries = self.unsettled
        if tries >= HEAL_TRIES:
            what = f"the rules could not be mended in {tries} tries: {self._failure}"
            raise GiveUp(f"{what}\nsent:\n{self._sent}")
        try:
            todo = self.look()
            # A module that cannot be loaded is not worth dying for: nothing is granted meanwhile.
            if not todo.steps or (self.unsettled and all(s.kind in ("sysctl", "hold") for s in todo.steps)):
                self._settled(why)
                if not _standing(todo.problems):
                    self._reopen()
                return todo.problems
            if not tries:
                self._unsettled_since = self.clock()
            self.unsettled = tries + 1
            self._sent = "\n".join(step.text for step in todo.steps)
            self._failure = "they differ again each time"
            self.kernel.carry_out(todo)
            self._mended += [problem.text for problem in todo.problems if problem.healable]
            return self.audit().problems
        except KernelError as error:
            if not tries:
                self._unsettled_since = self.clock()
            self.unsettled = tries + 1
            self._failure, self._sent = str(error), error.sent or self._sent
            log.error("mending the rules failed (try %d): %s", self.unsettled, error)
            return (Problem("chains", f"the rules could not be mended: {error}"),)

    @property
    def delay(self) -> float:
        """Seconds until the next look while others seem to be writing: 50 ms, doubling."""
        return HEAL_DELAY * float(2 ** max(0, self.unsettled - 1))

    def _settled(self, why: str) -> None:
        if self._mended:
            self.heals += 1
            spent = (self.clock() - self._unsettled_since) * 1000
            log.warning("healed after %s in %.0f ms: %s", why, spent, "; ".join(self._mended))
        self.unsettled, self._mended = 0, []

    def heal(self, why: str) -> tuple[Problem, ...]:
        """Mend until it holds and return the problems that remain; waits in between.

        Raises:
            GiveUp: ten repairs did not hold.
        """
        problems = self.mend(why)
        while self.unsettled:
            self.sleep(self.delay)
            problems = self.mend(why)
        return problems

    def guard(self) -> tuple[Problem, ...]:
        """Isolate ports of sandboxes, put down links that lead around them, and return what remains.

        Raises:
            KernelError: interfaces cannot be read.
        """
        ports = self.kernel.ports()
        fixes = left = judge(ports)
        if fixes:
            self.kernel.set_ports(fixes)
            ports = self.kernel.ports()
            left = judge(ports)
        for fix in fixes:
            if fix in left:
                log.error("could not be mended: %s", fix.text)
            elif fix.act != ISOLATE or fix.port.index in self._isolated:
                log.warning("mended: %s", fix.text)
        self._isolated = {port.index for port in ports if port.ours and port.isolated}
        return tuple(Problem("port", fix.text) for fix in left)

    def prune(self) -> None:
        """Forget claims whose link died; remove elements that no claim covers or that nobody asked for.

        While it cannot be read who is open, such a claim stays, and its addresses are nobody else's.
        """
        try:
            held: dict[str, Open] | None = self.kernel.opened()
        except KernelError as error:
            log.error("who is open cannot be read, all else is pruned: %s", error)
            held = None
        living = claiming.living(self.claims, self.kernel.links())
        if living != self.claims and held is not None:
            log.info("claims gone with their links: %s", ", ".join(sorted(set(self.claims) - set(living))))
            self._adopt(living)
        for name in (PINS, HOST):
            stale, foreign = [], []
            for element in self.kernel.entries(name):
                claim = claiming.owner_of(living, element.src)
                if claim is None:
                    stale.append(element)
                elif element not in self._asked.get((name, claim.uid), (element,)):
                    foreign.append(element)
            self._withdraw(name, [*stale, *foreign])
            for element in foreign:
                what = f"{element.src} -> {element.dst}:{element.port}/{element.proto}"
                log.warning("removed from %s, where nobody asked for it: %s", name, what)
        if held is not None:
            self._prune_open(held)
        watched = self.kernel.denied()
        self.kernel.watch((), [src for src in watched if claiming.owner_of(self.claims, src) is None])

    def _prune_open(self, held: dict[str, Open]) -> None:
        attached = self.kernel.networks()
        if attached != self._attached and self.claiming:
            # A network that this host has come to is closed as soon as it is seen.
            self.look()
            self._attached = attached
        gone = []
        for source in held:
            claim = claiming.owner_of(self.claims, source)
            if claim is None or source not in self._opened.get(claim.uid, held):
                gone.append(source)
                log.info("%s reaches all public addresses no more", source)
        self.kernel.close_sources(gone)

    def _reopen(self) -> None:
        """Put back what went with our table, for the rest of its time."""
        wanted = {
            source: comment
            for uid, rows in self._opened.items()
            for source, (comment, until) in rows.items()
            if until > self.clock() and claiming.source_problem(self.claims, uid, source) is None
        }
        if wanted:
            held = self.kernel.opened()
            gone = {s: text for s, text in wanted.items() if s not in held or held[s].timeout == HALF}
            self.kernel.open(gone)

    def _sync_open(self, uid: int, wanted: dict[str, str], standing: bool) -> None:
        """Make ``wanted`` true; while the rules are not ``standing``, only take away."""
        held = self._open_of(uid)
        if not standing:
            known = held.keys() | self._opened.get(uid, {}).keys()
            wanted = {source: text for source, text in wanted.items() if source in known}
        until = self.clock() + TIMEOUT
        self._opened[uid] = {source: (comment, until) for source, comment in wanted.items()}
        self.kernel.close_sources([source for source in held if source not in wanted])
        put = {
            source: comment
            for source, comment in wanted.items()
            if source not in held or held[source].timeout < RENEW_BELOW or held[source].comment != comment
        }
        self.kernel.open(put if standing else {})

    def _open_of(self, uid: int) -> dict[str, Open]:
        return {source: row for source, row in self.kernel.opened().items() if self._is_of(uid, source)}

    def _adopt(self, claims: dict[str, Claim]) -> None:
        """Replace the claims. What was counted for one that is gone is nobody else's to see."""
        gone = [claim for bridge, claim in self.claims.items() if claims.get(bridge) != claim]
        if gone:
            # Before anybody else can have the same addresses.
            held = self.kernel.opened()
            self.kernel.close_sources([src for src in held if any(claim.covers(src) for claim in gone)])
        self.claims = claims
        if claims != self._saved:
            self.save(claims)
            self._saved = dict(claims)
        self.refusals.prune(claims)
        if gone:
            tallies = self.kernel.tallies()
            self.kernel.forget_tallies([t for t in tallies if any(claim.covers(t.src) for claim in gone)])
            sources = self.kernel.denied()
            self.kernel.watch((), [src for src in sources if any(claim.covers(src) for claim in gone)])

    def _withdraw(self, name: str, elements: list[Element]) -> None:
        if elements:
            self.kernel.change(name, {}, elements)
            self.kernel.forget_flows(elements)

    def _sync(self, name: str, uid: int, wanted: dict[Element, str], lives: Lives = NO_LIVES) -> None:
        held = self._mine(name, uid)
        self._asked[name, uid] = frozenset(wanted)
        self._withdraw(name, [element for element in held if element not in wanted])
        put = {
            element: comment
            for element, comment in wanted.items()
            if element not in held
            or held[element].comment != comment
            or _off(held[element].timeout, lives.get(element, TIMEOUT))
        }
        if put:
            self.kernel.change(name, put, (), lives)

    def _mine(self, name: str, uid: int) -> dict[Element, Entry]:
        own = {claim.bridge for claim in self.claims.values() if claim.uid == uid}
        found = {}
        for element, entry in self.kernel.entries(name).items():
            claim = claiming.owner_of(self.claims, element.src)
            if claim is not None and claim.bridge in own:
                found[element] = entry
        return found

    def apply(self, uid: int, request: ApplyRequest) -> dict[str, Any]:
        """Make the caller's desired state true and answer with what the kernel holds."""
        admitted, refused = claiming.admit(self.claims, self.kernel.links(), uid, request.sandboxes)
        self._adopt(admitted)
        self.prune()
        # A repair under way has a time for its next step: requests neither spend its tries nor put it off.
        problems = self.look().problems if self.unsettled else self.mend("a change of claims")
        problems += self.guard()
        pins, host, more = claiming.vet(
            self.claims, uid, request.pins, request.host, self.permitted, self.kernel.host_addresses()
        )
        opened, unfit = claiming.vet_open(self.claims, uid, request.open)
        more += unfit
        standing = _standing(problems)
        if standing:
            more += [f"nothing new is granted: {problem.text}" for problem in standing]
            # A repair under way takes nothing away that is still wanted (the backstop holds meanwhile); what
            # cannot be mended, or opens a bridge to itself, does.
            unsafe = any(not problem.healable or problem.part == "bridge-filter" for problem in standing)
            pins = {} if unsafe else self._held_of(PINS, uid, pins)
            host = {} if unsafe else self._held_of(HOST, uid, host)
            opened = {} if unsafe else opened
        self._sync(PINS, uid, pins, request.lives)
        self._sync(HOST, uid, host)
        self._sync_open(uid, opened, not standing)
        sources = {element.src for element in (*pins, *host)} | opened.keys()
        counted, _ = self._counted.get(uid, (frozenset(), 0.0))
        self.kernel.watch(sources, [src for src in self._watched(uid) if src not in sources | counted])
        return self.read(uid, problems) | {"refused": refused + more}

    def _held_of(self, name: str, uid: int, wanted: dict[Element, str]) -> dict[Element, str]:
        held = self._mine(name, uid)
        return {element: text for element, text in wanted.items() if element in held}

    def _watched(self, uid: int) -> list[str]:
        found = []
        for source in self.kernel.denied():
            claim = claiming.owner_of(self.claims, source)
            if claim is not None and claim.uid == uid:
                found.append(source)
        return found

    def read(self, uid: int, problems: tuple[Problem, ...] | None = None) -> dict[str, Any]:
        """Answer with what the kernel holds for the caller, and how the skeleton stands."""
        if problems is None:
            problems = self.audit().problems + self.guard()
        own = set(self._watched(uid))
        return {
            "ok": True,
            "pins": [entry.row() for entry in self._mine(PINS, uid).values()],
            "host": [entry.row() for entry in self._mine(HOST, uid).values()],
            "open": [row.row() for row in self._open_of(uid).values() if row.timeout != HALF],
            "denied": {src: count for src, count in self.kernel.denied().items() if src in own},
            "problems": [[problem.part, problem.text] for problem in problems],
            "driver": self.kernel.driver,
            "refused": [],
        }

    def hear(self) -> None:
        """Take in what the kernel logged."""
        if self.journal is not None:
            self.refusals.add(self.journal.read(), self.claims, self.wall())

    def denied(self, uid: int, request: DeniedRequest) -> dict[str, Any]:
        """Answer with what was refused to the caller's sandboxes; from now on ``sources`` are counted."""
        own = frozenset(source for source in request.sources if self._is_of(uid, source))
        known, renewed = self._counted.get(uid, (frozenset(), 0.0))
        if own != known or self.clock() - renewed > RENEW_BELOW:
            self.kernel.watch(own, ())
            self._counted[uid] = (own, self.clock())
        answer = {
            "ok": True,
            **self.refusals.since(uid, request),
            "totals": {src: count for src, count in self.kernel.denied().items() if self._is_of(uid, src)},
            "problem": "nobody listens to the log" if self.journal is None else self.journal.problem,
        }
        if request.tallies:
            rows = [tally.row() for tally in self.kernel.tallies() if self._is_of(uid, tally.src)]
            answer["tallies"] = rows
        return answer

    def _is_of(self, uid: int, source: str) -> bool:
        claim = claiming.owner_of(self.claims, source)
        return claim is not None and claim.uid == uid

    def handle(self, uid: int, body: Any) -> dict[str, Any]:
        """Answer one request of a peer with that uid. Never raises but GiveUp: errors are answers."""
        try:
            if not isinstance(body, dict) or body.get("v") != PROTOCOL_VERSION:
                raise Refused(f"this writer speaks version {PROTOCOL_VERSION}; run: corral install")
            operation = body.get("op")
            if operation == "apply":
                answer = self.apply(uid, parse_apply(body))
            elif operation == "read":
                answer = self.read(uid)
            elif operation == "denied":
                answer = self.denied(uid, parse_denied(body))
            elif operation == "hello":
                answer = {"ok": True, "skeleton": self.skeleton.digest, "heals": self.heals}
            else:
                raise Refused("op must be hello, read, apply or denied")
        except Refused as error:
            answer = {"ok": False, "error": str(error)}
        except KernelError as error:
            log.error("request of uid %d failed: %s", uid, error)
            answer = {"ok": False, "error": str(error)}
        except GiveUp:
            raise
        except Exception as error:
            # Whoever may ask must not be able to end the process that keeps the rules.
            log.exception("request of uid %d failed", uid)
            answer = {"ok": False, "error": f"internal error: {type(error).__name__}"}
        return {"v": PROTOCOL_VERSION, "version": self.version, **answer}
