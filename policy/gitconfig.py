"""Git's configuration file, as far as it makes Git run programs or read further files. Pure.

An agent that writes ``.git/config`` decides what runs on the host at the next ``git status``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

UNREADABLE = "(unreadable)"

_SPACE = " \t\n\r\f\v"
_ESCAPES: Mapping[str, str] = {"n": "\n", "t": "\t", "b": "\b", "\\": "\\", '"': '"'}

# What Git executes, or takes further configuration from; the middle part may be anything.
EXECUTING = (
    r"core\.(fsmonitor|hookspath|sshcommand|pager|editor|askpass|gitproxy|alternaterefscommand|attributesfile)",
    r"(sequence|gui)\.editor",
    r"pager\..*",
    r"filter\..*\.(clean|smudge|process)",
    r"diff\.external",
    r"diff\..*\.(command|textconv)",
    r"interactive\.difffilter",
    r"merge\..*\.driver",
    r"(mergetool|difftool|guitool|browser|man)\..*\.(cmd|path)",
    r"(web|instaweb)\.(browser|httpd)",
    r"gpg\.(.*\.)?program",
    r"gpg\.ssh\.defaultkeycommand",
    r"credential\.(.*\.)?helper",
    r"(include|includeif\..*)\.path",
    r"uploadpack\.packobjectshook",
    r"receive\.procreceiverefs",
    r"remote\..*\.(uploadpack|receivepack|vcs|proxy|pushurl|url)",
    r"url\..*\.(insteadof|pushinsteadof)",
    r"protocol\.(.*\.)?allow",
    r"sendemail\.(.*\.)?(smtpserver|tocmd|cccmd|headercmd|sendmailcmd)",
    r"trailer\..*\.(command|cmd)",
    r"tar\..*\.command",
    r"init\.templatedir",
    r"ssh\.variant",
    r"hook\..*\.(command|event)",
    r"(maintenance|gc)\..*cmd",
    r"extensions\..*",
    r"safe\.(directory|barerepository)",
)
_EXECUTING = re.compile("|".join(f"(?:{pattern})" for pattern in EXECUTING), re.DOTALL)
# These execute only when their value begins so.
_COMMANDS = re.compile(r"alias\..*|submodule\..*\.update", re.DOTALL)


def executing(text: str) -> dict[str, tuple[str, ...]]:
    """Return the keys that make Git run something, lower case but for the middle part, with their values.

    A line that cannot be read is under `UNREADABLE`: what Git makes of it is not known.
    """
    found: dict[str, tuple[str, ...]] = {}
    for key, value in entries(text):
        if key == UNREADABLE or _EXECUTING.fullmatch(key) or _is_command(key, value):
            found[key] = (*found.get(key, ()), value)
    return found


def _is_command(key: str, value: str) -> bool:
    return bool(_COMMANDS.fullmatch(key)) and value.lstrip().startswith("!")


def differences(before: str, after: str) -> list[str]:
    """Return a line for each executing key that is new ('+'), gone ('-') or both."""
    old, new = executing(before), executing(after)
    lines = []
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            lines += [f"- {key} = {value}" for value in old.get(key, ())]
            lines += [f"+ {key} = {value}" for value in new.get(key, ())]
    return lines


def entries(text: str) -> Iterator[tuple[str, str]]:
    """Yield (key, value) of a configuration file; a key alone has the value "true".

    Where Git refuses the file, the last entry is `UNREADABLE`.
    """
    reader = _Reader(text.removeprefix("\ufeff").replace("\r\n", "\n"))
    try:
        yield from reader.run()
    except _Bad:
        yield UNREADABLE, text[reader.at :].partition("\n")[0]


class _Bad(Exception):
    pass


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.section = ""

    def peek(self) -> str:
        """Return the next character, nothing at the end."""
        return self.text[self.at : self.at + 1]

    def take(self) -> str:
        char = self.peek()
        self.at += 1
        return char

    def run(self) -> Iterator[tuple[str, str]]:
        while char := self.take():
            if char in _SPACE:
                continue
            if char in "#;":
                self.skip_line()
            elif char == "[":
                self.section = self.header()
            elif char.isascii() and char.isalpha():
                self.at -= 1
                yield self.entry()
            else:
                raise _Bad

    def skip_line(self) -> None:
        while self.peek() not in {"", "\n"}:
            self.at += 1

    def header(self) -> str:
        name = self.word(".-")
        if self.peek() == "]":
            self.at += 1
            return f"{name}."
        while self.peek() and self.peek() in " \t":
            self.at += 1
        if self.take() != '"':
            raise _Bad
        sub = []
        while (char := self.take()) != '"':
            if char == "\\":
                char = self.take()
            if char in {"", "\n"}:
                raise _Bad
            sub.append(char)
        if self.take() != "]":
            raise _Bad
        return f"{name}.{''.join(sub)}."

    def word(self, more: str) -> str:
        start = self.at
        while (char := self.peek()) and char.isascii() and (char.isalnum() or char in more):
            self.at += 1
        return self.text[start : self.at].lower()

    def entry(self) -> tuple[str, str]:
        key = self.section + self.word("-")
        while self.peek() and self.peek() in " \t":
            self.at += 1
        char = self.take()
        if char in {"", "\n"}:
            return key, "true"
        if char != "=":
            raise _Bad
        return key, self.value()

    def value(self) -> str:
        out: list[str] = []
        quoted, kept = False, 0  # kept: how much of it is more than white space at the end
        while True:
            char = self.take()
            if char in {"", "\n"}:
                if quoted:
                    raise _Bad
                return "".join(out[:kept])
            if char in "#;" and not quoted:
                self.skip_line()
            elif char in _SPACE and not quoted:
                if out:
                    out.append(char)
            elif char == '"':
                quoted = not quoted
                kept = len(out)
            elif char == "\\":
                char = self.take()
                if char == "\n":
                    continue
                if char not in _ESCAPES:
                    raise _Bad
                out.append(_ESCAPES[char])
                kept = len(out)
            else:
                out.append(char)
                kept = len(out)
