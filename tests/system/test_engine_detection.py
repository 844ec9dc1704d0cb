"""Engines that corral cannot fence, staged for real: refused with the reason, before anything is made.

The snap, Docker Desktop, Colima's virtual machine, a rootless engine and podman itself are not staged here; what
tells them apart is tested on recorded facts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from .host import Done, Host

ELSEWHERE = "/run/elsewhere.sock"
REMAPPED = "/run/remapped.sock"


def doctor(host: Host, *ids: str, **environ: str) -> dict[str, str]:
    """Return what doctor finds, by id."""
    done = host.box.run(["corral", "doctor", "--json", *ids], env=environ, check=False)
    body = json.loads(done.stdout)
    found = {row["id"]: row["found"] for row in body["checks"] if row["state"] == "found"}
    assert done.returncode == int(any(row["severity"] == "broken" for row in body["checks"] if row["found"]))
    return found


def install(host: Host, **environ: str) -> Done:
    """Run an installation that has to be refused before the step with sudo."""
    done = host.box.run(["corral", "install"], env=environ, check=False, timeout=180)
    assert done.returncode == 1, done.stdout
    assert "system part" not in done.stdout
    assert "fix: " in done.stderr
    return done


@pytest.fixture
def elsewhere(host: Host) -> Iterator[str]:
    """A whole engine whose socket is here and whose network is not, as with a virtual machine on this host.

    The socket is listened on by this host's systemd, so that nothing but where the bridges are gives it away.
    """
    host.shell(
        f"""
        ip netns add elsewhere
        systemd-run --quiet --unit=elsewhere-docker --socket-property=ListenStream={ELSEWHERE} \\
            --socket-property=SocketMode=0660 --socket-property=SocketGroup=docker \\
            -p NetworkNamespacePath=/run/netns/elsewhere \\
            dockerd -H fd:// --data-root /var/lib/elsewhere --exec-root /run/elsewhere \\
            --pidfile /run/elsewhere.pid --storage-driver vfs
        docker -H unix://{ELSEWHERE} info >/dev/null
        """,
        user="root",
    )
    try:
        yield f"unix://{ELSEWHERE}"
    finally:
        host.shell(
            f"""
            systemctl stop elsewhere-docker.socket elsewhere-docker.service || true
            ip netns delete elsewhere || true
            rm -rf /var/lib/elsewhere /run/elsewhere {ELSEWHERE}
            """,
            user="root",
            check=False,
        )


@pytest.mark.representative
def test_an_engine_whose_bridges_are_not_here_is_refused_by_the_bridge_it_makes(
    host: Host, elsewhere: str
) -> None:
    docker = ["docker", "-H", elsewhere]
    # A user without any network yet: both engines have a docker0, and nothing tells them apart by looking.
    assert "COR-016" not in doctor(host, "COR-016", DOCKER_HOST=elsewhere)
    done = install(host, DOCKER_HOST=elsewhere)
    assert "network namespace" in done.stderr and "corral-try-" in done.stderr
    assert "unset DOCKER_HOST" in done.stderr
    names = host.box.run([*docker, "network", "ls", "--format", "{{.Name}}"]).stdout.split()
    assert sorted(names) == ["bridge", "host", "none"]
    # A network of its own is evidence that doctor can see without making one.
    host.box.run([*docker, "network", "create", "other"])
    assert set(doctor(host, "COR-016", "COR-003", DOCKER_HOST=elsewhere)) == {"COR-016"}
    # The same, of the engine of this machine, is none.
    host.box.run(["docker", "network", "create", "own"])
    try:
        assert doctor(host, "COR-016") == {}
        assert "user part: done" in host.box.run(["corral", "install"], timeout=180).stdout
    finally:
        host.box.run(["docker", "network", "rm", "own"])
    networks = host.box.run(["docker", "network", "ls", "--format", "{{.Name}}"]).stdout
    assert "corral-try-" not in networks


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:2375", "ssh://dev@build.example"])
def test_an_engine_over_the_network_is_refused_by_every_command(host: Host, address: str) -> None:
    project = host.project("remote")
    done = project.corral("run", "--", "touch", "ran", check=False, env={"DOCKER_HOST": address})
    assert done.returncode == 1
    assert "DOCKER_HOST" in done.stderr and "fix: unset DOCKER_HOST" in done.stderr
    assert not project.exists("ran")
    assert "on this machine only" in install(host, DOCKER_HOST=address).stderr
    assert set(doctor(host, "COR-005", "COR-006", DOCKER_HOST=address)) == {"COR-005"}
    assert doctor(host, "COR-005") == {}


@pytest.fixture
def contexts(host: Host) -> Iterator[Host]:
    docker = ["docker", "context"]
    host.box.run([*docker, "create", "far", "--docker", "host=tcp://203.0.113.9:2375"])
    host.box.run([*docker, "create", "same", "--docker", "host=unix:///run/docker.sock"])
    try:
        yield host
    finally:
        host.box.run([*docker, "use", "default"])
        host.box.run([*docker, "rm", "-f", "far", "same"])


def test_corral_uses_the_engine_that_docker_uses_or_none(contexts: Host) -> None:
    host = contexts
    project = host.project("context")
    host.box.run(["docker", "context", "use", "far"])
    done = project.corral("run", "--", "touch", "ran", check=False)
    assert done.returncode == 1
    assert "the docker context far names an engine elsewhere" in done.stderr
    assert "fix: docker context use default" in done.stderr
    assert not project.exists("ran")
    assert "the docker context far" in install(host).stderr
    assert set(doctor(host, "COR-006", "COR-003")) == {"COR-006"}
    # The variable is stronger than the file, for docker as for corral.
    assert doctor(host, "COR-006", DOCKER_CONTEXT="default") == {}
    assert "unset DOCKER_CONTEXT" in project.corral(
        "run", "--", "true", check=False, env={"DOCKER_CONTEXT": "gone"}
    ).stderr  # fmt: skip
    # Another name for the engine of this machine is fine.
    host.box.run(["docker", "context", "use", "same"])
    assert doctor(host, "COR-006") == {}
    project.inside("touch", "ran")
    assert project.exists("ran")


@pytest.fixture
def remapped(host: Host) -> Iterator[str]:
    """An engine that maps users and writes no rules, beside the host's own; it has no network at all."""
    host.shell(
        f"""
        grep -q ^dev: /etc/subuid
        systemd-run --quiet --unit=remapped-docker \\
            dockerd -H unix://{REMAPPED} --data-root /var/lib/remapped --exec-root /run/remapped \\
            --pidfile /run/remapped.pid --storage-driver vfs --userns-remap dev:dev \\
            --bridge none --iptables=false --ip6tables=false --ip-forward=false
        """,
        user="root",
    )
    try:
        host.box.wait_for(["docker", "-H", f"unix://{REMAPPED}", "info"], user="root")
        yield f"unix://{REMAPPED}"
    finally:
        host.shell(
            f"""
            systemctl stop remapped-docker.service || true
            rm -rf /var/lib/remapped /run/remapped {REMAPPED}
            """,
            user="root",
            check=False,
        )


def test_an_engine_that_maps_users_and_writes_no_rules_is_refused_for_the_first(
    host: Host, remapped: str
) -> None:
    told = install(host, DOCKER_HOST=remapped).stderr
    assert "userns-remap" in told
    assert "iptables is false" not in told
    found = doctor(host, *(f"COR-0{number:02}" for number in range(2, 17)), DOCKER_HOST=remapped)
    assert set(found) == {"COR-012", "COR-014"}


@pytest.fixture
def without_docker(host: Host) -> Iterator[Host]:
    host.shell(
        """
        systemctl stop docker.socket docker.service
        mv /usr/sbin/dockerd /usr/sbin/dockerd.away
        mv /run/docker.sock /run/docker.sock.away
        """,
        user="root",
    )
    try:
        yield host
    finally:
        host.shell(
            """
            rm -f /usr/local/bin/podman
            mv /usr/sbin/dockerd.away /usr/sbin/dockerd
            rm -f /run/docker.sock.away
            systemctl start docker.socket docker.service
            """,
            user="root",
        )
        host.wait_enforcer()


def test_a_host_with_podman_instead_of_docker_is_told_what_to_install(without_docker: Host) -> None:
    host = without_docker
    told = install(host).stderr
    assert "Docker Engine is not installed" in told and "apt install docker.io" in told
    engine = [f"COR-0{number:02}" for number in range(2, 17)]
    assert set(doctor(host, *engine)) == {"COR-002"}
    host.box.write("/usr/local/bin/podman", "#!/bin/sh\n", owner="root", mode=0o755)
    told = install(host).stderr
    assert "podman is not supported yet" in told and "apt install docker.io" in told
    assert set(doctor(host, *engine)) == {"COR-009"}
    done = host.project("podman").corral("run", "--", "true", check=False)
    assert done.returncode == 1
    assert "podman is not supported yet" in done.stderr
