"""Sessions that go on: the terminal dies, corral is killed, somebody leaves; and come to an end all the same."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
from typing import Any

import pytest

from .host import BASE_POLICY, Host, Project, until
from .person import LEAVE, at_terminal

# Fills the screen, wants the mouse, draws when the size changes; ends with 7 when it reads q.
DRAWS = """\
import os, select, signal, sys, termios, tty
tty.setraw(0)
def draw(*_):
    columns, rows = os.get_terminal_size(0)
    os.write(1, b"\\x1b[2J\\x1b[Hscreen of %dx%d" % (columns, rows))
signal.signal(signal.SIGWINCH, draw)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
os.write(1, b"\\x1b[?1049h\\x1b[?1000h\\x1b[?2004h")
draw()
while True:
    data = os.read(0, 100)
    if b"q" in data:
        os.write(1, b"\\x1b[?1000l\\x1b[?1049lbye")
        sys.exit(7)
    os.write(1, b"got " + data)
"""
# Counts what it is sent and ends at the second one.
COUNTS = """\
import os, signal, sys, time
seen = []
def count(number, _):
    seen.append(number)
    print("signal", signal.Signals(number).name, len(seen), flush=True)
    if len(seen) == 2:
        sys.exit(40 + number)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, count)
print("counting", flush=True)
open("counting", "w").close()
while True:
    time.sleep(0.1)
"""
SECRET = "s3cr3t-of-the-option-77b1"


def rows(project: Project) -> list[dict[str, Any]]:
    return list(json.loads(project.corral("ps", "--here", "--json").stdout)["sessions"])


def row(project: Project) -> dict[str, Any]:
    (found,) = rows(project)
    return dict(found)


def nothing_is_left(host: Host, project: Project) -> None:
    assert project.containers() == []
    left = host.shell("ls -d ~/.local/share/corral/*/sessions/* 2>/dev/null || true").stdout.split()
    assert left == []


@pytest.fixture
def project(host: Host) -> Project:
    made = host.project("left")
    made.write("draws.py", DRAWS)
    return made


@pytest.mark.representative
@pytest.mark.parametrize("how", ["hang-up", "die"])
def test_an_agent_outlives_its_terminal_and_is_shown_again_as_it_was(
    host: Host, project: Project, how: str
) -> None:
    project.inside("true")
    steps = [["until", "screen of 120x40"], [how]]
    at_terminal(host.box, project.path, steps, "corral", "run", "--name", "draw", "--", "python3", "draws.py")
    until(lambda: [one["attended"] for one in rows(project)] == [False], 20, "corral has let go of it")
    found = row(project)
    assert (found["name"], found["state"]) == ("draw", "running")
    assert "running, left" in project.corral("ps", "--here").stdout
    told = project.corral("status").stdout
    assert "nobody is attached: corral attach draw" in told
    # Another terminal, of another size, in the same state: the screen, the mouse, and what is on it.
    steps = [
        ["until", r"\x1b\[\?1049h"],
        ["until", r"\x1b\[\?1000h"],
        ["until", "screen of 120x40"],
        ["resize", 90, 30],
        ["until", "screen of 90x30"],
        ["type", "\x10\x11"],
        ["until", "got \x10\x11"],
        ["type", LEAVE],
    ]
    seen = at_terminal(host.box, project.path, steps, "corral", "run", "--resume", "draw")
    assert seen["code"] == 0
    assert "left draw, which goes on" in seen["said"]
    # The terminal is given back without the mouse.
    assert "\x1b[?1000l" in seen["said"].partition("left draw")[0].rpartition("got")[2]
    seen = at_terminal(
        host.box,
        project.path,
        [["until", "screen of 120x40"], ["type", "q"]],
        "corral",
        "run",
        "--resume",
        "draw",
    )
    assert seen["code"] == 7
    nothing_is_left(host, project)


@pytest.mark.fault("kill -9 of corral run")
@pytest.mark.parametrize("keep", [False, True])
def test_a_session_whose_corral_was_killed_goes_on_and_leaves_nothing_in_the_end(
    host: Host, project: Project, keep: bool
) -> None:
    if keep:
        project.policy(BASE_POLICY + "keep: true\n")
    script = "touch begun; until test -e end; do sleep 0.1; done; echo '#!' > .envrc; exit 5"
    process = project.start("sh", "-c", script, marker="begun")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    until(lambda: row(project)["attended"] is False, 20, "its lock is free")
    session = row(project)["session"]

    def states() -> list[str]:
        return [one["state"] for one in rows(project) if one["session"] == session]

    # Beside it another one works, and lets it be.
    assert project.inside("echo", "beside").stdout == "beside\n"
    assert states() == ["running"]
    project.write("end", "")
    if keep:
        until(lambda: states() == ["exited"], 20, "it has ended")
        assert "exited (5)" in project.corral("ps", "--here").stdout
    else:
        until(lambda: states() == [], 30, "the enforcer has removed its container")
    done = project.inside("true")
    if keep:
        assert states() == ["exited"]
        assert f"{project.path}/.envrc: new" in project.corral("down").stderr
    else:
        # What it did to files this host executes is told, and can be put back.
        assert f"{project.path}/.envrc: new" in done.stderr
        project.corral("revert", session)
        assert not project.exists(".envrc")
    nothing_is_left(host, project)


def test_detached_sessions_side_by_side(host: Host, project: Project) -> None:
    reads = "echo ready as $CORRAL_SESSION_ID; read line; echo got $line; exit 4"
    first = project.corral("run", "--detach", "--name", "one", "--", "sh", "-c", reads, timeout=400)
    (ident,) = first.stdout.split()
    second = json.loads(
        project.corral(
            "run",
            "-d",
            "--json",
            "--session-id",
            "0a1b2c3d",
            "--",
            "sh",
            "-c",
            "echo $CORRAL_SESSION_ID; sleep 300",
        ).stdout
    )
    assert second["session"] == "0a1b2c3d" and second["state"] == "running"
    assert [one["session"] for one in rows(project)] == [ident, "0a1b2c3d"]
    assert len({one["address"] for one in rows(project)}) == 2
    taken = project.corral("run", "--session-id", "0a1b2c3d", "--", "true", check=False)
    assert (taken.returncode, "runs already" in taken.stderr) == (1, True)
    assert project.corral("run", "--session-id", "xyz", "--", "true", check=False).returncode == 2
    until(lambda: "0a1b2c3d" in project.corral("logs", "0a1b2c3d").stdout.splitlines(), 10, "it has its id")
    # What ends at once has not started.
    refused = project.corral("run", "-d", "--", "sh", "-c", "echo why; exit 3", check=False)
    assert refused.returncode == 1
    assert "ended at once (exit code 3)" in refused.stderr and "| why" in refused.stderr
    # Another policy: it is said which ones keep to the one of before.
    project.policy(BASE_POLICY + "protect: false\n")
    assert "one, 0a1b2c3d were started under the one of before" in project.inside("true").stderr
    seen = at_terminal(
        host.box,
        project.path,
        [["until", "ready as one\\r"], ["type", "words\r"], ["until", "got words"]],
        "corral",
        "attach",
        "one",
    )
    assert seen["code"] == 4
    assert "the policy changed since one was started" in seen["said"]
    assert [one["session"] for one in rows(project)] == ["0a1b2c3d"]
    assert "removed 1 container" in project.corral("down").stdout
    nothing_is_left(host, project)


def test_left_by_keys_that_were_chosen(host: Host, project: Project) -> None:
    project.inside("true")
    steps = [["until", "screen of"], ["type", "\x1d\x11"], ["until", "got \x1d\x11"], ["type", "\x00d"]]
    argv = ("corral", "run", "--detach-keys", "ctrl-@,d", "--", "python3", "draws.py")
    seen = at_terminal(host.box, project.path, steps, *argv)
    assert seen["code"] == 0
    assert f"left {row(project)['session']}, which goes on" in seen["said"]
    project.corral("down")


def test_a_variable_of_the_command_line_is_found_nowhere_but_in_the_program(
    host: Host, project: Project
) -> None:
    project.write("show.sh", "echo $TOKEN > got; sleep 300\n")
    process = host.box.popen(
        ["corral", "run", "-e", "TOKEN", "-e", "OTHER=plain", "--", "sh", "show.sh"],
        cwd=project.path,
        env={"TOKEN": SECRET},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    project.started.append(process)
    host.box.wait_for(lambda: project.exists("got"), timeout=300)
    until(lambda: SECRET in project.read("got"), 10, "the program has it")
    host.box.run(["rm", f"{project.path}/got"])
    coded = base64.b64encode(SECRET.encode()).decode()[:20]
    # In a file: what looks for it must not be what is found.
    host.box.write("/home/dev/patterns", f"{SECRET}\n{coded}\n")
    places = {
        "inspect": "docker ps -aq | xargs -r docker inspect",
        "arguments": "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'",
        "journal": "journalctl --no-pager -o cat --since '10 minutes ago'",
        "corral's files": "grep -ras -e '' /home/dev/.local/share/corral",
        "Docker's files": f"grep -ras -e '' {host.engine.containers}",
    }
    found = {
        place: host.shell(
            f"{{ {command}; }} 2>/dev/null | grep -acFf /home/dev/patterns || true", user="root"
        ).stdout.strip()
        for place, command in places.items()
    }
    assert found == dict.fromkeys(found, "0")
    # The places were looked at: what is no secret there is found.
    shown = host.shell(places["inspect"], user="root").stdout
    assert row(project)["session"] in shown


def test_where_it_starts(host: Host, project: Project) -> None:
    host.box.run(["mkdir", "-p", f"{project.path}/a b/c", "/home/dev/data"])
    project.policy(BASE_POLICY + "mounts: {ro: [/home/dev/data]}\n")
    for where, told in (("a b/c", f"{project.path}/a b/c"), ("~/data", "/home/dev/data")):
        assert project.corral("run", "--workdir", where, "--", "pwd", timeout=400).stdout == f"{told}\n"
    for where in ("/etc", "..", "missing"):
        assert project.corral("run", "--workdir", where, "--", "pwd", check=False).returncode == 2
    assert project.containers() == []


def test_ctrl_c_is_the_program_s_once_and_twice(host: Host, project: Project) -> None:
    project.inside("true")
    project.write("counts.py", COUNTS)
    steps = [["until", "counting"], ["type", "\x03"], ["until", "signal SIGINT 1"], ["type", "\x03"]]
    seen = at_terminal(host.box, project.path, steps, "corral", "run", "--", "python3", "counts.py")
    assert "signal SIGINT 2" in seen["said"]
    assert seen["code"] == 42
    nothing_is_left(host, project)


# What is at the terminal afterwards is what was there before, though both corral and the program set it to raw.
ENDED = """\
stty -a >before
(while [ ! -e raw ]; do sleep 0.1; done; kill -$1 $(cat pid)) &
sh -c 'echo $$ >pid; exec corral run -- sh -c "stty raw -echo; touch raw; exec sleep 300"'
echo "code $?"
stty -a >after
"""


@pytest.mark.parametrize(("sent", "code"), [("TERM", 143), ("INT", 130)])
def test_a_program_at_a_terminal_that_takes_no_signals_is_ended_by_them(
    host: Host, project: Project, sent: str, code: int
) -> None:
    project.inside("true")
    project.write("ended.sh", ENDED)
    seen = at_terminal(host.box, project.path, [], "sh", "ended.sh", sent)
    assert (seen["code"], f"code {code}\r" in seen["said"]) == (0, True), seen
    assert project.read("before") == project.read("after") != ""
    nothing_is_left(host, project)


@pytest.mark.parametrize(
    ("sent", "heard"),
    [
        (["INT", "INT"], ["INT", "INT"]),
        (["TERM", "TERM"], ["TERM", "TERM"]),
        # Who does not end when its terminal goes away is asked a little later.
        (["HUP"], ["HUP", "TERM"]),
    ],
)
def test_without_a_terminal_every_signal_is_the_program_s(
    host: Host, project: Project, sent: list[str], heard: list[str]
) -> None:
    project.inside("true")
    project.write("counts.py", COUNTS)
    process = host.box.popen(
        ["sh", "-c", "echo $$ >pid; exec corral run -- python3 counts.py"],
        cwd=project.path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    project.started.append(process)
    assert process.stdout is not None
    host.box.wait_for(lambda: project.exists("counting"), timeout=60)
    for count, name in enumerate(heard, 1):
        if count <= len(sent):
            host.box.run(["kill", f"-{sent[count - 1]}", project.read("pid").strip()])
        line = ""
        while f"signal SIG{name} {count}" not in line:
            line = process.stdout.readline()
            assert line, "it ended early"
    assert process.wait(30) == 40 + getattr(signal, f"SIG{heard[-1]}")
    nothing_is_left(host, project)


@pytest.mark.fault("Docker restarted under a session that was left")
def test_a_session_that_docker_ended_is_told_at_the_next_start(host: Host, project: Project) -> None:
    (ident,) = project.corral("run", "-d", "--", "sleep", "600", timeout=400).stdout.split()
    host.restart_docker()
    host.wait_enforcer()
    assert row(project)["state"] == "exited"
    told = project.inside("true").stderr
    assert f"{ident} ended with exit code" in told
    assert "when Docker was restarted and nobody looked after it: removed" in told
    nothing_is_left(host, project)
