"""Which name servers are asked: resolv.conf and the text form of a server."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import dns.message
import pytest
import trustme

from enforcer.resolver import Answer, Failure, Resolver, Server, system_servers

from .dns_server import reply


def test_resolv_conf_gives_servers_in_order_and_nothing_else() -> None:
    text = """
# a comment
; another
search corp.example
options edns0 ndots:5
nameserver 127.0.0.53
nameserver   192.0.2.1   # trailing
nameserver 127.0.0.53
nameserver 2001:db8::53
nameserver fe80::1%eth0
nameserver [2001:db8::54]:5353
nameserver 192.0.2.2:5300
nameserver not-an-address
nameserver 192.0.2.3:99999
nameserver
#nameserver 192.0.2.9
"""
    assert system_servers(text) == (
        Server("127.0.0.53"),
        Server("192.0.2.1"),
        Server("2001:db8::53"),
        Server("fe80::1%eth0"),
        Server("2001:db8::54", 5353),
        Server("192.0.2.2", 5300),
    )


def test_resolv_conf_without_servers_means_the_local_machine() -> None:
    assert system_servers("search corp.example\n") == (Server("127.0.0.1"),)


@pytest.mark.parametrize(
    "text",
    [
        "192.0.2.1", "192.0.2.1:5353", "2001:db8::1", "[2001:db8::1]:5353", "tls://192.0.2.1#dns.example",
        "tls://[2001:db8::1]:8853#dns.example", "tls://192.0.2.1:8853#dns.example",
    ],
)  # fmt: skip
def test_server_text_round_trips(text: str) -> None:
    assert str(Server.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "dns.example",
        "192.0.2.1:0",
        "192.0.2.1:",
        "[192.0.2.1",
        "192.0.2.1:70000",
        "tls://192.0.2.1",
        "tls://dns.example",
        "tls://192.0.2.1#192.0.2.1",
        "tls://192.0.2.1#DNS.example",
        "tls://#dns.example",
    ],
)
def test_server_text_that_is_none_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        Server.parse(text)


def test_a_server_over_tls_has_port_853_and_the_name_of_its_certificate() -> None:
    assert Server.parse("tls://192.0.2.1#dns.example") == Server("192.0.2.1", 853, "dns.example")


@pytest.mark.parametrize(("name", "good"), [("dns.example", True), ("other.example", False)])
def test_over_tls_only_the_server_with_the_name_is_believed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, good: bool
) -> None:
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    monkeypatch.setattr("enforcer.resolver.TRUSTED", 1e9)
    read: list[ssl.SSLContext] = []

    def trust() -> ssl.SSLContext:
        read.append(trusting())
        return read[-1]

    trusting = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", trust)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("dns.example").configure_cert(context)
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = int.from_bytes(await reader.readexactly(2), "big")
        query = dns.message.from_wire(await reader.readexactly(size))
        asked.append(query.question[0].name.to_text())
        wire = reply(query, "api.example 60 A 203.0.113.1").to_wire()
        writer.write(len(wire).to_bytes(2, "big") + wire)
        await writer.drain()
        writer.close()

    async def acts() -> Answer | Failure:
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        async with server:
            port = server.sockets[0].getsockname()[1]
            resolver = Resolver((Server("127.0.0.1", port, name),), lambda: 0.0)
            await resolver.resolve("api.example")
            return await resolver.resolve("api.example")

    found = asyncio.run(acts())
    # To read all that this host trusts takes long: not for each question.
    assert len(read) == 1
    if good:
        assert found == Answer("api.example", ("203.0.113.1",), 60, 0.0)
    else:
        assert isinstance(found, Failure)
        assert found.kind == "network"
        assert asked == []
