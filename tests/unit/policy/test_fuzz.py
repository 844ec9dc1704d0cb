"""Whatever stands in a policy file: it is loaded, or refused with a PolicyError."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from policy.declaration import Declaration
from policy.errors import PolicyError
from policy.hosts import canonical_wire_name
from policy.init import starter
from policy.loader import LoadedPolicy, load
from policy.mounts import Guard, RealProbe, is_within
from policy.patterns import declared

SLOW_OK = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])


def attempt(raw: bytes) -> LoadedPolicy | None:
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory).resolve() / "home"
        project = home / "project"
        project.mkdir(parents=True)
        (home / "shared").mkdir()
        (project / "corral.yaml").write_bytes(raw)
        try:
            loaded = load(project / "corral.yaml", home=home, environ={}, uid=os.getuid(), own=())
        except PolicyError as error:
            assert error.message.strip()
            assert "\x1b" not in error.render()
            return None
        check_invariants(loaded, home)
        return loaded


def check_invariants(loaded: LoadedPolicy, home: Path) -> None:
    guard = Guard(str(home), {}, RealProbe())
    for mount in loaded.mounts:
        assert mount.source == mount.target == os.path.realpath(mount.source)
        assert guard.refuse(mount.source) is None
        assert not is_within(str(home), mount.source)
    for name in loaded.declaration.names:
        assert canonical_wire_name(name.host) == name.host
        assert all(0 < port < 65536 for port in name.ports)
    for pattern in loaded.declaration.patterns:
        assert declared(pattern.host).text == pattern.host
    assert Declaration.from_label(loaded.declaration.to_label()) == loaded.declaration


KEYS = st.sampled_from(
    [
        "profile",
        "name",
        "mode",
        "mounts",
        "rw",
        "ro",
        "egress",
        "allow",
        "profile_defaults",
        "host",
        "port",
        "ports",
        "optional",
        "liveness",
        "protocol",
        "sni",
        "dns",
        "host_services",
        "secrets",
        "env_file",
        "build",
        "base_image",
        "proxy",
        "http",
        "https",
        "no_proxy",
        "ca_certificates",
        "npm_registry",
        "pip_index",
        "apt_mirror",
        "profile_options",
        "opencode",
        "config",
        "background",
        "<<",
    ]
)
WORDS = st.sampled_from(
    [
        "opencode",
        "hermes",
        "run",
        "daemon",
        "allowlist",
        "api.example.com",
        "*.example.com",
        "192.0.2.1",
        "127.1",
        "https://x.example",
        "~",
        "~/shared",
        "~/.ssh",
        "~/nothing",
        "$HOME",
        "/",
        "/etc",
        "/home",
        "..",
        "regex:(",
        "regex:[a-z]+\\.example\\.com",
        "proxy",
        "answer",
        "tcp",
        "^a$",
        "\u0430pi.example.com",
        "llama",
    ]
)
SCALARS = st.one_of(
    WORDS,
    st.text(max_size=20),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.none(),
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(KEYS, st.text(max_size=8)), inner, max_size=6)
    ),
    max_leaves=25,
)
POLICIES = st.fixed_dictionaries(
    {"profile": st.one_of(st.just("opencode"), TREES)},
    optional={
        "name": TREES,
        "mode": TREES,
        "mounts": st.one_of(
            TREES,
            st.fixed_dictionaries(
                {}, optional={"rw": st.lists(WORDS, max_size=4), "ro": st.lists(WORDS, max_size=4)}
            ),
        ),
        "egress": st.one_of(
            TREES, st.fixed_dictionaries({"allow": st.lists(st.one_of(WORDS, TREES), max_size=5)})
        ),
        "host_services": TREES,
        "secrets": TREES,
        "build": TREES,
        "profile_options": TREES,
        "background": TREES,
    },
)


def dump(tree: Any) -> bytes:
    """Write a tree with the emitter of the YAML library, which is not the parser under test."""
    with tempfile.TemporaryFile() as stream:
        emitter = YAML(typ="safe", pure=True)
        emitter.dump(tree, stream)
        stream.seek(0)
        return stream.read()


@SLOW_OK
@given(st.text())
@example("profile: opencode\n")
@example("")
@example("\ufeff")
@example("a: &a [*a]\n")
@example("a: &a [x,x]\nb: &b [*a,*a]\nc: [*b,*b]\n")
@example("? - a\n: b\n")
@example("{" * 3000)
@example("%YAML 1.9\n---\na: 1\n")
@example('"\\x')
@example("! a")
@example("!<")
@example("&")
@example("a: |9\n")
@example("a: >-\n\t\n")
@example("- \t- a")
@example("profile: opencode\nname: \U0001f600\n")
def test_any_text_is_loaded_or_refused(text: str) -> None:
    attempt(text.encode("utf-8", "surrogatepass"))


@SLOW_OK
@given(st.binary(max_size=200))
def test_any_bytes_are_loaded_or_refused(raw: bytes) -> None:
    attempt(raw)


@SLOW_OK
@given(st.text("ab:-[]{},#&*!|>'\"%@`?~ \n\t\\0x.<", max_size=60))
def test_text_made_of_yaml_syntax_is_loaded_or_refused(text: str) -> None:
    attempt(text.encode())


@SLOW_OK
@given(POLICIES)
def test_near_policies_are_loaded_or_refused(tree: Any) -> None:
    attempt(dump(tree))


@SLOW_OK
@given(TREES, st.sampled_from(["mounts", "egress", "host_services", "secrets", "build", "profile_options"]))
def test_any_section_is_loaded_or_refused(tree: Any, section: str) -> None:
    attempt(dump({"profile": "opencode", section: tree}))


FRAGMENTS = st.sampled_from(
    [
        "*a",
        "&a ",
        "!!str ",
        "- ",
        "? ",
        ": ",
        "{",
        "}",
        "[",
        "]",
        "|\n",
        "'",
        '"',
        "\\x",
        "---\n",
        "<<: ",
        "~",
        "\n",
        "  ",
    ]
)
PLACES = st.floats(0, 1)


@SLOW_OK
@given(st.booleans(), st.lists(st.tuples(PLACES, PLACES, st.one_of(FRAGMENTS, WORDS, st.none())), max_size=5))
def test_damaged_policy_is_loaded_or_refused(
    examples: bool, damages: list[tuple[float, float, str | None]]
) -> None:
    text = starter("opencode", "demo")
    if examples:
        text = text.replace("# ", "")
    for place, other, fragment in damages:
        at, source = int(place * len(text)), int(other * len(text))
        # A fragment is put in; without one a piece of the text is repeated elsewhere.
        text = text[:at] + (text[source : source + 40] if fragment is None else fragment) + text[at:]
    attempt(text.encode())


@pytest.mark.parametrize("size", [60000, 65536])
@pytest.mark.parametrize(
    "unit", ["a: b\n", "- ", "{a: ", "[", "*a ", "'", "a,", "? ", "\t", " ", "&a ", "#\n", "é"]
)
def test_large_input_is_answered(unit: str, size: int) -> None:
    raw = (unit * (size // len(unit.encode()))).encode()
    assert attempt(raw) is None


def test_good_near_policies_do_get_through() -> None:
    tree = {
        "profile": "opencode",
        "mounts": {"ro": ["~/shared"]},
        "egress": {"allow": ["api.example.com"]},
    }
    assert attempt(dump(tree)) is not None
