"""kill -9 of the command line at any moment of a session's life: what cleans up afterwards leaves nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable

import pytest

from tests.lab import Box

from .host import BASE_POLICY, Host, Project, until

KILLS = int(os.environ.get("CORRAL_CLI_KILLS") or 50)
POLICY = BASE_POLICY + "host_services:\n  - {name: web, port: 8099}\n"
# (seconds that one takes, at most, argv)
RUN = (2.5, ("run", "--", "sh", "-c", "sleep 0.3"))
COMMANDS = (
    RUN,
    RUN,
    (2.5, ("run", "--detach", "--", "sleep", "600")),
    (2.5, ("shell",)),
    (1.5, ("down",)),
    (5.0, ("verify",)),
)


def swept(project: Project) -> None:
    """End what runs and remove what is left."""
    project.corral("prune", "--running", "--yes", timeout=200)


def cleaned(project: Project) -> None:
    """What ``swept`` is, or what CORRAL_CLEAN names: any commands, run in the project."""
    for words in os.environ.get("CORRAL_CLEAN", "").split(";"):
        if words.strip():
            project.corral(*words.split(), timeout=200)
    if not os.environ.get("CORRAL_CLEAN"):
        swept(project)


def leftovers(host: Host, project: Project) -> dict[str, str]:
    """Return what is there of a project, by kind; nothing of what is there for good (state, images)."""
    name = project.path.rpartition("/")[2]
    commands = {
        "containers": f"docker ps -a --format '{{{{.Names}}}}' | grep '^corral-{name}-'",
        "networks": f"docker network ls --format '{{{{.Name}}}}' | grep '{name}'",
        "relays": "systemctl --user list-units --all --plain --no-legend 'corral-relay-*'",
        "sessions": f"ls -d ~/.local/share/corral/{name}-*/sessions/*",
        "processes": "pgrep -af 'corral (run|shell|down|verify)'",
    }
    found = {
        kind: host.shell(f"{command} 2>/dev/null || true").stdout.strip()
        for kind, command in commands.items()
    }
    listed = host.netadmin_shell(
        "for s in corral-pins corral-host; do ipset list $s 2>/dev/null | sed '1,/^Members/d'; done; "
        "nft list table inet corral 2>/dev/null | grep -o 'elements = .*' | grep tcp || true"
    )
    found["kernel"] = listed.stdout.strip()
    return {kind: text for kind, text in found.items() if text}


def one_kill(project: Project, rng: random.Random) -> str | None:
    """Kill a command somewhere on its way; return which, None when it had ended already."""
    longest, words = rng.choice(COMMANDS)
    process = project.box.popen(
        ["corral", *words],
        cwd=project.path,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    time.sleep(rng.uniform(0.05, longest))
    if process.poll() is not None:
        return None
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    Box.kill(process)
    return words[0]


def play(host: Host, kills: int, seed: int, clean: Callable[[Project], None]) -> Counter[str]:
    print(f"{kills} kills, seed {seed}")
    rng, count = random.Random(seed), Counter[str]()
    project = host.project("killed", POLICY)
    server = host.box.popen(["python3", "-m", "http.server", "8099", "--bind", "127.0.0.1"])
    try:
        project.inside("true", timeout=400)
        while count.total() < kills:
            killed = one_kill(project, rng)
            if killed is None:
                continue
            count[killed] += 1
            # What was asked of Docker goes on without who asked: the next kill may meet it, cleaning must not.
            if count.total() % 5 == 0:
                settled(host)
                clean(project)
                until(lambda: not leftovers(host, project), 60, "nothing is left")
        print(f"killed {dict(count)}")
        assert project.inside("echo", "works").stdout == "works\n"
        clean(project)
        until(lambda: not leftovers(host, project), 60, "nothing is left in the end")
    finally:
        Box.kill(server)
    return count


def settled(host: Host) -> None:
    """Return when Docker does nothing any more for a request of the killed."""

    def states() -> str:
        return host.shell("docker ps -a --format '{{.ID}} {{.State}}' | sort").stdout

    def quiet() -> bool:
        before = states()
        time.sleep(0.5)
        return states() == before and "created" not in before

    try:
        until(quiet, 5, "Docker is quiet")
    except AssertionError:
        # One that was made and never started stays in that state: that is for the cleaning.
        return


@pytest.mark.fault("kill -9 of corral at random")
def test_fifty_kills_of_the_command_line_leave_nothing_behind(host: Host) -> None:
    seed = int(os.environ.get("CORRAL_KILLS_SEED") or random.SystemRandom().getrandbits(32))
    count = play(host, KILLS, seed, cleaned)
    assert {"run", "shell", "down", "verify"} >= set(count) and count["run"] * 5 >= KILLS
