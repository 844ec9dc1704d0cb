"""The real service against a host that fails, lies, comes late and dies, in any order.

``CORRAL_MACHINE_STEPS`` says how many steps (100,000; ``make soak`` takes ten times as many) and
``CORRAL_MACHINE_SEED`` chooses a run (``random``: any); the seed is printed.
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.unit.enforcer.machine.faults import ERRORS
from tests.unit.enforcer.machine.oracle import PROMPT
from tests.unit.enforcer.machine.player import POLICIES, Player

STEPS = int(os.environ.get("CORRAL_MACHINE_STEPS", "100000"))
BATCH = 10_000
STEPS_PER_RUN = 50
FIRST = (0, 4, 2, 3)
# Coming to rest costs as much as twenty other steps.
REST_AFTER = 20

slots = st.integers(0, 5)
few = st.integers(0, 7)
NAMES = ("a.example", "b.example", "c.example")
KINDS = ("ok", "ok", "ok", "ok", "nxdomain", "servfail", "timeout", "empty")
DEEDS = ("start", "start", "die", "destroy", "rename", "pause", "unpause", "restart", "recreate", "elsewhere")
VANDALISM = ("jump", "flush-user", "flush-out", "flush-input", "accept-first", "foreign-rule", "backstop", "ruleset", "gateways", "nat", "chains")  # fmt: skip
MEDDLING = ("delete", "add", "flush", "add-unclaimed", "add-host")
ANSWERS = (
    ("203.0.113.1",),
    ("203.0.113.2", "203.0.113.3"),
    ("203.0.113.3", "203.0.113.4", "203.0.113.5"),
    ("203.0.113.1", "10.0.0.1"),
    ("169.254.169.254",),
    ("172.16.0.3", "172.17.0.1", "127.0.0.1"),
    ("203.0.113.6", "172.16.0.1"),
)


class Machine(RuleBasedStateMachine):
    """Each rule is one thing that happens to the host; the checks follow each."""

    @initialize(
        latency=st.sampled_from([0.0, 0.004, 0.03]),
        answers=st.lists(st.sampled_from(ANSWERS), min_size=3, max_size=3),
        policies=st.lists(st.integers(0, len(POLICIES) - 1), max_size=4),
    )
    def begin(self, latency: float, answers: list[tuple[str, ...]], policies: list[int]) -> None:
        random.seed(0)
        self.player = Player(latency, dict(zip(NAMES, answers, strict=True)))
        for slot, policy in zip(FIRST, policies, strict=False):
            self.player.create(slot, policy)
            self.player.deed(slot, "start")

    def teardown(self) -> None:
        if hasattr(self, "player"):
            try:
                self.player.come_to_rest()
            finally:
                self.player.close()

    # One rule for each kind of thing: hypothesis takes them equally often.

    @rule(slot=slots, policy=st.integers(0, len(POLICIES) - 1), flavour=few)
    def run_sandbox(self, slot: int, policy: int, flavour: int) -> None:
        self.player.create(slot, policy, flavour)

    @rule(slot=slots, deed=st.sampled_from(DEEDS), watch=st.booleans())
    def container(self, slot: int, deed: str, watch: bool) -> None:
        self.player.deed(slot, deed)
        if watch:
            # Long enough that what was told has to show, too short for most full passes.
            self.player.act(lambda: None, PROMPT + 0.2)

    @rule(number=st.integers(0, 1), what=st.sampled_from(["stranger", "joiner", "network", "overlap"]))
    def others_in_docker(self, number: int, what: str) -> None:
        if what == "stranger":
            self.player.stranger(number)
        elif what == "joiner":
            self.player.joiner(4 * number)
        elif what == "network":
            self.player.toggle_box(number)
        else:
            self.player.toggle_overlap()

    @rule(order=st.sampled_from(["hold", "all", "drop", "double", "reverse", "half"]))
    def events(self, order: str) -> None:
        self.player.events(order)

    @rule(kills=st.booleans())
    def docker_lost_or_back(self, kills: bool) -> None:
        self.player.toggle_docker(kills)

    @rule(name=st.sampled_from(NAMES), kind=st.sampled_from(KINDS), found=st.sampled_from(ANSWERS), ttl=st.sampled_from([0, 60, 4000]), latency=st.sampled_from([0.01, 0.01, 5.0]))  # fmt: skip
    def zone(self, name: str, kind: str, found: tuple[str, ...], ttl: int, latency: float) -> None:
        self.player.zone(name, kind, found, ttl, latency)

    @rule(seconds=st.sampled_from([0.02, 1.0, 7.0, 35.0]))
    def wait(self, seconds: float) -> None:
        self.player.act(lambda: None, seconds)

    @rule(seconds=st.sampled_from([70.0, 310.0, 700.0, 700.0, 5000.0, 90000.0]), asleep=st.booleans())
    def long_wait(self, seconds: float, asleep: bool) -> None:
        self.player.skip(seconds, asleep)

    @rule(which=few)
    def packets(self, which: int) -> None:
        self.player.packets(which)

    @rule(deed=st.sampled_from((*VANDALISM, *MEDDLING, "filter", "filter")), which=few)
    def others_in_the_kernel(self, deed: str, which: int) -> None:
        if deed == "filter":
            self.player.bridge_filter(which % 2, stuck=which > 4)
        elif deed in MEDDLING:
            self.player.meddle(deed, which)
        else:
            self.player.vandalise(deed)

    @rule(who=st.sampled_from(["service", "writer", "service now"]), at=st.integers(0, 9))
    def a_process_dies(self, who: str, at: int) -> None:
        if who == "service":
            self.player.kill_service_at(at)
        elif who == "writer":
            self.player.kill_writer_at(at)
        else:
            self.player.kill_service((0.0, 0.5, 20.0)[at % 3])

    @rule(kind=st.sampled_from(sorted(ERRORS)), at=st.integers(1, 8))
    def a_call_fails_soon(self, kind: str, at: int) -> None:
        self.player.fail(kind, at)

    @precondition(lambda self: self.player.deeds > REST_AFTER)
    @rule(who=st.sampled_from(["nobody", "service", "writer"]))
    def everything_comes_to_rest(self, who: str) -> None:
        if who == "nobody":
            self.player.come_to_rest()
        else:
            self.player.restart_at_rest(who)


def play(steps: int, number: int, phases: tuple[Phase, ...] = (Phase.generate, Phase.shrink)) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        seed(number)(Machine),
        settings=settings(
            max_examples=max(1, steps // STEPS_PER_RUN),
            stateful_step_count=STEPS_PER_RUN,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_nothing_opens_and_everything_converges_whatever_happens(capsys: pytest.CaptureFixture[str]) -> None:
    # A run of CI is judged by what changed, not by luck: new ground is for `make soak` to find.
    asked = os.environ.get("CORRAL_MACHINE_SEED") or "20261129"
    number = random.SystemRandom().getrandbits(32) if asked == "random" else int(asked)
    with capsys.disabled():
        print(f"\nmachine: {STEPS} steps, CORRAL_MACHINE_SEED={number}")
    # In batches, so that what a million steps have been does not have to be remembered.
    for batch in range(max(1, STEPS // BATCH)):
        try:
            play(min(STEPS, BATCH), number + batch)
        except BaseException:
            print(f"repeat with CORRAL_MACHINE_STEPS={BATCH} CORRAL_MACHINE_SEED={number + batch}")
            raise
