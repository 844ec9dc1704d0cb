"""The servers of the lab's internet: HTTPS and HTTP on every address, a UDP sink, TCP and UDP echo.

Runs as a program of its own inside the internet's namespace. A certificate is issued for whatever name
(or address) a client asks for, by the test CA, so a name added at run time is served at once.

Paths: `/` says which name and address was reached, as JSON; `/stream?interval=S&count=N` sends one byte
every S seconds, N times; `/bytes?count=N` sends N bytes; `/post` answers with the size of the body;
`/files/NAME` is that file of a directory of the lab (`internet.files`), whatever the host: a repository, an index.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import trustme


class Certificates:
    """TLS contexts by name, each with a certificate of its own."""

    def __init__(self, ca: trustme.CA, addresses: Sequence[str]) -> None:
        self._ca = ca
        self._addresses = addresses
        self._contexts: dict[str, ssl.SSLContext] = {}

    def context(self, name: str) -> ssl.SSLContext:
        if name not in self._contexts:
            self._contexts[name] = self._issue(name)
        return self._contexts[name]

    def front(self) -> ssl.SSLContext:
        """The context to listen with: good for the addresses, changed to the name a client asks for."""

        def choose(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, _: ssl.SSLContext) -> None:
            if name:
                connection.context = self.context(name)

        front = self._issue(*self._addresses)
        front.sni_callback = choose
        return front

    def _issue(self, *names: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with self._ca.issue_cert(*names).private_key_and_cert_chain_pem.tempfile() as file:
            context.load_cert_chain(file)
        context.set_alpn_protocols(["http/1.1"])
        return context


async def serve_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, files: Path) -> None:
    """HTTP/1.1 with keep-alive, as much of it as clients need."""
    try:
        while await _one_request(reader, writer, files):
            pass
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
        pass
    finally:
        writer.close()


async def _one_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, files: Path) -> bool:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip("\r\n").split("\r\n")
    method, target, version = first.split(" ")
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    url = urlsplit(target)
    query = {key: values[-1] for key, values in parse_qs(url.query).items()}
    count = int(query.get("count", 10))
    if url.path == "/stream":
        await _stream(writer, float(query.get("interval", 0.1)), count)
    elif url.path == "/bytes":
        await _respond(writer, b"x" * count, "application/octet-stream", method)
    elif url.path == "/post":
        await _respond(writer, f"{len(body)}\n".encode(), "text/plain", method)
    elif url.path.startswith("/files/"):
        found = file_below(files, url.path.removeprefix("/files/"))
        kind = "text/html" if url.path.endswith("/") else "application/octet-stream"
        await _respond(writer, found or b"", kind, method, "404 Not Found" if found is None else "200 OK")
    else:
        tls = writer.get_extra_info("ssl_object")
        told = {
            "host": headers.get("host", ""),
            "path": url.path,
            "scheme": "https" if tls else "http",
            "server": writer.get_extra_info("sockname")[0],
            "client": writer.get_extra_info("peername")[0],
        }
        await _respond(writer, json.dumps(told).encode() + b"\n", "application/json", method)
    kept = "keep-alive" if version == "HTTP/1.0" else "close"
    return (headers.get("connection", "").lower() == kept) == (version == "HTTP/1.0")


def file_below(files: Path, path: str) -> bytes | None:
    """What is at a path, a directory's `index.html` for the directory; None: nothing, or nothing below it."""
    try:
        found = (files / unquote(path)).resolve()
        if not found.is_relative_to(files.resolve()):
            return None
        return (found / "index.html" if found.is_dir() else found).read_bytes()
    except (OSError, ValueError):
        return None


async def _respond(
    writer: asyncio.StreamWriter, body: bytes, kind: str, method: str, status: str = "200 OK"
) -> None:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + (b"" if method == "HEAD" else body))
    await writer.drain()


async def _stream(writer: asyncio.StreamWriter, interval: float, count: int) -> None:
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(head.encode())
    await writer.drain()
    for number in range(count):
        writer.write(b"1\r\n%d\r\n" % (number % 10))
        await writer.drain()
        await asyncio.sleep(interval)
    writer.write(b"0\r\n\r\n")
    await writer.drain()


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


class _Sink(asyncio.DatagramProtocol):
    """Takes everything, answers nothing."""


class _Echo(asyncio.DatagramProtocol):
    """Answers from the address that was asked, which is the bound one: one socket per address."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        self._transport.sendto(data, address)  # type: ignore[attr-defined]


async def _main(options: argparse.Namespace) -> None:
    ca = trustme.CA.from_pem(options.ca.read_bytes(), options.key.read_bytes())
    tls = Certificates(ca, options.address).front()
    loop = asyncio.get_running_loop()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve_http(reader, writer, options.files)

    servers = [
        await asyncio.start_server(serve, None, 443, ssl=tls, backlog=512),
        await asyncio.start_server(serve, None, 80, backlog=512),
        await asyncio.start_server(_echo, None, options.echo_port, backlog=512),
    ]
    anywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    await loop.create_datagram_endpoint(_Sink, (anywhere, options.sink_port))
    for address in options.address:
        await loop.create_datagram_endpoint(_Echo, (address, options.echo_port))
    if options.ready_fd is not None:
        os.write(options.ready_fd, b"1")
        os.close(options.ready_fd)
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ca", type=Path, required=True)
    parser.add_argument("--key", type=Path, required=True)
    parser.add_argument("--files", type=Path, required=True, help="what is served below /files/")
    parser.add_argument("--sink-port", type=int, required=True)
    parser.add_argument("--echo-port", type=int, required=True)
    parser.add_argument("--address", action="append", required=True, help="a server's address; repeatable")
    parser.add_argument("--ready-fd", type=int)
    asyncio.run(_main(parser.parse_args()))
