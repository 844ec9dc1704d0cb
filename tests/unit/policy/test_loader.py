from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from policy.container import Mount
from policy.errors import PolicyError
from policy.identity import sandbox_for
from policy.loader import MAX_SIZE, docker_roots, find, guard, load

if TYPE_CHECKING:
    from conftest import FakeProbe, Workspace

GOOD = """\
profile: opencode
name: demo
mounts:
  rw:
    - ~/Projects/shared
  ro:
    - ~/Documents/notes
egress:
  allow:
    - api.example.com
host_services:
  - name: llama
    port: 8081
secrets:
  env_file: ~/.config/corral/demo.env
"""


def test_good_policy_is_loaded_with_everything_resolved(workspace: Workspace) -> None:
    shared, notes = workspace.directory("Projects/shared"), workspace.directory("Documents/notes")
    loaded = workspace.load(GOOD)
    assert loaded.path == workspace.project / "corral.yaml"
    assert loaded.project == workspace.project
    assert loaded.name == "demo"
    assert (loaded.rw, loaded.ro) == ((shared,), (notes,))
    assert loaded.env_file == workspace.home / ".config/corral/demo.env"
    assert loaded.sha256 == hashlib.sha256(GOOD.encode()).hexdigest()
    assert loaded.sandbox == sandbox_for(os.getuid(), workspace.project, "demo")
    assert loaded.declaration.names[0].host == "api.example.com"
    assert loaded.baked == loaded.profile.baked_files(loaded.profile.parse_options({}))
    assert loaded.mounts == (
        Mount(str(workspace.project), str(workspace.project)),
        Mount(str(shared), str(shared)),
        Mount(str(notes), str(notes), read_only=True),
    )


def test_name_defaults_to_that_of_the_project_directory(workspace: Workspace) -> None:
    loaded = workspace.load("profile: opencode\n")
    assert loaded.name == "demo"
    assert loaded.sandbox.id.startswith("demo-")


def test_sections_without_a_value_count_as_absent(workspace: Workspace) -> None:
    sections = "name:\nmounts:\n  rw:\n  ro:\negress:\n  allow:\nhost_services:\nsecrets:\nbuild:\n"
    assert (
        workspace.load("profile: opencode\n" + sections).policy
        == workspace.load("profile: opencode\n").policy
    )


def test_home_mount_opens_with_the_sentence_of_the_specification(workspace: Workspace) -> None:
    for entry in ("~", str(workspace.home), "$HOME"):
        error = workspace.error(f"profile: opencode\nmounts:\n  rw:\n    - {entry}\n")
        first, second = error.render().splitlines()
        assert first == f"corral: policy error: refusing to mount your home directory ({workspace.home})"
        assert second.startswith(f"{workspace.project}/corral.yaml:4:7: mounts.rw[0]: refusing to mount")
        assert error.exit_code == 2


def test_project_that_is_the_home_directory_is_refused(workspace: Workspace) -> None:
    (workspace.home / "corral.yaml").write_text("profile: opencode\n")
    with pytest.raises(PolicyError) as caught:
        load(workspace.home / "corral.yaml", home=workspace.home, environ={}, uid=os.getuid())
    assert caught.value.render().splitlines()[0] == (
        f"corral: policy error: refusing to mount your home directory ({workspace.home})"
    )


def test_listed_project_is_refused(workspace: Workspace) -> None:
    error = workspace.error("profile: opencode\nmounts:\n  rw: [~/Projects/demo]\n")
    assert error.message.splitlines()[0] == (
        "in run mode the project directory is mounted rw automatically; don't list it here"
        f" ({workspace.project})"
    )


MANY = """\
profil: opencode
profile: opencode
mounts:
  rw:
    - /etc
    - ~/nothing-here
  ro: /data
egress:
  allow:
    - 192.0.2.1
    - 127.1
    - https://api.example.com
    - {host: a.example.com, port: 8443}
    - b.example.com: 8443
    - ok.example.com
host_services:
  - {name: llama, port: 70000}
secrets:
  env_file: secrets.env
background: [cron]
"""


def test_every_problem_is_reported_at_once_with_its_place(workspace: Workspace) -> None:
    message = workspace.error(MANY).message
    file = re.escape(str(workspace.project / "corral.yaml"))
    expected = [
        r":1:1: profil: unknown key; did you mean profile\?",
        r":5:7: mounts\.rw\[0\]: refusing to mount /etc: system configuration \(/etc\); remove the entry",
        r":6:7: mounts\.rw\[1\]: there is no .*/nothing-here \(~/nothing-here\); mkdir -p .*",
        r":7:7: mounts\.ro: must be a list \(/data\); .*",
        r":10:7: egress\.allow\[0\]: an IP address, not a domain name \(192\.0\.2\.1\); .*",
        r":11:7: egress\.allow\[1\]: the last label is a number.* \(127\.1\); .*",
        r":12:7: egress\.allow\[2\]: a URL, not a domain name \(https://api\.example\.com\); .*",
        r":13:29: egress\.allow\[3\]\.port: unknown key; did you mean ports\?",
        r":14:7: egress\.allow\[4\]: a host name followed by a colon;"
        r" write \{host: b\.example\.com, ports: \[8443\]\}",
        r":17:25: host_services\[0\]\.port: must be at most 65535 \(70000\)",
        r":19:13: secrets\.env_file: not an absolute path; begin it with / or ~/",
        r":20:14: background\[0\]: the opencode profile has no such background service \(cron\); remove .*",
    ]
    headline, *lines = message.splitlines()
    assert headline.endswith(f"corral.yaml has {len(expected)} problems")
    assert len(lines) == len(expected)
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(file + pattern, line), line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("- a\n", "must be a mapping"),
        ("just text", "must be a mapping"),
        ("name: x\n", "profile: is required"),
        ("profile:\n", "profile: is required"),
        ("profile: opencod\n", "profile: unknown profile (opencod); did you mean opencode?"),
        ("profile: hermes\n", "profile: is not available yet (hermes); available: aider,"),
        ("profile: opencode\nmode: {a: b}\n", "mode: must be 'run' or 'daemon'"),
        ("profile: {a: b}\n", "profile: must be text"),
        ("profile: opencode\nmode: dameon\n", "mode: must be 'run' or 'daemon' (dameon)"),
        ("profile: opencode\nallow: []\n", "allow: unknown key; allow belongs under egress"),
        (
            "profile: opencode\negress: {profile: x}\n",
            "egress.profile: unknown key; did you mean profile_defaults?",
        ),
        ("profile: opencode\nzzz: 1\n", "zzz: unknown key; known keys: profile, name, mode"),
        (
            "profile: opencode\negress: {mode: proxies}\n",
            "egress.mode: unknown egress mode (proxies)",
        ),
        (
            "profile: opencode\negress: {mode: open, allow: [api.example.com]}\n",
            "egress.allow: egress.mode is open: all public addresses are reachable",
        ),
        (
            "profile: opencode\negress: {mode: bridge}\n",
            "egress.mode: corral has no such egress mode (bridge)",
        ),
        ("profile: opencode\nmounts: ~\n", "mounts: must be a mapping (~)"),
        ("profile: opencode\nmounts:\n  rw: [3]\n", "mounts.rw[0]: must be text (3); quote it"),
        ("profile: opencode\nmounts:\n  rw:\n    -\n", "mounts.rw[0]: must be text"),
        ("profile: opencode\nprofile: opencode\n", "profile: key given twice, first in line 1"),
        ("profile: opencode\nname: ' x'\n", "name: a sandbox name is empty or has spaces around it"),
        ("profile: opencode\nname: 3\n", "name: must be text (3); quote it"),
        ("profile: opencode\nprofile_options: {hermes: {}}\n", "profile_options.hermes: not available yet"),
        ("profile: opencode\nprofile_options: {opencod: {}}\n", "profile_options.opencod: unknown profile"),
        (
            "profile: opencode\nprofile_options: {opencode: {confg: {}}}\n",
            "profile_options.opencode.confg: unknown key; did you mean config?",
        ),
        (
            "profile: opencode\nprofile_options: {opencode: {config: {share: auto}}}\n",
            "profile_options.opencode.config: share is set by corral; remove share",
        ),
        (
            "profile: opencode\nbuild: {ca_certificates: [/nope.crt]}\n",
            "build.ca_certificates[0]: not a file",
        ),
        (
            "profile: opencode\nbuild: {ca_certificates: [nope]}\n",
            "build.ca_certificates[0]: not an absolute path",
        ),
        ("profile: opencode\negress: {mode: bridge}\n", "no such egress mode (bridge); open comes nearest"),
        (
            "profile: opencode\negress: {mode: container:x}\n",
            "unknown egress mode (container:x); use allowlist or proxy or open or none or host",
        ),
        (
            "profile: opencode\negress: {mode: none, allow: [a.example.com]}\n",
            "corral.yaml:2:29: egress.allow: egress.mode is none: there is no network to reach it by",
        ),
        (
            "profile: opencode\negress: {mode: none, from_host: [git]}\n",
            "corral.yaml:2:33: egress.from_host: egress.mode is none",
        ),
        (
            "profile: opencode\negress: {mode: none}\nhost_services: [{name: a, port: 80}]\n",
            "corral.yaml:3:16: host_services: egress.mode is none: a service of this host cannot be reached",
        ),
        (
            "profile: opencode\negress: {mode: host}\nhost_services: [{name: a, port: 80}]\n",
            "corral.yaml:3:16: host_services: egress.mode is host: there is no corral-host",
        ),
        (
            "profile: opencode\nmode: daemon\negress: {mode: host}\n",
            "corral.yaml:2:7: mode: not available with egress.mode host (daemon); use mode: run",
        ),
        (
            "profile: opencode\nmode: daemon\negress: {mode: none}\n",
            "corral.yaml:2:7: mode: not available with egress.mode none (daemon); use mode: run",
        ),
        ("profile: opencode\nruntime: crun\n", "runtime: unknown runtime (crun); use runc, runsc or kata"),
        ("profile: opencode\nimage: '-x'\n", "image: not an image reference"),
        ("profile: opencode\nprivileged:\n", "privileged: unknown key"),
        ("profile: opencode\nmounts:\n  rx:\n", "mounts.rx: unknown key"),
        ("profile: opencode\nbuild: {proxy: {ftp: null}}\n", "build.proxy.ftp: unknown key"),
        ("profile: opencode\nkeep: 1\n", "keep: must be true or false"),
        ("profile: opencode\nmounts: {project: no}\n", "mounts.project: must be 'rw' or 'ro'"),
        ("profile: opencode\napprovals: never\n", "approvals: must be 'ask', 'auto' or 'off'"),
        (
            "profile: opencode\napprovals: ask\nprofile_options: {opencode: {config: {permission: {}}}}\n",
            "approvals: profile_options.opencode.config has a permission of its own (ask)",
        ),
        ("profile: opencode\nhooks: {pre_launch: restic}\n", "hooks.pre_launch: must be a list"),
        (
            "profile: opencode\nhooks: {pre_launch: [restic]}\n",
            "pre_launch[0]: the program is not an absolute",
        ),
        ("profile: opencode\nhooks: {pre_launch: [/nope]}\n", "hooks.pre_launch[0]: not a file (/nope)"),
        (
            "profile: opencode\nhooks: {pre_launch: [~/Projects/demo/corral.yaml]}\n",
            "where the agent could replace",
        ),
        (
            "profile: opencode\nhooks: {pre_launch: [/bin/sh, ~/Projects/demo/run.sh]}\n",
            "hooks.pre_launch[1]: leads into",
        ),
        (
            "profile: opencode\nhooks: {pre_launch: [/bin/sh, --file=~/Projects/demo/run.sh]}\n",
            "hooks.pre_launch[1]: leads into",
        ),
        (
            "profile: opencode\nbuild: {ca_certificates: [~/Projects/demo/corral.yaml]}\n",
            "build.ca_certificates[0]: lies in",
        ),
        ("a: *b\n", "aliases"),
        ("profile: [\n", "not YAML"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_message_says_what_is_wrong(workspace: Workspace, text: str, expected: str) -> None:
    assert expected in workspace.error(text).message


@pytest.mark.parametrize(
    "text",
    [
        "profile: opencode\nsecrets: sk-hidden\n",
        "profile: opencode\nsecrets: {OPENAI_API_KEY: sk-hidden}\n",
        "profile: opencode\nsecrets: {env_file: sk-hidden}\n",
        "profile: opencode\nsecrets: {env_file: [sk-hidden]}\n",
        "profile: opencode\nsecrets: [sk-hidden\n",
        "profile: opencode\nprofile_options: {opencode: sk-hidden}\n",
        "profile: opencode\nprofile_options: {opencode: {config: {apiKey: sk-hidden}}}\n",
        "profile: opencode\nprofile_options: {opencode: {config: {apiKey: [sk-hidden, .inf]}}}\n",
        "profile: opencode\nbuild: {proxy: {http: 'ftp://user:sk-hidden@proxy.example.com'}}\n",
        "profile: opencode\nbuild: {proxy: {http: 'user:sk-hidden@proxy.example.com'}}\n",
        "profile: opencode\nbuild: {npm_registry: 'https://user:sk-hidden@npm.example.com'}\n",
        "profile: opencode\nbuild: {npm_registry: 'https://user:sk-hid/den@npm.example.com'}\n",
    ],
)
def test_message_never_repeats_what_may_be_a_secret(workspace: Workspace, text: str) -> None:
    message = workspace.error(text).render()
    assert "sk-hid" not in message


def test_terminal_cannot_be_driven_by_the_text_of_a_policy(workspace: Workspace) -> None:
    message = workspace.error('profile: "\\e[2J\\e]0;x\\a"\n"\\e[31mkey": 1\n').render()
    assert "\x1b" not in message
    assert "\x07" not in message


@pytest.mark.parametrize(
    "where", ["~/Projects/demo/.env", "~/Projects/shared/x.env", "~/Documents/notes/x.env"]
)
def test_secrets_file_inside_a_mount_is_refused(workspace: Workspace, where: str) -> None:
    workspace.directory("Projects/shared")
    workspace.directory("Documents/notes")
    error = workspace.error(GOOD.replace("~/.config/corral/demo.env", where))
    assert "secrets.env_file: the file lies in" in error.message


def test_secrets_file_behind_a_link_into_the_project_is_refused(workspace: Workspace) -> None:
    (workspace.home / "keys").symlink_to(workspace.project)
    error = workspace.error("profile: opencode\nsecrets: {env_file: ~/keys/x.env}\n")
    assert "where the agent could read it" in error.message


def test_certificates_are_resolved(workspace: Workspace) -> None:
    (workspace.home / "ca.crt").write_text("x")
    loaded = workspace.load("profile: opencode\nbuild: {ca_certificates: [~/ca.crt]}\n")
    assert loaded.policy.build.ca_certificates == (str(workspace.home / "ca.crt"),)


def test_project_inside_corrals_own_state_is_refused(workspace: Workspace) -> None:
    project = workspace.directory(".local/share/corral/x/build")
    (project / "corral.yaml").write_text("profile: opencode\n")
    with pytest.raises(PolicyError, match="corral's own state"):
        load(project / "corral.yaml", home=workspace.home, environ={}, uid=os.getuid())


def test_environment_corral_is_installed_in_is_protected_by_default(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.prefix", str(workspace.directory("tools/venv")))
    (workspace.project / "corral.yaml").write_text("profile: opencode\nmounts: {ro: [~/tools]}\n")
    with pytest.raises(PolicyError, match="corral's own program"):
        load(workspace.project / "corral.yaml", home=workspace.home, environ={}, uid=os.getuid())


def test_foreign_and_world_writable_files_are_refused(workspace: Workspace) -> None:
    path = workspace.project / "corral.yaml"
    path.write_text("profile: opencode\n")
    path.chmod(0o646)
    with pytest.raises(PolicyError, match="every user of this host can write"):
        load(path, home=workspace.home, environ={}, uid=os.getuid())
    path.chmod(0o644)
    if os.getuid() == 0:
        os.chown(path, 12345, 12345)
        with pytest.raises(PolicyError, match="belongs to uid 12345"):
            load(path, home=workspace.home, environ={}, uid=0)
        assert load(path, home=workspace.home, environ={}, uid=12345).sandbox


@pytest.mark.parametrize("make", ["missing", "directory", "fifo", "large", "binary"])
def test_what_is_not_a_small_text_file_is_refused(workspace: Workspace, make: str) -> None:
    path = workspace.project / "corral.yaml"
    makers: dict[str, Any] = {
        "missing": lambda: None,
        "directory": path.mkdir,
        "fifo": lambda: os.mkfifo(path),
        "large": lambda: path.write_bytes(b"#" * (MAX_SIZE + 1)),
        "binary": lambda: path.write_bytes(b"profile: opencode\nname: \xff\n"),
    }
    makers[make]()
    with pytest.raises(PolicyError) as caught:
        load(path, home=workspace.home, environ={}, uid=os.getuid())
    if make == "missing":
        assert caught.value.hint == "corral init"
    if make == "binary":
        assert ":2:1: not UTF-8" in caught.value.message


def test_find_takes_the_nearest_file_above(workspace: Workspace) -> None:
    deep = workspace.directory("Projects/demo/src/deep")
    (workspace.project / "corral.yaml").write_text("profile: opencode\n")
    (workspace.home / "corral.yaml").write_text("profile: opencode\n")
    assert find(deep) == workspace.project / "corral.yaml"
    (deep / "corral.yaml").mkdir()
    assert find(deep) == workspace.project / "corral.yaml"
    (workspace.home / "link").symlink_to(deep)
    assert find(workspace.home / "link") == workspace.project / "corral.yaml"


def test_find_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(PolicyError) as caught:
        find(tmp_path)
    assert str(tmp_path) in caught.value.message
    assert caught.value.hint == "corral init"


def test_linked_policy_file_belongs_to_the_directory_of_the_link(workspace: Workspace) -> None:
    policies = workspace.directory("policies")
    (policies / "one.yaml").write_text("profile: opencode\n")
    (workspace.project / "corral.yaml").symlink_to(policies / "one.yaml")
    assert (
        load(workspace.project / "corral.yaml", home=workspace.home, environ={}, uid=os.getuid()).project
        == workspace.project
    )


def test_very_many_problems_are_cut_off(workspace: Workspace) -> None:
    message = workspace.error("profile: opencode\negress:\n  allow:\n" + "    - bad\n" * 200).message
    assert message.splitlines()[-1] == "... and 150 more"


def test_a_read_only_project_is_mounted_so_and_a_link_to_its_program_is_not_followed_twice(
    workspace: Workspace,
) -> None:
    program = workspace.home / "backup.sh"
    program.write_text("")
    (workspace.project / "link").symlink_to(program)
    loaded = workspace.load(
        "profile: opencode\nmounts: {project: ro}\nhooks: {pre_launch: [~/Projects/demo/link, -v]}\n"
    )
    assert [mount.read_only for mount in loaded.mounts] == [True]
    assert loaded.workspace
    # What runs is what was looked at, not what the agent's link leads to later.
    assert loaded.policy.hooks.pre_launch == (str(program), "-v")


def test_what_meets_the_workspace_is_refused(tmp_path: Path, fake_probe: type[FakeProbe]) -> None:
    (tmp_path / "corral.yaml").write_text("profile: opencode\nmounts: {project: ro, ro: [/workspace/x]}\n")
    with pytest.raises(PolicyError, match=r"/workspace/x would meet /workspace"):
        load(
            tmp_path / "corral.yaml",
            home=Path("/home/me"),
            environ={},
            uid=os.getuid(),
            probe=fake_probe(),
            own=(),
        )


@pytest.mark.parametrize(("approvals", "bash"), [("ask", "ask"), ("auto", "allow"), ("off", "allow")])
def test_approvals_become_the_harness_s_own_switch(workspace: Workspace, approvals: str, bash: str) -> None:
    (baked,) = workspace.load(f"profile: opencode\napprovals: {approvals}\n").baked
    assert json.loads(baked.content)["permission"]["bash"] == bash
    (baked,) = workspace.load("profile: opencode\n").baked
    assert "permission" not in json.loads(baked.content)


def test_a_root_of_docker_that_was_moved_is_found(tmp_path: Path) -> None:
    file = tmp_path / "daemon.json"
    assert docker_roots(file) == ()
    for text in ("", "[]", "{", '{"data-root": 1}', '{"data-root": "relative"}'):
        file.write_text(text)
        assert docker_roots(file) == ()
    file.write_text('{"data-root": "/data/docker", "exec-root": "/data/exec"}')
    assert docker_roots(file) == ("/data/docker", "/data/exec")


@pytest.mark.parametrize("base", ["", "elsewhere"])
def test_where_the_users_own_docker_keeps_its_files_is_refused_too(tmp_path: Path, base: str) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path / base)} if base else {}
    file = tmp_path / (base or ".config") / "docker" / "daemon.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"data-root": str(tmp_path / "layers")}))
    (tmp_path / "notes").mkdir()
    (tmp_path / "layers" / "overlay2").mkdir(parents=True)
    refuses = guard(tmp_path, environ)
    for path in (file.parent, tmp_path / "layers", tmp_path / "layers" / "overlay2"):
        assert refuses.refuse(str(path)) is not None, path
    assert refuses.refuse(str(tmp_path / "notes")) is None


def test_a_generic_harness_that_is_always_on_says_what_it_runs(workspace: Workspace) -> None:
    error = workspace.error("profile: generic\nmode: daemon\n")
    assert "nothing says what an agent that is always on runs" in error.message
    policy = "profile: generic\nmode: daemon\nprofile_options: {generic: {daemon: [tool, serve], state: [.tool]}}\n"
    loaded = workspace.load(policy)
    assert loaded.profile.argv("daemon", loaded.options) == ("tool", "serve")
    assert loaded.profile.state_dirs == (".tool",)
