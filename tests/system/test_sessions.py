"""How sessions end when something comes in between: signals, closed terminals, full disks, changed policies."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.lab import Box

from .engine_side import engine_socket
from .host import BASE_POLICY, ENFORCER, Host, Project, until

pytestmark = pytest.mark.representative

# Hands everything on to Docker. A request with the word in its first line waits, and is answered whatever becomes
# of the one who asked: Docker does not always notice.
SLOW_DOCKER = """\
import os, socket, sys, threading, time
path, word, directory, engine = sys.argv[1], sys.argv[2].encode(), sys.argv[3], sys.argv[4]
def mark(name):
    open(os.path.join(directory, name), "w").close()
def serve(client, docker):
    held = threading.Event()
    def answers():
        while data := docker.recv(65536):
            if held.is_set():
                mark("answered")
            try:
                client.sendall(data)
            except OSError:
                pass
        try:
            client.shutdown(socket.SHUT_WR)
        except OSError:
            pass
    threading.Thread(target=answers, daemon=True).start()
    while data := client.recv(65536):
        if word in data.partition(b"\\r\\n")[0]:
            mark("held")
            time.sleep(2)
            held.set()
        docker.sendall(data)
    if not held.is_set():
        docker.shutdown(socket.SHUT_WR)
server = socket.socket(socket.AF_UNIX)
server.bind(path)
server.listen(64)
while True:
    client, _ = server.accept()
    docker = socket.socket(socket.AF_UNIX)
    docker.connect(engine)
    threading.Thread(target=serve, args=(client, docker), daemon=True).start()
"""

# A terminal window in which something is typed, and that is closed once that has made a file: prints the exit code.
WINDOW = """\
import os, pty, sys, time
marker, typed, argv = sys.argv[1], sys.argv[2], sys.argv[3:]
pid, person = pty.fork()
if pid == 0:
    os.execvp(argv[0], argv)
os.write(person, typed.encode() + b"\\n")
end = time.monotonic() + 60
while not os.path.exists(marker):
    assert time.monotonic() < end
    time.sleep(0.05)
os.close(person)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def slow_docker(project: Project, word: str) -> tuple[subprocess.Popen[Any], str]:
    project.write("slow.py", SLOW_DOCKER)
    socket = f"{project.path}/slow-{word.rpartition('/')[2]}.sock"
    argv = ["python3", f"{project.path}/slow.py", socket, word, project.path, engine_socket(project.box)]
    process = project.box.popen(argv)
    project.box.wait_for(["test", "-S", socket], timeout=20)
    return process, f"unix://{socket}"


@pytest.mark.parametrize("word", ["/containers/create", "/start"])
@pytest.mark.parametrize(("name", "code"), [("INT", 130), ("TERM", 143)])
def test_an_interrupt_while_docker_works_leaves_no_container_and_is_not_lost(
    host: Host, word: str, name: str, code: int
) -> None:
    project = host.project("held")
    project.inside("true")
    proxy, docker = slow_docker(project, word)
    try:
        command = ["sh", "-c", "echo $$ >pid; exec corral run -- sleep 120"]
        process = host.box.popen(
            command, cwd=project.path, env={"DOCKER_HOST": docker}, stderr=subprocess.PIPE, text=True
        )
        project.started.append(process)
        until(lambda: project.exists("held"), 60, "the request is held")
        host.box.run(["kill", f"-{name}", project.read("pid").strip()])
        assert process.wait(30) == code
        # What Docker has not answered yet it may still do when nobody is there to undo it.
        assert project.exists("answered")
        assert project.containers() == []
        # The enforcer was told; the writer may have other things to do first.
        until(
            lambda: '"held-' not in host.netadmin("ipset", "list", "corral-pins").stdout,
            20,
            "what it could reach goes",
        )
    finally:
        Box.kill(proxy)


def test_output_to_a_full_disk_is_an_error(host: Host) -> None:
    project = host.project("full")
    project.inside("true")
    for command in ("corral run -- echo hi", "corral verify", "corral status", "corral --help"):
        done = host.shell(f"cd {project.path}; {command} >/dev/full || echo code $? >&2")
        assert "corral: cannot write to stdout: No space left on device" in done.stderr, command
        assert done.stderr.endswith("code 1\n"), command
        assert "Exception ignored" not in done.stderr
    assert project.containers() == []


def test_a_terminal_that_goes_away_ends_a_shell_and_what_in_it_ignores_the_hang_up(host: Host) -> None:
    project = host.project("window")
    project.inside("true")
    project.write("window.py", WINDOW)
    stubborn = "exec sh -c \"trap '' HUP; touch up; while :; do sleep 0.2; done\""
    done = host.box.run(
        ["python3", "window.py", "up", stubborn, "corral", "shell"], cwd=project.path, timeout=60
    )
    assert done.stdout.strip() == "143"
    assert project.containers() == []


@pytest.mark.parametrize("spoiled", ["typo", "renamed", "gone"])
def test_down_cleans_up_after_the_policy_was_edited(host: Host, spoiled: str) -> None:
    project = host.project("edited")
    process = project.start("sh", "-c", "touch up; sleep 60", marker="up")
    network = project.sandbox["network"]
    project.policy(BASE_POLICY + {"typo": "egres: {}\n", "renamed": "name: another\n", "gone": ""}[spoiled])
    if spoiled == "gone":
        host.box.run(["rm", f"{project.path}/corral.yaml"])
    done = project.corral("down")
    assert "removed 1 container, its network" in done.stdout
    process.wait(20)
    assert project.containers() == []
    assert network not in host.box.run(["docker", "network", "ls", "--format", "{{.Name}}"]).stdout.split()
    assert project.corral("down", check=False).stdout.endswith(": nothing to do\n")


def test_a_sandbox_goes_by_its_id_after_its_directory_moved(host: Host) -> None:
    project = host.project("moved")
    project.inside("true")
    sandbox = project.sandbox["sandbox"]
    assert "removed its network" in host.box.run(["corral", "down", sandbox], cwd="/tmp").stdout


def test_an_installation_needs_no_login(host: Host) -> None:
    bare = {"XDG_RUNTIME_DIR": "", "DBUS_SESSION_BUS_ADDRESS": ""}
    assert "user part: done" in host.box.run(["corral", "install"], env=bare, timeout=180).stdout
    # su keeps the variable of the one who called it.
    foreign = {"XDG_RUNTIME_DIR": "/root", "DBUS_SESSION_BUS_ADDRESS": ""}
    assert "user part: done" in host.box.run(["corral", "install"], env=foreign, timeout=180).stdout


@pytest.fixture
def outside_docker(host: Host) -> Iterator[Host]:
    """The user is in group docker no more, and the user's service manager knows it."""
    host.root("gpasswd", "-d", "dev", "docker")
    try:
        host.root("systemctl", "restart", "user@1000.service")
        yield host
    finally:
        host.root("usermod", "-aG", "docker", "dev")
        host.root("systemctl", "restart", "user@1000.service")
        host.user_systemctl("start", ENFORCER)
        host.wait_enforcer()


def test_group_docker_is_looked_at_before_anything_is_installed(outside_docker: Host) -> None:
    host = outside_docker
    done = host.box.run(["corral", "install"], check=False, timeout=60)
    assert (done.returncode, "system part" in done.stdout) == (1, False)
    assert "sudo usermod -aG docker dev" in done.stderr
    host.root("usermod", "-aG", "docker", "dev")
    done = host.box.run(["corral", "install"], check=False, timeout=60)
    assert (done.returncode, "system part" in done.stdout) == (1, False)
    assert "sudo systemctl restart user@1000.service" in done.stderr
    project = host.project("stale")
    host.user_systemctl("start", ENFORCER)
    done = project.corral("run", "--", "true", check=False)
    assert done.returncode == 1
    assert "sudo systemctl restart user@1000.service" in done.stderr
