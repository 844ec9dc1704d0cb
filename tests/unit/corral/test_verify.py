from __future__ import annotations

import json
import os
from dataclasses import replace
from ipaddress import IPv4Network
from typing import Any

import pytest
import requests

from corral import network, outdated, state, verify
from corral.checks import Check
from corral.context import Invocation
from corral.lifecycle import Prepared, created
from corral.session import Request
from corral.subnets import Plan
from policy import proxying
from policy.container import Limits, Mount
from policy.declaration import Declaration, Name, Pattern
from policy.errors import EngineError
from tests.unit.corral.fakes import FakeDocker, FakeEnforcer

PLAN = Plan(IPv4Network("172.16.0.0/26"))
GOOD = json.dumps({"check": "non-root", "status": "ok", "detail": ""}).encode() + b"\n"


@pytest.fixture
def prepared(invocation: Invocation, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    loaded = invocation.loaded
    state.prepare(invocation.paths, loaded.profile)
    network._create(invocation.api, loaded.sandbox, invocation.user.uid, [PLAN.subnet], [])
    made = Prepared(invocation.user, "sha256:1", PLAN, {}, Limits())
    monkeypatch.setattr(verify, "prepare", lambda _: made)
    # The checker here says what a test lets it say.
    monkeypatch.setattr(verify, "asked", lambda _: [])
    return made


def results(found: list[Check]) -> dict[str, str]:
    return {check.shown_name: check.status for check in found}


def test_the_throw_away_container_gets_what_run_gives_but_the_command(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker
) -> None:
    with created(invocation, prepared, Request("run", ("agent",), "00000001")) as session:
        usual = docker_engine.containers_by_id[session.ident]["Body"]
    seen: list[dict[str, Any]] = []
    real = docker_engine.create_container_from_config
    docker_engine.create_container_from_config = (  # type: ignore[method-assign]
        lambda body, name: (seen.append(dict(body)), real(body, name))[1]
    )
    docker_engine.stdout = GOOD
    verify.verify(invocation)
    body = seen[0]
    assert body["Cmd"][0] == verify.PROGRAM
    assert body["Labels"]["io.corral.purpose"] == "verify"
    session_of = body["Labels"]["io.corral.session"]
    text = json.dumps({**body, "Cmd": usual["Cmd"]}, sort_keys=True)
    text = text.replace(session_of, "00000001").replace('"verify"', '"run"')
    # Each session has the next address.
    assert json.loads(text.replace("172.16.0.3", "172.16.0.2")) == usual


def test_the_kernel_is_read_before_the_container_can_end(
    invocation: Invocation,
    prepared: Prepared,
    docker_engine: FakeDocker,
    enforcer: FakeEnforcer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    docker_engine.stdout = GOOD
    monkeypatch.setattr(
        enforcer, "live", lambda sandbox: (docker_engine.calls.append("live"), enforcer.live_answer)[1]
    )
    verify.verify(invocation)
    calls = docker_engine.calls
    assert calls.index("create") < calls.index("live") < calls.index("start") < calls.index("remove")
    assert docker_engine.containers_by_id == {}


def test_differences_of_the_kernel_are_failures_of_live_rules(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker, enforcer: FakeEnforcer
) -> None:
    docker_engine.stdout = GOOD
    enforcer.live_answer["pins"] = [
        ["172.16.0.2", "tcp", 443, "192.0.2.1"],
        # It is tried a second time, as a session of its own.
        ["172.16.0.3", "tcp", 443, "192.0.2.1"],
        ["172.16.0.30", "tcp", 443, "192.0.2.2"],
    ]
    found = {check.name: check for check in verify.verify(invocation)}
    assert found["live-rules"].status == "fail"
    assert "192.0.2.1:443" in found["live-rules"].detail
    # Another container's elements are not this one's.
    assert "192.0.2.2" not in found["live-rules"].detail
    assert found["skeleton-in-path"].status == found["backstop"].status == "ok"


def test_a_name_resolved_anew_is_measured_once_more(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker
) -> None:
    # live-rules alone fails: api.example.com has no address in this enforcer.
    docker_engine.stdout = GOOD
    verify.verify(invocation)
    assert docker_engine.calls.count("create") == 2
    docker_engine.calls.clear()
    docker_engine.stdout = json.dumps({"check": "non-root", "status": "fail", "detail": ""}).encode()
    docker_engine.exit_code = 1
    verify.verify(invocation)
    assert docker_engine.calls.count("create") == 1


def test_a_running_session_is_checked_as_its_user(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker, enforcer: FakeEnforcer
) -> None:
    docker_engine.stdout = GOOD
    docker_engine.exec_output = (GOOD, b"", 0)
    users: list[str] = []
    real = docker_engine.exec_create
    docker_engine.exec_create = (  # type: ignore[method-assign]
        lambda ident, argv, user, workdir: (users.append(user), real(ident, argv, user, workdir))[1]
    )
    with created(invocation, prepared, Request("run", ("agent",), "00000001")) as session:
        docker_engine.start(session.ident)
        enforcer.status_answer = {
            "sandboxes": [
                {
                    "sessions": [
                        {
                            "container": session.ident,
                            "names": [
                                {"name": "api.example.com", "addresses": ["203.0.113.10"], "lingering": []}
                            ],
                        }
                    ]
                }
            ]
        }
        found = results(verify.verify(invocation))
    assert found["session-policy@00000001"] == "ok"
    assert found["non-root@00000001"] == "ok"
    assert "live-rules@00000001" in found
    assert set(users) == {f"{invocation.user.uid}:{invocation.user.gid}"}
    told = json.loads(docker_engine.commands[0][1])
    assert told["names"] == {"api.example.com": ["203.0.113.10"]}
    assert docker_engine.commands[0][0] == verify.PROGRAM


@pytest.mark.parametrize("what", ["egress", "mounts"])
def test_a_session_of_an_earlier_policy_is_a_failure(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker, what: str
) -> None:
    docker_engine.stdout = GOOD
    with created(invocation, prepared, Request("run", ("agent",), "00000001")) as session:
        docker_engine.start(session.ident)
        row = docker_engine.containers_by_id[session.ident]
        if what == "egress":
            row["Labels"]["io.corral.egress"] = '{"schema":1}'
        else:
            row["Body"]["HostConfig"]["Mounts"].pop(0)
        found = {check.shown_name: check for check in verify.verify(invocation)}
    assert found["session-policy@00000001"].status == "fail"
    assert what in found["session-policy@00000001"].detail
    assert docker_engine.commands == []


def test_another_verification_is_not_a_session(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker
) -> None:
    docker_engine.stdout = GOOD
    with created(invocation, prepared, Request("verify", ("x",), "00000001")) as session:
        docker_engine.start(session.ident)
        verify.verify(invocation)
    assert "exec" not in docker_engine.calls


def test_a_session_that_lost_its_network_is_reported(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker
) -> None:
    docker_engine.stdout = docker_engine.exec_output = GOOD  # type: ignore[assignment]
    docker_engine.exec_output = (GOOD, b"", 0)
    with created(invocation, prepared, Request("run", ("agent",), "00000001")) as session:
        docker_engine.start(session.ident)
        docker_engine.containers_by_id[session.ident]["NetworkSettings"]["Networks"].clear()
        with pytest.raises(EngineError, match="not on its network"):
            verify.verify(invocation)


def test_a_container_that_the_gate_stopped_fails_by_the_gates_words(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker
) -> None:
    docker_engine.stderr = "corral-firewall: ERROR: unlisted host reachable — isolation broken\n".encode()
    docker_engine.exit_code = 1
    found = [check for check in verify.verify(invocation) if check.status == "fail"]
    assert "FAIL gate: unlisted host reachable — isolation broken" in [check.line() for check in found]
    assert "checker" not in {check.name for check in found}


def test_a_checker_that_leaves_a_check_out_is_a_failure(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker_engine.stdout = GOOD
    monkeypatch.undo()
    other = {
        "container": "b",
        "name": "corral-other-main",
        "state": "running",
        "address": "172.16.0.66",
    }
    told = verify._expectations(invocation, prepared, {}, {"sandboxes": [{"sessions": [other]}]}, "")
    names = verify.asked(told)
    assert {"non-root", "read-only-root", "limits", "peer-unreachable:corral-other-main"} <= set(names)
    monkeypatch.setattr(verify, "prepare", lambda _: prepared)
    found = {check.name: check for check in verify.verify(invocation)}
    assert found["checker"].status == "fail"
    assert "no-sudo" in found["checker"].detail
    assert "gate" not in found


def test_a_container_that_the_service_refuses_is_told_with_the_state_of_the_rules(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker, enforcer: FakeEnforcer
) -> None:
    enforcer.refusal = "nothing new is granted: table inet corral is missing"
    enforcer.live_answer["skeleton"]["backstop"] = False
    found = results(verify.verify(invocation))
    assert found == {"session-ready": "fail", "skeleton-in-path": "ok", "backstop": "fail"}
    assert "start" not in docker_engine.calls
    assert docker_engine.containers_by_id == {}


def test_a_checker_that_does_not_end_is_a_failure_and_not_an_error(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker
) -> None:
    docker_engine.fail["wait"] = requests.ReadTimeout("read timed out")
    found = results(verify.verify(invocation))
    assert found["checker"] == "fail"
    assert found["backstop"] == "ok"
    docker_engine.fail["wait"] = requests.ConnectionError("gone")
    with pytest.raises(EngineError, match="Docker went away"):
        verify.verify(invocation)


def test_peers_are_all_running_containers_but_the_one_that_asks() -> None:
    def row(ident: str, state: str, address: str) -> dict[str, str]:
        return {"container": ident, "name": f"corral-{ident}", "state": state, "address": address}

    status = {
        "sandboxes": [
            {"sessions": [row("a", "running", "172.16.0.2"), row("b", "ready", "172.16.0.3")]},
            {"sessions": [row("c", "running", "172.16.0.66"), row("d", "running", "")]},
            {"sessions": None},
        ]
    }
    assert verify.peers(status, "a") == {"corral-c": "172.16.0.66"}
    assert verify.peers(status, "") == {"corral-a": "172.16.0.2", "corral-c": "172.16.0.66"}
    assert verify.peers({}, "") == {}


@pytest.mark.parametrize(
    ("pids", "stale"), [(4096, False), (None, False), (0, False), (-1, False), (100, True)]
)
def test_limits_of_an_earlier_policy_are_a_difference_and_discarded_ones_are_not(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker, pids: int | None, stale: bool
) -> None:
    with created(invocation, prepared, Request("run", ("agent",), "00000001")) as session:
        docker_engine.containers_by_id[session.ident]["Body"]["HostConfig"]["PidsLimit"] = pids
        inspect = docker_engine.inspect_container(session.ident)
        told = verify.started_differently(invocation, inspect, prepared.limits, {})
    assert ("PidsLimit" in told) == stale


def test_what_was_allowed_by_hand_and_then_saved_is_no_other_version_of_the_policy(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker
) -> None:
    with created(invocation, prepared, Request("run", ("agent",), "00000001")) as session:
        inspect = docker_engine.inspect_container(session.ident)
        before = invocation.loaded
        names = (*before.declaration.names, Name(host="new.example.com"))
        wider = before.declaration.model_copy(update={"names": names})
        invocation.__dict__["loaded"] = replace(before, declaration=wider)
        granted = {"names": [{"name": "new.example.com", "granted": {"443": None}}]}
        told = {
            key: verify.started_differently(invocation, inspect, prepared.limits, row)
            for key, row in (("granted", granted), ("not", {}), ("denied", {"withdrawn": [names[0].host]}))
        }
    assert "egress" not in told["granted"]
    assert "egress" in told["not"]
    assert "egress" in told["denied"]


@pytest.mark.parametrize(
    ("below", "read_only", "moved", "stale"),
    [
        (".git/hooks", True, False, False),
        (".git/hooks", False, False, True),
        (".git/hooks", True, True, True),
        ("../beside", True, False, True),
        (".", True, False, True),
    ],
)
def test_closing_a_part_of_what_is_writable_is_no_other_policy_and_anything_else_is(
    invocation: Invocation,
    prepared: Prepared,
    docker_engine: FakeDocker,
    below: str,
    read_only: bool,
    moved: bool,
    stale: bool,
) -> None:
    place = os.path.normpath(invocation.loaded.project / below)
    with created(invocation, prepared, Request("run", ("agent",), "00000001")) as session:
        mount = Mount("/elsewhere" if moved else place, place, read_only=read_only)
        docker_engine.containers_by_id[session.ident]["Body"]["HostConfig"]["Mounts"].append(mount.body())
        inspect = docker_engine.inspect_container(session.ident)
        told = verify.started_differently(invocation, inspect, prepared.limits, {})
    assert bool(told) == stale


# -- names that are not pinned ahead

ZONE = Pattern(host="*.example.org")
PROXY_ADDRESS = "172.16.0.61"


def proxied(
    invocation: Invocation, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> tuple[Invocation, dict[str, Any]]:
    """The invocation with a policy that has a proxy, and the proxy's row in the service's status."""
    declared = Declaration(names=(Name(host="api.example.com"),), patterns=(ZONE,), **changes)
    loaded = replace(invocation.loaded, declaration=declared)
    # It is found once, and kept.
    monkeypatch.setitem(invocation.__dict__, "loaded", loaded)
    row = {
        "container": "proxy",
        "name": "corral-demo-proxy",
        "service": proxying.SERVICE,
        "state": "running",
        "address": PROXY_ADDRESS,
        "opened": [{"address": "203.0.113.7", "port": 443, "names": ["a.example.org"]}],
    }
    return invocation, row


def status_with(invocation: Invocation, row: dict[str, Any]) -> dict[str, Any]:
    return {"sandboxes": [{"sandbox": invocation.loaded.sandbox.id, "sessions": [row]}]}


def test_the_proxy_of_a_sandbox_is_judged_by_what_the_kernel_lets_it_reach(
    invocation: Invocation,
    prepared: Prepared,
    docker_engine: FakeDocker,
    enforcer: FakeEnforcer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    invocation, row = proxied(invocation, monkeypatch)
    docker_engine.stdout = GOOD
    enforcer.status_answer = status_with(invocation, row)
    enforcer.live_answer["pins"] = [[PROXY_ADDRESS, "tcp", 443, "203.0.113.7"]]

    def outcome() -> Check:
        return next(check for check in verify.verify(invocation) if check.name == "proxy-elements")

    assert outcome() == Check("proxy-elements", "ok")
    enforcer.live_answer["pins"].append([PROXY_ADDRESS, "tcp", 443, "203.0.113.66"])
    assert "203.0.113.66:443" in outcome().detail
    enforcer.live_answer["pins"].pop()
    row["opened"][0]["names"] = ["a.example.net"]
    assert "a.example.net" in outcome().detail
    row["opened"][0]["names"] = ["a.example.org"]
    row["problems"] = ["it is not of corral's shape"]
    assert "it is not of corral's shape" in outcome().detail
    enforcer.status_answer = {"sandboxes": []}
    assert "knows of no proxy" in outcome().detail


def test_a_sandbox_without_a_proxy_is_not_asked_for_one(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker
) -> None:
    docker_engine.stdout = GOOD
    assert "proxy-elements" not in {check.name for check in verify.verify(invocation)}


def test_the_checker_is_told_of_the_proxy_and_of_what_it_alone_may_reach(
    invocation: Invocation,
    prepared: Prepared,
    enforcer: FakeEnforcer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    invocation, row = proxied(invocation, monkeypatch)
    enforcer.live_answer["pins"] = [
        [PROXY_ADDRESS, "tcp", 443, "203.0.113.7"],
        [PROXY_ADDRESS, "tcp", 443, "203.0.113.8"],
        ["172.16.0.2", "tcp", 443, "203.0.113.8"],
    ]
    told = verify._expectations(invocation, prepared, {}, status_with(invocation, row), "")
    assert told["proxy"] == {
        "port": 8443,
        "denied": "example.com",
        "permitted": None,
        "address": PROXY_ADDRESS,
        "only": [["203.0.113.7", 443]],
    }
    monkeypatch.undo()
    assert {"proxy-denies", "proxy-is-the-only-way"} <= {*verify.asked(told)}


def test_the_proxy_itself_is_no_session_to_be_checked(
    invocation: Invocation, prepared: Prepared, docker_engine: FakeDocker
) -> None:
    docker_engine.stdout = GOOD
    with created(invocation, prepared, Request(proxying.PURPOSE, ("agent",), "00000001")) as made:
        docker_engine.start(made.ident)
        found = verify.verify(invocation)
    assert {check.session for check in found} == {""}


@pytest.mark.parametrize(
    "changed",
    [
        {"patterns": (ZONE, Pattern(host="*.example.net"))},
        {"patterns": (Pattern(host="*.example.org", sni=False),)},
        {"patterns": (ZONE,), "mode": "proxy"},
        {"patterns": (ZONE,), "dns": "answer"},
        {},
    ],
)
def test_a_session_that_may_ask_for_something_else_than_the_policy_says_is_told(changed: Any) -> None:
    label = Declaration(patterns=(ZONE,)).to_label()
    assert not outdated._egress_differs(label, Declaration(patterns=(ZONE,)), {})
    assert outdated._egress_differs(label, Declaration(**changed), {})


def test_a_port_of_a_zone_that_was_allowed_by_hand_and_then_saved_is_no_other_version_of_the_policy() -> None:
    label = Declaration(patterns=(ZONE,)).to_label()
    saved = Declaration(patterns=(ZONE.model_copy(update={"ports": (*ZONE.ports, 8443)}),))
    asked = [{"host": ZONE.host, "ports": list(ZONE.ports)}, {"host": ZONE.host, "ports": [8443]}]
    assert not outdated._egress_differs(label, saved, {"asked": asked})
    assert outdated._egress_differs(label, saved, {"asked": asked[:1]})
