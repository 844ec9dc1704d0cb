"""The lab for system tests, one for the session. When it cannot start, the tests fail; none is skipped."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.lab import Box, Internet, Lab, LabError, engines

# Tests in several processes (pytest -n 2) have a lab for each.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ["CORRAL_LAB_NAME"] = f"{os.environ.get('CORRAL_LAB_NAME') or 'main'}-{worker}"

_FIXTURES = {"lab", "box", "internet", "corral_box"}


def _promised(item: pytest.Item) -> bool:
    """Whether it shows a case or injects a fault: those are for a rootless engine too, unless they say why not."""
    return any(item.get_closest_marker(name) is not None for name in ("case", "fault"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this directory that uses the lab, and skip those that are for other engines."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and _FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.lab)
        if item.path.is_relative_to(here) and item.get_closest_marker("engine") is None:
            unmarked = engines.why_not_unmarked(engines.chosen())
            if unmarked and not (engines.chosen().rootless and _promised(item)):
                item.add_marker(pytest.mark.skip(reason=unmarked))
        for mark in item.iter_markers("engine"):
            try:
                why_not = engines.why_not(engines.chosen(), mark.args, mark.kwargs.get("reason", ""))
            except LabError as error:
                raise pytest.UsageError(f"{item.nodeid}: {error}") from error
            if why_not:
                item.add_marker(pytest.mark.skip(reason=why_not))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say with a failure what arrived at the internet, of which kind, and who is still sent to there."""
    report = yield
    internet = getattr(item, "funcargs", {}).get("internet")
    if report.when == "call" and report.failed and internet is not None:
        with contextlib.suppress(Exception):  # the lab may be what failed
            arrived = [f"{' '.join(key)}: {count}" for key, count in internet.all_packets().items()]
            stuck = [
                f"{server}:{port} -> {client}:{other}, no answer"
                for server, port, client, other in internet.stuck()
            ]
            report.sections.append(("what arrived at the internet", "\n".join([*arrived, *stuck])))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was tampered with, and whether exactly that was noticed."""
    from .tamper import summary

    reports = [
        report for word in ("passed", "failed", "error") for report in terminalreporter.getreports(word)
    ]
    rows = summary((report.outcome, dict(report.user_properties)) for report in reports)
    if rows:
        terminalreporter.section("corral verify: each check, a tampering, what failed")
        for row in rows:
            terminalreporter.write_line(row)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """A running lab; CORRAL_LAB_KEEP=1 leaves it up, CORRAL_LAB_NAME and CORRAL_LAB_ENGINE choose which."""
    lab = Lab.up()
    try:
        yield lab
    finally:
        lab.close()


@pytest.fixture
def box(lab: Lab) -> Box:
    return lab.box


@pytest.fixture
def internet(lab: Lab) -> Iterator[Internet]:
    """The internet with its usual names and empty counters."""
    lab.internet.reset_names()
    lab.internet.end_stuck()
    lab.internet.reset_counters()
    yield lab.internet
    lab.internet.reset_names()


@pytest.fixture(scope="session")
def corral_box(lab: Lab) -> Box:
    """The box with the work tree's corral installed for `dev`."""
    lab.install_corral()
    return lab.box
