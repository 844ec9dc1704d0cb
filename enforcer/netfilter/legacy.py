"""Writes the legacy tables through python-iptables (libiptc): for each script of iptables-restore one commit.

Runs as a process of its own (see ``tables.LegacyTables``): on stdin JSON, a list of [family, script].
libiptc reads a table and replaces it as a whole, so it happens under the lock its caller holds.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from enforcer.netfilter import xtlegacy

LIBRARIES = ("usr/lib/*/xtables", "usr/lib64/xtables", "usr/lib/xtables", "lib/xtables")
FLAGS = {"-i": "in_interface", "-o": "out_interface", "-p": "protocol", "-s": "src", "-d": "dst"}
INTERFACES = {"-i": "iniface", "-o": "outiface"}
IFNAMSIZ = 16
# python-iptables 1.2.0 on libxtables 1.8.9: setting this one corrupts the heap, and the process dies later.
# Nobody reads the prefix: the group says whose records they are.
LEFT_OUT = frozenset({"nflog-prefix"})


class ScriptError(Exception):
    """A line cannot be carried out."""


@dataclass
class Part:
    """A match or the target of a rule, with its options; an option's values begin with ! when inverted."""

    name: str
    options: list[tuple[str, list[str]]] = field(default_factory=list)


@dataclass
class Spec:
    """A rule taken apart."""

    flags: dict[str, str] = field(default_factory=dict)
    matches: list[Part] = field(default_factory=list)
    target: Part = field(default_factory=lambda: Part(""))


def parse(text: str) -> Spec:
    """Take the text of one of corral's rules apart, as ``skeleton.Rule.iptables`` writes it.

    Raises:
        ScriptError: a word that no rule of corral has.
    """
    spec, words, inverted = Spec(), shlex.split(text), False
    part: Part | None = None
    while words:
        word = words.pop(0)
        if word == "!":
            inverted = True
            continue
        if word in FLAGS:
            spec.flags[word] = ("!" if inverted else "") + words.pop(0)
        elif word == "-m":
            part = Part(words.pop(0))
            spec.matches.append(part)
        elif word == "-j":
            part = spec.target = Part(words.pop(0))
        elif word.startswith("--") and part is not None:
            values = ["!"] if inverted else []
            while words and words[0] != "!" and not words[0].startswith("-"):
                values.append(words.pop(0))
            if word[2:] not in LEFT_OUT:
                part.options.append((word[2:], values))
        else:
            raise ScriptError(f"{word!r} in {text!r}")
        inverted = False
    return spec


def interface_mask(text: str) -> bytes:
    """Return which bytes of an interface's name a rule compares; ``text``: as iptables takes it, or empty."""
    name = text.removeprefix("!").strip()
    compared = name[:-1] if name.endswith("+") else f"{name}\0" if name else ""
    return (b"\xff" * len(compared)).ljust(IFNAMSIZ, b"\0")


def main() -> int:
    """Carry the scripts on stdin out and return the exit status; what comes after a failure is left out."""
    try:
        for family, text in json.load(sys.stdin):
            Script(family).run(text)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


class Script:
    """One transaction on one table."""

    def __init__(self, family: int) -> None:
        # Else the library asks ldconfig where its extensions are.
        for pattern in LIBRARIES:
            for found in sorted(Path("/").glob(pattern)):
                os.environ.setdefault("XTABLES_LIBDIR", str(found))
        import iptc

        self._iptc: Any = iptc
        self._family = family
        self._table: Any = None
        self._lines: dict[str, list[str]] = {}

    def run(self, text: str) -> None:
        """Carry out all lines and commit.

        Raises:
            ScriptError: a line does not fit the table; nothing was changed.
        """
        for line in text.splitlines():
            if line.startswith("*"):
                self._open(line[1:])
            elif line == "COMMIT":
                self._table.commit()
            elif line.startswith(":"):
                self._declare(line[1:].split()[0])
            elif line:
                self._change(*line.split(" ", 2))

    def _open(self, name: str) -> None:
        kind = self._iptc.Table if self._family == 4 else self._iptc.Table6
        rule = self._iptc.Rule if self._family == 4 else self._iptc.Rule6
        self._table = kind(name)
        self._table.autocommit = False
        self._table.refresh()
        # Else it looks for the name of each target in every table, and so makes those that are not there.
        only = [self._table]
        rule.tables = property(lambda _self: only)
        self._lines = xtlegacy.read(self._family, name).lines

    def _declare(self, name: str) -> None:
        if name in self._lines:
            self._table.flush_entries(name)
        else:
            self._table.create_chain(name)
        self._lines[name] = []

    def _change(self, verb: str, chain: str, rest: str = "") -> None:
        if chain not in self._lines:
            raise ScriptError(f"chain {chain} does not exist")
        lines = self._lines[chain]
        if verb == "-A":
            made = self._rule(rest)  # its buffer lives as long as it does
            self._table.append_entry(chain, made.rule)
            lines.append(rest)
        elif verb == "-I":
            position, _, text = rest.partition(" ")
            made = self._rule(text)
            self._table.insert_entry(chain, made.rule, int(position) - 1)
            lines.insert(int(position) - 1, text)
        elif verb == "-D":
            if rest not in lines:
                raise ScriptError(f"no rule {rest!r} in {chain}")
            index = lines.index(rest)
            within = self._iptc.Chain(self._table, chain)
            within.delete_rule(within.rules[index])
            del lines[index]
        elif verb == "-F":
            self._table.flush_entries(chain)
            lines.clear()
        elif verb == "-X":
            self._table.delete_chain(chain)
            del self._lines[chain]
        else:
            raise ScriptError(f"{verb} is not known")

    def _rule(self, text: str) -> Any:
        spec = parse(text)
        rule = (self._iptc.Rule if self._family == 4 else self._iptc.Rule6)()
        for flag, value in spec.flags.items():
            setattr(rule, FLAGS[flag], value)
        if self._family == 6:
            # python-iptables 1.2.0 compares one bit of each letter there: other interfaces would match too.
            for flag, name in INTERFACES.items():
                setattr(rule.entry.ipv6, f"{name}_mask", interface_mask(spec.flags.get(flag, "")))
        for part in spec.matches:
            _fill(rule.create_match(part.name), part)
        # "-j" to nothing is what iptables makes of a rule without a target: the next one is looked at.
        if spec.target.name and self._table.is_chain(spec.target.name) is False:
            self._known(spec.target.name)
        _fill(rule.create_target(spec.target.name), spec.target)
        rule.final_check()
        return rule

    def _known(self, name: str) -> None:
        # A jump to a chain that is not there would be taken for an extension of that name.
        if name.startswith(("CORRAL-", "DOCKER")):
            raise ScriptError(f"chain {name} does not exist")


def _fill(made: Any, part: Part) -> None:
    for name, values in part.options:
        made.set_parameter(name.replace("-", "_"), values if len(values) > 1 else "".join(values))
