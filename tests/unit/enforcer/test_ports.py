"""Which ports are isolated and which links put down: deciding only. The kernel's part is a contract test."""

from __future__ import annotations

from dataclasses import replace

from enforcer.netfilter.ports import DOWN, ISOLATE, UP, Fix, Port, judge

BOX = Port(10, "veth-box", "corral-0a0b0c0d", 1, isolated=True, up=True)
OTHER = Port(12, "veth-other", "corral-0a0b0c0d", 2, isolated=True, up=True)
FOREIGN = Port(11, "veth-app", "docker0", 3, isolated=False, up=True)


def acts(*ports: Port) -> set[tuple[str, str]]:
    return {(fix.port.name, fix.act) for fix in judge(ports)}


def test_isolated_ports_and_foreign_containers_are_left_alone() -> None:
    assert judge([BOX, OTHER, FOREIGN]) == ()


def test_a_port_of_a_sandboxs_bridge_is_isolated_and_no_other() -> None:
    assert acts(replace(BOX, isolated=False, netns=None), FOREIGN) == {("veth-box", ISOLATE)}


def test_the_link_that_leads_a_sandbox_elsewhere_is_put_down() -> None:
    stray = replace(FOREIGN, netns=BOX.netns)
    assert judge([stray, BOX]) == (
        Fix(stray, DOWN, "veth-app leads a container of corral-0a0b0c0d to docker0"),
    )
    assert judge([replace(stray, up=False), BOX]) == ()


def test_the_port_that_leads_a_foreign_container_to_a_sandbox_is_put_down_and_its_own_link_stays() -> None:
    late = replace(BOX, index=20, netns=FOREIGN.netns)
    own = Port(15, "veth-more", "br-app", FOREIGN.netns, isolated=False, up=True)
    assert acts(FOREIGN, own, late) == {("veth-box", DOWN)}


def test_a_sandbox_on_a_second_sandboxs_network_keeps_the_first_alone() -> None:
    second = Port(13, "veth-second", "corral-99999999", BOX.netns, isolated=True, up=True)
    assert acts(BOX, second) == {("veth-second", DOWN)}


def test_a_port_comes_up_again_when_what_it_was_put_down_for_is_gone() -> None:
    late = replace(BOX, index=20, up=False)
    assert acts(replace(FOREIGN, netns=BOX.netns), late) == set()
    assert acts(late) == {("veth-box", UP)}


def test_a_link_that_is_no_bridges_port_counts_too() -> None:
    stray = Port(14, "routed", None, BOX.netns, isolated=False, up=True)
    assert acts(BOX, stray) == {("routed", DOWN)}


def test_ports_whose_other_end_is_here_or_unknown_have_nothing_to_do_with_each_other() -> None:
    assert judge([replace(BOX, netns=None), replace(FOREIGN, netns=None)]) == ()
