"""The main job, as ``make demo`` plays it."""

from __future__ import annotations

import pytest

from tests.demo.scenario import play, render
from tests.lab import Lab

from .host import EVERY_ENGINE, Host

pytestmark = [pytest.mark.representative, EVERY_ENGINE]


def test_a_real_agent_does_its_work_and_reaches_nothing_else(lab: Lab, host: Host) -> None:
    lines: list[str] = []
    rows = play(lab, lines.append)
    assert all(row.good for row in rows), render(rows) + "\n" + "\n".join(lines)
    assert len(rows) == 8
