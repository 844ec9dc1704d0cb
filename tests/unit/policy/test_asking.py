"""Names that are asked for instead of pinned: what a policy makes of them, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from policy import asking, profiles
from policy.asking import Terms, strictest, terms
from policy.container import DEAD_RESOLVER, RESOLVER_OPTIONS, SessionSpec, create_body
from policy.declaration import Declaration, Name, Pattern
from policy.hostnames import Found, FromHost, declared
from policy.hosts import HostError, canonical_wire_name
from policy.identity import sandbox_for
from policy.schema import Policy, effective_declaration
from tests.unit.policy.conftest import Workspace

VECTORS = json.loads((Path(__file__).parents[2] / "data" / "host-vectors.json").read_text())["patterns"]
REGEX = r"^(api|preview)\.x\.example$"


def declaration(allow: list[Any], *, defaults: bool = False, **egress: Any) -> Declaration:
    section = {"allow": allow, "profile_defaults": defaults, **egress}
    policy = Policy.model_validate({"profile": "opencode", "egress": section})
    return effective_declaration(policy, profiles.get("opencode"))


def verdict(pattern: str, host: str) -> str:
    """Say what a policy with this one entry says to a name that a program gives the proxy."""
    try:
        made = declaration([pattern], mode="proxy")
    except ValidationError:
        return "CONFIG-ERROR"
    try:
        wire = canonical_wire_name(host)
    except HostError:
        return "REJECT"
    label = Declaration.from_label(made.to_label())
    return "allow" if terms(label.patterns, wire, 443) else "deny"


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: ascii(f"{v['pattern']}|{v['host']}"))
def test_a_policy_gives_the_verdict_of_the_vectors(vector: dict[str, str]) -> None:
    assert verdict(vector["pattern"], vector["host"]) == vector["expect"]


def test_a_policy_of_names_alone_has_no_patterns_and_no_proxy() -> None:
    made = declaration(["a.example.com"], defaults=True)
    assert (made.patterns, made.proxied, made.mode) == ((), False, "allowlist")
    assert "patterns" not in made.to_label()


@pytest.mark.parametrize(
    ("entry", "host"),
    [("*.Example.com", "*.example.com"), (REGEX, r"regex:(api|preview)\.x\.example")],
)
def test_with_a_zone_or_expression_every_entry_may_be_asked_for_and_the_names_stay_pinned(
    entry: str, host: str
) -> None:
    git = {"host": "git.example.net", "ports": [22], "protocol": "tcp", "optional": True}
    made = declaration([entry, git], defaults=True)
    defaults = profiles.get("opencode").default_egress
    assert made.names == (
        Name(host="git.example.net", ports=(22,), optional=True),
        *(Name(host=name) for name in defaults),
    )
    assert made.patterns == (
        Pattern(host=host),
        Pattern(host="git.example.net", ports=(22,), protocol="tcp"),
        *(Pattern(host=name) for name in defaults),
    )
    assert made.proxied
    assert made.mode == "allowlist"


def test_mode_proxy_pins_nothing() -> None:
    made = declaration(["a.example.com"], defaults=True, mode="proxy")
    assert made.names == ()
    assert [pattern.host for pattern in made.patterns] == [
        "a.example.com",
        *profiles.get("opencode").default_egress,
    ]
    assert (made.mode, made.proxied, made.answered) == ("proxy", True, False)
    assert declaration([], mode="proxy").proxied


def test_what_is_answered_is_pinned_too_and_needs_no_proxy_without_a_zone() -> None:
    made = declaration(["a.example.com"], dns="answer")
    assert made.names == (Name(host="a.example.com"),)
    assert made.patterns == (Pattern(host="a.example.com"),)
    assert (made.dns, made.answered, made.proxied) == ("answer", True, False)
    assert declaration(["*.example.com"], dns="answer").proxied


def test_entries_of_one_host_are_one_pattern_and_the_strict_wish_wins() -> None:
    def merged(*wishes: dict[str, Any]) -> Pattern:
        entries = [{"host": "*.example.com", "ports": [port], **wish} for port, wish in enumerate(wishes, 80)]
        (pattern,) = declaration(entries).patterns
        return pattern

    host, tcp, blind = "*.example.com", {"protocol": "tcp"}, {"sni": False}
    assert merged(tcp, tcp) == Pattern(host=host, ports=(80, 81), protocol="tcp")
    assert merged(tcp, {}) == Pattern(host=host, ports=(80, 81))
    assert merged(blind, blind) == Pattern(host=host, ports=(80, 81), sni=False)
    assert merged({}, blind) == Pattern(host=host, ports=(80, 81))
    # Each lets a ClientHello without a name through, and only one anything else.
    assert merged(tcp, blind) == Pattern(host=host, ports=(80, 81), sni=False)


def test_a_default_of_the_profile_adds_its_port_and_changes_no_wish() -> None:
    made = declaration(
        [{"host": "openrouter.ai", "ports": [22], "protocol": "tcp"}], defaults=True, mode="proxy"
    )
    assert made.patterns[0] == Pattern(host="openrouter.ai", ports=(22, 443), protocol="tcp")


def test_names_of_this_hosts_clients_are_asked_for_where_names_are() -> None:
    found = FromHost((Found("npm", "npm.example.com", 8443), Found("git", "a.example.com", 8443)))
    new = Pattern(host="npm.example.com", ports=(8443,))
    old = Pattern(host="a.example.com", ports=(443, 8443))
    proxied = declared(declaration(["a.example.com"], mode="proxy"), found)
    assert (proxied.names, proxied.patterns) == ((), (old, new))
    mixed = declared(declaration(["a.example.com", "*.example.org"]), found)
    assert [name.host for name in mixed.names] == ["a.example.com", "npm.example.com"]
    assert mixed.patterns == (old, Pattern(host="*.example.org"), new)
    assert declared(declaration([], dns="answer"), found).patterns == (
        new,
        Pattern(host="a.example.com", ports=(8443,)),
    )
    assert declared(declaration(["a.example.com"]), found).patterns == ()


def test_a_name_may_be_asked_for_on_the_ports_of_what_means_it() -> None:
    patterns = declaration(
        ["*.example.com", {"host": "git.example.com", "ports": [22], "protocol": "tcp"}]
    ).patterns
    assert terms(patterns, "git.example.com", 22) == Terms("tcp")
    assert terms(patterns, "git.example.com", 443) == Terms("tls")
    assert terms(patterns, "git.example.com", 80) is None
    assert terms(patterns, "a.git.example.com", 22) is None
    assert terms(patterns, "example.com", 443) is None
    assert asking.ports(patterns, "git.example.com") == (22, 443)
    assert asking.ports(patterns, "example.com") == ()


def test_each_entry_that_means_a_name_allows_what_it_says() -> None:
    blind = {"host": "old.example.com", "sni": False}
    patterns = declaration(["*.example.com", blind, {"host": "*.a.example.com", "protocol": "tcp"}]).patterns
    assert terms(patterns, "old.example.com", 443) == Terms(sni=False)
    assert terms(patterns, "x.a.example.com", 443) == Terms("tcp")
    assert terms(patterns, "b.example.com", 443) == Terms()


def test_a_forced_endpoint_is_not_asked_about_again() -> None:
    made = declaration([{"host": "*.nextdns.io", "force": True}])
    assert terms(made.patterns, "dns.nextdns.io", 443) == Terms()


def test_several_agree_to_the_strictest() -> None:
    assert strictest([Terms("tcp"), Terms("tcp")]) == Terms("tcp")
    assert strictest([Terms("tcp", sni=False), Terms("tls", sni=False)]) == Terms("tls", sni=False)
    assert strictest([Terms("tcp", sni=False), Terms()]) == Terms()


@pytest.mark.parametrize(
    ("egress", "message"),
    [
        ("{mode: proxy, dns: answer}", "egress.dns: egress.mode is proxy: programs give names to the proxy"),
        ("{mode: open, dns: answer}", "egress.dns: egress.mode is open: every name is answered"),
        ("{mode: none, dns: answer}", "egress.dns: egress.mode is none"),
        ("{mode: host, dns: answer}", "egress.dns: egress.mode is host"),
        ("{mode: proxy, allow_stale: true}", "egress.allow_stale: egress.mode is proxy"),
        (
            "{allow: [{host: a.example.com, protocol: tcp}]}",
            "egress.allow[0].protocol: this policy has no proxy that looks at what passes",
        ),
        (
            "{dns: answer, allow: [{host: a.example.com, sni: true}]}",
            "egress.allow[0].sni: this policy has no",
        ),
        (
            "{mode: host, allow: [{host: '*.example.com', sni: false}]}",
            "egress.allow[0].sni: this policy has",
        ),
        (
            "{allow: [a.example.com, {host: '*.example.com', optional: true}]}",
            "egress.allow[1].optional: an entry for many names is not resolved when a session starts (true); "
            "remove optional",
        ),
        (
            f"{{mode: proxy, allow: [{{host: '{REGEX}', liveness: false}}]}}",
            "egress.allow[0].liveness: an entry for many names",
        ),
        (
            "{allow: [{host: '*.example.com', protocol: tcp, sni: false}]}",
            "egress.allow[0].sni: with protocol: tcp nothing looks for a name",
        ),
        ("{allow: ['*.com']}", "egress.allow[0]: a zone as wide as a top-level domain"),
        ("{mode: none, allow: ['*.example.com']}", "egress.allow: egress.mode is none"),
    ],
)
def test_what_nothing_could_keep_is_refused(workspace: Workspace, egress: str, message: str) -> None:
    assert message in workspace.error(f"profile: opencode\negress: {egress}\n").message


@pytest.mark.parametrize(
    ("egress", "port"),
    [
        ("{mode: proxy}", 8443),
        ("{allow: ['*.example.com']}", 8443),
        ("{dns: answer}", 10053),
        ("{mode: open}", 10053),
    ],
)
def test_a_host_service_cannot_have_a_port_of_the_gateway_that_is_taken(
    workspace: Workspace, egress: str, port: int
) -> None:
    text = f"profile: opencode\negress: {egress}\nhost_services: [{{name: a, port: {{}}}}]\n"
    message = workspace.error(text.replace("{}", str(port), 1)).message
    assert f"host_services[0].port: port {port} of the gateway" in message
    assert workspace.load(text.replace("{}", "8080", 1)).declaration.host_services[0].port == 8080


def test_8443_is_a_port_like_others_where_there_is_no_proxy(workspace: Workspace) -> None:
    text = "profile: opencode\negress: {allow: [a.example.com]}\nhost_services: [{name: a, port: 8443}]\n"
    assert not workspace.load(text).declaration.proxied


def test_what_a_name_wishes_for_its_start_holds_where_none_is_pinned(workspace: Workspace) -> None:
    text = "egress: {mode: proxy, allow: [{host: a.example.com, optional: true, liveness: false}]}\n"
    assert workspace.load(f"profile: opencode\n{text}").declaration.names == ()


@pytest.mark.parametrize(
    ("egress", "resolver", "options"),
    [
        ({"mode": "proxy"}, DEAD_RESOLVER, list(RESOLVER_OPTIONS)),
        ({"allow": ["*.example.com"]}, DEAD_RESOLVER, list(RESOLVER_OPTIONS)),
        ({"dns": "answer"}, "172.16.0.1", []),
        ({"mode": "open"}, "172.16.0.1", []),
    ],
)
def test_a_container_whose_names_are_answered_asks_its_gateway(
    egress: dict[str, Any], resolver: str, options: list[str]
) -> None:
    made = declaration(egress.pop("allow", []), **egress)
    spec = SessionSpec(
        sandbox=sandbox_for(1000, Path("/home/me/demo"), "demo"),
        service="main",
        session="00000001",
        purpose="run",
        uid=1000,
        gid=1000,
        image="demo",
        address="172.16.0.2",
        hosts_file="/hosts",
        project="/home/me/demo",
        workdir="/home/me/demo",
        argv=("true",),
        declaration=made,
        gateway="172.16.0.1",
    )
    config = create_body(spec)["HostConfig"]
    assert (config["Dns"], config["DnsOptions"]) == ([resolver], options)
