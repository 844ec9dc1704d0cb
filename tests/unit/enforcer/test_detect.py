"""Which driver a host gets: recorded facts in, one choice out."""

from __future__ import annotations

import pytest

from enforcer.netfilter import detect
from enforcer.netfilter.detect import LEGACY, NFT, OWN, Choice, Facts, Rules, choose
from enforcer.netfilter.look import native, traces
from enforcer.netfilter.plan import parse_save

BRIDGES = frozenset({"docker0", "corral-0a0b0c0d"})
NOW = Rules(docker=True, hooked=True, named=BRIDGES)
OLDER = Rules(docker=True, hooked=True, named=frozenset({"docker0"}))
UNHOOKED = Rules(docker=True, named=BRIDGES)
NO_LIBRARY = frozenset({NFT, OWN})


@pytest.mark.parametrize(
    ("facts", "current", "settled", "driver"),
    [
        # before Docker
        (Facts(), None, False, NFT),
        (Facts(alternative=NFT), None, False, NFT),
        (Facts(alternative=LEGACY), None, False, LEGACY),
        (Facts(alternative=LEGACY, usable=NO_LIBRARY), None, False, NFT),
        (Facts(usable=frozenset({OWN})), None, False, OWN),
        # one place
        (Facts(nft=NOW, bridges=BRIDGES, alternative=NFT), None, False, NFT),
        (Facts(nft=NOW, bridges=BRIDGES, alternative=LEGACY), None, False, NFT),
        (Facts(legacy=NOW, bridges=BRIDGES, alternative=LEGACY), None, False, LEGACY),
        (Facts(legacy=NOW, bridges=BRIDGES, alternative=NFT), NFT, True, LEGACY),
        (Facts(native=NOW, bridges=BRIDGES), None, False, OWN),
        (Facts(native=NOW, bridges=BRIDGES, alternative=NFT), NFT, True, OWN),
        # an engine that was switched leaves its old rules: what knows the bridges of today is in use
        (Facts(nft=OLDER, legacy=NOW, bridges=BRIDGES, alternative=NFT), NFT, True, LEGACY),
        (Facts(nft=NOW, legacy=OLDER, bridges=BRIDGES, alternative=LEGACY), LEGACY, True, NFT),
        (Facts(nft=OLDER, native=NOW, bridges=BRIDGES, alternative=NFT), NFT, True, OWN),
        (Facts(nft=NOW, legacy=NOW, bridges=BRIDGES, alternative=LEGACY), NFT, True, LEGACY),
        # somebody took the jump away
        (Facts(nft=UNHOOKED, bridges=BRIDGES), NFT, True, NFT),
        (Facts(legacy=UNHOOKED, bridges=BRIDGES), None, False, LEGACY),
        # somebody flushed everything: no other engine
        (Facts(bridges=BRIDGES, alternative=NFT), NFT, True, NFT),
        (Facts(bridges=BRIDGES, alternative=LEGACY), LEGACY, True, LEGACY),
        # an engine that writes no rules
        (Facts(bridges=BRIDGES, alternative=NFT), NFT, False, OWN),
        (Facts(bridges=BRIDGES, alternative=NFT), None, False, OWN),
        (Facts(alternative=NFT), OWN, False, OWN),
        # and starts to write some
        (Facts(nft=NOW, bridges=BRIDGES, alternative=NFT), OWN, False, NFT),
    ],
)
def test_the_driver_is_where_dockers_chain_is_hooked(
    facts: Facts, current: str | None, settled: bool, driver: str
) -> None:
    choice = choose(facts, current, settled)
    assert choice.driver == driver
    assert choice.why
    if sum(rules.hooked for rules in (facts.nft, facts.legacy, facts.native)) < 2:
        assert choice.problem == ""


def test_legacy_without_its_library_denies_and_names_the_fix() -> None:
    for current in (None, NFT, LEGACY):
        choice = choose(Facts(legacy=NOW, bridges=BRIDGES, usable=NO_LIBRARY), current, True)
        assert choice.driver == OWN
        assert "corral[legacy]" in choice.problem
        assert "the legacy tables" in choice.problem


def test_a_program_that_is_missing_moves_no_rules() -> None:
    """What stands goes on standing; the call that needs the program names it."""
    for current in (None, NFT):
        choice = choose(Facts(nft=NOW, bridges=BRIDGES, usable=frozenset({OWN})), current, True)
        assert (choice.driver, choice.problem) == (NFT, "")


def test_legacy_is_never_chosen_where_docker_is_on_nft() -> None:
    """libiptc sees empty tables there."""
    for alternative in ("", NFT, LEGACY):
        for legacy in (detect.NOTHING, OLDER, Rules(docker=True)):
            facts = Facts(nft=NOW, legacy=legacy, bridges=BRIDGES, alternative=alternative)
            for current in (None, NFT, LEGACY, OWN):
                assert choose(facts, current, True).driver == NFT


def test_stale_rules_that_would_drop_are_named_with_what_removes_them() -> None:
    choice = choose(Facts(nft=OLDER, legacy=NOW, bridges=BRIDGES, alternative=LEGACY), None, False)
    assert "corral-0a0b0c0d" in choice.problem
    assert "iptables-nft -F FORWARD" in choice.problem
    # As long as they know every bridge they are only old.
    assert choose(Facts(nft=NOW, legacy=NOW, bridges=BRIDGES, alternative=LEGACY)).problem == ""


def test_a_choice_by_absence_is_not_settled() -> None:
    assert not choose(Facts(bridges=BRIDGES)).settled
    assert not choose(Facts()).settled
    assert choose(Facts(nft=NOW, bridges=BRIDGES)).settled


SAVED = """\
-P INPUT ACCEPT
-P FORWARD DROP
-N DOCKER
-N DOCKER-USER
-N FOREIGN
-A FORWARD -j DOCKER-USER
-A FORWARD -i br-1 ! -o br-1 -j ACCEPT
-A DOCKER ! -i docker0 -o docker0 -j DROP
-A DOCKER-USER -i corral-+ -m comment --comment "corral:0123456789ab" -j CORRAL-OUT
-A FOREIGN -i eth9 -j DOCKER-USER
"""


def test_traces_are_dockers_chains_its_hook_and_the_interfaces_it_names() -> None:
    found = traces({(4, "filter"): parse_save(SAVED)})
    assert (found.docker, found.hooked) == (True, True)
    assert found.named == {"br-1", "docker0", "corral-+"}
    unhooked = SAVED.replace("-A FORWARD -j DOCKER-USER\n", "")
    assert not traces({(4, "filter"): parse_save(unhooked)}).hooked


def test_a_docker_user_that_corral_made_is_no_trace_of_docker() -> None:
    own = "-P FORWARD ACCEPT\n-N DOCKER-USER\n-N CORRAL-OUT\n-A DOCKER-USER -i corral-+ -j CORRAL-OUT\n"
    assert not traces({(4, "filter"): parse_save(own)}).docker
    assert traces({(4, "nat"): {"DOCKER": []}}).docker


def test_the_native_backend_names_bridges_in_its_chains() -> None:
    found = native(["filter-FORWARD", "filter-forward-in__docker0", "filter-forward-in__corral-0a0b0c0d"])
    assert found == Rules(True, True, BRIDGES)
    assert native([]) == detect.NOTHING


def test_a_choice_tells_what_was_found() -> None:
    assert choose(Facts(nft=NOW, bridges=BRIDGES)) == Choice(
        NFT, "Docker's chain is hooked in nft's tables", settled=True
    )
