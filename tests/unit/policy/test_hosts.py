from __future__ import annotations

import json
import string
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from policy.hosts import DOH_ENDPOINTS, HostError, canonical_wire_name, match_exact, parse_host

VECTORS = json.loads((Path(__file__).parents[2] / "data" / "host-vectors.json").read_text())["patterns"]
REJECTED = [v for v in VECTORS if v["expect"] == "REJECT"]


@pytest.mark.parametrize("vector", REJECTED, ids=lambda v: ascii(v["host"]))
def test_wire_name_that_no_pattern_may_see_is_rejected(vector: dict[str, str]) -> None:
    with pytest.raises(HostError):
        canonical_wire_name(vector["host"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("api.example.com", "api.example.com"),
        ("API.Example.COM", "api.example.com"),
        ("api.example.com.", "api.example.com"),
        ("a.b.c.example", "a.b.c.example"),
        ("_service.example.com", "_service.example.com"),
        ("1password.example", "1password.example"),
        ("3com.example", "3com.example"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("a" * 63 + ".example", "a" * 63 + ".example"),
        ("notdns.google.example", "notdns.google.example"),
    ],
)
def test_domain_name_is_accepted_in_canonical_form(text: str, expected: str) -> None:
    assert parse_host(text) == expected


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "empty", "domain name"),
        ("  ", "empty", "domain name"),
        (" api.example.com", "spaces around", "remove"),
        ("api example.com", "space or control", "one name"),
        ("api.example.com\n", "spaces around", "remove"),
        ("api\x00.example.com", "control character", "one name"),
        ("api.example.com\x7f", "control character", "one name"),
        ("192.0.2.1", "an IP address", "name that resolves"),
        ("192.0.2.1:443", "IP address with a port", "name that resolves"),
        ("2001:db8::1", "an IP address", "name that resolves"),
        ("[2001:db8::1]", "an IP address", "name that resolves"),
        ("[2001:db8::1]:443", "IP address with a port", "name that resolves"),
        ("fe80::1%eth0", "an IP address", "name that resolves"),
        ("192.0.2.0/24", "CIDR", "names you need"),
        ("2001:db8::/32", "CIDR", "names you need"),
        ("192.0.2.0/255.255.255.0", "CIDR", "names you need"),
        ("https://api.example.com", "a URL", "host alone"),
        ("HTTPS://api.example.com/v1", "a URL", "host alone"),
        ("//api.example.com", "a URL", "host alone"),
        ("api.example.com/v1", "path", "host alone"),
        ("user@api.example.com", "user name", "host alone"),
        ("api.example.com:8443", "a port", "{host: api.example.com, ports: [8443]}"),
        ("api.example.com:", "a port", "ports: [443]"),
        ("localhost", "single label", "host_services"),
        ("corral-host", "single label", "host_services"),
        ("intranet", "single label", "full domain name"),
        ("app.localhost", "this host", "host_services"),
        ("host.docker.internal", "this host", "host_services"),
        ("127.1", "number", "name that resolves"),
        ("0x7f.1", "number", "name that resolves"),
        ("example.0x7f", "number", "name that resolves"),
        ("10.0.0.256", "number", "name that resolves"),
        ("1.0.0.127.in-addr.arpa", "never resolved", "remove"),
        ("bücher.example", "ASCII", "xn--bcher-kva.example"),
        ("straße.example", "ASCII", "xn--strae-oqa.example"),
        ("\u0430pi.example.com", "ASCII", "xn--pi-6kc.example.com"),
        ("\uff41pi.example.com", "ASCII", "if you mean api.example.com"),
        ("api\u3002example.com", "ASCII", "if you mean api.example.com"),
        ("api\u00ad.example.com", "ASCII", "U+00AD"),
        ("api\u200b.example.com", "ASCII", "U+200B"),
        ("*.example.com", "whole first label", "one by one"),
        ("*", "whole first label", "one by one"),
        ("api.*.com", "whole first label", "one by one"),
        ("**.example.com", "whole first label", "one by one"),
        (".example.com", "begin with a dot", "one by one"),
        ("(api|www).example.com", "characters of a regular expression", "one by one"),
        ("api.example.com..", "empty label", "domain name"),
        ("api..example.com", "empty label", "domain name"),
        (".", "begin with a dot", "one by one"),
        ("a" * 64 + ".example", "label longer", ""),
        ("a." * 126 + "example", "longer than 253", ""),
        ("api,www.example.com", "character that no host name has", "letters"),
        ("-api.example.com", "begins or ends with '-'", ""),
        ("api.example-", "begins or ends with '-'", ""),
        ("xn--\x61\x61\x61\x61\x61\x61999999999.example", "does not decode", ""),
        ("dns.google", "DNS-over-HTTPS", "remove"),
        ("DNS.Google.", "DNS-over-HTTPS", "remove"),
        ("mozilla.cloudflare-dns.com", "DNS-over-HTTPS", "remove"),
        ("abc123.dns.nextdns.io", "DNS-over-HTTPS", "remove"),
    ],
    ids=ascii,
)
def test_each_kind_of_bad_entry_has_its_own_message(text: str, message: str, hint: str) -> None:
    with pytest.raises(HostError) as caught:
        parse_host(text)
    assert message in caught.value.what
    assert hint in (caught.value.fix or "")


@pytest.mark.parametrize("endpoint", DOH_ENDPOINTS)
def test_every_known_doh_endpoint_is_a_valid_name_and_refused(endpoint: str) -> None:
    assert canonical_wire_name(endpoint) == endpoint
    with pytest.raises(HostError, match="DNS-over-HTTPS"):
        parse_host(endpoint)


@pytest.mark.parametrize(
    "raw", ["127.1", "192.0.2.1", "0x7f.0.0.1", "0", "a" * 254, "a" * 64 + ".b", ".", "", "[::1]"]
)
def test_wire_name_that_would_be_read_as_an_address_is_rejected(raw: str) -> None:
    with pytest.raises(HostError):
        canonical_wire_name(raw)


LABEL = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=63)


@given(st.lists(LABEL, min_size=1, max_size=4), st.sampled_from(["example", "com", "dev"]))
def test_what_is_accepted_compares_equal_to_itself_on_the_wire(labels: list[str], last: str) -> None:
    name = ".".join([*labels, last])
    if len(name) > 253:
        return
    try:
        parsed = parse_host(name)
    except HostError:
        return
    assert match_exact(parsed, canonical_wire_name(name.upper() + "."))


@given(st.text())
@example("K\u212a.example")  # the Kelvin sign lower-cases to an ASCII k
@example("xn--99999999999999999999999999999999999999999999.example")
@example("regex:" + "(" * 5000)
def test_any_text_is_either_a_canonical_name_or_refused(text: str) -> None:
    try:
        name = parse_host(text)
    except HostError as error:
        assert error.what
    else:
        assert canonical_wire_name(name) == name
        assert "." in name


@given(st.text())
def test_any_wire_name_is_canonical_or_rejected(text: str) -> None:
    try:
        name = canonical_wire_name(text)
    except HostError:
        return
    assert canonical_wire_name(name) == name
    assert set(name) <= set(string.ascii_lowercase + string.digits + "-_.")
