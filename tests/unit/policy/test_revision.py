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
from policy.declaration import Declaration, Name
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
    long = st.fixed_dictionaries(
        {"host": st.sampled_from(HOSTS)},
        optional={
            "ports": st.lists(st.sampled_from(PORTS), min_size=1, unique=True),
            "optional": st.booleans(),
            "liveness": st.booleans(),
        },
    )
    return st.sampled_from(HOSTS) | long


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
            mode=st.sampled_from(("allowlist", "none", "host")),
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
        found |= {("can use", 8080), ("can use", 8081), ("is on the host's network",)}
    if connection != "none":
        found.add(("has a network",))
    for host, port in itertools.product(HOSTS, PORTS):
        for entry in egress.get("allow", ()):
            name = entry if isinstance(entry, str) else entry["host"]
            ports = [443] if isinstance(entry, str) else entry.get("ports", [443])
            if host == name and port in ports:
                found.add(("can connect", host, port))
        if (
            connection == "allowlist"
            and egress.get("profile_defaults", True)
            and port == 443
            and "example" not in host
        ):
            found.add(("can connect", host, port))
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

    class LaterDeclaration(Declaration):
        zones: tuple[str, ...] = ()

    base = loaded({"egress": {"profile_defaults": False, "allow": ["a.example.com"]}})

    def allowing(entry: AllowEntry) -> LoadedPolicy:
        egress = base.policy.egress.model_copy(update={"allow": (entry,)})
        return replace(base, policy=base.policy.model_copy(update={"egress": egress}))

    later = [
        allowing(LaterEntry(host="a.example.com", stale=True)),
        # An entry that is no name, such as a whole zone.
        allowing(AllowEntry(host="b.example.com")),
        replace(base, declaration=Declaration(names=(LaterName(host="a.example.com", stale=True),))),
        replace(base, declaration=LaterDeclaration(names=base.declaration.names, zones=("example.com",))),
    ]
    for found in later:
        assert widens(compare(revision(base), revision(found), MACHINE))
