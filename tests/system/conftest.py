"""The lab for system tests, one for the session. When it cannot start, the tests fail; none is skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import Box, Internet, Lab

_FIXTURES = {"lab", "box", "internet", "corral_box"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this directory that uses the lab."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and _FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.lab)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """A running lab; CORRAL_LAB_KEEP=1 leaves it up, CORRAL_LAB_NAME chooses which."""
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
    lab.internet.reset_counters()
    yield lab.internet
    lab.internet.reset_names()


@pytest.fixture(scope="session")
def corral_box(lab: Lab) -> Box:
    """The box with the work tree's corral installed for `dev`."""
    lab.install_corral()
    return lab.box
