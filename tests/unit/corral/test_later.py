from __future__ import annotations

import io
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from corral import early
from corral.console import Console
from corral.context import Invocation
from corral.later import Later
from corral.session import User
from policy.errors import EnforcerError
from tests.unit.corral.fakes import FakeEnforcer


def test_the_result_is_waited_for() -> None:
    begun, go = threading.Event(), threading.Event()

    def work() -> int:
        begun.set()
        assert go.wait(10)
        return 7

    found = Later(work)
    assert begun.wait(10)
    go.set()
    assert found.result() == found.result() == 7


def test_what_went_wrong_is_raised_where_the_result_is_wanted() -> None:
    def work() -> int:
        raise KeyError("x")

    found = Later(work)
    for _ in range(2):
        with pytest.raises(KeyError):
            found.result()


def test_no_signal_is_for_such_a_thread() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    blocked = Later(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ())).result()
    assert {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} <= blocked
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.parametrize("asked_before", [True, False])
def test_the_host_service_is_judged_by_what_it_said(
    user: User, enforcer: FakeEnforcer, asked_before: bool
) -> None:
    def told(change: dict[str, Any]) -> Invocation:
        enforcer.version_answer |= change
        served = Later(enforcer.version) if asked_before else None
        made = Invocation(user, Path("/"), Console(io.StringIO()), served=served)
        made.__dict__["enforcer"] = enforcer
        return made

    told({}).check_enforcer()
    with pytest.raises(EnforcerError, match="nothing would be enforced"):
        told({"rootless": True}).check_enforcer()
    enforcer.running = False
    with pytest.raises(EnforcerError, match="is not running"):
        told({}).check_enforcer()


def test_a_host_service_that_is_not_there_is_nobody_s_error_until_it_is_needed(tmp_path: Path) -> None:
    asked = early.service({"XDG_RUNTIME_DIR": str(tmp_path)})
    with pytest.raises(EnforcerError, match="is not running"):
        asked.result()
