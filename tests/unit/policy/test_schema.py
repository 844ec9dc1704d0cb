from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from policy import profiles
from policy.declaration import Declaration, HostService, Name
from policy.schema import Policy, effective_declaration


def policy(**fields: Any) -> Policy:
    return Policy.model_validate({"profile": "opencode", **fields})


def declaration(allow: list[Any], *, defaults: bool = False, **fields: Any) -> Declaration:
    made = policy(egress={"allow": allow, "profile_defaults": defaults}, **fields)
    return effective_declaration(made, profiles.get("opencode"))


def test_a_policy_cannot_be_changed_after_it_was_validated() -> None:
    made = policy()
    with pytest.raises(ValidationError):
        made.mode = "daemon"
    with pytest.raises(ValidationError):
        made.egress.profile_defaults = False


def test_short_and_long_form_of_an_entry() -> None:
    names = declaration(
        [
            "API.example.com.",
            {"host": "git.example.com", "ports": [443, 22], "optional": True, "liveness": False},
        ]
    ).names
    assert names == (
        Name(host="api.example.com"),
        Name(host="git.example.com", ports=(443, 22), optional=True, liveness=False),
    )


def test_profile_defaults_come_last_and_can_be_switched_off() -> None:
    defaults = profiles.get("opencode").default_egress
    assert [n.host for n in declaration(["a.example.com"], defaults=True).names] == [
        "a.example.com",
        *defaults,
    ]
    assert [n.host for n in declaration(["a.example.com"], defaults=False).names] == ["a.example.com"]
    assert effective_declaration(policy(), profiles.get("opencode")).names == tuple(
        Name(host=h) for h in defaults
    )


def test_entries_of_one_host_are_merged_with_the_union_of_their_ports() -> None:
    names = declaration(
        [
            {"host": "a.example.com", "ports": [8443, 443]},
            "b.example.com",
            {"host": "A.example.com.", "ports": [443, 9443]},
        ]
    ).names
    assert names == (Name(host="a.example.com", ports=(8443, 443, 9443)), Name(host="b.example.com"))


@pytest.mark.parametrize(
    ("first", "second", "optional"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_a_name_is_optional_only_if_every_entry_says_so(first: bool, second: bool, optional: bool) -> None:
    entries = [{"host": "a.example.com", "optional": value} for value in (first, second)]
    assert declaration(entries).names[0].optional is optional


def test_profile_default_keeps_the_wishes_of_the_policy() -> None:
    entry = {"host": "openrouter.ai", "ports": [8443], "optional": True, "liveness": False}
    name = declaration([entry], defaults=True).names[0]
    assert name == Name(host="openrouter.ai", ports=(8443, 443), optional=True, liveness=False)


def test_host_services_are_declared_as_written() -> None:
    made = declaration([], host_services=[{"name": "llama", "port": 8081}, {"name": "db", "port": 5432}])
    assert made.host_services == (HostService(name="llama", port=8081), HostService(name="db", port=5432))


def test_declaration_survives_the_label() -> None:
    made = declaration(["a.example.com"], defaults=True, host_services=[{"name": "llama", "port": 8081}])
    assert Declaration.from_label(made.to_label()) == made


@pytest.mark.parametrize(
    "fields",
    [
        {"profile": "nothing"},
        {"profile": 3},
        {"mode": "always"},
        {"name": ""},
        {"name": "a\nb"},
        {"name": "x" * 513},
        {"mounts": {"rw": "~/x"}},
        {"mounts": {"rw": [3]}},
        {"mounts": {"rx": []}},
        {"egress": {"mode": "proxied"}},
        {"egress": {"dns": "yes"}},
        {"egress": {"allow": [{"host": "*.example.com", "protocol": "udp"}]}},
        {"egress": {"allow": [{"host": "*.example.com", "sni": "no"}]}},
        {"egress": {"allow": "api.example.com"}},
        {"egress": {"allow": [["api.example.com"]]}},
        {"egress": {"allow": [True]}},
        {"egress": {"allow": [{"ports": [443]}]}},
        {"egress": {"allow": [{"host": "a.example.com", "ports": []}]}},
        {"egress": {"allow": [{"host": "a.example.com", "ports": 443}]}},
        {"egress": {"allow": [{"host": "a.example.com", "ports": ["443"]}]}},
        {"egress": {"allow": [{"host": "a.example.com", "ports": [0]}]}},
        {"egress": {"allow": [{"host": "a.example.com", "ports": [65536]}]}},
        {"egress": {"allow": [{"host": "a.example.com", "ports": [True]}]}},
        {"egress": {"allow": [{"host": "a.example.com", "ports": [443, 443]}]}},
        {"egress": {"allow": [{"host": "a.example.com", "ports": [53]}]}},
        {"egress": {"allow": [{"host": "a.example.com", "ports": [853]}]}},
        {"egress": {"allow": [{"host": "a.example.com", "optional": "yes"}]}},
        {"egress": {"allow": [f"h{i}.example.com" for i in range(257)]}},
        {"egress": {"profile_defaults": "no"}},
        {"host_services": [{"name": "a", "port": 1}, {"name": "a", "port": 2}]},
        {"host_services": [{"name": "a", "port": 1}, {"name": "b", "port": 1}]},
        {"host_services": [{"name": "a b", "port": 1}]},
        {"host_services": [{"name": "a"}]},
        {"host_services": [{"name": "dns", "port": 53}]},
        {"secrets": {"env_file": 3}},
        {"secrets": {"OPENAI_API_KEY": "x"}},
        {"build": {"base_image": "debian\nRUN x"}},
        {"build": {"base_image": "--platform=x"}},
        {"build": {"base_image": ""}},
        {"build": {"npm_registry": "file:///srv/npm"}},
        {"build": {"npm_registry": "https://user:pw@npm.example.com"}},
        {"build": {"pip_index": "ftp://pip.example.com"}},
        {"build": {"apt_mirror": "http://mirror.example.com/$(x)"}},
        {"build": {"apt_mirror": "http://mirror.example.com/ x"}},
        {"build": {"proxy": {"http": "socks5://proxy.example.com"}}},
        {"build": {"proxy": {"http": "proxy.example.com:3128"}}},
        {"build": {"proxy": {"no_proxy": "a\nb"}}},
        {"profile_options": {"opencode": 3}},
        {"background": ["cron", "cron"]},
        {"egres": {}},
    ],
    ids=str,
)
def test_anything_else_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        policy(**fields)


def test_build_section_takes_what_a_company_network_needs() -> None:
    build = policy(
        build={
            "base_image": "registry.example.com:5000/debian:bookworm-slim@sha256:" + "0" * 64,
            "proxy": {
                "http": "http://user:pw@proxy.example.com:3128",
                "https": "",
                "no_proxy": ".example.com,10.0.0.0/8",
            },
            "ca_certificates": ["/usr/local/share/ca-certificates/example.crt"],
            "npm_registry": "https://npm.example.com/repo/npm/",
        }
    ).build
    assert build.proxy.https == ""
    assert build.pip_index is None


@pytest.mark.parametrize("entry", ["*.github.io", r"regex:.*\.github\.io", r"^(a|b$"])
def test_an_invalid_pattern_is_told_what_is_wrong_with_it(entry: str) -> None:
    with pytest.raises(ValidationError) as caught:
        declaration([entry])
    assert "proxy" not in str(caught.value)


def test_a_doh_endpoint_needs_force() -> None:
    with pytest.raises(ValidationError, match="DNS-over-HTTPS"):
        declaration(["dns.google"])
    with pytest.raises(ValidationError, match="DNS-over-HTTPS"):
        declaration([{"host": "dns.google", "force": False}])
    forced = declaration([{"host": "dns.google", "force": True}])
    # The declaration is what it is: what was forced is not asked again.
    assert forced.names == (Name(host="dns.google"),)


def test_force_must_be_true_or_false() -> None:
    with pytest.raises(ValidationError):
        declaration([{"host": "dns.google", "force": "yes"}])
