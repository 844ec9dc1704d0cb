"""A check that cannot fail is a defect: each is seen to fail, alone, when just its property is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.lab import Lab

from .host import Host
from .tamper import TABLE, Tampering
from .tamperbench import Bench, Pool, failed, note, parameters, prepared
from .test_gate import answering

INSIDE = [row for row in TABLE if not row.whole]


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest, lab: Lab, installed: object) -> Iterator[Pool]:
    """Everything that this run wants measured, under way."""
    wanted = [
        item.callspec.params["tampering"]
        for item in request.session.items
        if item.path == request.path
        and "pool" in getattr(item, "fixturenames", ())
        and hasattr(item, "callspec")
    ]
    lab.internet.reset_names()
    host = Host(lab.box, lab.internet)
    host.wait_enforcer()
    with ExitStack() as stack:
        stack.callback(host.end_projects)
        bench = stack.enter_context(prepared(lab, host))
        stack.enter_context(answering(lab, host, bench.names["PROBE"]))
        pool = Pool(bench)
        stack.callback(pool.close)
        pool.ask("", lambda: bench.measure(None))
        for row in wanted:
            pool.ask(row.ident, lambda row=row: bench.measure(row))
        yield pool


@pytest.mark.parametrize("tampering", parameters(INSIDE))
def test_a_container_that_is_wrong_in_one_way_fails_exactly_that_check(
    pool: Pool, tampering: Tampering, record_property: Callable[[str, object], None]
) -> None:
    if why := tampering.idle.get(pool.bench.host.box.engine.suite):
        pytest.skip(why)
    note(record_property, tampering)
    right = pool.result("")
    assert failed(right) == set(), right
    results = pool.result(tampering.ident)
    assert failed(results) == pool.bench.expected(tampering, right), {
        name: results[name] for name in failed(results)
    }
    if tampering.check not in {"expectations"}:
        assert results.keys() == right.keys()


def test_the_bench_is_used_for_all_checks_of_the_inside(pool: Pool) -> None:
    """A check that a container of this policy makes, and that no tampering is for, would be missing here."""
    bench: Bench = pool.bench
    names = {bench.filled(row.check) for row in INSIDE}
    assert set(pool.result("")) <= names | {
        # The same check of another name of the policy.
        "pinned-name:allowed2.corral.example"
    }
