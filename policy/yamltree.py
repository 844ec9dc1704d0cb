"""YAML text to plain values, with the position of every key and value.

A deliberately small YAML: one document of mappings, lists and scalars of the YAML 1.2 core schema. Anchors,
aliases, tags, merge keys and directives are refused, so a document is never larger than its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.events import (
    AliasEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
)
from ruamel.yaml.reader import ReaderError

from policy.problems import Location, Problem, show
from policy.records import dataclass

MAX_DEPTH = 20

_DIRECTIVE = re.compile(r"\ufeff?(?:[ \t]*(?:#[^\n]*)?\r?\n)*%")
# Not "~": here that is the home directory.
_NULL = frozenset({"", "null", "Null", "NULL"})
_TRUE = frozenset({"true", "True", "TRUE"})
_FALSE = frozenset({"false", "False", "FALSE"})
_INT = re.compile(r"[-+]?[0-9]{1,18}|0o[0-7]{1,18}|0x[0-9a-fA-F]{1,15}")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)


@dataclass(frozen=True)
class Mark:
    """1-based position of a node, and its text when it is a scalar."""

    line: int
    column: int
    text: str | None = None


@dataclass
class Document:
    """``value`` is made of dict, list, str, int, float, bool and None.

    ``marks`` places values and ``keys`` places the keys of mappings, both by location.
    """

    value: Any = None
    marks: dict[Location, Mark] = field(default_factory=dict)
    keys: dict[Location, Mark] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def place(self, at: Location) -> tuple[Location, Mark]:
        """Return the nearest existing location at or above ``at`` and its position."""
        while at and at not in self.marks:
            at = at[:-1]
        return at, self.marks.get(at, Mark(1, 1))


@dataclass
class _Frame:
    """A collection being filled; ``key`` is the mapping key whose value comes next."""

    at: Location
    target: dict[str, Any] | list[Any]
    key: str | None = None
    duplicate: bool = False


class _Fatal(Exception):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.what)
        self.problem = problem


def parse(text: str) -> Document:
    """Parse ``text``. What is wrong with it is in ``problems`` of the result; nothing is raised."""
    document = Document()
    try:
        if _DIRECTIVE.match(text):
            raise _Fatal(
                Problem((), "YAML directives are not supported", fix="remove the lines that begin with %")
            )
        _Builder(document).run(_events(text))
    except _Fatal as error:
        document.problems.append(error.problem)
    if document.problems and document.value is None:
        document.value = {}
    return document


def _events(text: str) -> Iterator[Event]:
    """Yield the parser's events; whatever it raises becomes a problem with a position."""
    try:
        yield from YAML(typ="safe", pure=True).parse(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        what = " ".join(str(part) for part in (error.context, error.problem) if part)
        raise _Fatal(Problem((), f"not YAML: {what}", line=line, column=column)) from error
    except ReaderError as error:
        line, column = _position(text, error.position)
        what = f"character U+{_code(error.character):04X} is not allowed in YAML"
        raise _Fatal(Problem((), what, fix="remove it", line=line, column=column)) from error
    except Exception as error:
        # The scanner trips over some malformed escapes instead of reporting them.
        what = f"not YAML: {type(error).__name__}"
        raise _Fatal(Problem((), what, fix="check quotes and escapes")) from error


class _Builder:
    def __init__(self, document: Document) -> None:
        self.document = document
        self.stack: list[_Frame] = []
        self.documents = 0

    def run(self, events: Iterator[Event]) -> None:
        for event in events:
            if isinstance(event, DocumentStartEvent):
                self.start_document(event)
            elif isinstance(event, NodeEvent):
                self.refuse_indirection(event)
                if isinstance(event, CollectionStartEvent):
                    self.open(event)
                elif isinstance(event, ScalarEvent):
                    self.scalar(event)
            elif isinstance(event, MappingEndEvent | SequenceEndEvent):
                self.stack.pop()

    def start_document(self, event: DocumentStartEvent) -> None:
        self.documents += 1
        if self.documents > 1:
            raise self.fatal(event, (), "a second YAML document", "keep one document in the file")

    def refuse_indirection(self, event: NodeEvent) -> None:
        at = self.location()
        if isinstance(event, AliasEvent):
            name = f"*{event.anchor}"
            fix = f"quote it: '{show(name)}'" if "." in name else "write the value out"
            raise self.fatal(event, at, "YAML aliases are not supported", fix, name)
        if event.anchor is not None:
            raise self.fatal(
                event, at, "YAML anchors are not supported", "write the value out", f"&{event.anchor}"
            )
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise self.fatal(
                event, at, "YAML tags are not supported", "quote the value or remove the tag", str(tag)
            )

    def location(self) -> Location:
        """Return where the next node goes."""
        if not self.stack:
            return ()
        frame = self.stack[-1]
        if isinstance(frame.target, list):
            return (*frame.at, len(frame.target))
        return frame.at if frame.key is None else (*frame.at, frame.key)

    def open(self, event: CollectionStartEvent) -> None:
        frame = self.stack[-1] if self.stack else None
        if frame is not None and isinstance(frame.target, dict) and frame.key is None:
            raise self.fatal(event, frame.at, "a key must be text, not a list or mapping", "quote the key")
        if len(self.stack) >= MAX_DEPTH:
            raise self.fatal(event, self.location()[:3], f"nested deeper than {MAX_DEPTH} levels", None)
        at = self.location()
        target: dict[str, Any] | list[Any] = {} if isinstance(event, MappingStartEvent) else []
        self.store(event, target, None)
        self.stack.append(_Frame(at, target))

    def scalar(self, event: ScalarEvent) -> None:
        frame = self.stack[-1] if self.stack else None
        at, text = self.location(), event.value
        if any("\ud800" <= char <= "\udfff" or char == "\0" for char in text):
            raise self.fatal(event, at, "a NUL or half a surrogate pair is not text", "remove it")
        plain = event.implicit[0] and event.style is None
        value = _resolve(text) if plain else text
        if frame is not None and isinstance(frame.target, dict) and frame.key is None:
            self.take_key(event, frame, value)
        else:
            self.store(event, value, text)

    def take_key(self, event: ScalarEvent, frame: _Frame, value: Any) -> None:
        text = event.value
        if not isinstance(value, str):
            self.report(event, frame.at, "a key must be text", "quote it", text)
        if text == "<<":
            self.report(event, frame.at, "YAML merge keys are not supported", "write the values out", text)
        frame.key = text
        frame.duplicate = text in frame.target
        mark = self.mark(event, text)
        if frame.duplicate:
            first = self.document.keys[(*frame.at, text)]
            what = f"key given twice, first in line {first.line}"
            self.report(event, (*frame.at, text), what, "keep one of them", text)
        self.document.keys.setdefault((*frame.at, text), mark)

    def store(self, event: NodeEvent, value: Any, text: str | None) -> None:
        self.document.marks.setdefault(self.location(), self.mark(event, text))
        if not self.stack:
            self.document.value = value
            return
        frame = self.stack[-1]
        if isinstance(frame.target, list):
            frame.target.append(value)
        elif frame.key is not None:
            if not frame.duplicate:
                frame.target[frame.key] = value
            frame.key = None

    def mark(self, event: Event, text: str | None) -> Mark:
        return Mark(event.start_mark.line + 1, event.start_mark.column + 1, text)

    def fatal(
        self, event: Event, at: Location, what: str, fix: str | None, offending: str | None = None
    ) -> _Fatal:
        mark = self.mark(event, None)
        return _Fatal(Problem(at, what, offending, fix, mark.line, mark.column))

    def report(self, event: Event, at: Location, what: str, fix: str, offending: str) -> None:
        self.document.problems.append(self.fatal(event, at, what, fix, offending).problem)


def _resolve(text: str) -> Any:
    """Return the value of a plain scalar in the YAML 1.2 core schema (so ``off`` and ``yes`` are text)."""
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if _INT.fullmatch(text):
        return int(text, 0) if text[:2] in {"0o", "0x"} else int(text)
    if len(text) <= 64 and _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _position(text: str, index: int) -> tuple[int, int]:
    before = text[:index]
    return before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1


def _code(character: Any) -> int:
    return character if isinstance(character, int) else ord(str(character)[:1] or "\0")
