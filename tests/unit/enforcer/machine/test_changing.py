"""What is allowed and denied by hand, in any order, with the service killed at any moment.

An upper bound kept outside: what was ever asked for may be open until a denial was confirmed; what was
confirmed as denied is closed from then on, whoever starts anew. Beside it the machine's own checks run.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from enforcer.netfilter.model import Element
from enforcer.netfilter.skeleton import PINS
from policy.declaration import Declaration
from policy.errors import CorralError
from tests.unit.enforcer.machine import checks
from tests.unit.enforcer.machine.player import Player
from tests.unit.enforcer.machine.world import Zone

POOLS = {
    "a.example": ("203.0.113.1", "203.0.113.2"),
    "b.example": ("203.0.113.3",),
    "c.example": ("203.0.113.5", "203.0.113.6"),
    "d.example": ("203.0.113.7",),
}
OWNER = {address: name for name, pool in POOLS.items() for address in pool}
PORTS = (443, 8443)
SEEDS = int(os.environ.get("CORRAL_CHANGING_SEEDS", "12"))
ENDED = 3.0  # seconds after which a temporary permission shows no more, while the service works


class Changing:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.player = Player(0.004, {name: pool[:1] for name, pool in POOLS.items()})
        self.world = self.player.world
        self.truths = [self.player.create(0, policy=0), self.player.create(1, policy=1)]
        self.may: dict[str, dict[str, set[int]]] = {}
        self.ends: dict[tuple[str, str, int], float] = {}
        self.declared: dict[str, dict[str, set[int]]] = {}
        for truth in self.truths:
            assert truth is not None
            own = {name.host: set(name.ports) for name in truth.declaration.names}
            self.declared[truth.address] = own
            self.may[truth.address] = {host: set(own.get(host, ())) for host in POOLS}
            # What its names are is for this test to say.
            truth.declaration = Declaration(host_services=truth.declaration.host_services)
        self.player.oracle.why_not = self.why_not  # type: ignore[method-assign]
        self.player.act(lambda: None, 1.0)
        self.sandbox = self.player.world.docker.inspects["c1"]["Config"]["Labels"]["io.corral.sandbox"]
        self.confirmed = {"allow": 0, "deny": 0, "refused": 0, "killed": 0}
        self.alive_since = 0.0

    def why_not(self, element: Element) -> str | None:
        host = OWNER.get(element.dst)
        if host is None or not self.player.oracle.address_may_stand(element.src, host, element.dst):
            return f"{host} has no such address any more"
        return None

    def request(self, work: Any, kill_at: int | None) -> str:
        """Play one request to its end, perhaps with a kill in the middle; return what came of it."""
        outcome: list[str] = []

        async def run() -> None:
            try:
                await work
            except CorralError as error:
                outcome.append(error.message)
            else:
                outcome.append("")

        service = self.world.service
        self.world.loop.create_task(run())
        if kill_at is not None:
            self.world.faults.kill_service = kill_at
        for _ in range(40):
            self.player.act(lambda: None, 1.0)
            self.check()
            if outcome or self.world.service is not service:
                break
        self.world.faults.kill_service = None
        if self.world.service is not service:
            self.confirmed["killed"] += 1
            self.alive_since = self.world.clock()
            return "killed"
        assert outcome, "a request was never answered"
        return outcome[0]

    def allow(self, kill_at: int | None) -> None:
        service = self.world.service
        assert service is not None
        host, port = self.random.choice(list(POOLS)), self.random.choice(PORTS)
        seconds = self.random.choice([None, 5.0, 40.0])
        for address, rows in self.may.items():
            rows[host].add(port)
            key = (address, host, port)
            end = float("inf") if seconds is None else self.world.clock() + 45 + seconds
            self.ends[key] = max(end, self.ends.get(key, 0.0))
        told = self.request(service.changes.allow(self.sandbox, host, (port,), seconds, False), kill_at)
        self.confirmed["allow" if not told else "refused"] += 1
        if not told:
            for truth in self.truths:
                assert truth is not None
                session = service.tracker.sessions[truth.ident]
                if seconds != 5.0:
                    assert port in {p for name in session.names if name.host == host for p in name.ports}

    def deny(self, kill_at: int | None) -> None:
        service = self.world.service
        assert service is not None
        host = self.random.choice(list(POOLS))
        having = {
            session.address
            for session in service.tracker.sessions.values()
            if any(name.host == host for name in session.names)
        }
        told = self.request(service.changes.deny(self.sandbox, host), kill_at)
        if told:
            return
        self.confirmed["deny"] += 1
        for address in having:
            self.may[address][host].clear()
            self.declared[address].pop(host, None)
            for port in PORTS:
                self.ends.pop((address, host, port), None)
        self.check()

    def rotate(self) -> None:
        name = self.random.choice(list(POOLS))
        kind = self.random.choice(["ok", "ok", "ok", "timeout", "nxdomain"])
        self.world.zones[name] = Zone(kind, (self.random.choice(POOLS[name]),))
        self.player.act(lambda: None, self.random.choice([0.1, 20.0, 61.0]))

    def check(self) -> None:
        now = self.world.clock()
        working = self.world.service is not None and now - self.alive_since > 10
        for element in checks.held(self.world, PINS):
            host = OWNER[element.dst]
            rows = self.may.get(element.src)
            assert rows is not None, element
            assert element.port in rows[host], f"{element} ({host}) was denied or never asked for"
            end = self.ends.get((element.src, host, element.port), float("inf"))
            declared = element.port in self.declared[element.src].get(host, ())
            assert declared or not working or now < end + ENDED, f"{element} ({host}) has ended"
        self.published_is_open()

    def published_is_open(self) -> None:
        if self.world.service is None:
            return
        elements = checks.held(self.world, PINS)
        for session in self.world.service.tracker.sessions.values():
            truth = next(one for one in self.truths if one is not None and one.ident == session.container)
            said = checks.hosts_file(truth)
            for name in session.names:
                for address in said.get(name.host, ()):
                    for port in name.ports:
                        assert Element(session.address, "tcp", port, address) in elements, (name, address)

    def step(self) -> None:
        while self.world.service is None:
            self.alive_since = self.world.clock()
            self.player.act(lambda: None, 2.0)
        what = self.random.choice(["allow", "allow", "deny", "rotate", "wait", "kill"])
        kill_at = self.random.randint(0, 6) if self.random.random() < 0.3 else None
        if what == "allow":
            self.allow(kill_at)
        elif what == "deny":
            self.deny(kill_at)
        elif what == "rotate":
            self.rotate()
        elif what == "kill":
            self.player.kill_service(self.random.choice([0.0, 5.0]))
            self.alive_since = self.world.clock()
            self.player.act(lambda: None, 2.0)
        else:
            self.player.act(lambda: None, self.random.choice([1.0, 30.0, 100.0]))
        self.check()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_was_denied_stays_closed_and_nothing_opens_unasked(seed: int) -> None:
    made = Changing(seed)
    try:
        for _ in range(30):
            made.step()
    finally:
        made.player.close()
    assert sum(made.confirmed.values()) > 0
