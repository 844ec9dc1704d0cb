"""Checks of names that are asked for: a sandbox with another proxy, other elements or another answerer fails them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.lab import Box, Internet, Lab

from .host import BASE_POLICY, ENFORCER, EVERY_ENGINE, PIPX, Host, Project
from .tamper import NAMES, TABLE, Tampering
from .tamperbench import note, parameters

ROWS = [row for row in TABLE if row.whole.startswith(NAMES)]
PROXIED = BASE_POLICY + '    - "*.zone.corral.example"\n'
ANSWERED = BASE_POLICY.replace("  allow:", "  dns: answer\n  allow:")
PERMITTED, ELSEWHERE = "allowed1.corral.example", "203.0.113.66"
# A port of the gateway beside the proxy's.
BESIDE = 8442

# Right in all but one way.
PROXY = """\
#!/usr/bin/python3 -IS
import socket, threading
KIND, PERMITTED = "KIND-OF-PROXY", "NAME-THAT-IS-PERMITTED"

def right(method, target):
    if method != "CONNECT":
        return 405
    name, _, port = target.rpartition(":")
    if port == "0" or set(name) & set("@[]") or name.replace(".", "").isdigit():
        return 400
    return 200 if name == PERMITTED else 403

def talk(client):
    with client:
        head = b""
        while b"\\r\\n\\r\\n" not in head:
            piece = client.recv(4096)
            if not piece:
                return
            head += piece
        if KIND == "mumbling":
            client.sendall(b"220 ready\\r\\n")
            return
        method, target = head.split(b" ", 2)[:2]
        status = right(method.decode(), target.decode())
        if KIND == "generous":
            status = 200
        if KIND == "stingy" and status == 200:
            status = 403
        if status != 200:
            body = b"%d no (request 1)\\n" % status
            client.sendall(b"HTTP/1.1 %d No\\r\\nContent-Length: %d\\r\\n\\r\\n%s" % (status, len(body), body))
            return
        client.sendall(b"HTTP/1.1 200 Connection established\\r\\n\\r\\n")
        if client.recv(4096) and KIND == "blind":
            client.sendall(b"\\x16\\x03\\x03\\x00\\x02\\x02\\x00")

server = socket.create_server(("0.0.0.0", 8443))
print('{"event": "listening"}', flush=True)
while True:
    threading.Thread(target=talk, args=(server.accept()[0],), daemon=True).start()
"""
LISTEN = f"""\
import socket
server = socket.create_server(("0.0.0.0", {BESIDE}))
while True:
    server.accept()[0].close()
"""


def made(host: Host, name: str, policy: str) -> Project:
    found = host.project(name, policy)
    done = found.corral("verify", check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return found


@pytest.fixture(scope="module")
def rules(lab: Lab, installed: Box) -> Iterator[Host]:
    internet: Internet = lab.internet
    internet.reset_names()
    found = Host(installed, internet)
    found.wait_enforcer()
    yield found
    found.end_projects()


@pytest.fixture(scope="module")
def proxied(rules: Host) -> Project:
    """A project with a proxy whose verification passes."""
    return made(rules, "proxied", PROXIED)


@pytest.fixture(scope="module")
def answered(rules: Host) -> Project:
    """One where names are answered; a rootless engine has none."""
    return made(rules, "answered", ANSWERED)


@contextmanager
def session(project: Project) -> Iterator[str]:
    """A session; yields its address."""
    project.box.run(["rm", "-f", f"{project.path}/up"])
    process = project.start("sh", "-c", "touch up; sleep 300", marker="up")
    try:
        (row,) = [row for row in project.sandbox["sessions"] if row["service"] == "main"]
        yield row["address"]
    finally:
        project.box.run(["docker", "rm", "-f", *project.containers()])
        process.wait(60)


@contextmanager
def another_proxy(host: Host, project: Project, kind: str) -> Iterator[None]:
    tag = f"corral/{project.path.rpartition('/')[2]}"
    (tag,) = [
        line
        for line in project.box.run(
            ["docker", "images", "--format", "{{.Repository}}:{{.Tag}}"]
        ).stdout.split()
        if line.startswith(f"{tag}-") and line.endswith(":latest")
    ]
    before = host.box.run(["docker", "images", "-q", "--no-trunc", tag]).stdout.strip()
    text = PROXY.replace("KIND-OF-PROXY", kind).replace("NAME-THAT-IS-PERMITTED", PERMITTED)
    path = f"{host.box.home}/other-proxy"
    host.box.write(path, text, mode=0o755)
    script = "rm -f /usr/local/bin/corral-proxy; install -m 755 /tmp/other-proxy /usr/local/bin/corral-proxy"
    host.shell(
        f"c=$(docker create -u 0 --network none --entrypoint sh {tag} -ec '{script}'); "
        f"docker cp {path} $c:/tmp/other-proxy; docker start -a $c; "
        f"docker commit -c 'USER {host.engine.agent}' $c {tag}; docker rm $c"
    )
    try:
        yield
    finally:
        host.box.run(["docker", "tag", before, tag])


@contextmanager
def vandal(host: Host, table: str, row: str) -> Iterator[None]:
    """An element that is put back again and again."""
    lines = f"for i in 1 2 3 4 5 6 7 8; do echo add -exist {table} {row}; done | ipset restore"
    command = [*host.engine.entering(), "sh", "-c", f"while true; do {lines}; done"]
    process: subprocess.Popen[bytes] = host.box.popen(command, user="root", stdin=subprocess.PIPE)
    try:
        host.box.wait_for(lambda: row in host.netadmin("ipset", "list", table).stdout)
        yield
    finally:
        host.box.kill(process)


@contextmanager
def beside(host: Host, project: Project) -> Iterator[None]:
    gateway = project.sandbox["gateway"]
    listener = host.box.popen([*host.engine.entering(), "python3", "-c", LISTEN], user="root")
    try:
        with (
            session(project) as address,
            vandal(host, "corral-host", f"{address},tcp:{BESIDE},{gateway}"),
        ):
            yield
    finally:
        host.box.kill(listener)


@contextmanager
def roaming(host: Host, project: Project) -> Iterator[None]:
    with session(project):
        (row,) = [row for row in project.sandbox["sessions"] if row["service"] == "proxy"]
        with vandal(host, "corral-pins", f"{row['address']},tcp:443,{ELSEWHERE}"):
            yield


@contextmanager
def resolver(host: Host, project: Project) -> Iterator[None]:
    where = host.internet.addresses["resolver"]
    with session(project) as address, vandal(host, "corral-pins", f"{address},tcp:53,{where}"):
        yield


@contextmanager
def another_service(host: Host, script: str) -> Iterator[None]:
    """The service with one line of its answerer changed by sed."""
    path = f"{PIPX}/venvs/corral/lib/python3*/site-packages/enforcer/answering.py"
    host.shell(f"cp {path} /tmp/answering.py; sed -i '{script}' {path}; ! cmp -s {path} /tmp/answering.py")
    try:
        host.user_systemctl("restart", ENFORCER)
        host.wait_enforcer()
        yield
    finally:
        host.shell(f"cp /tmp/answering.py $(echo {path})")
        host.user_systemctl("restart", ENFORCER)
        host.wait_enforcer()


@contextmanager
def talkative(host: Host, project: Project) -> Iterator[None]:
    told = f'Reply(dns.rcode.NOERROR, ("{ELSEWHERE}",), 30)'
    line = f"return Reply(dns.rcode.NXDOMAIN) if name == UNLISTED_NAME else {told}"
    # The name that the gate asks for stays unknown: it would keep the gate closed.
    with another_service(host, f"/if name is None or not ports:/,/return/s/return .*/{line}/"):
        yield


@contextmanager
def misleading(host: Host, project: Project) -> Iterator[None]:
    told = f'return Reply(dns.rcode.NOERROR, ("{ELSEWHERE}",), LONGEST_TTL)'
    with another_service(host, f"/^        if standing:/{{n;s/^ *#/            {told}  #/}}"):
        yield


BREAKS = {
    **{break_.__name__: ("proxied", break_) for break_ in (beside, roaming)},
    **{break_.__name__: ("answered", break_) for break_ in (resolver, talkative, misleading)},
}
TRIES = 3
PROXIES = ("generous", "blind", "stingy", "mumbling")


def test_every_tampering_is_done_here() -> None:
    assert {row.whole.removeprefix(NAMES) for row in ROWS} == {*BREAKS, *PROXIES}


@EVERY_ENGINE
@pytest.mark.parametrize("tampering", parameters(ROWS))
def test_where_names_are_asked_for_what_is_wrong_fails_exactly_that_check(
    rules: Host,
    request: pytest.FixtureRequest,
    tampering: Tampering,
    record_property: Callable[[str, object], None],
) -> None:
    kind = tampering.whole.removeprefix(NAMES)
    which, break_ = BREAKS.get(kind, ("proxied", None))
    if which == "answered" and rules.box.engine.rootless:
        pytest.skip("a rootless engine has no gateway that answers names")
    note(record_property, tampering)
    project: Project = request.getfixturevalue(which)
    with another_proxy(rules, project, kind) if break_ is None else break_(rules, project):
        for _ in range(TRIES):
            done = project.corral("verify", "--json", check=False)
            rows = json.loads(done.stdout)["checks"]
            # What is wrong in the kernel is mended all the time: the look may have come to that moment.
            if done.returncode or "kernel lets" not in tampering.how:
                break
        assert {row["check"] for row in rows if row["status"] == "fail"} == tampering.expected, rows
        assert done.returncode == 1
