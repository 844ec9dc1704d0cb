"""The container a session gets: what Docker says of it, and what an agent finds it can and cannot do in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .host import BASE_POLICY, EVERY_ENGINE, Host

PAGE = Path(__file__).parents[2] / "docs" / "container.md"
ROW = re.compile(r"\| `(?P<field>[A-Za-z0-9.]+)` \| (?P<value>.*?) \| (?P<reason>.+) \|")
SECTIONS = ("Config", "HostConfig", "NetworkSettings")
# What differs from session to session, or tells the state and not the shape.
VARIABLE = (
    (re.compile(r"\b[0-9a-f]{64}\b"), "<id>"),
    (re.compile(r"\bcontained-[0-9a-f]{8}\b"), "<sandbox>"),
    (re.compile(r"-main-[0-9a-f]{8}\b"), "-main-<session>"),
    (re.compile(r"/sessions/[0-9a-f]{8}\b"), "/sessions/<session>"),
    (re.compile(r"\b172\.16\.\d+\.\d+\b"), "<address>"),
    (re.compile(r"(?:[0-9a-f]{2}:){5}[0-9a-f]{2}"), "<mac>"),
    (re.compile(r"sha256:<id>"), "<image>"),
)
STATE = frozenset(
    {
        "Config.Image",
        # The host's, or the policy's: tested with the limits.
        "HostConfig.Memory",
        "HostConfig.MemorySwap",
        "HostConfig.PidsLimit",
        # Of the terminal that corral run was called from.
        "HostConfig.ConsoleSize",
        "NetworkSettings.SandboxID",
        "NetworkSettings.SandboxKey",
    }
)


def flatten(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the fields that say something: those of a section one by one, what lies below them as it is."""
    for key, item in sorted(value.items()):
        if item not in (None, "", [], {}, False, 0):
            yield f"{path}.{key}", item


def fields(inspect: dict[str, Any]) -> dict[str, str]:
    found = {}
    for section in SECTIONS:
        for field, value in flatten(inspect[section], section):
            if field in STATE:
                continue
            text = json.dumps(value, sort_keys=True)
            for pattern, name in VARIABLE:
                text = pattern.sub(name, text)
            found[field] = text
    return found


def documented() -> dict[str, tuple[str, str]]:
    rows = (ROW.fullmatch(line) for line in PAGE.read_text().splitlines())
    return {row["field"]: (row["value"].strip("`"), row["reason"]) for row in rows if row}


@EVERY_ENGINE
@pytest.mark.representative
def test_docker_says_of_a_session_what_the_page_says_and_nothing_else(host: Host) -> None:
    project = host.project("contained")
    project.start("sh", "-c", "touch up; sleep 60", marker="up")
    (name,) = project.containers()
    (inspect,) = json.loads(host.box.run(["docker", "inspect", name]).stdout)
    pages = documented()
    found = fields(inspect)
    assert json.loads(found["Config.User"]) == host.engine.agent
    if host.box.engine.rootless:
        # The engine cannot go below its own score, and says so of each container.
        assert 0 < json.loads(found.pop("HostConfig.OomScoreAdj")) <= 1000
    for field, value in found.items():
        assert field in pages, f"{field} = {value} is not in docs/container.md"
        wanted, reason = pages[field]
        assert len(reason) > 10, f"{field} has no reason"
        if wanted != "…":
            assert json.loads(value) == json.loads(wanted), field
    # Fields that Docker leaves out when they are empty must not be what makes the page true.
    required = {field for field, (wanted, _) in pages.items() if wanted != "…"}
    assert required <= set(found)


@EVERY_ENGINE
@pytest.mark.representative
def test_only_the_mounts_and_the_temporary_directories_can_be_written(host: Host) -> None:
    project = host.project("written")
    script = """
        for place in / /usr /usr/local/bin /etc /opt /var /var/lib /root /home /srv /run /home/agent/.config/opencode; do
            if touch $place/x 2>/dev/null; then echo "written: $place"; fi
        done
        for place in /tmp /var/tmp /dev/shm /home/agent /home/agent/.local /home/agent/.local/state/opencode "$PWD"; do
            touch $place/x || echo "refused: $place"
        done
        printf '#!/bin/sh\\necho executed' > /tmp/program; chmod +x /tmp/program; /tmp/program
    """
    done = project.inside("sh", "-c", script)
    assert done.stdout.splitlines() == ["executed"]
    # What a session kept in its home went with it, what the profile keeps is there for the next one.
    done = project.inside("sh", "-c", "ls -A ~; ls -A ~/.local/state/opencode; ls -A /tmp")
    assert done.stdout.split() == [".cache", ".config", ".local", "x"]
    found = host.shell(f"ls ~/.local/share/corral/{project.sandbox['sandbox']}/sessions").stdout
    assert found == ""


@EVERY_ENGINE
@pytest.mark.representative
def test_git_commits_as_the_user_and_nothing_else_of_the_host_comes_along(host: Host) -> None:
    project = host.project("identity")
    host.shell("git config --global user.name 'A. Author'; git config --global user.email author@example.com")
    host.shell("git config --global credential.helper store; git config --global core.pager 'touch pwned'")
    try:
        done = project.inside(
            "sh",
            "-c",
            "git init -q x && cd x && git commit -q --allow-empty -m x && git log --format='%an %ae %cn %ce'",
        )
        assert done.stdout.strip() == "A. Author author@example.com A. Author author@example.com"
        listed = project.inside("git", "config", "--list", "--show-scope").stdout
        assert "credential" not in listed and "core.pager" not in listed
    finally:
        host.shell("rm ~/.gitconfig")


@EVERY_ENGINE
def test_a_home_that_the_agent_closed_is_removed_all_the_same(host: Host) -> None:
    project = host.project("closed")
    project.inside("sh", "-c", "mkdir -p ~/a/b; touch ~/a/b/c; chmod 0 ~/a/b ~/a ~/.cache")
    assert host.shell(f"ls ~/.local/share/corral/{project.sandbox['sandbox']}/sessions").stdout == ""


@EVERY_ENGINE
def test_a_limit_that_this_host_cannot_keep_stops_the_start_and_names_the_controller(host: Host) -> None:
    info = json.loads(host.box.run(["docker", "info", "--format", "{{json .}}"]).stdout)
    project = host.project("limited", BASE_POLICY)
    project.policy(BASE_POLICY.replace("best_effort: true", "memory: 256m\n  pids: 200"))
    # Where the limit is read depends on the layout of the control groups; one of the two files is there.
    read = "cd /sys/fs/cgroup; cat pids.max pids/pids.max; cat memory.max memory/memory.limit_in_bytes"
    done = project.corral("run", "--", "sh", "-c", f"({read}) 2>/dev/null; true", check=False)
    if info["PidsLimit"] and info["MemoryLimit"]:
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["200", str(256 << 20)]
        return
    assert done.returncode == 1
    for controller, there in (("pids", info["PidsLimit"]), ("memory", info["MemoryLimit"])):
        assert there or controller in done.stderr
    assert "limits.best_effort: true" in done.stderr
    assert project.containers() == []
    project.policy(BASE_POLICY.replace("best_effort: true", "memory: 256m\n  pids: 200\n  best_effort: true"))
    done = project.corral("run", "--", "true")
    assert done.returncode == 0
    assert "controller pids" in done.stderr
