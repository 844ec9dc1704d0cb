"""``python -m corral.answers.page``: writes docs/json.md from the descriptions of answers."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from corral.answers import SCHEMA
from corral.answers.shapes import Row, rows
from corral.answers.table import ANSWERS, FORMATS, STREAMS

PAGE = Path(__file__).parents[2] / "docs" / "json.md"
HEAD = f"""\
# Answers for programs

<!-- Written by: python -m corral.answers.page. A test fails when a command answers anything else. -->

Every command that shows something has `--json`; so have some that change something. The answer is one JSON
object on stdout, in ASCII. All else that is to be said, progress and warnings, is on stderr.

```sh
corral ps --json | jq -r '.sessions[] | select(.state == "running").container'
```

## What schema promises

The first field of every answer is `"schema": {SCHEMA}`. Within a number

* fields are only added: ignore those that you do not know, and do not count on their order;
* no field goes, and none changes its type, its unit or its meaning;
* a field that is not marked *may be absent* is always there, null or empty when there is nothing to say.

Where a type lists words, a later release may add one. Texts for people, marked so or called `note`, `hint`,
`fix`, `problem` and the like, may change at any time. Answers of the host service are passed on as they are:
its own numbers (`api`, `schemas`) are for the parts of corral among themselves.

`corral logs` and `corral denied --follow` print a stream: each line is an object, and an answer of its own
with its own `schema`.

## When a command fails

A command that fails prints no answer: stdout is empty, stderr has the message and the fix for people, and the
exit code is 1, or 2 when the policy or the arguments are invalid. A stream that breaks off has printed whole
lines until then.

An answer with exit code 1 says no: `verify` (a check failed), `doctor` (something is broken), `policy diff`
(it allows more than was approved), `policy check` (denied), `render --check` (it differs), `refresh` (a name
that is not optional has no fresh answer), `prune` (something could not be removed).

`doctor`, `version`, `ps`, `inspect` and `logs` answer without the host service. `df` answers without Docker,
and so does `prune`, which then says in `docker` why it did nothing.

## Types

A *whole number* has no fraction; a *number* may have one. `a[].b` is the field `b` of each item of the list
`a`, and `a.*.b` that of each value of the map `a`; what a map's keys are is said first. Times are in seconds
and sizes in bytes, unless it says otherwise.
"""


def page() -> str:
    """Return the whole file."""
    names = sorted(ANSWERS)
    listed = ["", "## Commands", "", *(f"* [`{name}`](#{_anchor(name)})" for name in names)]
    formats = [f"* `{name}`: {what}" for name, what in sorted(FORMATS.items())]
    listed += ["", "Without `--json`, because what they print is for another program already:", "", *formats]
    return HEAD + "\n".join([*listed, *(line for name in names for line in _section(name))]) + "\n"


def _anchor(name: str) -> str:
    return "".join(char for char in name.replace(" ", "-") if char.isalnum() or char == "-")


def _section(name: str) -> list[str]:
    lines = ["", f"## {name}"]
    for shape in ANSWERS[name]:
        each = "Each line: " if name in STREAMS else ""
        said = inspect.cleandoc(shape.__doc__)
        lines += ["", (each + said[0].lower() + said[1:]) if each else said, ""]
        lines += ["| field | type | meaning |", "|---|---|---|"]
        lines += [_row(row) for row in rows(shape)]
    return lines


def _row(row: Row) -> str:
    absent = " *(may be absent)*" if row.optional else ""
    return f"| `{row.place}` | {row.type} | {row.meaning}{absent} |"


def main() -> int:
    """Write the file."""
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
