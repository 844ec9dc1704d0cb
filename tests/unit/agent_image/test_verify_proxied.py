"""The checker in a sandbox that has a proxy: every check fails when just its property is broken."""

from __future__ import annotations

import errno
import json
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from agent_image.files.verify import main, network, proxied
from agent_image.files.verify.network import WAIT, Reply
from agent_image.files.verify.ownership import GUARDS
from tests.unit.agent_image.container import BODY, GATEWAY, HOSTS, PROBE, Container, expect

ALLOWED, DENIED = "api.example.org", "example.com"
OWN = "172.16.0.61"
ONLY = "203.0.113.77"
PROXY: dict[str, Any] = {
    "port": 8443,
    "denied": DENIED,
    "permitted": [ALLOWED, 443],
    "address": OWN,
    "only": [[ONLY, 443]],
}
REFUSED = Reply("refused", 0.001, code=errno.ECONNREFUSED)
CHECKS = ["proxy-answers", "proxy-denies", "proxy-permits", "proxy-checks-sni", "proxy-is-the-only-way"]
TEXTS = {400: "Bad Request", 403: "Forbidden", 405: "Method Not Allowed", 502: "Bad Gateway", 504: "Timeout"}


def said(status: int, body: str = "") -> bytes:
    body = body or f"{status} no, and here is why (request 1a2b)\n"
    head = f"HTTP/1.1 {status} {TEXTS.get(status, 'OK')}\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()


class Proxied(Container):
    """One with a proxy that is right; a test makes it wrong in one way."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.put("/etc/hosts", HOSTS.replace("corral-host", "corral-host proxy"))
        self.there_is: Reply | None = None  # instead of the proxy
        self.statuses: dict[str, int] = {}  # request line -> another status
        self.body = ""
        self.connected = 200
        self.after: Reply = Reply("closed", 0.01)
        self.asked: list[tuple[str, bytes]] = []

    def converse(
        self, address: str, port: int, first: bytes, then: bytes = b"", wait: float = WAIT
    ) -> tuple[Reply, Reply | None]:
        assert (address, port) == (GATEWAY, 8443)
        if self.there_is is not None:
            return self.there_is, None
        line = first.split(b"\r\n", 1)[0].decode()
        self.asked.append((line, then))
        status = self.statuses.get(line, self.right(line))
        if status == 200:
            after = self.after if then else None
            return Reply("data", 0.01, b"HTTP/1.1 200 OK\r\n\r\n"), after
        return Reply("data", 0.01, said(status, self.body)), None

    def right(self, line: str) -> int:
        method, target, _ = line.split(" ")
        if method != "CONNECT":
            return 405
        name, _, port = target.rpartition(":")
        if port == "0" or "@" in name or name.startswith("[") or name.replace(".", "").isdigit():
            return 400
        return self.connected if name == ALLOWED else 403


@pytest.fixture
def inside(tmp_path: Path) -> Proxied:
    return Proxied(tmp_path)


def found(inside: Container, **changes: Any) -> dict[str, tuple[str, str]]:
    """Return the results of all checks of a sandbox with this proxy."""
    body = {**BODY, "proxy": {**PROXY, **changes}}
    return {r["check"]: (r["status"], r["detail"]) for r in main.verify(body, inside)}


def failing(inside: Container, **changes: Any) -> set[str]:
    return {name for name, (status, _) in found(inside, **changes).items() if status == "fail"}


def test_a_sandbox_with_a_proxy_is_asked_about_it_and_no_other_is() -> None:
    names = [name for name, _ in main.checks(expect(proxy=PROXY))]
    assert [name for name in names if name.startswith("proxy")] == CHECKS
    assert not [name for name, _ in main.checks(expect()) if name.startswith("proxy")]
    # Nobody answers names in there either.
    assert {"dns-closed", "embedded-dns-closed"} <= {*names}


def test_a_proxy_that_is_right_passes_everything(inside: Proxied) -> None:
    results = found(inside)
    assert {name: results[name][0] for name in CHECKS} == dict.fromkeys(CHECKS, "ok")
    assert failing(inside) == set()


def test_the_program_is_guarded_like_the_others(inside: Proxied) -> None:
    assert "/usr/local/bin/corral-proxy" in GUARDS
    inside.owners["/usr/local/bin/corral-proxy"] = 1000
    assert failing(inside) == {"root-owned:/usr/local/bin/corral-proxy"}


@pytest.mark.parametrize("hosts", [HOSTS, HOSTS + "203.0.113.5 proxy\n"])
def test_another_address_of_the_proxy_is_found(inside: Proxied, hosts: str) -> None:
    inside.put("/etc/hosts", hosts)
    assert failing(inside) == {"proxy-answers"}


@pytest.mark.parametrize(
    "reply",
    [
        Reply("closed", 0.01),
        REFUSED,
        Reply("timeout", 4.0),
        Reply("data", 0.01, b"SSH-2.0-OpenSSH_9.2\r\n"),
        Reply("data", 0.01, b"HTTP/1.1 OK\r\n\r\n"),
    ],
)
def test_a_proxy_that_is_not_there_or_is_something_else_is_found(inside: Proxied, reply: Reply) -> None:
    inside.there_is = reply
    results = found(inside)
    assert {name for name, (status, _) in results.items() if status == "fail"} == {
        "proxy-answers",
        "proxy-denies",
        "proxy-permits",
    }
    # What cannot be tried has not been proven.
    assert results["proxy-checks-sni"][0] == "skip"


@pytest.mark.parametrize("status", [200, 400, 502, 503, 504])
@pytest.mark.parametrize(
    "line",
    [
        f"CONNECT {DENIED}:443 HTTP/1.1",
        f"CONNECT {PROBE}:443 HTTP/1.1",
        "CONNECT [2001:db8::1]:443 HTTP/1.1",
        "CONNECT 127.0.0.1:22 HTTP/1.1",
        f"CONNECT {DENIED}@{DENIED}:443 HTTP/1.1",
        f"CONNECT {DENIED}:0 HTTP/1.1",
        f"GET http://{DENIED}/ HTTP/1.1",
    ],
)
def test_what_is_not_refused_as_it_must_be_is_found(inside: Proxied, line: str, status: int) -> None:
    if status == inside.right(line):
        status = 403
    inside.statuses[line] = status
    assert failing(inside) == {"proxy-denies"}
    assert line.partition(" HTTP/")[0] in found(inside)["proxy-denies"][1]


@pytest.mark.parametrize(
    "body",
    [
        "\n",
        "403 denied\n",
        "403 denied (request 1)\n403 denied (request 1)\n",
        "200 denied (request 1)\n",
        "403 schön (request 1)\n",
        "<html>403 Forbidden</html>\n",
    ],
)
def test_a_refusal_that_is_not_one_line_of_the_proxys_own_is_found(inside: Proxied, body: str) -> None:
    inside.body = body
    assert failing(inside) == {"proxy-denies"}


@pytest.mark.parametrize("status", [400, 403, 405, 503])
def test_a_name_of_the_policy_that_is_refused_is_found(inside: Proxied, status: int) -> None:
    inside.connected = status
    assert failing(inside) == {"proxy-permits"}
    assert found(inside)["proxy-checks-sni"][0] == "skip"


@pytest.mark.parametrize("status", [502, 504])
def test_a_name_that_does_not_answer_proves_nothing_and_fails_nothing(inside: Proxied, status: int) -> None:
    inside.connected = status
    results = found(inside)
    assert {results[name][0] for name in ("proxy-permits", "proxy-checks-sni")} == {"skip"}
    assert failing(inside) == set()


def test_a_policy_of_zones_alone_has_no_name_to_try(inside: Proxied) -> None:
    results = found(inside, permitted=None)
    assert {results[name][0] for name in ("proxy-permits", "proxy-checks-sni")} == {"skip"}
    assert [line for line, _ in inside.asked if ALLOWED in line] == []


@pytest.mark.parametrize("after", [Reply("data", 0.01, b"\x16\x03\x03"), Reply("timeout", 12.0)])
def test_a_connection_that_names_another_server_and_lives_is_found(inside: Proxied, after: Reply) -> None:
    inside.after = after
    assert failing(inside) == {"proxy-checks-sni"}


@pytest.mark.parametrize("port", [*proxied.HOST_PORTS])
def test_another_port_of_the_host_is_found(inside: Proxied, port: int) -> None:
    inside.open_tcp[GATEWAY, port] = Reply("connected", 0.01)
    assert failing(inside) == {"proxy-is-the-only-way"}
    # Unless that is a service of the policy's.
    body = {**BODY, "proxy": PROXY, "host_services": [8081, port]}
    results = {r["check"]: r["status"] for r in main.verify(body, inside)}
    assert results["proxy-is-the-only-way"] == "ok"


@pytest.mark.parametrize("reply", [Reply("connected", 0.01), Reply("timeout", 0.9)])
def test_an_address_that_only_the_proxy_may_reach_has_to_be_refused(inside: Proxied, reply: Reply) -> None:
    inside.open_tcp[ONLY, 443] = reply
    assert failing(inside) == {"proxy-is-the-only-way"}
    assert ONLY in found(inside)["proxy-is-the-only-way"][1]
    # Nothing is said of it when the proxy does not reach it.
    assert failing(inside, only=[]) == set()


@pytest.mark.parametrize("port", proxied.OWN_PORTS)
def test_the_proxys_container_takes_no_connection_from_a_session(inside: Proxied, port: int) -> None:
    inside.open_tcp[OWN, port] = Reply("connected", 0.01)
    assert failing(inside) == {"proxy-is-the-only-way"}
    inside.open_tcp[OWN, port] = Reply("no-route", 0.0)
    assert failing(inside) == {"proxy-is-the-only-way"}
    inside.open_tcp[OWN, port] = Reply("timeout", 0.9)
    assert failing(inside) == set()


@pytest.mark.parametrize(
    "change",
    [
        {"colour": "red"},
        {"denied": "exa mple.com"},
        {"denied": "example.com\r\nX: y"},
        {"denied": ""},
        {"permitted": ["api.example.org"]},
        {"permitted": ["api example", 443]},
        {"only": ["203.0.113.77"]},
        {"port": "x"},
    ],
)
def test_what_is_not_understood_is_an_error(inside: Proxied, change: dict[str, Any]) -> None:
    assert failing(inside, **change) == {"expectations"}


def test_the_hello_asks_for_the_name_it_was_made_for() -> None:
    heard: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sni_callback = lambda _sock, name, _context: heard.append(name)  # type: ignore[assignment]
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    incoming.write(network.client_hello("other.example.com"))
    with pytest.raises(ssl.SSLError):
        context.wrap_bio(incoming, outgoing, server_side=True).do_handshake()
    assert heard == ["other.example.com"]


# -- the real program

SERVE = "from agent_image.files.proxy.main import main; main()"


class Real(Proxied):
    """Asks the real proxy, which listens on the loopback."""

    def converse(
        self, address: str, port: int, first: bytes, then: bytes = b"", wait: float = WAIT
    ) -> tuple[Reply, Reply | None]:
        return network.converse("127.0.0.1", port, first, then, wait)


def dialing(server: socket.socket, upstream: int) -> None:
    """Answer as the enforcer does: one name is permitted, and leads to the loopback."""

    def talk(connection: socket.socket) -> None:
        with connection, connection.makefile("rwb") as lines:
            for line in lines:
                asked = json.loads(line)
                if asked["op"] == "refused":
                    answer: dict[str, Any] = {"ok": True}
                elif (asked["name"], asked["port"]) == (ALLOWED, upstream):
                    answer = {"ok": True, "addresses": ["127.0.0.1"], "protocol": "tls", "sni": True}
                else:
                    answer = {"ok": False, "kind": "denied", "text": "no entry means it"}
                lines.write(json.dumps(answer).encode() + b"\n")
                lines.flush()

    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        threading.Thread(target=talk, args=(connection,), daemon=True).start()


@pytest.fixture
def real(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Ports of the real proxy, and of what it may connect."""
    with ExitStack() as stack:
        upstream = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        asked = stack.enter_context(socket.socket(socket.AF_UNIX))
        asked.bind(str(tmp_path / "dial.sock"))
        asked.listen()
        target = upstream.getsockname()[1]
        threading.Thread(target=dialing, args=(asked, target), daemon=True).start()
        argv = [sys.executable, "-c", SERVE, "--listen", "127.0.0.1:0", "--dial", str(tmp_path / "dial.sock")]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])
        stack.enter_context(process)
        stack.callback(process.terminate)
        assert process.stdout is not None
        listening = json.loads(process.stdout.readline())
        yield listening["port"], target


def test_the_real_proxy_passes_and_one_that_may_not_be_asked_is_told(
    tmp_path: Path, real: tuple[int, int]
) -> None:
    port, upstream = real
    inside = Real(tmp_path / "root")
    results = found(inside, port=port, permitted=[ALLOWED, upstream])
    assert {name: results[name] for name in CHECKS if results[name][0] != "ok"} == {}
    assert f"asking there for {DENIED} ends the connection" in results["proxy-checks-sni"][1]
    # A name that it may not be asked for is refused, and that is seen.
    assert failing(inside, port=port, permitted=["www.example.org", upstream]) == {"proxy-permits"}
