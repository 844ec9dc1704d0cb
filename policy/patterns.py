"""Entries of an allowlist that stand for many names: zones (``*.example.com``) and regular expressions.

A regular expression is parsed here, by a grammar of what can be judged: it must end in a literal
``.registrable.tld``, so that it cannot match outside one registered domain, and it must have few enough ways
to match that no name makes it slow. Python's own syntax is larger; everything else of it is refused.
"""

from __future__ import annotations

import re
from dataclasses import field
from functools import lru_cache

from policy.hosts import DOH, DOH_ENDPOINTS, HostError, parse_host, refuse_bad_labels
from policy.records import dataclass
from policy.suffixes import beneath, public_suffix

MAX_REGEX = 256
MAX_UNBOUNDED = 2
# Ways to match one name, counted as if every choice were free: a million take about a tenth of a second.
MAX_WAYS = 1_000_000
MAX_NAME = 253
MAX_NESTING = 8
_PREFIX = "regex:"

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
_ESCAPED_LITERALS = frozenset(".-_")
_ESCAPED_CLASSES = frozenset("dw")
_COUNT = re.compile(r"\{([0-9]{1,3})(?:(,)([0-9]{1,3})?)?\}")
_CLASS = re.compile(r"\[\^?(?:[A-Za-z0-9_.-]|\\[.\-_dw])+\]")

ONE_BY_ONE = "list the names one by one"


@dataclass(frozen=True)
class Exact:
    """One name, in the form of `policy.hosts.parse_host`."""

    name: str

    @property
    def text(self) -> str:
        """The entry in its one form, which `parse_pattern` reads."""
        return self.name

    def matches(self, wire_name: str) -> bool:
        """Say whether a name from `policy.hosts.canonical_wire_name` is meant."""
        return wire_name == self.name


@dataclass(frozen=True)
class Zone:
    """Every name below ``suffix``, at any depth, and never ``suffix`` itself."""

    suffix: str

    @property
    def text(self) -> str:
        """The entry in its one form, which `parse_pattern` reads."""
        return "*." + self.suffix

    def matches(self, wire_name: str) -> bool:
        """Say whether a name from `policy.hosts.canonical_wire_name` is meant."""
        return wire_name.endswith("." + self.suffix)


@dataclass(frozen=True)
class Regex:
    """``expression`` without anchors; ``tail`` is the domain that every match lies below."""

    expression: str
    tail: str
    compiled: re.Pattern[str] = field(compare=False, repr=False)

    @property
    def text(self) -> str:
        """The entry in its one form, which `parse_pattern` reads."""
        return _PREFIX + self.expression

    def matches(self, wire_name: str) -> bool:
        """Say whether a name from `policy.hosts.canonical_wire_name` is meant."""
        return wire_name.endswith("." + self.tail) and self.compiled.fullmatch(wire_name) is not None


Pattern = Exact | Zone | Regex


def is_regex(text: str) -> bool:
    """Say whether an entry is written as a regular expression: ``regex:…``, or ``^…$``."""
    return text.startswith(_PREFIX) or (text.startswith("^") and text.endswith("$"))


def is_pattern(text: str) -> bool:
    """Say whether an entry, right or wrong, is written as what stands for many names."""
    return is_regex(text) or text.startswith("*.")


def parse_pattern(text: str, *, force: bool = False) -> Pattern:
    """Read an allowlist entry.

    Args:
        text: the entry's host as written.
        force: accept public DNS-over-HTTPS endpoints and what stands for one.

    Raises:
        HostError: it is none of the three kinds, or wider than one registered domain.
    """
    if is_regex(text):
        return _regex(text.removeprefix(_PREFIX), force)
    if text.startswith("*."):
        return _zone(text.removeprefix("*."), force)
    return Exact(parse_host(text, force=force))


@lru_cache(maxsize=4096)
def declared(text: str) -> Pattern:
    """Read ``text`` of a pattern, as a declaration carries it: judged when the policy was loaded.

    Raises:
        HostError: it is none.
    """
    return parse_pattern(text, force=True)


def _zone(text: str, force: bool) -> Zone:
    if "*" in text:
        raise HostError("'*' may only be the whole first label", ONE_BY_ONE)
    if "." not in text.strip("."):
        raise HostError("a zone as wide as a top-level domain", ONE_BY_ONE)
    suffix = parse_host(text, force=True)
    _refuse_wide("zone", suffix)
    zone = Zone(suffix)
    _refuse_doh(zone, suffix, force)
    return zone


def _refuse_wide(kind: str, suffix: str) -> None:
    if public_suffix(suffix) == suffix:
        raise HostError(
            f"a {kind} on a public suffix: anybody can register a name below {suffix}", ONE_BY_ONE
        )
    shared = beneath(suffix)
    if shared:
        raise HostError(
            f"a {kind} with a public suffix in it: anybody can register a name below {shared[0]}", ONE_BY_ONE
        )


def _refuse_doh(pattern: Zone | Regex, suffix: str, force: bool) -> None:
    if force:
        return
    found = [name for name in DOH_ENDPOINTS if pattern.matches(name)]
    if found or any(suffix == name or suffix.endswith("." + name) for name in DOH_ENDPOINTS):
        raise HostError(f"{DOH} ({(found or [suffix])[0]})", f"{ONE_BY_ONE}; or add force: true to the entry")


def _regex(text: str, force: bool) -> Regex:
    if not text:
        raise HostError("an empty regular expression", ONE_BY_ONE)
    if len(text) > MAX_REGEX:
        raise HostError(f"a regular expression longer than {MAX_REGEX} characters", ONE_BY_ONE)
    if not text.isascii() or not text.isprintable() or " " in text:
        raise HostError("a regular expression with a character that no host name has", "write it in ASCII")
    bare = text.removeprefix("^")
    if bare.endswith("$") and not bare.endswith("\\$"):
        bare = bare[:-1]
    shape = _Parser(bare).run()
    if shape.plain:
        name = bare.replace("\\", "")
        raise HostError("a regular expression that is one plain name", f"write it as one: {name}")
    _, dot, tail = shape.literal.partition(".")
    if not dot or not tail:
        raise HostError(
            "a regular expression that does not end in a literal domain",
            r"end it like this: \.example\.com",
        )
    tail = tail.lower()
    refuse_bad_labels(tail, tail)
    _refuse_wide("regular expression", tail)
    try:
        compiled = re.compile(bare, re.ASCII)
    except (re.error, OverflowError, RecursionError) as error:
        raise HostError(f"not a regular expression: {error}", ONE_BY_ONE) from error
    pattern = Regex(bare, tail, compiled)
    _refuse_doh(pattern, tail, force)
    return pattern


@dataclass(frozen=True)
class _Shape:
    """Of a piece: the literal text it ends in, whether it is that text and nothing else, ways to match."""

    literal: str = ""
    plain: bool = True
    ways: int = 1


class _Parser:
    """Recursive descent over the supported syntax; every refusal is a HostError."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.unbounded = 0

    def run(self) -> _Shape:
        shape = self.alternatives(0)
        if self.at < len(self.text):
            raise HostError("not a regular expression: an unmatched ')'", ONE_BY_ONE)
        return shape

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def alternatives(self, depth: int) -> _Shape:
        if depth > MAX_NESTING:
            raise HostError(f"groups nested deeper than {MAX_NESTING}", ONE_BY_ONE)
        branches = [self.sequence(depth)]
        while self.peek() == "|":
            self.at += 1
            branches.append(self.sequence(depth))
        if len(branches) == 1:
            return branches[0]
        return _Shape(plain=False, ways=self.counted(sum(branch.ways for branch in branches)))

    def sequence(self, depth: int) -> _Shape:
        literal, plain, ways = "", True, 1
        while self.peek() not in ("", "|", ")"):
            part = self.repeated(self.atom(depth))
            literal = literal + part.literal if part.plain else part.literal
            plain = plain and part.plain
            ways = self.counted(ways * part.ways)
        return _Shape(literal, plain, ways)

    def atom(self, depth: int) -> tuple[_Shape, bool]:
        """Return the next piece, and whether it is a group."""
        char = self.peek()
        if char == "(":
            return self.group(depth), True
        self.at += 1
        if char in _PLAIN:
            return _Shape(char), False
        if char == "\\":
            return self.escape(), False
        if char == ".":
            return _Shape(plain=False), False
        if char == "[":
            match = _CLASS.match(self.text, self.at - 1)
            if match is None or "--" in match[0]:
                raise HostError(
                    "a character class with more than letters, digits, '-', '_' and '.'", ONE_BY_ONE
                )
            self.at = match.end()
            return _Shape(plain=False), False
        if char in "^$":
            raise HostError("'^' and '$' may only be the first and the last character", "remove it")
        if char in "*+?{":
            raise HostError("not a regular expression: nothing to repeat", ONE_BY_ONE)
        raise HostError("a character that no host name has", "use letters, digits, '-', '_' and '\\.'")

    def group(self, depth: int) -> _Shape:
        self.at += 1
        if self.peek() == "?":
            if not self.text.startswith("?:", self.at):
                raise HostError("lookaround, flags or a named group", "use plain groups: (a|b)")
            self.at += 2
        inner = self.alternatives(depth + 1)
        if self.peek() != ")":
            raise HostError("not a regular expression: a group is not closed", ONE_BY_ONE)
        self.at += 1
        # What stands in a group is never taken for the tail: it is shown where it is read.
        return _Shape(plain=False, ways=inner.ways)

    def escape(self) -> _Shape:
        char = self.peek()
        self.at += 1
        if char in _ESCAPED_LITERALS and char:
            return _Shape(char)
        if char in _ESCAPED_CLASSES and char:
            return _Shape(plain=False)
        if char.isdigit():
            raise HostError("a back-reference", "use plain groups: (a|b)")
        raise HostError("an escape other than \\. \\- \\_ \\d \\w", ONE_BY_ONE)

    def repeated(self, found: tuple[_Shape, bool]) -> _Shape:
        shape, is_group = found
        char = self.peek()
        if char not in ("*", "+", "?", "{") or not char:
            return shape
        low, high = self.count(char)
        if self.peek() and self.peek() in "*+?{":
            raise HostError("a repeat of a repeat", "repeat once")
        if is_group and (low, high) != (0, 1):
            raise HostError("a repeated group", "repeat single characters: [a-z0-9-]+")
        if high is None:
            self.unbounded += 1
            if self.unbounded > MAX_UNBOUNDED:
                raise HostError(f"more than {MAX_UNBOUNDED} unbounded repeats", ONE_BY_ONE)
        most = MAX_NAME if high is None else high
        return _Shape(plain=False, ways=self.counted(shape.ways * max(1, most - low + 1)))

    def count(self, char: str) -> tuple[int, int | None]:
        if char != "{":
            self.at += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        match = _COUNT.match(self.text, self.at)
        if match is None:
            raise HostError("not a count: write {2} or {1,8}", ONE_BY_ONE)
        self.at = match.end()
        low = int(match[1])
        high = low if match[2] is None else int(match[3]) if match[3] else None
        if high is not None and (high < low or high > MAX_NAME):
            raise HostError(f"a count that is empty or over {MAX_NAME}", ONE_BY_ONE)
        return low, high

    def counted(self, ways: int) -> int:
        if ways > MAX_WAYS:
            raise HostError("a regular expression with too many ways to match one name", ONE_BY_ONE)
        return ways
