"""Reading the description of an answer: a TypedDict whose fields are ``Annotated[type, "what it means"]``.

Types are those that JSON has: str, int, float, bool, None, literals, lists, maps with text as keys,
TypedDicts, unions of these, and Any for what is described elsewhere. Pure.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

NAMES = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    type(None): "null",
    Any: "anything",
}


@dataclass(frozen=True)
class Field:
    """One field: ``hint`` is its type, ``optional``: it may be absent."""

    name: str
    hint: Any
    meaning: str
    optional: bool


@dataclass(frozen=True)
class Row:
    """A field with its place in the answer: ``sandboxes[].names.*`` is in each item, and of each key."""

    place: str
    type: str
    meaning: str
    optional: bool


def fields(shape: Any) -> list[Field]:
    """Return the fields of a TypedDict, in their order.

    Raises:
        TypeError: one has no meaning.
    """
    found = []
    for name, given in get_type_hints(shape, include_extras=True).items():
        optional = get_origin(given) is NotRequired
        hint = get_args(given)[0] if optional else given
        if get_origin(hint) is not Annotated:
            raise TypeError(f"{shape.__name__}.{name} says not what it means")
        bare, meaning = get_args(hint)
        found.append(Field(name, bare, meaning, optional))
    return found


def rows(shape: Any, place: str = "") -> Iterator[Row]:
    """Yield every field of a TypedDict and of those in it, outer ones first."""
    for field in fields(shape):
        here = place + field.name
        yield Row(here, type_name(field.hint), field.meaning, field.optional)
        for below, inner in _below(field.hint):
            yield from rows(inner, f"{here}{below}.")


def _below(hint: Any) -> Iterator[tuple[str, Any]]:
    """Yield (the way to it, the TypedDict) of those in a type."""
    if is_typeddict(hint):
        yield "", hint
    for way, inner in _parts(hint):
        yield from ((way + below, shape) for below, shape in _below(inner))


def _parts(hint: Any) -> list[tuple[str, Any]]:
    origin, words = get_origin(hint), get_args(hint)
    if origin is list:
        return [("[]", words[0])]
    if origin is dict:
        return [(".*", words[1])]
    return [("", word) for word in words] if origin in (Union, types.UnionType) else []


def type_name(hint: Any) -> str:
    """Return what a type is called on the page."""
    origin, words = get_origin(hint), get_args(hint)
    if is_typeddict(hint):
        return "object"
    if origin is Literal:
        return " or ".join(f"`{word}`" for word in words)
    if origin is list:
        return f"list of {type_name(words[0])}"
    if origin is dict:
        return f"map to {type_name(words[1])}"
    if origin in (Union, types.UnionType):
        return " or ".join(map(type_name, words))
    return NAMES[hint]


def problems(value: Any, hint: Any, place: str = "", seen: set[str] | None = None) -> list[str]:
    """Return where a value that was read from JSON is not what a type says, a line each.

    Args:
        value: from json.loads.
        hint: the type.
        place: of the value in its answer.
        seen: gets the place of each field that was met, as ``rows`` names it.
    """
    met = set() if seen is None else seen
    origin, words = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _of_union(value, words, place, met)
    if is_typeddict(hint) and isinstance(value, Mapping):
        return _of_object(value, hint, place, met)
    if origin is list and isinstance(value, list):
        return [told for item in value for told in problems(item, words[0], f"{place}[]", met)]
    if origin is dict and isinstance(value, Mapping):
        return [told for item in value.values() for told in problems(item, words[1], f"{place}.*", met)]
    return [] if _fits(value, hint) else [f"{place}: is {value!r}, and not {type_name(hint)}"]


def _fits(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    # A truth is no number here, although Python has it so.
    return type(value) in ((int, float) if hint is float else (hint,))


def _of_union(value: Any, words: tuple[Any, ...], place: str, met: set[str]) -> list[str]:
    tried = []
    for word in words:
        fresh: set[str] = set()
        told = problems(value, word, place, fresh)
        if not told:
            met |= fresh
            return []
        tried.append(told)
    # What is meant is the one that the value is of the same kind as.
    return max(tried, key=lambda told: not told[0].startswith(f"{place}: is"))


def _of_object(value: Mapping[str, Any], shape: Any, place: str, met: set[str]) -> list[str]:
    known = {field.name: field for field in fields(shape)}
    prefix = f"{place}." if place else ""
    told = [f"{prefix}{name}: is not documented" for name in value if name not in known]
    for name, field in known.items():
        if name in value:
            met.add(prefix + name)
            told += problems(value[name], field.hint, prefix + name, met)
        elif not field.optional:
            told.append(f"{prefix}{name}: is missing")
    return told
