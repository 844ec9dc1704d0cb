"""kill -9 of anything, at any moment, while a sandbox sends what it must not."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from tests.lab import Box

from .host import ENFORCER, LIVE_RESTORE, Host, Project, until

ALLOWED, URL = "allowed1.corral.example", "https://allowed1.corral.example/"
# The second address has no server; what is allowed has to work as long as the first is among the answers.
ANSWERS = (
    ["203.0.113.10"],
    ["203.0.113.10", "203.0.113.40"],
    ["203.0.113.10", "203.0.113.41", "203.0.113.42"],
)
VICTIMS = ("enforcer", "writer", "dockerd", "cli")
WEIGHTS = (5, 4, 1, 2)

# Some 2,000 datagrams a second; says now and then how many it has sent.
SENDER = """\
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sent = 0
while True:
    for _ in range(20):
        try:
            s.sendto(b"flood", (sys.argv[1], 9))
        except OSError:
            pass
    sent += 20
    if sent % 400 == 0:
        with open("sent", "w") as file:
            file.write(str(sent))
    time.sleep(0.01)
"""


class Flooder:
    """A session that floods ``target``; another one takes its place when Docker took it down."""

    def __init__(self, host: Host, target: str) -> None:
        self.host = host
        self.target = target
        self.project: Project = host.project("flooder")
        self.project.write("send.py", SENDER)
        self.sessions = 0
        self.before = 0
        self.process: subprocess.Popen[Any] | None = None

    @property
    def sent(self) -> int:
        return self.before + self._shown()

    def _shown(self) -> int:
        text = self.host.box.run(["cat", f"{self.project.path}/sent"], check=False).stdout
        return int(text) if text.isdigit() else 0

    def keep_going(self) -> None:
        """Start a session when none sends, and return once one does."""
        if self.process is not None and self.process.poll() is not None:
            self.before += self._shown()
            self.process = None
        if self.process is None:
            self.sessions += 1
            self.host.box.run(["rm", "-f", f"{self.project.path}/sent"])
            self.process = self.project.start("python3", "send.py", self.target, marker="sent")
        seen = self.sent
        until(lambda: self.sent > seen or self._ended(), 30, "the sandbox sends")

    def _ended(self) -> bool:
        return self.process is None or self.process.poll() is not None


def pid_of(host: Host, victim: str) -> int:
    """Return the main process of a service, 0 while it has none."""
    if victim == "enforcer":
        return host.enforcer_pid()
    return host.engine.writer_pid() if victim == "writer" else host.engine.pid()


def kill(host: Host, victim: str, starting: subprocess.Popen[Any] | None) -> bool:
    """Send SIGKILL; False when there was nothing to kill."""
    if victim == "cli":
        if starting is None or starting.poll() is not None:
            return False
        with suppress(ProcessLookupError):
            os.killpg(starting.pid, signal.SIGKILL)
        return True
    pid = pid_of(host, victim)
    return pid != 0 and host.root("kill", "-9", str(pid), check=False).returncode == 0


def recovered(host: Host) -> None:
    """Return once everything answers again."""
    # Otherwise systemd waits longer before each further start, and gives Docker up after the third in a minute.
    host.user_systemctl("reset-failed", ENFORCER, check=False)
    host.engine.systemctl("reset-failed", *host.engine.engine_units, check=False)
    if pid_of(host, "dockerd") == 0:
        host.engine.systemctl("start", "docker", check=False)
    host.engine.await_up()
    for victim in ("enforcer", "writer"):
        until(lambda victim=victim: pid_of(host, victim) != 0, 60, f"the {victim} runs")  # type: ignore[misc]
    host.wait_enforcer()


def one_round(host: Host, rng: random.Random, starter: Project) -> str | None:
    """Kill one process somewhere in a bring-up or in a refresh; return which, None when it was not there."""
    victim = rng.choices(VICTIMS, WEIGHTS)[0]
    refresh = victim != "cli" and rng.random() < 0.4
    starting = None
    try:
        if refresh:
            # A service that starts asks for everything anew, and hears something else.
            host.internet.set_name(ALLOWED, rng.choice(ANSWERS), ttl=1)
            host.box.flush_dns()
            kill(host, "enforcer", None)
        else:
            starting = host.box.popen(
                ["corral", "run", "--", "true"],
                cwd=starter.path,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        time.sleep(rng.uniform(0, 1.5))
        return victim if kill(host, victim, starting) else None
    finally:
        if starting is not None:
            with suppress(subprocess.TimeoutExpired):
                starting.wait(timeout=30)
            Box.kill(starting)


def converged(host: Host, starter: Project) -> None:
    """The next start works, and every element belongs to a session that is there."""
    assert "203.0.113.10" in starter.inside("curl", "-sS", "-m", "10", URL).stdout
    rows = json.loads(starter.corral("status", "--json").stdout)["sandboxes"]
    known = {session["address"] for row in rows for session in row["sessions"]}

    def strays() -> set[str]:
        listed = host.netadmin("ipset", "list", "corral-pins").stdout.splitlines()
        return {line.partition(",")[0] for line in listed if ",tcp:" in line} - known

    until(lambda: not strays(), 70, "no element is left of a session that is gone")


def play(host: Host, kills: int, seed: int) -> Counter[str]:
    """Kill so many times; nothing may have arrived at the far end, ever."""
    print(f"{kills} kills, seed {seed}")
    rng, count = random.Random(seed), Counter[str]()
    forbidden = host.internet.addresses["forbidden"]
    starter = host.project("starter")
    starter.inside("true")
    flooder = Flooder(host, forbidden)
    host.internet.reset_counters()
    try:
        while count.total() < kills:
            flooder.keep_going()
            victim = one_round(host, rng, starter)
            assert host.internet.packets(forbidden) == 0, f"{victim}, after {count}"
            recovered(host)
            if victim is not None:
                count[victim] += 1
                if count.total() % 10 == 0:
                    converged(host, starter)
                    print(f"killed {dict(count)}", flush=True)
        flooder.keep_going()
        print(f"killed {dict(count)}; {flooder.sessions} sessions sent {flooder.sent} datagrams")
        assert flooder.sent > 200 * kills
        assert host.internet.packets(forbidden) == 0, host.internet.all_packets()
        host.control(forbidden)
    finally:
        host.internet.reset_names()
    return count


def chosen() -> int:
    """Return CORRAL_KILLS_SEED, or a new one."""
    return int(os.environ.get("CORRAL_KILLS_SEED") or random.SystemRandom().getrandbits(32))


@pytest.mark.representative
@pytest.mark.fault("kill -9 at random")
def test_twenty_random_kills_let_nothing_out(host: Host) -> None:
    play(host, 20, chosen())


@pytest.mark.fault("kill -9 at random")
def test_a_hundred_random_kills_let_nothing_out(host: Host) -> None:
    count = play(host, 100, chosen())
    assert set(count) == set(VICTIMS)


@LIVE_RESTORE
@pytest.mark.fault("kill -9 at random, live-restore")
def test_a_hundred_random_kills_with_live_restore_let_nothing_out(host: Host) -> None:
    with host.engine_options(**{"live-restore": True}):
        count = play(host, 100, chosen())
    assert set(count) == set(VICTIMS)
