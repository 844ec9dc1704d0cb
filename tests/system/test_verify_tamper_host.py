"""Checks that only the whole of `corral verify` can make: each is seen to fail, alone, when its property is broken."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.lab import Box, Internet, Lab

from .host import BASE_POLICY, ENFORCER, Host, Project
from .tamper import NAMES, TABLE, Tampering
from .tamperbench import note, parameters

WHOLE = [row for row in TABLE if row.whole and not row.whole.startswith(NAMES)]


@pytest.fixture(scope="module")
def project(lab: Lab, installed: Box) -> Iterator[Project]:
    """A project whose verification passes."""
    internet: Internet = lab.internet
    internet.reset_names()
    host = Host(installed, internet)
    host.wait_enforcer()
    made = host.project("whole")
    made.corral("verify", timeout=300)
    yield made
    host.end_projects()


@contextmanager
def session(project: Project) -> Iterator[None]:
    project.box.run(["rm", "-f", f"{project.path}/up"])
    process = project.start("sh", "-c", "touch up; sleep 300", marker="up")
    try:
        yield
    finally:
        project.box.run(["docker", "rm", "-f", *project.containers()])
        process.wait(60)


@contextmanager
def nameless(host: Host, project: Project) -> Iterator[None]:
    host.internet.set_name("allowed2.corral.example", [])
    host.box.flush_dns()
    try:
        yield
    finally:
        host.internet.reset_names()
        host.box.flush_dns()


@contextmanager
def deaf(host: Host, project: Project) -> Iterator[None]:
    project.policy(BASE_POLICY + "host_services:\n  - {name: llama, port: 8099}\n")
    try:
        yield
    finally:
        project.policy(BASE_POLICY)


@contextmanager
def mute(host: Host, project: Project) -> Iterator[None]:
    # A start of the service takes away the network of a sandbox in which nothing is left.
    project.inside("true")
    tag = f"corral/{project.sandbox['sandbox']}:latest"
    before = host.box.run(["docker", "images", "-q", "--no-trunc", tag]).stdout.strip()
    script = "rm /usr/local/bin/corral-verify; install -m 755 /bin/true /usr/local/bin/corral-verify"
    host.shell(
        f"c=$(docker create -u 0 --network none --entrypoint sh {tag} -ec '{script}'); docker start -a $c; "
        f"docker commit -c 'USER {host.engine.agent}' $c {tag}; docker rm $c"
    )
    try:
        yield
    finally:
        host.box.run(["docker", "tag", before, tag])


@contextmanager
def edited(host: Host, project: Project) -> Iterator[None]:
    with session(project):
        project.policy(BASE_POLICY.replace("    - allowed2.corral.example\n", ""))
        try:
            yield
        finally:
            project.policy(BASE_POLICY)


@contextmanager
def vandal(host: Host, script: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [*host.engine.entering(), "sh", "-c", script]
    process = host.box.popen(command, user="root", stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        host.box.kill(process)


@contextmanager
def element(host: Host, project: Project) -> Iterator[None]:
    with session(project):
        row = f"{project.sandbox['sessions'][0]['address']},tcp:443,203.0.113.66"
        lines = f"for i in 1 2 3 4 5 6 7 8; do echo add -exist corral-pins {row}; done | ipset restore"
        with vandal(host, f"while true; do {lines}; done"):
            host.box.wait_for(lambda: row in host.netadmin("ipset", "list", "corral-pins").stdout)
            yield


@contextmanager
def first(host: Host, project: Project) -> Iterator[None]:
    rule = ["FORWARD", "-i", "nowhere0", "-j", "RETURN"]
    # Where its network is made only now, Docker puts its own jumps first once more.
    project.inside("true")
    host.netadmin("iptables", "-I", *rule)
    try:
        yield
    finally:
        host.netadmin("iptables", "-D", *rule)


# An nft that does not know yet how a table is kept from others: the writer cannot hold its own then.
OLDER_NFT = """\
#!/bin/sh
case " $* " in *" -f "*) ;; *) exec /usr/sbin/nft-real "$@";; esac
text=$(cat)
case "$text" in *"flags owner"*) echo "Error: syntax error, unexpected string" >&2; exit 1;; esac
printf '%s\\n' "$text" | /usr/sbin/nft-real "$@"
"""


@contextmanager
def older_nft(host: Host) -> Iterator[None]:
    host.engine.systemctl("stop", *host.engine.writer_units)
    host.root("mv", "/usr/sbin/nft", "/usr/sbin/nft-real")
    try:
        host.box.write("/usr/sbin/nft", OLDER_NFT, owner="root", mode=0o755)
        host.netadmin("nft-real", "delete", "table", "inet", "corral")
        host.engine.systemctl("start", *host.engine.writer_units)
        yield
    finally:
        host.engine.systemctl("stop", *host.engine.writer_units)
        host.root("mv", "/usr/sbin/nft-real", "/usr/sbin/nft")
        host.engine.systemctl("start", *host.engine.writer_units)


@contextmanager
def table(host: Host, project: Project) -> Iterator[None]:
    def listed() -> str:
        return host.netadmin("nft", "list", "table", "inet", "corral", check=False).stdout

    # Of a table with an owner nobody else can remove anything, and this one goes with its owner.
    with older_nft(host):
        host.wait_enforcer()
        with vandal(host, "exec nft-real -i") as process:
            assert process.stdin
            process.stdin.write(b"delete table inet corral; add table inet corral { flags owner; }\n")
            process.stdin.flush()
            host.box.wait_for(lambda: "flags owner" in listed() and "chain" not in listed(), timeout=15)
            yield
    host.box.wait_for(lambda: "backstop" in listed(), timeout=90)
    host.wait_enforcer()


@contextmanager
def alone(project: Project) -> Iterator[str]:
    """A session without a network; yields its container."""
    project.policy(BASE_POLICY.partition("egress:")[0] + "egress: {mode: none}\n")
    try:
        with session(project):
            yield project.containers()[0]
    finally:
        project.policy(BASE_POLICY)


@contextmanager
def link(host: Host, project: Project) -> Iterator[None]:
    with alone(project) as name:
        pid = host.box.run(["docker", "inspect", "-f", "{{.State.Pid}}", name]).stdout.strip()
        host.root("nsenter", "-t", pid, "-n", "ip", "link", "add", "link0", "type", "bridge")
        yield


@contextmanager
def connected(host: Host, project: Project) -> Iterator[None]:
    with alone(project) as name:
        host.user_systemctl("stop", ENFORCER)
        host.box.run(["docker", "network", "disconnect", "none", name])
        host.box.run(["docker", "network", "connect", "bridge", name])
        try:
            yield
        finally:
            host.user_systemctl("start", ENFORCER)
            host.wait_enforcer()


BREAKS = {
    break_.__name__: break_
    for break_ in (nameless, deaf, mute, edited, element, first, table, link, connected)
}


@pytest.mark.parametrize("tampering", parameters(WHOLE))
def test_what_only_the_whole_command_can_see_fails_exactly_that_check(
    host: Host, project: Project, tampering: Tampering, record_property: Callable[[str, object], None]
) -> None:
    note(record_property, tampering)
    with BREAKS[tampering.whole](host, project):
        done = project.corral("verify", "--json", check=False)
        rows = json.loads(done.stdout)["checks"]
        assert {row["check"] for row in rows if row["status"] == "fail"} == tampering.expected, rows
        assert done.returncode == 1
        # A check of a session is listed for the session that it was made in.
        sessions = {row["session"] for row in rows if row["status"] == "fail"}
        names = [name.rpartition("-")[2] for name in project.containers()]
        of_session = tampering.whole in {"edited", "element", "link", "connected"}
        assert sessions == (set(names) if of_session else {None})
