"""When a sandbox has a proxy, and when it has none any more, with an engine and an enforcer in memory."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import threading
from dataclasses import replace
from ipaddress import IPv4Network
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_image.files.entrypoint import gate
from corral import joining, lifecycle, network, proxying, proxyrows, relay, run, sessions, state
from corral.context import Invocation
from corral.down import down
from corral.leftovers import release_proxy
from corral.lifecycle import Prepared, created
from corral.relay import Relay
from corral.run import Options
from corral.session import Request, Terminal
from corral.subnets import Plan
from enforcer.netfilter.namespace import Daemon
from policy.container import Limits
from policy.declaration import LABEL_PURPOSE, LABEL_SERVICE, Declaration, HostService, Pattern
from policy.errors import ArgumentError, CorralError, EngineError, NotReadyError
from tests.unit.corral.fakes import FakeDocker, FakeEnforcer, refusal

FIRST, SECOND = "0a1b2c3d", "1a1b2c3d"
PLAN = Plan(IPv4Network("172.16.0.0/26"))
PROXIED = Declaration(patterns=(Pattern(host="*.example.com"),))


class Relays:
    """The user's manager: where the relay to the proxy leads."""

    def __init__(self) -> None:
        self.target = ""

    def ensure(self, wanted: list[Relay]) -> None:
        (one,) = wanted
        self.target = one.target

    def stop(self, _: object, port: int) -> None:
        assert port == 8443
        self.target = ""


@pytest.fixture
def relays(monkeypatch: pytest.MonkeyPatch) -> Relays:
    made = Relays()
    monkeypatch.setattr(proxying, "_manager", lambda _: made)
    monkeypatch.setattr(relay, "bridge_ifindex", lambda _: 7)
    return made


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch, docker_engine: FakeDocker) -> list[str]:
    """The proxy's container runs once it is started; what it says is for tests of ``starting``."""
    idents: list[str] = []

    def start(_: Invocation, ident: str) -> None:
        docker_engine.start(ident)
        idents.append(ident)

    monkeypatch.setattr(proxying, "start", start)
    return idents


@pytest.fixture
def proxied(invocation: Invocation, relays: Relays) -> Invocation:
    loaded = replace(invocation.loaded, declaration=PROXIED)
    invocation.__dict__.update(loaded=loaded, approved=loaded)
    state.prepare(invocation.paths, loaded.profile)
    network._create(invocation.api, loaded.sandbox, invocation.user.uid, [PLAN.subnet], [])
    return invocation


@pytest.fixture
def prepared(proxied: Invocation) -> Prepared:
    return Prepared(proxied.user, "sha256:1", PLAN, {}, Limits(pids=77))


def request(session: str = FIRST) -> Request:
    return Request("run", ("agent",), session)


def proxy_of(docker_engine: FakeDocker) -> dict[str, Any]:
    (found,) = [row for row in docker_engine.containers_by_id.values() if is_proxy(row)]
    return found


def is_proxy(row: dict[str, Any]) -> bool:
    return bool(row["Labels"][LABEL_SERVICE] == "proxy")


def left(invocation: Invocation, docker_engine: FakeDocker) -> list[str]:
    directories = [path.name for path in (invocation.paths.root / "sessions").iterdir()]
    return [*docker_engine.containers_by_id, *directories]


def test_a_proxied_session_finds_its_proxy_before_it_may_start_and_takes_it_along(
    proxied: Invocation, prepared: Prepared, docker_engine: FakeDocker, relays: Relays, enforcer: FakeEnforcer
) -> None:
    with created(proxied, prepared, request()) as session:
        row = proxy_of(docker_engine)
        assert row["State"] == "running" and row["Id"] in enforcer.awaited
        address = row["NetworkSettings"]["Networks"][proxied.loaded.sandbox.network]["IPAddress"]
        assert relays.target == f"{address}:8443" and address != session.spec.address
        assert Path(session.spec.hosts_file).read_text().split()[6:8] == ["172.16.0.1", "proxy"]
    assert left(proxied, docker_engine) == []
    assert relays.target == "" and row["Id"] in enforcer.withdrawn


def test_the_proxy_s_container_has_nothing_of_the_policy(
    proxied: Invocation, prepared: Prepared, docker_engine: FakeDocker
) -> None:
    with created(proxied, prepared, request()):
        body = proxy_of(docker_engine)["Body"]
    assert body["Cmd"] == [
        *("/usr/local/bin/corral-proxy", "--listen", "0.0.0.0:8443"),
        *("--dial", "/corral-dial/dial.sock"),
    ]
    assert body["Labels"][LABEL_PURPOSE] == "proxy"
    assert Declaration.from_label(body["Labels"]["io.corral.egress"]) == Declaration()
    dial = proxied.paths.dial
    assert [
        (row["Source"], row["Target"], row["ReadOnly"])
        for row in body["HostConfig"]["Mounts"]
        if row["Target"] != "/etc/hosts"
    ] == [(str(dial), "/corral-dial", True)]
    assert dial.stat().st_mode & 0o777 == 0o700
    env = dict(entry.partition("=")[::2] for entry in body["Env"])
    assert set(env) == {"LANG", "CORRAL_GATE", "CORRAL_MOUNTS"}
    told = gate.parse_policy(env["CORRAL_GATE"])
    assert (told.names, told.services, told.proxy) == ([], [], 0)
    found = dial.stat()
    assert json.loads(env["CORRAL_MOUNTS"]) == [["/corral-dial", found.st_dev, found.st_ino]]
    assert body["HostConfig"]["PidsLimit"] == 77 and not body["OpenStdin"] and not body["Tty"]


def test_without_patterns_there_is_no_proxy_and_nobody_looks_for_one(
    invocation: Invocation, proxied: Invocation, prepared: Prepared, docker_engine: FakeDocker
) -> None:
    loaded = replace(proxied.loaded, declaration=Declaration())
    proxied.__dict__.update(loaded=loaded, approved=loaded)
    with created(proxied, prepared, request()):
        assert not any(is_proxy(row) for row in docker_engine.containers_by_id.values())
    assert docker_engine.calls.count("containers") == 1
    assert not proxied.paths.dial.exists()


def test_two_sessions_share_one_which_goes_with_the_last(
    proxied: Invocation, prepared: Prepared, docker_engine: FakeDocker, relays: Relays, started: list[str]
) -> None:
    with created(proxied, prepared, request()):
        first, target = proxy_of(docker_engine)["Id"], relays.target
        with created(proxied, prepared, request(SECOND)):
            assert proxy_of(docker_engine)["Id"] == first
        assert proxy_of(docker_engine)["Id"] == first and relays.target == target
    assert left(proxied, docker_engine) == [] and len(started) == 1


def test_the_gate_is_not_told_of_the_proxy_as_of_a_session_beside_it(
    proxied: Invocation, prepared: Prepared, docker_engine: FakeDocker
) -> None:
    def beside(ident: str) -> bool:
        env = docker_engine.containers_by_id[ident]["Body"]["Env"]
        (text,) = [entry.partition("=")[2] for entry in env if entry.startswith("CORRAL_GATE=")]
        return gate.parse_policy(text).beside

    lifecycle.ensure_proxy(proxied, prepared, FIRST)
    with created(proxied, prepared, request()) as one, created(proxied, prepared, request(SECOND)) as two:
        assert (beside(one.ident), beside(two.ident)) == (False, True)


def test_one_that_is_used_is_not_replaced_by_that_of_a_newer_image(
    proxied: Invocation, prepared: Prepared, docker_engine: FakeDocker, relays: Relays
) -> None:
    newer = replace(prepared, image="sha256:2")
    with created(proxied, prepared, request()):
        first, target = proxy_of(docker_engine)["Id"], relays.target
        with created(proxied, newer, request(SECOND)) as second:
            assert proxy_of(docker_engine)["Id"] == first and relays.target == target
            assert docker_engine.containers_by_id[second.ident]["ImageID"] == "sha256:2"


def test_one_of_an_older_image_that_nobody_uses_is_replaced(
    proxied: Invocation, prepared: Prepared, docker_engine: FakeDocker, relays: Relays
) -> None:
    lifecycle.ensure_proxy(proxied, prepared, FIRST)
    first = proxy_of(docker_engine)["Id"]
    with created(proxied, replace(prepared, image="sha256:2"), request()):
        row = proxy_of(docker_engine)
        assert row["Id"] != first and row["ImageID"] == "sha256:2"


def test_one_that_was_started_just_now_is_waited_for(
    proxied: Invocation, prepared: Prepared, docker_engine: FakeDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[str] = []
    monkeypatch.setattr(proxying, "listens", waited.append)
    lifecycle.ensure_proxy(proxied, prepared, FIRST)
    for status, times in (("Up 2 hours", 0), ("Up 3 seconds", 1), ("Up Less than a second", 2)):
        proxy_of(docker_engine)["Status"] = status
        lifecycle.ensure_proxy(proxied, prepared, FIRST)
        assert len(waited) == times


def test_waiting_ends_when_something_listens_and_after_a_while() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        assert not proxying.listens("127.0.0.1", port, lambda: now[0], sleep)
        assert now[0] >= proxying.OPENING
        listening.listen()
        before = now[0]
        assert proxying.listens("127.0.0.1", port, lambda: now[0], sleep) and now[0] == before


def test_one_is_used_too_by_a_command_whose_session_is_not_there_yet(
    proxied: Invocation, prepared: Prepared, docker_engine: FakeDocker
) -> None:
    lifecycle.ensure_proxy(proxied, prepared, FIRST)
    first = proxy_of(docker_engine)["Id"]
    held = proxying._share(proxied.paths)
    lifecycle.ensure_proxy(proxied, replace(prepared, image="sha256:2"), FIRST)
    assert proxy_of(docker_engine)["Id"] == first
    release_proxy(proxied, proxied.loaded.sandbox)
    assert proxy_of(docker_engine)["Id"] == first
    os.close(held)
    release_proxy(proxied, proxied.loaded.sandbox)
    assert left(proxied, docker_engine) == []


@pytest.mark.parametrize("state_", ["exited", "created", "dead", "paused"])
def test_one_that_does_not_run_is_made_anew_while_its_sessions_go_on(
    proxied: Invocation, prepared: Prepared, docker_engine: FakeDocker, relays: Relays, state_: str
) -> None:
    with created(proxied, prepared, request()) as session:
        docker_engine.containers_by_id[session.ident]["State"] = "running"
        first = proxy_of(docker_engine)
        first["State"] = state_
        with created(proxied, prepared, request(SECOND)):
            second = proxy_of(docker_engine)
            assert second["Id"] != first["Id"] and second["State"] == "running"
            endpoint = second["NetworkSettings"]["Networks"][proxied.loaded.sandbox.network]
            assert relays.target == f"{endpoint['IPAddress']}:8443"
        assert proxy_of(docker_engine)["Id"] == second["Id"]


def test_a_session_that_is_left_keeps_it(
    proxied: Invocation, prepared: Prepared, docker_engine: FakeDocker
) -> None:
    with created(proxied, prepared, request()) as session:
        docker_engine.start(session.ident)
        session.leave()
    assert proxy_of(docker_engine)["State"] == "running"
    # Once it has ended, whoever cleans up after it removes it.
    docker_engine.remove_container(session.ident, force=True)
    release_proxy(proxied, proxied.loaded.sandbox)
    assert docker_engine.containers_by_id == {}


def test_a_session_that_is_kept_for_a_look_needs_none(
    proxied: Invocation, prepared: Prepared, docker_engine: FakeDocker
) -> None:
    policy = proxied.loaded.policy.model_copy(update={"keep": True})
    loaded = replace(proxied.loaded, policy=policy)
    proxied.__dict__.update(loaded=loaded, approved=loaded)
    with created(proxied, prepared, request()) as session:
        docker_engine.start(session.ident)
        docker_engine.stop(session.ident)
    (row,) = docker_engine.containers_by_id.values()
    assert row["Id"] == session.ident


def test_a_session_without_patterns_does_not_keep_it(
    proxied: Invocation, prepared: Prepared, docker_engine: FakeDocker
) -> None:
    with created(proxied, prepared, request()):
        loaded = replace(proxied.loaded, declaration=Declaration())
        beside = replace_loaded(proxied, loaded)
        with created(beside, prepared, request(SECOND)) as other:
            docker_engine.start(other.ident)
            other.leave()
    (row,) = docker_engine.containers_by_id.values()
    assert row["Id"] == other.ident


def replace_loaded(invocation: Invocation, loaded: Any) -> Invocation:
    made = replace(invocation)
    made.__dict__.update(invocation.__dict__, loaded=loaded, approved=loaded)
    return made


@pytest.mark.parametrize(("attends", "needed"), [(True, ["s"]), (None, ["s"]), (False, [])])
def test_what_was_made_and_never_started_needs_it_while_somebody_looks_after_it(
    attends: bool | None, needed: list[str]
) -> None:
    row = {
        "State": "created",
        "Labels": {
            LABEL_SERVICE: "main",
            "io.corral.session": "s",
            "io.corral.egress": PROXIED.to_label(),
        },
    }
    assert proxyrows.users([row], lambda _: attends) == needed
    assert proxyrows.users([row], lambda _: attends, own="s") == []
    # A label of another version: nobody can tell.
    row["Labels"] = {**row["Labels"], "io.corral.egress": "{}"}
    assert proxyrows.users([row], lambda _: attends) == needed


@pytest.mark.parametrize("at", ["await_ready", "start", "relay"])
def test_a_proxy_that_does_not_come_stops_the_session_and_leaves_nothing(
    proxied: Invocation,
    prepared: Prepared,
    docker_engine: FakeDocker,
    enforcer: FakeEnforcer,
    relays: Relays,
    monkeypatch: pytest.MonkeyPatch,
    at: str,
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise CorralError("no proxy")

    if at == "await_ready":
        real = enforcer.await_ready

        def awaits(ident: str, timeout: float = 15.0) -> dict[str, Any]:
            if is_proxy(docker_engine.containers_by_id[ident]):
                raise NotReadyError("no proxy")
            return real(ident, timeout)

        monkeypatch.setattr(enforcer, "await_ready", awaits)
    elif at == "start":
        monkeypatch.setattr(proxying, "start", fails)
    else:
        monkeypatch.setattr(relays, "ensure", fails)
    with pytest.raises(CorralError, match="no proxy"), created(proxied, prepared, request()):
        pytest.fail("the session was handed out")
    assert left(proxied, docker_engine) == []


def test_a_proxy_that_docker_does_not_remove_keeps_what_is_mounted_in_it(
    proxied: Invocation, prepared: Prepared, docker_engine: FakeDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        docker_engine.fail["remove"] = refusal(500, "gone")
        raise CorralError("no proxy")

    monkeypatch.setattr(proxying, "start", fails)
    with pytest.raises(CorralError, match="no proxy"), created(proxied, prepared, request()):
        pytest.fail("the session was handed out")
    assert (proxied.paths.session(proxying.session_of(proxied.loaded.sandbox)) / "hosts").is_file()


def test_an_interrupted_session_waits_for_its_proxy_to_be_there_and_removes_it(
    proxied: Invocation,
    prepared: Prepared,
    docker_engine: FakeDocker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupted, real = threading.Event(), proxying.start

    def late(made: Invocation, ident: str) -> None:
        interrupted.wait(10)
        real(made, ident)

    def interrupt(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(proxying, "start", late)
    monkeypatch.setattr(lifecycle, "_look_again", interrupt)
    with pytest.raises(KeyboardInterrupt), created(proxied, prepared, request()):
        pytest.fail("the session was handed out")
    assert left(proxied, docker_engine) == []


def test_one_that_cannot_be_removed_is_told(
    proxied: Invocation, prepared: Prepared, docker_engine: FakeDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise EngineError("Docker does not remove it")

    with pytest.raises(EngineError, match="does not remove it"), created(proxied, prepared, request()):
        monkeypatch.setattr(proxying, "_remove", refuses)


def test_proxies_are_no_sessions(proxied: Invocation, prepared: Prepared, docker_engine: FakeDocker) -> None:
    with created(proxied, prepared, request()) as session:
        uid, data = proxied.user.uid, proxied.data
        assert [one.ident for one in sessions.all_of(proxied.api, uid, data)] == [session.ident]
        (proxy,) = sessions.proxies(proxied.api, uid, data)
        assert proxy.service == "proxy" and proxy.ident == proxy_of(docker_engine)["Id"]


def test_a_session_whose_policy_has_no_patterns_any_more_clears_what_was_left(
    proxied: Invocation, prepared: Prepared, docker_engine: FakeDocker, said: io.StringIO
) -> None:
    lifecycle.ensure_proxy(proxied, prepared, FIRST)
    release_proxy(proxied, proxied.loaded.sandbox)
    assert left(proxied, docker_engine) == []
    docker_engine.calls.clear()
    release_proxy(proxied, proxied.loaded.sandbox)
    assert docker_engine.calls == [] and said.getvalue() == ""


def test_the_directory_of_the_socket_is_ours_alone(tmp_path: Path) -> None:
    place = tmp_path / "proxy"
    place.mkdir(mode=0o755)
    proxying.dial_directory(place)
    assert place.stat().st_mode & 0o777 == 0o700
    place.rmdir()
    place.symlink_to(tmp_path)
    with pytest.raises(CorralError, match="cannot use the directory"):
        proxying.dial_directory(place)
    place.unlink()
    place.write_text("")
    with pytest.raises(CorralError, match="Not a directory"):
        proxying.dial_directory(place)


def test_the_lock_of_a_use_is_one_s_own_only_while_nobody_shares_it(proxied: Invocation) -> None:
    ours = proxying._share(proxied.paths)
    assert proxying._sole(ours)
    theirs = proxying._share(proxied.paths)
    assert not proxying._sole(ours)
    os.close(ours)
    # What was ours is shared again: the other is not alone while we hold it.
    again = proxying._share(proxied.paths)
    assert not proxying._sole(theirs)
    for descriptor in (theirs, again):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def test_its_output_is_read_as_a_session_s_is(
    proxied: Invocation, prepared: Prepared, docker_engine: FakeDocker
) -> None:
    with pytest.raises(CorralError, match="there is no proxy here"):
        joining.choose_proxy(proxied, None)
    lifecycle.ensure_proxy(proxied, prepared, FIRST)
    found = joining.choose_proxy(proxied, proxied.loaded.sandbox.id)
    assert found.ident == proxy_of(docker_engine)["Id"]
    with pytest.raises(CorralError, match="there is no session"):
        joining.choose(proxied, found.session, None, "attach to", running=True)


def test_the_id_of_the_proxy_is_no_session_s(proxied: Invocation) -> None:
    options = Options(session=proxied.loaded.sandbox.token)
    with pytest.raises(ArgumentError, match="that of the sandbox's proxy"):
        run.request(proxied, "run", ("true",), options, Terminal())


def test_down_ends_it_after_its_sessions(
    proxied: Invocation, prepared: Prepared, docker_engine: FakeDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(docker_engine, "stop", lambda ident, timeout: ended.append(ident))
    monkeypatch.setattr(relay.Manager, "stop_all", lambda *_: 1)
    lifecycle.ensure_proxy(proxied, prepared, FIRST)
    with created(proxied, prepared, request()) as session:
        session.leave()
    proxy = proxy_of(docker_engine)
    # Docker lists the newest first, which may be either.
    assert next(iter(docker_engine.containers_by_id)) == proxy["Id"]
    down(proxied, proxied.loaded.sandbox.id)
    assert ended == [session.ident, proxy["Id"]]
    assert left(proxied, docker_engine) == []


def test_one_that_a_session_without_a_command_line_uses_is_neither_replaced_nor_removed(
    proxied: Invocation, prepared: Prepared, docker_engine: FakeDocker
) -> None:
    with created(proxied, prepared, request()) as session:
        docker_engine.start(session.ident)
        session.leave()
    first = proxy_of(docker_engine)["Id"]
    with created(proxied, replace(prepared, image="sha256:2"), request(SECOND)):
        assert proxy_of(docker_engine)["Id"] == first
    assert proxy_of(docker_engine)["Id"] == first


@pytest.mark.parametrize("own", [True, False])
def test_with_an_engine_of_the_users_own_the_relay_is_told_where_its_bridge_is(
    proxied: Invocation, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    daemon = Daemon(10, 1, 3)
    wanted: list[Relay] = []
    monkeypatch.setattr(proxying, "_manager", lambda _: SimpleNamespace(ensure=wanted.extend))
    monkeypatch.setattr(proxying.rootless, "daemon", lambda _: daemon)
    monkeypatch.setattr(proxying.rootless, "bridge_ifindex", lambda *_: 9)
    made = replace(proxied, user=replace(proxied.user, rootless=own))
    made.__dict__.update(loaded=proxied.loaded)
    proxying._relay(made, PLAN, "172.16.0.5")
    (one,) = wanted
    assert (one.engine, one.ifindex) == ((daemon, 9) if own else (None, 7))
    assert one.target == "172.16.0.5:8443"


def test_an_interrupted_session_does_not_wait_for_another_that_is_stuck_with_the_proxy(
    proxied: Invocation, prepared: Prepared, docker_engine: FakeDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def interrupted() -> None:
        with pytest.raises(KeyboardInterrupt), created(proxied, prepared, request()):
            pytest.fail("the session was handed out")

    monkeypatch.setattr(lifecycle, "_look_again", interrupt)
    monkeypatch.setattr(proxying, "PATIENCE", 0.2)
    with network.locked(proxied.paths.root / proxying.LOCK):
        thread = threading.Thread(target=interrupted, daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
    assert left(proxied, docker_engine) == []


def test_who_is_stuck_with_a_proxy_does_not_keep_another_from_ending(
    proxied: Invocation,
    prepared: Prepared,
    said: io.StringIO,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lifecycle.ensure_proxy(proxied, prepared, FIRST)
    monkeypatch.setattr(proxying, "PATIENCE", 0.2)
    with network.locked(proxied.paths.root / proxying.LOCK):
        release_proxy(proxied, proxied.loaded.sandbox)
    assert "another command keeps the lock" in said.getvalue()


SERVICE = Declaration(host_services=(HostService(name="web", port=8443),))


def test_where_a_session_has_its_service_of_the_host_no_proxy_comes(
    proxied: Invocation, prepared: Prepared, docker_engine: FakeDocker, relays: Relays
) -> None:
    beside = replace_loaded(proxied, replace(proxied.loaded, declaration=SERVICE))
    with created(beside, prepared, request(SECOND)) as other:
        docker_engine.start(other.ident)
        with (
            pytest.raises(CorralError, match=f"{SECOND} has a host service on port 8443"),
            created(proxied, prepared, request()),
        ):
            pytest.fail("it would have been led to the service, or the other to the proxy")
        assert relays.target == "" and not any(map(is_proxy, docker_engine.containers_by_id.values()))
    with created(proxied, prepared, request()):
        assert relays.target


def test_where_sessions_have_their_proxy_no_service_of_the_host_comes(
    proxied: Invocation, prepared: Prepared, docker_engine: FakeDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[Relay] = []
    monkeypatch.setattr(relay, "Manager", lambda _: SimpleNamespace(ensure=wanted.extend))
    beside = replace_loaded(proxied, replace(proxied.loaded, declaration=SERVICE))
    for started in (False, True):
        with created(proxied, prepared, request()) as session:
            if started:
                docker_engine.start(session.ident)
            with pytest.raises(CorralError, match="port 8443 of the gateway leads to the proxy"):
                lifecycle._relays(beside, PLAN)
    assert wanted == []
    lifecycle._relays(beside, PLAN)
    assert [(one.port, one.target) for one in wanted] == [(8443, "")]
