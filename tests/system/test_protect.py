"""What an agent leaves in the project for the host to execute: closed by the kernel, or told and put back."""

from __future__ import annotations

import json
import re

import pytest

from .host import Host

GIT = "git -c user.name=x -c user.email=x@example.org"
HOOK = "printf '#!/bin/sh\\ntouch /tmp/evil\\n' > .git/hooks/pre-commit"
OBEYED = (".envrc", ".vscode/tasks.json", ".mcp.json", ".claude/settings.json")


@pytest.mark.representative
@pytest.mark.case(24)
def test_hooks_cannot_be_written_and_the_rest_is_told_and_put_back(host: Host) -> None:
    project = host.project("hooked")
    project.inside("git", "init", "-q", "-b", "main", ".")
    files = " ".join(OBEYED)
    work = f"""
        ({HOOK}) 2>refused; rm -rf .git/hooks 2>>refused; mv .git/hooks .git/away 2>>refused
        mkdir -p .vscode .claude; for f in {files}; do echo evil > $f; done
        {GIT} config core.fsmonitor ./evil
        echo work > work.txt; {GIT} -c core.fsmonitor= add work.txt && {GIT} -c core.fsmonitor= commit -qm work
    """
    before = project.read(".git/config")
    done = project.inside("sh", "-c", work)
    # Ordinary work goes on; hooks are closed by the kernel, not by a check.
    assert project.inside("git", "-c", "core.fsmonitor=", "log", "--format=%s").stdout == "work\n"
    refused = project.read("refused")
    assert "Read-only file system" in refused
    assert not project.exists(".git/hooks/pre-commit")
    for name in OBEYED:
        assert f"{project.path}/{name}: new" in done.stderr
    assert "+ core.fsmonitor = ./evil" in done.stderr
    (session,) = re.findall(r"corral revert ([0-9a-f]{8})", done.stderr)
    assert project.corral("revert", session).returncode == 0
    assert project.read(".git/config") == before
    assert not any(project.exists(name) for name in OBEYED)


def test_verify_agrees_with_hooks_that_are_closed_and_with_sessions_of_before(host: Host) -> None:
    project = host.project("closed")
    waiting = project.start("sh", "-c", "touch up; while ! test -e go; do sleep 0.1; done", marker="up")
    project.inside("git", "init", "-q", ".")
    found = json.loads(project.corral("verify", "--json", check=False).stdout)
    assert found["failed"] == 0, [row for row in found["checks"] if row["status"] == "fail"]
    project.write("go", "")
    assert waiting.wait(timeout=60) == 0


def test_whoever_does_not_want_it_can_write_hooks(host: Host) -> None:
    """The control: without the mount the same command succeeds."""
    project = host.project("unprotected")
    project.policy(project.read("corral.yaml") + "\n")
    project.policy("protect: false\n" + project.read("corral.yaml"))
    project.inside("sh", "-c", f"git init -q .; {HOOK}")
    assert project.exists(".git/hooks/pre-commit")


def test_a_read_only_project_is_read_only_and_its_workspace_stays(host: Host) -> None:
    project = host.project("readonly")
    project.policy("mounts: {project: ro}\n" + project.read("corral.yaml"))
    done = project.inside("sh", "-c", "echo x > work.txt; echo $CORRAL_WORKSPACE; echo y > /workspace/kept")
    assert done.stdout == "/workspace\n"
    assert "Read-only file system" in done.stderr
    assert project.inside("cat", "/workspace/kept").stdout == "y\n"
    assert json.loads(project.corral("verify", "--json", check=False).stdout)["failed"] == 0


def test_a_container_that_is_kept_can_be_looked_at_and_down_removes_it(host: Host) -> None:
    project = host.project("kept")
    project.policy("keep: true\n" + project.read("corral.yaml"))
    done = project.inside("sh", "-c", "echo said; echo x > /home/agent/left")
    (name,) = project.containers()
    assert f"kept: {name}" in done.stderr
    assert host.box.run(["docker", "logs", name]).stdout == "said\n"
    host.box.run(["docker", "cp", f"{name}:/home/agent/left", "/home/dev/left"])
    assert host.box.read("/home/dev/left") == "x\n"
    project.corral("down")
    assert project.containers() == []
