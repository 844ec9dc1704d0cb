"""``python -m corral.doctor.page``: writes docs/doctor.md from the table of checks."""

from __future__ import annotations

import sys
from pathlib import Path

from corral.doctor.diagnosis import select
from corral.doctor.model import Check

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
HEAD = """\
# corral doctor

<!-- Written by: python -m corral.doctor.page. A test fails when the table of checks says something else. -->

Says what is wrong with this host, why, and what to do about it. It changes nothing and works with nothing
installed. `corral doctor COR-020 COR-061` makes these checks only, and shows them when all is well too;
`--json` is for programs. All probes run at the same time; one that fails or is late is a finding itself.

*Broken* means: sandboxes cannot start, or would not be protected; the exit code is 1. With *advice* alone it
is 0. An id never changes its meaning. "not checked" names checks that could not be made for a reason that
another check reports.

| id | what is wrong | |
|---|---|---|
"""


def page() -> str:
    """Return the whole file."""
    checks = select(())
    rows = [
        f"| [{check.id}](#{check.id.lower()}) | {check.title} | {check.severity.value} |" for check in checks
    ]
    return "\n".join([HEAD + "\n".join(rows), *map(_section, checks)])


def _section(check: Check) -> str:
    lines = [
        f"\n## {check.id}",
        f"**{_sentence(check.title)}** ({check.severity.value})\n",
        f"* Looked at: {check.probe}",
        f"* Cause: {check.cause}",
        f"* Fix: {check.fix}",
    ]
    if check.note:
        lines.append(f"* Tried: {check.note}")
    return "\n".join(lines) + ("\n" if check.id == select(())[-1].id else "")


def _sentence(title: str) -> str:
    # A name written small stays so.
    return (
        title
        if title.startswith(("corral", "firewalld", "ufw", "enforcer.toml", "iptables"))
        else title[0].upper() + title[1:]
    )


def main() -> int:
    """Write the file."""
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
