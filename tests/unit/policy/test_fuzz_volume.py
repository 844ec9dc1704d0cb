"""Many damaged policies, cheaply: what is accepted is read again by other means and must be harmless.

A few hundred with every test run; ``make fuzz`` and ``make test-all`` make 100,000 (CORRAL_FUZZ, and CORRAL_FUZZ_SEED to repeat one).
"""

from __future__ import annotations

import ipaddress
import os
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from policy.loader import _Reading
from policy.mounts import Guard, RealProbe
from policy.problems import to_error
from policy.yamltree import parse

COUNT = int(os.environ.get("CORRAL_FUZZ", "300"))
SEED = int(os.environ.get("CORRAL_FUZZ_SEED", "7"))

WHOLE = """\
profile: opencode
name: demo
mode: run
mounts:
  project: rw
  rw:
    - {home}/shared
  ro:
    - {home}/notes
egress:
  mode: allowlist
  profile_defaults: false
  allow:
    - api.example.com
    - {{host: git.example.com, ports: [443, 22], optional: true, liveness: false}}
host_services:
  - {{name: llama, port: 8081}}
secrets:
  env_file: {home}/demo.env
limits: {{pids: 100, memory: 1g, cpus: 0.5, best_effort: false}}
hooks:
  pre_launch: [/usr/bin/env, "-v"]
keep: false
protect: true
approvals: ask
build:
  base_image: debian:bookworm-slim
  proxy: {{http: "http://proxy.example.com:3128", no_proxy: .example.com}}
profile_options:
  opencode:
    config: {{model: a/b}}
"""
# What a hostile or careless hand puts somewhere.
VALUES = (
    *(
        "~",
        "/",
        "..",
        "$HOME",
        "{home}",
        "{home}/.ssh",
        "{home}/.aws/credentials",
        "{home}/link",
        "/etc/passwd",
    ),
    *("/proc/self", "/run/user/1000", "/var/run/docker.sock", "//", "/tmp", "{home}/shared/../.ssh", "~root"),
    *("192.0.2.1", "127.1", "0x7f.1", "2130706433", "[::1]", "::ffff:192.0.2.1", "10.0.0.0/8", "localhost"),
    *(
        "*.example.com",
        "*",
        "regex:.*",
        "^a$",
        "https://a.example.com",
        "a.example.com:443",
        "a@b.example.com",
    ),
    *(
        "\u0430pi.example.com",
        "api\u3002example.com",
        "xn--a.example.com",
        "API.EXAMPLE.COM.",
        "a..b",
        "-a.com",
    ),
    *("dns.google", "a.dns.nextdns.io", "metadata.google.internal", "host.docker.internal", "x.local", "a.1"),
    *("true", "yes", "off", "null", "1e3", "0x10", "-1", "0", "53", "65536", ".inf", "1_000", "2001-01-01"),
    *(
        "open",
        "none",
        "host",
        "bridge",
        "container:x",
        "runsc",
        "daemon",
        "rw",
        "privileged",
        "&a x",
        "*a",
        "!!str x",
    ),
    *(
        "<<: {{a: b}}",
        "? x",
        "- - -",
        "|\n  x",
        "'",
        '"\\x00"',
        '"\\u202e"',
        "\t",
        "\x00",
        "\u200b",
        "\ud7ff",
        "# x",
    ),
    *(
        "{{a: {{b: {{c: [d]}}}}}}",
        "[[[[[[]]]]]]",
        "{{}}",
        "[]",
        "a" * 300,
        "e\u0301",
        "\U0001f600",
        "%YAML 1.1",
    ),
)
KEYS = (
    "cap_add",
    "privileged",
    "devices",
    "profile",
    "mode",
    "rw",
    "allow",
    "image",
    "runtime",
    "x",
    "<<",
    "Profile",
)
HOST = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))+")
FORBIDDEN = (".ssh", ".aws", ".local/share/corral", ".config/corral", ".mozilla")
SYSTEM = (
    "/etc",
    "/proc",
    "/sys",
    "/dev",
    "/run",
    "/var/run",
    "/usr",
    "/bin",
    "/boot",
    "/root",
    "/var/lib/docker",
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("fuzz").resolve() / "home"
    for name in ("project", "shared", "notes", ".ssh", ".aws", ".mozilla"):
        (home / name).mkdir(parents=True)
    (home / "link").symlink_to(home / ".ssh")
    (home / "demo.env").touch()
    return home


def damaged(random: random.Random, home: Path) -> str:
    text = WHOLE.format(home=home)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        text = random.choice(WAYS)(random, text, home)
    return text


def _value(random: random.Random, text: str, home: Path) -> str:
    """Put another value behind a key or a dash."""
    return _at(random, text, home, r"(?:: |- )(?=\S)")


def _mount(random: random.Random, text: str, home: Path) -> str:
    """Put another value into the place of a path."""
    return _at(random, text, home, r"(?<=- )(?=/)")


def _at(random: random.Random, text: str, home: Path, where: str) -> str:
    places = [match.end() for match in re.finditer(where, text)]
    if not places:
        return text
    at = random.choice(places)
    end = min((i for i in (text.find(c, at) for c in "\n,}]") if i > 0), default=len(text))
    return text[:at] + _pick(random, home) + text[end:]


def _pick(random: random.Random, home: Path) -> str:
    value = random.choice(VALUES).format(home=home)
    quote = random.choice(("", "", "'", '"'))
    return quote + value + quote


def _key(random: random.Random, text: str, home: Path) -> str:
    lines = text.split("\n")
    at = random.randrange(len(lines))
    indent = " " * random.choice((0, 2, 4))
    return "\n".join([*lines[:at], f"{indent}{random.choice(KEYS)}: {_pick(random, home)}", *lines[at:]])


def _repeat(random: random.Random, text: str, home: Path) -> str:
    lines = text.split("\n")
    at, other = random.randrange(len(lines)), random.randrange(len(lines))
    return "\n".join([*lines[:at], lines[other], *lines[at:]])


def _drop(random: random.Random, text: str, home: Path) -> str:
    lines = text.split("\n")
    at = random.randrange(len(lines))
    return "\n".join([*lines[:at], *lines[at + random.choice((1, 1, 3)) :]])


def _character(random: random.Random, text: str, home: Path) -> str:
    at = random.randrange(len(text))
    return (
        text[:at]
        + random.choice("{}[]:,-&*!|>'\"%@` \n\t#~\\\u00e9\u0430\u200b\ufeff0a/.")
        + text[at + random.choice((0, 1)) :]
    )


WAYS: tuple[Callable[[random.Random, str, Path], str], ...] = (
    *(_value, _value, _value, _mount, _mount),
    *(_key, _repeat, _drop, _character),
)


def again(text: str) -> Any:
    """Read the text with the library's own loader: the second opinion about what stands there."""
    return YAML(typ="safe", pure=True).load(text)


def check(reading: _Reading, policy: Any, text: str, home: Path) -> None:
    """What was accepted is what stands there, and harmless by rules that are written here once more."""
    tree = again(text)
    assert isinstance(tree, dict)
    assert set(tree) <= {
        "profile",
        "name",
        "mode",
        "mounts",
        "egress",
        "host_services",
        "secrets",
        "limits",
        "build",
    } | {"profile_options", "background", "image", "runtime", "keep", "hooks", "approvals", "protect"}
    assert tree["profile"] == policy.profile == "opencode"
    # Another YAML makes a date of what is the text of one.
    assert policy.image == (None if tree.get("image") is None else str(tree["image"]))
    if policy.image is not None:
        assert re.fullmatch(r"[a-z0-9][A-Za-z0-9._/:-]{0,254}(@sha256:[0-9a-f]{64})?", policy.image)
    assert policy.runtime == (tree.get("runtime") or "runc") in {"runc", "runsc", "kata"}
    egress = tree.get("egress") or {}
    assert policy.egress.mode == (egress.get("mode") or "allowlist")
    assert policy.egress.mode in {"allowlist", "proxy", "open", "none", "host"}
    if policy.egress.mode == "none":
        assert not egress.get("allow") and not egress.get("from_host") and not policy.host_services
    if policy.egress.mode == "open":
        assert not any(egress.get(key) for key in ("allow", "from_host", "allow_stale"))
    if policy.egress.mode == "host":
        assert not policy.host_services
    written = [
        entry if isinstance(entry, str) else entry["host"]
        for entry in ((tree.get("egress") or {}).get("allow") or ())
    ]
    assert [str(host).rstrip(".").lower() for host in written] == [
        entry.host for entry in policy.egress.allow
    ]
    for entry in policy.egress.allow:
        assert not entry.host.startswith(("regex:", "^")), "none is among what is damaged"
        # All of a zone, which is two labels at least.
        host = entry.host.removeprefix("*.")
        assert HOST.fullmatch(host), entry.host
        assert not host.endswith((".localhost", ".internal.", "dns.google", "dns.nextdns.io"))
        with pytest.raises(ValueError):
            ipaddress.ip_address(host)
        assert not re.fullmatch(r"[0-9]+|0x[0-9a-f]*", host.rpartition(".")[2])
        assert not {53, 853} & set(entry.ports)
    project = home / "project"
    for path in (*reading.rw, *reading.ro):
        real = os.path.realpath(path)
        assert real == str(path)
        assert real != "/" and not str(home).startswith(real.rstrip("/") + "/") and real != str(home)
        assert not any(real == f"{home}/{name}" or real.startswith(f"{home}/{name}/") for name in FORBIDDEN)
        assert not any(real == place or real.startswith(place + "/") for place in SYSTEM)
        assert real != str(project)
    if reading.env_file is not None:
        assert not str(reading.env_file).startswith((f"{home}/project/", f"{home}/shared/", f"{home}/notes/"))
    if policy.hooks.pre_launch:
        assert os.path.isfile(policy.hooks.pre_launch[0])
        assert not policy.hooks.pre_launch[0].startswith((f"{home}/project/", f"{home}/shared/"))


def test_what_is_accepted_of_many_damaged_policies_is_harmless(home: Path) -> None:
    guard = Guard(str(home), {}, RealProbe())
    source, seen = random.Random(SEED), Counter[str]()
    for number in range(COUNT):
        text = damaged(source, home)
        try:
            reading = _Reading(parse(text), home / "project", str(home), guard)
            policy = reading.run()
            if policy is None:
                message = to_error("corral.yaml", reading.problems).render()
                assert reading.problems
                assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e\u200b]", message), message
                seen["refused"] += 1
            else:
                check(reading, policy, text, home)
                seen["accepted"] += 1
        except BaseException as error:
            raise AssertionError(f"number {number} of seed {SEED}:\n{text}") from error
    # Neither everything nor nothing: the damage is of the right size.
    assert seen["accepted"] > COUNT // 50
    assert seen["refused"] > COUNT // 4
