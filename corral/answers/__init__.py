"""What ``--json`` prints: the one place that makes text of an answer. Pure.

Every answer is one object, and a line of a stream is an answer of its own. Its first field is ``schema``;
what a number promises, and each command's fields, are in docs/json.md (``corral.answers.table``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping

# Grows when a field goes, or means something else; not when one is added.
SCHEMA = 1


def text(body: Mapping[str, object]) -> str:
    """Return an answer for people to look at, too: several lines, without a final newline."""
    return _encoded(body, 2)


def line(body: Mapping[str, object]) -> str:
    """Return an answer as one line of a stream, without a newline."""
    return _encoded(body, None)


def _encoded(body: Mapping[str, object], indent: int | None) -> str:
    # In ASCII: what prints it spells other characters that command a terminal, as no JSON may.
    return json.dumps({"schema": SCHEMA, **body}, indent=indent)
