"""The registry proxy serves the configured hosts and answers 403 for everything else."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from tests.lab import registry_proxy
from tests.lab.registry_proxy import Proxy, Request, allowed, connect_head, origin_head, parse_head

SECRET = "http://user:p%40ss@proxy.example:3128"


def test_connect_names_host_and_port() -> None:
    request = parse_head(b"CONNECT pkg.example:8443 HTTP/1.1\r\nHost: pkg.example:8443\r\n\r\n")
    assert (request.method, request.host, request.port, request.path) == ("CONNECT", "pkg.example", 8443, "")


def test_absolute_form_is_split() -> None:
    request = parse_head(b"GET http://PKG.example/a/b?c=d HTTP/1.1\r\nHost: pkg.example\r\n\r\n")
    assert (request.host, request.port, request.path) == ("pkg.example", 80, "/a/b?c=d")


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET https://pkg.example/ HTTP/1.1\r\n\r\n",
        b"GET file:///etc/passwd HTTP/1.1\r\n\r\n",
        b"GET http://pkg.example/ SPDY/3\r\n\r\n",
        b"GET http://pkg.example/\r\n\r\n",
        b"GET http://pkg.example/ HTTP/1.1\r\nFolded\r\n\r\n",
        b"CONNECT  HTTP/1.1\r\n\r\n",
        b"CONNECT pkg.example:http HTTP/1.1\r\n\r\n",
        b"\r\n\r\n",
    ],
)
def test_what_is_no_proxy_request_is_refused(head: bytes) -> None:
    with pytest.raises(ValueError):
        parse_head(head)


@pytest.mark.parametrize(
    ("host", "port", "expected"),
    [
        ("pkg.example", 443, True),
        ("pkg.example", 80, True),
        ("pkg.example", 22, False),
        ("odd.example", 8443, True),
        ("odd.example", 443, False),
        ("evilpkg.example", 443, False),
        ("pkg.example.evil.example", 443, False),
    ],
)
def test_hosts_are_matched_whole(host: str, port: int, expected: bool) -> None:
    assert allowed(Request("CONNECT", host, port, "", ()), ["pkg.example", "odd.example:8443"]) is expected


def test_head_for_the_origin_has_no_proxy_headers() -> None:
    request = parse_head(
        b"GET http://pkg.example/x HTTP/1.1\r\nHost: pkg.example\r\nProxy-Connection: keep-alive\r\n"
        b"Connection: keep-alive\r\nProxy-Authorization: Basic eA==\r\nRange: bytes=1-\r\n\r\n"
    )
    assert origin_head(request) == (
        b"GET /x HTTP/1.1\r\nHost: pkg.example\r\nRange: bytes=1-\r\nConnection: close\r\n\r\n"
    )


def test_upstream_gets_the_absolute_form_and_its_credentials() -> None:
    request = parse_head(b"GET http://pkg.example:8080/x HTTP/1.1\r\nHost: pkg.example\r\n\r\n")
    head = origin_head(request, SECRET).decode()
    assert head.startswith("GET http://pkg.example:8080/x HTTP/1.1\r\n")
    assert "Proxy-Authorization: Basic dXNlcjpwQHNz\r\n" in head
    assert "Proxy-Authorization: Basic dXNlcjpwQHNz" in connect_head(request, SECRET).decode()
    assert "Proxy-Authorization" not in connect_head(request, "http://proxy.example:3128").decode()


class Net:
    """A proxy and an origin on loopback; the origin says what it was sent."""

    def __init__(self, hosts: list[str], upstream: Mapping[str, str] | None = None) -> None:
        self.heard: list[bytes] = []
        self.hosts, self.upstream = hosts, upstream or {}

    async def origin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heard.append(head)
        if head.startswith(b"CONNECT"):
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            writer.write(await reader.readexactly(4))
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nbody")
        await writer.drain()
        writer.close()

    def ask(self, *sent: str) -> bytes:
        async def talk() -> bytes:
            origin = await asyncio.start_server(self.origin, "127.0.0.1", 0)
            port = origin.sockets[0].getsockname()[1]
            upstream = {scheme: url.format(port=port) for scheme, url in self.upstream.items()}
            proxy = Proxy([host.format(port=port) for host in self.hosts], upstream)
            server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
            async with origin, server:
                reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
                for part in sent:
                    writer.write(part.format(port=port).encode())
                    await writer.drain()
                answer = await asyncio.wait_for(reader.read(-1), 10)
                writer.close()
                return answer

        return asyncio.run(talk())


def test_allowed_host_is_fetched() -> None:
    net = Net(["127.0.0.1:{port}"])
    answer = net.ask("GET http://127.0.0.1:{port}/x HTTP/1.1\r\nHost: pkg\r\n\r\n")
    assert answer.endswith(b"\r\n\r\nbody")
    assert net.heard[0].startswith(b"GET /x HTTP/1.1\r\n")


def test_allowed_host_is_tunnelled() -> None:
    net = Net(["127.0.0.1:{port}"])
    answer = net.ask(
        "CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n", "GET / HTTP/1.1\r\nHost: inside-the-tunnel\r\n\r\n"
    )
    assert answer.startswith(b"HTTP/1.1 200 Connection established\r\n\r\nHTTP/1.1 200 OK")
    assert b"inside-the-tunnel" in net.heard[0]


@pytest.mark.parametrize(
    "sent",
    ["GET http://127.0.0.1:{port}/ HTTP/1.1\r\n\r\n", "CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n"],
)
def test_other_host_is_answered_403_and_never_dialled(sent: str) -> None:
    net = Net(["pkg.example"])
    answer = net.ask(sent)
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert b"is not a package registry" in answer
    assert net.heard == []


def test_malformed_request_is_answered_400() -> None:
    assert Net([]).ask("GET / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_second_request_on_a_connection_reaches_no_other_host() -> None:
    net = Net(["127.0.0.1:{port}"])
    net.ask(
        "GET http://127.0.0.1:{port}/x HTTP/1.1\r\n\r\n",
        "GET http://forbidden.example/ HTTP/1.1\r\n\r\n",
    )
    assert len(net.heard) == 1


def test_dead_host_is_answered_502() -> None:
    answer = Net(["127.0.0.1:1"]).ask("CONNECT 127.0.0.1:1 HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 502 ")


def test_machines_own_proxy_is_dialled_instead() -> None:
    net = Net(["pkg.example"], {"http": "http://127.0.0.1:{port}", "https": "http://127.0.0.1:{port}"})
    assert net.ask("GET http://pkg.example/x HTTP/1.1\r\n\r\n").endswith(b"body")
    assert net.ask("CONNECT pkg.example:443 HTTP/1.1\r\n\r\n", "ping").endswith(b"\r\n\r\nping")
    assert net.heard[0].startswith(b"GET http://pkg.example/x HTTP/1.1")
    assert net.heard[1].startswith(b"CONNECT pkg.example:443 HTTP/1.1")


def test_module_stands_alone() -> None:
    """It runs as a program, where the package around it does not exist."""
    assert "from ." not in (registry_proxy.__loader__.get_source(registry_proxy.__name__) or "")  # type: ignore[union-attr]
