"""Every answer has exactly the fields that docs/json.md says, and every field there is met."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corral import (
    __version__,
    answers,
    approval,
    checkdocs,
    checks,
    counters,
    denied,
    enable,
    inspection,
    leaving,
    logs,
    names,
    pruned,
    render,
    sessions,
    statusfacts,
    sweeping,
    units,
    up,
    usage,
)
from corral.answers.shapes import problems, rows
from corral.answers.table import ANSWERS
from corral.context import Invocation
from corral.doctor import diagnosis
from corral.doctor.model import CannotTell
from corral.session import User
from corral.targets import parse_target
from enforcer import reports
from policy.errors import EnforcerError
from policy.identity import Sandbox
from policy.loader import LoadedPolicy
from tests.unit.corral.fakes import FakeEnforcer
from tests.unit.corral.test_doctor import Linger, Sysctls, looked
from tests.unit.corral.test_inspection import INSPECT, SESSION
from tests.unit.corral.test_render import sandbox
from tests.unit.corral.test_sessions import DEAD, A
from tests.unit.enforcer.dialbench import ZONE, connected
from tests.unit.enforcer.servicebench import SANDBOX, World, ask, eventually, play
from tests.unit.enforcer.test_apart import inspect as apart_inspect

__all__ = ["play", "sandbox"]

Body = Mapping[str, Any]


def differing(command: str, *bodies: Body) -> list[str]:
    """Return how answers differ from the description of a command's, and what of that none of them has."""
    shapes = ANSWERS[command]
    told: list[str] = []
    met: dict[Any, set[str]] = {shape: set() for shape in shapes}
    for body in bodies:
        read = json.loads(answers.text(body))
        assert read.pop("schema") == 1
        tried = []
        for shape in shapes:
            seen: set[str] = set()
            tried.append(problems(read, shape, seen=seen))
            if not tried[-1]:
                met[shape] |= seen
        told += min(tried, key=len)
    for shape in shapes:
        told += [f"{row.place}: no answer has it" for row in rows(shape) if row.place not in met[shape]]
    return told


# -- sessions


def test_the_answers_about_sessions(user: User) -> None:
    every = sessions.as_json([A, DEAD, SESSION])
    assert differing("corral ps", {"sessions": every}) == []
    for one in every:
        assert differing("corral run --detach", one) == []
    found = up.Up(A, fresh=True, names={"a.example": ["203.0.113.9"]}, services=(8081,))
    assert differing("corral up", up.body(found)) == []
    lines = [
        logs.row(A, b"2026-01-31T09:00:00.123456789Z a"),
        logs.row(A, b"the rest of a line"),
    ]
    assert differing("corral logs", *lines) == []


def test_the_answers_of_inspect(user: User) -> None:
    running = {
        "State": {"Status": "running", "Running": True},
        "Config": {"Labels": {"io.corral.egress": "{"}},
    }
    bodies = [
        inspection.describe(SESSION, INSPECT, ["last"], []),
        inspection.describe(A, running, [], ["run"]),
    ]
    assert bodies[1]["egress"] == "{"
    assert differing("corral inspect", *bodies) == []


def test_the_answers_of_enable_and_disable() -> None:
    for systemd in (252, 254):
        found = enable.Enabled(
            Sandbox("demo-0a0b0c0d"), "u.service", "/usr/bin/corral", systemd, lingers=False
        )
        assert differing("corral enable", enable.body(found)) == []
    assert differing("corral disable", {"disabled": ["u.service"]}) == []


# -- the policy, and this host


def test_the_answers_of_the_policy(invocation: Invocation, loaded_of: Callable[[str], LoadedPolicy]) -> None:
    before = approval.pending(invocation.loaded, invocation.read_paths)
    assert before.old is None
    after = replace(before, old=before.new)
    assert differing("corral policy diff", before.body(), after.body()) == []
    assert differing("corral policy hash", {"policy": before.new.sha256}) == []


def test_the_answers_of_render(sandbox: Invocation) -> None:
    body = render.rendered(sandbox)
    assert differing("corral render", body) == []
    assert differing("corral render --check", {"differences": ["there is no image"]}) == []


def test_the_answers_of_verify() -> None:
    found = [
        checks.Check("a", "ok"),
        checks.Check("b", "fail", "seen", "0a1b2c3d"),
        checks.Check("c", "skip", "no"),
    ]
    assert (
        differing("corral verify", checks.body("demo-0a0b0c0d", found), checks.body("demo-0a0b0c0d", []))
        == []
    )
    assert differing("corral verify --explain", *map(checkdocs.body, checkdocs.DOCS)) == []


def test_the_answers_of_doctor() -> None:
    found = diagnosis.body(looked(Sysctls(ip_forward=0), Linger(on=False)))
    silent = diagnosis.body(looked(failing={Linger: CannotTell("no"), Sysctls: ValueError("odd")}))
    assert {row["state"] for row in (*found["checks"], *silent["checks"])} == {"ok", "found", "unknown"}
    assert differing("corral doctor", found, silent) == []


def test_the_answers_of_df(invocation: Invocation) -> None:
    from tests.unit.corral.test_usage import Engine

    class Full(Engine):
        def df(self) -> dict[str, Any]:
            tags = [f"{invocation.loaded.sandbox.image}:latest", invocation.loaded.sandbox.image]
            return {"LayersSize": 1, "Images": [{"Id": "1", "RepoTags": tags, "Size": 5, "SharedSize": 1}]}

    def gone() -> Any:
        from policy.errors import EngineGoneError

        raise EngineGoneError("Docker is not running")

    invocation.paths.home.mkdir(parents=True, exist_ok=True)
    bodies = [usage.body(usage.report(invocation.user, invocation.data, connect)) for connect in (Full, gone)]
    assert [row["image"] is None for body in bodies for row in body["sandboxes"]] == [False, True]
    assert differing("corral df", *bodies) == []


def test_the_answers_of_prune_and_uninstall() -> None:
    thing = pruned.Thing("network", "0-corral-demo-0a0b0c0d", "demo-0a0b0c0d", "something is on it")
    done = pruned.Outcome(removed=[thing], left=[thing], kept=[sweeping.Kept("corral-x", "it runs")])
    assert differing("corral prune", done.body(), pruned.Outcome(docker="Docker is not running").body()) == []
    everything = leaving.Leaving(
        relays=("r.service",),
        user_files=(Path("/home/me/x"),),
        system=True,
        rules=True,
        inside=True,
        system_files=(Path("/opt/corral"),),
        purged=(Path("/home/me/state"),),
        kept=(leaving.Kept("1 image", "another user's"),),
        running=("corral-c1",),
    )
    bodies = [leaving.body(everything, done=done, removed=["table inet corral"]) for done in (True, False)]
    assert differing("corral uninstall", *bodies) == []


# -- what the host service answers, from a real one


class Served:
    """A command line whose service is real, between doubles of Docker and the kernel."""

    def __init__(self, invocation: Invocation, world: World) -> None:
        self.invocation, self.world = invocation, world
        invocation.__dict__["enforcer"] = world.client

    async def allow(self, text: str, **words: Any) -> dict[str, Any]:
        given: dict[str, Any] = {"lasting": None, "keep": False, "force": False, **words}
        return dict(
            await ask(
                lambda: names.allow(self.invocation, parse_target(text, many=True), SANDBOX.id, **given)
            )
        )

    async def status(self) -> dict[str, Any]:
        found = await ask(self.world.client.status)
        return statusfacts.added(found, self.invocation.user, self.world.data)


async def proxied(world: World) -> Path:
    """Start a session with pinned names, one that asks its sandbox's proxy, and that proxy; return its socket."""
    world.container("c1", "00000001")
    world.container("c2", "00000002", "172.16.0.3", ZONE)
    world.answers["a.example.com"] = ("93.184.216.34",)
    path = world.proxy("p1", "0000000a")
    for ident in ("c1", "c2", "p1"):
        await ask(world.client.await_ready, ident)
    return path


def refusing(world: World) -> None:
    """From now on the kernel tells of packets that were refused."""
    rows = [[17, 9, "203.0.113.66"], [6, 22, "93.184.216.34"], [1, 8 << 8, "203.0.113.67"]]
    records = [[number, 1e9 + number, "172.16.0.2", *row] for number, row in enumerate(rows, 1)]
    answer = {"epoch": "one", "next": len(records), "lost": 0, "records": records, "problem": ""}
    said = {**answer, "totals": {"172.16.0.2": 40}, "tallies": []}
    world.writer.denied = lambda epoch, after, *_: {**said, "records": [] if after else records}  # type: ignore[method-assign]


def test_the_answers_about_what_may_be_reached(invocation: Invocation, play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001")
        await ask(world.client.await_ready, "c1")
        served = Served(invocation, world)
        world.answers["new.example.com"] = ("93.184.216.35",)
        timed = await served.allow("new.example.com", lasting=60.0)
        assert timed["sessions"] and timed["sessions"][0]["addresses"]

        async def check(text: str, ident: str | None) -> dict[str, Any]:
            target = parse_target(text, force=True, address=True)
            return dict(await ask(names.check, invocation, target, ident))

        checked = [
            await check("new.example.com", SANDBOX.id),
            await check("other.example.com", SANDBOX.id),
            await check("203.0.113.1", SANDBOX.id),
            await check("api.example.com", None),
            await check("git.example.com:22", None),
        ]
        world.answers["git.example.com"] = ("10.0.0.5", "93.184.216.36")
        checked.append(await check("git.example.com:22", None))
        assert [body["allowed"] for body in checked] == [True, False, False, True, False, True]
        assert differing("corral policy check", *checked) == []

        world.answers["api.example.com"] = ()
        refreshed = await ask(world.client.refresh, SANDBOX.id, [])
        assert refreshed["names"] and refreshed["sessions"]
        assert differing("corral refresh", refreshed) == []

        gone = await ask(lambda: names.deny(invocation, "new.example.com", SANDBOX.id, keep=False))
        assert gone["sessions"]
        assert differing("corral deny", gone) == []
        assert [text for text in differing("corral allow", timed) if "waiting" not in text] == []

    play(acts)


def test_the_answer_of_allow_that_is_saved_for_new_sessions(
    invocation: Invocation, enforcer: FakeEnforcer
) -> None:
    session = {"state": "running", "session": "00000001", "container": "c1"}
    enforcer.status_answer["sandboxes"] = [{"sandbox": invocation.loaded.sandbox.id, "sessions": [session]}]
    target = parse_target("*.new.example.com", many=True)
    words: dict[str, Any] = {"lasting": None, "keep": True, "force": False}
    saved = names.allow(invocation, target, invocation.loaded.sandbox.id, **words)
    assert saved["waiting"] and saved["saved"]
    assert all("sessions[]" in text for text in differing("corral allow", saved))


def test_the_answer_of_deny_that_is_saved(invocation: Invocation, enforcer: FakeEnforcer) -> None:
    enforcer.running = False
    host = invocation.loaded.declaration.names[0].host
    taken = names.deny(invocation, host, invocation.loaded.sandbox.id, keep=True)
    assert taken["saved"]
    assert all("sessions[]" in text for text in differing("corral deny", taken))


def test_the_answers_of_status(
    invocation: Invocation, play: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = units.Manager(invocation.user)
    monkeypatch.setattr(units.Manager, "state", lambda *_: units.State(units.unit_of(SANDBOX), True, True))
    monkeypatch.setattr(units, "lingers", lambda _: False)

    async def acts(world: World) -> None:
        path = await proxied(world)
        served = Served(invocation, world)
        await served.allow("a.example.com", lasting=60.0)
        async with connected(path) as line:
            assert (await line.dial("a.example.com"))["ok"]
            assert not (await line.dial("b.example.net"))["ok"]
            await ask(world.client.deny, SANDBOX.id, "maybe.example.com")
            world.engine.inspects["c9"] = apart_inspect("none", "none", "none")
            world.engine.send("create", "c9")
            world.engine.inspects["s1"] = {
                "Id": "s1",
                "Name": "/stranger",
                "State": {"Status": "created"},
                "Config": {"Labels": {}},
                "HostConfig": {"NetworkMode": SANDBOX.network},
                "NetworkSettings": {"Networks": {SANDBOX.network: {}}},
            }
            world.engine.send("create", "s1", ours=False)
            tracker = world.service.tracker
            await eventually(lambda: tracker.apart and any(tracker.strangers.values()))
            plain = await served.status()
            manager.directory.mkdir(parents=True)
            manager.file(SANDBOX).touch()
            world.writer.broken = True
            broken = await served.status()
        assert broken["sandboxes"][0]["unit"] and broken["errors"]
        assert differing("corral status", plain, broken) == []

    play(acts)


def test_the_answers_of_denied(invocation: Invocation, play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        path = await proxied(world)
        refusing(world)
        async with connected(path) as line:
            assert not (await line.dial("b.example.net"))["ok"]
        found = await ask(world.client.denied)
        assert {row["protocol"] for row in found["rows"]} == {"tcp", "udp", "icmp"}
        assert differing("corral denied", denied.selected(found, checks=False)) == []
        lines: list[str] = []
        denied.follow(lambda _: found, lines.append, print, lambda _: True, as_json=True)
        read = [json.loads(text) for text in lines]
        assert len(read) == len(found["rows"]) + len(found["asked"])
        assert all(next(iter(row)) == "schema" for row in read)
        bodies = [{key: row[key] for key in row if key != "schema"} for row in read]
        assert differing("corral denied --follow", *bodies) == []

    play(acts)


def test_the_answers_of_version_and_metrics(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001")
        await ask(world.client.await_ready, "c1")
        version = await ask(world.client.version)
        hello = world.writer.hello()
        silent = reports.version("1", EnforcerError("the writer does not answer", "look"))
        told = reports.version("1", {**hello, "schemas": {"protocol": 2}}, rootless=True)
        bodies = [{"version": __version__, "enforcer": one} for one in (version, silent, told, None)]
        assert differing("corral version", *bodies) == []
        assert differing("corral metrics", counters.body(await ask(world.client.metrics))) == []

    play(acts)


def test_every_answer_on_the_page_is_made_here() -> None:
    text = Path(__file__).read_text()
    assert [name for name in ANSWERS if f'differing("{name}"' not in text] == []
