from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agent_image.files.entrypoint import channel, gate, mounts
from corral import proxyenv, session
from corral.session import Outside, Request, Terminal, User
from policy import proxying
from policy.container import HOME, Limits, SessionSpec
from policy.declaration import Declaration, Name, Pattern
from policy.identity import StatePaths
from policy.loader import LoadedPolicy

NO_TERMINAL = Terminal()
TTY = Terminal(tty=True, stdin=True, columns=100, rows=30)
OUTSIDE = Outside("192.0.2.1", 443, "198.51.100.53")
PATHS = StatePaths(Path("/state/demo-0123abcd"))


def request(terminal: Terminal = NO_TERMINAL) -> Request:
    return Request("run", ("agent",), "0a1b2c3d", terminal)


def environment(
    loaded: LoadedPolicy, user: User, request: Request, *, secrets: bool = False
) -> dict[str, str]:
    return session.environment(loaded, user, request, OUTSIDE, [("/p", 1, 2)], secrets=secrets)


def plan(loaded: LoadedPolicy, user: User, start: Path | None = None) -> SessionSpec:
    return session.plan(
        loaded,
        user,
        request(),
        paths=PATHS,
        places=(),
        protected=(),
        secrets=True,
        image="sha256:1",
        address="172.16.0.2",
        start=start or loaded.project,
        ipv6=True,
        outside=OUTSIDE,
        limits=Limits(100, 1 << 30, 10**9),
    )


def test_only_named_variables_reach_the_container(loaded: LoadedPolicy, user: User) -> None:
    host = {
        "AWS_SECRET_ACCESS_KEY": "x",
        "SSH_AUTH_SOCK": "/x",
        "PATH": "/opt/bin",
        "LD_PRELOAD": "/x.so",
        "HTTPS_PROXY": "http://proxy.example:1",
        "TERM": "xterm-256color",
        "COLORTERM": "truecolor",
        "HOME": "/somewhere",
        "CORRAL_SESSION_ID": "forged",
        "CORRAL_GATE": "forged",
    }
    env = environment(loaded, replace(user, environ=host, zone="Europe/Berlin"), request(TTY))
    own = set(env) - set(loaded.profile.env)
    assert own == {
        "HOME",
        "TERM",
        "COLORTERM",
        "LANG",
        "TZ",
        "CORRAL_SESSION_ID",
        "CORRAL_GATE",
        "CORRAL_MOUNTS",
    }
    assert env["HOME"] == HOME
    assert env["CORRAL_SESSION_ID"] == "0a1b2c3d"
    assert env["TERM"] == "xterm-256color"


def test_git_name_and_email_come_along_and_nothing_else_of_git(loaded: LoadedPolicy, user: User) -> None:
    who = replace(user, git={"name": "A. Author", "email": "author@example.com"})
    env = environment(loaded, who, request())
    assert env["GIT_AUTHOR_NAME"] == env["GIT_COMMITTER_NAME"] == "A. Author"
    assert env["GIT_AUTHOR_EMAIL"] == env["GIT_COMMITTER_EMAIL"] == "author@example.com"


def test_what_the_profile_or_corral_fixes_is_no_secret(loaded: LoadedPolicy, user: User) -> None:
    fixed = next(iter(loaded.profile.env))
    given = {fixed: "secret", "TZ": "Asia/Tokyo", "HOME": "/x", "CORRAL_SESSION_ID": "x", "API_KEY": "y"}
    assert session.delivered(loaded, given) == {"TZ": "Asia/Tokyo", "API_KEY": "y"}
    env = environment(loaded, replace(user, zone="UTC"), request())
    assert env[fixed] == loaded.profile.env[fixed]
    assert env["HOME"] == HOME
    assert env["CORRAL_GATE"] == session.gate(loaded.declaration, OUTSIDE)


def test_the_entrypoint_is_told_what_is_mounted_and_where_secrets_come_from(
    loaded: LoadedPolicy, user: User
) -> None:
    env = environment(loaded, user, request(), secrets=True)
    assert mounts.parse(env[mounts.VARIABLE]) == [("/p", 1, 2)]
    assert env[channel.VARIABLE] == f"{HOME}/.corral-secrets"
    assert channel.VARIABLE not in environment(loaded, user, request())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "C.UTF-8"),
        ({"LANG": "C.UTF-8"}, "C.UTF-8"),
        ({"LANG": "POSIX"}, "POSIX"),
        ({"LANG": "de_DE.UTF-8"}, "C.UTF-8"),
        ({"LANG": "C", "LC_ALL": "en_US.UTF-8"}, "C.UTF-8"),
        ({"LANG": "x; rm"}, "C.UTF-8"),
    ],
)
def test_the_locale_is_one_that_the_image_has(
    loaded: LoadedPolicy, user: User, given: dict[str, str], expected: str
) -> None:
    assert environment(loaded, replace(user, environ=given), request())["LANG"] == expected


def test_without_a_terminal_there_is_no_TERM_and_a_strange_one_is_replaced(
    loaded: LoadedPolicy, user: User
) -> None:
    assert "TERM" not in environment(loaded, replace(user, environ={"TERM": "xterm"}), request())
    for term in ("", "a\nb", "../x"):
        env = environment(loaded, replace(user, environ={"TERM": term}), request(TTY))
        assert env["TERM"] == "xterm"


def test_a_zone_that_is_no_name_is_left_out(loaded: LoadedPolicy, user: User) -> None:
    assert "TZ" not in environment(loaded, replace(user, zone="/etc/passwd"), request())


def test_project_mounts_and_state_are_mounted_where_they_belong(
    loaded_of: Callable[[str], LoadedPolicy], home: Path, user: User
) -> None:
    shared, notes = home / "shared", home / "notes"
    shared.mkdir(), notes.mkdir()
    loaded = loaded_of(f"profile: opencode\nname: demo\nmounts:\n  rw: [{shared}]\n  ro: [{notes}]\n")
    found = {mount.target: (mount.source, mount.read_only) for mount in plan(loaded, user).mounts}
    assert found[str(loaded.project)] == (str(loaded.project), False)
    assert found[str(shared)] == (str(shared), False)
    assert found[str(notes)] == (str(notes), True)
    for directory in loaded.profile.state_dirs:
        assert found[f"{HOME}/{directory}"] == (f"/state/demo-0123abcd/home/{directory}", False)
    # The home is the session's own; what outlives it is mounted into it.
    assert found[HOME] == ("/state/demo-0123abcd/sessions/0a1b2c3d/home", False)
    assert found[f"{HOME}/.config/opencode"] == ("/state/demo-0123abcd/managed/.config/opencode", True)
    assert len(found) == 5 + len(loaded.profile.state_dirs)


def test_a_path_the_profile_shadows_is_an_empty_read_only_file(loaded: LoadedPolicy, user: User) -> None:
    shadowing = replace(loaded, profile=replace(loaded.profile, shadow=(".secret",)))
    mount = plan(shadowing, user).mounts[-1]
    assert (mount.source, mount.target, mount.read_only) == (
        "/state/demo-0123abcd/empty",
        f"{HOME}/.secret",
        True,
    )


def test_the_command_starts_where_the_user_is_if_that_is_in_the_project(
    loaded: LoadedPolicy, user: User
) -> None:
    below = loaded.project / "src" / "deep"
    assert plan(loaded, user, start=below).workdir == str(below)
    assert plan(loaded, user, start=Path("/etc")).workdir == str(loaded.project)
    beside = loaded.project.with_name(loaded.project.name + "-other")
    assert plan(loaded, user, start=beside).workdir == str(loaded.project)


def test_a_command_replaces_the_harness(loaded: LoadedPolicy) -> None:
    assert session.command(loaded, ()) == loaded.profile.interactive
    assert session.command(loaded, ["ls", "-la"]) == ("ls", "-la")


def test_the_plan_is_the_declaration_of_the_policy(loaded: LoadedPolicy, user: User) -> None:
    spec = plan(loaded, user)
    assert spec.declaration is loaded.declaration
    assert (spec.sandbox, spec.service, spec.session) == (loaded.sandbox, "main", "0a1b2c3d")
    assert spec.hosts_file == "/state/demo-0123abcd/sessions/0a1b2c3d/hosts"
    assert (spec.uid, spec.gid) == (user.uid, user.gid)


def test_the_gate_is_told_every_name_and_service_in_words_it_understands(
    loaded_of: Callable[[str], LoadedPolicy],
) -> None:
    loaded = loaded_of(
        "profile: opencode\nname: demo\negress:\n  profile_defaults: false\n  allow:\n"
        "    - api.example.com\n"
        "    - {host: git.example.com, ports: [22, 443], optional: true}\n"
        "    - {host: quiet.example.com, liveness: false}\n"
        "host_services:\n  - {name: b, port: 8082}\n  - {name: a, port: 8081}\n"
    )
    text = session.gate(loaded.declaration, OUTSIDE)
    assert json.loads(text) == {
        "probe": {"address": "192.0.2.1", "port": 443},
        "resolver": "198.51.100.53",
        "names": [
            {"host": "api.example.com", "ports": [443], "liveness": True, "optional": False},
            {"host": "git.example.com", "ports": [22, 443], "liveness": True, "optional": True},
            {"host": "quiet.example.com", "ports": [443], "liveness": False, "optional": False},
        ],
        "services": [8081, 8082],
        "beside": False,
    }
    assert json.loads(session.gate(loaded.declaration, replace(OUTSIDE, beside=True)))["beside"] is True
    assert gate.parse_policy(text).services == [8081, 8082]


def proxied(loaded: LoadedPolicy) -> LoadedPolicy:
    names = (Name(host="api.example.org"),)
    patterns = (Pattern(host="api.example.org"), Pattern(host="*.example.com"))
    return replace(loaded, declaration=Declaration(names=names, patterns=patterns))


def test_a_proxied_session_is_led_to_its_proxy_whatever_the_profile_fixes(
    loaded: LoadedPolicy, user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not proxyenv.NAMES & set(environment(loaded, user, request()))
    own = {"NO_PROXY": "*", "https_proxy": "http://proxy.example:1"}
    monkeypatch.setattr(type(loaded.profile), "environment", lambda *_: own)
    env = environment(proxied(loaded), user, request())
    assert env["https_proxy"] == env["HTTPS_PROXY"] == "http://proxy:8443"
    assert env["NO_PROXY"].endswith(",proxy,api.example.org")


def test_what_leads_to_the_proxy_is_nobody_else_s_to_set(loaded: LoadedPolicy) -> None:
    assert session.delivered(loaded, {"HTTPS_PROXY": "x"}) == {"HTTPS_PROXY": "x"}
    assert session.delivered(proxied(loaded), {"HTTPS_PROXY": "x", "API_KEY": "y"}) == {"API_KEY": "y"}


def test_the_gate_of_a_proxied_session_looks_for_the_proxy(loaded: LoadedPolicy) -> None:
    assert gate.parse_policy(session.gate(loaded.declaration, OUTSIDE)).proxy == 0
    assert gate.parse_policy(session.gate(proxied(loaded).declaration, OUTSIDE)).proxy == 8443
    assert gate.PROXY_ALIAS == proxying.ALIAS


def test_what_the_gate_is_told_fits_into_one_variable(loaded: LoadedPolicy) -> None:
    # The kernel takes 128 KiB a string; a policy file is at most 64 KiB.
    names = tuple(
        Name(host=f"{number}.{'a' * 60}.{'b' * 60}.{'c' * 60}.example.com", optional=True, liveness=False)
        for number in range(256)
    )
    text = session.gate(Declaration(names=names), OUTSIDE)
    assert len(text) < 128 * 1024 - len("CORRAL_GATE=") - 1
