"""TOML, written: tables of plain values, as harnesses' configuration needs it. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dumps(tree: Mapping[str, Any]) -> str:
    """Return the text, keys sorted, values before tables.

    Raises:
        ValueError: a value that TOML has no form for; the text says what it is.
    """
    lines: list[str] = []
    _table(tree, (), lines)
    return "\n".join(lines) + "\n" if lines else ""


def _table(tree: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    below = {key: value for key, value in tree.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in tree.items() if key not in below}
    if path and (plain or not below):
        lines.extend([*([""] if lines else []), f"[{'.'.join(map(_key, path))}]"])
    lines.extend(f"{_key(key)} = {_value(value)}" for key, value in sorted(plain.items()))
    for key, value in sorted(below.items()):
        _table(value, (*path, key), lines)


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _text(text: str) -> str:
    # JSON escapes what TOML's basic strings escape, but for one character and the halves of surrogate pairs.
    if any(0xD800 <= ord(char) <= 0xDFFF for char in text):
        raise ValueError("half a character")
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise ValueError("a number of more than 64 bits")
        return str(value)
    if isinstance(value, float):
        return repr(value) if "e" not in repr(value) else f"{value:.17f}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in sorted(value.items())) + "}"
    raise ValueError("null" if value is None else f"a {type(value).__name__}")
