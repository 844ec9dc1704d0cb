"""Connections to servers: what is taken back is noticed though neither side sends."""

from __future__ import annotations

import asyncio
import socket

from agent_image.files.proxy import streams


def test_a_connection_to_a_server_asks_by_itself_whether_it_still_stands() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        opened: list[streams.Stream] = []
        found = asyncio.run(streams.connect(["127.0.0.1"], listening.getsockname()[1], opened.append))
        assert opened == [found]

        def option(level: int, name: int) -> int:
            return found.sock.getsockopt(level, name)

        assert option(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        # Soon after the last packet, and often; some minutes without an answer are borne.
        after = option(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        every = option(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
        assert 0 < after <= 10 and 0 < every <= 10
        assert every * option(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) >= 240
        found.close()
