from __future__ import annotations

import json
import os
import random
import re
import time
import tracemalloc
from pathlib import Path

import pytest

from policy.hosts import DOH_ENDPOINTS, HostError, canonical_wire_name, is_address
from policy.patterns import MAX_WAYS, Exact, Regex, Zone, parse_pattern
from policy.suffixes import DATA, public_suffix, registrable

VECTORS = json.loads((Path(__file__).parents[2] / "data" / "host-vectors.json").read_text())["patterns"]
# The whole count takes about ten seconds.
INPUTS = int(os.environ.get("CORRAL_FUZZ_INPUTS", "20000"))


def verdict(pattern: str, host: str) -> str:
    try:
        parsed = parse_pattern(pattern)
    except HostError:
        return "CONFIG-ERROR"
    try:
        wire = canonical_wire_name(host)
    except HostError:
        return "REJECT"
    return "allow" if parsed.matches(wire) else "deny"


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: ascii(f"{v['pattern']}|{v['host']}"))
def test_pattern_gives_the_verdict_of_the_vectors(vector: dict[str, str]) -> None:
    assert verdict(vector["pattern"], vector["host"]) == vector["expect"]


def test_there_are_79_pairs_of_every_verdict() -> None:
    assert len(VECTORS) == 79
    assert {v["expect"] for v in VECTORS} == {"allow", "deny", "REJECT", "CONFIG-ERROR"}


def test_the_three_kinds_are_told_apart() -> None:
    assert parse_pattern("API.example.com.") == Exact("api.example.com")
    assert parse_pattern("*.Example.com") == Zone("example.com")
    found = parse_pattern(r"^(api|preview)\.x\.example$")
    assert isinstance(found, Regex)
    assert (found.expression, found.tail) == (r"(api|preview)\.x\.example", "x.example")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("*.github.io", "public suffix"),
        ("*.workers.dev", "public suffix"),
        ("*.s3.amazonaws.com", "public suffix"),
        ("*.co.uk", "public suffix"),
        ("*.amazonaws.com", "public suffix in it"),
        ("*.com", "top-level"),
        ("*.*.example.com", "whole first label"),
        ("*.192.0.2.1", "IP address"),
        ("*.app.localhost", "this host"),
        ("*.bücher.example", "ASCII"),
        ("*.dns.google", "DNS-over-HTTPS"),
        ("*.nextdns.io", "DNS-over-HTTPS"),
        ("regex:", "empty"),
        ("regex:" + "a" * 257, "longer than 256"),
        (r"regex:[a-z]+\.github\.io", "public suffix"),
        (r"regex:(a|b)\.amazonaws\.com", "public suffix in it"),
        (r"regex:.*\.nextdns\.io", "DNS-over-HTTPS"),
        (r"regex:[a-z]+\.bücher\.example", "no host name has"),
        (r"regex:[a-z ]+\.x\.example", "no host name has"),
        (r"regex:(?=a)[a-z]+\.x\.example", "lookaround"),
        (r"regex:(?<!a)b+\.x\.example", "lookaround"),
        (r"regex:(?i)[a-z]+\.x\.example", "lookaround, flags"),
        (r"regex:(?P<n>a)\.x\.example", "named group"),
        (r"regex:(a)\1\.x\.example", "back-reference"),
        (r"regex:(a|b){2}\.x\.example", "repeated group"),
        (r"regex:(a|b)*\.x\.example", "repeated group"),
        (r"regex:a*+\.x\.example", "repeat of a repeat"),
        (r"regex:a+?\.x\.example", "repeat of a repeat"),
        (r"regex:a*b*c*\.x\.example", "unbounded"),
        (r"regex:" + "a?" * 30 + r"\.x\.example", "too many ways"),
        (r"regex:" + "(a|b?)" * 20 + r"\.x\.example", "too many ways"),
        (r"regex:a{3,2}\.x\.example", "count"),
        (r"regex:a{999}\.x\.example", "count"),
        (r"regex:a{,3}\.x\.example", "count"),
        (r"regex:[^\n]+\.x\.example", "character class"),
        (r"regex:[a--z]+\.x\.example", "character class"),
        (r"regex:[z-a]+\.x\.example", "not a regular expression"),
        (r"regex:\S+\.x\.example", "escape other"),
        (r"regex:[a-z]+\.x\.example\$", "escape other"),
        (r"regex:a^b+\.x\.example", "first and the last"),
        (r"regex:" + "(" * 40 + "a" + ")" * 40 + r"\.x\.example", "nested deeper"),
        (r"regex:a)\.x\.example", "unmatched"),
        (r"regex:(a\.x\.example", "not closed"),
        (r"regex:+a\.x\.example", "nothing to repeat"),
        (r"regex:[a-z]+(\.x\.example)", "literal domain"),
        (r"regex:[a-z]+\.x\.example|", "literal domain"),
        (r"regex:[a-z]+\.-x\.example", "begins or ends with '-'"),
        (r"regex:[a-z]+\.127\.1", "number"),
        (r"regex:api\.x\.example", "one plain name"),
    ],
    ids=ascii,
)
def test_each_kind_of_bad_pattern_has_its_own_message(text: str, message: str) -> None:
    with pytest.raises(HostError) as caught:
        parse_pattern(text)
    assert message in caught.value.what


@pytest.mark.parametrize("endpoint", DOH_ENDPOINTS)
def test_a_doh_endpoint_is_accepted_when_it_is_forced(endpoint: str) -> None:
    with pytest.raises(HostError, match="DNS-over-HTTPS"):
        parse_pattern(endpoint)
    assert parse_pattern(endpoint, force=True) == Exact(endpoint)


def test_a_forced_zone_may_hold_a_doh_endpoint_and_no_public_suffix() -> None:
    assert parse_pattern("*.nextdns.io", force=True) == Zone("nextdns.io")
    with pytest.raises(HostError, match="public suffix"):
        parse_pattern("*.github.io", force=True)


@pytest.mark.parametrize(
    ("name", "suffix", "owner"),
    [
        ("example.com", "com", "example.com"),
        ("a.b.example.co.uk", "co.uk", "example.co.uk"),
        ("co.uk", "co.uk", None),
        ("me.github.io", "github.io", "me.github.io"),
        ("github.io", "github.io", None),
        ("www.ck", "ck", "www.ck"),
        ("a.www.ck", "ck", "www.ck"),
        ("b.a.ck", "a.ck", "b.a.ck"),
        ("x.nosuchtld", "nosuchtld", "x.nosuchtld"),
        ("a.xn--55qx5d.cn", "xn--55qx5d.cn", "a.xn--55qx5d.cn"),
    ],
)
def test_public_suffix_and_registrable_domain(name: str, suffix: str, owner: str | None) -> None:
    assert (public_suffix(name), registrable(name)) == (suffix, owner)


def test_the_list_has_both_sections_and_says_which_it_is() -> None:
    text = DATA.read_text(encoding="ascii")
    assert "Mozilla Public" in text.splitlines()[0]
    assert "// VERSION:" in text
    assert {"com", "co.uk", "github.io", "s3.amazonaws.com", "workers.dev"} <= set(text.split())


@pytest.mark.parametrize(
    "text",
    [
        r"regex:.*.*\.x\.example",
        r"regex:[a-z0-9.-]*[a-z0-9.-]*[a-z]?[a-z]?[a-z]?\.x\.example",
        r"regex:" + "a?" * 19 + r"\.x\.example",
        r"regex:" + "(a|b|a)" * 12 + r"\.x\.example",
    ],
)
def test_no_accepted_expression_is_slow_on_a_name_made_for_it(text: str) -> None:
    pattern = parse_pattern(text)
    label = "a" * 63
    worst = [
        f"{'.'.join([label] * 3)}.{'a' * 40}.x.exampl",
        f"{'a' * 40}.y.x.example",
        "a" * 63 + ".x.example",
    ]
    began = time.process_time()
    for name in worst:
        pattern.matches(name)
        assert isinstance(pattern, Regex)
        pattern.compiled.fullmatch(name)
    # A guard against minutes, not a measurement: exponential expressions take those on 40 characters.
    assert time.process_time() - began < 20
    assert MAX_WAYS == 1_000_000


PIECES = (
    "api", "x", "a", "-", "_", ".", "..", "*", "*.", "example", "com", "co.uk", "github.io", "192.0.2.1", "0x7f", "127", "1",
    "localhost", "xn--bcher-kva", "xn--", "\u0430", "\u3002", "\u212a", "ß", "\x00", "\n", " ", "\t", ":443", "@", "/", "//",
    "https://", "[::1]", "%61", "regex:", "^", "$", "\\.", "\\.x\\.example", "\\.example\\.com", "\\.com", "(", ")", "|", "?", "+",
    "{1,3}", "{2}", "{", "[a-z]", "[a-z0-9-]+", "[^.]", ".*", "(?!", "(?:", "\\1", "\\d", "\\w", "\\S", "a" * 64, "dns.google",
    "cloudflare-dns.com", "host.docker.internal", "arpa",
)  # fmt: skip
STRICT_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
PROBES = (
    "evil.example", "evilx.example", "x.example", "api.x.example.evil.example", "com", "example.com", "evil.com", "evil.github.io",
    "evil.co.uk", "a.b.evil.example", "localhost", "dns.google", "x.cloudflare-dns.com",
)  # fmt: skip


def strictly_a_name(name: str) -> bool:
    labels = name.split(".")
    return (
        len(name) <= 253
        and len(labels) > 1
        and all(STRICT_LABEL.fullmatch(label) for label in labels)
        and not is_address(name)
        and not re.fullmatch(r"[0-9]+|0x[0-9a-f]*", labels[-1])
        and labels[-1] not in ("localhost", "arpa", "onion")
    )


def check_accepted(text: str) -> str:
    """Judge what was accepted by other means than the parser's own."""
    pattern = parse_pattern(text)
    if isinstance(pattern, Exact):
        assert strictly_a_name(pattern.name), text
        assert pattern.name == text.lower().removesuffix("."), text
        assert not any(("." + pattern.name).endswith("." + doh) for doh in DOH_ENDPOINTS), text
        return "exact"
    owner = pattern.suffix if isinstance(pattern, Zone) else pattern.tail
    assert strictly_a_name(owner), text
    assert registrable(owner) is not None, text
    for probe in PROBES:
        if pattern.matches(probe):
            assert probe.endswith("." + owner), (text, probe)
    if isinstance(pattern, Zone):
        assert text.lower().removesuffix(".") == "*." + owner
        return "zone"
    # The full match is bound to the tail by the expression itself, not only by how it is asked.
    for probe in PROBES:
        if pattern.compiled.fullmatch(probe):
            assert probe.endswith("." + owner), (text, probe)
    return "regex"


def test_whatever_stands_in_an_entry_is_refused_or_exactly_what_it_says() -> None:
    source = random.Random(20260101)
    kinds: dict[str, int] = {}
    tracemalloc.start()
    try:
        parse_pattern("*.example.com")  # what is loaded once
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(INPUTS):
            text = "".join(source.choice(PIECES) for _ in range(source.randint(1, 9)))
            if source.random() < 0.3:
                text = (
                    source.choice(("regex:", "*.", "^"))
                    + text
                    + source.choice(("\\.x\\.example", ".example", "$"))
                )
            try:
                kind = check_accepted(text)
            except HostError as error:
                assert error.what
                kind = "refused"
            kinds[kind] = kinds.get(kind, 0) + 1
        grown = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert set(kinds) == {"refused", "exact", "zone", "regex"}, kinds
    assert min(kinds.values()) > INPUTS // 1000, kinds
    assert grown < 16 << 20


@pytest.mark.parametrize("unit", ["a", ".", "*.", "(", "[", "a?", "(a|", "\\.", "{1", "\u0430", "xn--"])
@pytest.mark.parametrize("prefix", ["", "*.", "regex:", "^"])
def test_a_huge_entry_is_refused(prefix: str, unit: str) -> None:
    with pytest.raises(HostError):
        parse_pattern(prefix + unit * (65536 // len(unit)) + ("$" if prefix == "^" else ""))
