"""What commands answer with --json, beside a real engine and kernel, is what docs/json.md says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from corral.answers.shapes import problems
from corral.answers.table import ANSWERS

from .host import Host, Project

NAME = "allowed1.corral.example"
AGENT = ("sh", "-c", "echo hello; sleep 600")
# As on the page -> what is typed, in an order in which each has something to tell.
ASKED: dict[str, tuple[str, ...]] = {
    "corral status": ("status",),
    "corral ps": ("ps",),
    "corral inspect": ("inspect",),
    "corral denied": ("denied", "--all"),
    "corral metrics": ("metrics",),
    "corral version": ("version",),
    "corral df": ("df",),
    "corral doctor": ("doctor",),
    "corral render": ("render",),
    "corral render --check": ("render", "--check"),
    "corral policy hash": ("policy", "hash"),
    "corral policy diff": ("policy", "diff"),
    "corral policy check": ("policy", "check", NAME),
    "corral refresh": ("refresh",),
    "corral allow": ("allow", "files.corral.example", "--for", "1h"),
    "corral deny": ("deny", "files.corral.example"),
    "corral verify": ("verify",),
    "corral prune": ("prune", "--dry-run"),
    "corral uninstall": ("uninstall", "--dry-run"),
}


def differing(command: str, text: str) -> list[str]:
    """Return how an answer differs from its description."""
    read: dict[str, Any] = json.loads(text)
    assert next(iter(read)) == "schema" and read.pop("schema") == 1, command
    return min((problems(read, shape) for shape in ANSWERS[command]), key=len)


@pytest.fixture
def project(host: Host) -> Project:
    host.internet.set_name("files.corral.example", ["203.0.113.40"])
    host.box.flush_dns()
    return host.project("answers")


@pytest.mark.representative
def test_commands_answer_programs_as_the_page_says(project: Project) -> None:
    started = project.corral("run", "--detach", "--json", "--name", "one", "--", *AGENT, timeout=400).stdout
    assert differing("corral run --detach", started) == []
    told = {}
    for command, words in ASKED.items():
        done = project.corral(*words, "--json", check=False, timeout=300)
        assert done.stdout, (command, done.stderr)
        told[command] = differing(command, done.stdout)
    assert {command: found for command, found in told.items() if found} == {}
    lines = project.corral("logs", "--json").stdout.splitlines()
    assert lines and [found for line in lines for found in differing("corral logs", line)] == []
