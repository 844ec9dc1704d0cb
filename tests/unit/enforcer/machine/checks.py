"""The invariants: what has to hold after every step, and what once nothing happens any more."""

from __future__ import annotations

from enforcer import desired, pins
from enforcer.netfilter.model import Element
from enforcer.netfilter.skeleton import HOST, PINS
from tests.unit.enforcer.machine.oracle import GOOD, Oracle, Truth
from tests.unit.enforcer.machine.world import BOXES, OTHER_PIN, Start, World

SOURCES = ("172.16.0.", "172.16.1.")


def held(world: World, name: str) -> set[Element]:
    """Return the living elements of a set that are this user's."""
    now = world.loop.now
    rows = world.kernel.sets.get(name, {})
    return {e for e, (until, _, _) in rows.items() if until > now and e.src.startswith(SOURCES)}


def hosts_file(truth: Truth) -> dict[str, set[str]]:
    """Return what a container's hosts file says: name -> addresses."""
    found: dict[str, set[str]] = {}
    for line in truth.hosts.read_text().splitlines():
        words = line.split()
        if len(words) == 2 and words[0] != "#":
            found.setdefault(words[1], set()).add(words[0])
    return found


def published(truth: Truth) -> dict[str, set[str]]:
    """Return the names of the policy in a container's hosts file, those without addresses left out."""
    names = {name.host for name in truth.declaration.names}
    return {name: addresses for name, addresses in hosts_file(truth).items() if name in names}


def nothing_is_open_outside_policy(world: World, oracle: Oracle) -> None:
    for element in held(world, PINS):
        why = oracle.why_not(element)
        assert why is None, f"{element} is open: {why}"
    for element in held(world, HOST):
        why = oracle.why_not_host(element)
        assert why is None, f"{element} of the host is open: {why}"
    assert not world.kernel.violations, world.kernel.violations


def the_skeleton_stands_or_is_being_mended(world: World) -> None:
    standing = world.kernel.standing()
    assert not standing or world.writer.repairing or world.kernel.bridge_filter != (1, 1), standing


def others_are_left_alone(world: World) -> None:
    assert world.kernel.foreign() == world.foreign


def the_service_did_not_end_itself(world: World) -> None:
    assert not world.ended, "\n".join(world.ended)


def what_is_published_is_open(world: World, oracle: Oracle) -> None:
    """I1 outside: an address in a hosts file has all its ports in the kernel."""
    service = world.service
    if service is None:
        return
    elements = held(world, PINS)
    for truth in oracle.truths.values():
        session = service.tracker.sessions.get(truth.ident)
        if not truth.deserving or truth.twin or session is None or session.problems:
            continue
        said = published(truth)
        for name in truth.declaration.names:
            for address in said.get(name.host, ()):
                for port in name.ports:
                    element = Element(truth.address, "tcp", port, address)
                    assert element in elements, f"{element} is published and not open"


def a_ready_session_has_its_policy(world: World, truth: Truth, start: Start) -> None:
    assert start.answer is not None
    said, elements, names = published(truth), held(world, PINS), start.answer["names"]
    for name in truth.declaration.names:
        assert names[name.host] or name.optional, f"ready without an address of {name.host}"
        assert set(names[name.host]) == said.get(name.host, set()), name.host
        for address in names[name.host]:
            for port in name.ports:
                assert Element(truth.address, "tcp", port, address) in elements, (name.host, address)
    for service in truth.declaration.host_services:
        row = Element(truth.address, "tcp", service.port, truth.box.gateway)
        assert row in held(world, HOST), row


def everything_has_come_to_rest(world: World, oracle: Oracle) -> None:
    """Actual == desired == hosts files, by the service's own account and by the oracle's."""
    service, writer = world.service, world.writer.writer
    assert service is not None
    assert writer is not None
    assert [p.text for p in writer.audit().problems if p.part != "hook"] == []
    assert service.errors == {}
    wanted = desired.desired(
        service.tracker.sessions.values(),
        service.tracker.networks.values(),
        pins.allowed(service.names.state),
    )
    elements = held(world, PINS)
    assert {(e.src, e.proto, e.port, e.dst) for e in elements} == set(wanted.pins)
    assert {(e.src, e.proto, e.port, e.dst) for e in held(world, HOST)} == set(wanted.host)
    assert Element(*OTHER_PIN[:4]) in world.kernel.entries(PINS)  # type: ignore[arg-type]
    nobody_strange_is_left(world)
    shown = pins.published(service.names.state)
    networks = {net.name for net in service.tracker.networks.values()}
    by_address: dict[str, list[Truth]] = {}
    for truth in oracle.truths.values():
        if truth.deserving and truth.box.sandbox.network in networks:
            by_address.setdefault(truth.address, []).append(truth)
    for address, twins in by_address.items():
        sessions = [service.tracker.sessions[truth.ident] for truth in twins]
        winners = [t for t, s in zip(twins, sessions, strict=True) if not s.problems]
        assert len(winners) == 1, f"{len(winners)} of {len(twins)} containers have {address}"
        truth = winners[0]
        assert published(truth) == {n: set(a) for n, a in shown[truth.ident].items() if a}
        for name in truth.declaration.names:
            known = oracle.names.get(name.host)
            assert known is not None, f"{name.host} was never asked for"
            if known.state == "OK":
                latest = [a for a in known.latest if a in GOOD and a not in oracle.forbidden]
                assert published(truth).get(name.host, set()) == set(latest)
                for dst in latest:
                    for port in name.ports:
                        assert Element(address, "tcp", port, dst) in elements
            if service.names.state.names[name.host].state is pins.NameState.GONE:
                assert name.host not in published(truth)
        for host_service in truth.declaration.host_services:
            row = Element(address, "tcp", host_service.port, truth.box.gateway)
            assert row in held(world, HOST)


def nobody_strange_is_left(world: World) -> None:
    """Who does not belong to a sandbox is off its network, and stopped when it cannot be taken off."""
    ours = {box.sandbox.network for box in BOXES} & world.docker.nets.keys()
    for ident, row in world.docker.inspects.items():
        networks = set(row["NetworkSettings"]["Networks"])
        if row["Config"]["Labels"]:
            assert row["State"]["Status"] == "exited" or networks - {"bridge"} == networks, ident
            continue
        assert not ours & networks, ident
        joins = str(row["HostConfig"]["NetworkMode"]).removeprefix("container:")
        target = world.docker.inspects.get(joins)
        if target is not None and ours & set(target["NetworkSettings"]["Networks"]):
            assert not row["State"]["Running"], f"{ident} runs in the network of {joins}"


def a_second_pass_writes_nothing(world: World) -> None:
    service = world.service
    assert service is not None
    world.loop.create_task(service.tracker.reconcile())
    world.run(0.5)
    before, writes, files = _moved(world), len(world.kernel.writes), world.faults.places["hosts"]
    world.loop.create_task(service.tracker.reconcile())
    world.run(0.5)
    if _moved(world) != before:
        # The time of an address was over in this very moment, and it went: a pass with a reason of its own.
        a_second_pass_writes_nothing(world)
        return
    assert world.kernel.writes[writes:] == []
    assert world.faults.places["hosts"] == files


def _moved(world: World) -> int:
    return -1 if world.service is None else world.service.names.state.generation
