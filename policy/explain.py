"""From pydantic's errors to sentences with a place and a fix."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from policy.problems import Location, Problem, show
from policy.schema import AllowEntry, Build, Egress, Hooks, Limits, Mounts, Policy, Proxy, Secrets, Service
from policy.urls import redact
from policy.yamltree import Document

_MODELS: dict[Location, type[BaseModel]] = {
    (): Policy,
    ("mounts",): Mounts,
    ("egress",): Egress,
    ("egress", "allow", 0): AllowEntry,
    ("host_services", 0): Service,
    ("secrets",): Secrets,
    ("limits",): Limits,
    ("hooks",): Hooks,
    ("build",): Build,
    ("build", "proxy"): Proxy,
}
# Below these a value may be a credential, and is never shown.
_CONFIDENTIAL = ("secrets", "profile_options")
_PLAIN = {
    "string_type": "must be text",
    "string_unicode": "must be text",
    "string_pattern_mismatch": "is not written as it has to be",
    "string_too_short": "must not be empty",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a smaller number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "bool_parsing": "must be true or false",
    "greater_than": "must be more than {gt}",
    "less_than": "must be less than {lt}",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a number",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
    "missing": "is required",
    "too_short": "must not be empty",
    "too_long": "has more than {max_length} entries",
    "string_too_long": "is longer than {max_length} characters",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
}
# A kind that has no sentence yet is never told in the words of a library.
_OTHERWISE = "is not what belongs here"
_FIXES = {"string_type": "quote it", "tuple_type": "write each entry on a line of its own, after '- '"}


def explain(
    document: Document, error: Any, prefix: Location = (), model: type[BaseModel] | None = None
) -> Problem:
    """Return one of pydantic's errors as a problem.

    Args:
        document: the file the value came from.
        error: an element of ``ValidationError.errors()``.
        prefix: location of what was validated.
        model: the model it was validated against when that is not part of `Policy`.
    """
    kind: str = error["type"]
    wanted: Location = (*prefix, *error["loc"])
    if kind == "extra_forbidden":
        return _unknown_key(document, wanted, model)
    at, mark = document.place(wanted)
    context: dict[str, Any] = error.get("ctx", {})
    if kind == "corral":
        what, fix = str(context["what"]), str(context["fix"]) or None
    else:
        what = _PLAIN.get(kind, _OTHERWISE).format_map(context)
        fix = _FIXES.get(kind) if mark.text else None
    if kind in {"missing", "too_long", "string_too_long"}:
        shown = None
        at = wanted
    else:
        shown = shown_text(wanted, mark.text)
    return Problem(at, what, shown, fix, mark.line, mark.column)


def known_keys(at: Location) -> frozenset[str]:
    """Return the keys that the mapping at a location may have; none when it is not the schema's."""
    model = _MODELS.get(at)
    return frozenset(model.model_fields if model is not None else ())


def shown_text(at: Location, text: str | None) -> str | None:
    """Return the text of a value as far as it may be shown."""
    if text is None or (at and at[0] in _CONFIDENTIAL):
        return None
    return redact(text) if at and at[0] == "build" else text


def _unknown_key(document: Document, at: Location, model: type[BaseModel] | None) -> Problem:
    import difflib

    mark = document.keys.get(at)
    if mark is None:
        _, mark = document.place(at)
    key = str(at[-1])
    if model is None:
        model = _MODELS.get(tuple(0 if isinstance(part, int) else part for part in at[:-1]))
    known = list(model.model_fields) if model is not None else []
    near = difflib.get_close_matches(key, known, n=1)
    elsewhere = [place for place, other in _MODELS.items() if key in other.model_fields]
    if near:
        fix = f"did you mean {near[0]}?"
    elif elsewhere:
        section = ".".join(str(part) for part in elsewhere[0] if part != 0)
        fix = f"{key} belongs under {section}" if section else f"{key} belongs at the top level"
    else:
        fix = f"known keys: {', '.join(known)}" if known else f"remove {show(key)}"
    return Problem(at, "unknown key", None, fix, mark.line, mark.column)
