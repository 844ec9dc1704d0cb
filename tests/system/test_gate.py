"""The gate in the box: what a session says before its program runs, and that it does not run otherwise."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from tests.lab import Lab
from tests.lab.network import in_netns

from .host import BASE_POLICY, EVERY_ENGINE, Done, Host, Project

pytestmark = pytest.mark.representative

PROBE = "192.0.2.1"
SERVICE = BASE_POLICY + "host_services:\n  - {name: llama, port: 8081}\n"
ISOLATION = "corral-firewall: ERROR: unlisted host reachable — isolation broken"
RECHECK = "corral-firewall: ERROR: re-check failed against existing rules"


def said(done: Done) -> list[str]:
    """The lines of the gate."""
    return [line for line in done.stderr.splitlines() if line.startswith("corral-firewall: ")]


def errors(done: Done) -> list[str]:
    return [line for line in said(done) if line.startswith("corral-firewall: ERROR: ")]


@contextmanager
def listener(host: Host, port: int) -> Iterator[None]:
    server = host.box.popen(["python3", "-m", "http.server", str(port), "--bind", "127.0.0.1"])
    try:
        host.box.wait_for(["curl", "-s", "-o", "/dev/null", f"http://127.0.0.1:{port}/"])
        yield
    finally:
        host.box.kill(server)


@contextmanager
def answering(lab: Lab, host: Host, address: str) -> Iterator[None]:
    """Someone lives at the address that is probed: otherwise a hole in the fence leads nowhere."""
    in_netns(lab.internet._lab.inet_netns, ["ip", "route", "add", "local", f"{address}/32", "dev", "lo"])
    try:
        host.shell(f"exec 3<>/dev/tcp/{address}/443", timeout=5)
        yield
    finally:
        in_netns(lab.internet._lab.inet_netns, ["ip", "route", "del", "local", f"{address}/32", "dev", "lo"])


@EVERY_ENGINE
def test_the_policy_is_told_line_by_line_before_the_agent_runs(host: Host) -> None:
    project = host.project("lines", SERVICE)
    with listener(host, 8081):
        done = project.inside("sh", "-c", "echo agent >&2; env | grep -c CORRAL_GATE", check=False)
    assert done.stdout.strip() == "0"
    lines = done.stderr.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("corral-firewall: "))
    assert lines[first:] == [
        "corral-firewall: pinned allowed1.corral.example -> 203.0.113.10",
        "corral-firewall: pinned allowed2.corral.example -> 203.0.113.20",
        "corral-firewall: OK: unlisted host blocked",
        "corral-firewall: OK: DNS closed",
        "corral-firewall: OK: allowlisted host allowed1.corral.example (203.0.113.10) reachable",
        "corral-firewall: OK: allowlisted host allowed2.corral.example (203.0.113.20) reachable",
        "corral-firewall: OK: host service 8081 reachable",
        "corral-firewall: egress policy applied",
        "agent",
    ]


@EVERY_ENGINE
def test_a_shell_passes_the_same_gate_beside_a_running_session(host: Host) -> None:
    project = host.project("beside")
    process = project.start("sh", "-c", "touch up; sleep 60", marker="up")
    done = project.corral("shell", input="echo inside\n")
    assert done.stdout.strip() == "inside"
    assert said(done)[0] == "corral-firewall: rules already present for this sandbox; re-checking"
    assert said(done)[-1] == "corral-firewall: egress policy applied"
    host.box.kill(process)


@EVERY_ENGINE
def test_the_gate_is_counted_as_denied(host: Host) -> None:
    project = host.project("denied")
    process = project.start("sh", "-c", "touch up; sleep 60", marker="up")
    address = project.sandbox["sessions"][0]["address"]

    def listed() -> bool:
        lines = project.corral("denied", "--all").stdout.splitlines()
        return any(" denied-" in line and f" {PROBE} " in line and "own check" in line for line in lines)

    host.box.wait_for(listed, timeout=10)
    # And counted by the kernel for exactly this container.
    counted = host.netadmin("ipset", "list", "corral-denied").stdout
    (line,) = [line for line in counted.splitlines() if line.startswith(f"{address} ")]
    assert int(line.partition("packets ")[2].split()[0]) > 0
    # What the user sees without being asked is what the agent tried.
    assert project.sandbox["sessions"][0]["denied"] == 0
    host.box.kill(process)


@contextmanager
def tampered(
    host: Host, project: Project, address: str, ports: Sequence[str] = ("tcp:443",)
) -> Iterator[Callable[[], str]]:
    """Pause the next session's repair: once its link is there, both services are stopped and an entry is added.

    Nothing in the product makes that possible: root stops the processes. Yields a function that waits until the
    session is over, lets the services go on, and returns the session's address.
    """
    known = {row["address"] for row in project.sandbox["sessions"]}
    pids = [str(host.enforcer_pid()), str(host.engine.writer_pid())]
    first = "sed -n 's/^\\([0-9.]*\\),tcp:443,203.0.113.10 .*/\\1/p'"
    others = " ".join(f"-e {text}" for text in ("-", *sorted(known)))
    links = f"ip -o link show master {project.sandbox['bridge']} | wc -l"
    # The link of a container is there long before its first process, and after everybody was asked.
    script = (
        f"n=$({links}); echo ready; until [ $({links}) -gt $n ]; do :; done; "
        f"kill -STOP {' '.join(pids)}; source=$(ipset list corral-pins | {first} | grep -vxF {others}); "
        f"for port in {' '.join(ports)}; do ipset add corral-pins $source,$port,{address}; done; echo $source"
    )
    command = [*host.engine.entering(), "sh", "-c", script]
    vandal = host.box.popen(command, user="root", stdout=subprocess.PIPE, text=True)
    assert vandal.stdout is not None
    assert vandal.stdout.readline() == "ready\n"
    before = set(project.containers())

    def over() -> bool:
        made = set(project.containers()) - before
        form = "{{.State.Status}}"
        states = [host.box.run(["docker", "inspect", "-f", form, name], check=False).stdout for name in made]
        return vandal.poll() is not None and all(state.strip() in ("exited", "") for state in states)

    def finish() -> str:
        host.box.wait_for(lambda: vandal.poll() is not None, timeout=60)
        source = str(vandal.communicate()[0]).strip()
        assert source, "the session's entries were never seen"
        host.box.wait_for(over, timeout=60)
        # It is still there: nobody took it away meanwhile.
        assert f"{source},{ports[0]},{address} " in host.netadmin("ipset", "list", "corral-pins").stdout
        host.root("kill", "-CONT", *pids)
        return source

    try:
        yield finish
    finally:
        host.box.kill(vandal)
        host.root("kill", "-CONT", *pids, check=False)


def tampered_run(host: Host, project: Project, address: str, ports: Sequence[str] = ("tcp:443",)) -> Done:
    """Start a session that may reach the address, and that nobody repairs, and wait for its end."""
    argv = ["corral", "run", "--", "touch", "ran"]
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with tampered(host, project, address, ports) as finish:
        process = host.box.popen(argv, cwd=project.path, text=True, stdin=subprocess.DEVNULL, **pipes)
        finish()
        stdout, stderr = process.communicate(timeout=60)
    return Done(argv, process.returncode, stdout, stderr)


def paused(host: Host, project: Project, *words: str) -> Done:
    """Run corral with the probe's address allowed and nobody repairing; say what came of it and of the entry."""
    since = time.time()
    with tampered(host, project, PROBE) as finish:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process = host.box.popen(["corral", *words], cwd=project.path, text=True, **pipes)
        assert process.stdin is not None
        process.stdin.write("touch ran\n")
        process.stdin.close()
        process.stdin = None
        source = finish()
        stdout, stderr = process.communicate(timeout=60)
    assert host.internet.packets(PROBE, "tcp", 443) > 0
    entry = f"{source} -> {PROBE}:443/tcp"
    told = f"removed from corral-pins, where nobody asked for it: {entry}"
    host.box.wait_for(lambda: told in host.writer_journal(since), timeout=60)
    assert f",{PROBE} " not in host.netadmin("ipset", "list", "corral-pins").stdout
    return Done(words, process.returncode, stdout, stderr)


@EVERY_ENGINE
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside"])
@pytest.mark.parametrize("words", [("run", "--", "touch", "ran"), ("shell",)], ids=["run", "shell"])
def test_with_repair_paused_a_reachable_unlisted_host_stops_the_start_with_exactly_that(
    lab: Lab, host: Host, words: tuple[str, ...], beside: bool
) -> None:
    project = host.project("hole")
    project.inside("true")
    if beside:
        project.start("sh", "-c", "touch up; sleep 300", marker="up")
    running = project.containers()
    with answering(lab, host, PROBE):
        done = paused(host, project, *words)
        assert done.returncode == 1
        assert errors(done) == [ISOLATION, RECHECK] if beside else [ISOLATION]
        assert "egress policy applied" not in done.stderr
        assert not project.exists("ran")
        assert project.containers() == running
        # With the element gone, and the address still there, the same start succeeds.
        assert errors(project.inside("touch", "ran")) == []
    assert project.exists("ran")


@EVERY_ENGINE
def test_with_repair_paused_verify_fails_with_the_gates_words(lab: Lab, host: Host) -> None:
    project = host.project("verify-hole")
    project.inside("true")
    with answering(lab, host, PROBE):
        done = paused(host, project, "verify")
    assert done.returncode == 1
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert "FAIL gate: unlisted host reachable — isolation broken" in failed
    # The kernel's side tells the element itself, when it was looked at in the right moment.
    assert all(line.startswith(("FAIL gate: ", "FAIL live-rules: ")) for line in failed), failed


@EVERY_ENGINE
def test_an_address_that_answers_nothing_is_not_taken_for_a_blocked_one(host: Host) -> None:
    project = host.project("silent")
    project.inside("true")
    done = tampered_run(host, project, PROBE)
    assert done.returncode == 1
    (told,) = errors(done)
    assert told.startswith(f"corral-firewall: ERROR: unlisted host not refused: {PROBE}:443 ")
    assert not project.exists("ran")


@EVERY_ENGINE
def test_a_resolver_that_can_be_reached_stops_the_start(host: Host) -> None:
    project = host.project("resolver-hole")
    project.inside("true")
    resolver = host.internet.addresses["resolver"]
    with host.box.resolver("routable"):
        mark = host.internet.mark()
        done = tampered_run(host, project, resolver, ("udp:53", "tcp:53"))
        assert [query for query in host.internet.queries(mark) if query.name == "example.com"]
    assert done.returncode == 1
    (told,) = errors(done)
    assert told.startswith(f"corral-firewall: ERROR: DNS reachable: {resolver} answers ")
    assert not project.exists("ran")


@EVERY_ENGINE
@pytest.mark.parametrize("resolver", ["stub", "routable"])
def test_nobody_outside_hears_the_gates_questions(host: Host, resolver: str) -> None:
    project = host.project(
        "questions", "profile: opencode\negress: {profile_defaults: false}\nlimits: {best_effort: true}\n"
    )
    with host.box.resolver(resolver):
        project.inside("true")
        mark = host.internet.mark()
        host.internet.reset_counters()
        assert "corral-firewall: OK: DNS closed" in said(project.inside("true"))
        assert host.internet.queries(mark) == []
        assert host.internet.packets(PROBE) == 0
        # The log does hear the host.
        host.box.run(["getent", "hosts", "control.corral.example"], check=False)
        assert host.internet.queries(mark)


@EVERY_ENGINE
def test_a_name_that_does_not_listen_stops_the_start_unless_liveness_is_off(host: Host) -> None:
    quiet = BASE_POLICY + "    - {host: quiet.corral.example, ports: [8443, 9443]%s}\n"
    host.internet.set_name("quiet.corral.example", ["203.0.113.77"])
    project = host.project("liveness", quiet % "")
    done = project.inside("touch", "ran", check=False)
    assert done.returncode == 1
    assert errors(done) == [
        "corral-firewall: ERROR: allowlisted host quiet.corral.example not reachable: 203.0.113.77 on ports "
        "8443, 9443: refused; if it is not meant to answer there, set liveness: false for it in corral.yaml"
    ]
    assert not project.exists("ran")
    project.policy(quiet % ", liveness: false")
    done = project.inside("touch", "ran")
    assert "corral-firewall: pinned quiet.corral.example -> 203.0.113.77" in said(done)
    assert not any("host quiet.corral.example" in line for line in said(done))
    assert project.exists("ran")
    # A second address that does not answer is no reason to stop: one is enough.
    host.internet.set_name("quiet.corral.example", ["203.0.113.77"])
    project.policy(quiet.replace("9443", "443") % "")
    assert "corral-firewall: OK: allowlisted host quiet.corral.example (203.0.113.77) reachable" in said(
        project.inside("true")
    )


@EVERY_ENGINE
def test_a_host_service_without_a_listener_stops_the_start(host: Host) -> None:
    project = host.project("no-listener", SERVICE)
    done = project.inside("touch", "ran", check=False)
    assert done.returncode == 1
    assert errors(done) == [
        "corral-firewall: ERROR: host service 8081 not reachable: nothing listens on 127.0.0.1:8081 of the host; "
        "start it there"
    ]
    assert done.stderr.count("nothing listens") == 1
    assert not project.exists("ran")
    with listener(host, 8081):
        assert "corral-firewall: OK: host service 8081 reachable" in said(project.inside("touch", "ran"))
    assert project.exists("ran")


def test_all_problems_are_told_at_once(lab: Lab, host: Host) -> None:
    host.internet.set_name("quiet.corral.example", ["203.0.113.77"])
    policy = SERVICE.replace(
        "host_services", "    - {host: quiet.corral.example, ports: [8443]}\nhost_services"
    )
    project = host.project("all", policy)
    project.policy(BASE_POLICY)
    project.inside("true")
    project.policy(policy)
    with answering(lab, host, PROBE):
        done = tampered_run(host, project, PROBE)
    told = [line.removeprefix("corral-firewall: ERROR: ").split()[0] for line in errors(done)]
    assert told == ["unlisted", "allowlisted", "host"]
    assert not project.exists("ran")


def test_a_container_without_the_gates_variable_does_not_start_its_program(host: Host) -> None:
    project = host.project("left-out")
    project.inside("true")
    image = host.box.run(["docker", "images", "-q", "corral/*"]).stdout.split()[0]
    base = ["docker", "run", "--rm", "--network", project.sandbox["network"], "-u", host.engine.agent]
    base += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "-e", "CORRAL_MOUNTS=[]"]
    for given in ([], ["-e", "CORRAL_GATE={}"]):
        done = host.box.run([*base, *given, image, "echo", "started"], check=False)
        assert (done.returncode, done.stdout) == (1, ""), json.dumps(given)
        assert "CORRAL_GATE does not say what to check" in done.stderr
