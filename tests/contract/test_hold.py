"""The table that a flush of everything passes over."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from ipaddress import IPv4Interface

import pytest

from enforcer.netfilter import hold as hold_module
from enforcer.netfilter.claims import Link
from enforcer.netfilter.fake import FakeKernel
from enforcer.netfilter.hold import FREE, HELD, NO, PLAIN, TableHold
from enforcer.netfilter.model import Element
from enforcer.netfilter.nftsets import TableSets
from enforcer.netfilter.plan import Observed, Plan, plan
from enforcer.netfilter.skeleton import PINS, Skeleton
from enforcer.netfilter.writer import Writer

from .conftest import sh

SKELETON = Skeleton()
EMPTY: frozenset[str] = frozenset()


def steps(hold: str, standing: bool) -> list[tuple[str, str]]:
    chains = {chain.name: chain.shape for chain in SKELETON.backstop}
    seen = Observed({}, chains if standing else None, hold=hold)
    found = plan(SKELETON, seen, (EMPTY, frozenset())).steps
    return [(step.kind, step.text) for step in found if step.part in ("backstop", "hold")]


@pytest.mark.parametrize("hold", [PLAIN, FREE, HELD])
def test_a_missing_table_is_made_so_that_it_can_be_held(hold: str) -> None:
    (kind, text), *_ = steps(hold, standing=False)
    assert (kind, "flags owner, persist" in text) == ("nft", True)


def test_a_table_of_a_host_that_cannot_hold_it_is_left_alone() -> None:
    assert steps(NO, standing=True) == []
    (kind, text), *rest = steps(NO, standing=False)
    assert (kind, "flags owner" in text, rest) == ("nft", False, [])


def test_a_table_that_others_could_flush_is_made_again() -> None:
    (kind, text), *rest = steps(PLAIN, standing=True)
    assert (kind, "flags owner, persist" in text, rest) == ("nft", True, [])


def test_a_table_that_nobody_holds_is_taken_and_a_held_one_left_alone() -> None:
    assert steps(FREE, standing=True) == [("hold", "corral")]
    assert steps(HELD, standing=True) == []


class HoldableKernel(FakeKernel):
    """A kernel in memory whose table is free; ``takeable`` says whether taking it works."""

    def __init__(self, takeable: bool) -> None:
        super().__init__()
        self.takeable = takeable
        self.hold = FREE

    def observe(self) -> Observed:
        return replace(super().observe(), hold=self.hold)

    def carry_out(self, todo: Plan) -> None:
        super().carry_out(todo)
        if self.takeable and any(step.kind == "hold" for step in todo.steps):
            self.hold = HELD


@pytest.mark.parametrize("takeable", [True, False])
def test_a_table_that_cannot_be_held_is_told_and_keeps_nobody_from_working(takeable: bool) -> None:
    kernel = HoldableKernel(takeable)
    kernel.interfaces.append(Link("corral-0a0b0c0d", 10, (IPv4Interface("192.0.2.1/26"),)))
    kernel.tables[(4, "filter")]["FORWARD"].append("-j DOCKER-USER")
    writer = Writer(kernel, SKELETON, "test", sleep=lambda _: None)
    problems = writer.heal("the test's start")
    assert [problem.part for problem in problems] == ([] if takeable else ["hold"])
    answer = writer.handle(
        1000,
        {
            "v": 2,
            "op": "apply",
            "sandboxes": [{"bridge": "corral-0a0b0c0d", "subnet": "192.0.2.0/26", "gateway": "192.0.2.1"}],
            "pins": [["192.0.2.2", "tcp", 443, "203.0.113.10", ""]],
            "host": [],
        },
    )
    assert answer["refused"] == []
    assert Element("192.0.2.2", "tcp", 443, "203.0.113.10") in kernel.entries(PINS)
    heals = writer.heals
    writer.heal("the timer")
    assert (writer.unsettled, writer.heals) == (0, heals)


@pytest.mark.netns
class TestTableHold:
    """The kernel's side of it. Fails on a kernel older than 6.9."""

    @pytest.fixture
    def hold(self, netns: None) -> TableHold:
        return TableHold("corral")

    def tables(self) -> str:
        return sh("nft list tables")

    def test_a_held_table_outlives_a_flush_of_everything(self, hold: TableHold) -> None:
        sh("nft add table inet other")
        hold.take()
        sh("nft flush ruleset")
        assert self.tables() == "table inet corral\n"
        hold.release()
        sh("nft flush ruleset")
        assert self.tables() == ""

    @pytest.mark.parametrize(
        "command",
        ["delete table inet corral", "add chain inet corral x", "flush table inet corral"],
    )
    def test_nobody_else_changes_a_held_table(self, hold: TableHold, command: str) -> None:
        hold.take()
        done = subprocess.run(["nft", *command.split()], capture_output=True, text=True, check=False)
        assert "Operation not permitted" in done.stderr
        hold.release()
        sh(f"nft {command}")

    def test_the_table_outlives_its_holder_and_goes_to_the_next(self, hold: TableHold) -> None:
        other = TableHold("corral")
        hold.take()
        with pytest.raises(OSError, match="not permitted"):
            other.take()
        assert not other.held
        hold.release()
        assert self.tables() == "table inet corral\n"
        other.take()
        sh("nft flush ruleset")
        assert self.tables() == "table inet corral\n"
        other.release()

    def test_nobody_else_puts_a_held_table_to_sleep(self, hold: TableHold) -> None:
        hold.take()
        sleep = ["nft", "add table inet corral { flags dormant; }"]
        done = subprocess.run(sleep, capture_output=True, text=True, check=False)
        assert "Operation not permitted" in done.stderr

    def test_taking_a_dormant_table_wakes_it(self, hold: TableHold, monkeypatch: pytest.MonkeyPatch) -> None:
        sets = TableSets(lambda: None)
        hold.take()
        hold.release()
        with monkeypatch.context() as asleep:
            # No nft that may be here knows how to put one to sleep that is kept without its holder.
            asleep.setattr(hold_module, "NFT_TABLE_F_OWNER", 1)
            hold.take()
            hold.release()
        assert sets.tables() == {("inet", "corral"): {"dormant", "persist"}}
        hold.take()
        assert sets.tables() == {("inet", "corral"): {"owner", "persist"}}
        sets.close()
        hold.release()

    def test_a_table_without_the_flag_cannot_be_taken(self, hold: TableHold) -> None:
        sh("nft add table inet corral")
        with pytest.raises(OSError, match="not supported"):
            hold.take()
        assert not hold.held
