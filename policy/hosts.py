"""Host names: what an allowlist entry may be, and how a name from the wire is compared with it."""

from __future__ import annotations

import ipaddress
import re
import unicodedata

MAX_NAME = 253
MAX_LABEL = 63

_LABEL = re.compile(r"[a-z0-9_-]+")
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
_PORT = re.compile(r"(.+):([0-9]*)")
_METACHARACTERS = frozenset("^$()[]{}|\\+?")

# Public resolvers that answer DNS over HTTPS: allowing one opens DNS again, inside TLS. A name below one of
# these counts too (per-account subdomains such as <id>.dns.nextdns.io).
DOH_ENDPOINTS = (
    "dns.google",
    "dns.google.com",
    "8888.google",
    "cloudflare-dns.com",  # and mozilla., security., family. below it
    "one.one.one.one",
    "cloudflare-gateway.com",
    "dns.quad9.net",
    "dns9.quad9.net",
    "dns10.quad9.net",
    "dns11.quad9.net",
    "doh.opendns.com",
    "doh.familyshield.opendns.com",
    "doh.umbrella.com",
    "dns.umbrella.com",
    "dns.adguard.com",
    "dns-family.adguard.com",
    "dns-unfiltered.adguard.com",
    "adguard-dns.com",
    "dns.nextdns.io",
    "doh.cleanbrowsing.org",
    "freedns.controld.com",
    "dns.controld.com",
    "dns.mullvad.net",  # adblock., base., extended., family., all. below it
    "doh.mullvad.net",
    "dns0.eu",
    "dns4all.eu",
    "joindns4.eu",
    "doh.dns.sb",
    "doh.li",
    "dns.alidns.com",
    "doh.pub",
    "doh.360.cn",
    "dns.twnic.tw",
    "public.dns.iij.jp",
    "dns.switch.ch",
    "doh.ffmuc.net",
    "dot.ffmuc.net",
    "doh.applied-privacy.net",
    "dns.digitale-gesellschaft.ch",
    "doh.libredns.gr",
    "dnsforge.de",
    "doh.tiar.app",
    "doh.tiarap.org",
    "doh.powerdns.org",
    "odvr.nic.cz",
    "ordns.he.net",
    "doh.xfinity.com",
    "dns.comss.one",
    "ada.openbld.net",
    "sky.rethinkdns.com",
    "max.rethinkdns.com",
    "dns.rethinkdns.com",
    "wikimedia-dns.org",
    "dns.decloudus.com",
    "doh.seby.io",
    "doh.crypto.sx",
    "kaitain.restena.lu",
)


DOH = "a public DNS-over-HTTPS endpoint: allowing it would open DNS again"


class HostError(ValueError):
    """A host entry is refused. ``what`` never contains the entry itself; ``fix`` may be None."""

    def __init__(self, what: str, fix: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix


def parse_host(text: str, *, force: bool = False) -> str:
    """Return the canonical name of an exact allowlist entry: lower case, no final dot.

    Args:
        text: the entry as written.
        force: accept a public DNS-over-HTTPS endpoint.

    Raises:
        HostError: anything but a bare, absolute domain name of at least two labels.
    """
    _refuse_foreign_characters(text)
    _refuse_addresses_and_urls(text)
    _refuse_patterns(text)
    name = text.removesuffix(".").lower()
    refuse_bad_labels(text, name)
    _refuse_bad_zones(name)
    if not force and any(name == endpoint or name.endswith("." + endpoint) for endpoint in DOH_ENDPOINTS):
        raise HostError(DOH, "remove the entry; or, to have it all the same, add force: true to it")
    return name


def _refuse_foreign_characters(text: str) -> None:
    if not text.strip():
        raise HostError("an empty host name", "write a domain name such as api.example.com")
    if text != text.strip():
        raise HostError("spaces around a host name", "remove them")
    if not text.isascii():
        raise HostError("a host name must be ASCII", _ascii_hint(text))
    if any(not char.isprintable() or char == " " for char in text):
        raise HostError("a space or control character in a host name", "write one name per entry")


def _ascii_hint(text: str) -> str:
    """Say how a non-ASCII name is written in ASCII."""
    folded = unicodedata.normalize("NFKC", text).lower().replace("\u3002", ".")
    if folded.isascii():
        return f"if you mean {folded}, type it in ASCII" if folded.isprintable() else "type it in ASCII"
    invisible = [char for char in folded if unicodedata.category(char)[0] in "CMZ" and not char.isascii()]
    if invisible:
        return f"remove U+{ord(invisible[0]):04X}"
    return f"if you mean exactly this name, write its A-label: {to_a_label(folded)}"


def to_a_label(name: str) -> str:
    """Return ``name`` with each non-ASCII label in its ASCII form (xn--...); for display only."""
    labels = []
    for label in unicodedata.normalize("NFC", name).lower().split("."):
        labels.append(label if label.isascii() else "xn--" + label.encode("punycode").decode("ascii"))
    return ".".join(labels)


def _refuse_addresses_and_urls(text: str) -> None:
    if _URL.match(text) or text.startswith("//"):
        raise HostError("a URL, not a domain name", "write the host alone: api.example.com")
    if is_address(text):
        raise HostError("an IP address, not a domain name", "write the name that resolves to it")
    head, slash, tail = text.partition("/")
    if slash:
        if is_address(head) and (tail.isdecimal() or is_address(tail)):
            raise HostError("a CIDR block, not a domain name", "write the names you need, one per entry")
        raise HostError("a host with a path, not a domain name", "write the host alone: api.example.com")
    if "@" in text:
        raise HostError("a user name before the host", "write the host alone: api.example.com")
    port = _PORT.fullmatch(text)
    if port:
        if is_address(port[1]):
            raise HostError(
                "an IP address with a port, not a domain name", "write the name that resolves to it"
            )
        raise HostError("a port in the host name", f"write {{host: {port[1]}, ports: [{port[2] or 443}]}}")


def is_address(text: str) -> bool:
    """Say whether ``text`` is an IPv4 or IPv6 address, in brackets or with a zone id too."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        ipaddress.ip_address(bare)
    except ValueError:
        return False
    return True


def _refuse_patterns(text: str) -> None:
    if "*" in text:
        raise HostError("'*' may only be the whole first label", "list the names one by one")
    if text.startswith("."):
        raise HostError("a name cannot begin with a dot", "list the names below it one by one")
    if _METACHARACTERS.intersection(text):
        raise HostError(
            "characters of a regular expression in a host name",
            "list the names one by one; a regular expression begins with regex: or stands between ^ and $",
        )


def refuse_bad_labels(text: str, name: str) -> None:
    """Refuse a name whose labels no host name has; ``text`` is what was written.

    Raises:
        HostError: which rule it breaks.
    """
    if not name or name.startswith(".") or name.endswith(".") or ".." in name:
        raise HostError("an empty label (two dots in a row)", "write a domain name such as api.example.com")
    if len(name) > MAX_NAME:
        raise HostError(f"longer than {MAX_NAME} characters")
    labels = name.split(".")
    if len(labels) == 1:
        raise HostError("a single label, not a domain name", _single_label_hint(name))
    for label in labels:
        if len(label) > MAX_LABEL:
            raise HostError(f"a label longer than {MAX_LABEL} characters")
        if not _LABEL.fullmatch(label):
            raise HostError("a character that no host name has", "use letters, digits, '-', '_' and dots")
        if label.startswith("-") or label.endswith("-"):
            raise HostError("a label begins or ends with '-'")
        if label.startswith("xn--"):
            try:
                label[4:].encode("ascii").decode("punycode")
            except (UnicodeError, ValueError, OverflowError) as error:
                raise HostError("an A-label (xn--) that does not decode") from error
    if is_numeric_label(labels[-1]):
        raise HostError(
            "the last label is a number, so programs read it as an IP address",
            "write the name that resolves to it",
        )


def _single_label_hint(name: str) -> str:
    if name in {"localhost", "corral-host"}:
        return "declare a service of this host under host_services"
    return "write the full domain name"


def is_numeric_label(label: str) -> bool:
    """Say whether a last label makes C libraries parse the whole name as an IPv4 address."""
    return bool(re.fullmatch(r"[0-9]+|0[xX][0-9a-fA-F]*", label))


def _refuse_bad_zones(name: str) -> None:
    if name.endswith(".localhost") or name in {"host.docker.internal", "gateway.docker.internal"}:
        raise HostError("a name of this host", "declare a service of this host under host_services")
    if name.endswith((".arpa", ".onion")):
        raise HostError("a name that is never resolved to a public address", "remove the entry")


def canonical_wire_name(raw: str) -> str:
    """Return a name that came from outside (CONNECT, SNI, Host) in the form entries are compared in.

    Nothing is decoded or mapped: what is not already a plain ASCII name is refused.

    Raises:
        HostError: empty, too long, an empty label, a character outside [A-Za-z0-9_-], an IP address.
    """
    if not raw.isascii():
        raise HostError("a name must be ASCII")
    name = raw.removesuffix(".").lower()
    if not name or len(name) > MAX_NAME:
        raise HostError("an empty name or a name that is too long")
    labels = name.split(".")
    if any(len(label) > MAX_LABEL or not _LABEL.fullmatch(label) for label in labels):
        raise HostError("a label that no host name has")
    if is_numeric_label(labels[-1]):
        raise HostError("an IP address, not a name")
    return name


def match_exact(pattern: str, wire_name: str) -> bool:
    """Say whether ``wire_name`` (from `canonical_wire_name`) is the name ``pattern`` (from `parse_host`)."""
    return pattern == wire_name
