"""Entering the namespaces of one process: whoever has its id later is not entered."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from enforcer.netfilter import entering, namespace
from enforcer.netfilter.entering import NotThere

PID = 4711


class Proc:
    """A /proc with one process."""

    def __init__(self, top: Path) -> None:
        self.top = top

    def run(self, start: int, net: str = "net-a") -> int:
        """Have the process, and return the inode of its network namespace."""
        directory = self.top / str(PID)
        (directory / "ns").mkdir(parents=True, exist_ok=True)
        fields = ["S", *["0"] * 18, str(start), "0"]
        (directory / "stat").write_text(f"{PID} (a ) program) {' '.join(fields)}\n")
        for name, target in (("user", "user"), ("mnt", "mnt"), ("net", net)):
            (self.top / target).touch()
            (directory / "ns" / name).unlink(missing_ok=True)
            (directory / "ns" / name).symlink_to(self.top / target)
        return (self.top / net).stat().st_ino


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_is_held_is_what_the_process_was_in(proc: Proc) -> None:
    netns = proc.run(100)
    held = entering.hold(PID, 100, netns, str(proc.top))
    proc.run(200, "net-b")
    try:
        assert os.fstat(held["net"]).st_ino == netns
        assert set(held) == {"user", "net", "mnt"}
    finally:
        for descriptor in held.values():
            os.close(descriptor)


def test_a_process_that_got_the_id_later_is_not_entered_and_nothing_stays_open(proc: Proc) -> None:
    netns = proc.run(100)
    before = open_descriptors()
    other = proc.run(200, "net-b")
    for start, inode in ((100, netns), (100, other), (200, netns)):
        with pytest.raises(NotThere, match="another process"):
            entering.hold(PID, start, inode, str(proc.top))
    with pytest.raises(NotThere, match="No such file"):
        entering.hold(PID + 1, 100, netns, str(proc.top))
    assert open_descriptors() == before


def test_an_id_that_is_given_again_between_looking_and_entering_changes_nothing(
    proc: Proc, monkeypatch: pytest.MonkeyPatch
) -> None:
    netns = proc.run(100)
    started = entering._started

    def late(place: int) -> int:
        # The old process ends and its id is given to another one, after its namespaces were opened.
        proc.top.joinpath(str(PID)).rename(proc.top / "ended")
        proc.run(300, "net-b")
        return started(place)

    monkeypatch.setattr(entering, "_started", late)
    held = entering.hold(PID, 100, netns, str(proc.top))
    assert os.fstat(held["net"]).st_ino == netns
    for descriptor in held.values():
        os.close(descriptor)


def test_the_command_enters_the_descriptors_and_never_the_id(proc: Proc) -> None:
    netns = proc.run(100)
    ran: list[list[str]] = []

    def execute(_path: str, argv: list[str]) -> None:
        for word in argv:
            if "/proc/self/fd/" in word:
                assert os.get_inheritable(int(word.rpartition("/")[2]))
        ran.append(argv)

    words = [str(PID), "100", str(netns), "--", "ip", "-j", "link"]
    with pytest.raises(SystemExit):
        entering.main(words, {"PATH": ""}, execute, str(proc.top))
    (argv,) = ran
    assert argv[:2] == ["nsenter", "--preserve-credentials"]
    assert argv[-3:] == ["ip", "-j", "link"]
    assert "-t" not in argv
    assert str(PID) not in argv
    for word in argv:
        if "/proc/self/fd/" in word:
            os.close(int(word.rpartition("/")[2]))


def test_another_life_of_the_process_ends_with_a_message_and_runs_nothing() -> None:
    own = namespace.describe("self")
    wrong = namespace.Daemon(own.pid, own.start + 1, own.netns)
    done = subprocess.run(
        [*namespace.enter(wrong), "echo", "ran"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "another process has its id" in done.stderr
    assert done.stdout == ""
    assert namespace.enter(wrong)[0] == sys.executable
