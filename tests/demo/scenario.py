"""What the demo does, step by step. The agent is real and unmodified; only the model's answers are scripted."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lab import Box, Lab
from tests.system.host import CONFIG, ENFORCER, Host, Project

PORT = 8081
OPEN_PORT = 9000
SECRET_NAME = "the-users-data.forbidden.corral.example"

# "What is the address of a.b?" as it goes over the wire.
QUESTION = "000701000001000000000000016101620000010001"

POLICY = f"""\
profile: opencode
egress:
  profile_defaults: false
  allow:
    - allowed1.corral.example
    - allowed2.corral.example
host_services:
  - name: llama
    port: {PORT}
limits:
  best_effort: true
profile_options:
  opencode:
    config:
      model: llama/demo
      provider:
        llama:
          npm: "@ai-sdk/openai-compatible"
          name: a model on this machine
          options: {{baseURL: "http://corral-host:{PORT}/v1"}}
          models:
            demo: {{name: demo, limit: {{context: 65536, output: 4096}}}}
"""


@dataclass(frozen=True)
class Step:
    """One thing the agent tries: what it is called, its command, and whether it should work."""

    key: str
    what: str
    command: str
    works: bool


@dataclass(frozen=True)
class Row:
    """One line of the table: what the sandbox saw, what the far end saw."""

    what: str
    works: bool
    code: int
    milliseconds: int
    far: str
    good: bool


def steps(forbidden: str, resolver: str) -> tuple[Step, ...]:
    """Return what the agent will do with its own shell tool."""
    curl = "curl -sS -o /dev/null -m 10"
    lookup = (
        "python3 -c 'import socket; s=socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(5); "
        f's.connect(("{resolver}", 53)); s.send(bytes.fromhex("{QUESTION}")); '
        "s.recv(99)'"
    )
    return (
        Step("write", "write a file in the project", "echo 'made by the agent' > agent.txt", True),
        Step(
            "allowed",
            "fetch https://allowed1.corral.example/",
            f"{curl} https://allowed1.corral.example/",
            True,
        ),
        Step("name", "fetch a name that is not listed", f"{curl} https://forbidden.corral.example/", False),
        Step("address", f"fetch a forbidden address ({forbidden})", f"{curl} -k https://{forbidden}/", False),
        Step("tunnel", "look a secret up as a name", f"getent hosts {SECRET_NAME}", False),
        Step("dns", f"ask a name server ({resolver})", lookup, False),
        Step(
            "gateway",
            "reach a server on the host's 0.0.0.0",
            f"{curl} http://corral-host:{OPEN_PORT}/",
            False,
        ),
    )


def script(all_steps: tuple[Step, ...]) -> list[dict[str, str]]:
    """Return the model's answers: each command notes its exit code and how long it took."""
    return [
        {
            "what": step.what,
            "command": f"t=$(date +%s%3N); {step.command}; echo {step.key} $? $(( $(date +%s%3N) - t )) >> seen.txt",
        }
        for step in all_steps
    ]


@contextmanager
def model_server(box: Box, directory: str, answers: list[dict[str, str]]) -> Iterator[None]:
    """Run the model server on the box's loopback."""
    source = (Path(__file__).parent / "model_server.py").read_text()
    box.write(f"{directory}/model_server.py", source)
    box.write(f"{directory}/script.json", json.dumps(answers))
    process: subprocess.Popen[Any] = box.popen(
        ["python3", f"{directory}/model_server.py", str(PORT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("the model server did not start")
        yield
    finally:
        box.kill(process)


ACCEPT = """
import socket, sys
listener = socket.create_server(("0.0.0.0", int(sys.argv[1])))
print("ready", flush=True)
while True:
    with listener.accept()[0] as connection:
        connection.settimeout(2)
        try:
            said = connection.recv(7)
        except OSError:
            said = b""
    print("control" if said == b"control" else "accepted", flush=True)
"""


@contextmanager
def open_server(box: Box) -> Iterator[Callable[[], int]]:
    """Listen on every address of the host; the result counts the connections that were accepted."""
    process: subprocess.Popen[Any] = box.popen(
        ["python3", "-c", ACCEPT, str(OPEN_PORT)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")

    def count() -> int:
        # A connection of the host's own ends the counting, and shows that connections are counted.
        box.run(["bash", "-c", f"printf control > /dev/tcp/127.0.0.1/{OPEN_PORT}"])
        return sum(1 for _ in iter(lambda: next(lines).strip(), "control"))

    try:
        if next(lines).strip() != "ready":
            raise RuntimeError("the open server did not start")
        yield count
    finally:
        box.kill(process)


def play(lab: Lab, say: Callable[[str], None]) -> list[Row]:
    """Do everything in the lab and return the table; ``say`` gets one line a step."""
    started = time.monotonic()

    @contextmanager
    def step(what: str) -> Iterator[None]:
        begun = time.monotonic()
        yield
        say(f"  {what}: {time.monotonic() - begun:.1f} s")

    box, internet = lab.box, lab.internet
    host = Host(box, internet)
    forbidden, resolver = internet.addresses["forbidden"], internet.addresses["resolver"]
    todo = steps(forbidden, resolver)
    with step("corral's wheel installed in the box with pipx"):
        lab.install_corral()
    with step("corral install (writer, units, rules; enforcer as systemd --user service)"):
        box.write(f"{box.home}/.config/corral/enforcer.toml", CONFIG)
        box.run(["corral", "install"], timeout=180)
        host.user_systemctl("start", ENFORCER)
        host.wait_enforcer()
    project = host.project("demo", POLICY)
    try:
        box.run(["rm", "-f", f"{project.path}/seen.txt", f"{project.path}/agent.txt"])
        with model_server(box, f"{box.home}/model", script(todo)):
            with step("corral build"):
                project.corral("build", timeout=900)
            with step("corral verify"):
                verified = project.corral("verify", check=False)
            for line in verified.stdout.splitlines():
                say(f"    {line}")
            internet.reset_counters()
            mark = internet.mark()
            with step("corral run -- opencode run (a real agent, its own tool calls)"):
                with open_server(box) as count:
                    agent = project.corral(
                        "run",
                        "--",
                        "opencode",
                        "run",
                        "--auto",
                        "Please do all steps.",
                        check=False,
                        timeout=300,
                    )
                    accepted = count()
        if agent.returncode != 0:
            say(agent.stdout + agent.stderr)
        rows = table(project, host, todo, mark, accepted)
        if verified.returncode != 0:
            rows.append(Row("corral verify", True, verified.returncode, 0, "failed", False))
    finally:
        project.end()
    say(f"  all together: {time.monotonic() - started:.1f} s")
    return rows


def table(project: Project, host: Host, todo: tuple[Step, ...], mark: int, accepted: int) -> list[Row]:
    """Join what the sandbox noted with what arrived at the far end."""
    internet = host.internet
    noted = project.read("seen.txt") if project.exists("seen.txt") else ""
    seen = {line.split()[0]: line.split()[1:] for line in noted.splitlines()}
    forbidden = internet.addresses["forbidden"]
    asked = [query.name for query in internet.queries(mark)]
    listed = {"allowed1.corral.example", "allowed2.corral.example"}
    arrived = {
        "write": ("agent.txt belongs to the user", _owner(host, project) == "dev"),
        "allowed": _packets(internet.packets("203.0.113.10", "tcp", 443), some=True),
        "name": _queries([name for name in asked if name == "forbidden.corral.example"]),
        "address": _packets(internet.packets(forbidden)),
        "tunnel": _queries([name for name in asked if name not in listed]),
        "dns": _queries([name for name in asked if name == "a.b"]),
        "gateway": (f"{accepted} connections accepted", accepted == 0),
    }
    rows = []
    for step in todo:
        code, spent = (int(seen[step.key][0]), int(seen[step.key][1])) if step.key in seen else (-1, -1)
        text, far_good = arrived[step.key]
        # Docker's resolver of 20.10 says nothing instead of no: a second for each of two questions.
        names = step.key in {"name", "tunnel"} and host.box.engine.suite == "bookworm"
        quick = spent < (3000 if names else 1000)
        good = far_good and code >= 0 and (code == 0) == step.works and (step.works or quick)
        rows.append(Row(step.what, step.works, code, spent, text, good))
    # The positive control: the same fetch from a container that is not fenced does arrive.
    host.plain("curl", "-sk", "-m", "5", "-o", "/dev/null", f"https://{forbidden}/", check=False)
    text, good = _packets(internet.packets(forbidden), some=True)
    rows.append(Row("control: the forbidden address from a plain container", True, 0, 0, text, good))
    return rows


def _owner(host: Host, project: Project) -> str:
    done = host.box.run(["stat", "-c", "%U", f"{project.path}/agent.txt"], check=False)
    return done.stdout.strip()


def _packets(count: int, some: bool = False) -> tuple[str, bool]:
    return f"{count} packets", (count > 0) == some


def _queries(names: list[str]) -> tuple[str, bool]:
    return f"{len(names)} queries in the DNS log", not names


def render(rows: list[Row]) -> str:
    """Return the table as text."""
    lines = [("the agent tried to", "expected", "in the sandbox", "at the far end", "")]
    for row in rows:
        inside = "worked" if row.code == 0 else "never ran" if row.code < 0 else f"refused (exit {row.code})"
        inside += f", {row.milliseconds} ms" if row.milliseconds > 0 else ""
        verdict = "" if row.good else "<-- NOT AS EXPECTED"
        lines.append((row.what, "works" if row.works else "refused", inside, row.far, verdict))
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
