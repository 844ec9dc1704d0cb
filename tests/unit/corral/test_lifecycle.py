"""The order in which a session comes and goes, with an engine and an enforcer in memory."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest

from agent_image.files.entrypoint import channel, gate
from corral import attended, lifecycle, network, protect, relay, secretchannel, sessions, state
from corral.context import Invocation
from corral.leftovers import sweep
from corral.lifecycle import Prepared, created, prepare, signals_held
from corral.session import SERVICE, Outside, Request, Terminal
from corral.subnets import Plan
from enforcer.config import Config
from policy import holding
from policy.container import Limits
from policy.declaration import LABEL_EGRESS
from policy.errors import CorralError, EnforcerError, EngineError, NotReadyError, PolicyError
from policy.loader import LoadedPolicy
from tests.unit.corral.fakes import FakeDocker, FakeEnforcer, refusal

SESSION = "0a1b2c3d"
NO_TERMINAL = Terminal()
PLAN = Plan(IPv4Network("172.16.0.0/26"))


@pytest.fixture
def prepared(invocation: Invocation) -> Prepared:
    loaded = invocation.loaded
    state.prepare(invocation.paths, loaded.profile)
    network._create(invocation.api, loaded.sandbox, invocation.user.uid, [PLAN.subnet], [])
    return Prepared(invocation.user, "sha256:1", PLAN, {"API_KEY": "s3cr3t"}, Limits())


def request(terminal: Terminal = NO_TERMINAL) -> Request:
    return Request("run", ("agent",), SESSION, terminal)


def leftovers(invocation: Invocation, docker_engine: FakeDocker) -> list[str]:
    sessions = invocation.paths.root / "sessions"
    directories = [path.name for path in sessions.iterdir()] if sessions.exists() else []
    return [*docker_engine.containers_by_id, *directories]


def test_a_container_is_ready_before_it_may_start_and_gone_afterwards(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker, enforcer: FakeEnforcer
) -> None:
    with created(invocation, prepared, request()) as session:
        assert enforcer.awaited == [session.ident]
        assert "start" not in docker_engine.calls
        row = docker_engine.containers_by_id[session.ident]
        assert row["Labels"][LABEL_EGRESS] == invocation.loaded.declaration.to_label()
        assert session.spec.address == "172.16.0.2"
        hosts = Path(session.spec.hosts_file).read_text()
        assert "172.16.0.1      corral-host" in hosts
        assert f"172.16.0.2      {SERVICE}" in hosts
    assert leftovers(invocation, docker_engine) == []
    assert enforcer.withdrawn == [session.ident]


@pytest.mark.parametrize("started", [False, True])
def test_what_docker_does_not_remove_keeps_its_directory_which_nobody_holds(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker, started: bool
) -> None:
    """Docker was killed: the container is there when it comes again, and may run by live-restore."""
    gone = refusal(500, "gone")
    with pytest.raises((EngineError, NotReadyError)), created(invocation, prepared, request()) as session:
        if started:
            docker_engine.start(session.ident)
        docker_engine.fail["remove"] = gone
        raise NotReadyError("Docker is gone")
    directory = invocation.paths.session(SESSION)
    assert (directory / "hosts").is_file()
    assert (directory / "home").is_dir()
    assert attended.attended(directory) is False
    del docker_engine.fail["remove"]
    docker_engine.kill(session.ident, "SIGKILL")
    found = sessions.all_of(invocation.api, invocation.user.uid, invocation.data)
    assert sweep(invocation, found) == [SESSION]
    assert leftovers(invocation, docker_engine) == []


@pytest.mark.parametrize("purpose", ["run", "shell", "verify"])
def test_every_container_is_told_what_its_gate_has_to_find(
    invocation: Invocation,
    prepared: Prepared,
    docker_engine: FakeDocker,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    purpose: str,
) -> None:
    resolv_conf = tmp_path / "resolv.conf"
    resolv_conf.write_text("nameserver 127.0.0.53\nnameserver 198.51.100.53\n")
    monkeypatch.setattr(network, "RESOLV_CONFS", (tmp_path / "missing", resolv_conf))
    config = Config(permit_ranges=(IPv4Network("192.0.2.0/24"),))
    invocation.__dict__["config"] = config
    with created(invocation, prepared, replace(request(), purpose=purpose)) as session:
        env = docker_engine.containers_by_id[session.ident]["Body"]["Env"]
    (text,) = [entry.partition("=")[2] for entry in env if entry.startswith("CORRAL_GATE=")]
    policy = gate.parse_policy(text)
    assert policy.probe == ("198.51.100.1", 443)
    assert policy.resolver == "198.51.100.53"
    assert [name.host for name in policy.names] == ["api.example.com", "git.example.com"]


def test_a_gate_is_told_of_the_sessions_that_exist_beside_it(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker
) -> None:
    def told(ident: str) -> bool:
        env = docker_engine.containers_by_id[ident]["Body"]["Env"]
        (text,) = [entry.partition("=")[2] for entry in env if entry.startswith("CORRAL_GATE=")]
        return gate.parse_policy(text).beside

    second = replace(request(), session="1a1b2c3d")
    with created(invocation, prepared, request()) as first, created(invocation, prepared, second) as other:
        assert (told(first.ident), told(other.ident)) == (False, True)


def test_without_a_resolver_outside_the_probe_is_asked(
    invocation: Invocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "RESOLV_CONFS", ())
    assert lifecycle.outside(invocation) == Outside("192.0.2.1", 443, "192.0.2.1")


def test_a_policy_that_is_not_made_true_leaves_nothing_and_was_never_started(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker, enforcer: FakeEnforcer
) -> None:
    enforcer.refusal = "api.example.com: no answer"
    with pytest.raises(NotReadyError, match=r"api\.example\.com"), created(invocation, prepared, request()):
        pytest.fail("the container was handed out")
    assert leftovers(invocation, docker_engine) == []
    assert "start" not in docker_engine.calls


def test_an_enforcer_that_dies_meanwhile_leaves_nothing(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker, enforcer: FakeEnforcer
) -> None:
    enforcer.running = False
    with pytest.raises(EnforcerError, match="not running"), created(invocation, prepared, request()):
        pytest.fail("the container was handed out")
    assert leftovers(invocation, docker_engine) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), ValueError("x")])
def test_however_a_session_ends_nothing_is_left(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker, error: BaseException
) -> None:
    with pytest.raises(type(error)), created(invocation, prepared, request()):
        raise error
    assert leftovers(invocation, docker_engine) == []


def test_an_interrupted_create_leaves_no_container(
    invocation: Invocation,
    prepared: Prepared,
    docker_engine: FakeDocker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = docker_engine.create_container_from_config

    def interrupted(body: Any, name: str) -> Any:
        real(body, name)
        raise KeyboardInterrupt

    monkeypatch.setattr(docker_engine, "create_container_from_config", interrupted)
    with pytest.raises(KeyboardInterrupt), created(invocation, prepared, request()):
        pytest.fail("the container was handed out")
    assert leftovers(invocation, docker_engine) == []


def test_an_interrupt_while_docker_creates_is_taken_when_the_container_is_known(
    invocation: Invocation,
    prepared: Prepared,
    docker_engine: FakeDocker,
    enforcer: FakeEnforcer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = docker_engine.create_container_from_config
    answered: list[str] = []

    def slow(body: Any, name: str) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        answer = real(body, name)
        answered.append(answer["Id"])
        return answer

    monkeypatch.setattr(docker_engine, "create_container_from_config", slow)
    with pytest.raises(KeyboardInterrupt), created(invocation, prepared, request()):
        pytest.fail("the container was handed out")
    # Cut off in the middle, it would have been made after the clean-up had looked for it.
    assert len(answered) == 1
    assert answered == enforcer.withdrawn
    assert leftovers(invocation, docker_engine) == []


def test_an_interrupt_waits_though_another_thread_would_take_it() -> None:
    done, held = threading.Event(), False
    other = threading.Thread(target=done.wait)
    other.start()
    taken, told = socket.socketpair()
    told.setblocking(False)
    before = signal.set_wakeup_fd(told.fileno())
    try:
        with taken, told, pytest.raises(KeyboardInterrupt), signals_held():
            os.kill(os.getpid(), signal.SIGINT)
            assert taken.recv(1) == bytes([signal.SIGINT])
            held = True
    finally:
        signal.set_wakeup_fd(before)
        done.set()
        other.join()
    assert held
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_failed_clean_up_is_an_error_but_does_not_hide_another(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker, said: io.StringIO
) -> None:
    with pytest.raises(EngineError, match="removing the container"), created(invocation, prepared, request()):
        docker_engine.fail["remove"] = refusal(500, "device busy")
    with pytest.raises(ValueError, match="first"):
        with created(invocation, prepared, replace(request(), session="0a1b2c3e")):
            raise ValueError("first")
    assert "device busy" in said.getvalue()


def test_the_second_session_gets_another_address(invocation: Invocation, prepared: Prepared) -> None:
    with created(invocation, prepared, request()) as first:
        with created(invocation, prepared, replace(request(), session="0a1b2c3e")) as second:
            assert (first.spec.address, second.spec.address) == ("172.16.0.2", "172.16.0.3")


def test_warnings_of_the_enforcer_are_shown(
    invocation: Invocation, prepared: Prepared, enforcer: FakeEnforcer, said: io.StringIO
) -> None:
    enforcer.warnings = ["git.example.com: no answer yet"]
    with created(invocation, prepared, request()):
        pass
    assert "warning: git.example.com: no answer yet" in said.getvalue()


def test_the_size_of_a_terminal_is_part_of_the_request(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker
) -> None:
    with created(invocation, prepared, request(Terminal(True, True, 100, 30))) as session:
        body = docker_engine.containers_by_id[session.ident]["Body"]
        assert body["HostConfig"]["ConsoleSize"] == [30, 100]
        assert body["Tty"] and body["OpenStdin"] and not body["StdinOnce"]


def test_without_the_enforcer_nothing_is_made(
    invocation: Invocation, docker_engine: FakeDocker, enforcer: FakeEnforcer
) -> None:
    enforcer.running = False
    with pytest.raises(EnforcerError) as caught:
        prepare(invocation)
    assert caught.value.hint == "systemctl --user start corral-enforcer"
    assert docker_engine.calls == []
    assert not invocation.paths.root.exists()


def test_root_is_refused_before_anything_is_made(invocation: Invocation, docker_engine: FakeDocker) -> None:
    invocation.__dict__["user"] = replace(invocation.user, uid=0)
    with pytest.raises(CorralError, match="as root"):
        prepare(invocation)
    assert docker_engine.calls == []


def test_a_bad_secrets_file_is_found_before_anything_is_made(
    loaded_of: Callable[[str], LoadedPolicy],
    invocation: Invocation,
    home: Path,
    docker_engine: FakeDocker,
    enforcer: FakeEnforcer,
) -> None:
    file = home / "secrets.env"
    file.write_text("API_KEY=abc\n")
    file.chmod(0o644)
    loaded = loaded_of(f"profile: opencode\nname: demo\nsecrets:\n  env_file: {file}\n")
    invocation.__dict__["loaded"] = invocation.__dict__["approved"] = loaded
    with pytest.raises(PolicyError, match="mode 0644"):
        prepare(invocation)
    assert docker_engine.calls == []
    file.chmod(0o600)
    assert lifecycle.read_secrets(loaded, invocation.user.uid) == {"API_KEY": "abc"}


def test_a_variable_the_profile_fixes_is_no_secret(
    loaded_of: Callable[[str], LoadedPolicy], home: Path, invocation: Invocation
) -> None:
    file = home / "secrets.env"
    file.touch(mode=0o600)
    loaded = loaded_of(f"profile: opencode\nname: demo\nsecrets:\n  env_file: {file}\n")
    fixed = next(iter(loaded.profile.env))
    file.write_text(f"{fixed}=0\n")
    with pytest.raises(PolicyError, match=fixed):
        lifecycle.read_secrets(loaded, invocation.user.uid)


def test_preparing_makes_image_network_relays_and_state(
    loaded_of: Callable[[str], LoadedPolicy],
    invocation: Invocation,
    docker_engine: FakeDocker,
    monkeypatch: pytest.MonkeyPatch,
    said: io.StringIO,
) -> None:
    invocation.__dict__["loaded"] = invocation.__dict__["approved"] = loaded_of(
        "profile: opencode\nname: demo\nhost_services:\n  - {name: llama, port: 8081}\n"
    )
    order: list[str] = []

    class Image:
        image = "sha256:built"

    def built(_: Invocation) -> Image:
        order.append("image")
        assert docker_engine.networks_by_name == {}
        return Image()

    def relays(self: relay.Manager, wanted: Any) -> None:
        order.append(f"relay {wanted[0].gateway}:{wanted[0].port} {wanted[0].ifindex}")
        assert docker_engine.networks_by_name

    monkeypatch.setattr(lifecycle, "ensure_image", built)
    monkeypatch.setattr(network, "host_ranges", lambda environ: [])
    monkeypatch.setattr(relay, "bridge_ifindex", lambda sandbox: 7)
    monkeypatch.setattr(relay.Manager, "ensure", relays)
    found = prepare(invocation)
    assert order == ["image", "relay 172.16.0.1:8081 7"]
    assert found.image == "sha256:built"
    assert str(found.plan.subnet) == "172.16.0.0/26"
    assert (invocation.paths.home / invocation.loaded.profile.state_dirs[0]).is_dir()
    # Whether anything listens there is said by the gate, and only by it.
    assert said.getvalue() == ""


def test_an_engine_whose_bridges_are_not_here_is_refused_before_a_container_is_made(
    invocation: Invocation, docker_engine: FakeDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Image:
        image = "sha256:built"

    monkeypatch.setattr(lifecycle, "ensure_image", lambda _: Image())
    monkeypatch.setattr(network, "host_ranges", lambda environ: [])
    with pytest.raises(CorralError, match="is not on this machine"):
        prepare(invocation)
    assert docker_engine.containers_by_id == {}


def test_the_configured_range_replaces_the_defaults() -> None:
    assert lifecycle.subnet_ranges(IPv4Network("10.66.0.0/16")) == [IPv4Network("10.66.0.0/16")]
    assert str(lifecycle.subnet_ranges(None)[0]) == "172.16.0.0/16"


def test_a_removed_working_directory_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(CorralError, match="does not exist any more"):
        lifecycle.working_directory()


def test_variables_of_the_command_line_go_the_way_of_secrets_and_before_them(
    invocation: Invocation, docker_engine: FakeDocker, prepared: Prepared
) -> None:
    given = {"TOKEN": "t0k3n-value", "API_KEY": "another-value"}
    asked = Request("run", ("agent",), "0a1b2c3d", variables=given)
    assert "value" not in repr(asked)
    with created(invocation, prepared, asked) as session:
        body = docker_engine.containers_by_id[session.ident]["Body"]
        assert "t0k3n-value" not in str(body) and "another-value" not in str(body)
        home = invocation.paths.session_home("0a1b2c3d")
        folder = os.open(home, os.O_RDONLY)
        try:
            # The path of a socket is short.
            got = channel.receive(f"/proc/self/fd/{folder}/{secretchannel.NAME}")
        finally:
            os.close(folder)
    assert got == given


def test_nobody_s_leaving_is_anybody_s_attendance(
    invocation: Invocation, docker_engine: FakeDocker, prepared: Prepared
) -> None:
    directory = invocation.paths.session("0a1b2c3d")
    with created(invocation, prepared, request()) as session:
        assert attended.attended(directory) is True
        session.leave()
    assert attended.attended(directory) is False
    assert (directory / holding.LEFT).exists()
    assert list(docker_engine.containers_by_id) == [session.ident]


def test_what_a_session_changed_is_told_by_the_next_start_when_telling_it_was_cut_off(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker, said: io.StringIO, project: Path
) -> None:
    def cut_off(_lines: object) -> None:
        raise KeyboardInterrupt

    told: list[str] = []
    for session, warn in ((SESSION, cut_off), ("1a1b2c3d", told.extend)):
        with (
            pytest.raises(KeyboardInterrupt) if warn is cut_off else contextlib.nullcontext(),
            protect.reported(invocation.loaded, invocation.paths, session, {"PATH": ""}, warn) as watch,
            created(invocation, prepared, replace(request(), session=session)) as made,
        ):
            watch.save()
            (invocation.paths.session_home(session) / "large").write_text("x")
            (project / ".envrc").write_text(made.ident)
    assert f"  {project}/.envrc: changed" in told
    # Of the other there is what telling needs, and nothing else.
    assert leftovers(invocation, docker_engine) == [SESSION]
    directory = invocation.paths.session(SESSION)
    assert {path.name for path in directory.iterdir()} == {protect.BEFORE, attended.FILE}
    assert ".envrc" not in said.getvalue()
    assert sweep(invocation, []) == [SESSION]
    assert f"  {project}/.envrc: new" in said.getvalue()
    assert leftovers(invocation, docker_engine) == []


def test_what_is_done_meanwhile_is_done_before_a_container_may_start(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker, enforcer: FakeEnforcer
) -> None:
    ready, done = threading.Event(), list[str]()
    real = enforcer.await_ready

    def await_ready(ident: str, timeout: float) -> dict[str, Any]:
        ready.set()
        return real(ident, timeout)

    def meanwhile() -> None:
        # Beside what is waited for: it would not end before it.
        assert ready.wait(10)
        done.append("looked")

    enforcer.await_ready = await_ready  # type: ignore[method-assign]
    with created(invocation, prepared, request(), meanwhile):
        assert done == ["looked"]


def test_when_what_is_done_meanwhile_fails_nothing_is_started_or_left(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker
) -> None:
    def meanwhile() -> None:
        raise CorralError("cannot look")

    with (
        pytest.raises(CorralError, match="cannot look"),
        created(invocation, prepared, request(), meanwhile),
    ):
        pytest.fail("it was begun")
    assert leftovers(invocation, docker_engine) == []


def test_nothing_is_told_of_a_session_that_was_never_begun(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker, project: Path
) -> None:
    docker_engine.fail["create"] = refusal(500, "no")
    told: list[str] = []
    reported = protect.reported(
        invocation.loaded, invocation.paths, SESSION, {"PATH": ""}, told.extend, at_once=False
    )
    with pytest.raises(EngineError), reported, created(invocation, prepared, request()):
        pytest.fail("it was begun")
    (project / ".envrc").write_text("x")
    assert told == [] and leftovers(invocation, docker_engine) == []


@pytest.mark.parametrize("untold", [True, False])
def test_more_files_than_can_be_removed_in_time_are_left_for_the_next_start(
    invocation: Invocation,
    prepared: Prepared,
    docker_engine: FakeDocker,
    said: io.StringIO,
    monkeypatch: pytest.MonkeyPatch,
    untold: bool,
) -> None:
    monkeypatch.setattr(lifecycle, "REMOVAL", -1.0)
    told: list[str] = []
    watch = protect.watch(invocation.loaded, invocation.paths, SESSION, {"PATH": ""})
    watch.look()
    with created(invocation, prepared, request()):
        if untold:
            watch.save()
        (invocation.paths.session_home(SESSION) / "large").write_text("x")
    assert "corral prune goes on" in said.getvalue()
    watch.tell(told.extend)
    assert leftovers(invocation, docker_engine) == [SESSION]
    assert attended.attended(invocation.paths.session(SESSION)) is False
    assert sweep(invocation, []) == [SESSION]
    assert leftovers(invocation, docker_engine) == [] and told == []
