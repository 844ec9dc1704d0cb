"""Forward proxy for package registries: it listens in one network namespace and dials from another.

Runs as a program of its own (standard library only). CONNECT and absolute-form HTTP, to the hosts of
the configuration only; everything else is answered 403. When the machine itself leaves through a proxy,
that one is dialled instead.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import ctypes
import json
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

_CLONE_NEWNET = 0x40000000
_HEAD_LIMIT = 64 * 1024
_HOP_HEADERS = {"connection", "proxy-connection", "proxy-authorization", "keep-alive"}


@dataclass(frozen=True)
class Request:
    """Head of a request to a proxy; `path` is what the origin server is asked for (empty for CONNECT)."""

    method: str
    host: str
    port: int
    path: str
    headers: tuple[tuple[str, str], ...]


def parse_head(head: bytes) -> Request:
    """Raises ValueError when this is no request a forward proxy can serve."""
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    method, target, version = first.split(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(f"unknown version {version}")
    headers = []
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise ValueError("malformed header")
        headers.append((name, value.strip()))
    url = urlsplit(f"//{target}" if method == "CONNECT" else target)
    if not url.hostname or (method != "CONNECT" and url.scheme != "http"):
        raise ValueError("neither CONNECT nor an absolute http:// address")
    if method == "CONNECT":
        return Request(method, url.hostname, url.port or 443, "", tuple(headers))
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    return Request(method, url.hostname, url.port or 80, path, tuple(headers))


def allowed(request: Request, hosts: Iterable[str]) -> bool:
    """`host` stands for its ports 80 and 443, `host:port` for that port."""
    named = set(hosts)
    if f"{request.host}:{request.port}" in named:
        return True
    return request.host in named and request.port in (80, 443)


def origin_head(request: Request, through: str | None = None) -> bytes:
    """The head to send on; one request per connection. `through` is the upstream proxy's URL, if any."""
    target = request.path
    if through:
        port = "" if request.port == 80 else f":{request.port}"
        target = f"http://{request.host}{port}{request.path}"
    kept = [f"{name}: {value}" for name, value in request.headers if name.lower() not in _HOP_HEADERS]
    lines = [f"{request.method} {target} HTTP/1.1", *kept, "Connection: close", *credentials(through)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def connect_head(request: Request, through: str) -> bytes:
    name = f"{request.host}:{request.port}"
    lines = [f"CONNECT {name} HTTP/1.1", f"Host: {name}", *credentials(through)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def credentials(proxy: str | None) -> list[str]:
    url = urlsplit(proxy or "")
    if not url.username:
        return []
    pair = f"{unquote(url.username)}:{unquote(url.password or '')}"
    return [f"Proxy-Authorization: Basic {base64.b64encode(pair.encode()).decode()}"]


class Proxy:
    """One proxy with its allow list; `upstream` maps http and https to the machine's own proxy."""

    def __init__(self, hosts: Iterable[str], upstream: Mapping[str, str]) -> None:
        self._hosts = tuple(hosts)
        self._upstream = upstream

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = parse_head(await reader.readuntil(b"\r\n\r\n"))
        except ValueError as problem:
            await _answer(writer, 400, str(problem))
            return
        if not allowed(request, self._hosts):
            print(f"refused {request.method} {request.host}:{request.port}", flush=True)
            await _answer(
                writer, 403, f"{request.host}:{request.port} is not a package registry of this machine"
            )
            return
        print(f"{request.method} {request.host}:{request.port}{request.path}", flush=True)
        through = self._upstream.get("https" if request.method == "CONNECT" else "http")
        try:
            far_reader, far_writer = await self._dial(request, through)
        except OSError as problem:
            await _answer(writer, 502, f"cannot reach {request.host}:{request.port}: {problem}")
            return
        try:
            if request.method != "CONNECT":
                far_writer.write(origin_head(request, through))
            else:
                if through:
                    far_writer.write(connect_head(request, through))
                    reply = await far_reader.readuntil(b"\r\n\r\n")
                    if reply.split(b" ", 2)[1:2] != [b"200"]:
                        await _answer(writer, 502, "the machine's own proxy refused")
                        return
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await _relay_both(reader, writer, far_reader, far_writer)
        finally:
            far_writer.close()

    async def _dial(
        self, request: Request, through: str | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not through:
            return await asyncio.open_connection(request.host, request.port)
        url = urlsplit(through)
        default = 443 if url.scheme == "https" else 80
        return await asyncio.open_connection(
            url.hostname, url.port or default, ssl=url.scheme == "https" or None
        )


async def _relay_both(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    """Until the far end is done. A client that closes its half only ends that half."""
    there = asyncio.create_task(_relay(reader, far_writer))
    try:
        await _relay(far_reader, writer)
    finally:
        there.cancel()


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(256 * 1024):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


async def _answer(writer: asyncio.StreamWriter, status: int, text: str) -> None:
    body = f"{text}\n".encode()
    reason = {400: "Bad Request", 403: "Forbidden", 502: "Bad Gateway"}[status]
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}"
    writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode() + body)
    await writer.drain()


def listen_in(netns: str, address: str, port: int) -> socket.socket:
    """A listening socket of another network namespace; the calling thread comes back to its own."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(fd: int) -> None:
        if libc.setns(fd, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {netns}")

    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(netns, os.O_RDONLY)
    try:
        enter(there)
        try:
            return socket.create_server((address, port), backlog=256)
        finally:
            enter(home)
    finally:
        os.close(home)
        os.close(there)


async def _main(listener: socket.socket, proxy: Proxy, ready_fd: int | None) -> None:
    server = await asyncio.start_server(proxy.serve, sock=listener, limit=_HEAD_LIMIT)
    if ready_fd is not None:
        os.write(ready_fd, b"1")
        os.close(ready_fd)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--netns", required=True, help="path of the namespace to listen in")
    parser.add_argument("--address", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--config", type=Path, required=True, help='JSON: {"hosts": […], "upstream": {…}}')
    parser.add_argument("--ready-fd", type=int)
    options = parser.parse_args()
    config = json.loads(options.config.read_text())
    asyncio.run(
        _main(
            listen_in(options.netns, options.address, options.port),
            Proxy(config["hosts"], config["upstream"]),
            options.ready_fd,
        )
    )
