"""The host service's counters for programs that do not read Prometheus' text. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from policy.errors import EnforcerError

_HEAD = re.compile(r"# (HELP|TYPE) (\S+) ?(.*)")
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"(?:,|$)')
_ESCAPED = re.compile(r"\\(.)")


def body(text: str) -> dict[str, Any]:
    """Return the families of ``GET /metrics`` (text format 0.0.4), in their order.

    ``{"metrics": [{"name", "type", "help", "samples": [{"name", "labels": {}, "value"}]}]}``; a sample is of
    the family that was named last, as the format has it.

    Raises:
        EnforcerError: a line is none of that format.
    """
    families: list[dict[str, Any]] = []
    for line in filter(None, text.split("\n")):
        head = _HEAD.fullmatch(line)
        if head is not None:
            kind, name, told = head.groups()
            if not families or families[-1]["name"] != name:
                families.append({"name": name, "type": "untyped", "help": "", "samples": []})
            families[-1][kind.lower()] = told
            continue
        sample = _SAMPLE.fullmatch(line)
        try:
            if sample is None:
                raise ValueError(line)
            name, labels, value = sample.groups()
            row = {"name": name, "labels": dict(_labels(labels or "")), "value": _number(value)}
            families[-1]["samples"].append(row)
        except (ValueError, IndexError) as error:
            raise EnforcerError(
                f"the enforcer's counters are not understood: {line[:100]!r}", "look at it: corral metrics"
            ) from error
    return {"metrics": families}


def _labels(text: str) -> Iterator[tuple[str, str]]:
    place = 0
    while place < len(text):
        found = _LABEL.match(text, place)
        if found is None:
            raise ValueError(text)
        yield found[1], _ESCAPED.sub(lambda char: "\n" if char[1] == "n" else char[1], found[2])
        place = found.end()


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)
