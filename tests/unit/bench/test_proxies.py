"""What is told of the comparison of proxies, and that its page tells the numbers that were measured."""

from __future__ import annotations

import json
from pathlib import Path

from tests.bench.proxies import ratios, table
from tests.results import RESULTS

ROOT = Path(__file__).parents[3]


def test_a_ratio_above_one_means_that_ours_is_better() -> None:
    rows = {
        "latency, ms": {"direct": 1.0, "corral-proxy": 2.0, "mitmdump, opaque": 6.0},
        "bulk, MiB/s": {"direct": 9.0, "corral-proxy": 8.0, "mitmdump, opaque": 2.0},
        "over direct, ms": {"corral-proxy": -0.1, "mitmdump, opaque": 1.0},
    }
    assert ratios(rows) == {
        "latency, ms": {"mitmdump, opaque": 3.0},
        "bulk, MiB/s": {"mitmdump, opaque": 4.0},
    }


def test_the_page_of_the_comparison_has_the_numbers_of_its_last_run() -> None:
    told = json.loads((RESULTS / "proxy-bench.json").read_text())
    page = (ROOT / "docs" / "decisions" / "065-proxy-compared.md").read_text()
    assert table(told) in page
