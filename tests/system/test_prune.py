"""What killed command lines leave is swept, and what merely has a name like ours is not looked at."""

from __future__ import annotations

import json
import random
import subprocess
import time

import pytest

from .host import BASE_POLICY, Host, Project, until

LOOKALIKES = "my-corral-x", "corralled", "corral-0a0b0c0d", "0-corral-demo"


def swept(project: Project, *words: str) -> dict[str, list[dict[str, str]]]:
    done = project.corral("prune", "--json", *words, check=False, timeout=30)
    return dict(json.loads(done.stdout))


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
    kinds = {row["kind"] for row in swept(project)["removed"] if row["sandbox"].startswith("orphan-")}
    assert kinds == {"network", "session"}
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
        gone = {row["name"] for row in swept(project, "--images", "--running")["removed"]}
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


def test_running_sessions_are_ended_when_that_is_asked_for(host: Host) -> None:
    project = host.project("running")
    process = project.start("sh", "-c", "touch up; sleep 300", marker="up")
    began = time.monotonic()
    kinds = {row["kind"] for row in swept(project, "--running")["removed"]}
    assert {"container", "network"} <= kinds
    assert time.monotonic() - began < 15  # 8 s, and a busy machine
    process.wait(20)
    assert project.containers() == []
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
    for _ in range(12):
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
