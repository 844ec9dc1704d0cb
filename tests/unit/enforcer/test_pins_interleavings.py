"""The invariants of the pinning engine under any order of events."""

from __future__ import annotations

import json
import os
from typing import Any

from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from enforcer import pins
from enforcer.pins import (
    Answer,
    Answered,
    Event,
    Failed,
    Failure,
    InUse,
    NameState,
    Query,
    Refresh,
    Settings,
    State,
    Subscribe,
    Tick,
    Unsubscribe,
    VettingChanged,
    Wish,
)
from enforcer.vetting import Vetting
from tests.unit.enforcer.pin_engine import BOX, LAB, OTHER, many

NAMES = ("a.example", "b.example", "c.example")
POOL = (*many(6), "10.0.0.1", "127.0.0.1", "198.51.100.1")
VETTINGS = (
    LAB,
    Vetting.of(permit=["203.0.113.0/24"], host_addresses=["203.0.113.2"]),
    Vetting.of(permit=["203.0.113.0/30", "10.0.0.0/8"]),
)
SMALL = Settings(allowed_per_name=4, published_per_name=2, entries_per_container=8, in_use_per_name=2)

names = st.sampled_from(NAMES)
wishes = st.builds(Wish, names, st.sampled_from([(443,), (80, 443)]), st.booleans(), st.booleans())


class Interleavings(RuleBasedStateMachine):
    """I1 and I2 in every state that any order of events leads to, against a record of all answers."""

    # Events sent in all examples together: what a run of the machine is measured by.
    steps = 0

    @initialize()
    def begin(self) -> None:
        self.now = 100.0
        self.state = State(vetting=LAB, settings=SMALL)
        self.open: dict[int, str] = {}
        # Per name: every address that a vetted answer to the name's current life held, and when last.
        self.answered: dict[str, dict[str, float]] = {}

    def send(self, event: Event) -> None:
        Interleavings.steps += 1
        before = self.state
        self.state, actions = pins.step(before, event, self.now, lambda: 0.5)
        for action in actions:
            if isinstance(action, Query):
                assert action.name not in {
                    name for token, name in self.open.items() if self.current(token, name)
                }, "two queries for one name under way"
                self.open[action.token] = action.name
        for name in before.names.keys() - self.state.names.keys() - self.state.remembered.keys():
            self.answered.pop(name, None)
        if (pins.allowed(before), pins.published(before)) != (
            pins.allowed(self.state),
            pins.published(self.state),
        ):
            assert self.state.generation > before.generation

    def current(self, token: int, name: str) -> bool:
        record = self.state.names.get(name)
        return record is not None and record.inflight == token

    @rule(container=st.sampled_from([BOX, OTHER]), wanted=st.lists(wishes, max_size=4))
    def subscribe(self, container: str, wanted: list[Wish]) -> None:
        self.send(Subscribe(container, "198.51.100.5", tuple(wanted)))

    @rule(container=st.sampled_from([BOX, OTHER]))
    def unsubscribe(self, container: str) -> None:
        self.send(Unsubscribe(container))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), found=st.sets(st.sampled_from(POOL), max_size=7), ttl=st.integers(0, 4000))
    def answer(self, data: st.DataObject, found: set[str], ttl: int) -> None:
        token = data.draw(st.sampled_from(sorted(self.open)))
        name = self.open.pop(token)
        if self.current(token, name):
            for address in found:
                if self.state.vetting.check(address):
                    self.answered.setdefault(name, {})[address] = self.now
        self.send(Answered(Answer(name, tuple(found), ttl, self.now), token))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), kind=st.sampled_from(["timeout", "nxdomain", "empty", "servfail"]))
    def fail(self, data: st.DataObject, kind: Any) -> None:
        token = data.draw(st.sampled_from(sorted(self.open)))
        self.send(Failed(Failure(self.open.pop(token), kind), token))

    @rule(seconds=st.sampled_from([0.0, 1.0, 20.0, 61.0, 301.0, 700.0, 5000.0, 90000.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.send(Tick())

    @rule(vetting=st.sampled_from(VETTINGS))
    def vetting_changes(self, vetting: Vetting) -> None:
        self.send(VettingChanged(vetting))

    @rule(container=st.sampled_from([BOX, OTHER]), address=st.sampled_from(POOL))
    def use(self, container: str, address: str) -> None:
        self.send(InUse(container, address))

    @rule(discard=st.booleans())
    def refresh(self, discard: bool) -> None:
        self.send(Refresh(discard=discard))

    @rule(down=st.sampled_from([0.0, 30.0, 3000.0]))
    def restart(self, down: float) -> None:
        """kill -9 right after a save; the containers are found again."""
        before = self.state
        saved = json.loads(json.dumps(pins.save(before, self.now, 1e9 + self.now)))
        self.now += down
        self.state = pins.restore(saved, self.now, 1e9 + self.now, before.vetting, SMALL)
        self.open.clear()
        for name in list(self.answered):
            if name not in self.state.names and name not in self.state.remembered:
                del self.answered[name]
        for container in before.containers.values():
            self.send(Subscribe(container.id, container.source, container.wishes))
        if down == 0.0:
            after = pins.published(self.state)
            for container, published in pins.published(before).items():
                for name, addresses in published.items():
                    # What only refused answers are left for has run out while the last query was under way.
                    if before.names[name].state is not NameState.REFUSED:
                        assert after[container][name] == addresses

    @invariant()
    def published_is_part_of_latest_is_part_of_allowed(self) -> None:
        allowed, published = pins.allowed(self.state), pins.published(self.state)
        assert allowed.keys() == published.keys() == self.state.containers.keys()
        for container, granted in allowed.items():
            wanted = {wish.name: wish for wish in self.state.containers[container].wishes}
            assert granted.keys() == published[container].keys() == wanted.keys()
            rows = {row.name: row for row in pins.status(self.state, container, self.now)}
            for name, grants in granted.items():
                addresses = [grant.address for grant in grants]
                latest = set(rows[name].addresses)
                assert set(published[container][name]) <= latest <= set(addresses)
                assert latest <= set(self.state.names[name].latest)
                assert len(addresses) == len(set(addresses)) <= SMALL.allowed_per_name
                assert len(published[container][name]) <= SMALL.published_per_name
                assert all(grant.ports == wanted[name].ports for grant in grants)

    @invariant()
    def nothing_is_allowed_that_no_vetted_answer_to_this_name_held(self) -> None:
        for granted in pins.allowed(self.state).values():
            entries = set()
            for name, grants in granted.items():
                for grant in grants:
                    assert self.state.vetting.check(grant.address)
                    assert grant.address in self.answered.get(name, {})
                    entries |= {(grant.address, port) for port in grant.ports}
            assert len(entries) <= SMALL.entries_per_container

    @invariant()
    def nothing_is_allowed_longer_than_the_rules_say(self) -> None:
        for record in self.state.names.values():
            assert set(record.latest) <= record.pins.keys()
            for pin in record.pins.values():
                if record.frozen_since is None:
                    assert pin.until <= self.now + max(pin.ttl, 60) + 600
        for (container, name, address), lease in self.state.leases.items():
            assert lease.until <= self.answered[name][address] + SMALL.in_use_limit
            assert name in self.state.containers[container].asked

    @invariant()
    def the_engine_never_sleeps_past_what_is_due(self) -> None:
        if any(container.wishes for container in self.state.containers.values()):
            assert pins.next_due(self.state) is not None


STEPS = int(os.environ.get("CORRAL_HYPOTHESIS_STEPS", "8000"))


def test_no_order_of_events_breaks_an_invariant() -> None:
    Interleavings.steps, runs = 0, 0
    while Interleavings.steps < STEPS:
        runs += 1
        run_state_machine_as_test(
            seed(runs)(Interleavings),
            settings=settings(
                max_examples=max(1, (STEPS - Interleavings.steps) // 30),
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            ),
        )
    print(f"interleavings: {Interleavings.steps} events in {runs} runs")
