"""Whether a policy allows more than another: compared with a second opinion that reads what was written."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from policy import profiles
from policy.declaration import Declaration, Name, Pattern
from policy.errors import PolicyError
from policy.identity import sandbox_for
from policy.limits import parse_memory
from policy.loader import LoadedPolicy
from policy.revision import Machine, Revision, compare, revision, widens
from policy.schema import AllowEntry, Policy, effective_declaration

Raw = dict[str, Any]

MACHINE = Machine(memory=32 << 30)
PROJECT = "/home/me/demo"
PATHS = ("/data/a", "/data/a/below", "/data/b")
ZONE = "*.example.org"
WAYS = ("tls", "tls without a name", "anything")
HOSTS = ("a.example.com", "b.example.com", *profiles.get("opencode").default_egress)
PORTS = (22, 443, 8443)
MEMORY = ("512m", "8g", "24g", "25g", "64g")
CPUS = (0.5, 2, 64)
PIDS = (32, 4096, 5000)


def loaded(raw: Raw) -> LoadedPolicy:
    """Return what the loader makes of it; the paths are taken as they are."""
    policy = Policy.model_validate({"profile": "opencode", **raw})
    profile = profiles.get("opencode")
    mounts, project = raw.get("mounts", {}), Path(PROJECT)
    env_file = raw.get("secrets", {}).get("env_file")
    return LoadedPolicy(
        policy=policy,
        path=project / "corral.yaml",
        project=project,
        sha256="",
        sandbox=sandbox_for(1000, project, "demo"),
        profile=profile,
        options=profile.parse_options(raw.get("profile_options", {}).get("opencode", {})),
        declaration=effective_declaration(policy, profile),
        rw=tuple(map(Path, mounts.get("rw", ()))),
        ro=tuple(map(Path, mounts.get("ro", ()))),
        env_file=Path(env_file) if env_file else None,
    )


def entries() -> st.SearchStrategy[Any]:
    ports = st.lists(st.sampled_from(PORTS), min_size=1, unique=True)
    asked = {"protocol": st.sampled_from(("tls", "tcp")), "sni": st.booleans()}
    long = st.fixed_dictionaries(
        {"host": st.sampled_from(HOSTS)},
        optional={
            "ports": ports,
            "optional": st.booleans(),
            "liveness": st.booleans(),
            **asked,
        },
    )
    zone = st.fixed_dictionaries({"host": st.just(ZONE)}, optional={"ports": ports, **asked})
    return st.sampled_from((*HOSTS, ZONE)) | long | zone


def policies() -> st.SearchStrategy[Raw]:
    def section(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Raw]:
        return st.fixed_dictionaries({}, optional=keys)

    access = st.lists(st.sampled_from(PATHS), max_size=2, unique=True)
    services = st.lists(st.sampled_from((8080, 8081)), unique=True)
    return section(
        name=st.sampled_from(("demo", "other")),
        mode=st.sampled_from(("run", "daemon")),
        mounts=section(rw=access, ro=access, project=st.sampled_from(("rw", "ro"))),
        keep=st.booleans(),
        protect=st.booleans(),
        egress=section(
            allow=st.lists(entries(), max_size=3),
            profile_defaults=st.booleans(),
            allow_stale=st.booleans(),
            mode=st.sampled_from(("allowlist", "proxy", "none", "host")),
            dns=st.sampled_from(("dead", "answer")),
        ),
        host_services=services.map(lambda ports: [{"name": f"s{port}", "port": port} for port in ports]),
        secrets=section(env_file=st.sampled_from(("/home/me/one.env", "/home/me/two.env"))),
        limits=section(
            memory=st.sampled_from(MEMORY),
            cpus=st.sampled_from(CPUS),
            pids=st.sampled_from(PIDS),
            best_effort=st.booleans(),
        ),
        build=section(
            base_image=st.sampled_from(("debian:trixie-slim", "debian:bookworm-slim")),
            npm_registry=st.sampled_from(("https://npm.example.com", "https://other.example.com")),
        ),
        profile_options=st.sampled_from(
            (
                {},
                {"opencode": {}},
                {"opencode": {"config": {"model": "a"}}},
                {"opencode": {"config": {"x": 1}}},
            )
        ),
    )


def capabilities(raw: Raw) -> set[tuple[Any, ...]]:
    """Say what a sandbox of this policy can do, by trying everything there is in this small world."""
    found: set[tuple[Any, ...]] = set()
    mounts, egress = raw.get("mounts", {}), raw.get("egress", {})
    mode, connection = raw.get("mode", "run"), egress.get("mode", "allowlist")
    for path in (PROJECT, *PATHS):
        own = path == PROJECT and mode == "run"
        writable = path in mounts.get("rw", ()) or (own and mounts.get("project", "rw") == "rw")
        if writable:
            found.add(("can write", path))
        if writable or own or path in mounts.get("ro", ()):
            found.add(("can read", path))
    if connection == "host":
        found |= {("can connect", host, port) for host, port in itertools.product(HOSTS, PORTS)}
        found |= {("can use", 8080), ("can use", 8081), ("is on the host's network",), ("is answered",)}
        found |= {("can ask", ZONE, port, way) for port, way in itertools.product(PORTS, WAYS)}
    if connection != "none":
        found.add(("has a network",))
    if connection in ("allowlist", "proxy") and egress.get("dns") == "answer":
        found.add(("is answered",))
    written = [entry if isinstance(entry, dict) else {"host": entry} for entry in egress.get("allow", ())]
    asked = connection == "proxy" or (connection == "allowlist" and any(e["host"] == ZONE for e in written))
    for host, port in itertools.product((*HOSTS, ZONE), PORTS):
        mine = [entry for entry in written if entry["host"] == host]
        default = host in HOSTS and "example" not in host and egress.get("profile_defaults", True)
        default = default and connection in ("allowlist", "proxy") and port == 443
        if not default and not any(port in entry.get("ports", [443]) for entry in mine):
            continue
        if connection != "proxy" and host != ZONE:
            found.add(("can connect", host, port))
        ways = {"tls"}
        if asked and mine and all(e.get("protocol") == "tcp" for e in mine):
            ways = set(WAYS)
        elif asked and mine and all(e.get("protocol") == "tcp" or not e.get("sni", True) for e in mine):
            ways.add("tls without a name")
        found |= {("can ask", host, port, way) for way in ways}
    # To the addresses of a pinned name anything passes.
    found |= {("can ask", *what[1:], way) for what in found if what[0] == "can connect" for way in WAYS}
    if connection != "none":
        found |= {("can use", service["port"]) for service in raw.get("host_services", ())}
    found |= {("can see", raw.get("secrets", {}).get("env_file"))} - {("can see", None)}
    limits = raw.get("limits", {})
    memory = parse_memory(limits["memory"]) if "memory" in limits else MACHINE.memory * 3 // 4
    found |= {("memory", size) for size in map(parse_memory, MEMORY) if memory >= size}
    found |= {("memory", "three quarters")} if memory >= MACHINE.memory * 3 // 4 else set()
    found |= {
        ("cpus", number)
        for number in (*CPUS, "all")
        if limits.get("cpus", 1e9) >= (1e9 if number == "all" else number)
    }
    found |= {("pids", number) for number in PIDS if limits.get("pids", 4096) >= number}
    for allowed, what in (
        (limits.get("best_effort", False), "starts without limits"),
        (raw.get("keep", False), "stays"),
        (egress.get("allow_stale", False), "starts on old addresses"),
        (not raw.get("protect", True), "writes what the host executes"),
    ):
        found |= {(what,)} if allowed else set()
    return found


def fixed(raw: Raw) -> tuple[Any, ...]:
    """Return what nobody can order: a different one is a different sandbox."""
    build = {"base_image": "debian:bookworm-slim", **raw.get("build", {})}
    options = raw.get("profile_options", {}).get("opencode", {}).get("config", {})
    return raw.get("mode", "run"), build, options


@settings(max_examples=300)
@given(policies(), policies())
@example({}, {"limits": {"memory": "64g"}})
@example({"limits": {"memory": "24g"}}, {})
@example(
    {"egress": {"allow": ["a.example.com"]}},
    {"egress": {"allow": [{"host": "a.example.com", "ports": [22]}]}},
)
@example(
    {"egress": {"mode": "proxy", "allow": ["a.example.com"]}},
    {"egress": {"mode": "allowlist", "allow": ["a.example.com"]}},
)
@example(
    {"egress": {"allow": ["a.example.com"]}},
    {"egress": {"mode": "proxy", "allow": [{"host": "a.example.com", "protocol": "tcp"}]}},
)
@example({"egress": {"allow": [{"host": ZONE, "protocol": "tcp"}]}}, {"egress": {"allow": [ZONE]}})
@example({"egress": {"allow": [ZONE]}}, {"egress": {"allow": [ZONE, {"host": ZONE, "sni": False}]}})
def test_a_policy_widens_exactly_when_a_sandbox_can_do_what_it_could_not(before: Raw, after: Raw) -> None:
    old, new = revision(loaded(before)), revision(loaded(after))
    more = capabilities(after) - capabilities(before)
    expected = bool(more) or fixed(before) != fixed(after)
    assert widens(compare(old, new, MACHINE)) == expected, more


@settings(max_examples=300)
@given(policies())
def test_a_policy_nobody_approved_widens_and_the_same_one_again_does_not(raw: Raw) -> None:
    found = revision(loaded(raw))
    assert widens(compare(None, found, MACHINE))
    assert compare(found, revision(loaded(raw)), MACHINE) == ()


@settings(max_examples=300)
@given(policies(), policies())
def test_the_canonical_form_is_the_revision(first: Raw, second: Raw) -> None:
    one, two = revision(loaded(first)), revision(loaded(second))
    assert Revision.parse(one.canonical()) == one
    assert (one.sha256 == two.sha256) == (one == two)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        '{"schema":2,"grants":[],"amounts":{},"settings":{}}',
        '{"schema":1,"grants":[["a"]]}',
    ],
)
def test_what_is_no_canonical_form_is_refused(text: str) -> None:
    with pytest.raises(PolicyError):
        Revision.parse(text)


def test_order_comments_and_what_does_not_reach_further_leave_the_hash_alone() -> None:
    one = revision(loaded({"egress": {"allow": ["a.example.com", "b.example.com"]}}))
    two = revision(
        loaded({"egress": {"allow": ["b.example.com", {"host": "a.example.com", "optional": True}]}})
    )
    assert one.sha256 == two.sha256


def test_a_diff_says_what_is_new_gone_and_different_and_hides_credentials() -> None:
    before = {"egress": {"profile_defaults": False, "allow": ["old.example.com"]}, "limits": {"memory": "1g"}}
    after = {
        "egress": {"profile_defaults": False, "allow": ["new.example.com"]},
        "limits": {"memory": "2g"},
        "mounts": {"ro": ["/data/a"]},
        "build": {"proxy": {"http": "http://me:hunter2@proxy.example.com:3128"}},
    }
    found = compare(revision(loaded(before)), revision(loaded(after)), MACHINE)
    assert [change.line() for change in found] == [
        "+ reach new.example.com:443",
        "+ read /data/a",
        '~ build.proxy.http: default -> "http://***@proxy.example.com:3128"',
        "~ limits.memory: 1024 MiB -> 2048 MiB",
        "- reach old.example.com:443",
    ]
    assert [change.widens for change in found] == [True, True, True, True, False]


def changes(before: Raw, after: Raw) -> list[tuple[str, bool]]:
    """Return the lines of a diff, each with whether it widens; nothing of the profile's own names."""
    made = [loaded({"egress": {"profile_defaults": False, **egress}}) for egress in (before, after)]
    found = compare(revision(made[0]), revision(made[1]), MACHINE)
    return [(change.line(), change.widens) for change in found]


def test_zones_and_expressions_are_granted_as_they_are_written() -> None:
    git = {"host": "*.example.net", "ports": [22, 443], "protocol": "tcp"}
    regex = {"host": r"^(a|b)\.x\.example$", "sni": False}
    assert changes({"allow": ["a.example.com"]}, {"allow": ["a.example.com", ZONE, git, regex]}) == [
        ("+ reach *.example.net:22 as tcp", True),
        ("+ reach *.example.net:443 as tcp", True),
        ("+ reach *.example.org:443", True),
        (r"+ reach regex:(a|b)\.x\.example:443 without SNI", True),
    ]


@pytest.mark.parametrize("wish", [{"protocol": "tcp"}, {"sni": False}])
@pytest.mark.parametrize("host", [ZONE, "a.example.com"])
def test_less_that_is_looked_at_is_more_and_the_other_way_round_is_not(host: str, wish: Raw) -> None:
    strict, loose = ({"mode": "proxy", "allow": [{"host": host, **extra}]} for extra in ({}, wish))
    assert [widening for _, widening in changes(strict, loose)] == [True, False]
    assert [widening for _, widening in changes(loose, strict)] == [False, False]


def test_from_pins_to_a_proxy_is_no_widening_and_back_is_one() -> None:
    names = ["a.example.com", {"host": "git.example.com", "ports": [22]}]
    proxied = ["a.example.com", {"host": "git.example.com", "ports": [22], "protocol": "tcp"}]
    assert changes({"allow": names}, {"mode": "proxy", "allow": proxied}) == [
        ("+ reach a.example.com:443 through the proxy", False),
        ("+ reach git.example.com:22 through the proxy as tcp", False),
        ("- reach a.example.com:443", False),
        ("- reach git.example.com:22", False),
    ]
    assert changes({"mode": "proxy", "allow": proxied}, {"allow": names})[:2] == [
        ("+ reach a.example.com:443", True),
        ("+ reach git.example.com:22", True),
    ]


def test_a_resolver_for_what_is_allowed_is_a_widening() -> None:
    (change,) = changes({"allow": [ZONE]}, {"allow": [ZONE], "dns": "answer"})
    assert change == ("+ dns what is allowed is answered, and opened to all programs for any protocol", True)


def test_from_all_public_addresses_a_name_is_nothing_new_and_a_zone_is() -> None:
    after = {"allow": ["a.example.com", ZONE, r"^(a|b)\.x\.example$"], "dns": "answer"}
    widening = [line for line, widens_ in changes({"mode": "open"}, after) if widens_]
    assert widening == ["+ reach *.example.org:443", r"+ reach regex:(a|b)\.x\.example:443"]
    proxied = {"mode": "proxy", "allow": [{"host": "a.example.com", "protocol": "tcp"}]}
    assert not any(widens_ for _, widens_ in changes({"mode": "open"}, proxied))


def test_a_policy_of_names_alone_has_the_revision_it_had() -> None:
    """What was approved stays approved over an upgrade."""
    raw = {"egress": {"profile_defaults": False, "allow": [{"host": "a.example.com", "ports": [443, 22]}]}}
    found = revision(loaded(raw))
    assert {grant for grant in found.grants if grant[0] not in ("read", "write")} == {
        ("reach", "a.example.com:22"),
        ("reach", "a.example.com:443"),
    }
    assert found.settings == {"profile": '"opencode"', "mode": '"run"'}


def test_all_of_a_long_value_is_shown_and_nothing_invisible() -> None:
    raw = {"profile_options": {"opencode": {"config": {"a": "x" * 500 + "\u202eend\n"}}}}
    (change,) = compare(revision(loaded({})), revision(loaded(raw)), MACHINE)
    assert change.text.endswith('end\\n"')
    assert change.text.isprintable()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"permission": {"bash": "deny"}}, {"permission.bash": "deny"}),
        ({"permission": {"bash": "deny"}}, {"permission": {"bash": "allow"}, "permission.bash": "deny"}),
        ({"a": {"b.c": 1}}, {"a": {"b": {"c": 1}}}),
        ({"a": {'"b"': 1}}, {"a": {"b": 1}}),
    ],
)
def test_a_dot_in_a_key_makes_no_two_configurations_one(first: Raw, second: Raw) -> None:
    one, other = (
        revision(loaded({"profile_options": {"opencode": {"config": config}}})) for config in (first, second)
    )
    assert one.sha256 != other.sha256
    assert widens(compare(one, other, MACHINE))


def test_every_key_of_the_schema_has_a_part_in_the_revision() -> None:
    """A key that is added later counts as a setting: whoever adds one sees it here and decides."""
    base = {"profile": "opencode"}
    changed: dict[str, Any] = {
        "mode": "daemon",
        "mounts": {"rw": ["/data/a"]},
        "egress": {"allow": ["a.example.com"]},
        "host_services": [{"name": "a", "port": 1}],
        "secrets": {"env_file": "/home/me/one.env"},
        "limits": {"pids": 99},
        "build": {"base_image": "x"},
        "profile_options": {"opencode": {"config": {"a": 1}}},
        "background": ["x"],
        "keep": True,
        "hooks": {"pre_launch": ["/usr/bin/true"]},
        "approvals": "off",
        "protect": False,
        "image": "debian:12",
        "runtime": "runsc",
    }
    assert {"profile", "name", *changed} == set(Policy.model_fields)
    for key, value in changed.items():
        assert revision(loaded({key: value})) != revision(loaded(base)), key


def test_what_a_later_schema_adds_to_entries_names_and_the_declaration_is_not_overlooked() -> None:
    class LaterEntry(AllowEntry):
        stale: bool = False

    class LaterName(Name):
        stale: bool = False

    class LaterPattern(Pattern):
        stale: bool = False

    class LaterDeclaration(Declaration):
        zones: tuple[str, ...] = ()

    base = loaded({"egress": {"profile_defaults": False, "allow": ["a.example.com"]}})

    def allowing(entry: AllowEntry) -> LoadedPolicy:
        egress = base.policy.egress.model_copy(update={"allow": (entry,)})
        return replace(base, policy=base.policy.model_copy(update={"egress": egress}))

    later = [
        allowing(LaterEntry(host="a.example.com", stale=True)),
        # An entry that is in no declaration.
        allowing(AllowEntry(host="b.example.com")),
        replace(base, declaration=Declaration(names=(LaterName(host="a.example.com", stale=True),))),
        replace(base, declaration=Declaration(mode="proxy", patterns=(LaterPattern(host=ZONE, stale=True),))),
        replace(base, declaration=LaterDeclaration(names=base.declaration.names, zones=("example.com",))),
    ]
    opened = loaded({"egress": {"mode": "open"}})
    for found in later:
        assert widens(compare(revision(base), revision(found), MACHINE))
    for found in (later[0], later[2], later[3]):
        assert widens(compare(revision(opened), revision(found), MACHINE))
