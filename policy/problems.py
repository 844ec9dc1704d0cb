"""Problems of a policy file: collected, placed and shown together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from policy.errors import PolicyError
from policy.records import dataclass

Location = tuple[str | int, ...]
"""Where a value lives: ("egress", "allow", 0)."""

SHOWN = 50
_OFFENDING_MAX = 80
_USERINFO = re.compile(r"//.*@", re.DOTALL)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong in a file.

    Args:
        at: location of the value the problem is about; () is the whole file.
        what: what is wrong, without the value itself.
        offending: the text as written; None when it must not be shown (it may be a secret).
        fix: what to do about it.
        line, column: 1-based position; 0 when unknown.
        headline: the sentence that opens the whole message instead of the default one.
    """

    at: Location
    what: str
    offending: str | None = None
    fix: str | None = None
    line: int = 0
    column: int = 0
    headline: str | None = None

    def render(self, file: str) -> str:
        """Return ``file:line:column: key: what (offending); fix``."""
        text = f"{file}:{self.line or 1}:{self.column or 1}: "
        if self.at:
            text += f"{key_name(self.at)}: "
        text += self.what
        if self.offending is not None:
            text += f" ({show(self.offending)})"
        return f"{text}; {self.fix}" if self.fix else text


def key_name(at: Sequence[str | int]) -> str:
    """Return ``mounts.rw[0]`` for ("mounts", "rw", 0)."""
    text = ""
    for part in at:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + show(part)
    return text


def show(text: str) -> str:
    """Return ``text`` fit for a terminal: one line, nothing invisible, no credentials of a URL, not long."""
    # Cut first: what comes after does not matter, and the input may be large.
    cut = _USERINFO.sub("//***@", text[: 4 * _OFFENDING_MAX])
    visible = printable(cut)
    return visible if len(visible) <= _OFFENDING_MAX else visible[: _OFFENDING_MAX - 1] + "…"


def printable(text: str) -> str:
    """Return ``text`` with what does not simply print as an escape."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode("ascii")
        for char in text
    )


def to_error(file: str, problems: Iterable[Problem]) -> PolicyError:
    """Return one PolicyError that names every problem, in the order of the file."""
    file = printable(file)
    ordered = sorted(dict.fromkeys(problems), key=lambda p: (p.line, p.column))
    lines = [problem.render(file) for problem in ordered[:SHOWN]]
    if len(ordered) > SHOWN:
        lines.append(f"... and {len(ordered) - SHOWN} more")
    headline = next((p.headline for p in ordered if p.headline), None)
    if headline is None and len(ordered) > 1:
        headline = f"{file} has {len(ordered)} problems"
    return PolicyError("\n".join([headline, *lines] if headline else lines))
