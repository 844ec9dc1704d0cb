"""Each harness, real and unmodified, at its work: a prompt, a tool call, a command as the user, a final text."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from policy import profiles
from policy.profiles import Profile, ProfileOptions, Start
from tests.models.host import FINAL, PORT, serving

from .host import Host, Project
from .person import at_terminal
from .spy import Seen, watched, watching

KEY = "sk-lab-0123456789-abcdefghijklmnopqrstuvwxyz"
COMMANDS = ("id -u > made.txt; echo made",)
# Of aider, which has no tools: an edit in its own words.
EDIT = f"{FINAL}\n\nmade.txt\n```\n1000\n```\n"
PROMPT = "Please do all steps."
# Seconds in which each has said that nobody answers, or that its key is not known. opencode needs 80.
PATIENCE = 200


@dataclass(frozen=True)
class Harness:
    """How the lab uses one.

    key: the variable of its key. options: of its profile; PORT becomes the port. protocol: what it speaks.
    silence: what it says of a server that closes each connection. failed: its exit code then. ready: what is
    on the screen when it can be typed; a second Ctrl+C to leave is asked for when ``twice``.
    """

    name: str
    key: str
    options: str
    protocol: str
    silence: str
    ready: str = ""
    twice: bool = False
    failed: int = 1
    port: int = PORT

    @property
    def policy(self) -> str:
        """A policy in which the model on this machine is all there is."""
        return f"""\
profile: {self.name}
limits: {{best_effort: true}}
egress: {{profile_defaults: false}}
host_services: [{{name: model, port: {self.port}}}]
secrets: {{env_file: ~/.config/corral/{self.name}.env}}
approvals: "off"
profile_options: {{{self.name}: {self.options.replace("PORT", str(self.port))}}}
"""

    @property
    def profile(self) -> tuple[Profile, ProfileOptions]:
        """Its profile with approvals off."""
        found = profiles.get(self.name)
        return found, found.with_approvals(found.parse_options({}), "off")

    def command(self, start: Start) -> tuple[str, ...]:
        profile, options = self.profile
        return profile.argv(start, options)

    def one_shot(self, prompt: str = PROMPT) -> tuple[str, ...]:
        profile, options = self.profile
        return profile.one_shot_argv(prompt, options)


OPENCODE = """{config: {model: lab/demo, provider: {lab: {npm: "@ai-sdk/openai-compatible", name: lab,
  options: {baseURL: "http://corral-host:PORT/v1", apiKey: "{env:OPENAI_API_KEY}"},
  models: {demo: {name: demo, limit: {context: 65536, output: 4096}}}}}}}"""
WIRED = '{base_url: "http://corral-host:PORT", model: demo}'
OF_OPENAI = '{base_url: "http://corral-host:PORT/v1", model: demo}'
ALL = {
    one.name: one
    for one in (
        Harness("opencode", "OPENAI_API_KEY", OPENCODE, "chat", "Cannot connect to API", "ctrl+p commands"),
        Harness(
            "claude",
            "ANTHROPIC_API_KEY",
            WIRED,
            "messages",
            "Connection dropped",
            "bypass permissions on",
            twice=True,
        ),
        Harness("codex", "OPENAI_API_KEY", OF_OPENAI, "responses", "does not answer", "Ask Codex to do"),
        Harness("gemini", "GEMINI_API_KEY", WIRED, "gemini", "fetch failed", "Type your message", twice=True),
        Harness(
            "aider",
            "OPENAI_API_KEY",
            OF_OPENAI.replace("demo", "openai/demo"),
            "chat",
            "API provider's servers are down",
            failed=0,
        ),
    )
}
# The two that CI builds beside opencode, which many tests use.
MARKED = {"claude", "codex"}
EACH = pytest.mark.parametrize("harness", ALL.values(), ids=lambda one: one.name)
EACH_AT_A_TERMINAL = pytest.mark.parametrize(
    "harness", [one for one in ALL.values() if one.ready], ids=lambda one: one.name
)


@contextmanager
def project_of(host: Host, harness: Harness, key: str = KEY) -> Iterator[Project]:
    """Return a project whose image is there and whose key is that one."""
    file = f"{host.box.home}/.config/corral/{harness.name}.env"
    host.box.write(file, f"{harness.key}='{key}'\n", mode=0o600)
    project = host.project(f"with-{harness.name}", harness.policy)
    project.corral("build", timeout=560)
    yield project


def watch(host: Host, project: Project, run: Callable[[], Any]) -> tuple[Any, Seen]:
    """Run something that starts one session with ``watched``, to its end, and see what that asks for."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        with watching(host, project, running.done) as seen:
            wait([running])
        return running.result(), seen


def beside_the_model(seen: Seen) -> set[tuple[str, str]]:
    return {(kind, to) for kind, to in seen.asked if not (kind == "tcp" and to.endswith(f":{PORT}"))}


def excused(harness: Harness) -> set[tuple[str, str]]:
    """Return what its profile says that no switch ends."""
    return {("dns", name) for name in profiles.get(harness.name).contacts}


@pytest.mark.parametrize(
    "harness",
    [
        pytest.param(one, id=one.name, marks=[pytest.mark.representative] * (one.name in MARKED))
        for one in ALL.values()
    ],
)
def test_one_shot_a_command_runs_as_the_user_and_nothing_but_the_model_is_asked(
    host: Host, harness: Harness, capsys: pytest.CaptureFixture[str]
) -> None:
    with project_of(host, harness) as project, serving(host.box, COMMANDS, key=KEY, plain=EDIT) as model:
        done, seen = watch(
            host, project, lambda: project.inside(*watched(*harness.one_shot()), check=False, timeout=400)
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert FINAL in done.stdout
        assert project.read("made.txt") == "1000\n"
        assert project.box.run(["stat", "-c", "%U:%G", f"{project.path}/made.txt"]).stdout == "dev:dev\n"
        assert {row["protocol"] for row in model.requests() if "protocol" in row} == {harness.protocol}
        # The model was asked over the network that is watched: the count beside it means something.
        assert any(to.endswith(f":{PORT}") for kind, to in seen.asked if kind == "tcp")
        beside = beside_the_model(seen)
        report = json.loads(project.corral("denied", "--json").stdout)
        denied = report["rows"]
        with capsys.disabled():
            mine = [one for one in report["sandboxes"] if one["sandbox"].startswith(f"with-{harness.name}-")]
            told = f"denied {len(denied)}, lookups {[one['dead_resolver'] for one in mine]}"
            print(f"\n{harness.name}: beside the model {sorted(beside) or 'nothing'}; {told}")
        assert beside <= excused(harness)
        assert denied == []
        project.corral("verify")


@EACH
def test_a_key_that_is_not_known_is_said_and_ends_a_one_shot(host: Host, harness: Harness) -> None:
    with project_of(host, harness, key="sk-of-somebody-else-0123456789") as project:
        with serving(host.box, COMMANDS, key=KEY, plain=EDIT) as model:
            done = project.inside(*harness.one_shot(), check=False, timeout=PATIENCE)
            answered = [row["accepted"] for row in model.requests() if "accepted" in row]
        said = done.stdout + done.stderr
        assert answered and not any(answered)
        assert "this key is not known here" in said or "401" in said, said
        assert done.returncode == harness.failed, said
        assert not project.exists("made.txt")


# Something listens, or the gate would not open; it closes each connection that says something.
SILENT = """
import socket, sys, threading
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("ready", flush=True)
def hear(connection):
    with connection:
        connection.recv(65536)
while True:
    threading.Thread(target=hear, args=listener.accept()[:1], daemon=True).start()
"""


@contextmanager
def silent(host: Host) -> Iterator[None]:
    process: subprocess.Popen[Any] = host.box.popen(
        ["python3", "-c", SILENT, str(PORT)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
    finally:
        host.box.kill(process)


@EACH
def test_a_model_that_does_not_answer_is_said_and_ends_a_one_shot(host: Host, harness: Harness) -> None:
    with project_of(host, harness) as project:
        with silent(host):
            done = project.inside(*harness.one_shot(), check=False, timeout=PATIENCE)
        said = done.stdout + done.stderr
        assert harness.silence in said, said
        assert done.returncode == harness.failed, said
        assert not project.exists("made.txt")


def spaced(text: str) -> str:
    """Return a pattern for a text on a screen, between whose words the cursor may be moved."""
    return ".{1,60}?".join(map(re.escape, text.split()))


def typing(harness: Harness, prompt: str) -> list[list[Any]]:
    """Return what somebody does who asks one thing, resizes the window and leaves."""
    return [
        ["until", spaced(harness.ready)],
        ["settle"],
        ["type", prompt],
        ["until", spaced(prompt)],
        ["settle"],
        ["type", "\r"],
        ["until", spaced(FINAL)],
        ["settle"],
        ["resize", 90, 30],
        # It is drawn anew, although nothing was typed.
        ["until", "."],
        ["settle"],
        ["type", "\x03"],
        *([["until", spaced("again to")]] if harness.twice else []),
        ["type", "\x03"],
    ]


@EACH_AT_A_TERMINAL
def test_at_a_terminal_without_a_dialog_resized_and_continued_after_down(
    host: Host, harness: Harness, capsys: pytest.CaptureFixture[str]
) -> None:
    with project_of(host, harness) as project, serving(host.box, COMMANDS, key=KEY) as model:

        def sit(prompt: str, start: Start) -> tuple[Any, Seen]:
            argv = ("corral", "run", "--", *watched(*harness.command(start)))
            return watch(
                host, project, lambda: at_terminal(host.box, project.path, typing(harness, prompt), *argv)
            )

        first, seen = sit(PROMPT, "interactive")
        assert project.read("made.txt") == "1000\n"
        beside = beside_the_model(seen)
        with capsys.disabled():
            print(f"\n{harness.name} at a terminal: beside the model {sorted(beside) or 'nothing'}")
        assert beside <= excused(harness)
        project.corral("down")
        before = len(model.requests())
        again, _ = sit("And once more.", "resume")
        # The first conversation is part of this one: its result is there before anything was run.
        talks = [row for row in model.requests()[before:] if row.get("tools")]
        assert talks and all(row["results"] >= 1 for row in talks), talks
        assert (first["code"], again["code"]) == (0, 0)


def test_claude_in_the_background_is_a_session_that_is_left(host: Host) -> None:
    harness = ALL["claude"]
    with project_of(host, harness) as project, serving(host.box, COMMANDS, key=KEY) as model:
        # Without a terminal its own service would end with the container: it says so, and asks nobody.
        done = project.inside("claude", "--bg", PROMPT, check=False)
        assert done.returncode == 1 and "corral run --detach" in done.stderr
        assert model.requests() == []
        project.corral("run", "--detach", "--name", "work", "--", "claude", "--bg", PROMPT)
        host.box.wait_for(
            lambda: project.exists("made.txt") and project.read("made.txt") == "1000\n", timeout=PATIENCE
        )
        (row,) = json.loads(project.corral("ps", "--here", "--json").stdout)["sessions"]
        assert (row["name"], row["state"], row["attended"]) == ("work", "running", False)
        project.corral("down")
        assert project.containers() == []


GENERIC = """\
profile: generic
limits: {best_effort: true}
profile_options:
  generic:
    image:
      - |
        RUN printf '%s\\n' '#!/bin/sh' 'id -u >> made.txt; echo "$TOOL" >> ~/.tool/uses' > /usr/local/bin/tool; \\
          chmod 4755 /usr/local/bin/tool
      - ENV TOOL=used
    interactive: [tool]
    state: [.tool]
"""


def test_a_harness_of_the_users_own_lines_runs_unprivileged_and_keeps_its_state(host: Host) -> None:
    project = host.project("generic", GENERIC)
    project.corral("build", timeout=560)
    for _ in range(2):
        project.corral("run")
    assert project.read("made.txt") == "1000\n1000\n"
    seen = project.inside("sh", "-c", "cat ~/.tool/uses; stat -c '%a %U' /usr/local/bin/tool").stdout
    assert seen.splitlines() == ["used", "used", "755 root"]
    project.corral("verify")
