"""What the writer relies on, once against the kernel in memory and once against the real one."""

from __future__ import annotations

import itertools
import logging
import time
from typing import Any

import pytest

from enforcer.netfilter.detect import NFT, OWN
from enforcer.netfilter.kernel import KernelError
from enforcer.netfilter.model import Element
from enforcer.netfilter.plan import Plan, Step
from enforcer.netfilter.skeleton import DENIED, DOCKER_USER, HOST, PINS, Skeleton
from enforcer.netfilter.writer import Writer

from .conftest import World, chained, sh

SKELETON = Skeleton()
PIN = Element("192.0.2.2", "tcp", 443, "203.0.113.10")
OTHER = Element("192.0.2.2", "udp", 53, "203.0.113.11")
BRIDGE = "corral-0a0b0c0d"
SANDBOX = {"bridge": BRIDGE, "subnet": "192.0.2.0/26", "gateway": "192.0.2.1"}
NOBODY: tuple[frozenset[str], frozenset[tuple[str, int]]] = (frozenset(), frozenset())


def load(world: World) -> None:
    world.kernel.carry_out(world.kernel.audit(SKELETON, NOBODY))


def steps(world: World) -> tuple[Step, ...]:
    return world.kernel.audit(SKELETON, NOBODY).steps


def writer(world: World) -> Writer:
    made = Writer(world.kernel, SKELETON, "test", sleep=lambda _s: None)
    made.heal("the test's start")
    return made


def apply(
    of: Writer, uid: int, sandboxes: list[dict[str, str]], pins: list[Element], host: tuple[Element, ...] = ()
) -> dict[str, Any]:
    return of.handle(
        uid,
        {
            "v": 2,
            "op": "apply",
            "sandboxes": sandboxes,
            "pins": [[*e.row(), "box main api.example"] for e in pins],
            "host": [[*e.row(), "box main llama"] for e in host],
        },
    )


def test_loading_an_empty_kernel_leaves_nothing_to_do(world: World) -> None:
    assert steps(world)
    load(world)
    assert steps(world) == ()


def test_a_second_load_changes_nothing(world: World) -> None:
    load(world)
    before = world.kernel.observe()
    load(world)
    assert world.kernel.observe() == before


def test_deny_comes_first(world: World) -> None:
    assert next(step.part for step in steps(world)) == "backstop"


@chained
@pytest.mark.parametrize("chain", [DOCKER_USER, "CORRAL-OUT", "CORRAL-PASS", "INPUT"])
def test_a_flushed_chain_is_found_and_mended(world: World, chain: str) -> None:
    load(world)
    before = world.rules(chain)
    world.flush(chain)
    assert steps(world)
    load(world)
    assert world.rules(chain) == before
    assert steps(world) == ()


def test_a_deleted_table_is_found_and_mended_with_its_sets(world: World) -> None:
    todo = world.kernel.audit(SKELETON, (frozenset({"192.0.2.1"}), frozenset({(BRIDGE, 1000)})))
    world.kernel.carry_out(todo)
    world.drop_table()
    todo = world.kernel.audit(SKELETON, (frozenset({"192.0.2.1"}), frozenset({(BRIDGE, 1000)})))
    assert [problem.part for problem in todo.problems if problem.healable] == ["backstop"]
    world.kernel.carry_out(todo)
    seen = world.kernel.observe()
    assert seen.gateways == {"192.0.2.1"}
    assert seen.owners == {(BRIDGE, 1000)}


def on(*drivers: str) -> pytest.MarkDecorator:
    """Run a test on the real kernel alone: what nft itself does is not in the fake."""
    made = [pytest.param(name, marks=pytest.mark.netns) for name in drivers]
    return pytest.mark.parametrize("world", made, indirect=True)


SLEEP = "add table inet corral { flags dormant; }"


def test_a_dormant_table_is_found_and_woken_with_all_that_is_in_its_sets(world: World) -> None:
    world.add_bridge(BRIDGE, "192.0.2.1/26")
    of = writer(world)
    asked = {"v": 2, "op": "apply", "sandboxes": [SANDBOX], "pins": [[*PIN.row(), ""]], "host": []}
    assert of.handle(1000, asked | {"open": [["192.0.2.3", ""]]})["open"]
    of.heal("the claims")
    before = world.kernel.observe()
    assert (before.dormant, before.gateways, before.owners) == (set(), {"192.0.2.1"}, {(BRIDGE, 1000)})
    world.change_table(SLEEP)
    assert world.kernel.observe().dormant == {"inet corral"}
    # Also the boot-time run, which does not know the claims.
    for wanted in (None, (before.gateways, before.owners)):
        todo = world.kernel.audit(SKELETON, wanted)
        assert [problem.text for problem in todo.problems if problem.healable] == [
            "table inet corral differs: it is dormant"
        ]
    world.kernel.carry_out(world.kernel.audit(SKELETON, None))
    assert world.kernel.observe() == before
    assert of.audit().steps == ()
    assert PIN in world.kernel.entries(PINS)
    assert "192.0.2.3" in world.kernel.opened()
    if world.real:
        assert "dormant" not in sh("nft list table inet corral")


def test_a_table_that_sleeps_when_a_writer_starts_keeps_its_sets(world: World) -> None:
    load(world)
    world.kernel.change(PINS, {PIN: ""}, ())
    world.change_table(SLEEP)
    writer(world)
    assert PIN in world.kernel.entries(PINS)
    assert steps(world) == ()


CHANGED = {
    "policy": "add chain inet corral forward_backstop {{ policy drop; }}",
    "priority": "delete chain inet corral {name}; "
    "add chain inet corral {name} {{ type filter hook forward priority 9; policy accept; }}",
    "type": "delete chain inet corral {name}; "
    "add chain inet corral {name} {{ type nat hook prerouting priority filter + 10; policy accept; }}",
}


@on(NFT, OWN)
@pytest.mark.parametrize("what", CHANGED)
def test_a_chain_that_was_hooked_otherwise_is_found_and_mended(world: World, what: str) -> None:
    load(world)
    before = world.kernel.observe()
    world.change_table(
        f"flush chain inet corral forward_backstop; {CHANGED[what]}".format(name="forward_backstop")
    )
    assert "backstop" in {step.part for step in steps(world)}
    load(world)
    assert world.kernel.observe() == before


@on(NFT)
def test_a_dormant_table_of_iptables_is_told(world: World) -> None:
    load(world)
    sh("nft 'add table ip filter { flags dormant; }'")
    todo = world.kernel.audit(SKELETON, NOBODY)
    told = [problem.text for problem in todo.problems if "dormant" in problem.text]
    assert told == ["table ip filter is dormant: its rules do nothing (sudo nft add table ip filter)"]
    assert todo.steps == ()
    sh("nft add table ip filter")
    assert not any("dormant" in problem.text for problem in world.kernel.audit(SKELETON, NOBODY).problems)


def test_sets_of_the_table_follow_claims_without_reloading_it(world: World) -> None:
    load(world)
    todo = world.kernel.audit(
        SKELETON, (frozenset({"192.0.2.1"}), frozenset({(BRIDGE, 4711), (BRIDGE, 1000)}))
    )
    assert len(todo.steps) == 1
    assert "delete table" not in todo.steps[0].text
    world.kernel.carry_out(todo)
    seen = world.kernel.observe()
    assert (seen.gateways, seen.owners) == ({"192.0.2.1"}, {(BRIDGE, 1000), (BRIDGE, 4711)})
    load(world)
    assert world.kernel.observe().owners == frozenset()


@chained
def test_the_boot_time_run_leaves_the_sets_of_a_running_writer_alone(world: World) -> None:
    wanted = (frozenset({"192.0.2.1"}), frozenset({(BRIDGE, 1000)}))
    world.kernel.carry_out(world.kernel.audit(SKELETON, wanted))
    boot = Writer(world.kernel, SKELETON, "test", claiming=False)
    assert boot.audit().steps == ()
    world.flush("CORRAL-OUT")
    boot.heal("the boot")
    assert world.kernel.audit(SKELETON, wanted).steps == ()


@chained
@pytest.mark.parametrize("chain", [DOCKER_USER, "INPUT"])
def test_a_foreign_rule_above_ours_is_passed_and_kept(world: World, chain: str) -> None:
    load(world)
    count = len(world.rules(chain))
    world.insert_first(chain, "-s 198.51.100.9/32 -j ACCEPT")
    assert steps(world)
    load(world)
    rules = world.rules(chain)
    assert len(rules) == count + 1
    assert rules[-1] == "-s 198.51.100.9/32 -j ACCEPT"
    assert steps(world) == ()


@chained
def test_a_doubled_jump_becomes_one(world: World) -> None:
    load(world)
    world.foreign_rule(DOCKER_USER, world.rules(DOCKER_USER)[0])
    assert len(world.rules(DOCKER_USER)) == 3
    load(world)
    assert len(world.rules(DOCKER_USER)) == 2


@chained
def test_docker_user_of_docker_is_never_flushed(world: World) -> None:
    world.foreign_rule(DOCKER_USER, "-s 198.51.100.9/32 -j DROP")
    load(world)
    assert "-s 198.51.100.9/32 -j DROP" in world.rules(DOCKER_USER)


@chained
def test_remove_leaves_foreign_rules_and_nothing_else(world: World) -> None:
    world.foreign_rule(DOCKER_USER, "-s 198.51.100.9/32 -j DROP")
    world.foreign_rule("INPUT", "-s 198.51.100.9/32 -j DROP")
    load(world)
    world.kernel.remove(SKELETON)
    seen = world.kernel.observe()
    filled = {chain for tables in seen.tables.values() for chain, lines in tables.items() if lines}
    assert {chain: world.rules(chain) for chain in filled} == {
        DOCKER_USER: ["-s 198.51.100.9/32 -j DROP"],
        "INPUT": ["-s 198.51.100.9/32 -j DROP"],
    }
    assert not any(chain.startswith("CORRAL") for tables in seen.tables.values() for chain in tables)
    assert seen.backstop is None
    assert not seen.sets


def test_elements_are_read_back_as_they_were_put(world: World) -> None:
    load(world)
    world.kernel.change(PINS, {PIN: "box main api.example", OTHER: "x"}, ())
    found = world.kernel.entries(PINS)
    assert set(found) == {PIN, OTHER}
    assert found[PIN].comment == "box main api.example"
    assert 3500 < found[PIN].timeout <= 3600
    world.kernel.change(PINS, {}, [OTHER])
    assert set(world.kernel.entries(PINS)) == {PIN}


def test_deleting_an_absent_element_is_fine(world: World) -> None:
    load(world)
    world.kernel.change(PINS, {}, [PIN])
    assert world.kernel.entries(PINS) == {}


def test_a_renewed_element_keeps_its_comment(world: World) -> None:
    load(world)
    world.kernel.change(PINS, {PIN: "first"}, ())
    world.kernel.change(PINS, {PIN: "second"}, ())
    assert world.kernel.entries(PINS)[PIN].comment == "second"


def test_an_element_has_the_life_it_is_given_shorter_or_longer_and_never_more_than_any(world: World) -> None:
    load(world)
    other = Element(PIN.src, PIN.proto, PIN.port, "203.0.113.77")

    def left() -> tuple[int, int]:
        found = world.kernel.entries(PINS)
        return found[PIN].timeout, found[other].timeout

    both = {PIN: "one", other: "two"}
    for lives, least, most in (({PIN: 60}, 50, 60), ({PIN: 600}, 590, 600), ({PIN: 90_000}, 3500, 3600)):
        world.kernel.change(PINS, both, (), lives)
        first, second = left()
        assert least < first <= most
        assert 3500 < second <= 3600
    world.kernel.change(PINS, {PIN: "one"}, (), {PIN: 1})
    deadline = time.monotonic() + 10
    while PIN in world.kernel.entries(PINS) and time.monotonic() < deadline:
        world.kernel.clock = lambda: time.monotonic() + 2  # type: ignore[attr-defined]
        time.sleep(0.1)
    assert set(world.kernel.entries(PINS)) == {other}


def test_an_unknown_set_is_an_error(world: World) -> None:
    with pytest.raises(KernelError):
        world.kernel.entries(PINS)


@chained
def test_a_failing_transaction_leaves_the_table_as_it_was(world: World) -> None:
    load(world)
    before = world.kernel.observe().tables
    text = f"*filter\n-A {DOCKER_USER} -j ACCEPT\n-A NO-SUCH-CHAIN -j ACCEPT\nCOMMIT\n"
    with pytest.raises(KernelError):
        world.kernel.carry_out(Plan((), (Step("iptables", text),)))
    assert world.kernel.observe().tables == before


@pytest.mark.parametrize("by", ["timer", "request"])
def test_an_element_that_nobody_asked_for_is_removed_and_told(
    world: World, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    of = writer(world)
    world.add_bridge(BRIDGE, "192.0.2.1/26")
    apply(of, 1000, [SANDBOX], [PIN])
    world.kernel.change(PINS, {OTHER: ""}, ())
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        if by == "timer":
            of.prune()
        else:
            apply(of, 1000, [SANDBOX], [PIN])
    assert set(world.kernel.entries(PINS)) == {PIN}
    assert caplog.messages == [
        "removed from corral-pins, where nobody asked for it: 192.0.2.2 -> 203.0.113.11:53/udp"
    ]
    # What is not wanted any more goes without a word.
    caplog.clear()
    apply(of, 1000, [SANDBOX], [])
    of.prune()
    assert world.kernel.entries(PINS) == {}
    assert caplog.messages == []


def test_a_writer_that_starts_removes_nothing_before_it_was_asked(world: World) -> None:
    of = writer(world)
    world.add_bridge(BRIDGE, "192.0.2.1/26")
    apply(of, 1000, [SANDBOX], [PIN])
    later = Writer(world.kernel, SKELETON, "test", claims=dict(of.claims), sleep=lambda _s: None)
    later.prune()
    assert set(world.kernel.entries(PINS)) == {PIN}


def test_denied_sources_come_and_go(world: World) -> None:
    load(world)
    world.kernel.watch(["192.0.2.2", "192.0.2.3"], [])
    world.kernel.watch([], ["192.0.2.3", "192.0.2.4"])
    assert world.kernel.denied() == {"192.0.2.2": 0}
    assert world.has_set(DENIED)


def test_apply_grants_inside_the_callers_own_bridge_only(world: World) -> None:
    of = writer(world)
    world.add_bridge(BRIDGE, "192.0.2.1/26")
    foreign = Element("192.0.2.130", "tcp", 443, "203.0.113.10")
    answer = apply(of, 1000, [SANDBOX], [PIN, foreign])
    assert answer["ok"]
    assert [row[:4] for row in answer["pins"]] == [PIN.row()]
    assert any("192.0.2.130" in text for text in answer["refused"])
    assert set(world.kernel.entries(PINS)) == {PIN}


def test_apply_takes_away_what_is_no_longer_wanted(world: World) -> None:
    of = writer(world)
    world.add_bridge(BRIDGE, "192.0.2.1/26")
    apply(of, 1000, [SANDBOX], [PIN, OTHER])
    apply(of, 1000, [SANDBOX], [OTHER])
    assert set(world.kernel.entries(PINS)) == {OTHER}


def test_a_bridge_of_another_user_is_refused_by_name(world: World) -> None:
    of = writer(world)
    world.add_bridge(BRIDGE, "192.0.2.1/26")
    apply(of, 1000, [SANDBOX], [PIN])
    answer = apply(of, 1001, [SANDBOX], [OTHER])
    assert f"{BRIDGE}: belongs to uid 1000" in answer["refused"]
    assert answer["pins"] == []
    assert set(world.kernel.entries(PINS)) == {PIN}


def test_the_subnet_of_another_users_bridge_is_refused(world: World) -> None:
    of = writer(world)
    world.add_bridge(BRIDGE, "192.0.2.1/26")
    apply(of, 1000, [SANDBOX], [PIN])
    world.add_bridge("corral-ffffffff", "192.0.2.1/26")
    answer = apply(of, 1001, [{**SANDBOX, "bridge": "corral-ffffffff"}], [OTHER])
    assert any("overlaps" in text for text in answer["refused"])
    assert set(world.kernel.entries(PINS)) == {PIN}


def test_a_bridge_that_does_not_have_the_subnet_is_refused(world: World) -> None:
    of = writer(world)
    world.add_bridge(BRIDGE, "192.0.2.65/26")
    answer = apply(of, 1000, [SANDBOX], [PIN])
    assert answer["refused"]
    assert answer["pins"] == []


def test_elements_die_with_the_link(world: World) -> None:
    of = writer(world)
    world.add_bridge(BRIDGE, "192.0.2.1/26")
    apply(of, 1000, [SANDBOX], [PIN])
    world.delete_bridge(BRIDGE)
    of.prune()
    assert world.kernel.entries(PINS) == {}
    assert of.claims == {}


def test_host_elements_lead_to_the_own_gateway_only(world: World) -> None:
    of = writer(world)
    world.add_bridge(BRIDGE, "192.0.2.1/26")
    good = Element("192.0.2.2", "tcp", 8081, "192.0.2.1")
    bad = Element("192.0.2.2", "tcp", 8081, "203.0.113.1")
    answer = apply(of, 1000, [SANDBOX], [], (good, bad))
    assert set(world.kernel.entries(HOST)) == {good}
    assert answer["refused"] == ["203.0.113.1 is not the gateway of 192.0.2.2"]


@pytest.mark.parametrize(
    "destination",
    ["127.0.0.1", "169.254.169.254", "10.1.2.3", "192.168.1.1", "224.0.0.1", "0.0.0.0", "192.0.2.1"],
)
def test_a_pin_never_leads_to_private_or_own_addresses(world: World, destination: str) -> None:
    of = writer(world)
    world.add_bridge(BRIDGE, "192.0.2.1/26")
    answer = apply(of, 1000, [SANDBOX], [Element("192.0.2.2", "tcp", 443, destination)])
    assert len(answer["refused"]) == 1
    assert world.kernel.entries(PINS) == {}


def test_two_callers_do_not_see_or_touch_each_other(world: World) -> None:
    of = writer(world)
    world.add_bridge(BRIDGE, "192.0.2.1/26")
    world.add_bridge("corral-ffffffff", "192.0.2.65/26")
    second = {"bridge": "corral-ffffffff", "subnet": "192.0.2.64/26", "gateway": "192.0.2.65"}
    theirs = Element("192.0.2.66", "tcp", 443, "203.0.113.10")
    apply(of, 1000, [SANDBOX], [PIN])
    apply(of, 1001, [second], [theirs])
    assert [row[:4] for row in of.handle(1001, {"v": 2, "op": "read"})["pins"]] == [theirs.row()]
    apply(of, 1001, [second], [])
    assert set(world.kernel.entries(PINS)) == {PIN}


def test_nothing_is_granted_while_bridge_filtering_cannot_be_had(world: World, tmp_path) -> None:
    of = writer(world)
    world.add_bridge(BRIDGE, "192.0.2.1/26")
    if world.real:
        (tmp_path / "bridge-nf-call-iptables").mkdir()
        world.kernel._bridge_filter = tmp_path
    else:
        world.kernel.bridge_filter, world.kernel.bridge_filter_stuck = (0, 0), True
    answer = apply(of, 1000, [SANDBOX], [PIN])
    assert answer["pins"] == []
    assert any("bridge-nf-call-iptables" in text for text in answer["refused"])
    assert world.kernel.entries(PINS) == {}


@pytest.mark.parametrize("position", range(1, 40))
def test_a_failure_at_any_call_never_leaves_more_than_was_asked(position: int) -> None:
    from enforcer.netfilter.fake import FakeKernel

    world = World(FakeKernel())
    world.add_bridge(BRIDGE, "192.0.2.1/26")
    world.kernel.fail_at = position
    of = Writer(world.kernel, SKELETON, "test", sleep=lambda _s: None)
    of.heal("the test's start")
    apply(of, 1000, [SANDBOX], [PIN])
    world.kernel.fail_at = None
    assert PINS in world.kernel.sets
    assert set(world.kernel.entries(PINS)) <= {PIN}
    of.heal("the next turn")
    answer = apply(of, 1000, [SANDBOX], [PIN, OTHER])
    assert {tuple(row[:4]) for row in answer["pins"]} == {tuple(PIN.row()), tuple(OTHER.row())}
    assert steps_for(of) == ()


def steps_for(of: Writer) -> tuple[Step, ...]:
    return of.audit().steps


BAD_REQUESTS = [
    None,
    [],
    {},
    {"v": 1, "op": "read"},
    {"v": 2, "op": "drop"},
    {"v": 2, "op": "apply"},
    {"v": 2, "op": "apply", "sandboxes": [], "pins": [], "host": [], "more": 1},
    *(
        {"v": 2, "op": "apply", "sandboxes": boxes, "pins": pins, "host": []}
        for boxes, pins in itertools.chain(
            ((boxes, []) for boxes in (None, [1], [{**SANDBOX, "bridge": "docker0"}], [SANDBOX, SANDBOX],
             [{**SANDBOX, "subnet": "192.0.2.0/8"}], [{**SANDBOX, "gateway": "192.0.2"}],
             [{**SANDBOX, "bridge": "corral-0a0b0c0d\n"}], [{**SANDBOX, "x": 1}])),
            (([SANDBOX], [row]) for row in (None, [], ["a"] * 5, ["192.0.2.2", "icmp", 1, "203.0.113.1", ""],
             ["192.0.2.2", "tcp", 0, "203.0.113.1", ""], ["192.0.2.2", "tcp", True, "203.0.113.1", ""],
             ["192.0.2.2", "tcp", 65536, "203.0.113.1", ""], ["192.0.2.2", "tcp", 443, "::1", ""],
             ["192.0.2.2", "tcp", 443, "203.0.113.0/24", ""], ["192.0.2.02", "tcp", 443, "203.0.113.1", ""],
             ["192.0.2.2", "tcp", 443, "203.0.113.1", "a\nb"],
             ["192.0.2.2", "tcp", "443", "203.0.113.1", ""])),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("body", BAD_REQUESTS)
def test_a_malformed_request_is_answered_and_changes_nothing(body: object) -> None:
    from enforcer.netfilter.fake import FakeKernel

    world = World(FakeKernel())
    world.add_bridge(BRIDGE, "192.0.2.1/26")
    of = writer(world)
    before = world.kernel.observe()
    answer = of.handle(1000, body)
    assert answer["ok"] is False
    assert answer["error"]
    assert world.kernel.observe() == before
