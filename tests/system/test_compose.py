"""What Docker Compose runs on a sandbox's network is a stranger like any other."""

from __future__ import annotations

import json
import time
from typing import NamedTuple

import pytest

from .engine_side import engine_socket
from .host import FLOOD, Host
from .intrusion import ASK
from .test_strangers import image, strangers


class Composed(NamedTuple):
    """A service on a sandbox's network: which, since when (seconds), and where the query log was then."""

    network: str
    since: float
    mark: int


def reached_nothing(host: Host, composed: Composed, domain: str, names: list[str]) -> None:
    """Both containers, one that floods and one that asks, got nowhere, and are told of."""
    forbidden = host.internet.addresses["forbidden"]
    assert host.internet.packets(forbidden) == 0, host.internet.all_packets()
    leaked = [query for query in host.internet.queries(composed.mark) if query.name.endswith(domain)]
    print(f"{len(leaked)} questions through Docker's resolver before it was off the network")
    # 20.10 goes on to ask the host's own resolver for a container that has no network any more (docs/limits.md).
    if host.box.engine.suite != "bookworm":
        assert len({query.name for query in leaked}) < 20
    told = {row["name"]: row["network"] for row in strangers(host)}
    assert told == dict.fromkeys(names, composed.network)
    assert host.user_journal(composed.since).count("corral did not start it; disconnected") >= 2
    host.control(forbidden)


COMPOSE = """\
name: app
services:
  tool:
    image: {image}
    user: "0"
    networks: [fence]
networks:
  fence:
    external: true
    name: {network}
"""


@pytest.mark.case(6)
@pytest.mark.engine("trixie", "sid", "rootless", reason="Debian has no Compose 2 beside Docker 20.10")
def test_what_docker_compose_runs_on_a_corral_network_reaches_nothing(host: Host) -> None:
    forbidden = host.internet.addresses["forbidden"]
    project = host.project("by-compose")
    project.inside("true")
    network = project.sandbox["network"]
    domain = f"by-compose-{time.time_ns()}.corral.example"
    composed = Composed(network, time.time(), host.internet.mark())
    host.internet.reset_counters()
    directory = f"{host.box.home}/by-compose-app"
    host.box.write(f"{directory}/compose.yaml", COMPOSE.format(image=image(host), network=network))
    names = ["app-flood", "app-ask"]
    run = ["docker", "compose", "--ansi", "never", "run", "-T", "--entrypoint", "python3", "--name"]
    try:
        for name, (code, *words) in zip(names, ([FLOOD, forbidden, "0.5"], [ASK, domain, "2"]), strict=True):
            # Cut off the network or stopped on the way: what it comes to is Docker's to say.
            host.box.run([*run, name, "tool", "-c", code, *words], cwd=directory, check=False, timeout=90)
        reached_nothing(host, composed, domain, names)
        # The same file on a network of its own is heard: Compose did start what it was asked to.
        host.box.write(
            f"{directory}/compose.yaml", f"name: app\nservices: {{tool: {{image: '{image(host)}'}}}}\n"
        )
        before = host.internet.packets(forbidden, "udp")
        host.box.run([*run, "app-plain", "tool", "-c", FLOOD, forbidden, "0.5"], cwd=directory, timeout=90)
        assert host.internet.packets(forbidden, "udp") > before + 100
    finally:
        host.box.run(["docker", "rm", "-f", *names, "app-plain"], check=False)
        host.box.run(["docker", "network", "rm", "app_default"], check=False)


@pytest.mark.case(6)
def test_a_compose_service_on_a_corral_network_reaches_nothing(host: Host) -> None:
    forbidden = host.internet.addresses["forbidden"]
    project = host.project("composed")
    project.inside("true")
    network = project.sandbox["network"]
    domain = f"composed-{time.time_ns()}.corral.example"
    composed = Composed(network, time.time(), host.internet.mark())
    host.internet.reset_counters()
    # Without the plugin, which not every box has: this is what `docker compose run --entrypoint` asks the engine for.
    labels = {
        "com.docker.compose.project": "app",
        "com.docker.compose.service": "tool",
        "com.docker.compose.oneoff": "True",
        "com.docker.compose.container-number": "1",
    }
    body = {
        "Image": image(host),
        "Labels": labels,
        "User": "0",
        "HostConfig": {"NetworkMode": network, "AutoRemove": False},
        "NetworkingConfig": {"EndpointsConfig": {network: {"Aliases": ["app-tool-run-1", "tool"]}}},
    }
    script = (
        "import http.client, json, socket, sys\n"
        "class Docker(http.client.HTTPConnection):\n"
        "    def connect(self):\n"
        "        self.sock = socket.socket(socket.AF_UNIX); self.sock.connect(sys.argv[3])\n"
        "def ask(method, path, body=None):\n"
        "    c = Docker('localhost'); c.request(method, path, json.dumps(body), {'Content-Type': 'application/json'})\n"
        "    r = c.getresponse(); t = r.read(); assert r.status < 300, t; return json.loads(t) if t else None\n"
        "ident = ask('POST', '/containers/create?name=' + sys.argv[1], json.loads(sys.argv[2]))['Id']\n"
        "ask('POST', f'/containers/{ident}/start'); print(ask('POST', f'/containers/{ident}/wait')['StatusCode'])\n"
    )
    names = []
    try:
        for code, *words in ([FLOOD, forbidden, "0.5"], [ASK, domain, "2"]):
            names.append(f"app-tool-run-{len(names)}")
            made = {**body, "Entrypoint": ["python3", "-c", code], "Cmd": words}
            host.box.run(
                ["python3", "-c", script, names[-1], json.dumps(made), engine_socket(host.box)], timeout=60
            )
        reached_nothing(host, composed, domain, names)
    finally:
        host.box.run(["docker", "rm", "-f", *names], check=False)
