"""Which engine a lab has."""

from __future__ import annotations

import pytest

from tests.lab import engines
from tests.lab.__main__ import main
from tests.lab.execute import LabError


def test_engine_comes_from_the_call_then_the_environment_then_the_default() -> None:
    environ = {"CORRAL_LAB_ENGINE": "sid"}
    assert engines.chosen("bookworm", environ).name == "bookworm"
    assert engines.chosen(None, environ).name == "sid"
    assert engines.chosen(None, {}).name == engines.chosen(None, {"CORRAL_LAB_ENGINE": ""}).name == "trixie"


def test_unknown_engine_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        LabError,
        match="'buster'\n  hint: one of bookworm, bookworm-legacy, trixie-own, rootless, trixie, sid",
    ):
        engines.chosen("buster", {})
    assert main(["up", "--name", "nosuchlab", "--engine", "buster"]) == 1
    assert "no lab has the engine 'buster'" in capsys.readouterr().err


def test_every_engine_has_the_common_packages_and_its_own() -> None:
    for engine in engines.ENGINES.values():
        assert {"docker.io", "systemd", "python3"} <= set(engine.packages)
        assert set(engine.extra) <= set(engine.packages)
        assert list(engine.packages) == sorted(set(engine.packages))


def test_a_box_with_the_users_own_engine_runs_the_tests_that_are_for_it() -> None:
    own, trixie = engines.ENGINES["rootless"], engines.ENGINES["trixie"]
    assert (own.suite, own.packages) == (trixie.suite, trixie.packages)
    assert "system's engine" in (engines.why_not_unmarked(own) or "")
    assert engines.why_not_unmarked(trixie) is None


def test_a_test_for_some_engines_tells_why_it_is_left_out_on_the_others() -> None:
    sid, trixie = engines.ENGINES["sid"], engines.ENGINES["trixie"]
    assert engines.why_not(sid, ["sid", "trixie"], "needs 26") is None
    assert engines.why_not(trixie, ["sid"], "needs 28") == "not on trixie, but on sid: needs 28"
    for names, reason in (([], "why"), (["sid"], ""), (["buster"], "why")):
        with pytest.raises(LabError):
            engines.why_not(sid, names, reason)
