"""The real writer on the kernel in memory, as a process that can be killed, and the client that asks it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from enforcer.netfilter import claims as claiming
from enforcer.netfilter.claims import Claim
from enforcer.netfilter.fake import FakeKernel
from enforcer.netfilter.kernel import KernelError
from enforcer.netfilter.model import NO_LIVES, PROTOCOL_VERSION, Element, Entry, Lives, Open
from enforcer.netfilter.plan import Plan, Wanted, plan, tag_of
from enforcer.netfilter.ports import Port
from enforcer.netfilter.refusals import Tally
from enforcer.netfilter.skeleton import DOCKER_USER, Skeleton
from enforcer.netfilter.writer import GiveUp, Writer
from enforcer.writerclient import WriterClient
from policy.errors import EnforcerError
from tests.unit.enforcer.machine.faults import Faults, WriterKilled
from tests.unit.enforcer.machine.loop import VirtualLoop

SKELETON = Skeleton()
SETTLE, RESTART, AUDIT_EVERY, FILTER_EVERY = 0.02, 0.1, 30.0, 1.0
_plans: dict[Any, Plan] = {}
_checked: set[Any] = set()


class WatchedKernel(FakeKernel):
    """Counts ``writes``, notes ``violations``, and fails and kills where it is told to.

    ``moved`` is called when rules were changed, by whomever.
    """

    def __init__(self, clock: Callable[[], float], faults: Faults) -> None:
        super().__init__(clock)
        self.faults = faults
        self.writes: list[str] = []
        self.violations: list[str] = []
        self.moved: Callable[[], None] = lambda: None
        self.tables[(4, "filter")][DOCKER_USER] = ["-i lo -j RETURN"]
        self.tables[(4, "filter")]["FORWARD"] = [f"-j {DOCKER_USER}", "-i docker0 -j ACCEPT"]
        self.tables[(4, "filter")]["INPUT"] = ["-p tcp --dport 22 -j ACCEPT"]
        self.tables[(4, "nat")]["POSTROUTING"] = ["-s 172.17.0.0/16 -j MASQUERADE"]
        self.tables[(6, "filter")]["FORWARD"] = ["-i lo -j ACCEPT"]

    def _key(self) -> Any:
        return (
            tuple((name, tuple(lines)) for chains in self.tables.values() for name, lines in chains.items()),
            tuple(self.backstop.items()) if self.backstop is not None else None,
            self.gateways,
            self.owners,
            self.closed,
            self._networks(),
            tuple(self.sets),
            self.sources is None,
            self.bridge_filter,
        )

    def difference(self, wanted: Wanted | None) -> Plan:
        """Return what differs from the skeleton, asking nobody for permission to fail."""
        key = (self._key(), wanted)
        found = _plans.get(key)
        if found is None:
            if len(_plans) > 20000:
                _plans.clear()
            found = _plans[key] = plan(SKELETON, self.observe(), wanted)
        return found

    def foreign(self) -> dict[tuple[int, str, str], list[str]]:
        """Return the rules that are not ours, in their order."""
        return {
            (family, table, chain): found
            for (family, table), chains in self.tables.items()
            for chain, lines in chains.items()
            if not chain.startswith("CORRAL-") and (found := [line for line in lines if tag_of(line) is None])
        }

    def standing(self) -> list[str]:
        """Return what is wrong with the skeleton, Docker's own part and the claims apart."""
        problems = self.difference(None).problems
        return [problem.text for problem in problems if problem.part not in ("hook", "claims")]

    # -- see Kernel

    def links(self) -> Any:
        self.faults.call("netlink", "links")
        return super().links()

    def host_addresses(self) -> frozenset[str]:
        self.faults.call("netlink", "addresses")
        return super().host_addresses()

    def audit(self, skeleton: Skeleton, wanted: Wanted | None) -> Plan:
        self.faults.call("tool", "audit")
        return self.difference(wanted)

    def carry_out(self, todo: Plan) -> None:
        for step in todo.steps:
            self.faults.call("tool", f"{step.kind} {step.part}")
            self.faults.writer_writes(f"before {step.kind} {step.part}")
            self.writes.append(f"{step.kind} {step.part}")
            super().carry_out(Plan((), (step,)))
            self.moved()
            self.faults.writer_writes(f"after {step.kind} {step.part}")

    def ports(self) -> tuple[Port, ...]:
        self.faults.call("netlink", "ports")
        return super().ports()

    def tallies(self) -> list[Tally]:
        self.faults.call("netlink", "tallies")
        return super().tallies()

    def forget_tallies(self, gone: Iterable[Tally]) -> None:
        self.faults.call("netlink", "forget tallies")
        super().forget_tallies(gone)

    def entries(self, name: str) -> dict[Element, Entry]:
        self.faults.call("netlink", "entries")
        return super().entries(name)

    def change(
        self, name: str, put: Mapping[Element, str], drop: Iterable[Element], lives: Lives = NO_LIVES
    ) -> None:
        for element, comment in put.items():
            self.faults.call("netlink", "add")
            self.faults.writer_writes(f"before adding {element}")
            self.writes.append(f"add {name} {element}")
            if element not in self._living(name) and (broken := self.standing()):
                self.violations.append(f"{element} was added while {broken}")
            super().change(name, {element: comment}, (), lives)
        for element in drop:
            self.faults.call("netlink", "delete")
            self.faults.writer_writes(f"before deleting {element}")
            self.writes.append(f"delete {name} {element}")
            super().change(name, {}, [element])

    def denied(self) -> dict[str, int]:
        self.faults.call("netlink", "denied")
        return super().denied()

    def watch(self, sources: Iterable[str], forget: Iterable[str]) -> None:
        for source in sources:
            self.faults.call("netlink", "watch")
            if self.sources is not None and source not in self.sources:
                self.writes.append(f"watch {source}")
            super().watch([source], ())
        for source in forget:
            self.faults.call("netlink", "forget")
            self.writes.append(f"forget {source}")
            super().watch((), [source])

    def networks(self) -> frozenset[str]:
        self.faults.call("netlink", "networks")
        return super().networks()

    def opened(self) -> dict[str, Open]:
        self.faults.call("netlink", "opened")
        return super().opened()

    def open(self, sources: Mapping[str, str]) -> None:
        for source, comment in sources.items():
            self.faults.call("netlink", "open")
            self.faults.writer_writes(f"before opening {source}")
            self.writes.append(f"open {source}")
            if source not in self._living_sources() and (broken := self.standing()):
                self.violations.append(f"{source} was opened while {broken}")
            super().open({source: comment})

    def close_sources(self, sources: Iterable[str]) -> None:
        for source in sources:
            self.faults.call("netlink", "close")
            self.writes.append(f"close {source}")
            super().close_sources([source])

    def forget_flows(self, elements: Iterable[Element]) -> None:
        self.faults.call("netlink", "flows")
        super().forget_flows(elements)

    def _check(self, table: dict[str, list[str]], text: str) -> None:
        # The skeleton's own lines were checked once, against the chains and sets that are there.
        key = (text, frozenset(table), frozenset(self.sets), self.sources is None)
        if key not in _checked:
            super()._check(table, text)
            _checked.add(key)


class WriterProcess:
    """``corral-netfilter serve``: notifications and timers as in its server, on the loop's clock.

    ``disk`` is its claims file. ``starts`` counts how often systemd had to start it.
    """

    def __init__(self, kernel: WatchedKernel, loop: VirtualLoop, faults: Faults) -> None:
        self.kernel = kernel
        self.loop = loop
        self.faults = faults
        self.disk = "[]"
        self.starts = 0
        self.writer: Writer | None = None
        self._timers: list[Any] = []
        self._audit_due: Any = None
        kernel.moved = self.rules_moved
        self.start()

    def _save(self, claims: dict[str, Claim]) -> None:
        self.faults.call("claims", "save")
        self.faults.writer_writes("before the claims")
        self.disk = json.dumps(claiming.to_rows(claims))
        self.faults.writer_writes("after the claims")

    def start(self) -> None:
        """What systemd starts: heal, prune, serve."""
        self.starts += 1
        claims = claiming.from_rows(json.loads(self.disk))
        made = Writer(
            self.kernel,
            SKELETON,
            "test",
            claims=claims,
            save=self._save,
            sleep=lambda _s: None,
            clock=self.loop.time,
        )
        self.writer = made

        def begin() -> None:
            try:
                made.heal("the start")
                made.guard()
                made.prune()
            except KernelError as error:
                raise GiveUp(str(error)) from error
            self._later(AUDIT_EVERY, self._timed_audit)

        self._guard(begin)

    def kill(self) -> None:
        """kill -9, and systemd's next start."""
        for timer in self._timers:
            timer.cancel()
        self._timers, self._audit_due, self.writer = [], None, None
        self.loop.outside(RESTART, self.start)

    def _later(self, delay: float, act: Callable[[], None]) -> Any:
        timer = self.loop.outside(delay, lambda: self._guard(act))
        self._timers = [kept for kept in self._timers if not kept.cancelled() and kept.when() > self.loop.now]
        self._timers.append(timer)
        return timer

    def _guard(self, act: Callable[[], None]) -> None:
        try:
            act()
        except (WriterKilled, GiveUp):
            self.kill()

    @property
    def repairing(self) -> bool:
        """Whether a look at the rules is about to happen, or the start of a new process."""
        return self.writer is None or self._audit_due is not None

    def rules_moved(self) -> None:
        """A notification of nf_tables."""
        if self.writer is not None and self._audit_due is None:
            self._audit_due = self._later(SETTLE, self._audit)

    def links_moved(self) -> None:
        """A notification of rtnetlink."""
        if self.writer is not None:
            self._later(SETTLE, self._prune)

    def filter_moved(self) -> None:
        """Nobody tells that bridge filtering was switched off; it is looked at once a second."""
        if self.writer is not None:
            self._later(FILTER_EVERY, self._filter)

    def _filter(self) -> None:
        if not self.kernel.filtering():
            self.rules_moved()
            self._later(FILTER_EVERY, self._filter)

    def _timed_audit(self) -> None:
        self._later(AUDIT_EVERY, self._timed_audit)
        self._audit()

    def _audit(self) -> None:
        self._audit_due = None
        writer = self.writer
        assert writer is not None
        writer.mend("a change by others")
        self._look_again(writer)
        self._prune()

    def _look_again(self, writer: Writer) -> None:
        if writer.unsettled and self._audit_due is None:
            self._audit_due = self._later(writer.delay, self._audit)

    def _prune(self) -> None:
        if self.writer is not None:
            try:
                self.writer.prune()
            except KernelError:
                self._later(1.0, self._prune)

    def handle(self, uid: int, body: Any) -> dict[str, Any]:
        """One request over the socket; EnforcerError when the process is not there, or dies over it."""
        writer = self.writer
        if writer is None:
            raise EnforcerError("the writer does not answer: Connection refused")
        try:
            answer = writer.handle(uid, body)
        except (WriterKilled, GiveUp):
            self.kill()
            raise EnforcerError("the writer broke off its answer") from None
        self._look_again(writer)
        return answer


class InProcessClient(WriterClient):
    """The service's client without a socket; a request or its answer can be lost."""

    def __init__(self, process: WriterProcess, uid: int, faults: Faults) -> None:
        self._process, self._uid, self._faults = process, uid, faults

    def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        where = str(body["op"])
        self._faults.call("request", where)
        self._faults.service_writes(f"before {where}")
        answer = self._process.handle(self._uid, {"v": PROTOCOL_VERSION, **body})
        self._faults.service_writes(f"after {where}")
        self._faults.call("answer", where)
        if not answer.get("ok"):
            raise EnforcerError(f"the writer refused: {answer.get('error')}")
        return answer
