"""The machine's package registries are what apt, pip and npm are configured for."""

from __future__ import annotations

import json

import pytest

from tests.lab import registries
from tests.lab.execute import LabError
from tests.lab.registries import AptSource, Registries

TARGETS = """\
http://mirror.example/debian/|oldstable|bookworm|Debian|Debian
http://mirror.example/debian/|oldstable|bookworm|Debian|Debian
https://mirror.example/debian-security/|oldstable-security|bookworm-security|Debian|Debian-Security
https://tools.example/apt/|stable|stable|Tools|Tools
file:/srv/repo/|local|local|Local|Local
"""


def test_index_targets_become_sources_once_each() -> None:
    sources = registries.parse_index_targets(TARGETS)
    assert [source.uri for source in sources] == [
        "http://mirror.example/debian",
        "https://mirror.example/debian-security",
        "https://tools.example/apt",
    ]


def test_debian_archives_are_known_by_origin_and_label() -> None:
    sources = registries.parse_index_targets(TARGETS)
    expected = ("http://mirror.example/debian", "https://mirror.example/debian-security")
    assert registries.debian_archives(sources[::-1]) == expected


def test_machine_without_security_archive_has_none() -> None:
    assert (
        registries.debian_archives([AptSource("http://m.example", "s", "c", "Debian", "Debian")])[1] is None
    )


def test_machine_without_debian_archive_is_an_error() -> None:
    with pytest.raises(LabError, match="no Debian archive"):
        registries.debian_archives([AptSource("http://u.example", "s", "c", "Ubuntu", "Ubuntu")])


def test_apt_config_yields_scalars() -> None:
    text = """\
APT "";
Acquire::http::Proxy "http://p.example:3128";
DPkg::Post-Invoke:: "rm";
Acquire::Check-Date "no";
"""
    found = registries.parse_apt_config(text)
    assert found["Acquire::http::Proxy"] == "http://p.example:3128"
    assert found["Acquire::Check-Date"] == "no"
    assert "DPkg::Post-Invoke::" not in found


def test_pip_environment_outranks_files() -> None:
    text = """\
:env:.index-url='https://env.example/simple'
global.index-url='https://file.example/simple'
global.extra-index-url='file:///srv/simple https://extra.example/simple'
install.trusted-host='a.example\\nb.example'
"""
    found = registries.parse_pip_config(text)
    assert found["index-url"] == ["https://env.example/simple"]
    assert found["extra-index-url"] == ["file:///srv/simple", "https://extra.example/simple"]
    assert found["trusted-host"] == ["a.example", "b.example"]


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://pkg.example/simple", "pkg.example"),
        ("http://user:secret@pkg.example:8081/x", "pkg.example:8081"),
        ("file:///srv/simple", None),
        ("mirror+file:/etc/apt/mirrors", None),
        ("", None),
    ],
)
def test_only_web_addresses_have_a_host(url: str, host: str | None) -> None:
    assert registries.host_of(url) == host


def test_first_npmrc_with_a_registry_wins() -> None:
    texts = [
        "# registry=https://no.example/\nfund=false\n",
        'registry = "https://npm.example/"\n',
        "registry=https://x.example/",
    ]
    assert registries.npmrc_registry(texts) == "https://npm.example/"
    assert registries.npmrc_registry(["fund=false"]) is None


@pytest.mark.parametrize(
    ("environment", "apt", "expected"),
    [
        ({}, {}, {}),
        ({"https": "http://e.example"}, {}, {"https": "http://e.example"}),
        (
            {},
            {"Acquire::http::Proxy": "http://a.example"},
            {"http": "http://a.example", "https": "http://a.example"},
        ),
        ({"http": "http://e.example"}, {"Acquire::http::Proxy": "DIRECT"}, {"http": "http://e.example"}),
        (
            {"http": "http://e.example", "https": "http://s.example"},
            {"Acquire::http::Proxy": "http://a.example"},
            {"http": "http://e.example", "https": "http://s.example"},
        ),
    ],
)
def test_way_out_is_the_environment_then_apt(
    environment: dict[str, str], apt: dict[str, str], expected: dict[str, str]
) -> None:
    assert registries.upstream_proxies(environment, apt) == expected


def test_proxy_gets_hosts_and_upstream() -> None:
    found = Registries(
        ("a.example", "b.example:8443"), "http://a.example/debian", None, upstream={"http": "http://p"}
    )
    assert json.loads(found.proxy_config()) == {
        "hosts": ["a.example", "b.example:8443"],
        "upstream": {"http": "http://p"},
    }


def test_default_registry_is_read_from_the_npm_clients_source() -> None:
    source = """
  optional: new Definition('optional', {
    default: 'https://other.example/',
  registry: new Definition('registry', {
    default: 'https://npm.example/',
    type: url,
"""
    assert registries.npm_default(source) == "https://npm.example/"
    assert registries.npm_default("nothing") is None


def test_default_registry_joins_the_hosts() -> None:
    found = Registries(("a.example",), "http://a.example/debian", None, npm_known=False)
    assert found.with_npm_default("https://npm.example/").hosts == ("a.example", "npm.example")
    with pytest.raises(LabError, match="CORRAL_LAB_REGISTRY_HOSTS"):
        found.with_npm_default("")


def test_this_machine_can_be_read() -> None:
    """On whatever machine the tests run: hosts are names, never paths, and pip's default counts."""
    found = registries.read_registries({"HOME": "/nonexistent", "CORRAL_LAB_REGISTRY_HOSTS": "more.example"})
    assert "more.example" in found.hosts
    assert registries.host_of(found.mirror) in found.hosts
    assert not [host for host in found.hosts if "/" in host]
