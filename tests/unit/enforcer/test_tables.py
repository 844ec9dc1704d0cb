"""The lock that writers of the legacy tables share."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from enforcer.netfilter import tables
from enforcer.netfilter.tables import LegacyTables

SCRIPT = [(4, "*filter\nCOMMIT\n")]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.tries = 0

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.tries += 1


def test_a_lock_that_is_never_let_go_is_an_error_that_names_it(tmp_path: Path) -> None:
    lock, clock = tmp_path / "xtables.lock", Clock()
    made = LegacyTables(
        lambda *_: pytest.fail("written without the lock"), lock, lambda: clock.now, clock.sleep
    )
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=rf"has held {lock}"):
            made.restore(SCRIPT)
    assert tables.PATIENCE <= clock.now < tables.PATIENCE + 1


def test_a_lock_that_comes_free_is_taken_and_let_go(tmp_path: Path) -> None:
    lock, clock = tmp_path / "xtables.lock", Clock()
    ran: list[str] = []

    def run(_argv: object, stdin: str | None) -> str:
        with lock.open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ran.append(str(stdin))
        return ""

    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)

        def sleep(seconds: float) -> None:
            clock.sleep(seconds)
            if clock.tries == 3:
                fcntl.flock(held, fcntl.LOCK_UN)

        LegacyTables(run, lock, lambda: clock.now, sleep).restore(SCRIPT)
    assert len(ran) == 1
    with lock.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
