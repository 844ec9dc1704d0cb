from __future__ import annotations

from corral.ending import ASKED, HANG_UP, Ending


def test_signals_come_in_order_each_at_its_time_and_once() -> None:
    now = [100.0]
    ending = Ending(lambda: now[0])
    assert ending.wait() is None
    ending.plan(HANG_UP)
    assert (ending.due(), ending.wait()) == ([], 2.0)
    now[0] = 102.0
    assert (ending.due(), ending.due(), ending.wait()) == (["SIGTERM"], [], 10.0)
    now[0] = 500.0
    assert ending.wait() == 0.0
    assert (ending.due(), ending.wait()) == (["SIGKILL"], None)


def test_a_second_reason_to_end_never_makes_it_later_or_twice() -> None:
    now = [0.0]
    ending = Ending(lambda: now[0])
    ending.plan(ASKED)
    now[0] = 4.0
    ending.plan(HANG_UP)
    now[0] = 10.0
    assert ending.due() == ["SIGTERM", "SIGKILL"]
    now[0] = 1000.0
    assert ending.due() == []
