"""Which parts of corral understand each other. Pure but for the last three functions; standard library only.

A release has a version for people (``0.1.0``). What two of its parts say to each other, or leave behind for a
later release, has a schema each: a whole number that grows when an older part would misread it.

========  =============================================================================
api       between the command line and the enforcer
labels    on containers and networks, and the shape of a container that they stand for
state     files below ~/.local/share/corral
protocol  between the enforcer and the netfilter writer
skeleton  the constant rules in the kernel, with the writer's claims
========  =============================================================================
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from policy import savedfile
from policy.errors import CorralError

API, LABELS, STATE, PROTOCOL, SKELETON = "api", "labels", "state", "protocol", "skeleton"
SCHEMAS: Mapping[str, int] = {API: 1, LABELS: 1, STATE: 1, PROTOCOL: 2, SKELETON: 2}
# What the writer, which is another program in another place, has a say in.
WRITER_SCHEMAS = (PROTOCOL, SKELETON)
USER_SCHEMAS = (API, LABELS, STATE)

FIX = "run: corral install"
STATE_FILE = "schema.json"

_RELEASE = re.compile(r"(\d+(?:\.\d+)*)(?:[-_.]?(dev|a|b|rc|post)\.?(\d*))?(?:\+.*)?")
_STAGES = {"dev": -4, "a": -3, "b": -2, "rc": -1, "": 0, "post": 1}

Key = tuple[tuple[int, ...], int, int]


@dataclass(frozen=True)
class Part:
    """One part of corral as it describes itself; a field that it did not send is absent."""

    name: str
    release: str | None
    schemas: Mapping[str, int] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The version as people read it."""
        return self.release or "of an unknown version"


def parse(name: str, answer: Mapping[str, Any]) -> Part:
    """Read ``{"version": text, "schemas": {name: number}}``; what has another type counts as not sent."""
    release, rows = answer.get("version"), answer.get("schemas")
    schemas = {
        str(key): value
        for key, value in (rows.items() if isinstance(rows, Mapping) else ())
        if isinstance(value, int) and not isinstance(value, bool)
    }
    return Part(name, release if isinstance(release, str) and release else None, schemas)


def describe(release: str, names: Iterable[str] = SCHEMAS) -> dict[str, Any]:
    """Return what ``parse`` reads, for this release."""
    return {"version": release, "schemas": {name: SCHEMAS[name] for name in names}}


def key(release: str | None) -> Key:
    """Return what releases are ordered by; an unknown one comes before all others."""
    match = _RELEASE.fullmatch(release or "")
    if match is None:
        return (), 0, 0
    numbers = [int(part) for part in match[1].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers), _STAGES[match[2] or ""], int(match[3] or 0)


def older(one: str | None, other: str | None) -> bool:
    """Tell whether the release ``one`` came before ``other``."""
    return key(one) < key(other)


def mismatch(cli: Part, enforcer: Part, writer: Part | None) -> tuple[str, str] | None:
    """Decide whether three parts may work together.

    The command line and the enforcer are installed together, so their releases are the same. The writer is
    shared by all users of a machine: one of them may have brought a later release, which is fine while its
    schemas are those of the enforcer; an earlier one has faults that this release mends.

    Args:
        cli: the program that decides.
        enforcer: what answered on the enforcer's socket.
        writer: what answered to the enforcer; None when it could not be asked.

    Returns:
        What differs, naming both versions, and the fix. None when nothing does.
    """
    differing = _differing(cli, enforcer, USER_SCHEMAS)
    if cli.release != enforcer.release or differing:
        return _told(cli, enforcer, differing)
    return None if writer is None else writer_mismatch(enforcer, writer)


def writer_mismatch(enforcer: Part, writer: Part) -> tuple[str, str] | None:
    """Decide whether the enforcer may use a writer; see ``mismatch``."""
    differing = _differing(enforcer, writer, WRITER_SCHEMAS)
    if differing or older(writer.release, enforcer.release):
        return _told(enforcer, writer, differing)
    return None


def _differing(one: Part, other: Part, names: Iterable[str]) -> list[str]:
    return [
        f"{name} schema {one.schemas.get(name, 'unknown')} and {other.schemas.get(name, 'unknown')}"
        for name in names
        if one.schemas.get(name) is None or one.schemas.get(name) != other.schemas.get(name)
    ]


def _told(one: Part, other: Part, differing: list[str]) -> tuple[str, str]:
    text = f"{one.name} is version {one.shown}, but {other.name} is {other.shown}"
    if differing:
        text += f" ({', '.join(differing)})"
    newer = older(one.release, other.release) and other.release is not None
    return text, f"upgrade corral to {other.release} or later, then {FIX}" if newer else FIX


def downgrade(own: Part, installed: Part) -> tuple[str, str] | None:
    """Decide whether installing ``own`` over ``installed`` would go back.

    Returns:
        Why it would, naming both versions, and how to do it on purpose. None when it does not.
    """
    ahead = [
        f"{name} schema {have} instead of {own.schemas.get(name, 0)}"
        for name, have in installed.schemas.items()
        if name in WRITER_SCHEMAS and have > own.schemas.get(name, 0)
    ]
    if not ahead and not older(own.release, installed.release):
        return None
    detail = f" ({', '.join(ahead)})" if ahead else ""
    return (
        f"this is corral {own.shown}, and {installed.shown} is installed on this machine{detail}; "
        "going back is refused, and nothing was changed",
        f"keep what is there and upgrade yours to {installed.shown} or later; or, to go back on purpose: "
        "corral uninstall, then corral install",
    )


# -- the state directory


def read_state(data: Path) -> Part | None:
    """Return who wrote the state directory last; None when nobody said so.

    Raises:
        CorralError: the file that says so cannot be read.
    """
    file = data / STATE_FILE
    try:
        body = savedfile.value(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CorralError(
            f"{file} cannot be read, so it is not known which corral may use the state beside it: {error}",
            f"look at it; when it is damaged: rm {file}",
        ) from error
    return parse("the state", body if isinstance(body, dict) else {})


def check_state(data: Path, release: str) -> Part | None:
    """Refuse state of a newer schema; see ``read_state``.

    Raises:
        CorralError: a newer corral wrote it, or one cannot tell. Nothing was touched.
    """
    found = read_state(data)
    if found is None:
        return None
    schema = found.schemas.get(STATE)
    if schema is None:
        raise CorralError(f"{data / STATE_FILE} names no schema", f"look at it; then: rm {data / STATE_FILE}")
    if schema > SCHEMAS[STATE]:
        raise CorralError(
            f"the state in {data} was written by corral {found.shown} (state schema {schema}); this is "
            f"{release} (state schema {SCHEMAS[STATE]}), which leaves it alone",
            f"use corral {found.release or 'of that version'} or later; or start anew beside it: "
            f"mv {data} {data}.kept",
        )
    return found


def open_state(data: Path, release: str) -> None:
    """Check the state directory before something is written there, and note who does.

    Raises:
        CorralError: see ``check_state``.
        OSError: the disk refuses.
    """
    found = check_state(data, release)
    wanted = describe(release, (STATE,))
    if found == parse("the state", wanted):
        return
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Several commands may start at the same time: each has a partial file of its own.
    partial = data / f"{STATE_FILE}.{os.getpid()}.new"
    partial.write_text(json.dumps(wanted) + "\n", encoding="utf-8")
    partial.replace(data / STATE_FILE)
