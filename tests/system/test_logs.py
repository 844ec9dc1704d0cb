"""What corral logs shows of a session: since when, how much, until when."""

from __future__ import annotations

import json
import signal
import time
from datetime import datetime
from typing import Any

import pytest

from .host import EVERY_ENGINE, Host, Project, until
from .person import at_terminal

pytestmark = EVERY_ENGINE

# Seconds between two lines in the middle, for lengths of time that lie in between however slow a command is.
GAP = 15
# Numbered lines at intervals, the gap, more of them; one when it is asked for one; the end when it is asked for.
COUNT = f"""\
for i in $(seq 1 20); do echo line $i; sleep 0.05; done; sleep {GAP}
for i in $(seq 21 40); do echo line $i; sleep 0.05; done
while [ ! -e more ]; do sleep 0.1; done; echo line 41
while [ ! -e end ]; do sleep 0.1; done; echo line 42; exit 3
"""


def numbered(first: int, last: int) -> list[str]:
    return [f"line {number}" for number in range(first, last + 1)]


def printed(project: Project, *options: str, **more: Any) -> list[str]:
    """The numbered lines that corral logs shows; what the gate said comes before them."""
    shown = project.corral("logs", *options, "counting", **more).stdout.splitlines()
    return [line for line in shown if line.startswith("line ")]


def stamped(project: Project) -> dict[str, float]:
    """When Docker had each line, by its own stamps."""
    rows = [json.loads(row) for row in project.corral("logs", "--json", "counting").stdout.splitlines()]
    return {
        row["text"]: datetime.fromisoformat(row["time"]).timestamp()
        for row in rows
        if row["text"].startswith("line ")
    }


def counting(host: Host, *, script: str = COUNT) -> Project:
    project = host.project("counts")
    project.corral("run", "--detach", "--name", "counting", "--", "sh", "-c", script, timeout=400)
    return project


def followed(project: Project) -> list[str]:
    return project.read("followed").splitlines() if project.exists("followed") else []


def following(project: Project, *options: str) -> Any:
    """Start corral logs --follow, its process in the file "pid", what it prints in "followed"."""
    words = " ".join(("corral", "logs", "--follow", *options, "counting"))
    started = project.box.popen(
        ["sh", "-c", f"echo $$ >pid; exec {words} >followed 2>said"], cwd=project.path
    )
    project.started.append(started)
    return started


def running(project: Project) -> list[str]:
    rows = json.loads(project.corral("ps", "--here", "--json").stdout)["sessions"]
    return [row["name"] for row in rows if row["state"] == "running"]


def test_since_and_tail_are_exact_and_follow_ends_with_the_session(host: Host) -> None:
    project = counting(host)
    until(lambda: printed(project) == numbered(1, 40), 120, "it has counted")
    # A moment: what Docker had before is absent, the next is there.
    when = stamped(project)
    for last in (10, 20, 35):
        between = (when[f"line {last}"] + when[f"line {last + 1}"]) / 2
        moment = datetime.fromtimestamp(between).astimezone().isoformat()
        assert printed(project, "--since", moment) == numbered(last + 1, 40)
    # A length of time that ends in the gap.
    assert when["line 21"] - when["line 20"] > GAP - 1
    length = int(time.time() - when["line 21"]) + GAP - 4
    assert printed(project, "--since", f"{length}s") == numbered(21, 40)
    # Before there was anything: all of it. After everything: nothing.
    for start in ("1970-01-01T00:00:00+00:00", "1950-06-01", "99999d", "1h"):
        assert printed(project, "--since", start) == numbered(1, 40), start
    assert project.corral("logs", "--since", "0s", "counting").stdout == ""
    # Of all its lines, the gate's too.
    for tail in (0, 1, 7):
        shown = project.corral("logs", "--tail", str(tail), "counting").stdout.splitlines()
        assert shown == numbered(41 - tail, 40), tail
    whole = project.corral("logs", "counting").stdout.splitlines()
    assert whole[-40:] == numbered(1, 40) and len(whole) > 40
    assert project.corral("logs", "--tail", "1000", "counting").stdout.splitlines() == whole
    # Both: the last of those since then.
    between = (when["line 20"] + when["line 21"]) / 2
    moment = datetime.fromtimestamp(between).astimezone().isoformat()
    assert printed(project, "--since", moment, "--tail", "2") == numbered(39, 40)
    # Somebody stays, is shown what comes, and is let go when it ends.
    follower = following(project, "--tail", "2")
    until(lambda: followed(project) == numbered(39, 40), 30, "what there is")
    project.write("more", "")
    until(lambda: followed(project) == numbered(39, 41), 30, "what comes later")
    assert follower.poll() is None
    project.write("end", "")
    assert follower.wait(timeout=30) == 0
    assert followed(project) == numbered(39, 42)
    assert running(project) == []
    # Nothing comes of one that has ended.
    assert printed(project, "--follow", timeout=60) == numbered(1, 42)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_the_follower_and_not_the_session(host: Host, name: str) -> None:
    project = counting(host, script="n=0; while :; do n=$((n+1)); echo line $n; sleep 0.2; done")
    follower = following(project)
    until(lambda: "line 3" in followed(project), 30, "it follows")
    host.box.run(["kill", f"-{name}", project.read("pid").strip()])
    assert follower.wait(timeout=30) == 128 + getattr(signal, name)
    assert project.read("said") == ""
    seen = len(printed(project))
    until(lambda: len(printed(project)) > seen + 2, 30, "it goes on counting")
    assert running(project) == ["counting"]


def test_ctrl_c_at_a_terminal_ends_the_follower_and_not_the_session(host: Host) -> None:
    project = counting(host, script="n=0; while :; do n=$((n+1)); echo line $n; sleep 0.2; done")
    steps = [["until", "line 3\r"], ["until", "line [0-9]+\r"], ["type", "\x03"]]
    seen = at_terminal(host.box, project.path, steps, "corral", "logs", "--follow", "counting")
    assert seen["code"] == 130
    assert "Traceback" not in seen["said"] and "corral:" not in seen["said"]
    count = len(printed(project))
    until(lambda: len(printed(project)) > count + 2, 30, "it goes on counting")
    assert running(project) == ["counting"]
