"""What uninstalling decides, and the order in which it is done."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corral import leaving, process, uninstall
from corral.installer.common import Places
from corral.installer.removal import LINKS
from corral.inventory import Container, Image, Inventory, Network
from corral.leaving import Survey
from corral.session import User
from corral.uninstall import Uninstall, purge
from policy import versions
from policy.declaration import LABEL_SANDBOX, LABEL_SCHEMA, LABEL_UID
from policy.errors import CorralError, EngineError, InstallError
from tests.unit.corral.fakes import FakeDocker

ME, EVE, GONE = 1000, 1001, 1999
SYSTEM = (Path("/opt/corral"),)


def container(uid: int, sandbox: str, *, alive: bool = False) -> Container:
    return Container(f"id-{sandbox}", f"corral-{sandbox}-agent-00000001", uid, sandbox, "1", alive)


def network(uid: int, sandbox: str) -> Network:
    return Network(f"net-{sandbox}", f"0-corral-{sandbox}", uid, sandbox)


def image(*sandboxes: str) -> Image:
    return Image(f"sha256:{'-'.join(sandboxes)}", tuple(f"corral/{sandbox}:latest" for sandbox in sandboxes))


MINE, HERS, NOBODYS = "mine-0a0b0c0d", "hers-0a0b0c0e", "old-0a0b0c0f"
DOCKER = Inventory(
    (container(ME, MINE), container(EVE, HERS, alive=True)),
    (network(ME, MINE), network(EVE, HERS), network(GONE, NOBODYS)),
    (image(MINE), image(HERS), Image("sha256:loose", ()), Image("sha256:foreign", ("cache/mine:1",))),
)
BOTH = Survey(
    uid=ME,
    docker=DOCKER,
    others={ME: "me", EVE: "eve"},
    accounts=frozenset({ME, EVE}),
    system=SYSTEM,
    state=(Path("/state"),),
    settings=(Path("/settings"),),
)
ALONE = replace(
    BOTH,
    others={ME: "me"},
    docker=Inventory(DOCKER.containers[:1], (network(ME, MINE), network(GONE, NOBODYS)), DOCKER.images),
)


def decide(found: Survey, *, force: bool = False, purge: bool = False) -> leaving.Leaving:
    return leaving.decide(found, force=force, purge=purge)


def test_what_is_another_user_s_stays_and_the_system_part_with_it() -> None:
    plan = decide(BOTH, purge=True)
    assert [c.sandbox for c in plan.containers] == [MINE]
    assert [n.sandbox for n in plan.networks] == [MINE]
    assert plan.images == (image(MINE),)
    assert plan.system
    assert not plan.rules
    assert not plan.system_files
    assert plan.others == (EVE, GONE)
    told = leaving.text(plan)
    assert "eve (uid 1001) uses corral too" in told
    assert HERS not in told
    assert not decide(BOTH, force=True).rules
    assert leaving.refusal(plan, force=False) is None


def test_a_user_whom_only_docker_knows_keeps_the_system_part_too() -> None:
    assert not decide(replace(BOTH, others={ME: "me"})).rules


def test_the_last_user_takes_everything_along_and_what_is_nobody_s() -> None:
    plan = decide(ALONE)
    assert plan.rules
    assert plan.system_files == SYSTEM
    assert {n.sandbox for n in plan.networks} == {MINE, NOBODYS}
    assert [i.names for i in plan.images] == [(f"corral/{MINE}:latest",), (f"corral/{HERS}:latest",), ("sha256:loose",)]  # fmt: skip
    assert plan.purged == ()
    assert [kept.what for kept in plan.kept] == ["/state", "/settings"]
    assert decide(ALONE, purge=True).purged == (Path("/state"), Path("/settings"))


def test_a_second_time_there_is_nothing_to_do() -> None:
    nothing = Survey(uid=ME, docker=Inventory(), others={}, state=(Path("/state"),))
    assert decide(nothing).nothing
    # Another user's files are no reason to ask for a password.
    assert decide(replace(nothing, others={EVE: "eve"}, system=SYSTEM)).nothing
    assert not decide(nothing, purge=True).nothing
    # Rules without files show to root only.
    assert decide(nothing, force=True).rules


def test_running_sandboxes_are_ended_on_purpose_only() -> None:
    found = replace(ALONE, docker=Inventory((container(ME, MINE, alive=True),)))
    plan = decide(found)
    refused = leaving.refusal(plan, force=False)
    assert refused is not None
    assert MINE in refused[0]
    assert "--force" in refused[1]
    assert leaving.refusal(plan, force=True) is None


def test_without_docker_what_it_holds_is_named_and_containers_on_a_bridge_stop_it() -> None:
    silent = replace(ALONE, docker=None, silent="Docker is not running")
    plan = decide(silent)
    assert plan.rules
    assert leaving.refusal(plan, force=False) is None
    assert "Docker is not running; when Docker runs again: corral uninstall" in leaving.text(plan)
    stuck = decide(replace(silent, attached=("corral-0a0b0c0d",)))
    for force in (False, True):
        refused = leaving.refusal(stuck, force=force)
        assert refused is not None
        assert "systemctl start docker" in refused[1]


def test_the_listing_for_programs_has_everything() -> None:
    told = json.loads(json.dumps(leaving.body(decide(ALONE, purge=True), done=False)))
    assert set(told) == {"done", "remove", "keep", "running", "removed"}
    assert [row["kind"] for row in told["remove"]] == [
        "container", "network", "network", "image", "image", "image", "rules", "system", "state", "state",
    ]  # fmt: skip


class Host:
    """A user's host: an engine in memory, programs that only leave their command line behind."""

    def __init__(self, tmp_path: Path, docker: FakeDocker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.links: list[dict[str, str]] = []
        self.said: list[str] = []
        self.docker, self.running = docker, True
        home = tmp_path / "home"
        self.user = User(uid=ME, gid=0, home=home, environ={"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(tmp_path / "run")})  # fmt: skip
        self.units = home / ".config" / "systemd" / "user"
        (self.units / "default.target.wants").mkdir(parents=True)
        self.unit = self.units / "corral-enforcer.service"
        self.data = home / ".local" / "share" / "corral"
        self.places = Places(str(tmp_path / "top"))
        for directory in (self.places.users, self.places.code):
            directory.mkdir(parents=True)
        (self.places.users / str(ME)).write_text("me\n")
        self.answer: dict[str, Any] = {"removed": ["table inet corral"], "others": {}}
        monkeypatch.setattr(uninstall.process, "run", self._run)
        docker.closed = 0  # type: ignore[attr-defined]
        docker.close = lambda: None  # type: ignore[attr-defined]

    def _run(self, argv: Any, **_: Any) -> process.Completed:
        if argv == LINKS:
            return process.Completed(tuple(argv), 0, json.dumps(self.links), "")
        self.log.append(" ".join(argv))
        return process.Completed(tuple(argv), 0, "corral-relay-0a0b0c0d-8081.service loaded\n", "")

    def sandbox(self, *, running: bool) -> None:
        uid = str(ME)
        labels = {LABEL_UID: uid, LABEL_SANDBOX: MINE, LABEL_SCHEMA: "1"}
        state = "running" if running else "exited"
        networks: dict[str, Any] = {"0-corral-" + MINE: {}}
        self.docker.containers_by_id["c1"] = {
            "Id": "c1", "Names": ["/corral-c1"], "State": state, "Labels": labels, "NetworkSettings": {"Networks": networks},
        }  # fmt: skip
        name = "0-corral-" + MINE
        self.docker.networks_by_name[name] = {"Id": name, "Name": name, "Labels": labels}

    def arrived(self) -> None:
        self.unit.write_text("")
        (self.units / "default.target.wants" / self.unit.name).symlink_to(self.unit)
        sweep = self.units / "corral-sweep.service"
        sweep.write_text("")
        pulled = self.units / f"{self.unit.name}.wants"
        pulled.mkdir(exist_ok=True)
        (pulled / sweep.name).symlink_to(sweep)

    def _connect(self) -> Any:
        if not self.running:
            raise EngineError("Docker is not running")
        return self.docker

    def _elevate(self, _program: str, _environ: Mapping[str, str], _again: str) -> dict[str, Any]:
        self.log.append("root")
        assert not self.docker.networks_by_name
        assert not self.unit.exists()
        return self.answer

    def run(self, **options: Any) -> str:
        command = Uninstall(self.user, self._connect, echo=self.said.append, places=self.places, elevate=self._elevate)  # fmt: skip
        before = len(self.said)
        uninstall.uninstall(command, echo=self.said.append, **options)
        return "\n".join(self.said[before:])


@pytest.fixture
def host(tmp_path: Path, docker_engine: FakeDocker, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, docker_engine, monkeypatch)


def test_sandboxes_go_before_the_enforcer_and_the_rules_last(host: Host) -> None:
    host.arrived()
    host.sandbox(running=True)
    told = host.run(assume_yes=True, force=True)
    assert "pipx uninstall corral" in told
    steps = [word for word in host.log if "list-units" not in word]
    assert steps[0] == "systemctl --user stop corral-relay-*"
    # What the enforcer's start would pull in is gone before it.
    assert steps.index("systemctl --user disable --now corral-sweep.service") < steps.index("systemctl --user disable --now corral-enforcer.service")  # fmt: skip
    assert "systemctl --user reset-failed corral-sweep.service" in steps
    disable, reload, root = (steps.index(word) for word in ("systemctl --user disable --now corral-enforcer.service", "systemctl --user daemon-reload", "root"))  # fmt: skip
    assert disable < reload < root
    assert not list(host.units.rglob("corral*"))


def test_what_would_start_an_agent_again_is_stopped_before_it_ends(host: Host) -> None:
    host.arrived()
    host.sandbox(running=True)
    unit = host.units / "corral-sandbox-0a0b0c0d.service"
    unit.write_text("")
    (host.units / "default.target.wants" / unit.name).symlink_to(unit)
    (host.units / "my-corral-sandbox-notes.service").write_text("")
    assert str(unit) in host.run(dry_run=True)
    host.run(assume_yes=True, force=True)
    steps = [word for word in host.log if "list-units" not in word]
    assert steps[0] == "systemctl --user stop corral-sandbox-*"
    assert [path.name for path in host.units.rglob("*corral*")] == ["my-corral-sandbox-notes.service"]


def test_nothing_is_touched_when_it_is_refused_or_only_asked_about(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.arrived()
    host.sandbox(running=True)
    assert MINE in host.run(dry_run=True)
    assert json.loads(host.run(dry_run=True, as_json=True))["running"] == ["corral-c1"]
    with pytest.raises(InstallError, match="corral-c1"):
        host.run(assume_yes=True)
    monkeypatch.setattr(uninstall.sys, "stdin", io.StringIO())
    with pytest.raises(InstallError, match="nobody can be asked") as caught:
        host.run(force=True)
    assert caught.value.hint == "corral uninstall --yes"
    assert host.docker.containers_by_id
    assert host.unit.exists()
    assert {word.split()[2] for word in host.log} == {"list-units"}


@pytest.mark.parametrize(("typed", "goes"), [("y\n", True), ("yes\n", True), ("\n", False), ("n\n", False)])
def test_at_a_terminal_it_asks_and_the_default_is_no(
    host: Host, monkeypatch: pytest.MonkeyPatch, typed: str, goes: bool
) -> None:
    host.arrived()
    terminal = type("Terminal", (), {"isatty": lambda _: True, "readline": lambda _: typed})()
    monkeypatch.setattr(uninstall.sys, "stdin", terminal)
    if goes:
        host.run()
    else:
        with pytest.raises(InstallError, match="nothing has been removed"):
            host.run()
    assert host.unit.exists() != goes


def test_a_question_is_no_part_of_the_answer_for_programs(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.arrived()
    terminal = type("Terminal", (), {"isatty": lambda _: True, "readline": lambda _: "y\n"})()
    monkeypatch.setattr(uninstall.sys, "stdin", terminal)
    said: list[str] = []
    command = Uninstall(host.user, host._connect, echo=host.said.append, places=host.places, elevate=host._elevate)  # fmt: skip
    uninstall.uninstall(command, echo=said.append, as_json=True)
    (answer,) = map(json.loads, said)
    assert (answer["schema"], answer["done"]) == (1, True)
    assert "go on? [y/N]" in host.said


def test_root_is_sent_to_the_user(host: Host) -> None:
    host.arrived()
    host.user = replace(host.user, uid=0)
    with pytest.raises(InstallError, match="not by root"):
        host.run(assume_yes=True)
    assert host.unit.exists()


def test_a_user_who_came_in_between_keeps_the_system_part(host: Host) -> None:
    host.arrived()
    host.answer = {"removed": [], "others": {"1001": "eve"}}
    assert "the system part stays: eve (uid 1001)" in host.run(assume_yes=True)


def test_a_dead_docker_is_no_reason_to_stay(host: Host) -> None:
    host.arrived()
    host.running = False
    assert "Docker is not running" in host.run(assume_yes=True)
    assert "root" in host.log


def test_a_dead_docker_with_containers_on_a_bridge_is(host: Host) -> None:
    host.arrived()
    host.running = False
    host.links = [{"ifname": "corral-0a0b0c0d"}, {"ifname": "veth1", "master": "corral-0a0b0c0d"}]
    with pytest.raises(InstallError, match="still on corral-0a0b0c0d"):
        host.run(assume_yes=True, force=True)
    assert host.unit.exists()


def test_state_of_a_newer_version_is_not_purged(host: Host) -> None:
    host.arrived()
    host.data.mkdir(parents=True)
    (host.data / versions.STATE_FILE).write_text('{"version": "9.9", "schemas": {"state": 99}}')
    with pytest.raises(CorralError, match=r"written by corral 9\.9"):
        host.run(assume_yes=True, purge_state=True)
    assert host.unit.exists()
    assert host.data.exists()
    # Without --purge it is only left alone.
    assert str(host.data) in host.run(assume_yes=True)
    assert host.data.exists()


def test_purging_gets_through_whatever_modes_there_are_and_follows_no_link(tmp_path: Path) -> None:
    outside, top = tmp_path / "outside", tmp_path / "state"
    outside.mkdir(mode=0o500)
    (outside / "kept").touch()
    (top / "closed" / "deep").mkdir(parents=True)
    (top / "closed" / "deep" / "file").touch()
    (top / "link").symlink_to(outside)
    (top / "closed" / "deep").chmod(0)
    (top / "closed").chmod(0o500)
    purge(top)
    assert not top.exists()
    assert (outside / "kept").exists()
    assert outside.stat().st_mode & 0o777 == 0o500


def test_rules_in_the_engine_of_the_user_s_own_go_without_the_program_for_root() -> None:
    found = Survey(
        uid=ME, docker=DOCKER, user_files=(Path("/units/corral-netfilter.service"),), rootless=True
    )
    plan = decide(found)
    assert plan.inside
    assert not plan.system
    assert ("rules", f"in your engine's namespace: {leaving.RULES}") in plan.rows()
    assert "sudo" not in leaving.text(plan)
    assert not decide(replace(found, rootless=False)).inside
    assert not decide(replace(found, user_files=())).inside
    # Told to end what runs with --force, such a user has no sudo for it.
    assert not decide(replace(found, apart=True), force=True).system
    assert decide(found, force=True).system


def test_rules_in_such_an_engine_whose_files_somebody_removed_are_looked_for_with_force() -> None:
    bare = Survey(uid=ME, docker=None, rootless=True, apart=True)
    assert decide(bare).nothing
    plan = decide(bare, force=True)
    assert (plan.inside, plan.system, plan.nothing) == (True, False, False)
    # One that was installed for the system's engine has the program for root for that.
    assert not decide(replace(bare, apart=False), force=True).inside


def test_one_file_of_such_an_installation_is_enough_to_know_it_and_its_writer_is_stopped(host: Host) -> None:
    (host.places.users / str(ME)).unlink()
    (host.data / "netfilter" / "0.1.0-0a0b0c0d").mkdir(parents=True)
    told = host.run(assume_yes=True)
    assert "done" in told
    assert "root" not in host.log
    assert "systemctl --user stop corral-netfilter.service" in host.log
    assert not (host.data / "netfilter").exists()
