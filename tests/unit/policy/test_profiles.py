from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from pydantic import ValidationError

from policy import profiles
from policy.container import HOME
from policy.errors import PolicyError
from policy.hosts import parse_host
from policy.profiles import Profile
from policy.secrets import changes_behaviour

ALL = [profiles.get(name) for name in profiles.names()]


def config(profile: Profile, options: dict[str, Any]) -> dict[str, Any]:
    baked = {file.path: file for file in profile.baked_files(profile.parse_options(options))}
    parsed: dict[str, Any] = json.loads(baked["/etc/opencode/opencode.json"].content)
    return parsed


@pytest.mark.parametrize("profile", ALL, ids=lambda p: p.name)
def test_profile_is_consistent(profile: Profile) -> None:
    for package in profile.packages:
        algorithm, _, digest = package.integrity.partition("-")
        assert (algorithm, len(base64.b64decode(digest, validate=True))) == ("sha512", 64)
        assert package.key == f"{package.name}@{package.version}"
        assert package.target.startswith("/usr/local/bin/")
        assert not package.member.startswith("/") and ".." not in package.member
    for argv in (profile.interactive, profile.one_shot, profile.resume):
        assert argv[0].startswith("/")
    for directory in profile.state_dirs:
        assert profile.state_path(directory).startswith(HOME + "/")
        assert ".." not in directory and not directory.startswith("/")
    for host in profile.default_egress:
        assert parse_host(host) == host
    # What the profile fixes must not be what every secrets file is refused for already.
    assert not [key for key in profile.env if changes_behaviour(key)]
    assert profile.modes <= {"run", "daemon"}
    assert profile.baked_files(profile.parse_options({})) == profile.baked_files(profile.parse_options({}))


@pytest.mark.parametrize("profile", ALL, ids=lambda p: p.name)
def test_profile_cannot_be_changed(profile: Profile) -> None:
    with pytest.raises(AttributeError):
        profile.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        profile.env["X"] = "1"  # type: ignore[index]


@pytest.mark.parametrize("name", profiles.planned())
def test_planned_profile_says_that_it_is_not_available(name: str) -> None:
    with pytest.raises(PolicyError, match=f"profile {name} is not available yet"):
        profiles.get(name)


def test_unknown_profile_names_the_nearest() -> None:
    with pytest.raises(PolicyError) as caught:
        profiles.get("open-code")
    assert caught.value.hint == "did you mean opencode? available: opencode"


def test_opencode_never_contacts_anything_but_models_by_itself() -> None:
    env = profiles.get("opencode").env
    for name in ("MODELS_FETCH", "AUTOUPDATE", "LSP_DOWNLOAD", "SHARE"):
        assert env[f"OPENCODE_DISABLE_{name}"] == "1"


def test_opencode_configuration_directory_cannot_be_written_and_has_the_file_it_would_create() -> None:
    (managed,) = profiles.get("opencode").managed_dirs
    assert (managed.path, dict(managed.files)) == (".config/opencode", {".gitignore": ""})


def test_opencode_options_are_merged_below_what_corral_fixes() -> None:
    profile = profiles.get("opencode")
    assert config(profile, {}) == {
        "agent": {"title": {"disable": True}},
        "autoupdate": False,
        "share": "disabled",
    }
    provider = {
        "llama": {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "http://corral-host:8081/v1"}}
    }
    merged = config(profile, {"config": {"provider": provider, "agent": {"build": {"model": "llama/x"}}}})
    assert merged["provider"] == provider
    assert merged["agent"] == {"title": {"disable": True}, "build": {"model": "llama/x"}}
    assert config(profile, {"config": {"agent": {"title": {"disable": False}}}})["agent"]["title"] == {
        "disable": False
    }


@pytest.mark.parametrize(
    "options",
    [
        {"config": {"autoupdate": True}},
        {"config": {"share": "auto"}},
        {"config": {"provider": {"x": {"options": {"apiKey": "sk-1"}}}}},
        {"config": {"mcp": {"x": {"headers": {"Authorization": "Bearer x"}}}}},
        {"config": {"mcp": [{"token": ["x"]}]}},
        {"config": {"a": float("nan")}},
        {"config": {"a": "x" * 40000}},
        {"config": []},
        {"other": 1},
    ],
    ids=lambda value: str(value)[:40],
)
def test_opencode_options_that_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        profiles.get("opencode").parse_options(options)


def test_opencode_key_may_come_from_the_environment() -> None:
    options = {"config": {"provider": {"x": {"options": {"apiKey": "{env:LLAMA_KEY}"}}}}}
    assert config(profiles.get("opencode"), options)["provider"]["x"]["options"] == {
        "apiKey": "{env:LLAMA_KEY}"
    }


@pytest.mark.parametrize(
    ("prompt", "tail"),
    [("fix it", ("fix it",)), ("--help", ("--", "--help")), ("a; rm -rf /", ("a; rm -rf /",))],
)
def test_prompt_is_one_argument_and_never_an_option(prompt: str, tail: tuple[str, ...]) -> None:
    profile = profiles.get("opencode")
    assert profile.one_shot_argv(prompt) == (*profile.one_shot, *tail)


def test_detach_keys_do_not_begin_with_a_key_of_the_harness() -> None:
    assert not profiles.get("opencode").detach_keys.startswith("ctrl-p")
