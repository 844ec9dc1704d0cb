"""The Public Suffix List: below which names anybody can register one. Pure, offline.

``suffixes.dat`` is the list of publicsuffix.org without its comments, names in ASCII form, both sections: a
zone such as ``*.github.io`` would let in whoever opens an account there. A newer one is taken over with
``python -m policy.suffixes public_suffix_list.dat > policy/suffixes.dat``, for a release and never by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

DATA = Path(__file__).with_name("suffixes.dat")
LICENCE = (
    "// This Source Code Form is subject to the terms of the Mozilla Public",
    "// License, v. 2.0. If a copy of the MPL was not distributed with this",
    "// file, You can obtain one at https://mozilla.org/MPL/2.0/.",
)


def public_suffix(name: str) -> str:
    """Return the public suffix of a lower-case ASCII name without a final dot; perhaps the name itself."""
    rules, labels = _rules(), name.split(".")
    for index in range(len(labels)):
        candidate = ".".join(labels[index:])
        if "!" + candidate in rules:
            return ".".join(labels[index + 1 :])
        if candidate in rules or ".".join(("*", *labels[index + 1 :])) in rules:
            return candidate
    # Nobody knows this top-level domain: it is taken for one that sells names.
    return labels[-1]


def registrable(name: str) -> str | None:
    """Return the part of a name that somebody registered: its public suffix and one label more."""
    suffix = public_suffix(name)
    if name == suffix:
        return None
    return name.removesuffix("." + suffix).rpartition(".")[2] + "." + suffix


def beneath(name: str) -> list[str]:
    """Return the public suffixes that lie below a name, sorted."""
    end = "." + name
    return sorted({rule.removeprefix("*.").removeprefix("!") for rule in _rules() if rule.endswith(end)})


@lru_cache(maxsize=1)
def _rules() -> frozenset[str]:
    return frozenset(parse(DATA.read_text(encoding="ascii").splitlines()))


def parse(lines: Iterable[str]) -> Iterator[str]:
    """Yield the rules of a list in its published format, in ASCII form."""
    for line in lines:
        rule = line.split(maxsplit=1)[0] if line.strip() else ""
        if rule and not rule.startswith("//"):
            yield ".".join(map(_to_ascii, rule.lower().split(".")))


def _to_ascii(label: str) -> str:
    return label if label.isascii() else "xn--" + label.encode("punycode").decode("ascii")


def compact(text: str) -> str:
    """Return a published list without its comments but those that say which one it is."""
    lines = text.splitlines()
    marks = [line for line in lines if line.startswith(("// VERSION:", "// COMMIT:"))]
    return "\n".join((*LICENCE, "// Taken from https://publicsuffix.org/list/", *marks, *parse(lines))) + "\n"


if __name__ == "__main__":
    sys.stdout.write(compact(Path(sys.argv[1]).read_text(encoding="utf-8")))
