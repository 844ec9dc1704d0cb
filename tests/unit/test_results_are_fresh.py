"""The committed result file speaks for the tree it is in, or for one of a few days ago, and the page says which."""

from __future__ import annotations

import json

from tests import results
from tests.lab import engines


def test_everything_was_run_not_long_before_the_last_change_to_the_service_and_the_lab() -> None:
    told = json.loads((results.RESULTS / f"{engines.DEFAULT}.json").read_text())
    stale = results.why_stale(told, results.digest(), results.last_change())
    assert stale is None, f"{stale}; run: make test-all, and commit docs/results"
