"""docs/verify-matrix.md: what is known of escaping from containers, tried in a sandbox and beside it.

::

    .venv/bin/python -m tests.system.verify_matrix NAME   # writes the page from a run in the running lab NAME

The table is ``tests.system.matrix.rows``; what is tried is in ``tests.system.matrix.probe``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from tests.lab import Lab

from .host import Host, install
from .matrix.rows import AREAS, MOUNTS, ROWS, Row, problems, seen
from .matrix.running import Answers, run

PAGE = Path(__file__).parents[2] / "docs" / "verify-matrix.md"
REGENERATE = "CORRAL_LAB_KEEP=1 make lab; .venv/bin/python -m tests.system.verify_matrix main"
TOOLS = {"C": "CDK", "D": "deepce", "B": "BOtB", "A": "amicontained", "S": "docker-bench"}
INTRO = """\
# Escapes and enumeration, tried

Made by `python -m tests.system.verify_matrix` from a run in the lab; nothing here is written by hand but this text and the columns
*technique*, *known to* and *expected*. A technique is what CDK, deepce, BOtB, amicontained or section 5 of docker-bench
try or ask for (to whom each is known is said to the best of our knowledge), or one beside them; the probes are corral's own and have nothing of theirs (`tests/system/matrix/`). Each is made three times in one run,
of the same image, and a test fails when the sandbox does not say what is expected:

* **sandbox**: in a session of `corral run`, by its program, with a policy that allows two names and has a secret.
* **`docker run`**: as root in a container as Docker makes it.
* **everything given**: as root in a container with `--privileged` and the host's network, processes, IPC, name and control groups;
  four that the lab's own filter of system calls forbids there are made by root of the host.

A probe that said the same in all three would prove nothing and fails the test, but for the rows that say *open*: what is so in a
sandbox, too, and stands in [limits.md](limits.md). In the two others there is, where something is searched for, one of its kind
to be found. Packets and questions are counted at the far end. `done` is a call that went through; names in capitals are the error it
ended with.

What the last two columns say depends on the host's kernel and engine, here {engine} on Linux {kernel}, whose kernel
has no sysrq, no AF_ALG and no modules. AppArmor and SELinux are not in it: what they add to Docker's containers is not shown here.

"""


def page(answers: Mapping[str, Answers], engine: str, kernel: str) -> str:
    """Return the page. Raises ValueError when something is not as it has to be."""
    wrong = problems(answers)
    if wrong:
        raise ValueError("not as it has to be:\n" + "\n".join(wrong))
    lines = [INTRO.format(engine=engine, kernel=kernel).rstrip("\n")]
    for area, rows in AREAS.items():
        lines.append(f"\n## {area}\n")
        lines.append("| technique | known to | expected | sandbox | `docker run` | everything given |")
        lines.append("|---|---|---|---|---|---|")
        lines += [line(row, answers[row.probe]) for row in rows]
    lines.append("\n## The mounts of a sandbox\n\nOf the profile opencode, with nothing in `mounts`.\n")
    lines.append("| whose | mount | type | |\n|---|---|---|---|")
    for whose, mounts in MOUNTS.items():
        for mount in mounts:
            target, _, rest = mount.partition(" ")
            kind, _, how = rest.rpartition(" ")
            lines.append(f"| {whose} | `{target}` | {kind} | {how} |")
    return "\n".join(lines) + "\n"


def line(row: Row, answer: Answers) -> str:
    """Return the line of a technique."""
    known = ", ".join(TOOLS[letter] for letter in row.known.split()) or "—"
    expected = f"{row.expected} (*open*)" if row.limit else row.expected
    cells = (row.technique, known, expected, answer.sandbox, answer.plain, answer.everything or "—")
    return "| " + " | ".join(cells) + " |"


def documented() -> dict[str, str]:
    """Return what the page says of a sandbox, by technique."""
    found = {}
    for text in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in text.split("|")[1:-1]]
        if len(cells) == 6:
            found[cells[0]] = cells[3]
    return {row.technique: found.get(row.technique, "") for row in ROWS}


def main(name: str | None) -> None:
    lab = Lab.attach(name)
    host = Host(install(lab), lab.internet)
    host.wait_enforcer()
    try:
        answers = seen(run(host))
    finally:
        host.end_projects()
    engine = host.box.run(["docker", "version", "-f", "{{.Server.Version}}"]).stdout.strip()
    kernel = ".".join(host.box.run(["uname", "-r"]).stdout.split(".")[:2])
    PAGE.write_text(page(answers, f"Docker {engine}", kernel))
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
