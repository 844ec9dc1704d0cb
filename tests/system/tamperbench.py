"""Where containers are made wrong on purpose: with the body `corral verify` would send, changed, and its checker.

The host service and the writer are stopped meanwhile (they would take the containers off the network, and out of
the sets) and the kernel holds for each what the service would have granted, so a right container passes every
check: the bench proves that first.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import shlex
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import docker
import pytest

from tests.lab import Lab

from .host import ENFORCER, PYTHON, Host, Project
from .tamper import ALL_ROOT_OWNED, NOTES, SECRETS, Tampering

CHECKER = "/usr/local/bin/corral-verify"
PROBE = "192.0.2.1"
BENCH = "/home/dev/bench"
WORKERS = 3

POLICY = f"""\
profile: opencode
mounts:
  ro: [{NOTES}]
egress:
  profile_defaults: false
  allow:
    - allowed1.corral.example
    - allowed2.corral.example
host_services:
  - {{name: llama, port: 8081}}
secrets:
  env_file: {SECRETS}
limits:
  best_effort: true
"""
PEER_POLICY = "profile: opencode\negress: {profile_defaults: false}\nlimits: {best_effort: true}\n"

# What `corral verify` would do, up to the moment it starts the container.
BLUEPRINT = """\
import json, os, shutil, sys
from pathlib import Path
from corral import verify
from corral.console import Console
from corral.context import Invocation, current_user, new_session
from corral.lifecycle import body, created, prepare
from corral.session import Request
invocation = Invocation(current_user(os.environ), Path.cwd(), Console(sys.stderr))
prepared = prepare(invocation)
told = verify._expectations(invocation, prepared, {}, invocation.enforcer.status(), "")
request = Request("verify", (verify.PROGRAM, json.dumps(told)), new_session())
with created(invocation, prepared, request) as made:
    session = Path(made.spec.hosts_file).parent
    shutil.copytree(session, sys.argv[1], symlinks=True)
    told["names"] = made.ready["names"]
    print(json.dumps({
        "body": body(made.spec, request), "told": told, "session": str(session),
        "address": made.spec.address, "gateway": str(prepared.plan.gateway), "image": prepared.image,
    }))
"""

Results = dict[str, tuple[str, str]]


@dataclass
class Place:
    """One container's address, files and, once it is made, id."""

    bench: Bench
    address: str
    directory: str
    ident: str = ""

    @property
    def home(self) -> str:
        return f"{self.directory}/home"

    @property
    def hosts(self) -> str:
        return f"{self.directory}/hosts"

    def shell(self, script: str, user: str = "root") -> str:
        return self.bench.host.shell(script, user=user).stdout

    def allow(self, port: int, target: str) -> None:
        element = f"{self.address},tcp:{port},{self.bench.filled(target)}"
        self.shell(f"ipset -exist add corral-pins {element}")

    def forbid_host(self, port: int) -> None:
        self.shell(f"ipset -exist del corral-host {self.address},tcp:{port},{self.bench.gateway}")

    def in_network(self, script: str) -> None:
        pid = self.shell(f"docker inspect -f '{{{{.State.Pid}}}}' {self.ident}").strip()
        self.shell(f"nsenter -t {pid} -n sh -ec {shlex.quote(script)}")


@dataclass
class Bench:
    host: Host
    blueprint: dict[str, Any]
    names: dict[str, str]
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(20))
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def gateway(self) -> str:
        return str(self.blueprint["gateway"])

    def filled(self, text: str) -> str:
        for name, value in self.names.items():
            text = text.replace(name, value)
        return text

    def expected(self, tampering: Tampering, results: Results) -> set[str]:
        found = set()
        for name in tampering.expected:
            if name == ALL_ROOT_OWNED:
                found |= {check for check in results if check.startswith("root-owned:")}
            else:
                found.add(self.filled(name))
        return found

    def place(self) -> Place:
        """A directory and an address of its own, with what the policy grants to it."""
        with self.lock:
            number = next(self.numbers)
        front, _, last = str(self.blueprint["address"]).rpartition(".")
        # The network's first quarter is for the sessions of the test, the last one Docker's.
        base = int(last) // 64 * 64
        place = Place(self, f"{front}.{base + 12 + number % 32}", f"{BENCH}/{number}")
        old = self.blueprint["address"]
        place.shell(
            f"cp -a {BENCH}/original {place.directory}; sed -i 's/^{old} /{place.address} /' {place.hosts}"
        )
        told = self.blueprint["told"]
        rows = [
            f"add -exist corral-pins {place.address},tcp:443,{address}"
            for addresses in told["names"].values()
            for address in addresses
        ]
        rows += [
            f"add -exist corral-host {place.address},tcp:{port},{self.gateway}"
            for port in told["host_services"]
        ]
        self.host.netadmin("ipset", "restore", input="\n".join(rows) + "\n")
        return place

    def body(self, place: Place) -> dict[str, Any]:
        """The create request for a place: paths and address are its own, and the checker is what it starts."""
        text = json.dumps(self.blueprint["body"]).replace(self.blueprint["session"], place.directory)
        body: dict[str, Any] = json.loads(text)
        (endpoint,) = body["NetworkingConfig"]["EndpointsConfig"].values()
        endpoint["IPAMConfig"]["IPv4Address"] = place.address
        body["Entrypoint"], body["Cmd"] = [CHECKER], [json.dumps(self.blueprint["told"])]
        # Nobody's: the service, when it is back, finds a stranger and no session.
        body["Labels"] = {}
        return body

    def measure(self, tampering: Tampering | None) -> Results:
        """What the checker says in a container that is wrong in that way, or right."""
        client = docker.APIClient(
            base_url=f"unix:///proc/{self.host.box.leader}/root/run/docker.sock", timeout=120
        )
        place, image = self.place(), None
        with contextlib.closing(client), contextlib.ExitStack() as after:
            after.callback(place.shell, f"rm -rf {place.directory}")
            body = self.body(place)
            if tampering is not None:
                if tampering.image:
                    image = self.derived(client, tampering.image)
                    after.callback(client.remove_image, image, force=True)
                    body["Image"] = image
                if tampering.body is not None:
                    tampering.body(body)
                if tampering.before is not None:
                    tampering.before(place)
            during = tampering.during if tampering is not None else None
            argv = [*body["Entrypoint"], *body["Cmd"]]
            if during is not None:
                body["Entrypoint"], body["Cmd"] = ["sleep"], ["120"]
            place.ident = client.create_container_from_config(body)["Id"]  # type: ignore[no-untyped-call]
            after.callback(client.remove_container, place.ident, force=True)
            client.start(place.ident)
            if during is None:
                client.wait(place.ident, timeout=100)
                return parsed(client.logs(place.ident, stdout=True, stderr=False))
            during(place)
            made = client.exec_create(place.ident, argv, user=body["User"])
            return parsed(client.exec_start(made["Id"], demux=True)[0])

    def derived(self, client: Any, script: str) -> str:
        """An image that a script of root's changed."""
        body = {
            "Image": self.blueprint["image"],
            "User": "0:0",
            "Entrypoint": ["sh", "-ec", script],
            "Cmd": [],
            "HostConfig": {"NetworkMode": "none"},
        }
        ident = client.create_container_from_config(body)["Id"]
        try:
            client.start(ident)
            assert client.wait(ident)["StatusCode"] == 0, client.logs(ident)
            return str(client.commit(ident)["Id"])
        finally:
            client.remove_container(ident, force=True)


def parsed(output: bytes | None) -> Results:
    rows = [json.loads(line) for line in (output or b"").decode().splitlines()]
    return {row["check"]: (row["status"], row["detail"]) for row in rows}


def failed(results: Results) -> set[str]:
    return {name for name, (status, _) in results.items() if status == "fail"}


@contextlib.contextmanager
def serving(host: Host, port: int) -> Iterator[None]:
    server = host.box.popen(["python3", "-m", "http.server", str(port), "--bind", "127.0.0.1"], cwd="/srv")
    try:
        host.box.wait_for(["curl", "-s", "-o", "/dev/null", f"http://127.0.0.1:{port}/"])
        yield
    finally:
        host.box.kill(server)


def peer(host: Host, name: str, policy: str = PEER_POLICY) -> Project:
    """A project with a running session that listens on port 8080 of every address it has."""
    project = host.project(name, policy)
    project.write("serve.py", SERVE)
    project.start("python3", "serve.py", marker="up")
    return project


SERVE = """\
import http.server, socket
server = http.server.ThreadingHTTPServer(("0.0.0.0", 8080), http.server.SimpleHTTPRequestHandler)
# It is there for the peer itself.
socket.create_connection(("127.0.0.1", 8080), timeout=5).close()
open("up", "w").close()
server.serve_forever()
"""


@contextlib.contextmanager
def prepared(lab: Lab, host: Host) -> Iterator[Bench]:
    """The bench, with the service stopped; started again in the end."""
    secrets, directory = shlex.quote(SECRETS), SECRETS.rpartition("/")[0]
    host.shell(
        f"install -d -o dev -m 700 {directory}; install -o dev -m 600 /dev/null {secrets}; "
        f"install -d -o dev {NOTES} {BENCH}",
        user="root",
    )
    other = peer(host, "tamper-peer")
    project = host.project("tamper", POLICY)
    project.write("blueprint.py", BLUEPRINT)
    with contextlib.ExitStack() as stack:
        stack.callback(host.shell, f"rm -rf {BENCH} {NOTES} {directory}", user="root")
        stack.enter_context(serving(host, 8081))
        done = host.box.run([PYTHON, "blueprint.py", f"{BENCH}/original"], cwd=project.path, timeout=300)
        blueprint = json.loads(done.stdout)
        host.box.run(["rm", f"{project.path}/blueprint.py"])
        session = other.sandbox["sessions"][0]
        names = {"PROBE": PROBE, "RESOLVER": host.internet.addresses["resolver"], "PEER": session["address"]}
        (name,) = [
            name for name, address in blueprint["told"]["peers"].items() if address == session["address"]
        ]
        bench = Bench(
            host, copy.deepcopy(blueprint), {"peer-unreachable:PEER": f"peer-unreachable:{name}", **names}
        )
        stack.callback(host.wait_enforcer)
        stack.callback(host.user_systemctl, "start", ENFORCER)
        stack.callback(host.engine.systemctl, "start", *host.engine.writer_units)
        host.user_systemctl("stop", ENFORCER)
        # It takes out what the service has not asked for; its rules stay.
        host.engine.systemctl("stop", *host.engine.writer_units)
        yield bench


@dataclass
class Pool:
    """Measures several at a time, in the order they were asked for."""

    bench: Bench
    tasks: dict[str, Future[Results]] = field(default_factory=dict)
    workers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(WORKERS))

    def ask(self, key: str, task: Callable[[], Results]) -> None:
        self.tasks[key] = self.workers.submit(task)

    def result(self, key: str) -> Results:
        return self.tasks[key].result(timeout=240)

    def close(self) -> None:
        self.workers.shutdown(wait=True, cancel_futures=True)


def parameters(rows: list[Tampering]) -> list[Any]:
    """The rows as test parameters; CI takes the essential ones."""
    marks = {True: [pytest.mark.representative], False: []}
    return [pytest.param(row, id=row.ident, marks=marks[row.ci]) for row in rows]


def note(record_property: Callable[[str, object], None], row: Tampering) -> None:
    """For the table at the end of the run."""
    record_property("tampering", [row.check, row.how, sorted(row.expected), row.why])
