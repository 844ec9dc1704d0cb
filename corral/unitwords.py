"""Words of unit files of systemd: what is special there, and what no unit can say. Pure."""

from __future__ import annotations

import re
from pathlib import Path

from policy.errors import CorralError

_PLAIN = re.compile(r"[A-Za-z0-9_./+@:=-]+")


def quoted(text: str) -> str:
    """Return text as one word of a unit file.

    Raises:
        CorralError: a unit cannot say it.
    """
    _sayable(text)
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def executable(path: str) -> str:
    """Return a program as the first word of ExecStart=; all of that line is then taken as it is written.

    Raises:
        CorralError: a unit cannot say it.
    """
    # systemd: "Executable name contains special characters", and then the unit is none.
    if set(path) & set("\"'\\"):
        raise CorralError(
            f"{path} has a quote or a backslash in it, and systemd starts no program of such a name",
            "rename its directory, or link corral to another one that comes before it on your PATH",
        )
    # The colon: a dollar is no variable. Doubled, as in arguments, it would be two in a program's name.
    return f":{quoted(path)}"


def directory(path: Path) -> str:
    """Return a directory as WorkingDirectory= takes it: to the end of the line, with nothing but % special.

    Raises:
        CorralError: a unit cannot say it.
    """
    text = str(path)
    _sayable(text)
    if text != text.strip() or text.endswith("\\"):
        raise CorralError(f"{text!r} ends as no line of a unit can", "rename it")
    return text.replace("%", "%%")


def _sayable(text: str) -> None:
    if not text.isprintable():
        raise CorralError(f"{text!r} has characters that a unit of systemd cannot say", "rename it")


def program(path: Path) -> str:
    """Return a program as ExecStart= takes it: as it is where nothing in it is special.

    Raises:
        CorralError: a unit cannot say it.
    """
    text = str(path)
    return text if _PLAIN.fullmatch(text) else executable(text)
