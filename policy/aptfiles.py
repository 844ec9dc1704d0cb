"""Parsers of apt's configuration: apt.conf(5) and sources.list(5), both of its formats."""

from __future__ import annotations

import re
from collections.abc import Iterator

from policy.records import dataclass

# Comments; a quoted text; a scope's braces and the semicolon; a word.
_TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|#[^\n]*|"([^"]*)"|([{};])|([^\s{};"]+)', re.DOTALL)
_OPTIONS = re.compile(r"\[([^\]]*)\]")
_ARCHIVE_KEYRING = "debian-archive"


@dataclass(frozen=True)
class Source:
    """One archive: ``suite`` is as written ("bookworm"), ``options`` has lower-case keys."""

    types: frozenset[str]
    uri: str
    suite: str
    components: tuple[str, ...]
    signed_by: str = ""

    @property
    def is_distribution(self) -> bool:
        """Whether this is the distribution's own archive, not a third party's repository for it."""
        return (
            "deb" in self.types
            and "main" in self.components
            and (not self.signed_by or _ARCHIVE_KEYRING in self.signed_by)
            and self.uri.partition(":")[0] in {"http", "https"}
        )


def settings(text: str) -> dict[str, str]:
    """Return ``scope::name`` (lower case) -> value of an apt.conf; elements of lists are left out."""
    found: dict[str, str] = {}
    scopes: list[str] = []
    words: list[str] = []
    value: str | None = None
    for match in _TOKEN.finditer(text):
        quoted, mark, word = match.groups()
        if quoted is not None:
            value = quoted
        elif word is not None:
            words.append(word)
        elif mark == "{":
            scopes.append("::".join(words))
            words, value = [], None
        elif mark in {"}", ";"}:
            if words and value is None and len(words) > 1:
                value = words.pop()
            name = "::".join(part for part in (*scopes, *words) if part).lower()
            if words and value is not None and not name.endswith("::"):
                found[name] = value
            words, value = [], None
            if mark == "}" and scopes:
                scopes.pop()
    return found


def one_line_sources(text: str) -> Iterator[Source]:
    """Yield the archives of a file in the one-line format (``deb [options] uri suite components``)."""
    for line in text.splitlines():
        kind, *rest_of_line = line.partition("#")[0].split(None, 1)[:2] or [""]
        if kind not in {"deb", "deb-src"} or not rest_of_line:
            continue
        rest = rest_of_line[0]
        options = _OPTIONS.match(rest.strip())
        signed = ""
        if options:
            rest = rest.strip()[options.end() :]
            for option in options[1].split():
                key, _, value = option.partition("=")
                signed = value if key.lower() == "signed-by" else signed
        fields = rest.split()
        if len(fields) >= 2:
            yield Source(frozenset({kind}), fields[0], fields[1], tuple(fields[2:]), signed)


def deb822_sources(text: str) -> Iterator[Source]:
    """Yield the archives of a .sources file: one for each URI and suite of each enabled stanza."""
    for stanza in _stanzas(text):
        if stanza.get("enabled", "yes").lower() in {"no", "false", "0", "off", "without", "disable"}:
            continue
        types = frozenset(stanza.get("types", "").split())
        components = tuple(stanza.get("components", "").split())
        for uri in stanza.get("uris", "").split():
            for suite in stanza.get("suites", "").split():
                yield Source(types, uri, suite, components, stanza.get("signed-by", ""))


def _stanzas(text: str) -> Iterator[dict[str, str]]:
    stanza: dict[str, str] = {}
    key = ""
    for line in [*text.splitlines(), ""]:
        if line.startswith("#"):
            continue
        if not line.strip():
            if stanza:
                yield stanza
            stanza, key = {}, ""
        elif line[0] in " \t":
            if key:
                stanza[key] += " " + line.strip()
        else:
            name, separator, value = line.partition(":")
            key = name.strip().lower() if separator else ""
            if key:
                stanza[key] = value.strip()
