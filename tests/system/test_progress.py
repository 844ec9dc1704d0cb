"""What somebody at a terminal sees of a build and of an agent that is brought up, and what a pipe gets."""

from __future__ import annotations

import re

import pytest

from .host import BASE_POLICY, Host
from .person import at_terminal
from .test_daemon import DAEMON, ENV_FILE, WORK

TIME = r"\(\d+\.\d s"


@pytest.mark.parametrize("columns", ["120", "1"])
def test_a_build_at_a_terminal_shows_each_step_with_its_time_and_a_pipe_gets_the_result(
    host: Host, columns: str
) -> None:
    project = host.project("progress", BASE_POLICY)
    seen = at_terminal(host.box, project.path, [], "corral", "build", "--force", COLUMNS=columns)
    assert seen["code"] == 0
    lines = [line.rsplit("\x1b[K", 1)[-1] for line in seen["said"].splitlines()]
    steps = [line for line in lines if re.fullmatch(rf"corral:   \S.* {TIME}\)", line)]
    (whole,) = [line for line in lines if re.match(rf"corral: image {TIME}", line)]
    # What took no time, because it was built before, is counted in the last line instead.
    assert steps or "cached" in whole or columns == "1", lines
    assert all(lines.index(whole) > lines.index(step) for step in steps)
    # What goes on is written over where there is room for a line.
    assert ("\r\x1b[K" in seen["said"]) == (columns == "120")
    plain = at_terminal(host.box, project.path, [], "corral", "build", "--force", TERM="dumb", NO_COLOR="1")
    assert plain["code"] == 0 and "\x1b" not in plain["said"]
    piped = project.corral("build", "--force", timeout=300)
    assert piped.stderr == "" and "built (" in piped.stdout


def test_up_at_a_terminal_shows_what_it_waits_for_with_times(host: Host) -> None:
    host.root("loginctl", "enable-linger", "dev")
    host.box.run(["mkdir", "-p", WORK])
    host.box.write(ENV_FILE, "API_KEY='x'\n", mode=0o600)
    project = host.project("progress-up", BASE_POLICY + DAEMON)
    seen = at_terminal(host.box, project.path, [], "corral", "up")
    assert seen["code"] == 0
    for step in ("container", "network policy", "gate: ", "ready: "):
        assert re.search(rf"corral: {step}.*{TIME}", seen["said"]), (step, seen["said"])
    project.corral("down")
    done = project.corral("up", timeout=300)
    # The gate's own words are results.
    assert not [line for line in done.stderr.splitlines() if not line.startswith("corral-firewall: ")]
    project.corral("down")
