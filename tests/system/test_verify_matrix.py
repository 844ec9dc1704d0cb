"""What docs/verify-matrix.md says of a sandbox is what the probes say now, and each of them could say something else."""

from __future__ import annotations

import dataclasses

import pytest

from .host import Host
from .matrix.rows import ROWS, problems, seen
from .matrix.running import run
from .verify_matrix import REGENERATE, documented


@pytest.mark.representative
@pytest.mark.engine("trixie", reason="the page is of one engine: filters of system calls differ with its age")
def test_no_known_technique_finds_more_than_the_page_says(host: Host) -> None:
    answers = seen(run(host))
    assert problems(answers) == []
    told = {row.technique: answers[row.probe].sandbox for row in ROWS}
    assert told == documented(), f"docs/verify-matrix.md is not what the probes say: {REGENERATE}"
    # A probe that is answered otherwise is found, and one that is answered likewise everywhere.
    name = ROWS[0].probe
    opened = dataclasses.replace(answers[name], sandbox=answers[name].everything)
    assert problems({**answers, name: opened}) == [f"{name}: {opened.sandbox}, not {ROWS[0].expected}"]
    same = dataclasses.replace(answers[name], plain=ROWS[0].expected, everything=ROWS[0].expected)
    assert problems({**answers, name: same}) == [
        f"{name}: says {ROWS[0].expected} everywhere, so it could not fail"
    ]
