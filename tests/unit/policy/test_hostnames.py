from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.clientfiles import git_urls
from policy.declaration import Declaration, Name
from policy.hostnames import Found, FromHost, declared, from_host
from policy.hosts import parse_host
from policy.schema import Build

from .conftest import Workspace
from .test_hostclient import HOME, FakeFiles

NPMRC = f"{HOME}/.npmrc"


def found(content: dict[str, str], *clients: str, build: Build | None = None, **environ: str) -> FromHost:
    return from_host(clients, build or Build(), Path(HOME), environ, FakeFiles(content), "bookworm")


def test_npm_gives_its_registry_and_those_of_scopes() -> None:
    text = (
        "registry=https://npm.example.com/r/\n@co:registry=http://scoped.example.com:8081/\n"
        "//npm.example.com/r/:_authToken=secret\n"
    )
    assert found({NPMRC: text}, "npm").found == (
        Found("npm", "npm.example.com", 443),
        Found("npm", "scoped.example.com", 8081),
    )


def test_pip_gives_its_index_and_further_ones() -> None:
    text = "[global]\nindex-url = https://pip.example.com/simple\nextra-index-url =\n  https://b.example.com/s\n  https://c.example.com:8443/s\n"
    assert [(one.host, one.port) for one in found({"/etc/pip.conf": text}, "pip").found] == [
        ("pip.example.com", 443),
        ("b.example.com", 443),
        ("c.example.com", 8443),
    ]
    assert found({}, "pip", PIP_INDEX_URL="https://env.example.com/").found == (
        Found("pip", "env.example.com", 443),
    )


def test_apt_gives_the_archives_of_the_image_s_suite() -> None:
    text = (
        "deb http://mirror.example.com/debian bookworm main\n"
        "deb https://security.example.com/debian-security bookworm-security main\n"
        "deb http://other.example.com/debian trixie main\n"
        "deb [signed-by=/k.gpg] https://third.example.com/ bookworm main\n"
    )
    assert found({"/etc/apt/sources.list": text}, "apt").found == (
        Found("apt", "mirror.example.com", 80),
        Found("apt", "security.example.com", 443),
    )


def test_git_gives_hosts_of_its_sections_and_of_https_only() -> None:
    text = (
        '[url "https://git.example.com/"]\n\tinsteadOf = x:\n[http "https://h.example.com:8443"]\n'
        '[credential "https://user@c.example.com"]\n[url "git@s.example.com:"]\n\tinsteadOf = s:\n'
        '[remote "https://not.example.com/"]\n[user]\n\tname = x\n'
    )
    result = found({f"{HOME}/.gitconfig": text}, "git")
    assert [(one.host, one.port) for one in result.found] == [
        ("git.example.com", 443),
        ("h.example.com", 8443),
        ("c.example.com", 443),
    ]
    assert [note for note in result.notes if "s.example.com" in note]


def test_sections_of_a_git_configuration_are_unquoted() -> None:
    assert git_urls('[url "a\\"b\\\\c"]\n[URL "d"]\n[url]\n[url "e\n') == ['a"b\\c', "d"]


def test_what_the_policy_sets_for_the_build_is_what_the_client_in_the_image_uses() -> None:
    text = {NPMRC: "registry=https://npm.example.com/\n"}
    own = Build(npm_registry="https://own.example.com/")
    assert found(text, "npm", build=own).found == (Found("npm", "own.example.com", 443),)
    assert found(text, "npm", build=Build(npm_registry="")).found == ()


def test_no_credential_is_taken_or_told() -> None:
    urls = "https://me:hunter2@npm.example.com/?token=hunter2", "ftp://me:hunter2@x.example.com/hunter"
    for url in urls:
        result = found({NPMRC: f"registry={url}\n"}, "npm")
        assert "hunter2" not in repr(result)
    assert found({NPMRC: f"registry={urls[0]}\n"}, "npm").found == (Found("npm", "npm.example.com", 443),)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:4873/", "http://[::1]:4873/", "http://localhost:4873/", "http://192.0.2.7/", "file:///srv/npm",
        "https://dns.google/", "https://npm.example.com:53/", "https://", "https://x\x1b[2J.example.com/", "${REGISTRY}",
    ],
)  # fmt: skip
def test_what_no_policy_may_name_is_noted_and_not_taken(url: str) -> None:
    result = found({NPMRC: f"registry={url}\n"}, "npm")
    assert result.found == ()
    assert len(result.notes) == 1
    assert result.notes[0].startswith("npm: ")
    assert result.notes[0].isprintable()


def test_a_client_without_configuration_is_noted() -> None:
    assert found({}, "npm", "git").notes == (
        "npm: this host configures none; list what it needs in egress.allow",
        "git: this host configures none; list what it needs in egress.allow",
    )


def test_found_names_are_optional_and_add_their_port_to_a_name_that_is_there() -> None:
    own = Declaration(names=(Name(host="a.example"),))
    result = declared(own, FromHost((Found("npm", "a.example", 8443), Found("pip", "b.example", 443))))
    assert result.names == (
        Name(host="a.example", ports=(443, 8443)),
        Name(host="b.example", optional=True, liveness=False),
    )


POLICY = "profile: opencode\negress:\n  profile_defaults: false\n  from_host: [npm]\n"


def test_a_policy_gets_the_names_at_load(workspace: Workspace) -> None:
    (workspace.home / ".npmrc").write_text("registry=https://npm.example.com/\n")
    loaded = workspace.load(POLICY)
    assert [name.host for name in loaded.declaration.names] == ["npm.example.com"]
    assert loaded.from_host.client("npm.example.com") == "npm"
    assert loaded.from_host.client("other.example.com") is None


def test_what_the_agent_may_write_configures_nothing(workspace: Workspace) -> None:
    index = "[global]\nindex-url = https://pip.example.com/simple\n"
    policy = POLICY.replace("npm", "pip")
    config = workspace.directory(".config/pip") / "pip.conf"
    config.write_text(index)
    assert [name.host for name in workspace.load(policy).declaration.names] == ["pip.example.com"]
    config.unlink()
    (workspace.project / "pip.conf").write_text(index)
    config.symlink_to(workspace.project / "pip.conf")
    assert workspace.load(policy).declaration.names == ()


@pytest.mark.parametrize("value", ["[cargo]", "npm", "[npm, npm]", "[true]"])
def test_only_known_clients_are_named_and_once(workspace: Workspace, value: str) -> None:
    assert "egress.from_host" in workspace.error(POLICY.replace("[npm]", value)).message


def test_allow_stale_is_in_the_label_when_it_is_true_and_only_then(workspace: Workspace) -> None:
    plain = workspace.load("profile: opencode\n").declaration
    assert "allow_stale" not in plain.to_label()
    stale = workspace.load("profile: opencode\negress: {allow_stale: true}\n").declaration
    assert stale.allow_stale
    assert Declaration.from_label(stale.to_label()) == stale
    assert Declaration.from_label(plain.to_label()) == plain


URLS = st.one_of(
    st.text(max_size=40),
    st.from_regex(r"(https?|ssh|file)://([a-z.-]{0,12}@)?[a-z0-9.\[\]:-]{0,24}(:[0-9]{0,6})?(/[ -~]{0,10})?"),
)


@settings(max_examples=60)
@given(st.lists(URLS, max_size=4), st.text(max_size=60))
def test_whatever_the_files_hold_only_names_a_policy_may_have_come_out(urls: list[str], noise: str) -> None:
    files = {
        NPMRC: "\n".join([noise, *(f"registry={url}\n@x:registry = {url}" for url in urls)]),
        "/etc/pip.conf": "[global]\nextra-index-url = " + "\n  ".join(urls) + "\n" + noise,
        "/etc/apt/sources.list": "\n".join(f"deb {url} bookworm main" for url in urls) + noise,
        f"{HOME}/.gitconfig": "\n".join(f'[url "{url}"]' for url in urls) + noise,
    }
    result = found(files, "npm", "pip", "apt", "git", PIP_EXTRA_INDEX_URL=" ".join(urls))
    for one in result.found:
        assert parse_host(one.host) == one.host
        assert 0 < one.port < 65536
        assert one.port not in (53, 853)
    assert all(note.isprintable() for note in result.notes)
