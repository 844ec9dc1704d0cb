"""A sandbox's proxy on a real engine: what goes through it, what does not, and when it is there."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import time
from collections.abc import Iterator

import pytest

from .host import BASE_POLICY, ENFORCER, EVERY_ENGINE, Host, Project, until

ZONE = "life.corral.example"
ALLOWED, SECOND, OUTSIDE = f"a.{ZONE}", f"b.{ZONE}", "forbidden.corral.example"
ADDRESS, OTHER = "203.0.113.81", "203.0.113.82"
POLICY = BASE_POLICY + f'    - "*.{ZONE}"\n'
CURL = ("curl", "-sk", "--max-time", "20", "-o", "/dev/null")
CODES = "%{http_code} %{http_connect}"
WAITS = "touch up; while [ ! -e end ]; do sleep 0.1; done"
STREAM = f"touch up; curl -skN --max-time 300 'https://{ALLOWED}/stream?interval=0.1&count=2000' >got; echo $? >code"

pytestmark = EVERY_ENGINE


@pytest.fixture
def project(host: Host) -> Iterator[Project]:
    host.internet.set_name(ALLOWED, [ADDRESS])
    host.internet.set_name(SECOND, [OTHER])
    made = host.project("proxied", POLICY)
    # The first start in a new box builds the image.
    made.corral("build", timeout=400)
    try:
        yield made
    finally:
        host.internet.reset_names()


def proxies(project: Project) -> list[str]:
    return [name for name in project.containers() if "-proxy-" in name]


def fetch(project: Project, name: str, *words: str) -> tuple[str, str]:
    """What a session's curl says: the server's code, and the proxy's."""
    done = project.inside(*CURL, "-w", CODES, *words, f"https://{name}/", check=False)
    code, connect = done.stdout.split()[-2:]
    return code, connect


def nothing_is_left(host: Host, project: Project) -> None:
    assert project.containers() == []
    units = host.user_systemctl("list-units", "--all", "--plain", "--no-legend", "corral-relay-*").stdout
    assert "8443" not in units
    left = host.shell("ls -d ~/.local/share/corral/proxied-*/sessions/* 2>/dev/null || true").stdout
    assert left == ""


@pytest.mark.representative
def test_a_name_of_a_zone_is_reached_through_the_proxy_and_nothing_else_is(
    host: Host, project: Project
) -> None:
    assert fetch(project, ALLOWED) == ("200", "200")
    assert host.internet.packets(ADDRESS, "tcp", 443) > 0
    # What is pinned needs no proxy.
    assert fetch(project, "allowed1.corral.example") == ("200", "000")
    # A name that is not in the policy: refused before anybody is asked for it.
    mark, address = host.internet.mark(), host.internet.addresses["forbidden"]
    host.internet.reset_counters()
    assert fetch(project, OUTSIDE) == ("000", "403")
    assert host.internet.packets(address) == 0
    assert host.internet.queries(mark, OUTSIDE) == []
    host.control(address)
    # Past the proxy there is nothing, neither names nor the address that it was opened itself.
    assert project.inside("getent", "hosts", ALLOWED, check=False).returncode == 2
    host.internet.reset_counters()
    assert fetch(project, ALLOWED, "--noproxy", "*", "--resolve", f"{ALLOWED}:443:{ADDRESS}")[0] == "000"
    assert host.internet.packets(ADDRESS) == 0
    assert fetch(project, ALLOWED) == ("200", "200")
    assert host.internet.packets(ADDRESS, "tcp", 443) > 0
    nothing_is_left(host, project)


def test_sessions_share_one_proxy_that_goes_with_the_last(host: Host, project: Project) -> None:
    first = project.start("sh", "-c", WAITS, marker="up")
    (proxy,) = proxies(project)
    ident = project.box.run(["docker", "inspect", "-f", "{{.Id}}", proxy]).stdout
    assert fetch(project, ALLOWED) == ("200", "200")
    # It is what would be made now, and known as that.
    assert "stays what it was" not in project.corral("-v", "run", "--", "true").stderr
    assert project.box.run(["docker", "inspect", "-f", "{{.Id}}", proxy]).stdout == ident
    told = project.corral("status").stdout
    assert f"*.{ZONE}: port 443 through the proxy" in told and "  proxy  " in told
    assert "PROBLEM" not in told
    listed = json.loads(project.corral("ps", "--here", "--json").stdout)["sessions"]
    assert [one["service"] for one in listed] == ["main"]
    # It has noted what it was asked for.
    log = project.corral("logs", "--proxy").stdout
    assert "listening" in log and ALLOWED in log
    project.write("end", "")
    assert first.wait(60) == 0
    nothing_is_left(host, project)


def test_down_leaves_nothing_of_it(host: Host, project: Project) -> None:
    project.start("sh", "-c", WAITS, marker="up")
    assert len(proxies(project)) == 1
    project.corral("down")
    until(lambda: not project.containers(), 30, "its containers are gone")
    nothing_is_left(host, project)


@pytest.mark.fault("kill -9 of corral run")
def test_a_killed_command_line_leaves_nothing_once_its_session_has_ended(
    host: Host, project: Project
) -> None:
    process = project.start("sh", "-c", WAITS, marker="up")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
    # It goes on, and so does its proxy.
    assert len(project.containers()) == 2
    (main,) = [name for name in project.containers() if "-main-" in name]
    assert (
        "200" in project.box.run(["docker", "exec", main, *CURL, "-w", CODES, f"https://{ALLOWED}/"]).stdout
    )
    project.write("end", "")
    until(lambda: not project.containers(), 60, "the service has removed both")
    project.corral("prune")
    nothing_is_left(host, project)


def test_a_stream_outlives_a_restart_of_the_service(host: Host, project: Project) -> None:
    process = project.start("sh", "-c", STREAM, marker="up")
    size = "stat -c %s got 2>/dev/null || echo 0"

    def got() -> int:
        return int(project.box.run(["bash", "-c", size], cwd=project.path).stdout)

    until(lambda: got() > 0, 30, "the stream has begun")
    host.user_systemctl("restart", ENFORCER)
    host.wait_enforcer()
    before = got()
    until(lambda: got() > before, 20, "the stream goes on")
    assert not project.exists("code")
    # New ones are let in, too.
    assert fetch(project, SECOND) == ("200", "200")
    assert not project.exists("code")
    project.corral("down")
    process.wait(60)


@pytest.mark.fault("kill -9 of a sandbox's proxy")
def test_a_killed_proxy_is_told_and_comes_back(host: Host, project: Project) -> None:
    project.start("sh", "-c", WAITS, marker="up")
    (proxy,) = proxies(project)
    (main,) = [name for name in project.containers() if "-main-" in name]
    again = ["docker", "exec", main, *CURL, "-w", CODES, f"https://{ALLOWED}/"]

    def works() -> bool:
        return project.box.run(again, check=False).stdout.split() == ["200", "200"]

    assert works()
    # While somebody holds its lock, nobody starts it again, so that it can be looked at.
    held = "flock ~/.local/share/corral/proxied-*/proxy.lock sh -c 'touch locked; while [ ! -e free ]; do sleep 0.1; done'"
    holder = project.box.popen(["bash", "-c", held], cwd=project.path)
    project.started.append(holder)
    until(lambda: project.exists("locked"), 30, "its lock is held")
    project.box.run(["docker", "kill", proxy])
    assert not works()
    until(lambda: "does not run" in told(project), 20, "status says so")
    project.write("free", "")
    # The service starts it again for the session that is there.
    until(works, 60, "it came back by itself")
    assert "PROBLEM" not in told(project)
    # So does the next start, when the service does not.
    host.user_systemctl("stop", ENFORCER)
    project.box.run(["docker", "rm", "-f", proxy])
    host.user_systemctl("start", ENFORCER)
    host.wait_enforcer()
    assert fetch(project, ALLOWED) == ("200", "200")
    until(works, 30, "the session that was there before has it again")
    assert len(proxies(project)) == 1


def told(project: Project) -> str:
    return project.corral("status").stdout


def test_a_start_stays_fast(host: Host, project: Project) -> None:
    """Not asserted but for its order of size: printed."""

    def took(times: int = 5) -> float:
        found = []
        for _ in range(times):
            began = time.monotonic()
            project.inside("true")
            found.append(time.monotonic() - began)
        return statistics.median(found)

    proxied = took()
    project.policy(BASE_POLICY)
    plain = took()
    print(f"corral run -- true: {plain:.2f} s without a proxy, {proxied:.2f} s with one")
    assert proxied < plain + 10


def test_what_it_says_of_a_refused_name_is_one_line(host: Host, project: Project) -> None:
    script = (
        f"curl -sk --max-time 20 -x http://proxy:8443 https://{OUTSIDE}/ -v 2>&1 | grep -i '403' | head -1"
    )
    assert re.search("403", project.inside("sh", "-c", script).stdout)
