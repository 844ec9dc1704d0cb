"""What is swept, what is not, and that it ends in time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest

from corral import engine, network, process, state, trees
from corral import prune as on
from corral.context import Invocation
from corral.lifecycle import Prepared, created
from corral.prune import Prune, age, prune
from corral.pruned import Outcome, render
from corral.session import Request
from corral.subnets import Plan
from corral.sweeping import Container, Directory, Found, Image, Network, decide, unattended
from policy import holding
from policy.container import Limits
from policy.declaration import LABEL_SERVICE
from policy.errors import EngineError, EngineGoneError
from policy.identity import StatePaths
from tests.unit.corral.fakes import FakeDocker, FakeEnforcer, refusal

PLAN = Plan(IPv4Network("172.16.0.0/26"))
BOX, OTHER = "box-0a0b0c0d", "other-0a0b0c0e"
UNIT = "corral-relay-0a0b0c0d-8081.service"


def one(state_: str = "exited", sandbox: str = BOX, session: str = "00000001", **more: Any) -> Container:
    return Container(f"id{session}", f"corral-{sandbox}-main-{session}", sandbox, session, state_, **more)


@pytest.mark.parametrize("state_", ["exited", "dead", "created"])
def test_what_has_ended_or_never_began_goes_unless_somebody_looks_after_it(state_: str) -> None:
    assert decide(Found((one(state_),))).containers == (one(state_),)
    assert decide(Found((one(state_, held=True),)), running=True).containers == ()
    assert decide(Found((one(state_, kept=True),)), running=True).containers == ()


@pytest.mark.parametrize("state_", ["running", "paused", "restarting", "removing", "unheard-of"])
def test_what_runs_or_is_in_an_unknown_state_is_no_leftover(state_: str) -> None:
    found = Found(
        (one(state_),), (Network("n", f"0-corral-{BOX}", BOX),), (UNIT,), (Directory(BOX, "00000001"),)
    )
    plan = decide(found)
    assert (plan.containers, plan.networks, plan.relays, plan.directories) == ((), (), (), ())


def test_an_agent_that_is_always_on_is_ended_by_down_alone() -> None:
    found = Found((one("running", always_on=True),), (Network("n", f"0-corral-{BOX}", BOX),), (UNIT,))
    plan = decide(found, running=True)
    assert (plan.containers, plan.networks, plan.relays) == ((), (), ())
    assert [kept.why for kept in plan.kept] == ["its agent is always on; corral down ends it"]
    assert decide(Found((one(always_on=True),))).containers


def test_what_runs_goes_with_all_of_its_sandbox_when_that_is_asked_for() -> None:
    found = Found(
        (one("running", held=True),),
        (Network("n", f"0-corral-{BOX}", BOX),),
        (UNIT,),
        (Directory(BOX, "00000001", held=True), Directory(BOX, "00000002", held=True)),
        busy=frozenset({BOX}),
    )
    plan = decide(found, running=True)
    assert plan.running == found.containers
    assert (plan.networks, plan.relays) == (found.networks, found.relays)
    assert plan.directories == (Directory(BOX, "00000001", held=True),)


def test_a_proxy_goes_with_the_last_session_that_runs_and_is_never_told_of() -> None:
    proxy, runs = one("running", session="0a0b0c0d", proxy=True), one("running")
    alone = decide(Found((proxy,), relays=(UNIT,)))
    assert alone.containers == (proxy,) and alone.relays == (UNIT,)
    # Nobody has to be asked whether it may end.
    assert alone.running == ()
    beside = decide(Found((proxy, runs), relays=(UNIT,)))
    assert (beside.containers, beside.relays) == ((), ())
    assert [kept.what for kept in beside.kept] == [runs.name]
    assert decide(Found((proxy, runs)), running=True).containers == (runs, proxy)
    assert decide(Found((proxy, one(kept=True)))).containers == (proxy,)
    assert decide(Found((proxy, one("unheard-of")))).containers == ()
    assert decide(Found((proxy,), busy=frozenset({BOX}))).containers == ()
    assert decide(Found((proxy, one("running", OTHER)))).containers == (proxy,)


def test_a_proxy_that_a_session_has_come_to_meanwhile_stays(
    work: Prune, docker_engine: FakeDocker, prepared: Prepared, orphan: Callable[[str], dict[str, Any]]
) -> None:
    first = orphan("exited")
    proxy = {
        **first,
        "Id": "p",
        "State": "running",
        "Labels": {**first["Labels"], LABEL_SERVICE: "proxy"},
        "Names": [first["Names"][0].replace("-main-", "-proxy-")],
    }
    docker_engine.containers_by_id["p"] = proxy
    plan = decide(work.look(images=False))
    assert {one.ident for one in plan.containers} == {first["Id"], "p"}
    docker_engine.containers_by_id["q"] = {**first, "Id": "q", "State": "running"}
    work.carry_out(plan, lambda _: None)
    assert set(docker_engine.containers_by_id) == {"p", "q"}
    del docker_engine.containers_by_id["q"]
    sweep(work)
    assert docker_engine.containers_by_id == {}


def test_a_sandbox_that_a_command_works_with_keeps_its_network_and_relays() -> None:
    nets = (Network("n", f"0-corral-{BOX}", BOX), Network("m", f"0-corral-{OTHER}", OTHER))
    plan = decide(Found(networks=nets, relays=(UNIT,), busy=frozenset({BOX})))
    assert (plan.networks, plan.relays) == (nets[1:], ())
    assert decide(Found(networks=nets, relays=(UNIT,))).relays == (UNIT,)


def test_images_go_when_they_have_no_name_or_no_policy_and_only_when_asked() -> None:
    images = (
        Image(("corral/box-0a0b0c0d:latest",), BOX),
        Image(("sha256:1",), BOX, tagged=False),
        Image(("corral/other-0a0b0c0e:latest",), OTHER),
    )
    found = Found(images=images, strange=2, wanted=frozenset({BOX}))
    assert decide(found).images == ()
    plan = decide(found, images=True)
    assert plan.images == images[1:]
    assert "2 images" in {kept.what for kept in plan.kept}


NET = Network("n", f"0-corral-{BOX}", BOX)
PROXY = one("running", session="0a0b0c0d", proxy=True)
KNOWN = frozenset({BOX})


@pytest.mark.parametrize(
    ("found", "goes"),
    [
        # What ended, or never began, and nobody looks after.
        ((one("exited"),), {"container", "relay", "network"}),
        ((one("dead"),), {"container", "relay", "network"}),
        ((one("created"),), {"container", "relay", "network"}),
        # A command line lives.
        ((one("created", held=True),), set()),
        ((one("exited", held=True),), set()),
        # Somebody wants to read it: corral prune takes the last two, which a person calls.
        ((one("exited", kept=True),), set()),
        ((one("exited", left=True),), set()),
        ((one("exited", always_on=True),), set()),
        # What runs, whoever started it.
        ((one("running"),), set()),
        ((one("running", left=True),), set()),
        ((one("paused"),), set()),
        ((one("unheard-of"),), set()),
        # One ended beside another that runs.
        ((one("exited"), one("running", session="00000002")), {"container"}),
        # A proxy, without a session that runs, beside one that may be read, beside one that runs.
        ((PROXY,), {"container", "relay", "network"}),
        ((PROXY, one("exited", left=True)), {"container"}),
        ((PROXY, one("running")), set()),
        # Nothing at all.
        ((), {"relay", "network"}),
    ],
)
def test_at_a_start_of_the_service_what_nobody_needs_goes_and_what_one_may_read_stays(
    found: tuple[Container, ...], goes: set[str]
) -> None:
    there = Found(found, (NET,), (UNIT,), (Directory(BOX, "00000001"),), known=KNOWN)
    plan = unattended(there)
    kinds = {"container": plan.containers, "relay": plan.relays, "network": plan.networks}
    assert {kind for kind, things in kinds.items() if things} == goes
    assert all(one.proxy or one.state in {"exited", "dead", "created"} for one in plan.containers)
    # To whom would it be told what a session changed?
    assert (plan.directories, plan.images, plan.kept) == ((), (), ())


def test_at_a_start_of_the_service_a_command_that_makes_a_session_keeps_what_it_made() -> None:
    there = Found((PROXY,), (NET,), (UNIT,), known=KNOWN)
    assert unattended(there).networks
    plan = unattended(replace(there, busy=KNOWN))
    assert (plan.containers, plan.relays, plan.networks) == ((), (), ())


def test_at_a_start_of_the_service_a_sandbox_whose_state_is_elsewhere_is_let_be() -> None:
    there = Found((one("created"), PROXY), (NET,), (UNIT,), known=frozenset({OTHER}))
    plan = unattended(there)
    assert (plan.containers, plan.relays, plan.networks) == ((), (), ())
    assert decide(there).containers and decide(there).networks and decide(there).relays


@pytest.fixture(autouse=True)
def relays(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Units that the user's manager has; ``stop`` stops one."""
    units: set[str] = set()

    def run(argv: tuple[str, ...], **_: Any) -> process.Completed:
        if "stop" in argv:
            units.discard(argv[-1])
        listing = "".join(f"{unit} loaded active running corral relay\n" for unit in sorted(units))
        return process.Completed(tuple(argv), 0, listing, "")

    monkeypatch.setattr(process, "run", run)
    yield units


class Clock:
    """Time that goes by while somebody sleeps, and by ``step`` at each look at it."""

    def __init__(self) -> None:
        self.now, self.step = 0.0, 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def work(invocation: Invocation, docker_engine: FakeDocker, enforcer: FakeEnforcer, clock: Clock) -> Prune:
    return Prune(
        invocation.user,
        invocation.data,
        docker_engine,  # type: ignore[arg-type]
        enforcer,  # type: ignore[arg-type]
        clock=clock,
        sleep=clock.sleep,
    )


@pytest.fixture
def prepared(invocation: Invocation, docker_engine: FakeDocker) -> Prepared:
    loaded = invocation.loaded
    state.prepare(invocation.paths, loaded.profile)
    state.remember_project(invocation.paths, loaded.project)
    network._create(invocation.api, loaded.sandbox, invocation.user.uid, [PLAN.subnet], [])
    return Prepared(invocation.user, "sha256:1", PLAN, {}, Limits())


@pytest.fixture
def orphan(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker
) -> Callable[[str], dict[str, Any]]:
    """What a session leaves whose command line was killed, in a state of Docker's."""

    def make(status: str) -> dict[str, Any]:
        body, home = None, invocation.paths.session("00000001")
        with created(invocation, prepared, Request("run", ("agent",), "00000001")) as session:
            if status == "running":
                docker_engine.start(session.ident)
            body = docker_engine.containers_by_id[session.ident]
        body["State"] = status
        docker_engine.containers_by_id[str(body["Id"])] = body
        (home / "home").mkdir(parents=True)
        docker_engine.calls.clear()
        return dict(body)

    return make


def sweep(work: Prune, **wanted: bool) -> Outcome:
    plan = decide(work.look(images=wanted.get("images", False)), **wanted)
    return work.carry_out(plan, lambda _: None)


@pytest.mark.parametrize("status", ["exited", "created", "dead"])
def test_everything_of_a_killed_session_goes_and_state_stays(
    work: Prune,
    orphan: Callable[[str], dict[str, Any]],
    invocation: Invocation,
    docker_engine: FakeDocker,
    enforcer: FakeEnforcer,
    relays: set[str],
    status: str,
) -> None:
    row = orphan(status)
    relays |= {
        f"corral-relay-{invocation.loaded.sandbox.token}-8081.service",
        "my-corral-relay-0a0b0c0d-1.service",
    }
    kept = invocation.paths.home / invocation.loaded.profile.state_dirs[0] / "session.db"
    kept.write_text("x")
    outcome = sweep(work)
    assert [thing.kind for thing in outcome.removed] == ["container", "relay", "network", "session"]
    assert outcome.left == []
    assert docker_engine.containers_by_id == {} and docker_engine.networks_by_name == {}
    assert not invocation.paths.session("00000001").exists()
    assert row["Id"] in enforcer.withdrawn
    assert relays == {"my-corral-relay-0a0b0c0d-1.service"}
    assert kept.read_text() == "x"
    assert sweep(work).removed == []


def test_a_session_with_a_living_command_line_is_not_touched(
    work: Prune, invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker
) -> None:
    with created(invocation, prepared, Request("run", ("agent",), "00000001")) as session:
        for status in ("created", "running", "exited"):
            docker_engine.containers_by_id[session.ident]["State"] = status
            assert sweep(work).removed == []
        assert invocation.paths.session("00000001").is_dir()


def test_what_was_made_for_a_session_that_is_not_there_yet_is_not_idle(
    work: Prune, invocation: Invocation, prepared: Prepared
) -> None:
    lock = invocation.in_use
    try:
        assert sweep(work).removed == []
    finally:
        os.close(lock)
    assert [thing.kind for thing in sweep(work).removed] == ["network"]


def test_what_is_kept_stays_and_is_told(
    work: Prune, orphan: Callable[[str], dict[str, Any]], invocation: Invocation, docker_engine: FakeDocker
) -> None:
    row = orphan("exited")
    (invocation.paths.session("00000001") / holding.KEPT).touch()
    outcome = sweep(work, running=True)
    assert outcome.removed == []
    assert [kept.what for kept in outcome.kept] == [row["Names"][0].lstrip("/")]
    assert invocation.paths.session("00000001").is_dir()


def test_what_runs_is_ended_only_when_that_is_asked_for(
    work: Prune, orphan: Callable[[str], dict[str, Any]], docker_engine: FakeDocker
) -> None:
    orphan("running")
    assert sweep(work).removed == []
    assert [thing.kind for thing in sweep(work, running=True).removed] == ["container", "network", "session"]
    assert docker_engine.calls.index("kill") < docker_engine.calls.index("remove")


@pytest.mark.parametrize(
    ("label", "value"),
    [("uid", "4242"), ("sandbox", "corralled"), ("session", "x"), ("service", "other")],
)
def test_a_container_of_other_labels_or_another_name_is_not_ours(
    work: Prune,
    orphan: Callable[[str], dict[str, Any]],
    docker_engine: FakeDocker,
    label: str,
    value: str,
) -> None:
    row = orphan("exited")
    docker_engine.containers_by_id[row["Id"]]["Labels"][f"io.corral.{label}"] = value
    assert "container" not in {thing.kind for thing in sweep(work, running=True).removed}


@pytest.mark.parametrize("name", ["my-corral-x", "corralled", "0-corral-demo-0a0b0c0d2", "corral-0a0b0c0d"])
def test_a_network_or_directory_that_merely_says_corral_stays(
    work: Prune, invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker, name: str
) -> None:
    (row,) = docker_engine.networks_by_name.values()
    docker_engine.networks_by_name = {name: {**row, "Name": name}}
    (invocation.data / f"{name}.d" / "sessions" / "00000001").mkdir(parents=True)
    (invocation.paths.root / "sessions" / f"{name}").mkdir(parents=True)
    assert sweep(work).removed == []


def test_a_link_in_the_place_of_a_session_is_not_followed(
    work: Prune, invocation: Invocation, prepared: Prepared, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (invocation.paths.root / "sessions").mkdir()
    (invocation.paths.root / "sessions" / "0a0b0c0d").symlink_to(precious)
    sweep(work)
    assert precious.is_dir()


def test_files_of_a_session_that_began_after_the_look_stay(
    work: Prune, orphan: Callable[[str], dict[str, Any]], invocation: Invocation, docker_engine: FakeDocker
) -> None:
    row = orphan("exited")
    del docker_engine.containers_by_id[row["Id"]]
    plan = decide(work.look(images=False))
    assert plan.directories
    docker_engine.containers_by_id[row["Id"]] = {**row, "State": "running"}
    work.carry_out(plan, lambda _: None)
    assert invocation.paths.session("00000001").is_dir()


def test_a_container_that_was_started_again_since_the_look_stays(
    work: Prune, orphan: Callable[[str], dict[str, Any]], docker_engine: FakeDocker
) -> None:
    row = orphan("exited")
    plan = decide(work.look(images=False))
    docker_engine.containers_by_id[row["Id"]]["State"] = "running"
    outcome = work.carry_out(plan, lambda _: None)
    assert row["Id"] in docker_engine.containers_by_id
    assert "container" not in {thing.kind for thing in (*outcome.removed, *outcome.left)}


def test_what_a_session_changed_is_told_before_its_files_go(
    work: Prune,
    orphan: Callable[[str], dict[str, Any]],
    invocation: Invocation,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    orphan("exited")
    told: list[tuple[str, bool]] = []

    def ended(paths: StatePaths, session: str) -> None:
        told.append((session, paths.session(session).is_dir()))

    monkeypatch.setattr(work, "_ended", ended)
    sweep(work)
    assert told == [("00000001", True)]


def test_files_stay_when_there_is_no_time_to_tell(
    work: Prune, orphan: Callable[[str], dict[str, Any]], invocation: Invocation, clock: Clock
) -> None:
    orphan("exited")
    plan = decide(work.look(images=False))
    clock.now += on.SECONDS - on.MARGIN - on.GRACE + 0.5
    outcome = work.carry_out(plan, lambda _: None)
    assert [(thing.kind, thing.why) for thing in outcome.left] == [("session", on.LATE)]
    assert invocation.paths.session("00000001").is_dir()


def test_it_ends_in_time_and_says_what_is_left(
    work: Prune, orphan: Callable[[str], dict[str, Any]], docker_engine: FakeDocker, clock: Clock
) -> None:
    orphan("exited")
    plan = decide(work.look(images=False))
    clock.now += 100
    outcome = work.carry_out(plan, lambda _: None)
    assert outcome.removed == []
    assert {thing.why for thing in outcome.left} == {on.LATE}
    assert docker_engine.timeout <= on.ANSWER


def test_what_the_command_took_to_begin_is_of_its_time_but_not_all_of_it(
    invocation: Invocation, docker_engine: FakeDocker, enforcer: FakeEnforcer, clock: Clock
) -> None:
    words = (invocation.user, invocation.data, docker_engine, enforcer)
    left = [Prune(*words, spent=spent, clock=clock)._left() for spent in (0, 1.5, 60)]  # type: ignore[arg-type]
    assert left == [7.0, 5.5, 5.0]


def test_the_age_of_a_process_is_told_by_the_kernel(tmp_path: Path) -> None:
    script = "import time; from corral.prune import age; first = age(); time.sleep(0.5); print(first, age())"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    first, second = map(float, done.stdout.split())
    assert 0 < first < second - 0.4 and second < time.monotonic() - began + 0.1
    (tmp_path / "stat").write_text("1 (a) b) R")
    assert age(tmp_path / "stat") == age(tmp_path / "none") == 0.0


def test_a_tree_that_takes_too_long_is_left_in_part(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for number in range(20):
        (tree / str(number)).mkdir(parents=True)
        (tree / str(number) / "file").touch()
    asked = iter(range(1000))
    trees.remove(tree, late=lambda: next(asked) > 60)
    assert 0 < len(list(tree.iterdir())) < 20
    trees.remove(tree)
    assert not tree.exists()


def test_images_of_a_sandbox_whose_policy_is_gone_go(
    work: Prune, invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker
) -> None:
    tag, label = invocation.loaded.sandbox.image, "io.corral.inputs"
    rows = {
        "sha256:now": ([tag], tag),
        "sha256:before": ([], tag),
        "sha256:hers": (["corral/hers-0a0b0c0e:latest"], "corral/hers-0a0b0c0e:latest"),
        "sha256:hers-before": ([], "corral/hers-0a0b0c0e:latest"),
        "sha256:old": ([], ""),
    }
    for ident, (tags, built_as) in rows.items():
        labels = {label: "x", **({"io.corral.image": built_as} if built_as else {})}
        docker_engine.images_by_id[ident] = {"Id": ident, "RepoTags": list(tags), "Labels": labels}
    assert [one.name for one in sweep(work, images=True).removed if one.kind == "image"] == ["sha256:before"]
    invocation.loaded.path.unlink()
    assert [one.name for one in sweep(work, images=True).removed if one.kind == "image"] == [tag]
    assert set(docker_engine.images_by_id) == {"sha256:hers", "sha256:hers-before", "sha256:old"}


@pytest.mark.parametrize("text", ["", "profile: opencode\nnome: x\n", "profile: opencode\nname: another\n"])
def test_a_policy_that_cannot_be_read_keeps_its_image(
    work: Prune, invocation: Invocation, prepared: Prepared, text: str
) -> None:
    invocation.loaded.path.write_text(text)
    assert work._wanted(invocation.loaded.sandbox.id) == ("another" not in text)


def run(
    docker_engine: FakeDocker,
    invocation: Invocation,
    tell: Callable[[str], None] = lambda _: None,
    **wanted: Any,
) -> Outcome:
    return prune(
        invocation.user,
        invocation.data,
        lambda _, __: docker_engine,  # type: ignore[arg-type,return-value]
        FakeEnforcer(),  # type: ignore[arg-type]
        tell=tell,
        **wanted,
    )


def test_each_removal_is_told_when_it_is_done_and_what_failed_is_not(
    invocation: Invocation,
    orphan: Callable[[str], dict[str, Any]],
    docker_engine: FakeDocker,
    relays: set[str],
) -> None:
    sandbox, name = invocation.loaded.sandbox, orphan("exited")["Names"][0].lstrip("/")
    unit = f"corral-relay-{sandbox.token}-8081.service"
    relays.add(unit)
    docker_engine.fail["remove_network"] = refusal(403, "active endpoints")
    told: list[str] = []
    outcome = run(docker_engine, invocation, told.append)
    path = invocation.paths.session("00000001")
    assert told == [f"removed container {name}", f"removed relay {unit}", f"removed session {path}"]
    assert f"left network {sandbox.network}: something is on it" in render(outcome)
    del docker_engine.fail["remove_network"]
    run(docker_engine, invocation, told.append)
    assert told[3:] == [f"removed network {sandbox.network}"]


@pytest.mark.parametrize("status", ["exited", "created"])
def test_unattended_files_of_a_session_stay_until_it_is_told_what_it_changed(
    invocation: Invocation, orphan: Callable[[str], dict[str, Any]], docker_engine: FakeDocker, status: str
) -> None:
    row, told = orphan(status), list[str]()
    run(docker_engine, invocation, told.append, unattended=True)
    name, network_ = row["Names"][0].lstrip("/"), invocation.loaded.sandbox.network
    assert told == [f"removed container {name}", f"removed network {network_}"]
    assert docker_engine.containers_by_id == {} and docker_engine.networks_by_name == {}
    assert invocation.paths.session("00000001").is_dir()
    again = run(docker_engine, invocation, told.append, unattended=True)
    assert (len(told), render(again, quiet=True)) == (2, "")
    run(docker_engine, invocation)
    assert not invocation.paths.session("00000001").exists()


@pytest.mark.parametrize("mark", [holding.KEPT, holding.LEFT])
def test_unattended_a_session_that_may_be_read_stays_with_its_network(
    invocation: Invocation, orphan: Callable[[str], dict[str, Any]], docker_engine: FakeDocker, mark: str
) -> None:
    orphan("exited")
    (invocation.paths.session("00000001") / mark).touch()
    assert run(docker_engine, invocation, unattended=True).removed == []
    assert docker_engine.containers_by_id and docker_engine.networks_by_name


def test_unattended_a_network_that_is_made_for_a_session_stays(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker
) -> None:
    lock = invocation.in_use
    try:
        assert run(docker_engine, invocation, unattended=True).removed == []
    finally:
        os.close(lock)
    assert [one.kind for one in run(docker_engine, invocation, unattended=True).removed] == ["network"]


def test_without_docker_nothing_is_done_and_that_is_said(invocation: Invocation) -> None:
    def gone(*_: Any) -> Any:
        raise EngineGoneError("Docker is not running")

    def forbidden(*_: Any) -> Any:
        raise EngineError("you may not use Docker")

    outcome = prune(invocation.user, invocation.data, gone, FakeEnforcer(), tell=print)  # type: ignore[arg-type]
    assert render(outcome) == "nothing was done: Docker is not running"
    with pytest.raises(EngineError):
        prune(invocation.user, invocation.data, forbidden, FakeEnforcer(), tell=print)  # type: ignore[arg-type]


def test_a_docker_that_does_not_answer_is_not_waited_for(
    invocation: Invocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on, "ANSWER", 1.0)
    path = tmp_path / "silent.sock"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        user = replace(invocation.user, environ={**invocation.user.environ, "DOCKER_HOST": f"unix://{path}"})
        outcome = prune(user, invocation.data, engine.connect, FakeEnforcer(), tell=print)  # type: ignore[arg-type]
    assert outcome.docker is not None and "does not answer" in outcome.docker


def test_a_dry_run_says_what_a_run_removes_and_removes_nothing(
    invocation: Invocation, orphan: Callable[[str], dict[str, Any]], docker_engine: FakeDocker
) -> None:
    orphan("exited")
    would = run(docker_engine, invocation, dry_run=True)
    assert not {"remove", "remove_network", "kill"} & set(docker_engine.calls)
    assert render(would).startswith("would remove container corral-")
    done = run(docker_engine, invocation)
    assert would.body()["removed"] == done.body()["removed"]
    assert render(run(docker_engine, invocation)) == "nothing is left over"


def test_whoever_says_no_keeps_what_runs(
    invocation: Invocation, orphan: Callable[[str], dict[str, Any]], docker_engine: FakeDocker
) -> None:
    orphan("running")
    with pytest.raises(on.CorralError, match="nothing was removed"):
        run(docker_engine, invocation, running=True, ask=lambda _: False)
    assert docker_engine.containers_by_id
    run(docker_engine, invocation, running=True, ask=lambda _: True)
    assert not docker_engine.containers_by_id
