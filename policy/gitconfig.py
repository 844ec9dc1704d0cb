"""Git's configuration file, as far as it makes Git run programs or read further files. Pure.

An agent that writes ``.git/config`` decides what runs on the host at the next ``git status``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

UNREADABLE = "(unreadable)"

_SPACE = " \t\n\r\f\v"
_ESCAPES: Mapping[str, str] = {"n": "\n", "t": "\t", "b": "\b", "\\": "\\", '"': '"'}

# What neither makes Git run or read something else, nor sends anything elsewhere. Every other key is told of:
# nobody has a whole list of those that execute, and each release of Git brings new ones.
HARMLESS = (
    r"user\.[^.]*",
    r"core\.(filemode|bare|ignorecase|precomposeunicode|symlinks|repositoryformatversion|logallrefupdates)",
    r"core\.(autocrlf|eol|safecrlf|whitespace|abbrev|quotepath|compression|untrackedcache|preloadindex)",
    r"branch\..*\.(merge|rebase|description|vscode-merge-base)",
    r"branch\.(sort|autosetupmerge|autosetuprebase)",
    r"(color|column|advice)\..*",
    r"init\.defaultbranch",
    r"pull\.(rebase|ff)",
    r"push\.(default|autosetupremote|followtags)",
    r"fetch\.(prune|prunetags)",
    r"rebase\.(autosquash|autostash|updaterefs)",
    r"merge\.(conflictstyle|ff|stat)",
    r"diff\.(algorithm|renames|colormoved|mnemonicprefix|context)",
    r"rerere\.(enabled|autoupdate)",
    r"(log|status)\.(date|decorate|abbrevcommit|short|branch|showuntrackedfiles)",
)
_HARMLESS = re.compile("|".join(f"(?:{pattern})" for pattern in HARMLESS), re.DOTALL)
_UPSTREAM = re.compile(r"branch\..*\.remote", re.DOTALL)
_INCLUDES = re.compile(r"include\.path|includeif\..*\.path", re.DOTALL)
# Anything else may be an address or a path.
_REMOTE_NAME = re.compile(r"\.|[A-Za-z0-9][A-Za-z0-9._-]*")


def suspect(text: str) -> dict[str, tuple[str, ...]]:
    """Return the keys that may make Git run something, lower case but for the middle part, with their values.

    A line that cannot be read is under `UNREADABLE`: what Git makes of it is not known.
    """
    found: dict[str, list[str]] = {}
    for key, value in entries(text):
        if not harmless(key, value):
            found.setdefault(key, []).append(value)
    return {key: tuple(values) for key, values in found.items()}


def harmless(key: str, value: str) -> bool:
    """Return whether an entry can neither run anything nor lead Git elsewhere."""
    if _UPSTREAM.fullmatch(key):
        return bool(_REMOTE_NAME.fullmatch(value))
    return bool(_HARMLESS.fullmatch(key))


def includes(key: str) -> bool:
    """Return whether a key names a file that Git reads as further configuration."""
    return bool(_INCLUDES.fullmatch(key))


def differences(before: str, after: str) -> list[str]:
    """Return a line for each suspect key that is new ('+'), gone ('-') or both."""
    old, new = suspect(before), suspect(after)
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
            if not name:
                raise _Bad
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
