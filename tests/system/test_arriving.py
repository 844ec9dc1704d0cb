"""Versions meet: an upgrade under a running sandbox, one that is cut off, and the way back."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import Lab

from .host import PYTHON, Done, Host, Project
from .releases import Releases

NEW = "9.2.0"

FLOOD = """\
import os, socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sent = 0
while not os.path.exists("enough"):
    try:
        s.sendto(b"flood", (sys.argv[1], 9))
    except OSError:
        pass
    sent += 1
    time.sleep(0.0005)
print(sent)
"""

STREAM = """\
import json, os, socket, ssl
context = ssl.create_default_context()
raw = socket.create_connection(("allowed1.corral.example", 443), timeout=10)
count, error = 0, None
with context.wrap_socket(raw, server_hostname="allowed1.corral.example") as s:
    s.settimeout(10)
    s.sendall(b"GET /stream?interval=0.1&count=6000 HTTP/1.0\\r\\nHost: allowed1.corral.example\\r\\n\\r\\n")
    open("streaming", "w").close()
    try:
        while not os.path.exists("enough"):
            if not s.recv(1):
                error = "the end"
                break
            count += 1
    except OSError as e:
        error = repr(e)
json.dump({"count": count, "error": error}, open("stream.json", "w"))
"""

# Where an installation is cut off by SIGKILL: code that runs in the program for root before its last line.
CUT = """
import os, pathlib
from corral.installer import common, root

def cut(*_):
    os.kill(os.getpid(), 9)

def when(test):
    def run(argv, stdin=None):
        if test(list(argv)):
            cut()
        return common.run(argv, stdin)
    whole = root.install
    root.install = lambda payload: whole(payload, None, run)
"""
POINTS = {
    "before the code is in place": """
whole = pathlib.Path.rename
pathlib.Path.rename = lambda self, to: cut() if str(to).startswith("/opt/corral/") else whole(self, to)
""",
    "between two units": """
whole = root.write_root_file
root.write_root_file = lambda path, text: cut() if path.name == "corral-netfilter.service" else whole(path, text)
""",
    "after the units": 'when(lambda argv: argv == ["systemctl", "daemon-reload"])',
    "with the writer stopped": 'when(lambda argv: argv[1:] == ["restart", "corral-skeleton.service"])',
    "before the old code is removed": """
whole = root.start_units
root.start_units = lambda run: (whole(run), cut())
""",
}

# The same on an engine of the user's own, in the program of the user: nothing of it is root's.
OWN_CUT = """
import os, pathlib, sys
from corral import cli, install, installrootless

def cut(*_):
    os.kill(os.getpid(), 9)
"""
OWN_POINTS = {
    "before the code is in place": """
whole = pathlib.Path.rename
pathlib.Path.rename = lambda self, to: cut() if "/corral/netfilter/" in str(to) else whole(self, to)
""",
    "between two units": """
whole = install.write_unit
install.write_unit = lambda path, text: cut() if path.name == "corral-netfilter.service" else whole(path, text)
""",
    "after the units": """
whole = install.systemctl
install.systemctl = lambda environ, *words: cut() if words == ("daemon-reload",) else whole(environ, *words)
""",
    "with the writer stopped": """
def stopped(environ, *_):
    install.systemctl(environ, "stop", "corral-netfilter.service")
    cut()
install.start_units = stopped
""",
    "before the old code is removed": "installrootless.forget_others = cut",
}
OWN_RUN = """
sys.argv = ["corral", "install"]
sys.exit(cli.main())
"""


@pytest.fixture
def releases(lab: Lab, tmp_path: Path) -> Releases:
    return Releases(lab, tmp_path)


@pytest.fixture
def old(releases: Releases, host: Host) -> Iterator[str]:
    """The wheel of this tree, which is installed before and after the test."""
    wheel = releases.put(None)
    with releases.restored(wheel):
        yield wheel
        host.end_projects()


def busy(host: Host, name: str) -> Project:
    """A sandbox that streams from an allowed name and floods a forbidden address, until told to end."""
    project = host.project(name)
    project.write("flood.py", FLOOD)
    project.write("stream.py", STREAM)
    project.corral("build", timeout=600)
    forbidden = host.internet.addresses["forbidden"]
    project.start(
        "sh", "-c", f"python3 stream.py & python3 flood.py {forbidden} > flooded; wait", marker="streaming"
    )
    return project


def assert_nothing_happened_to(project: Project, host: Host) -> None:
    """The stream is whole, the flood was sent, and none of it arrived."""
    project.write("enough", "")
    project.started[0].wait(timeout=60)
    stream = json.loads(project.read("stream.json"))
    assert stream["error"] is None, stream
    assert stream["count"] > 100
    assert int(project.read("flooded")) > 1000
    assert host.internet.packets(host.internet.addresses["forbidden"]) == 0


def refused(done: Done, *words: str) -> None:
    assert done.returncode == 1, done
    for word in words:
        assert word in done.stderr


def code(host: Host) -> list[str]:
    """The directories of the writer's code."""
    place = f"{host.box.home}/.local/share/corral/netfilter" if host.box.engine.rootless else "/opt/corral"
    return host.root("ls", place).stdout.split()


def units(host: Host) -> str:
    """The units that run it."""
    own = "~/.config/systemd/user/corral-* ~/.config/systemd/user/docker.service.d/corral.conf"
    return host.shell(f"cat {own if host.box.engine.rootless else '/etc/systemd/system/corral-*'}").stdout


def host_part(host: Host) -> str:
    rules = host.netadmin_shell("iptables -S; nft list table inet corral | grep -v counter").stdout
    return "\n".join([*code(host), units(host), rules])


def cut_off(host: Host, where: str) -> Done:
    """Install, and have what installs end itself there."""
    if host.box.engine.rootless:
        program = OWN_CUT + OWN_POINTS[where] + OWN_RUN
        return host.box.run([PYTHON, "-c", program], check=False, timeout=180)
    text = host.box.run(
        [PYTHON, "-c", "from corral.install import root_program as p; print(p(1000)[0])"]
    ).stdout
    head, mark, tail = text.rpartition("\nsys.exit(")
    program = head + CUT + POINTS[where] + mark + tail
    return host.root("/usr/bin/python3", "-I", "-", input=program, check=False)


def version_of_writer(host: Host) -> str:
    return str(
        json.loads(host.box.run(["corral", "version", "--json"]).stdout)["enforcer"]["writer"]["version"]
    )


@pytest.mark.fault("upgrade")
def test_an_upgrade_under_a_running_sandbox_opens_nothing_and_loses_no_stream(
    host: Host, releases: Releases, old: str
) -> None:
    project = busy(host, "upgrade")
    before = host_part(host)
    (old_directory,) = code(host)
    releases.use(releases.put(NEW))

    # The program is new, the services are not: nothing is done that only looks like enforced.
    for words in (["status"], ["run", "--", "true"], ["verify"]):
        refused(project.corral(*words, check=False), NEW, "0.1.0", "run: corral install")
    assert host_part(host) == before

    said = host.box.run(["corral", "install"], timeout=180).stdout
    assert ("user part: done" in said) is not host.box.engine.rootless
    (directory,) = code(host)
    assert directory.startswith(NEW)
    assert directory in units(host)
    assert old_directory not in units(host)
    assert "--hashlimit-upto 21/sec" in host.netadmin("iptables", "-S", "CORRAL-DENY").stdout
    assert version_of_writer(host) == NEW
    host.wait_enforcer()
    host.box.wait_for(lambda: project.sandbox["sessions"][0]["state"] == "running", timeout=20)
    # The policy counts, not the checker: the image is of the new version, and is built by this.
    done = project.corral("verify", check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_nothing_happened_to(project, host)
    host.control(host.internet.addresses["forbidden"])


@pytest.mark.fault("upgrade cut off")
def test_an_upgrade_that_is_killed_anywhere_opens_nothing_and_the_next_one_ends_it(
    host: Host, releases: Releases, old: str
) -> None:
    project = busy(host, "cutoff")
    releases.use(releases.put(NEW))
    for where in POINTS:
        done = cut_off(host, where)
        assert done.returncode in (-9, 137), (where, done)
        assert "CORRAL-OUT" in host.netadmin("iptables", "-S", "DOCKER-USER").stdout, where
        assert host.internet.packets(host.internet.addresses["forbidden"]) == 0, where
        assert project.started[0].poll() is None, where
    host.box.run(["corral", "install"], timeout=180)
    (directory,) = code(host)
    assert directory.startswith(NEW)
    assert directory in units(host)
    if not host.box.engine.rootless:
        listed = host.root("sh", "-c", "ls /etc/systemd/system | grep corral").stdout.split()
        assert listed == ["corral-netfilter.service", "corral-netfilter.socket", "corral-skeleton.service"]
    host.wait_enforcer()
    assert version_of_writer(host) == NEW
    assert_nothing_happened_to(project, host)
    host.control(host.internet.addresses["forbidden"])


def test_going_back_is_refused_without_loss_and_possible_on_purpose(
    host: Host, releases: Releases, old: str
) -> None:
    releases.use(releases.put(NEW))
    host.box.run(["corral", "install"], timeout=180)
    project = busy(host, "goingback")
    data = f"{host.box.home}/.local/share/corral"
    before, state = (
        host_part(host),
        host.shell(f"cd {data}; find . -name '*.new' -o -print | sort; cat schema.json").stdout,
    )
    started = time.time()

    releases.use(old)
    refused(host.box.run(["corral", "install"], check=False), "0.1.0", NEW, "corral uninstall")
    for words in (["status"], ["run", "--", "true"]):
        refused(project.corral(*words, check=False), "0.1.0", NEW)
    # What asks no service is stopped by the state it would write to.
    refused(project.corral("build", check=False), "state schema 2", "0.1.0", NEW)
    refused(project.corral("down", check=False), "state schema 2")
    # An enforcer of the old version does not touch that state either, and is not started for ever.
    host.user_systemctl("restart", "corral-enforcer", check=False)
    host.box.wait_for(
        lambda: host.user_systemctl("is-failed", "corral-enforcer", check=False).stdout.strip() == "failed"
    )
    assert "state schema 2" in host.user_journal(started)
    assert host_part(host) == before
    assert host.shell(f"cd {data}; find . -name '*.new' -o -print | sort; cat schema.json").stdout == state
    assert_nothing_happened_to(project, host)

    # On purpose, with what is at hand: the old program removes the new system part.
    done = host.box.run(["corral", "uninstall", "--yes", "--force"], timeout=180)
    assert "state; --purge removes it" in done.stdout
    refused(host.box.run(["corral", "uninstall", "--yes", "--purge"], check=False), "state schema 2")
    refused(host.box.run(["corral", "install"], check=False), "state schema 2", f"mv {data}")
    host.shell(f"mv {data} {data}.kept")
    host.box.run(["corral", "install"], timeout=180)
    assert version_of_writer(host) == "0.1.0"
    host.wait_enforcer()
    host.shell(f"rm -rf {data}; mv {data}.kept {data}")
