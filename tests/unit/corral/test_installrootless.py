"""Installing for an engine of the user's own: what is written, and that a failed start leaves things as they were."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from corral import context, rootless
from corral import installrootless as module
from corral.membership import Membership
from corral.session import User
from enforcer.netfilter import namespace
from policy.errors import EnforcerError, InstallError

OWN = Path("/home/dev/.local/share/corral/netfilter")
DIRECTORY = OWN / "1-abc"
MEMBER = Membership(1000, "dev", None, member=False)


@pytest.mark.parametrize(
    ("shown", "manager", "expected"),
    [
        ("PATH=/a/bin:/usr/bin OTHER=x\n", "PATH=/m\n", "/a/bin:/usr/bin"),
        (f"PATH={OWN}/0-old/bin:/usr/bin\n", "", "/usr/bin"),
        ('OTHER=x "PATH=/a b/bin:/usr/bin"\n', "", "/a b/bin:/usr/bin"),
        ("OTHER=x\n", "LANG=C\nPATH=/m/bin:/usr/bin\n", "/m/bin:/usr/bin"),
        ("\n", "LANG=C\n", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
    ],
)
def test_the_path_of_the_engine_s_unit_is_kept_without_ours(shown: str, manager: str, expected: str) -> None:
    assert module.search_path(shown, manager, OWN) == expected


def test_the_drop_in_puts_our_dockerd_first_and_quotes_what_systemd_would_read() -> None:
    text = module.drop_in(Path("/home/50%/c"), "/a:/b")
    assert text.splitlines()[-1] == 'Environment="PATH=/home/50%%/c/bin:/a:/b"'
    assert "[Service]" in text


def test_the_plan_says_which_engine_and_that_it_is_started_again() -> None:
    told = module.plan_text(DIRECTORY, Path("/run/user/1000/docker.sock"), restart=True)
    assert "your own (rootless) engine at /run/user/1000/docker.sock" in told
    assert "without root" in told
    assert "sudo" not in told
    assert "restart your docker.service" in told
    assert "restart" not in module.plan_text(DIRECTORY, Path("/x"), restart=False)


def test_the_code_is_written_whole_once_and_runs_as_dockerd(tmp_path: Path) -> None:
    directory, files = module.code_directory(tmp_path)
    module.write_code(directory, files)
    before = directory.stat().st_ino
    module.write_code(directory, files)
    assert directory.stat().st_ino == before
    (directory / "corral-netfilter").write_text("spoilt")
    module.write_code(directory, files)
    assert directory.stat().st_ino != before
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]
    (directory.parent / "0-old").mkdir()
    module.forget_others(directory)
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]
    # As dockerd, outside of rootlesskit: it becomes the real one.
    real = tmp_path / "real" / "dockerd"
    real.parent.mkdir()
    real.write_text("#!/bin/sh\necho real $1\n")
    real.chmod(0o755)
    ours = directory / "bin" / "dockerd"
    assert os.access(ours, os.X_OK)
    done = subprocess.run(
        [sys.executable, str(ours), "--version"],
        env={"PATH": f"{ours.parent}:{real.parent}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "real --version\n", done.stderr


class Systemd:
    """The user's manager, as far as it is told things."""

    def __init__(self, fail: str = "") -> None:
        self.told: list[tuple[str, ...]] = []
        self.fail = fail

    def __call__(self, _environ: Any, *words: str) -> str:
        self.told.append(words)
        if self.fail and self.fail == words[0]:
            self.fail = ""
            raise InstallError("it does not start")
        return ""


def test_an_engine_that_does_not_start_behind_the_rules_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped_in = tmp_path / "corral.conf"
    dropped_in.touch()
    systemd = Systemd(fail="restart")
    monkeypatch.setattr(module.install, "systemctl", systemd)
    with pytest.raises(InstallError, match="does not start"):
        module._start_engine({}, dropped_in)
    assert not dropped_in.exists()
    assert systemd.told[1:] == [("daemon-reload",), ("restart", "docker.service")]


def test_an_engine_that_ignores_the_drop_in_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [False, False, True]
    monkeypatch.setattr(module, "guarded", lambda _environ: answers.pop(0))
    module.await_guarded({}, clock=lambda: 0.0, sleep=lambda _: None)
    monkeypatch.setattr(module, "guarded", lambda _environ: False)
    spent: list[float] = []
    with pytest.raises(InstallError, match="not by corral's dockerd") as caught:
        module.await_guarded({}, clock=lambda: sum(spent) * 100, sleep=spent.append)
    assert "PATH or DOCKERD" in str(caught.value.hint)


def test_containers_that_a_restart_would_end_stop_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(module, "guarded", lambda _environ: False)
    monkeypatch.setattr(module, "check_before", lambda *_: None)
    monkeypatch.setattr(module, "membership", lambda _uid: MEMBER)
    monkeypatch.setattr(module, "running_containers", lambda _environ: ["web"])
    done: list[str] = []
    monkeypatch.setattr(module, "install_rootless", lambda *_: done.append("installed"))
    with pytest.raises(InstallError, match="would end web"):
        module.run(echo=lambda _: None, assume_yes=True)
    module.run(echo=done.append, dry_run=True)
    assert "installed" not in done
    assert "restart your docker.service" in done[0]


class Enforcer:
    """An enforcer that watches one kind of engine."""

    def __init__(self, *, rootless: bool) -> None:
        self.answer = {"rootless": rootless, "writer": {}}

    def version(self) -> dict[str, Any]:
        return self.answer


@pytest.mark.parametrize("own", [True, False])
def test_an_enforcer_of_the_other_engine_is_refused(own: bool) -> None:
    user = User(1000, 1000, Path("/home/dev"), {}, rootless=own)
    invocation = context.Invocation(user, Path("/"), None)  # type: ignore[arg-type]
    invocation.__dict__["enforcer"] = Enforcer(rootless=not own)
    with pytest.raises(EnforcerError, match="so nothing would be enforced") as caught:
        invocation.check_enforcer()
    assert "corral install" in str(caught.value.hint)


def test_an_engine_that_nobody_guarded_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    (tmp_path / namespace.PID_FILE).write_text(str(os.getpid()))
    user = User(1000, 1000, Path("/home/dev"), environ, rootless=True)
    invocation = context.Invocation(user, Path("/"), None)  # type: ignore[arg-type]
    invocation.__dict__["enforcer"] = Enforcer(rootless=True)
    with pytest.raises(EnforcerError, match="without corral's rules") as caught:
        invocation.check_enforcer()
    assert "systemctl --user restart docker.service" in str(caught.value.hint)


def test_what_is_looked_up_is_looked_up_where_the_bridges_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    chosen: Callable[[Any], bool] = lambda _environ: False  # noqa: E731 - replaced below
    monkeypatch.setattr(rootless, "chosen", chosen)
    assert rootless.entering(environ) == ()
    monkeypatch.setattr(rootless, "chosen", lambda _environ: True)
    with pytest.raises(EnforcerError, match="does not run"):
        rootless.entering(environ)
    (tmp_path / namespace.PID_FILE).write_text(str(os.getpid()))
    assert rootless.entering(environ)[-4] == str(os.getpid())
