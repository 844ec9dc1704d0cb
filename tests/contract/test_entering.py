"""Entering real namespaces by descriptors."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from enforcer.netfilter import namespace

pytestmark = pytest.mark.netns


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    """A process in user, network and mount namespaces of its own."""
    command = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", "echo ready; read end"]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_a_program_runs_in_the_namespaces_of_the_process_and_after_its_end_in_none(
    other: subprocess.Popen[str],
) -> None:
    daemon = namespace.describe(other.pid)
    command = [*namespace.enter(daemon), "sh", "-c", "cd /proc/self/ns; readlink user net mnt; id -u"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    there = Path(f"/proc/{other.pid}/ns")
    wanted = [os.readlink(there / name) for name in ("user", "net", "mnt")]
    assert done.stdout.split() == [*wanted, "0"]
    assert all(os.readlink(f"/proc/self/ns/{name}") not in wanted for name in ("user", "net", "mnt"))
    other.kill()
    other.wait()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "has ended" in done.stderr
