"""What dead sessions left is swept when the service starts, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from .host import BASE_POLICY, ENFORCER, EVERY_ENGINE, SWEEP, Host, Project, until
from .tamperbench import serving

PORT = 8097
WITH_RELAY = BASE_POLICY + f"host_services:\n  - {{name: web, port: {PORT}}}\n"
FOREIGN = "my-corral-thing", "corral-x"
WAITS = "touch up; until test -e end; do sleep 0.1; done"
# Kills a command line in the moment in which its container is there; a start takes some time more.
KILLER = """\
docker events --filter type=container --filter event=create --format '{{.Actor.Attributes.name}}' |
while read -r name; do
  case $name in "corral-$1-"*) kill -KILL $(cat pid); exit;; esac
done
"""


def names(host: Host, *words: str) -> list[str]:
    return host.box.run(
        ["docker", *words, "--format", "{{.Names}}" if words[0] == "ps" else "{{.Name}}"]
    ).stdout.split()


def networks(host: Host, *projects: str) -> list[str]:
    """The networks of the sandboxes of projects of these names."""
    found = names(host, "network", "ls")
    return [name for name in found if any(name.startswith(f"0-corral-{one}-") for one in projects)]


def relays(host: Host) -> list[str]:
    listed = host.user_systemctl("list-units", "--all", "--plain", "--no-legend", "corral-relay-*").stdout
    return [line.split()[0] for line in listed.splitlines() if f"-{PORT}.service" in line]


def journal(host: Host, since: float) -> str:
    """What both units logged."""
    words = [
        "journalctl",
        "--user",
        "-u",
        SWEEP,
        "-u",
        ENFORCER,
        "--no-pager",
        "-o",
        "cat",
        f"--since=@{int(since)}",
    ]
    return host.box.run(words).stdout


def entries(host: Host) -> str:
    """The kernel's elements, each with the sandbox it is of."""
    return host.netadmin_shell("ipset list corral-pins; ipset list corral-host").stdout


def killable(project: Project, script: str) -> subprocess.Popen[bytes]:
    """Start a session whose command line can be killed by the number in ``pid``."""
    words = ["sh", "-c", 'echo $$ >pid; exec corral run -- sh -c "$0"', script]
    process = project.box.popen(words, cwd=project.path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    project.started.append(process)
    return process


def never_started(host: Host, project: Project) -> str:
    """Kill command lines until one has left a container that was never started; return its name."""
    project.inside("true")
    name = project.path.rpartition("/")[2]
    for _ in range(10):
        project.box.run(["rm", "-f", f"{project.path}/pid"])
        killer = project.box.popen(["bash", "-c", KILLER, "-", name], cwd=project.path)
        project.started.append(killer)
        process = killable(project, "sleep 300")
        process.wait(60)
        host.box.kill(killer)
        for found in project.containers():
            if (
                host.box.run(["docker", "inspect", "-f", "{{.State.Status}}", found]).stdout.strip()
                == "created"
            ):
                return found
        project.corral("prune", "--running", "--yes")
    raise AssertionError("a start is over before its command line can be killed")


def gone(host: Host, *projects: Project) -> Callable[[], bool]:
    short = [project.path.rpartition("/")[2] for project in projects]
    return lambda: not any(project.containers() for project in projects) and not networks(host, *short)


def ends_a_line(host: Host, since: float, endings: tuple[str, ...]) -> bool:
    """Say whether a line of the journal ends so."""
    return any(line.endswith(endings) for line in journal(host, since).splitlines())


@pytest.fixture
def foreign(host: Host) -> Iterator[Host]:
    """Containers that were never started, and networks, that merely say corral."""
    try:
        yield host
    finally:
        for name in FOREIGN:
            host.box.run(["docker", "rm", "-f", name], check=False)
            host.box.run(["docker", "network", "rm", name], check=False)


@pytest.fixture
def down(host: Host) -> Iterator[Host]:
    """The service was stopped, and may be started once; it is back in the end."""
    yield host
    host.user_systemctl("reset-failed", SWEEP, check=False)
    host.user_systemctl("start", ENFORCER)
    host.wait_enforcer()


def start_service(host: Host) -> float:
    """Start the service as if it had not been started often before; return when."""
    host.user_systemctl("reset-failed", SWEEP, check=False)
    since = time.time()
    host.user_systemctl("start", ENFORCER)
    return since


@pytest.mark.representative
@EVERY_ENGINE
def test_what_dead_sessions_left_goes_with_the_next_start_of_the_service_and_is_told(
    foreign: Host, down: Host
) -> None:
    host, began = down, time.time()
    with serving(host, PORT):
        dead, stays = (host.project(name, WITH_RELAY) for name in ("swept", "stays"))
        half, idle, kept, left = (host.project(name) for name in ("half", "idle", "kept", "leftalone"))
        kept.policy(BASE_POLICY + "keep: true\n")
        process = killable(dead, f"{WAITS}; echo '#!' >.envrc")
        until(lambda: dead.exists("up"), 300, "the session runs")
        (relay,) = relays(host)
        stays.start("sh", "-c", "touch up; sleep 600", marker="up")
        (needed,) = set(relays(host)) - {relay}
        idle.inside("true")
        kept.inside("sh", "-c", "echo said", check=False)
        left.corral("run", "--detach", "--", "sh", "-c", "until test -e end; do sleep 0.1; done", timeout=400)
        left.write("end", "")
        (reading,) = left.containers()
        host.box.run(["docker", "wait", reading])
        created = never_started(host, half)
        image = host.box.run(["docker", "images", "-q", "corral/*"]).stdout.split()[0]
        for name in FOREIGN:
            host.box.run(["docker", "create", "--name", name, "--entrypoint", "true", image])
            host.box.run(["docker", "network", "create", name])
        assert '"swept-' in entries(host)
        # Nobody was there when the agent came to its end.
        host.user_systemctl("stop", ENFORCER)
        (ended,) = dead.containers()
        host.box.run(["kill", "-KILL", dead.read("pid").strip()])
        process.wait(20)
        dead.write("end", "")
        host.box.run(["docker", "wait", ended])
        before = networks(host, "swept", "half", "idle")
        assert len(before) == 3 and set(relays(host)) == {relay, needed}
        staying = [*stays.containers(), *kept.containers(), *left.containers()]
        assert len(staying) == 3

        since = start_service(host)
        until(gone(host, dead, half, idle), 30, "what dead sessions left is gone")
        until(lambda: relays(host) == [needed], 30, "its relay, too")
        host.wait_enforcer()
        # Containers are removed by whichever of the two comes first, and told when they are gone. What was never
        # started is so by the service that still ran, if that happened to look.
        for name, how in ((ended, "had ended"), (created, "was never started")):
            either = (f"removed container {name}", f"{name} {how} and its corral was gone: removed")
            until(partial(ends_a_line, host, began, either), 20, f"the end of {name} is told")
        told = journal(host, since).splitlines()
        for what in (f"relay {relay}", *(f"network {name}" for name in before)):
            assert told.count(f"removed {what}") == 1, (what, told)
        removed = [line for line in told if line.startswith("removed ")]
        assert not [
            line for line in removed if any(name in line.split()[-1] for name in (*FOREIGN, needed, *staying))
        ]
        assert host.user_systemctl("show", "-P", "Result", SWEEP).stdout.strip() == "success"
        until(lambda: not any(f'"{name}-' in entries(host) for name in ("swept", "half")), 20, "entries, too")

        # What is not left over, is another's, or is to be read, is where it was.
        assert {*FOREIGN, *staying} <= set(names(host, "ps", "-a"))
        assert set(FOREIGN) <= set(names(host, "network", "ls"))
        assert len(networks(host, "stays", "kept", "leftalone")) == 3
        assert [row["state"] for row in stays.sandbox["sessions"]] == ["running"]
        assert '"stays-' in entries(host)

        # Once is enough.
        host.user_systemctl("stop", ENFORCER)
        before_that = journal(host, since)
        start_service(host)
        host.wait_enforcer()
        looks = before_that.count("Finished")
        until(lambda: journal(host, since).count("Finished") > looks, 30, "it has looked again")
        assert journal(host, since).count("removed ") == before_that.count("removed ")
        # Nobody was told yet what the session changed, so its files were left; and a start has all it needs.
        assert f"{dead.path}/.envrc: new" in dead.inside("true").stderr


@EVERY_ENGINE
def test_a_network_that_is_made_for_a_session_stays_when_the_service_starts(down: Host) -> None:
    host, project = down, down.project("between")
    project.inside("true")
    host.user_systemctl("stop", ENFORCER)
    # What corral run has from before it makes the network until its end.
    hold = "exec 9<>$(echo ~/.local/share/corral/between-*/use.lock); flock -s 9; touch held; exec sleep 600"
    holder = host.box.popen(["bash", "-c", hold], cwd=project.path)
    try:
        until(lambda: project.exists("held"), 20, "the sandbox is worked with")
        since = start_service(host)
        host.wait_enforcer()
        until(lambda: "Finished" in journal(host, since), 30, "it has looked")
        assert len(networks(host, "between")) == 1
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        host.box.kill(holder)
    host.user_systemctl("restart", ENFORCER)
    until(lambda: networks(host, "between") == [], 30, "nobody works with it any more")


def test_without_docker_the_start_of_the_service_sweeps_nothing_and_says_so(down: Host) -> None:
    host, project = down, down.project("nodocker")
    project.inside("true")
    host.user_systemctl("stop", ENFORCER)
    host.root("systemctl", "stop", "docker.socket", "docker.service")
    try:
        since = start_service(host)
        until(lambda: "nothing was done: Docker is not running" in journal(host, since), 30, "it says so")
        shown = "Result,ExecMainStatus,ActiveState"
        until(
            lambda: (
                set(host.user_systemctl("show", "-p", shown, SWEEP).stdout.split())
                == {"Result=success", "ExecMainStatus=0", "ActiveState=inactive"}
            ),
            20,
            "that is no failure",
        )
    finally:
        host.restart_docker()
        host.root("systemctl", "start", "docker.socket")
    assert len(networks(host, "nodocker")) == 1
