"""What a killed command line leaves behind is removed, and nothing else is."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enforcer.leftovers import directory_of
from policy import holding
from policy.errors import EngineError
from policy.identity import StatePaths

from .servicebench import SANDBOX, UID, World, eventually, play

__all__ = ["play"]

HOLD = """\
import sys, time
from pathlib import Path
from policy import holding
lock = holding.take(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def ended(**changes: Any) -> dict[str, Any]:
    labels = {
        "io.corral.uid": str(UID),
        "io.corral.sandbox": SANDBOX.id,
        "io.corral.session": "00000001",
        "io.corral.service": "main",
        "io.corral.purpose": "run",
    }
    labels.update(
        {f"io.corral.{key}": value for key, value in changes.items() if key not in ("name", "status")}
    )
    return {
        "Name": changes.get("name", f"/{SANDBOX.container('main', '00000001')}"),
        "State": {"Status": changes.get("status", "exited")},
        "Config": {"Labels": {key: value for key, value in labels.items() if value is not None}},
    }


def test_an_ended_session_is_known_by_its_labels_and_its_name(tmp_path: Path) -> None:
    wanted = StatePaths(tmp_path / SANDBOX.id).session("00000001")
    assert directory_of(ended(), UID, tmp_path) == wanted
    assert directory_of(ended(status="dead"), UID, tmp_path) == wanted
    # One that was never started has nobody only where its command line was: that made a directory first.
    assert directory_of(ended(status="created"), UID, tmp_path) is None
    wanted.mkdir(parents=True)
    assert directory_of(ended(status="created"), UID, tmp_path) == wanted


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "running"},
        {"status": "paused"},
        {"uid": "4242"},
        {"uid": None},
        {"sandbox": "../x"},
        {"sandbox": None},
        {"session": "0000000g"},
        {"service": "../main"},
        {"purpose": "daemon"},
        {"purpose": None},
        {"name": "/my-corral-x"},
        {"name": f"/{SANDBOX.container('main', '00000001')}x"},
        {"name": f"/x{SANDBOX.container('main', '00000001')}"},
    ],
    ids=str,
)
def test_nothing_else_is_taken_for_one(changes: dict[str, Any], tmp_path: Path) -> None:
    assert directory_of(ended(**changes), UID, tmp_path) is None


@pytest.mark.parametrize("mark", [holding.KEPT, holding.LEFT])
def test_what_somebody_wants_to_read_stays(mark: str, tmp_path: Path) -> None:
    directory = StatePaths(tmp_path / SANDBOX.id).session("00000001")
    directory.mkdir(parents=True)
    (directory / mark).touch()
    assert directory_of(ended(), UID, tmp_path) is None


def test_an_ended_container_goes_when_its_command_line_was_killed(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001", running=True, held=False)
        directory = StatePaths(world.data / SANDBOX.id).session("00000001")
        holder = subprocess.Popen([sys.executable, "-c", HOLD, str(directory)], stdout=subprocess.PIPE)
        assert holder.stdout is not None
        try:
            assert await asyncio.to_thread(holder.stdout.readline) == b"held\n"
            world.engine.inspects["c1"]["State"] = {"Status": "exited", "Running": False}
            await world.service._leftovers.sweep()
            assert "c1" in world.engine.inspects
        finally:
            holder.send_signal(signal.SIGKILL)
            holder.wait(10)
            holder.stdout.close()
        world.engine.send("die", "c1")
        await eventually(lambda: "c1" not in world.engine.inspects)

    play(acts)


def test_a_container_that_was_never_started_goes_when_its_command_line_was_killed(
    play: Callable[..., World],
) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001", running=True, held=False)
        lock = holding.take(StatePaths(world.data / SANDBOX.id).session("00000001"))
        world.engine.inspects["c1"]["State"] = {"Status": "created", "Running": False}
        try:
            await world.service._leftovers.sweep()
            assert "c1" in world.engine.inspects
        finally:
            os.close(lock)
        await world.service._leftovers.sweep()
        # Its sandbox's other sessions are not held to what it might ask for any more.
        await eventually(lambda: "c1" not in world.service.tracker.sessions)
        assert "c1" not in world.engine.inspects

    play(acts)


def test_a_container_that_cannot_be_removed_is_tried_again(
    play: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001", running=True, held=False)
        world.engine.inspects["c1"]["State"] = {"Status": "exited", "Running": False}
        remove = world.engine.remove
        monkeypatch.setattr(world.engine, "remove", lambda _: (_ for _ in ()).throw(EngineError("no")))
        await world.service._leftovers.sweep()
        monkeypatch.setattr(world.engine, "remove", remove)
        assert "c1" in world.engine.inspects
        await world.service._leftovers.sweep()
        assert "c1" not in world.engine.inspects

    play(acts)


def test_a_session_is_held_by_one_and_a_directory_that_was_replaced_by_none(tmp_path: Path) -> None:
    directory = tmp_path / "session"
    with holding.unheld(directory) as free:
        assert free
    directory.mkdir()
    lock = holding.take(directory)
    with holding.unheld(directory) as free:
        assert not free
    os.close(lock)
    with holding.unheld(directory) as free:
        assert free
        with holding.unheld(directory) as again:
            assert not again
    (tmp_path / "link").symlink_to(directory)
    with holding.unheld(tmp_path / "link") as free:
        assert not free


def test_a_session_is_not_left_while_somebody_came_back_to_it(tmp_path: Path) -> None:
    os.close(holding.take(tmp_path))
    (tmp_path / holding.ATTENDED).touch()
    with holding.unheld(tmp_path) as free:
        assert free
    with (tmp_path / holding.ATTENDED).open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with holding.unheld(tmp_path) as free:
            assert not free
    (tmp_path / holding.ATTENDED).unlink()
    (tmp_path / holding.ATTENDED).symlink_to("/dev/null")
    with holding.unheld(tmp_path) as free:
        assert not free


def test_a_file_system_that_locks_no_directories_is_no_reason_not_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def without_directories(descriptor: int, how: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", without_directories)
    os.close(holding.take(tmp_path))
    with (tmp_path / holding.ATTENDED).open("w") as file:
        with holding.unheld(tmp_path) as free:
            assert free
        flock(file, fcntl.LOCK_EX)
        with holding.unheld(tmp_path) as free:
            assert not free


def test_a_sandbox_that_two_work_with_is_idle_when_both_have_ended(tmp_path: Path) -> None:
    file = tmp_path / "use.lock"
    with holding.idle(file) as nobody:
        assert nobody
    assert not file.exists()
    locks = [holding.share(file), holding.share(file)]
    for lock in locks:
        with holding.idle(file) as nobody:
            assert not nobody
        os.close(lock)
    with holding.idle(file) as nobody:
        assert nobody
