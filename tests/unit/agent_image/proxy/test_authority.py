from __future__ import annotations

import json
import string
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent_image.files.proxy import authority
from policy.hosts import HostError, canonical_wire_name

VECTORS = json.loads((Path(__file__).parents[3] / "data" / "host-vectors.json").read_text())["patterns"]
# What names are made of, and what others take for it.
ALPHABET = string.ascii_letters + string.digits + ".-_:@/[]%\\ \t\r\n\0*" + "ıK．。ſ１²"


def ours(raw: str) -> str | None:
    try:
        return authority.canonical(raw)
    except authority.BadName:
        return None


def policys(raw: str) -> str | None:
    try:
        return canonical_wire_name(raw)
    except HostError:
        return None


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: ascii(v["host"]))
def test_a_name_is_read_as_the_policy_reads_it(vector: dict[str, str]) -> None:
    assert ours(vector["host"]) == policys(vector["host"])
    if vector["expect"] == "REJECT":
        assert ours(vector["host"]) is None
    if vector["expect"] == "allow":
        assert ours(vector["host"]) is not None


@settings(max_examples=3000, deadline=None)
@given(st.text(ALPHABET, max_size=300) | st.text(max_size=80))
@example("a" * 63 + ".example")
@example("a" * 64 + ".example")
@example(".".join(["a" * 61] * 4) + ".ab")
@example("a.0x")
@example("a.b..")
@example("1e3.example")
def test_any_text_is_read_as_the_policy_reads_it(raw: str) -> None:
    assert ours(raw) == policys(raw)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("api.example.com:443", ("api.example.com", 443)),
        ("API.Example.COM.:1", ("api.example.com", 1)),
        ("localhost:65535", ("localhost", 65535)),
        ("_x.example.com:8080", ("_x.example.com", 8080)),
    ],
)
def test_a_name_with_a_port_is_taken_apart(target: str, expected: tuple[str, int]) -> None:
    assert authority.parse(target) == expected


@pytest.mark.parametrize(
    "target",
    [
        *("", ":", "api.example.com", "api.example.com:", ":443", "443", "/", "*"),
        *("api.example.com:0", "api.example.com:00443", "api.example.com:0443", "api.example.com:+443"),
        *("api.example.com:-1", "api.example.com:65536", "api.example.com:99999", "api.example.com:443443"),
        *("api.example.com:4 43", "api.example.com:443 ", " api.example.com:443", "api.example.com :443"),
        *(
            "api.example.com:443:443",
            "api.example.com:https",
            "api.example.com:0x1bb",
            "api.example.com:４４３",
        ),
        *("api.example.com:443\n", "api.example.com:443/", "api.example.com:443?x", "api.example.com..:443"),
        *(
            "192.0.2.1:443",
            "127.1:443",
            "2130706433:443",
            "0x7f000001:443",
            "0x7f.0.0.1:443",
            "192.0.2.1.:443",
        ),
        *("[::1]:443", "::1:443", "[2001:db8::1]:443", "[api.example.com]:443", "2001:db8::1"),
        *("name@api.example.com:443", "api.example.com:443@evil.example:443", "api.example.com@443"),
        *("http://api.example.com:443", "https://api.example.com/", "//api.example.com:443"),
        *(
            "api%2eexample.com:443",
            "api.example.com%00:443",
            "bücher.example:443",
            "api\u3002example.com:443",
        ),
        "a" * 254 + ":443",
    ],
)
def test_anything_else_is_no_target(target: str) -> None:
    with pytest.raises(authority.BadName) as caught:
        authority.parse(target)
    if target:
        assert target not in str(caught.value)
