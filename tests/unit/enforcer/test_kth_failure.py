"""The k-th call to anything outside fails, for every k, and each process dies between any two of its writes.

While it happens nothing is open that the policy does not allow and no session becomes ready with less than its
policy; afterwards everything converges (the checks are the machine's, see ``machine/checks.py``).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import dns.exception
import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest

from enforcer import pins
from enforcer.resolver import Resolver, Server
from tests.unit.enforcer.machine.faults import ERRORS, Faults
from tests.unit.enforcer.machine.player import Player
from tests.unit.enforcer.machine.world import RECONCILE, World, Zone

A, B, C = ("203.0.113.1",), ("203.0.113.2", "203.0.113.3"), ("203.0.113.3", "203.0.113.4")
KINDS = ("engine", "request", "answer", "netlink", "tool", "file", "claims", "dns")
KILLS = ("kill_service", "kill_writer")
MOST = 2000


class WireWorld(World):
    """Names are asked for with the real resolver; what fails is one datagram."""

    def __init__(self) -> None:
        self.how: Callable[[], BaseException] = TimeoutError

        def resolver(servers: tuple[Server, ...], clock: Callable[[], float]) -> Resolver:
            return Resolver(servers, clock, query=self.exchange)

        super().__init__(0.004, make_resolver=resolver)

    async def exchange(
        self, query: dns.message.Message, _server: Server, _timeout: float
    ) -> dns.message.Message:
        name = query.question[0].name.to_text(omit_final_dot=True)
        zone = self.zones[name]
        await asyncio.sleep(zone.latency)
        try:
            self.faults.call("dns", name)
        except TimeoutError:
            raise self.how() from None
        answer = dns.message.make_response(query)
        answer.answer.append(dns.rrset.from_text(f"{name}.", zone.ttl, "IN", "A", *zone.addresses))
        return dns.message.from_wire(answer.to_wire())


def start(player: Player) -> None:
    player.create(0, policy=1)
    player.act(lambda: None, 1.0)
    player.deed(0, "start")


def refresh(player: Player) -> None:
    player.world.zones["a.example"] = Zone("ok", C)
    player.world.zones["b.example"] = Zone("ok", A)
    player.act(lambda: player.world.service and player.world.service.names.step(pins.Refresh()), 1.0)


def withdraw(player: Player) -> None:
    service, ident = player.world.service, player.slots[0]

    def ask() -> None:
        if service is not None:
            player.world.loop.create_task(service.withdraw(ident))

    player.act(ask, 0.2)
    player.deed(0, "destroy")


def die(player: Player) -> None:
    player.deed(0, "die")
    player.deed(0, "destroy")


def reconnect(player: Player) -> None:
    player.toggle_docker(kills=True)
    player.toggle_docker()
    player.act(lambda: None, 0.5)
    player.create(1, policy=2)


def flush(player: Player) -> None:
    player.vandalise("flush-user")
    player.vandalise("ruleset")
    player.meddle("flush")
    # The sets are looked at with the next full pass.
    player.act(lambda: None, RECONCILE + 0.5)


def network(player: Player) -> None:
    """A sandbox's network goes and comes: the writer's claims change."""
    player.toggle_box(1)
    player.toggle_box(1)
    player.create(4, policy=0)


SCENARIOS: dict[str, tuple[Callable[[Player], None], ...]] = {
    "start": (start,),
    "refresh": (start, refresh),
    "withdraw": (start, withdraw),
    "die": (start, die),
    "reconnect": (start, reconnect),
    "flush": (start, flush),
    "network": (start, network),
}


def begin(name: str) -> Player:
    """Return a player for whom everything before the last act of a scenario has gone well."""
    random.seed(0)
    player = Player(zones={"a.example": A, "b.example": B, "c.example": A}, world=WireWorld())
    for act in SCENARIOS[name][:-1]:
        act(player)
    player.act(lambda: None, 0.5)
    return player


def finish(player: Player) -> None:
    """Everything has to agree, and who may start is told so, or why not."""
    player.come_to_rest()
    for ident, told in player.world.starts.items():
        assert told.answer is not None or told.error, f"{ident} was told nothing"
    for ident in player.slots.values():
        truth = player.oracle.truths.get(ident)
        if truth is not None and truth.deserving:
            again = player.world.wait_ready(ident)
            player.act(lambda: None, 0.5)
            assert again.answer is not None, again.error


def calls(name: str, kind: str) -> int:
    """Return how many calls of a kind the last act of a scenario makes when nothing fails."""
    player = begin(name)
    try:
        before = player.world.faults.counts[kind]
        SCENARIOS[name][-1](player)
        count = player.world.faults.counts[kind] - before
        assert all(told.answer is not None for told in player.world.starts.values())
        finish(player)
        return count
    finally:
        player.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_kth_failing_call_is_survived_for_every_k(name: str, kind: str) -> None:
    count = calls(name, kind)
    for k in range(1, count + 1):
        player = begin(name)
        try:
            faults = player.world.faults
            faults.fail[kind] = faults.counts[kind] + k
            SCENARIOS[name][-1](player)
            assert len(faults.happened) == 1, "the failure did not happen"
            finish(player)
        except AssertionError as error:
            raise AssertionError(f"{name}: {kind} {k} of {count} ({faults.happened}): {error}") from error
        finally:
            player.close()


@pytest.mark.parametrize("who", KILLS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_each_process_may_die_between_any_two_of_its_writes(name: str, who: str) -> None:
    for k in range(MOST):
        player = begin(name)
        try:
            faults: Faults = player.world.faults
            setattr(faults, who, k)
            SCENARIOS[name][-1](player)
            if not faults.happened:
                break
            finish(player)
        except AssertionError as error:
            raise AssertionError(f"{name}: {who} at {k} ({faults.happened}): {error}") from error
        finally:
            player.close()
    else:
        pytest.fail("the scenario never ended")
    assert k > 0, "nothing was written"


GARBAGE: dict[str, Callable[[], BaseException]] = {
    "no route": lambda: OSError(113, "No route to host"),
    "garbage": dns.exception.FormError,
    "closed": EOFError,
}


@pytest.mark.parametrize("how", GARBAGE)
@pytest.mark.parametrize("name", ["start", "refresh"])
def test_a_datagram_that_fails_in_another_way_is_survived_too(name: str, how: str) -> None:
    for k in range(1, calls(name, "dns") + 1):
        player = begin(name)
        try:
            player.world.how = GARBAGE[how]  # type: ignore[attr-defined]
            player.world.faults.fail["dns"] = player.world.faults.counts["dns"] + k
            SCENARIOS[name][-1](player)
            finish(player)
        finally:
            player.close()


def test_every_kind_of_call_is_made_by_the_scenarios() -> None:
    assert set(ERRORS) == set(KINDS)
    for kind in KINDS:
        assert any(calls(name, kind) for name in SCENARIOS), kind
