"""Fault table: the disk fills up under a session that runs, and there is no room to build an image."""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections.abc import Iterator

import pytest

from .host import BASE_POLICY, ENFORCER, Host, Project, until
from .scriptdns import always, script_dns
from .test_cases_names import held, policy

NAME, COPIED = "full.disk.corral.example", "copied.disk.corral.example"
OLD, NEW = "203.0.113.190", "203.0.113.191"
FIRST, LATER = "203.0.113.192", "203.0.113.193"
STATE = "/home/dev/.local/share/corral"
PINS = f"{STATE}/enforcer/pins.json"


def fill(host: Host, directory: str) -> str:
    """Fill a file system, to its last byte; return the file that has to go for room."""
    filler = f"{directory}/filler"
    # What one large write leaves, small ones take.
    host.shell(
        f"cat /dev/zero >{filler} 2>/dev/null || true; "
        f"test $(stat -f -c %a {directory}) = 0; ! sh -c 'echo more >{directory}/more' 2>/dev/null",
        user="root",
    )
    return filler


@pytest.fixture
def small(host: Host) -> Iterator[str]:
    """All state of corral, of the service and of sandboxes, is on a small file system of its own."""
    host.user_systemctl("stop", ENFORCER)
    host.shell(
        f"mv {STATE} {STATE}.away; mkdir -m 700 {STATE}; "
        # More than a build asks for.
        f"mount -t tmpfs -o size=160m,mode=700,uid=1000,gid=1000 small {STATE}; "
        f"cp -p {STATE}.away/state.json {STATE}/ 2>/dev/null || true; chown -h dev: {STATE}",
        user="root",
    )
    try:
        host.user_systemctl("start", ENFORCER)
        host.wait_enforcer()
        yield STATE
    finally:
        host.end_projects()
        host.user_systemctl("stop", ENFORCER)
        host.shell(f"umount -l {STATE}; rmdir {STATE}; mv {STATE}.away {STATE}", user="root")
        host.user_systemctl("start", ENFORCER)
        host.wait_enforcer()


def start(host: Host, project: Project, name: str) -> None:
    """Start a session with an open stream from a name: it grows, and ``cut`` is written when it breaks."""
    stream = (
        f"curl -sSN --speed-limit 1 --speed-time 5 'https://{name}/stream?interval=0.2&count=100000' >stream"
    )
    script = f"({stream}; echo $? >cut) & until [ -s stream ]; do sleep 0.1; done; touch up; sleep 600"
    project.start("sh", "-c", script, marker="up")


def goes_on(host: Host, project: Project) -> None:
    """The stream of ``start`` was not cut, and more of it arrives."""
    before = len(project.read("stream"))
    until(lambda: len(project.read("stream")) > before, 20, "the open connection goes on")
    assert not project.exists("cut")


def inside(host: Host, project: Project, *argv: str) -> str:
    """Run a program in the running container as its agent, without anything of corral's."""
    (container,) = project.containers()
    return host.box.run(["docker", "exec", "-u", host.engine.agent, container, *argv], timeout=60).stdout


def says(hosts: str, name: str) -> set[str]:
    """Return the addresses of a name in a hosts file, each line of which must be whole."""
    assert hosts.endswith("\n") and {len(line) for line in hosts.splitlines()} == {63}, hosts
    lines = [line.split() for line in hosts.splitlines()]
    return {line[0] for line in lines if len(line) == 2 and line[1] == name and line[0] != "#"}


def asked(project: Project, name: str) -> str:
    """Have the service ask for a name now; what it finds is in the kernel then, as far as can be."""
    return project.corral("refresh", name, check=False, timeout=60).stdout


@pytest.mark.fault("disk full under a session")
def test_a_disk_that_fills_up_under_a_session_keeps_what_was_last_good_and_says_so(
    host: Host, small: str
) -> None:
    with script_dns(host) as dns:
        dns.play({NAME: always(OLD)})
        project = host.project("disk-fills", policy(NAME))
        start(host, project, NAME)
        until(lambda: OLD in host.box.read(PINS), 30, "the first answer is saved")
        assert says(inside(host, project, "cat", "/etc/hosts"), NAME) == {OLD}
        filler = fill(host, small)
        good, since = host.box.read(PINS), time.time()
        dns.play({NAME: always(NEW)})
        assert f"+{NEW}" in asked(project, NAME)
        told = host.user_journal(since)
        assert "pins cannot be saved: [Errno 28] No space left on device" in told, told
        # The file of before, not half of one; the old address is allowed as long as it was.
        assert host.box.read(PINS) == good
        assert held(host, project) == {(OLD, 443), (NEW, 443)}
        # Written in place, for which no room is needed.
        assert says(inside(host, project, "cat", "/etc/hosts"), NAME) == {NEW}
        assert f'"{NEW}"' in inside(host, project, "curl", "-sS", "-m", "10", f"https://{NAME}/")
        goes_on(host, project)
        # A service that has to begin anew on the full disk has what was saved last.
        host.user_systemctl("kill", "-s", "KILL", ENFORCER)
        host.wait_enforcer()
        assert "pins are not used" not in host.user_journal(since)
        until(lambda: (OLD, 443) in held(host, project), 20, "the kernel has kept what stands")
        goes_on(host, project)
        # A start has no room, leaves nothing, and cuts nobody.
        done = project.corral("run", "--", "touch", "ran", check=False)
        assert (done.returncode, "No space left on device" in done.stderr) == (1, True), done.stderr
        assert not project.exists("ran") and len(project.containers()) == 1
        goes_on(host, project)
        host.root("rm", filler)
        asked(project, NAME)
        until(lambda: NEW in host.box.read(PINS), 90, "with room, the new answer is saved")
        json.loads(host.box.read(PINS))
        until(
            lambda: says(inside(host, project, "cat", "/etc/hosts"), NAME) == {NEW},
            30,
            "the new answer stands",
        )
        project.corral("run", "--", "touch", "ran")
        assert project.exists("ran")
        goes_on(host, project)


@contextlib.contextmanager
def copy_on_write(host: Host, directory: str) -> Iterator[str]:
    """A directory is on a file system that writes nothing in place; yield where its room is."""
    room = "/mnt/corral-small"
    host.shell(
        f"mkdir -p {room}; mount -t tmpfs -o size=256k small {room}; mkdir {room}/upper {room}/work; "
        f"chown dev: {room}/upper; "
        f"mount -t overlay -o lowerdir={directory},upperdir={room}/upper,workdir={room}/work above {directory}",
        user="root",
    )
    try:
        yield room
    finally:
        host.shell(f"umount {directory}; umount {room}; rmdir {room}", user="root")


@pytest.mark.fault("disk full for a hosts file")
def test_a_hosts_file_that_cannot_be_written_stays_the_last_good_one_and_follows_when_it_can(
    host: Host,
) -> None:
    with script_dns(host) as dns:
        dns.play({COPIED: always(FIRST, ttl=600)})
        project = host.project("disk-copies", policy(COPIED))
        start(host, project, COPIED)
        before = inside(host, project, "cat", "/etc/hosts")
        assert says(before, COPIED) == {FIRST}
        (directory,) = host.box.run(["sh", "-c", f"ls -d {STATE}/disk-copies-*/sessions/*"]).stdout.split()
        with copy_on_write(host, directory) as room:
            fill(host, room)
            since = time.time()
            dns.play({COPIED: always(LATER, ttl=600)})
            asked(project, COPIED)
            wanted = f"cannot publish the hosts file {directory}/hosts: No space left on device"
            until(lambda: wanted in host.user_journal(since), 30, "the journal says so")
            assert inside(host, project, "cat", "/etc/hosts") == before
            # What the file says is what the kernel lets pass.
            assert (FIRST, 443) in held(host, project)
            assert f'"{FIRST}"' in inside(host, project, "curl", "-sS", "-m", "10", f"https://{COPIED}/")
            goes_on(host, project)
        # There is room again: nobody does anything.
        until(
            lambda: says(inside(host, project, "cat", "/etc/hosts"), COPIED) == {LATER},
            90,
            "the new answer arrives",
        )
        assert f'"{LATER}"' in inside(host, project, "curl", "-sS", "-m", "10", f"https://{COPIED}/")
        goes_on(host, project)


@contextlib.contextmanager
def small_engine(host: Host, size: str) -> Iterator[tuple[str, str]]:
    """Another Docker Engine whose files are on a small file system; yield (DOCKER_HOST, its root).

    In a network of its own: where it is to make no bridge, it removes docker0.
    """
    place, unit = "/mnt/corral-engine", "corral-test-engine"
    socket = f"/run/{unit}.sock"
    words = (
        f"dockerd --data-root {place} --exec-root /run/{unit} --pidfile /run/{unit}.pid -H unix://{socket} "
        "--iptables=false --ip6tables=false --bridge=none --ip-forward=false --config-file /dev/null"
    )
    host.shell(
        f"mkdir -p {place}; mount -t tmpfs -o size={size} small {place}; "
        f"systemd-run --unit {unit} --collect -p KillMode=mixed -p PrivateNetwork=yes {words}",
        user="root",
    )
    try:
        ping = f"docker -H unix://{socket} info -f '{{{{.DockerRootDir}}}}'"
        until(lambda: host.shell(ping, check=False).stdout.strip() == place, 60, "the other engine answers")
        yield f"unix://{socket}", place
    finally:
        host.root("systemctl", "stop", unit, check=False, timeout=60)
        host.shell(f"umount -R {place} || umount -l {place}; rmdir {place}", user="root")
        host.root("ip", "link", "show", "docker0")


@pytest.mark.engine("trixie", "sid", "bookworm", reason="a second engine beside it is one of the system's")
@pytest.mark.fault("no room for an image")
def test_a_build_does_not_begin_where_the_engine_has_no_room_for_the_image(host: Host) -> None:
    project = host.project("disk-of-engine", BASE_POLICY)
    with small_engine(host, "400m") as (address, place):
        done = project.corral("build", check=False, env={"DOCKER_HOST": address})
        assert done.returncode == 1
        assert "there is no room to build corral/disk-of-engine-" in done.stderr, done.stderr
        assert f"are free at {place}, and the build needs about" in done.stderr
        assert "fix: make room: corral df" in done.stderr
        # Nothing was built, nor begun: no layer, no cache.
        listed = host.shell(
            f"docker -H {shlex.quote(address)} system df --format '{{{{.TotalCount}}}}'"
        ).stdout
        assert set(listed.split()) == {"0"}
        assert not host.shell(f"ls {STATE}/disk-of-engine-*/build.log 2>/dev/null", check=False).stdout
        # The control: the same engine with room, of which nothing is taken before it is written to.
        host.root("mount", "-o", "remount,size=4g", place)
        process = host.box.popen(
            ["corral", "build"], cwd=project.path, env={"DOCKER_HOST": address}, text=True
        )
        try:

            def begun() -> bool:
                return bool(host.shell(f"cat {STATE}/disk-of-engine-*/build.log 2>/dev/null || true").stdout)

            until(lambda: begun() or process.poll() is not None, 60, "the build begins")
            assert begun()
        finally:
            host.box.kill(process)
