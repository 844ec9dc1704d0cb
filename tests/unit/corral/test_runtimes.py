from __future__ import annotations

import io
import json
from collections.abc import Callable

import pytest

from corral import lifecycle, runtimes
from corral.context import Invocation
from corral.lifecycle import Prepared, created, prepare
from corral.session import Request
from policy.container import Limits
from policy.errors import EngineError
from policy.loader import LoadedPolicy
from tests.unit.corral.fakes import FakeDocker

POLICY = "profile: opencode\nname: demo\negress: {mode: none}\nruntime: RUNTIME\n"


@pytest.fixture
def asking(
    invocation: Invocation, loaded_of: Callable[[str], LoadedPolicy], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Invocation]:
    class Built:
        image = "sha256:1"

    monkeypatch.setattr(lifecycle, "ensure_image", lambda _: Built)
    monkeypatch.setattr(lifecycle, "refuse_root", lambda _: None)

    def make(runtime: str) -> Invocation:
        loaded = loaded_of(POLICY.replace("RUNTIME", runtime))
        invocation.__dict__.update(loaded=loaded, approved=loaded)
        return invocation

    return make


def test_a_runtime_that_docker_has_not_starts_nothing_and_the_fix_is_told(
    asking: Callable[[str], Invocation], docker_engine: FakeDocker
) -> None:
    with pytest.raises(EngineError, match=r"Docker has no runtime kata, .*it has none") as caught:
        prepare(asking("kata"))
    assert caught.value.exit_code == 1
    assert '"runtimes": {"kata"' in (caught.value.hint or "")
    assert "create" not in docker_engine.calls


def test_one_that_it_has_is_used_and_what_it_takes_away_is_said(
    asking: Callable[[str], Invocation],
    docker_engine: FakeDocker,
    said: io.StringIO,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(docker_engine, "info", lambda: {"Runtimes": {"runc": {}, "runsc": {}}})
    made = asking("runsc")
    prepare(made)
    assert "runtime runsc: corral was never tried with it" in said.getvalue()
    with created(
        made, Prepared(made.user, "sha256:1", None, {}, Limits()), Request("run", ("x",), "0a1b2c3d")
    ):
        pass
    body = docker_engine.created[-1]
    assert body["HostConfig"]["Runtime"] == "runsc"
    assert "CORRAL_MOUNTS=[]" in body["Env"]


def test_dockers_own_is_not_even_asked_for(
    asking: Callable[[str], Invocation], docker_engine: FakeDocker, said: io.StringIO
) -> None:
    made = asking("runc")
    prepare(made)
    assert "info" not in docker_engine.calls
    assert "runtime" not in said.getvalue()
    with created(
        made, Prepared(made.user, "sha256:1", None, {}, Limits()), Request("run", ("x",), "0a1b2c3d")
    ):
        pass
    body = docker_engine.created[-1]
    assert "Runtime" not in body["HostConfig"]
    (text,) = [row.partition("=")[2] for row in body["Env"] if row.startswith("CORRAL_MOUNTS=")]
    assert len(json.loads(text)) == 1
    assert runtimes.warnings("runc") == ()
