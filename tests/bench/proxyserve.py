"""What the comparison of proxies connects to, in a process of its own.

Arguments: a PEM file with key and chain, and a path for a socket. Serves, on loopback, HTTP over TLS, bytes without TLS, and
an enforcer's answers at the socket; prints the two ports as JSON and ends with its standard input. Standard library only.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys

BODY = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b"x" * 100
CHUNK = bytes(1 << 18)


async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer each request alike."""
    try:
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(BODY)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
        pass
    writer.close()


async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send as many bytes as a line asks for, again and again."""
    try:
        while line := await reader.readline():
            left = int(line)
            while left > 0:
                writer.write(CHUNK[:left])
                left -= len(CHUNK[:left])
                await writer.drain()
    except ConnectionError:
        pass
    writer.close()


async def enforcer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Allow everything at once: tls for the name of the certificate, tcp for others."""
    while line := await reader.readline():
        protocol = "tls" if json.loads(line)["name"] == "localhost" else "tcp"
        answer = {"ok": True, "addresses": ["127.0.0.1"], "protocol": protocol, "sni": True}
        writer.write(json.dumps(answer).encode() + b"\n")
    writer.close()


async def main(pem: str, path: str) -> None:
    """Serve."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pem)
    ports = []
    for serve, tls in ((http, context), (plain, None)):
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls, backlog=512)
        ports.append(server.sockets[0].getsockname()[1])
    await asyncio.start_unix_server(enforcer, path)
    print(json.dumps(ports), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
