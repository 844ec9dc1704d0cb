"""A host with corral on it: the box, corral installed in it as a user does it, projects, and the far end."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.lab import Box, Internet, Lab, engines

from .engine_side import WRITER, SystemEngine, engine_side

# Where pipx keeps its environments: that of Debian 12 is older.
PIPX = f"/home/dev/.local/{'' if engines.chosen().suite == 'bookworm' else 'share/'}pipx"
PYTHON = f"{PIPX}/venvs/corral/bin/python"
# Seconds for one command, which may have to build an image first; whatever is slow on a busy machine is no hang.
PATIENCE = 300
STARTS = "CORRAL_STARTS"
ENFORCER = "corral-enforcer.service"
SWEEP = "corral-sweep.service"
APPROVE = 'corral policy accept "$(corral policy hash)"'
CONFIG = 'permit_ranges = ["203.0.113.0/24"]\n'

BASE_POLICY = """\
profile: opencode
limits:
  best_effort: true
egress:
  profile_defaults: false
  allow:
    - allowed1.corral.example
    - allowed2.corral.example
"""
# Tests add names at its end, which is why the names come last.

# On a busy machine it goes on until it has sent what a count of 0 is worth something against.
FLOOD = """\
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
address, seconds = sys.argv[1], float(sys.argv[2])
sent, end = 0, time.monotonic() + seconds
while time.monotonic() < end or sent < 2000:
    try:
        s.sendto(b"flood", (address, 9))
    except OSError:
        pass
    sent += 1
print(sent)
"""
# For a program that somebody may end.
FLOOD_TOLD = FLOOD.replace("    sent += 1\n", "    sent += 1\n    sent % 50 or print(sent, flush=True)\n")

Done = subprocess.CompletedProcess[str]

# For what an engine of the user's own must do too; the boxes of one driver are for the tests about it.
EVERY_ENGINE = pytest.mark.engine(
    "trixie", "sid", "bookworm", "rootless", reason="the boxes of another driver are for the tests about it"
)
LIVE_RESTORE = pytest.mark.engine(
    "trixie",
    "sid",
    "bookworm",
    reason="containers of a rootless engine end with it: they are in its unit and in its namespaces (docs/rootless.md)",
)
# A program in the namespaces of the engine that the user runs.
OWN_NAMESPACES = "nsenter -U --preserve-credentials -n -m -t $(cat $XDG_RUNTIME_DIR/docker.pid) -- "


@dataclass
class Project:
    """A project directory in the box with a corral.yaml."""

    box: Box
    path: str
    started: list[subprocess.Popen[Any]] = field(default_factory=list)

    def policy(self, text: str, *, approve: bool = True) -> None:
        """Write the policy, and approve it as its user would; one that is invalid cannot be."""
        self.write("corral.yaml", text)
        if approve:
            self.box.run(["bash", "-c", APPROVE], cwd=self.path, check=False)

    def write(self, name: str, text: str) -> None:
        self.box.write(f"{self.path}/{name}", textwrap.dedent(text))

    def read(self, name: str) -> str:
        return self.box.read(f"{self.path}/{name}")

    def exists(self, name: str) -> bool:
        return self.box.run(["test", "-e", f"{self.path}/{name}"], check=False).returncode == 0

    def corral(self, *words: str, check: bool = True, timeout: float = PATIENCE, **options: Any) -> Done:
        return self.box.run(["corral", *words], cwd=self.path, check=check, timeout=timeout, **options)

    def inside(self, *argv: str, check: bool = True, timeout: float = PATIENCE, **options: Any) -> Done:
        """Run a program in a sandbox of this project and wait for its end."""
        return self.corral("run", "--", *argv, check=check, timeout=timeout, **options)

    def start(self, *argv: str, marker: str | None = None) -> subprocess.Popen[Any]:
        """Start a program in a sandbox and return once it has made the file ``marker`` in the project."""
        process = self.box.popen(
            ["corral", "run", "--", *argv],
            cwd=self.path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        if marker is not None:

            def there() -> bool:
                if process.poll() is not None:
                    raise AssertionError(f"ended early: {process.communicate()[0]}")
                return self.exists(marker)

            # The first start in a new box builds the image.
            self.box.wait_for(there, timeout=300)
        return process

    @property
    def sandbox(self) -> dict[str, Any]:
        """This project's row of ``corral status --json``."""
        rows = json.loads(self.corral("status", "--json").stdout)["sandboxes"]
        name = self.path.rpartition("/")[2]
        found = [row for row in rows if row["sandbox"].rpartition("-")[0] == name]
        assert found, rows
        return dict(found[0])

    def containers(self) -> list[str]:
        names = self.box.run(["docker", "ps", "-a", "--format", "{{.Names}}"]).stdout.split()
        name = self.path.rpartition("/")[2]
        return [found for found in names if found.startswith(f"corral-{name}-")]

    def end(self) -> None:
        for process in self.started:
            Box.kill(process)
        self.corral("down", check=False)
        self.box.run(["rm", "-rf", self.path], user="root")


@dataclass
class Host:
    """The box as a user's host."""

    box: Box
    internet: Internet
    projects: list[Project] = field(default_factory=list)

    def project(self, name: str, policy: str = BASE_POLICY) -> Project:
        made = Project(self.box, f"{self.box.home}/Projects/{name}")
        made.policy(policy)
        self.projects.append(made)
        return made

    @property
    def engine(self) -> SystemEngine:
        """Units, settings and network of the engine of this host."""
        return engine_side(self.box)

    def root(self, *argv: str, check: bool = True, **options: Any) -> Done:
        return self.box.run(argv, user="root", check=check, **options)

    def netadmin(self, *argv: str, check: bool = True, **options: Any) -> Done:
        """Run a program as root in the network where the engine's rules are: a rootless one has its own."""
        return self.root(*self.engine.entering(), *argv, check=check, **options)

    def netadmin_shell(self, script: str, check: bool = True, timeout: float = 60) -> Done:
        """Run a script with ``netadmin``. Files are the host's all the same."""
        return self.netadmin("bash", "-ec", script, check=check, timeout=timeout)

    def from_host(self, script: str, timeout: float = 60) -> Done:
        """Run a script as who is root in the engine's network, for rules that ask who sends."""
        if self.box.engine.rootless:
            return self.shell(f"{OWN_NAMESPACES} bash -ec {shlex.quote(script)}", timeout=timeout)
        return self.shell(script, user="root", timeout=timeout)

    def root_inside(self, container: str, *argv: str, timeout: float = 60) -> Done:
        """Run a program of the box as root, with every capability, in a container's network namespace.

        Docker 20.10 refuses `docker exec --privileged` where the container has no capability.
        """
        pid = self.box.run(["docker", "inspect", "-f", "{{.State.Pid}}", container]).stdout.strip()
        return self.root("nsenter", "-n", "-t", pid, *argv, timeout=timeout)

    def shell(self, script: str, user: str = "dev", check: bool = True, timeout: float = 60) -> Done:
        return self.box.run(["bash", "-ec", script], user=user, check=check, timeout=timeout)

    def user_systemctl(self, *words: str, check: bool = True) -> Done:
        return self.box.run(["systemctl", "--user", *words], check=check)

    def enforcer_pid(self) -> int:
        shown = self.user_systemctl("show", "-P", "MainPID", ENFORCER).stdout
        return int(shown)

    def journal(self, *words: str, since: float) -> str:
        """Return what the journal holds since a wall time."""
        return self.root("journalctl", "--no-pager", "-o", "cat", f"--since=@{since:.3f}", *words).stdout

    def writer_journal(self, since: float) -> str:
        """Return what the writer logged since a wall time."""
        return self.engine.journal(WRITER, since)

    def user_journal(self, since: float) -> str:
        """Return what the enforcer logged since a wall time."""
        words = ["journalctl", "--user", "-u", ENFORCER, "--no-pager", "-o", "cat", f"--since=@{since:.3f}"]
        return self.box.run(words).stdout

    def restart_docker(self) -> None:
        self.engine.restart()

    def wait_enforcer(self) -> None:
        def answers() -> bool:
            done = self.box.run(["corral", "status", "--json"], check=False)
            return done.returncode == 0 and not json.loads(done.stdout)["errors"]

        self.box.wait_for(answers, timeout=30)
        self.wait_sweep()

    def wait_sweep(self) -> None:
        """Return when what a start of the service sweeps is swept: no network goes from under a test then."""
        self.box.wait_for(
            lambda: self.user_systemctl("show", "-P", "ActiveState", SWEEP).stdout.strip() != "activating",
            timeout=60,
        )

    def plain(self, *argv: str, check: bool = True, timeout: float = 60, network: str = "bridge") -> Done:
        """Run a program in a container that is none of corral's, on Docker's own bridge: the positive control."""
        image = self.box.run(["docker", "images", "-q", "corral/*"]).stdout.split()[0]
        command = [
            "docker",
            "run",
            "--rm",
            "--network",
            network,
            "-u",
            "1000:1000",
            "--entrypoint",
            argv[0],
            image,
        ]
        return self.box.run([*command, *argv[1:]], check=check, timeout=timeout)

    def stray(self, address: str, seconds: str, network: str) -> int:
        """Flood from a container that corral did not start, on a network of its; return how many were sent.

        Where the engine's resolver would go on to ask for it, it is stopped meanwhile.
        """
        words = ("python3", "-c", FLOOD_TOLD, address, seconds)
        done = self.plain(*words, check=False, network=network)
        assert done.returncode in (0, 137, 143), done
        return int((done.stdout.split() or ["0"])[-1])

    def control(self, address: str) -> None:
        """The positive control of a count of 0: the same flood from a container that is not fenced arrives."""
        before = self.internet.packets(address, "udp")

        def arrives() -> bool:
            self.plain("python3", "-c", FLOOD, address, "0.2")
            return self.internet.packets(address, "udp") > before + 100

        until(arrives, 60, "what is not fenced arrives")

    @contextlib.contextmanager
    def engine_options(self, **options: object) -> Iterator[None]:
        """Docker with other options of its daemon.json for the length of a block; then all sandboxes have ended."""
        path = self.engine.daemon_json
        former = self.root("cat", path, check=False).stdout
        text = json.dumps({**json.loads(former or "{}"), **options})
        self.box.write(path, text, owner=self.engine.user)
        try:
            self.restart_docker()
            self.wait_enforcer()
            yield
        finally:
            self.end_projects()
            if former:
                self.box.write(path, former, owner=self.engine.user)
            else:
                self.root("rm", "-f", path)
            self.restart_docker()
            self.wait_enforcer()

    def end_projects(self) -> None:
        while self.projects:
            self.projects.pop().end()


def install(lab: Lab) -> Box:
    """Install corral in the lab's box as its user does, and return the box with the services running."""
    lab.install_corral()
    box = lab.box
    box.write(f"{box.home}/.config/corral/enforcer.toml", CONFIG)
    if box.engine.rules == "legacy":
        # What corral[legacy] brings; it is compiled in the box.
        box.run(["pipx", "inject", "corral", "python-iptables"], timeout=300)
    box.run(["corral", "install"], timeout=180)
    return box


@pytest.fixture(scope="session")
def installed(lab: Lab) -> Box:
    """The box with corral installed and its services running."""
    return install(lab)


@pytest.fixture
def host(installed: Box, internet: Internet) -> Iterator[Host]:
    made = Host(installed, internet)
    made.user_systemctl("start", ENFORCER)
    made.wait_enforcer()
    internet.end_stuck()
    internet.reset_counters()
    try:
        yield made
    finally:
        made.user_systemctl("start", ENFORCER, check=False)
        made.end_projects()


def starts(usually: int) -> int:
    """Return how often to start what floods from its first instruction; `make test-all` wants 100."""
    return int(os.environ.get(STARTS) or usually)


def until(condition: Callable[[], object], timeout: float, what: str) -> float:
    """Wait for a condition and return how many seconds it took."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > timeout:
            raise AssertionError(f"not within {timeout} s: {what}")
        time.sleep(0.02)
    return time.monotonic() - started
