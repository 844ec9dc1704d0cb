"""The deeds of the machine, each with its effect on the oracle; also what plain tests are written in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from enforcer import pins
from enforcer.netfilter.model import Element
from enforcer.netfilter.skeleton import DOCKER_USER, HOST, PINS, TIMEOUT
from policy.declaration import Declaration, HostService, Name
from policy.identity import StatePaths
from tests.unit.enforcer.machine import checks
from tests.unit.enforcer.machine.faults import Faults
from tests.unit.enforcer.machine.oracle import NOTICED, Oracle, Truth
from tests.unit.enforcer.machine.world import BOXES, Start, World, Zone

POLICIES = (
    Declaration(names=(Name(host="a.example"),)),
    Declaration(
        names=(Name(host="a.example"), Name(host="b.example", ports=(80, 443), optional=True)),
        host_services=(HostService(name="model", port=8081),),
    ),
    Declaration(names=(Name(host="b.example"), Name(host="c.example", optional=True))),
)
OVERLAP, OVERLAPPED = "203.0.113.4/31", ("203.0.113.4", "203.0.113.5")
# Two of three are as corral creates them.
FLAVOURS: tuple[dict[str, Any], ...] = ({}, {}, {}, {}, {}, {"host_config": {"Privileged": True}}, {"host_config": {"Dns": []}}, {"user": "0:0"})  # fmt: skip
FILTER, NAT = (4, "filter"), (4, "nat")


class Player:
    """``deeds``: how many there were since everything was last at rest."""

    def __init__(
        self,
        latency: float = 0.0,
        zones: dict[str, tuple[str, ...]] | None = None,
        world: World | None = None,
    ) -> None:
        self.world = world or World(latency)
        self.oracle = Oracle()
        self.oracle.clock = self.world.clock()
        self.world.heard = self.oracle.heard
        self.world.ready = self._ready
        self.world.on_killed = self.oracle.restarted
        for name, addresses in (zones or {}).items():
            self.world.zones[name] = Zone("ok", addresses)
        self.slots: dict[int, str] = {}
        self.count = 0
        self.hold = False
        self.deeds = 0
        # Somebody else wrote to our sets: what is published may be closed until the next pass.
        self.disturbed = False
        self.problems: list[str] = []
        self.world.start_service()
        self.act(lambda: None)

    def close(self) -> None:
        self.world.close()

    # -- time, and what has to hold after each deed

    def act(self, deed: Callable[[], object], seconds: float = 0.05) -> None:
        self.deeds += 1
        deed()
        if not self.hold:
            self.world.deliver()
        if self.world.service is None:
            self.world.start_service()
        self._pass(seconds, lambda: self.world.run(seconds))
        self._check()

    def _pass(self, seconds: float, go: Callable[[], None], ran: bool = True) -> None:
        world = self.world
        before = (id(world.service), world.writer.starts, len(world.faults.happened))
        calm = world.service is not None and world.writer.writer is not None and world.docker.up
        go()
        after = (id(world.service), world.writer.starts, len(world.faults.happened))
        if world.writer.starts != before[1] or len(world.faults.happened) != before[2]:
            self.disturbed = True
        self.oracle.passed(seconds, calm and before == after, ran)

    def _calm(self) -> bool:
        """Whether what happens now is told at once, and nothing stands in the way of acting on it."""
        world, faults = self.world, self.world.faults
        armed = any(faults.counts[kind] < number for kind, number in faults.fail.items())
        return (
            not self.hold
            and not armed
            and faults.kill_service is None
            and faults.kill_writer is None
            and world.service is not None
            and world.service.tracker.looked.is_set()
            and world.writer.writer is not None
            and not world.writer.writer.unsettled
            and world.docker.up
        )

    def _check(self) -> None:
        self._settled_moves()
        checks.nothing_is_open_outside_policy(self.world, self.oracle)
        checks.the_skeleton_stands_or_is_being_mended(self.world)
        checks.others_are_left_alone(self.world)
        checks.the_service_did_not_end_itself(self.world)
        if not self.disturbed:
            checks.what_is_published_is_open(self.world, self.oracle)
        assert not self.problems, self.problems

    def _ready(self, start: Start) -> None:
        truth = self.oracle.truths.get(start.ident)
        if truth is None or not truth.deserving or self.disturbed:
            return
        try:
            checks.a_ready_session_has_its_policy(self.world, truth, start)
        except AssertionError as error:
            self.problems.append(f"{start.ident} became ready: {error}")

    def skip(self, seconds: float, asleep: bool = False) -> None:
        """A long time in which nothing could run, or the machine was asleep."""

        def go() -> None:
            if asleep:
                self.world.sleep(seconds)
            else:
                self.world.jump(seconds)
                # The kernel forgets what nobody renewed.
                self.disturbed = self.disturbed or seconds >= TIMEOUT / 2

        self._pass(seconds, go, ran=False)
        if self.world.service is None:
            self.world.start_service()
        self.world.renew_other()
        self.act(lambda: None, 1.5)

    def come_to_rest(self) -> None:
        """No more trouble; after one full pass everything has to agree."""
        world = self.world
        world.faults.fail.clear()
        world.faults.kill_service = world.faults.kill_writer = None
        self.hold = False
        for zone in world.zones.values():
            zone.latency = 0.01
        world.kernel.bridge_filter_stuck = False
        if world.kernel.bridge_filter != (1, 1):
            world.kernel.bridge_filter = (1, 1)
            world.writer.rules_moved()
        if not world.docker.up:
            world.find_docker()
        self.act(lambda: None, 0.2)
        world.renew_other()
        self.act(lambda: None, NOTICED + 1)
        service = world.service
        assert service is not None
        self.act(lambda: service.names.step(pins.Refresh()), 1.0)
        self.oracle.forget_the_past()
        self.disturbed = False
        self._check()
        checks.everything_has_come_to_rest(world, self.oracle)
        checks.a_second_pass_writes_nothing(world)
        self.deeds = 0

    # -- containers

    def create(self, slot: int, policy: int = 0, flavour: int = 0) -> Truth | None:
        """``corral run`` in a slot: four slots of one sandbox, two of another; two share an address."""
        if not self.world.docker.up:
            return None
        if slot in self.slots:
            self.deed(slot, "destroy")
        self.count += 1
        ident = f"c{self.count}"
        box = BOXES[slot // 4]
        address, session = box.address(min(slot % 4, 2)), f"{self.count:08x}"
        options, declaration = FLAVOURS[flavour], POLICIES[policy]
        truth = Truth(
            ident,
            box,
            address,
            StatePaths(self.world.docker.data / box.sandbox.id).hosts(session),
            declaration,
            compliant=not options,
        )
        for other in self.oracle.truths.values():
            if other.address == address and other.deserving:
                # The hosts file of the one that lost it says what it said.
                truth.twin = other.twin = True
        self.oracle.truths[ident] = truth
        self.slots[slot] = ident

        def deed() -> None:
            self.world.docker.create(ident, box, session, address, declaration, **options)
            self.world.wait_ready(ident)

        self.act(deed)
        return truth

    def deed(self, slot: int, what: str) -> None:
        docker = self.world.docker
        ident = self.slots.get(slot)
        if ident is None or not docker.up or ident not in docker.inspects:
            return
        truth = self.oracle.truths.get(ident)
        if truth is None:
            return
        if what == "start" and not truth.running and docker.inspects[ident]["State"]["Status"] == "created":
            truth.running = True
            self.act(lambda: docker.start(ident))
        elif what in ("die", "restart") and truth.running:
            self.oracle.changed(truth, self._calm())
            truth.alive = truth.running = what == "restart"
            # Nobody reads the hosts file of a dead container: it says what it said until the next pass.
            self.disturbed = self.disturbed or what == "restart"

            def die() -> None:
                docker.die(ident)
                if what == "restart":
                    docker.start(ident)

            self.act(die)
        elif what in ("destroy", "recreate"):
            self.oracle.changed(truth, self._calm())
            truth.alive = truth.running = False
            del self.slots[slot]
            self.act(lambda: docker.destroy(ident))
            if what == "recreate":
                self.create(slot, (POLICIES.index(truth.declaration) + 1) % len(POLICIES))
        elif what == "rename":
            self.act(lambda: docker.rename(ident, f"other-{ident}"))
        elif what in ("pause", "unpause") and truth.running:
            self.act(lambda: docker.pause(ident, what == "pause"))
        elif what == "elsewhere" and truth.running and not truth.moved:
            self.oracle.changed(truth, self._calm())
            truth.moved = True
            self.act(lambda: docker.attach("bridge", ident))

    def _settled_moves(self) -> None:
        """The service may have taken containers back to where they belong."""
        for truth in self.oracle.truths.values():
            row = self.world.docker.inspects.get(truth.ident)
            if row is not None and truth.moved:
                own = {truth.box.sandbox.network}
                truth.moved = set(row["NetworkSettings"]["Networks"]) != own

    def stranger(self, number: int) -> None:
        docker = self.world.docker
        network = BOXES[number].sandbox.network
        if docker.up and network in docker.nets:
            self.count += 1
            self.act(lambda: docker.create_stranger(f"s{self.count}", network))

    def joiner(self, slot: int) -> None:
        """A container that shares the network of a session."""
        docker, target = self.world.docker, self.slots.get(slot)
        if docker.up and target in docker.inspects:
            self.count += 1
            self.act(lambda: docker.create_joiner(f"j{self.count}", str(target)))

    def toggle_box(self, number: int) -> None:
        """A sandbox's network can go only while no container of it runs."""
        world, box = self.world, BOXES[number]
        if not world.docker.up:
            return
        if box.sandbox.network not in world.docker.nets:
            self.disturbed = True
            self.act(lambda: world.add_box(box), 0.5)
            return
        if any(t.box is box and t.running for t in self.oracle.truths.values()):
            return
        for truth in self.oracle.truths.values():
            if truth.box is box:
                self.oracle.changed(truth, told=False)
        self.disturbed = True
        self.act(lambda: world.remove_box(box), 0.5)

    def toggle_overlap(self) -> None:
        docker = self.world.docker
        if not docker.up:
            return
        if "overlap" in docker.nets:
            for address in OVERLAPPED:
                del self.oracle.forbidden[address]
            self.act(lambda: docker.remove_network("overlap"))
        else:
            for address in OVERLAPPED:
                self.oracle.forbidden[address] = self.oracle.healthy
            self.act(lambda: docker.add_network("overlap", OVERLAP))

    # -- events

    def events(self, order: str) -> None:
        docker = self.world.docker
        self.hold = order == "hold"
        waiting = docker.events
        if order == "drop":
            docker.events = []
        elif order == "double":
            docker.events = [*waiting, *waiting]
        elif order == "reverse":
            docker.events = waiting[::-1]
        elif order == "half":
            docker.events = waiting[::2]
        self.act(lambda: None)

    def toggle_docker(self, kills: bool = False) -> None:
        world = self.world
        if not world.docker.up:
            self.act(world.find_docker)
            return

        def lose() -> None:
            if kills:
                for truth in self.oracle.truths.values():
                    if truth.running:
                        self.oracle.changed(truth, told=False)
                        truth.alive = truth.running = False
                        world.docker.die(truth.ident)
                        if int(truth.ident[1:]) % 2:
                            world.docker.destroy(truth.ident)
            world.lose_docker()

        self.act(lose)

    # -- names

    def zone(
        self, name: str, kind: str, found: tuple[str, ...] = (), ttl: int = 60, latency: float = 0.01
    ) -> None:
        self.act(lambda: self.world.zones.__setitem__(name, Zone(kind, found, ttl, latency)))

    def packets(self, which: int) -> None:
        """A container uses one of its elements."""
        elements = sorted(checks.held(self.world, PINS))
        if elements:
            element = elements[which % len(elements)]
            self.oracle.used(element)
            content = self.world.kernel.sets[PINS]
            until, count, comment = content[element]
            content[element] = (until, count + 1, comment)
            self.act(lambda: None)

    # -- others in the kernel

    def vandalise(self, deed: str) -> None:
        """Somebody with root changes rules: ours, or their own above ours."""
        kernel = self.world.kernel
        table = kernel.tables[FILTER]
        if DOCKER_USER not in table:
            return
        if deed == "jump":
            table[DOCKER_USER] = [line for line in table[DOCKER_USER] if "CORRAL-" not in line]
        elif deed == "flush-user":
            table[DOCKER_USER] = []
        elif deed == "flush-out":
            table["CORRAL-OUT"] = []
        elif deed == "flush-input":
            table["INPUT"] = []
        elif deed == "accept-first":
            table["INPUT"].insert(0, "-j ACCEPT")
        elif deed == "foreign-rule" and len(table[DOCKER_USER]) < 12:
            table[DOCKER_USER].insert(0, f"-s 198.51.100.{len(table[DOCKER_USER])} -j RETURN")
        elif deed in ("backstop", "ruleset"):
            kernel.backstop, kernel.gateways, kernel.owners = None, frozenset(), frozenset()
        elif deed == "gateways":
            kernel.gateways = frozenset({"198.51.100.1"})
        elif deed == "nat":
            kernel.tables[NAT]["POSTROUTING"] = []
        elif deed == "chains":
            table["CORRAL-PASS"] = ["-j ACCEPT"]
        if deed == "ruleset":
            # Docker's own part comes back when Docker does; the chains stay empty.
            for chains in kernel.tables.values():
                for name in [name for name in chains if name.startswith("CORRAL-")]:
                    del chains[name]
                for name in chains:
                    chains[name] = []
            table.pop(DOCKER_USER)
        self.world.foreign = kernel.foreign()
        self.act(self.world.writer.rules_moved)

    def meddle(self, deed: str, which: int = 0) -> None:
        """Somebody with root changes the content of our sets."""
        kernel, oracle = self.world.kernel, self.oracle
        if PINS not in kernel.sets:
            return
        own = sorted(checks.held(self.world, PINS))
        self.disturbed = True
        strange: tuple[str, Element] | None = None
        if deed == "delete" and own:
            del kernel.sets[PINS][own[which % len(own)]]
        elif deed == "flush":
            for name in (PINS, HOST):
                kernel.sets[name] = {e: v for e, v in kernel.sets[name].items() if e.src == "172.16.9.2"}
        elif deed == "add":
            strange = (PINS, Element(BOXES[0].address(which % 3), "tcp", 22, "203.0.113.7"))
        elif deed == "add-unclaimed":
            kernel.sets[PINS][Element("172.16.40.2", "tcp", 22, "203.0.113.7")] = (
                self.world.loop.now + 600,
                0,
                "",
            )
        elif deed == "add-host":
            strange = (HOST, Element(BOXES[0].address(which % 3), "tcp", 22, BOXES[0].gateway))
        if strange is not None:
            kernel.sets[strange[0]][strange[1]] = (self.world.loop.now + 600, 0, "")
            oracle.foreign[strange[1]] = oracle.healthy + NOTICED
        self.act(lambda: None)

    def bridge_filter(self, value: int, stuck: bool = False) -> None:
        """Somebody switches filtering between ports off or on; ``stuck``: it cannot be switched on again."""
        self.world.kernel.bridge_filter = (value, 1)
        self.world.kernel.bridge_filter_stuck = stuck and value == 0
        self.disturbed = True
        self.act(self.world.writer.filter_moved)

    # -- crashes and failures

    def kill_service_at(self, at: int) -> None:
        self.world.faults.kill_service = at
        self.act(lambda: None)

    def kill_service(self, away: float = 0.0) -> None:
        self.world.kill_service()
        if away:
            self._pass(away, lambda: self.world.run(away))
        self.act(lambda: None)

    def restart_at_rest(self, who: str) -> None:
        """A process dies while nothing else happens: what is published stays so, and open."""
        self.come_to_rest()
        self._past_what_is_due(1.0)
        before = self._published()
        if who == "writer":
            self.world.writer.kill()
            self.act(lambda: None, 0.5)
        else:
            self.kill_service(0.5)
        assert self._published() == before, f"a restart of the {who} took something away"
        checks.what_is_published_is_open(self.world, self.oracle)

    def _past_what_is_due(self, seconds: float) -> None:
        """Wait until no answer runs out within ``seconds`` by itself: that is no crash's doing."""
        for _ in range(50):
            service = self.world.service
            assert service is not None
            due = pins.next_due(service.names.state)
            if due is None or due > self.world.loop.now + seconds:
                return
            self.act(lambda: None, seconds)
        raise AssertionError("the names never come to rest")

    def _published(self) -> dict[str, dict[str, set[str]]]:
        return {
            t.ident: checks.published(t) for t in self.oracle.truths.values() if t.deserving and not t.twin
        }

    def kill_writer_at(self, at: int) -> None:
        self.world.faults.kill_writer = at
        self.act(lambda: None)

    def fail(self, kind: str, at: int = 1) -> None:
        faults: Faults = self.world.faults
        faults.fail[kind] = faults.counts[kind] + at
        self.act(lambda: None)
