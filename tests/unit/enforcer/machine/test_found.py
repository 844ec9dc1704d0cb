"""What the machine found, as plain tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from enforcer.netfilter.ports import Port
from policy.errors import EnforcerError
from tests.unit.enforcer.machine.checks import published
from tests.unit.enforcer.machine.player import Player
from tests.unit.enforcer.machine.world import BOXES, Zone

GOOD = ("203.0.113.1",)


@pytest.fixture
def player() -> Iterator[Player]:
    made = Player(0.004, {"a.example": GOOD, "b.example": GOOD, "c.example": GOOD})
    yield made
    made.close()


def test_an_optional_name_that_fails_slowly_does_not_keep_a_session_from_becoming_ready(
    player: Player,
) -> None:
    player.world.zones["b.example"] = Zone("servfail", latency=3.0)
    player.create(0, policy=1)
    player.act(lambda: None, 3.5)
    assert player.world.starts["c1"].answer is not None, player.world.starts["c1"]


def test_a_second_session_that_wants_a_name_known_to_fail_becomes_ready_at_once(player: Player) -> None:
    player.world.zones["b.example"] = Zone("nxdomain", latency=1.0)
    player.create(0, policy=1)
    player.act(lambda: None, 1.5)
    player.create(4, policy=1)
    player.act(lambda: None, 1.5)
    assert player.world.starts["c2"].answer is not None, player.world.starts["c2"]


def test_an_address_that_became_forbidden_is_unpublished_while_a_restarted_service_waits_for_a_name(
    player: Player,
) -> None:
    player.world.zones["b.example"] = Zone("ok", ("203.0.113.3", "203.0.113.4"))
    player.create(0, policy=2)
    player.world.zones["c.example"] = Zone("timeout", latency=5.0)
    player.kill_service(0.5)
    # What is published has to be open after each of these.
    player.toggle_overlap()
    player.act(lambda: None, 1.0)
    assert published(player.oracle.truths["c1"])["b.example"] == {"203.0.113.3"}


def test_an_address_renewed_before_its_name_was_refused_is_published_as_long_after_a_restart(
    player: Player,
) -> None:
    player.create(0, policy=0)
    player.act(lambda: None, 1.0)
    # The same answer again: it renews the address and moves nothing.
    player.skip(70.0, False)
    player.zone("a.example", "ok", ("169.254.169.254",), 0, 0.01)
    player.restart_at_rest("service")
    assert published(player.oracle.truths["c1"])["a.example"] == {"203.0.113.1"}


def test_a_restarted_service_whose_state_is_lost_leaves_what_is_published_until_it_has_asked(
    player: Player,
) -> None:
    player.create(0, policy=0)
    player.world.zones["a.example"] = Zone("servfail", latency=3.0)
    player.world.kill_service()
    (player.world.owner.data_home / "enforcer" / "pins.json").unlink()
    player.act(lambda: None, 1.0)
    assert published(player.oracle.truths["c1"]) == {"a.example": set(GOOD)}


def test_what_keeps_nothing_from_being_granted_is_not_asked_about_twice_a_second(player: Player) -> None:
    kernel = player.world.kernel
    kernel.attached[50] = Port(50, "veth50", BOXES[0].sandbox.bridge, 1, isolated=False, up=True)
    kernel.set_ports = lambda _fixes: None  # type: ignore[method-assign]
    player.create(0)
    assert any(part == "port" for part, _ in player.world.service.held.problems)  # type: ignore[union-attr]
    before = player.world.faults.places["apply"]
    player.act(lambda: None, 30.0)
    # One for each full pass, which asks and is answered, and a few for the answers.
    assert player.world.faults.places["apply"] - before < 30


@pytest.mark.parametrize("trouble", ["the writer is away", "bridge filtering is off"])
def test_a_trouble_that_lasts_is_asked_about_twice_a_second_and_not_ever_more_often(
    player: Player, trouble: str
) -> None:
    player.create(0)
    if trouble == "the writer is away":
        player.world.writer.handle = refuse  # type: ignore[method-assign]
    else:
        player.bridge_filter(0, stuck=True)
    places = player.world.faults.places
    for _ in range(10):
        # Each full pass is one more reason to ask.
        player.act(lambda: None, 12.0)
        before = places["apply"]
        player.act(lambda: None, 10.0)
        # A question and its answer count as two.
        assert places["apply"] - before <= 50


def refuse(*_words: object) -> dict[str, object]:
    raise EnforcerError("the writer does not answer: Connection refused")


def test_a_machine_that_wakes_for_a_moment_again_and_again_keeps_no_address_open_for_ever(
    player: Player,
) -> None:
    player.create(0, policy=2)
    player.zone("b.example", "ok", ("203.0.113.2", "203.0.113.3"), 0, 0.01)
    player.skip(70.0, True)
    player.zone("b.example", "ok", ("203.0.113.1",), 0, 5.0)
    # Each time awake is shorter than an answer takes; the player looks at what is open after each.
    for seconds in (700.0, *[70.0] * 7):
        player.skip(seconds, True)
    player.act(lambda: None, 6.0)
    assert published(player.oracle.truths["c1"])["b.example"] == {"203.0.113.1"}


def test_an_answer_that_runs_out_beside_a_crash_is_not_the_crash_s_doing(player: Player) -> None:
    player.create(0, policy=0)
    player.deed(0, "start")
    player.act(lambda: None, 1.0)
    service = player.world.service
    assert service is not None
    # Refused since, and at the end of its 60 seconds just when the writer dies.
    end = service.names.state.names["a.example"].pins["203.0.113.1"].last_seen + 60
    player.world.zones["a.example"] = Zone("ok", ("169.254.169.254",))
    began = player.world.loop.now
    player.come_to_rest()
    rest = player.world.loop.now - began
    player.act(lambda: None, end - player.world.loop.now - rest - 0.1)
    player.restart_at_rest("writer")


def test_a_service_that_is_killed_again_and_again_has_its_time_anew_each_time(player: Player) -> None:
    player.create(0, policy=1)
    player.deed(0, "start")
    player.act(lambda: None, 1.0)
    player.deed(0, "destroy")
    oracle = player.oracle
    (truth,) = oracle.truths.values()
    oracle.healthy = truth.until - 0.05
    oracle.restarted()
    oracle.healthy += 0.1
    assert oracle.shows(truth)
    # What was over stays so.
    oracle.healthy = truth.until
    oracle.restarted()
    assert not oracle.shows(truth)
