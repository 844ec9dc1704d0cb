"""Programs end with the call that ran them; processes are told apart from later ones of the same pid."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.lab import execute
from tests.lab.execute import CommandError, LabError, Process, Steps


def test_output_and_exit_code_are_returned() -> None:
    result = execute.run(["/bin/sh", "-c", "cat; echo err >&2; exit 3"], input="in", check=False)
    assert (result.stdout, result.stderr, result.returncode) == ("in", "err\n", 3)


def test_failing_program_raises_with_its_last_words() -> None:
    with pytest.raises(CommandError, match=r"exit code 3\n  \| last words") as caught:
        execute.run(["/bin/sh", "-c", "echo last words >&2; exit 3"])
    assert caught.value.result.returncode == 3


def test_missing_program_is_a_lab_error() -> None:
    with pytest.raises(LabError, match="cannot run /no/such/program"):
        execute.run(["/no/such/program"])


def test_standard_input_is_empty_unless_given() -> None:
    assert execute.run(["/bin/cat"]).stdout == ""


def test_late_program_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 600 & echo $! $$ >{pids}; sleep 600"
    with pytest.raises(LabError, match=r"did not end within 0\.5 s"):
        execute.run(["/bin/sh", "-c", script], timeout=0.5)
    for pid in pids.read_text().split():
        execute.wait_until(lambda pid=pid: execute.start_time(int(pid)) is None, "it ends", 5)  # type: ignore[misc]


def test_interrupted_program_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from tests.lab import execute
execute.run(["/bin/sh", "-c", "echo $$ >{pids}; sleep 600"], timeout=600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as caller:
        execute.wait_until(lambda: execute.read_text(pids) != "", "the program runs", 10)
        caller.send_signal(2)
    assert execute.start_time(int(pids.read_text())) is None


def test_process_is_itself_and_not_a_successor() -> None:
    me = Process.of(os.getpid())
    assert me.alive()
    assert not Process(me.pid, me.start - 1).alive()


def test_a_zombie_is_not_alive() -> None:
    with subprocess.Popen(["/bin/true"], stdout=subprocess.PIPE) as child:
        assert child.stdout
        child.stdout.read()
        execute.wait_until(lambda: execute.start_time(child.pid) is None, "it is a zombie", 5)
        assert Path(f"/proc/{child.pid}").exists()


def test_successor_is_not_killed() -> None:
    with subprocess.Popen(["/bin/sleep", "600"]) as child:
        Process(child.pid, Process.of(child.pid).start + 1).kill()
        assert Process.of(child.pid).alive()
        Process.of(child.pid).kill()
        assert child.wait(5) == -9


def test_daemon_that_dies_before_it_serves_is_an_error_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"did not get ready\n  \| no room"):
        execute.start_daemon(["/bin/sh", "-c", "echo no room"], log=tmp_path / "log", ready=True)


def test_daemon_that_stays_silent_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = ["/bin/sh", "-c", f"echo $$ >{pids}; sleep 600"]
    with pytest.raises(LabError, match="did not get ready"):
        execute.start_daemon(command, log=tmp_path / "log", ready=True, timeout=0.5)
    execute.wait_until(lambda: execute.start_time(int(pids.read_text())) is None, "it ends", 5)


def test_ready_daemon_is_returned_alive(tmp_path: Path) -> None:
    command = ["/bin/bash", "-c", "echo 1 >&$2; exec sleep 600", "daemon"]
    process = execute.start_daemon(command, log=tmp_path / "log", ready=True)
    assert process.alive()
    process.kill()
    execute.wait_until(lambda: not process.alive(), "it ends", 5)


def test_both_runs_at_the_same_time() -> None:
    barrier = threading.Barrier(2, timeout=10)
    assert execute.both(lambda: (barrier.wait(), 1)[1], lambda: (barrier.wait(), 2)[1]) == (1, 2)


def test_failure_of_one_ends_the_programs_of_the_other(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def slow() -> None:
        execute.run(["/bin/sh", "-c", f"echo $$ >{pids}; exec sleep 600"], timeout=600)

    def failing() -> None:
        execute.wait_until(lambda: execute.read_text(pids) != "", "the other one runs", 10)
        raise LabError("broken")

    begin = time.monotonic()
    with pytest.raises(LabError, match="broken"):
        execute.both(slow, failing)
    assert time.monotonic() - begin < 300
    assert execute.start_time(int(pids.read_text())) is None


def test_waiting_in_vain_says_for_what() -> None:
    with pytest.raises(LabError, match=r"waited 0\.1 s in vain: pigs fly"):
        execute.wait_until(lambda: False, "pigs fly", 0.1)


def test_steps_print_one_line_each_with_the_time() -> None:
    out = io.StringIO()
    ticks = iter([0.0, 1.0, 3.5, 4.0, 5.0])
    steps = Steps(out, clock=lambda: next(ticks))
    with steps("thinking"):
        pass
    with pytest.raises(ValueError, match="no"), steps("failing"):
        raise ValueError("no")
    assert out.getvalue() == "lab: thinking: 2.5 s\nlab: failing: FAILED after 1.0 s\n"


def test_a_daemon_is_killed_with_what_it_forked(tmp_path: Path) -> None:
    script = "sleep 60 & echo $! >child; wait"
    daemon = execute.start_daemon(["/bin/sh", "-c", script], log=tmp_path / "log", cwd=tmp_path)
    execute.wait_until(lambda: execute.read_text(tmp_path / "child").strip() != "", "it forked", 10)
    child = execute.Process.of(int((tmp_path / "child").read_text()))
    daemon.kill_group()
    assert not daemon.alive()
    assert not child.alive()
    daemon.kill_group()
