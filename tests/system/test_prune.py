"""What killed command lines leave is swept, and what merely has a name like ours is not looked at."""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Iterator

import pytest

from .host import BASE_POLICY, Host, Project, starts, until

# Seconds that the command promises, and what a machine that is busy with other tests may add to them.
PROMISE, ALLOWANCE = 8.0, 4.0
# Fills a session's home for so many seconds, with what takes longest to remove.
FILL = """\
import os, sys, time
end, number = time.monotonic() + float(sys.argv[2]), 0
while time.monotonic() < end:
    number += 1
    for name in range(1000):
        os.makedirs(f"{sys.argv[1]}/{number}/{name}")
print(number * 1000)
"""
LOOKALIKES = "my-corral-x", "corralled", "corral-0a0b0c0d", "0-corral-demo"


def swept(project: Project, *words: str) -> dict[str, list[dict[str, str]]]:
    done = project.corral("prune", "--json", *words, check=False, timeout=30)
    return dict(json.loads(done.stdout))


def timed(project: Project) -> tuple[int, list[str]]:
    """Run the command; return its exit code and what it printed, and insist on its promise.

    What is measured is its process, not the way into the box.
    """
    words = "TIMEFORMAT='took %R'; time corral prune"
    done = project.box.run(["bash", "-c", words], cwd=project.path, check=False, timeout=60)
    took = float(done.stderr.rpartition("took ")[2])
    print(f"took {took} s: {done.stdout}")
    assert took < PROMISE + ALLOWANCE
    return done.returncode, done.stdout.splitlines()


def kill_cli(project: Project) -> None:
    """Kill the corral of the last session that was started, as the kernel does when memory is short."""
    pid = project.read("pid").strip()
    project.box.run(["kill", "-KILL", pid])
    project.started[-1].wait(20)


def start(project: Project, script: str, marker: str) -> None:
    process = project.box.popen(
        ["sh", "-c", 'echo $$ >pid; exec corral run -- sh -c "$0"', script],
        cwd=project.path,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    project.started.append(process)
    until(lambda: project.exists(marker), 300, f"{marker} is there")


def homes(project: Project) -> list[str]:
    found = project.box.run(
        [
            "sh",
            "-c",
            f"ls -d ~/.local/share/corral/{project.path.rpartition('/')[2]}-*/sessions/* 2>/dev/null || true",
        ]
    )
    return found.stdout.split()


@pytest.mark.representative
def test_a_killed_run_goes_on_and_is_gone_when_it_has_ended(host: Host) -> None:
    project = host.project("orphan")
    start(project, "touch up; while ! test -e end; do sleep 0.1; done", "up")
    kill_cli(project)
    # What runs is no leftover, whatever became of who started it.
    assert not any(row["sandbox"].startswith("orphan-") for row in swept(project)["removed"])
    assert len(project.containers()) == 1
    project.write("end", "")
    until(lambda: project.containers() == [], 30, "the enforcer has removed what ended")
    assert len(homes(project)) == 1
    (home,) = homes(project)
    sandbox = home.split("/")[-3]
    said = [line for line in project.corral("prune").stdout.splitlines() if "orphan-" in line]
    assert said == [f"removed network 0-corral-{sandbox}", f"removed session {home}"]
    assert homes(project) == []
    assert swept(project)["removed"] == []


@pytest.mark.representative
def test_names_that_say_corral_are_not_looked_at(host: Host) -> None:
    project = host.project("strict")
    project.inside("true")
    image = host.box.run(["docker", "images", "-q", "corral/*"]).stdout.split()[0]
    data = "/home/dev/.local/share/corral"
    try:
        for name in LOOKALIKES:
            create = ["docker", "create", "--name", name, "--entrypoint", "true", image]
            host.box.run(create)
            host.box.run(["docker", "network", "create", name])
            host.box.run(["docker", "volume", "create", name])
            host.box.run(["docker", "tag", image, f"{name}/corral:latest"])
            host.box.run(["mkdir", "-p", f"{data}/{name}.d/sessions/0a0b0c0d"])
        host.root("mkdir", "-p", f"{data}/corralled.d/sessions/not-a-session")
        # Labels alone are not enough either: the name has to be what the labels say.
        labels = ["io.corral.uid=1000", "io.corral.sandbox=strict-0a0b0c0d", "io.corral.session=0a0b0c0d"]
        words = [word for label in (*labels, "io.corral.service=main") for word in ("--label", label)]
        host.box.run(
            ["docker", "create", "--name", "my-labelled-corral", *words, "--entrypoint", "true", image]
        )
        gone = {row["name"] for row in swept(project, "--images", "--running", "--yes")["removed"]}
        assert any(name.startswith("0-corral-strict-") for name in gone)
        assert not any(name in text for text in gone for name in (*LOOKALIKES, "labelled"))
        there = host.box.run(["docker", "ps", "-a", "--format", "{{.Names}}"]).stdout.split()
        networks = host.box.run(["docker", "network", "ls", "--format", "{{.Name}}"]).stdout.split()
        volumes = host.box.run(["docker", "volume", "ls", "-q"]).stdout.split()
        tags = host.box.run(["docker", "images", "--format", "{{.Repository}}"]).stdout.split()
        for name in LOOKALIKES:
            assert name in there and name in networks and name in volumes and f"{name}/corral" in tags
            host.box.run(["test", "-d", f"{data}/{name}.d/sessions/0a0b0c0d"])
        assert "my-labelled-corral" in there
    finally:
        host.box.run(["docker", "rm", "-f", "my-labelled-corral"], check=False)
        for name in LOOKALIKES:
            host.box.run(["docker", "rm", "-f", name], check=False)
            host.box.run(["docker", "network", "rm", name], check=False)
            host.box.run(["docker", "volume", "rm", name], check=False)
            host.box.run(["docker", "rmi", f"{name}/corral:latest"], check=False)
            host.root("rm", "-rf", f"{data}/{name}.d")


def test_running_sessions_are_ended_when_that_is_asked_for_and_each_removal_is_told(host: Host) -> None:
    project = host.project("running")
    process = project.start("sh", "-c", "touch up; sleep 300", marker="up")
    (name,), network = project.containers(), project.sandbox["network"]
    said = project.corral("prune", "--running", "--yes").stdout.splitlines()
    assert said.index(f"removed container {name}") < said.index(f"removed network {network}")
    process.wait(20)
    assert project.containers() == []
    assert homes(project) == []


@pytest.fixture
def crowded(host: Host) -> Iterator[tuple[Project, str]]:
    """A sandbox, and the home of a session of it whose command line is gone."""
    project = host.project("crowded")
    project.inside("true")
    # Sandboxes of other tests would take their part of the time.
    project.corral("prune")
    project.inside("true")
    sandbox = project.sandbox["sandbox"]
    sessions = f"/home/dev/.local/share/corral/{sandbox}/sessions"
    project.box.run(["mkdir", "-p", f"{sessions}/0a0b0c0d/home"])
    try:
        yield project, sessions
    finally:
        host.root("rm", "-rf", sessions, timeout=300)


def test_a_home_that_takes_longer_than_the_command_has_is_left_in_part_and_gone_in_the_end(
    crowded: tuple[Project, str],
) -> None:
    project, sessions = crowded
    home = f"{sessions}/0a0b0c0d"
    for seconds in ("10", "20", "40"):
        project.box.run(["mkdir", "-p", f"{home}/home"])
        filled = project.box.run(["python3", "-c", FILL, f"{home}/home", seconds], timeout=120).stdout
        print(f"{filled.strip()} directories")
        code, said = timed(project)
        if code == 1:
            break
    late = f"left session {home}: not done within 8 s; corral prune goes on with it"
    assert (code, said[-1]) == (1, late)
    for _ in range(30):
        code, said = timed(project)
        if code == 0:
            break
    assert f"removed session {home}" in said
    assert homes(project) == []


def test_a_docker_that_stands_still_is_not_waited_for(host: Host, crowded: tuple[Project, str]) -> None:
    project, _ = crowded
    pid = str(host.engine.pid())
    host.root("kill", "-STOP", pid)
    try:
        code, said = timed(project)
    finally:
        host.root("kill", "-CONT", pid)
    assert (code, len(said)) == (0, 1)
    assert said[0].startswith("nothing was done: Docker does not answer")
    assert len(homes(project)) == 1
    assert timed(project)[0] == 0
    assert homes(project) == []


def test_a_docker_that_stands_still_in_the_middle_is_not_waited_for(
    host: Host, crowded: tuple[Project, str]
) -> None:
    project, sessions = crowded
    # Of each it is asked once more whether it has a container, before it goes; the first takes a moment.
    for number in range(9):
        project.box.run(["mkdir", "-p", f"{sessions}/0a0b0c{number:02}/home"])
    project.box.run(["python3", "-c", FILL, f"{sessions}/0a0b0c00/home", "4"])
    pid = str(host.engine.pid())
    script = f"""
        TIMEFORMAT='took %R'
        time corral prune | while read -r line; do
          echo "$line"
          case $line in "removed network"*) sudo kill -STOP {pid};; esac
        done
    """
    try:
        done = project.box.run(["bash", "-c", script], cwd=project.path, check=False, timeout=60)
    finally:
        host.root("kill", "-CONT", pid)
    took = float(done.stderr.rpartition("took ")[2])
    print(f"took {took} s: {done.stdout}")
    assert took < PROMISE + ALLOWANCE
    left = [line for line in done.stdout.splitlines() if line.startswith("left session ")]
    assert "Docker went away or does not answer" in left[0]
    assert left[-1].endswith("not done within 8 s; corral prune goes on with it")
    assert len(left) == len(homes(project)) >= 5
    assert timed(project)[0] == 0
    assert homes(project) == []


def test_without_docker_nothing_is_done_and_that_is_said(host: Host) -> None:
    project = host.project("silent")
    start(project, "touch up; sleep 300", "up")
    kill_cli(project)
    host.box.run(["docker", "kill", *project.containers()], check=False)
    host.root("systemctl", "stop", "docker.socket", "docker.service")
    try:
        done = project.corral("prune", check=False)
        assert (done.returncode, done.stdout.startswith("nothing was done: Docker is not running")) == (
            0,
            True,
        )
        assert len(homes(project)) == 1
    finally:
        host.restart_docker()
    host.wait_enforcer()
    project.corral("prune")
    assert homes(project) == []


def test_what_is_kept_stays_for_its_user_to_look_at(host: Host) -> None:
    project = host.project("kept", BASE_POLICY + "keep: true\n")
    project.inside("sh", "-c", "echo said; exit 3", check=False)
    (name,) = project.containers()
    found = swept(project)
    assert name in {row["what"] for row in found["kept"]}
    assert project.containers() == [name]
    project.corral("down")
    assert project.containers() == []


def test_images_go_when_no_policy_makes_them_any_more(host: Host) -> None:
    project = host.project("pictures")
    project.inside("true")
    assert swept(project, "--images")["left"] == []
    assert host.box.run(["docker", "images", "-q", "corral/pictures-*"]).stdout.split()
    host.box.run(["rm", f"{project.path}/corral.yaml"])
    removed = swept(project, "--images")["removed"]
    assert [row["kind"] for row in removed if row["sandbox"].startswith("pictures-")] == ["image"]
    assert host.box.run(["docker", "images", "-q", "corral/pictures-*"]).stdout == ""


def test_a_run_that_is_killed_at_any_moment_leaves_nothing_after_a_prune(host: Host) -> None:
    project = host.project("anywhere")
    project.inside("true")
    seed = random.SystemRandom().randrange(1 << 30)
    chance = random.Random(seed)
    for _ in range(min(starts(12), 50)):
        process = project.box.popen(
            ["sh", "-c", "echo $$ >pid; exec corral run -- sleep 0.2"],
            cwd=project.path,
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        project.started.append(process)
        until(lambda: project.exists("pid"), 20, "it began")
        time.sleep(chance.uniform(0, 3))
        project.box.run(["kill", "-KILL", project.read("pid").strip()], check=False)
        process.wait(20)
        project.box.run(["rm", "-f", f"{project.path}/pid"])

    def clean() -> bool:
        found = swept(project)
        return not found["left"] and project.containers() == [] and homes(project) == []

    # What was started before its corral died runs for a moment yet.
    until(clean, 60, f"nothing is left (seed {seed})")
    networks = host.box.run(["docker", "network", "ls", "--format", "{{.Name}}"]).stdout
    assert "0-corral-anywhere-" not in networks
    assert '"anywhere-' not in host.root("ipset", "list", "corral-pins").stdout
