"""Where the engine of a host lives: whose units it and the writer are, and in which network their rules stand.

The system's engine is root's, in the host's own network. A rootless one is its user's: its units are those of the
user's service manager, and its network is a namespace that each start of it makes anew.
"""

from __future__ import annotations

import json
import subprocess

from tests.lab import Box

Done = subprocess.CompletedProcess[str]

ENGINE = "docker.service"
WRITER = "corral-netfilter.service"
# The first goes with rootlesskit: what it makes of the host is below the second.
OWN_PID = "/run/user/1000/docker.pid"


class SystemEngine:
    """The engine that root runs."""

    user = "root"
    daemon_json = "/etc/docker/daemon.json"
    agent = "1000:1000"
    """Who an agent is in its container: a rootless engine maps its uid 0 to the user."""
    containers = "/var/lib/docker/containers"
    writer_units: tuple[str, ...] = ("corral-netfilter.socket", WRITER)
    """What has to be stopped for the writer to stay away."""
    engine_units: tuple[str, ...] = ("docker.socket", ENGINE)
    loader = "corral-skeleton.service"
    """What makes the rules where they stand already. A rootless engine's are made with its network, and then mended."""
    state = "/run/corral-netfilter"
    """A directory that the writer can write to."""

    def __init__(self, box: Box) -> None:
        self.box = box

    def entering(self) -> tuple[str, ...]:
        """Words before a command of root's that make it run in the engine's network."""
        return ()

    def systemctl(self, *words: str, check: bool = True, timeout: float = 120) -> Done:
        """Ask the service manager that has the units of engine and writer."""
        return self.box.run(["systemctl", *words], user=self.user, check=check, timeout=timeout)

    def journal(self, unit: str, since: float) -> str:
        """Return what a unit of the engine's side logged since a wall time."""
        words = ["journalctl", *self._journal_of(unit), "--no-pager", "-o", "cat", f"--since=@{since:.3f}"]
        return self.box.run(words, user=self.user).stdout

    def _journal_of(self, unit: str) -> tuple[str, ...]:
        return "-u", unit

    def pid(self) -> int:
        """The engine's own process, 0 while there is none."""
        return self.main_pid(ENGINE)

    def writer_pid(self) -> int:
        """The writer's process, 0 while there is none."""
        return self.main_pid(WRITER)

    def main_pid(self, unit: str) -> int:
        return int(self.systemctl("show", "-P", "MainPID", unit).stdout)

    def network(self) -> str:
        """What tells the engine's network from the one it had before; nothing while it has none."""
        return "the host's"

    def guarded(self) -> bool:
        """Whether the rules were loaded before the engine began."""
        ends = self.systemctl("show", "-P", "ExecMainExitTimestampMonotonic", self.loader).stdout
        begins = self.systemctl("show", "-P", "ExecMainStartTimestampMonotonic", ENGINE).stdout
        return 0 < int(ends) < int(begins)

    def address(self) -> str:
        """An address of the engine's network that every container without a fence reaches."""
        return self.box.address

    def restart(self) -> None:
        """Restart it and return once it answers."""
        # However often: tests are not what systemd's limit is there for.
        self.systemctl("reset-failed", *self.engine_units, check=False)
        self.systemctl("restart", ENGINE)
        self.await_up()

    def kill(self) -> None:
        """SIGKILL for the engine's process; what systemd does then is not awaited."""
        self.box.run(["kill", "-9", str(self.pid())], user="root")

    def await_up(self, other_than: str = "") -> None:
        """Wait until it answers; ``other_than`` is a ``network`` that is to be gone by then."""
        self.box.wait_for(["docker", "version"], timeout=60)


class OwnEngine(SystemEngine):
    """The engine that the box's user runs, without root."""

    user = "dev"
    daemon_json = "/home/dev/.config/docker/daemon.json"
    agent = "0:0"
    containers = "/home/dev/.local/share/docker/containers"
    writer_units = (WRITER,)
    engine_units = (ENGINE,)
    loader = WRITER
    state = "/run/user/1000/corral"

    def entering(self) -> tuple[str, ...]:
        pid = self.pid()
        assert pid, "there is no engine, and so there is no network of its own"
        return "nsenter", "-n", "-t", str(pid)

    def systemctl(self, *words: str, check: bool = True, timeout: float = 120) -> Done:
        return self.box.run(["systemctl", "--user", *words], check=check, timeout=timeout)

    def _journal_of(self, unit: str) -> tuple[str, ...]:
        return "--user", "-u", unit

    def pid(self) -> int:
        # The unit's main process is rootlesskit's. A note may be left of one that has ended.
        noted = self.box.run(["cat", OWN_PID], check=False).stdout.strip()
        comm = self.box.run(["cat", f"/proc/{noted}/comm"], check=False).stdout.strip() if noted else ""
        return int(noted) if comm == "dockerd" else 0

    def network(self) -> str:
        pid = self.pid()
        return self.box.run(["readlink", f"/proc/{pid}/ns/net"], check=False).stdout.strip() if pid else ""

    def guarded(self) -> bool:
        # Its process became dockerd after it had loaded the rules in its network, and noted so.
        noted = json.loads(self.box.read(f"{self.state}/engine.json"))
        return (noted["pid"], f"net:[{noted['netns']}]") == (self.pid(), self.network())

    def address(self) -> str:
        words = [*self.entering(), "ip", "-j", "-4", "address", "show", "docker0"]
        shown = json.loads(self.box.run(words, user="root").stdout)
        return str(shown[0]["addr_info"][0]["local"])

    def restart(self) -> None:
        before = self.network()
        self.systemctl("reset-failed", *self.engine_units, check=False)
        self.systemctl("restart", ENGINE)
        self.await_up(other_than=before)

    def await_up(self, other_than: str = "") -> None:
        # For a moment after its end systemd calls the old one active, and its note is still there.
        def answers() -> bool:
            there = self.network()
            if not there or there == other_than:
                return False
            return self.box.run(["docker", "version"], check=False).returncode == 0

        self.box.wait_for(answers, timeout=60)


def engine_side(box: Box) -> SystemEngine:
    return OwnEngine(box) if box.engine.rootless else SystemEngine(box)


def engine_socket(box: Box) -> str:
    """The socket that docker would use."""
    shown = box.run(["docker", "context", "inspect", "-f", "{{.Endpoints.docker.Host}}"]).stdout
    return shown.strip().removeprefix("unix://")
