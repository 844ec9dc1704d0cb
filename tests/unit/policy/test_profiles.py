from __future__ import annotations

import itertools
import json
import re
import tomllib
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from policy import profiles
from policy.container import HOME
from policy.errors import PolicyError
from policy.hosts import parse_host
from policy.mounts import is_within
from policy.profiles import Profile, Start, names, tomltext
from policy.secrets import changes_behaviour

ALL = [profiles.get(name) for name in profiles.names()]


def config(profile: Profile, options: dict[str, Any]) -> dict[str, Any]:
    baked = {file.path: file for file in profile.baked_files(profile.parse_options(options))}
    parsed: dict[str, Any] = json.loads(baked["/etc/opencode/opencode.json"].content)
    return parsed


@pytest.mark.parametrize("profile", ALL, ids=lambda p: p.name)
def test_profile_is_consistent(profile: Profile) -> None:
    options = profile.parse_options({})
    for start in get_args(Start):
        words = profile.argv(start, options)
        if profile.install is not None and start not in {"daemon", "prompted"}:
            assert words[0] == profile.install.program
        assert not words or words[0].startswith("/")
    assert bool(profile.daemon) == ("daemon" in profile.modes) or profile.install is None
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


TARGET = re.compile(r"/usr/local/(?:[A-Za-z0-9_-][A-Za-z0-9._-]*/)*[A-Za-z0-9_-][A-Za-z0-9._-]*/?")
MEMBER = re.compile(r"package/(?:[A-Za-z0-9_-][A-Za-z0-9._-]*/)*(?:[A-Za-z0-9_-][A-Za-z0-9._-]*)?")


@pytest.mark.parametrize("profile", ALL, ids=lambda p: p.name)
def test_what_is_fetched_goes_to_plain_places_that_the_system_does_not_use(profile: Profile) -> None:
    install = profile.install
    if install is None:
        return
    assert set(install.tarballs) <= set(profiles.PLATFORMS)
    pairs = [pair for tarball in install.tarballs.values() for pair in tarball.files]
    assert all(MEMBER.fullmatch(member) for member, _ in pairs)
    targets = [target for _, target in pairs]
    targets += [install.program, *filter(None, (install.node, install.directory))]
    targets += [path for link in install.links for path in link]
    assert all(TARGET.fullmatch(target) for target in targets)
    assert all(member.endswith("/") == target.endswith("/") for member, target in pairs)
    made = [
        *targets[: len(pairs)],
        *(file.path for file in profile.baked),
        *(path for path, _ in install.links),
    ]
    assert install.program in made or any(
        path.endswith("/") and install.program.startswith(path) for path in made
    )


@pytest.mark.parametrize("profile", ALL, ids=lambda p: p.name)
def test_profile_says_everything_that_is_asked_of_one(profile: Profile) -> None:
    assert set(profile.approvals) in (set(), {"auto", "off"}, {"ask", "auto", "off"})
    assert profile.state_dirs or profile.install is None
    for seed in profile.seeds:
        assert any(seed.path.startswith(directory + "/") for directory in profile.state_dirs), seed.path
    # The agent could exchange one that lies in another, and Docker would mount what it leads to.
    for one, other in itertools.permutations(profile.state_dirs, 2):
        assert not is_within(one, other)
    for part in profile.host_files.values():
        assert any(part.startswith(directory + "/") for directory in profile.state_dirs), part
    files = [file.path for file in profile.baked_files(profile.parse_options({}))]
    assert len(files) == len(set(files))
    guarded = {check.target for check in profile.verify if check.kind == "root-owned"}
    assert set(files) <= guarded
    if profile.install is not None:
        assert profile.install.program in guarded
        assert profile.ca_env and profile.proxy_env and profile.project_files
    assert not set(profile.fixed) & {switch.variable for switch in profile.switches}
    assert all(switch.ends for switch in profile.switches)


def test_unknown_profile_names_the_nearest() -> None:
    with pytest.raises(PolicyError) as caught:
        profiles.get("open-code")
    assert caught.value.hint == f"did you mean opencode? available: {', '.join(profiles.names())}"


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


WIRED = ["aider", "claude", "codex", "gemini"]


@pytest.mark.parametrize("name", WIRED)
def test_a_base_url_and_a_model_reach_the_harness(name: str) -> None:
    profile = profiles.get(name)
    options = profile.parse_options({"base_url": "http://corral-host:8081/v1/", "model": "qwen"})
    told = json.dumps([file.content for file in profile.baked_files(options)]) + str(
        profile.environment(options)
    )
    assert "http://corral-host:8081/v1" in told and "8081/v1/" not in told
    assert "qwen" in told
    plain = json.dumps([file.content for file in profile.baked_files(profile.parse_options({}))])
    assert "corral-host" not in plain and "{base_url}" not in plain + told and "{model}" not in plain + told


@pytest.mark.parametrize("name", WIRED)
@pytest.mark.parametrize(
    "options",
    [
        {"base_url": "corral-host:80"},
        {"base_url": "http://u:p@h/"},
        {"model": ""},
        {"model": "a b"},
        {"x": 1},
    ],
    ids=str,
)
def test_wiring_that_cannot_be_meant_is_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        profiles.get(name).parse_options(options)


def managed(name: str, approvals: str | None = None, **options: Any) -> dict[str, Any]:
    profile = profiles.get(name)
    parsed = profile.parse_options(options)
    if approvals is not None:
        parsed = profile.with_approvals(parsed, approvals)
    text = profile.baked_files(parsed)[0].content
    return tomllib.loads(text) if name == "codex" else dict(json.loads(text))


def test_codex_leaves_the_fence_to_corral_whatever_the_policy_says_besides() -> None:
    for wanted in (None, "auto", "off"):
        assert (
            managed("codex", wanted, config={"tui": {"theme": "x"}})["sandbox_mode"] == "danger-full-access"
        )
    with pytest.raises(ValidationError):
        managed("codex", config={"sandbox_mode": "read-only"})
    with pytest.raises(ValidationError):
        managed("codex", config={"features": {"daemon_auto_start": True}})
    assert managed("codex", config={"features": {"apps": True}})["features"] == {
        "apps": True,
        "plugins": False,
        "daemon_auto_start": False,
    }


def test_approvals_become_the_harness_s_own_switch() -> None:
    found = [managed("claude", value)["permissions"] for value in ("ask", "auto", "off")]
    assert [value["defaultMode"] for value in found] == ["default", "acceptEdits", "bypassPermissions"]
    assert [managed("codex", value)["approval_policy"] for value in ("auto", "off")] == [
        "on-request",
        "never",
    ]
    assert "permissions" not in managed("claude") and "approval_policy" not in managed("codex")
    aider = profiles.get("aider")
    options = aider.with_approvals(aider.parse_options({}), "off")
    assert aider.environment(options)["AIDER_YES_ALWAYS"] == "true"
    assert "AIDER_YES_ALWAYS" not in aider.environment(aider.parse_options({}))


def test_what_a_harness_has_no_setting_for_is_refused_and_not_weakened() -> None:
    with pytest.raises(ValueError, match="Codex has no setting that means ask, only auto and off"):
        managed("codex", "ask")


def test_approvals_that_are_words_come_after_the_program_and_before_the_prompt() -> None:
    profile = profiles.get("gemini")
    options = profile.with_approvals(profile.parse_options({}), "off")
    assert profile.one_shot_argv("-x", options)[1:] == ("--approval-mode=yolo", "--prompt=-x")


def test_a_permission_of_the_policy_s_own_contradicts_approvals_and_others_do_not() -> None:
    profile = profiles.get("claude")
    denied = {"permissions": {"deny": ["WebFetch"]}}
    assert managed("claude", "ask", config=denied)["permissions"]["deny"] == ["WebFetch"]
    with pytest.raises(ValueError, match=r"permissions\.defaultMode of its own"):
        profile.with_approvals(
            profile.parse_options({"config": {"permissions": {"defaultMode": "plan"}}}), "ask"
        )
    with pytest.raises(ValueError, match="has no approvals"):
        profiles.get("generic").with_approvals(profiles.get("generic").parse_options({}), "ask")


def test_no_part_of_a_key_is_seeded_and_the_project_is_trusted() -> None:
    project = '/home/me/a "b" \\ ü'
    seeds = {seed.path: seed.text(project) for name in names() for seed in profiles.get(name).seeds}
    assert json.loads(seeds[".claude/.claude.json"])["projects"][project]["hasTrustDialogAccepted"] is True
    assert "customApiKeyResponses" not in seeds[".claude/.claude.json"]
    assert tomllib.loads(seeds[".codex/config.toml"])["projects"][project]["trust_level"] == "trusted"
    assert json.loads(seeds[".gemini/trustedFolders.json"])[project] == "TRUST_FOLDER"


GENERIC: dict[str, Any] = {
    "image": ["RUN pip install --break-system-packages tool", "ENV TOOL_HOME=/opt/tool A=b"],
    "packages": ["python3-pip"],
    "interactive": ["tool", "--chat"],
    "one_shot": ["tool", "ask"],
    "daemon": ["tool", "serve"],
    "state": [".tool", ".config/tool"],
}


def test_generic_is_what_its_options_say() -> None:
    profile = profiles.get("generic")
    options = profile.parse_options(GENERIC)
    shaped = profile.shaped(options)
    assert shaped.argv("interactive", options) == ("tool", "--chat")
    assert shaped.one_shot_argv("--help", options) == ("tool", "ask", "--", "--help")
    assert shaped.image_lines == tuple(GENERIC["image"])
    assert shaped.debian_packages == ("ca-certificates", "git", "python3-pip")
    assert shaped.state_dirs == (".tool", ".config/tool")
    assert profile.argv("interactive", profile.parse_options({})) == ("/bin/bash",)


@pytest.mark.parametrize(
    "options",
    [
        {"image": ["COPY / /"]},
        {"image": ["RUN true\nUSER root"]},
        {"image": ["RUN --mount=type=bind true"]},
        {"image": ["RUN true \\"]},
        {"image": ["RUN"]},
        {"image": ["ENV LD_PRELOAD=/x.so"]},
        {"image": ["ENV A=b LD_PRELOAD=/x.so"]},
        {"image": ["ENV LD_PRELOAD /x.so"]},
        {"image": ["run true"]},
        {"packages": ["-y"]},
        {"packages": ["a b"]},
        {"state": ["/etc"]},
        {"state": ["a/../b"]},
        {"state": [""]},
        {"state": ["tool", "tool/inner"]},
        {"state": ["a/b/c", "d", "a"]},
        {"state": ["tool", "tool"]},
        {"interactive": ["a\0b"]},
        {"one_shot": [""]},
        {"other": 1},
    ],
    ids=str,
)
def test_generic_options_that_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        profiles.get("generic").parse_options(options)


def test_a_line_of_the_image_may_go_on_after_a_backslash() -> None:
    options = profiles.get("generic").parse_options({"image": ["RUN one \\\n  && two\n"]})
    assert profiles.get("generic").shaped(options).image_lines == ("RUN one \\\n  && two",)


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"a": 1, "b": [True, "x", 1.5], "c": {"d": {"e": 'é\n"\\\x7f\x00'}, "f": -(2**63)}},
        {"a b": {"c.d": {"": "x"}}, "e": {}},
        {"rows": [{"a": 1, "b": {"c": [[]]}}], "small": 1e-7, "big": 1e22},
    ],
    ids=str,
)
def test_toml_that_is_written_reads_as_what_it_was(tree: dict[str, Any]) -> None:
    assert tomllib.loads(tomltext.dumps(tree)) == tree


@pytest.mark.parametrize("value", [None, [None], 2**63, {"a": {"b": None}}, "\ud800"], ids=ascii)
def test_what_toml_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        tomltext.dumps({"key": value})
    with pytest.raises(ValidationError):
        profiles.get("codex").parse_options({"config": {"key": value}})
