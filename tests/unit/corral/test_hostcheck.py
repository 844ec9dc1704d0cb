"""Which engines are refused, from facts alone."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from corral import hostfacts
from corral.hostcheck import Choice, Facts, choose, judge, judge_choice, parse_version, require
from policy.errors import EngineError

OWN = "/run/docker.sock"
OWN_ENGINE = Choice("unix:///run/user/1000/docker.sock", "rootless", path="/run/user/1000/docker.sock", own="/run/user/1000/docker.sock", rootless=True)  # fmt: skip
LOCAL = Choice("unix:///var/run/docker.sock", path=OWN, own=OWN)
GOOD = Facts(
    LOCAL,
    version="26.1.5+dfsg1",
    system="Debian GNU/Linux 13 (trixie)",
    root="/var/lib/docker",
    security=("seccomp", "cgroupns"),
    components=("Engine", "containerd", "runc"),
    owner=0,
    bridges=("br-0123456789ab", "docker0"),
    proven=True,
    listening=True,
)


def keys(facts: Facts) -> list[str]:
    return [refusal.key for refusal in judge(facts)]


def test_the_engine_of_this_machine_is_taken() -> None:
    assert judge(GOOD) == []
    require(judge(GOOD))


@pytest.mark.parametrize(
    ("facts", "key", "message", "hint"),
    [
        (replace(GOOD, system="Docker Desktop"), "desktop", "Docker Desktop", "apt install docker.io"),
        (replace(GOOD, security=("seccomp", "rootless")), "rootless", "not your own", "docker context use default"),
        (replace(GOOD, choice=OWN_ENGINE), "rootless", "says that it is none", "systemctl --user status docker"),
        (replace(GOOD, components=("Podman Engine",)), "podman", "not supported yet", "Docker Engine"),
        (replace(GOOD, missing=("br-0123456789ab",)), "elsewhere", "br-0123456789ab", "this machine"),
        (replace(GOOD, proven=False, owner=1000), "elsewhere", "uid 1000", "this machine"),
        (replace(GOOD, proven=False, listening=False), "elsewhere", "nobody in this machine", "this machine"),
        (replace(GOOD, root="/var/snap/docker/common/var-lib-docker"), "snap", "snap", "snap remove docker"),
        (replace(GOOD, security=("seccomp", "userns")), "userns", "userns-remap", "daemon.json"),
        (replace(GOOD, version="19.03.15"), "old", "19.03.15, and 20.10", "upgrade"),
    ],
)  # fmt: skip
def test_an_engine_that_cannot_be_fenced_is_refused_with_the_reason(
    facts: Facts, key: str, message: str, hint: str
) -> None:
    assert keys(facts) == [key]
    with pytest.raises(EngineError, match=message) as caught:
        require(judge(facts))
    assert hint in str(caught.value.hint)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    "facts",
    [
        replace(GOOD, version="20.10.24+dfsg1"),
        replace(GOOD, version="library-import"),
        replace(GOOD, firewall="iptables+firewalld"),
        # Only docker0, which any engine has: who listens on the socket decides.
        replace(GOOD, proven=False),
        replace(GOOD, proven=False, owner=None, listening=None),
        # A bridge that cannot be here by chance is worth more than a socket passed on by a user's program.
        replace(GOOD, owner=1000, listening=False),
    ],
)
def test_what_says_nothing_against_an_engine_refuses_nothing(facts: Facts) -> None:
    assert keys(facts) == []


def test_all_reasons_are_told_at_once() -> None:
    facts = replace(GOOD, security=("userns",), version="18.09.1")
    assert keys(facts) == ["userns", "old"]
    with pytest.raises(EngineError, match=r"(?s)userns-remap.*18\.09\.1") as caught:
        require(judge(facts))
    assert "userns-remap from" in str(caught.value.hint) and "command line" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("docker", "podman", "message", "key"),
    [
        (True, False, "nobody answers at /run/docker.sock", "silent"),
        (True, True, "you may not use Docker: permission denied on /run/docker.sock", "denied"),
        (False, False, "there is no /run/docker.sock", "absent"),
        (False, True, "there is no /run/docker.sock", "podman"),
    ],
)
def test_an_engine_that_does_not_answer(docker: bool, podman: bool, message: str, key: str) -> None:
    facts = Facts(LOCAL, docker=docker, podman=podman, trouble=EngineError(message, "do this"))
    (refusal,) = judge(facts)
    assert refusal.key == key
    assert refusal.hint
    assert ("podman is not supported yet" in refusal.message) is (key == "podman")


CONTEXTS = {"build": "ssh://dev@build.example", "desktop-linux": "unix:///home/a/.docker/desktop/docker.sock"}


@pytest.mark.parametrize(
    ("environ", "current", "expected"),
    [
        ({}, "", ("default", "default", "unix:///var/run/docker.sock")),
        ({}, "default", ("default", "default", "unix:///var/run/docker.sock")),
        ({}, "build", ("context", "build", "ssh://dev@build.example")),
        ({"DOCKER_CONTEXT": "build"}, "", ("DOCKER_CONTEXT", "build", "ssh://dev@build.example")),
        ({"DOCKER_CONTEXT": "default"}, "build", ("default", "default", "unix:///var/run/docker.sock")),
        ({"DOCKER_CONTEXT": "gone"}, "", ("DOCKER_CONTEXT", "gone", "")),
        # As with docker itself, DOCKER_HOST is stronger than any context.
        ({"DOCKER_HOST": "unix:///x", "DOCKER_CONTEXT": "build"}, "", ("DOCKER_HOST", "default", "unix:///x")),
    ],
)  # fmt: skip
def test_the_engine_is_chosen_as_docker_chooses_it(
    environ: dict[str, str], current: str, expected: tuple[str, str, str]
) -> None:
    assert choose(environ, current, CONTEXTS) == expected


def by_path(path: str, by: str = "context", own: str = OWN) -> Choice:
    return Choice(f"unix://{path}", by, "mine", path, own)


@pytest.mark.parametrize(
    ("choice", "key", "message", "hint"),
    [
        (Choice("tcp://203.0.113.9:2375", "DOCKER_HOST"), "remote", "DOCKER_HOST names", "unset DOCKER_HOST"),
        (Choice("ssh://dev@build.example", "DOCKER_HOST"), "remote", "ssh://build.example", "unset DOCKER_HOST"),
        (Choice("tcp://203.0.113.9", "context", "far"), "context", "the docker context far", "docker context use default"),
        (Choice(None, "DOCKER_CONTEXT", "gone"), "context", "context gone does not exist", "unset DOCKER_CONTEXT"),
        (by_path("/run/other.sock"), "context", "the docker context mine names the engine at", "docker context use"),
        (by_path("/home/a/.docker/desktop/docker.sock"), "desktop", "Docker Desktop", "docker context use default"),
        (by_path("/home/a/.colima/default/docker.sock"), "machine", "Colima", "docker context use default"),
        (by_path("/home/a/.lima/docker/sock/docker.sock"), "machine", "Lima", "docker context use default"),
        (by_path("/home/a/.rd/docker.sock"), "machine", "Rancher Desktop", "docker context use default"),
        (by_path("/run/podman/podman.sock"), "podman", "podman", "Docker Engine"),
        (by_path("/run/user/1000/docker.sock"), "rootless", "rootless", "docker context use default"),
        # The socket everybody uses may be a link to somewhere else.
        (by_path("/home/a/.docker/desktop/docker.sock", "default", "/home/a/.docker/desktop/docker.sock"), "desktop", "/var/run/docker.sock leads to Docker Desktop", "Engine"),
    ],
)  # fmt: skip
def test_a_name_that_leads_elsewhere_is_refused(choice: Choice, key: str, message: str, hint: str) -> None:
    (refusal,) = judge_choice(choice)
    assert refusal.key == key
    assert message in refusal.message
    assert hint in refusal.hint
    assert judge(Facts(choice)) == [refusal]


def test_a_context_that_names_the_same_socket_is_fine_and_so_is_another_local_socket_by_docker_host() -> None:
    assert judge_choice(by_path(OWN)) == []
    assert judge_choice(by_path("/srv/docker.sock", "DOCKER_HOST", "/srv/docker.sock")) == []


def test_no_password_of_an_address_is_shown() -> None:
    (refusal,) = judge_choice(Choice("tcp://me:hunter2@203.0.113.9:2375", "DOCKER_HOST"))
    assert "hunter2" not in refusal.message


def test_versions_are_read_as_far_as_they_are_numbers() -> None:
    assert parse_version("26.1.5+dfsg1") == (26, 1)
    assert parse_version("dev") is None


def write_context(base: Path, name: str, host: str | None) -> None:
    file = base / "contexts" / "meta" / name / "meta.json"
    file.parent.mkdir(parents=True)
    endpoints = {"docker": {"Host": host}} if host else {}
    file.write_text(json.dumps({"Name": name, "Metadata": {}, "Endpoints": endpoints}))


def test_contexts_are_read_where_docker_keeps_them(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path)}
    assert hostfacts.docker_contexts(environ) == ("", {})
    base = tmp_path / ".docker"
    write_context(base, "far", "tcp://203.0.113.9:2375")
    write_context(base, "plain", None)
    (base / "config.json").write_text(json.dumps({"currentContext": "far"}))
    known = {"far": "tcp://203.0.113.9:2375", "plain": "unix:///var/run/docker.sock"}
    assert hostfacts.docker_contexts(environ) == ("far", known)
    with pytest.raises(EngineError, match="the docker context far names an engine elsewhere"):
        hostfacts.refuse_elsewhere(environ)
    assert hostfacts.docker_contexts({"HOME": "/nowhere", "DOCKER_CONFIG": str(base)})[0] == "far"
    # docker says so and goes on with the default.
    (base / "config.json").write_text("{ bad")
    assert hostfacts.docker_contexts(environ)[0] == ""


def test_links_are_followed_before_sockets_are_compared(tmp_path: Path) -> None:
    real = tmp_path / "real.sock"
    real.touch()
    (tmp_path / "link.sock").symlink_to(real)
    chosen = hostfacts.choice({"DOCKER_HOST": f"unix://{tmp_path}/link.sock"})
    assert (chosen.path, chosen.own) == (str(real), str(real))


def test_bridges_are_named_as_docker_names_them() -> None:
    networks = [
        {"Driver": "bridge", "Id": "0123456789abcdef", "Options": {}},
        {"Driver": "bridge", "Id": "f" * 64, "Options": {"com.docker.network.bridge.name": "docker0"}},
        {"Driver": "overlay", "Id": "e" * 64},
        {"Driver": "host", "Id": "d" * 64, "Options": None},
    ]
    assert hostfacts.bridges_of(networks) == ("br-0123456789ab", "docker0")


def test_security_options_are_names() -> None:
    assert hostfacts.security_names(["name=seccomp,profile=builtin", "name=rootless"]) == (
        "seccomp",
        "rootless",
    )


def test_interfaces_and_listeners_are_those_of_the_first_process(tmp_path: Path) -> None:
    net = tmp_path / "1" / "net"
    net.mkdir(parents=True)
    (net / "dev").write_text("Inter-|\n face |bytes\n    lo: 1 2\ncorral-0a1b2c3d: 0 0\n")
    path = tmp_path / "docker.sock"
    path.touch()
    row = f"0000: 00000002 00000000 00010000 0001 01 381555 {path}"
    (net / "unix").write_text(f"Num RefCount\n{row}\n0000: 00000002 00000000 00010000 0001 01 38\n")
    assert hostfacts.interfaces(tmp_path) == {"lo", "corral-0a1b2c3d"}
    assert hostfacts.listening(str(path), tmp_path) is True
    assert hostfacts.listening("/run/other.sock", tmp_path) is False
    assert hostfacts.listening("/run/other.sock", tmp_path / "hidden") is None


def test_who_listens_on_a_socket_is_asked_of_the_kernel(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        assert hostfacts.listener(str(path)) == (os.getpid(), os.getuid())
    assert hostfacts.listener(str(tmp_path / "none")) is None


def test_iptables_off_is_found_on_the_command_line_and_in_the_file_that_dockerd_reads(tmp_path: Path) -> None:
    def dockerd(*words: str) -> None:
        (tmp_path / "7").mkdir(exist_ok=True)
        (tmp_path / "7" / "cmdline").write_bytes(b"\0".join(word.encode() for word in words) + b"\0")

    config = tmp_path / "daemon.json"
    dockerd("dockerd", "-H", "fd://")
    assert hostfacts.iptables_off(7, tmp_path, config) == ""
    assert hostfacts.iptables_off(None, tmp_path, config) == ""
    config.write_text('{"iptables": false}')
    assert hostfacts.iptables_off(7, tmp_path, config) == str(config)
    other = tmp_path / "other.json"
    other.write_text('{"iptables": true}')
    dockerd("dockerd", "--config-file", str(other))
    assert hostfacts.iptables_off(7, tmp_path, config) == ""
    dockerd("dockerd", "--iptables=false")
    assert hostfacts.iptables_off(7, tmp_path, other) == "the command line of dockerd"


def test_the_users_own_rootless_engine_is_taken_and_its_rules_are_switched_on_without_root() -> None:
    facts = replace(GOOD, choice=OWN_ENGINE, security=("seccomp", "rootless"))
    assert judge(facts) == []
    (refusal,) = judge(replace(facts, no_iptables="the command line of dockerd"))
    assert "systemctl --user restart docker" in refusal.hint
    assert judge(replace(facts, missing=("br-0123456789ab",)))[0].key == "elsewhere"


def test_who_may_not_use_the_systems_engine_and_runs_one_means_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path), "PATH": ""}
    closed = tmp_path / "system.sock"
    monkeypatch.setattr(hostfacts, "DEFAULT_SOCKET", f"unix://{closed}")
    assert not hostfacts.choice(environ).rootless
    (tmp_path / "docker.sock").touch()
    found = hostfacts.choice(environ)
    assert (found.rootless, found.by, found.path) == (True, "rootless", str(tmp_path / "docker.sock"))
    assert judge_choice(found) == []
    closed.touch()
    assert not hostfacts.choice(environ).rootless
    named = hostfacts.choice({**environ, "DOCKER_HOST": f"unix://{tmp_path}/docker.sock"})
    assert (named.rootless, named.by) == (True, "DOCKER_HOST")
