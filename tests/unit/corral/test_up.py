from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import replace
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from corral import down, network, relay, units, up
from corral.context import Invocation
from corral.engine import AttachedContainer
from corral.lifecycle import Created, Prepared
from corral.subnets import Plan
from policy.container import Limits
from policy.errors import CorralError, PolicyError
from tests.unit.corral.fakes import FakeDocker, FakeEnforcer

PLAN = Plan(IPv4Network("172.16.0.0/26"))


class World:
    """A daemon's policy; what is started runs, until ``ends`` is set."""

    def __init__(self, invocation: Invocation, docker: FakeDocker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.invocation, self.docker = invocation, docker
        self.image = "sha256:1"
        self.refusal: Exception | None = None
        self.enabled = False
        self.units: list[str] = []
        self.code = 0
        self.ends: BaseException | None = None
        loaded = invocation.loaded
        policy = loaded.policy.model_copy(update={"mode": "daemon"})
        self.allow(replace(loaded, policy=policy))
        network._create(invocation.api, loaded.sandbox, invocation.user.uid, [PLAN.subnet], [])
        monkeypatch.setattr(up, "prepare", self._prepare)
        monkeypatch.setattr(up, "watched", self._watched)
        monkeypatch.setattr(units, "lingers", lambda *_: True)
        monkeypatch.setattr(units.Manager, "enabled", lambda *_: self.enabled)
        monkeypatch.setattr(
            units.Manager, "start", lambda _, sandbox: self.units.append(f"start {sandbox.id}")
        )
        monkeypatch.setattr(up, "base_url", lambda _: "unix:///x")
        waits = self._waited

        def waited(container: AttachedContainer) -> int:
            return waits(container)

        monkeypatch.setattr(AttachedContainer, "wait", waited)

    def allow(self, loaded: object) -> None:
        self.invocation.__dict__["loaded"] = self.invocation.__dict__["approved"] = loaded

    def widen(self) -> None:
        loaded = self.invocation.loaded
        limits = loaded.policy.limits.model_copy(update={"pids": 100})
        self.allow(replace(loaded, policy=loaded.policy.model_copy(update={"limits": limits})))

    def _prepare(self, invocation: Invocation) -> Prepared:
        return Prepared(invocation.user, self.image, PLAN, {"API_KEY": "s3cr3t"}, Limits())

    def _watched(self, _: Invocation, made: Created) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.docker.start(made.ident)

    def _waited(self, container: AttachedContainer) -> int:
        if self.ends is not None:
            raise self.ends
        self.docker.containers_by_id[container._ident]["State"] = "exited"
        return self.code

    def up(self, *, foreground: bool = False, environ: dict[str, str] | None = None) -> up.Up | int:
        return up.up(self.invocation, foreground=foreground, environ=environ or {})

    def fresh(self) -> up.Up:
        found = self.up()
        assert isinstance(found, up.Up)
        return found

    def states(self) -> list[str]:
        return [row["State"] for row in self.docker.containers_by_id.values()]


@pytest.fixture
def world(
    invocation: Invocation, docker_engine: FakeDocker, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(monkeypatch.context())
        yield World(invocation, docker_engine, monkeypatch)


def test_it_stays_when_we_go_and_a_second_up_finds_it(world: World, enforcer: FakeEnforcer) -> None:
    enforcer.names = {"api.example.com": ["203.0.113.9"]}
    first = world.fresh()
    assert first.fresh and first.names == enforcer.names
    assert world.states() == ["running"]
    assert world.invocation.paths.session(first.session.session).exists()
    body = next(iter(world.docker.containers_by_id.values()))["Body"]
    assert body["Tty"] and body["OpenStdin"] and not body["StdinOnce"]
    assert body["HostConfig"]["ConsoleSize"] == [40, 120]
    assert body["HostConfig"]["RestartPolicy"]["Name"] == "no"
    assert "s3cr3t" not in str(body)
    again = world.fresh()
    assert not again.fresh and again.session.session == first.session.session
    assert "is up: session" in up.report(first) and "api.example.com (203.0.113.9)" in up.report(first)
    assert "was up already" in up.report(again)


@pytest.mark.parametrize("what", ["policy", "image"])
def test_one_of_another_policy_or_image_is_replaced(world: World, said: io.StringIO, what: str) -> None:
    first = world.fresh()
    if what == "policy":
        world.widen()
    else:
        world.image = "sha256:2"
    second = world.fresh()
    assert second.fresh and second.session.session != first.session.session
    assert world.states() == ["running"]
    assert "it was started with another policy or image" in said.getvalue()
    assert not world.invocation.paths.session(first.session.session).exists()


def test_what_runs_is_not_ended_for_what_cannot_be_made(world: World, enforcer: FakeEnforcer) -> None:
    first = world.fresh()
    world.widen()
    enforcer.refusal = "a name has no address"
    with pytest.raises(CorralError):
        world.up()
    assert world.states() == ["running"]
    assert world.invocation.paths.session(first.session.session).exists()


def test_one_that_did_not_start_leaves_nothing(world: World) -> None:
    world.refusal = CorralError("the gate did not open")
    with pytest.raises(CorralError, match="gate"):
        world.up()
    assert world.states() == []


def test_what_one_changed_that_ended_while_it_was_started_is_told(
    world: World, said: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    world.allow(replace(world.invocation.loaded, rw=(notes,)))

    def ends(*_: object) -> None:
        (notes / ".envrc").write_text("a program\n")
        raise CorralError("the program ended at once")

    monkeypatch.setattr(up, "watched", ends)
    with pytest.raises(CorralError, match="at once"):
        world.up()
    assert f"  {notes}/.envrc: new" in said.getvalue()
    assert world.states() == [] and list((world.invocation.paths.root / "sessions").iterdir()) == []


def test_one_that_died_is_taken_away_by_the_next(world: World) -> None:
    world.fresh()
    next(iter(world.docker.containers_by_id.values()))["State"] = "exited"
    assert world.fresh().fresh
    assert world.states() == ["running"]


def test_in_the_foreground_its_end_is_a_failure_and_its_output_stays(world: World, said: io.StringIO) -> None:
    world.code = 2
    # Not its own code: systemd takes 2 for a policy that is wrong, and tries no more.
    assert world.up(foreground=True) == 1
    assert "ended with exit code 2" in said.getvalue()
    assert world.states() == ["exited"]


def test_asked_to_end_it_ends_the_agent(world: World) -> None:
    world.ends = SystemExit(143)
    assert world.up(foreground=True) == 0
    assert world.states() == []


def test_an_enabled_unit_takes_over(world: World) -> None:
    world.enabled = True
    world.up()
    assert world.units == [f"start {world.invocation.loaded.sandbox.id}"]


def test_without_lingering_only_the_foreground(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "lingers", lambda *_: False)
    with pytest.raises(CorralError, match="log out"):
        world.up()
    assert world.states() == []
    assert world.up(foreground=True) == 1


def test_a_policy_of_sessions_is_told_what_to_do(invocation: Invocation) -> None:
    with pytest.raises(PolicyError, match="mode is run") as caught:
        up.up(invocation, environ={})
    assert caught.value.hint is not None and "corral run" in caught.value.hint


def test_down_stops_the_unit_first_and_says_that_it_comes_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.fresh()
    sandbox = world.invocation.loaded.sandbox
    file = units.Manager(world.invocation.user).file(sandbox)
    file.parent.mkdir(parents=True)
    file.write_text("")
    world.enabled = True

    def stop(_: units.Manager, _sandbox: object) -> bool:
        # As the unit's program does when systemd asks it to end.
        for ident in list(world.docker.containers_by_id):
            world.docker.remove_container(ident, force=True)
        return True

    monkeypatch.setattr(units.Manager, "stop", stop)
    monkeypatch.setattr(units.Manager, "tidy", lambda *_: None)
    monkeypatch.setattr(relay.Manager, "stop_all", lambda *_: 0)
    removed = down.down(world.invocation)
    text = down.report(removed)
    assert "removed 1 container, its network" in text
    assert f"{units.unit_of(sandbox)} starts its agent again with the machine" in text
    assert "nothing to do" in down.report(down.down(world.invocation))
