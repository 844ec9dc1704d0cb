"""The plan for each driver, and the order in which the rules move from one to another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from enforcer.netfilter import owntable
from enforcer.netfilter.detect import LEGACY, NFT, OWN, Choice
from enforcer.netfilter.plan import SET_TYPES, Observed, Plan, plan
from enforcer.netfilter.shape import shape
from enforcer.netfilter.skeleton import Chain, Skeleton

SKELETON = Skeleton()
NOBODY: tuple[frozenset[str], frozenset[tuple[str, int]]] = (frozenset(), frozenset())
OWN_CHAINS = {chain.name: chain.shape for chain in (*owntable.chains(SKELETON), *SKELETON.backstop)}
BACKSTOP = {chain.name: chain.shape for chain in SKELETON.backstop}
SETS = frozenset({*owntable.SETS.values(), "gateways", "owners"})


def loaded() -> dict[tuple[int, str], dict[str, list[str]]]:
    """Both tables as they are once the skeleton is in them, with Docker's jump."""
    tables: dict[tuple[int, str], dict[str, list[str]]] = {
        (4, "filter"): {"INPUT": [], "FORWARD": ["-j DOCKER-USER"], "DOCKER-USER": []},
        (4, "nat"): {"POSTROUTING": [], "PREROUTING": []},
        (6, "filter"): {"INPUT": [], "FORWARD": []},
    }
    for family, chains in ((4, SKELETON.chains4), (6, SKELETON.chains6)):
        tables[family, "filter"] |= {name: [r.iptables() for r in rules] for name, rules in chains.items()}
    for hook in SKELETON.hooks:
        tables[hook.family, hook.table][hook.rule.chain].insert(hook.position - 1, hook.rule.iptables())
    return tables


def own(**changes: object) -> Observed:
    seen = Observed({}, OWN_CHAINS, table_sets=SETS, choice=Choice(OWN, "no rules"), active=OWN)
    return replace(seen, **changes)  # type: ignore[arg-type]


def chained(driver: str, **changes: object) -> Observed:
    seen = Observed(loaded(), BACKSTOP, sets=SET_TYPES, choice=Choice(driver, "hooked"), active=driver)
    return replace(seen, **changes)  # type: ignore[arg-type]


def kinds(found: Plan) -> list[str]:
    return [f"{step.kind} {step.variant}" if step.kind == "iptables" else step.kind for step in found.steps]


@pytest.mark.parametrize("seen", [own(), chained(NFT), chained(LEGACY)])
def test_what_stands_is_left_alone(seen: Observed) -> None:
    found = plan(SKELETON, seen, NOBODY)
    assert found.steps == ()
    assert found.problems == ()
    assert found.choice == seen.choice


@pytest.mark.parametrize("seen", [own(), chained(NFT), chained(LEGACY)])
def test_a_dormant_table_does_not_stand(seen: Observed) -> None:
    found = plan(SKELETON, replace(seen, dormant=frozenset({"inet corral"})), NOBODY)
    assert [(problem.part, problem.healable) for problem in found.problems] == [("backstop", True)]
    assert "dormant" in found.problems[0].text
    assert kinds(found) == ["nft"]
    assert "delete table inet corral\n" in found.steps[0].text


def test_a_dormant_table_of_iptables_is_told_and_left_to_its_owner() -> None:
    asleep = frozenset({"ip filter", "ip6 filter", "ip nat", "ip foreign"})
    found = plan(SKELETON, chained(NFT, dormant=asleep), NOBODY)
    assert found.steps == ()
    assert {problem.part for problem in found.problems} == {"hook"}
    assert [problem.text for problem in found.problems] == [
        f"table {name} is dormant: its rules do nothing (sudo nft add table {name})"
        for name in ("ip filter", "ip nat", "ip6 filter")
    ]
    assert plan(SKELETON, chained(LEGACY, dormant=asleep), NOBODY).problems == ()


def test_a_dormant_table_that_decided_is_no_reason_to_wait_with_the_new_one() -> None:
    moving = chained(NFT, backstop=OWN_CHAINS, active=OWN)
    assert kinds(plan(SKELETON, moving, NOBODY))[-1] == "nft"
    assert kinds(plan(SKELETON, replace(moving, dormant=frozenset({"inet corral"})), NOBODY))[0] == "nft"


ROW = {"name": "x", "hook": "forward", "prio": 10, "type": "filter", "policy": "accept"}


@pytest.mark.parametrize(
    "changed", [{"type": "nat"}, {"policy": "drop"}, {"prio": 0}, {"hook": "input"}, {"hook": None}]
)
def test_a_chain_of_another_type_hook_priority_or_policy_differs(changed: dict[str, object]) -> None:
    row = {key: value for key, value in (ROW | changed).items() if value is not None}
    expected = {"x": Chain("x", "forward", "filter + 10", ()).shape}
    assert shape([{"chain": ROW}]).chains == expected
    assert shape([{"chain": row}]).chains != expected


def test_the_own_table_needs_neither_chains_nor_ipsets() -> None:
    found = plan(SKELETON, own(backstop=None, table_sets=frozenset()), NOBODY)
    assert kinds(found) == ["nft"]
    assert "set pins" in found.steps[0].text


@pytest.mark.parametrize("name", sorted(OWN_CHAINS))
def test_each_chain_of_the_own_table_is_compared(name: str) -> None:
    less = {chain: shape for chain, shape in OWN_CHAINS.items() if chain != name}
    emptied = OWN_CHAINS | {name: OWN_CHAINS[name][:1]}
    for backstop in (less, emptied):
        assert kinds(plan(SKELETON, own(backstop=backstop), NOBODY)) == ["nft"]


@pytest.mark.parametrize("name", sorted(owntable.SETS.values()))
def test_each_set_of_the_own_table_is_missed(name: str) -> None:
    assert kinds(plan(SKELETON, own(table_sets=SETS - {name}), NOBODY)) == ["nft"]


def test_moving_to_the_own_table_makes_it_first_and_takes_the_rest_away_last() -> None:
    seen = own(backstop=BACKSTOP, table_sets=frozenset(), active=NFT, others={NFT: loaded()}, sets=SET_TYPES)
    assert kinds(plan(SKELETON, seen, NOBODY)) == [
        "nft",
        "driver",
        *["iptables nft"] * 3,
        *["destroy"] * len(SET_TYPES),
    ]


def test_moving_from_the_own_table_keeps_its_decision_until_all_else_stands() -> None:
    empty = {key: {name: [] for name in chains} for key, chains in loaded().items()}
    seen = chained(NFT, tables=empty, backstop=OWN_CHAINS, active=OWN, sets={})
    found = kinds(plan(SKELETON, seen, NOBODY))
    assert found[: len(SET_TYPES) + 1] == [*["sets"] * len(SET_TYPES), "driver"]
    assert found[-1] == "nft"
    assert set(found[len(SET_TYPES) + 1 : -1]) == {"iptables nft"}


def test_moving_between_the_two_iptables_keeps_the_sets() -> None:
    seen = chained(LEGACY, tables={}, active=NFT, others={NFT: loaded()})
    found = kinds(plan(SKELETON, seen, NOBODY))
    assert "destroy" not in found
    assert "sets" not in found
    assert found.index("iptables nft") > max(n for n, kind in enumerate(found) if kind == "iptables legacy")


def test_foreign_rules_of_the_place_that_is_left_stay() -> None:
    old = loaded()
    old[4, "filter"]["DOCKER-USER"].append("-s 198.51.100.9/32 -j DROP")
    found = plan(SKELETON, own(others={NFT: old}), NOBODY)
    assert found.steps
    assert not any("198.51.100.9" in step.text for step in found.steps)


def test_a_host_that_no_driver_fits_is_a_problem_that_cannot_be_mended() -> None:
    seen = own(choice=Choice(OWN, "legacy", "install it", True))
    (problem,) = plan(SKELETON, seen, NOBODY).problems
    assert (problem.part, problem.text, problem.healable) == ("driver", "install it", False)
