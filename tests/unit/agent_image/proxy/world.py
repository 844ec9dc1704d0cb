"""A proxy in a loop whose clock can be set ahead, with an enforcer that plays, and servers on loopback.

``told`` makes a test of a coroutine that gets a World, and holds that nothing is left of it: no task, no descriptor.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import os
import random
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from agent_image.files.proxy.dialer import Dialer
from agent_image.files.proxy.hangup import Hangups
from agent_image.files.proxy.journal import Journal
from agent_image.files.proxy.main import listen
from agent_image.files.proxy.server import Server
from agent_image.files.proxy.session import Means

LOOPBACK = "127.0.0.1"
PATIENCE = 20.0
NAME = "api.example.com"
OK = b"HTTP/1.1 200 Connection established\r\n\r\n"

Answer = dict[str, Any] | bytes | None


class Loop(asyncio.SelectorEventLoop):
    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead


class End:
    """One end of a connection, of a test."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._loop = asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self.sock, data)

    async def send_what_goes(self, seed: int = 0) -> bytes:
        """Send until nobody takes more; return what that was."""
        chance = random.Random(seed)
        sent, quiet = bytearray(), 0
        data = chance.randbytes(1 << 16)
        while quiet < 200:
            try:
                taken = self.sock.send(data)
            except BlockingIOError:
                quiet += 1
                await asyncio.sleep(0)
            else:
                sent += data[:taken]
                data = data[taken:] or chance.randbytes(1 << 16)
                quiet = 0
        return bytes(sent)

    async def recv(self, size: int = 1 << 16) -> bytes:
        return await self._loop.sock_recv(self.sock, size)

    async def exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = await self.recv(size - len(data))
            assert piece, f"the end after {bytes(data)!r}"
            data += piece
        return bytes(data)

    async def rest(self) -> bytes:
        data = bytearray()
        while piece := await self.recv():
            data += piece
        return bytes(data)

    async def rest_until(self, mark: bytes) -> bytes:
        data = b""
        while not data.endswith(mark):
            data += await self.exactly(1)
        return data

    async def is_reset(self) -> bool:
        try:
            await self.rest()
        except ConnectionResetError:
            return True
        return False

    def end(self) -> None:
        self.sock.shutdown(socket.SHUT_WR)

    def abort(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def close(self) -> None:
        self.sock.close()


class World:
    def __init__(self, loop: Loop, directory: Path) -> None:
        self.loop = loop
        self.path = directory / "dial.sock"
        self.lines: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []
        # What the enforcer says to a name: an object, raw bytes, or nothing at all.
        self.answers: dict[str, Answer] = {}
        self.upstream = socket.create_server((LOOPBACK, 0))
        self.upstream.setblocking(False)
        self.port: int = self.upstream.getsockname()[1]
        self._listening = listen((LOOPBACK, 0))
        self.address = self._listening.getsockname()
        self.journal = Journal(self._write, loop.time, lambda: 0.0)
        self.ends: list[End] = []
        self.enforcer: asyncio.Server | None = None
        self._speaking: set[asyncio.StreamWriter] = set()

    def _write(self, line: bytes) -> None:
        assert line.endswith(b"\n") and line.count(b"\n") == 1
        self.lines.append(json.loads(line))

    async def __aenter__(self) -> World:
        await self.start_enforcer()
        self.hangups = Hangups(self.loop)
        self.dialer = Dialer(str(self.path))
        self.server = Server(self._listening, Means(self.journal, self.dialer, self.hangups))
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        for end in self.ends:
            end.close()
        if kind is None:
            await self.until(lambda: self.server.active == 0, "a session goes on")
        await self.server.close()
        self.dialer.close()
        self.hangups.close()
        await self.stop_enforcer()
        self.upstream.close()

    # The enforcer.

    async def start_enforcer(self) -> None:
        self.enforcer = await asyncio.start_unix_server(self._enforce, self.path)

    async def stop_enforcer(self) -> None:
        if self.enforcer is not None:
            self.enforcer.close()
            for writer in [*self._speaking]:
                writer.transport.abort()
            self.enforcer = None
            self.path.unlink()
            await self.until(lambda: not self._speaking, "the enforcer speaks on")

    async def _enforce(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._speaking.add(writer)
        try:
            while line := await reader.readline():
                question = json.loads(line)
                self.asked.append(question)
                answer = self._answer(question)
                if answer is None:
                    await reader.read()
                    return
                writer.write(answer)
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()
            self._speaking.discard(writer)

    def _answer(self, question: dict[str, Any]) -> bytes | None:
        answer: Answer = {"ok": True}
        if question["op"] == "dial":
            denied = {"ok": False, "kind": "denied", "text": "no entry allows it"}
            answer = self.answers.get(question["name"], denied)
        return answer if isinstance(answer, bytes | None) else json.dumps(answer).encode() + b"\n"

    def allow(
        self, name: str = NAME, protocol: str = "tls", sni: bool = True, addresses: Any = (LOOPBACK,)
    ) -> None:
        self.answers[name] = {"ok": True, "addresses": list(addresses), "protocol": protocol, "sni": sni}

    # Ends of connections.

    async def client(self) -> End:
        sock = socket.socket()
        end = End(sock)
        self.ends.append(end)
        await self.loop.sock_connect(sock, self.address)
        return end

    async def accepted(self) -> End:
        sock, _ = await self.loop.sock_accept(self.upstream)
        end = End(sock)
        self.ends.append(end)
        return end

    def nobody_came(self) -> bool:
        try:
            self.upstream.accept()[0].close()
        except BlockingIOError:
            return True
        return False

    def request(self, name: str = NAME, port: int | None = None) -> bytes:
        return (
            f"CONNECT {name}:{self.port if port is None else port} HTTP/1.1\r\nHost: {name}\r\n\r\n".encode()
        )

    async def through(self, first: bytes = b"", protocol: str = "tcp") -> tuple[End, End]:
        """Return both ends of a tunnel; ``first`` is sent with the request."""
        self.allow(protocol=protocol)
        client = await self.client()
        await client.send(self.request() + first)
        assert await client.exactly(len(OK)) == OK
        return client, await self.accepted()

    # Time.

    async def until(self, condition: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, otherwise
            await asyncio.sleep(0)

    async def later(self, seconds: float) -> None:
        """Set the clock ahead, and let everything that is due happen."""
        self.loop.ahead += seconds
        for _ in range(20):
            await asyncio.sleep(0)

    async def seconds_until(self, what: Coroutine[Any, Any, object]) -> float:
        """Let time pass until something has happened; return how long that was by the clock of the loop."""
        began = self.loop.time()
        task = self.loop.create_task(what)
        while not task.done():
            await self.later(0.25)
        await task
        return self.loop.time() - began

    async def event(self, event: str) -> dict[str, Any]:
        """Return the first line of the log of this kind."""
        found: list[dict[str, Any]] = []

        def came() -> bool:
            found[:] = [line for line in self.lines if line["event"] == event]
            return bool(found)

        await self.until(came, f"no line {event} in {self.lines}")
        return found[0]


def _descriptors() -> set[tuple[str, str]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    # Of reading this list itself.
    return {(name, target) for name, target in found if not target.startswith("/proc/")}


def play(story: Callable[[World], Awaitable[None]]) -> None:
    """Run a story, and hold that nothing of it is left."""
    before = _descriptors()
    problems: list[dict[str, Any]] = []
    loop = Loop()
    loop.set_exception_handler(lambda _, context: problems.append(context))

    async def whole(directory: Path) -> None:
        async with World(loop, directory) as world:
            await story(world)
        # A connection of the enforcer's may still have to be told that it is closed.
        await world.until(lambda: len(asyncio.all_tasks()) == 1, f"tasks are left: {asyncio.all_tasks()}")

    with tempfile.TemporaryDirectory() as directory:
        task = loop.create_task(whole(Path(directory)))
        # In real time: what hangs is a failure, wherever it hangs.
        guard = threading.Timer(3 * PATIENCE, loop.call_soon_threadsafe, [task.cancel])
        guard.start()
        try:
            loop.run_until_complete(task)
        finally:
            guard.cancel()
            guard.join()
            _end(loop)
            loop.close()
    assert not problems, problems
    assert _descriptors() - before == set()


def _end(loop: Loop) -> None:
    """End what a story that failed has left, so that it fails for its own reason only."""
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left))


def told(story: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Make a test of a coroutine whose first argument is a World; the others are the test's parameters."""

    @functools.wraps(story)
    def test(**given: Any) -> None:
        play(lambda world: story(world, **given))

    signature = inspect.signature(story)
    test.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=list(signature.parameters.values())[1:]
    )
    return test
