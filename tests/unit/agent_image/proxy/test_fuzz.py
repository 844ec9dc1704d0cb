"""Many damaged conversations: nothing hangs, nothing raises, and nothing goes out that was not allowed.

50,000 with every test run, each through the session itself with streams in memory; ``make soak`` makes a million
(CORRAL_FUZZ, and CORRAL_FUZZ_SEED to repeat one). What went out is judged by OpenSSL, not by our own parser.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import select
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest

from agent_image.files.proxy import answers, session, tunnel
from agent_image.files.proxy.dialer import Granted, Refused
from agent_image.files.proxy.journal import Journal
from tests.unit.agent_image.proxy import hellos
from tests.unit.agent_image.proxy.world import NAME, OK, World, told

COUNT = int(os.environ.get("CORRAL_FUZZ", "50000"))
SEED = int(os.environ.get("CORRAL_FUZZ_SEED", "7"))

BARE = "bare.example.com"
FREE = "free.example.com"
GRANTS = {
    (NAME, 443): Granted(("192.0.2.1",), "tls", True),
    (BARE, 443): Granted(("192.0.2.2",), "tls", False),
    (FREE, 22): Granted(("192.0.2.3",), "tcp", True),
}
REPLY = re.compile(
    rb"HTTP/1\.1 (400|403|405|503) [A-Za-z ]+\r\n.*\r\n\r\n[ -~]+ \(request t-1\)\n", re.DOTALL
)
# More would be a loop that never ends.
STEPS = 5000


class Stream:
    """A connection in memory: what comes is there already, what goes is kept."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.sock = self
        self.reading = self.gone = False
        self.sent = bytearray()
        self.closed = ""
        self._pieces = list(reversed(pieces))
        self._steps = 0

    async def recv(self) -> bytes:
        self._steps += 1
        assert self._steps < STEPS and not self.closed
        return self._pieces.pop() if self._pieces else b""

    async def send(self, data: bytes) -> None:
        assert not self.closed
        self.sent += data

    def end(self) -> None:
        pass

    def close(self) -> None:
        self.closed = self.closed or "closed"

    def abort(self) -> None:
        self.closed = self.closed or "aborted"

    @property
    def left(self) -> bytes:
        return b"".join(reversed(self._pieces))


class Means:
    """What a session acts with, as notes of what it did."""

    def __init__(self, server: Stream) -> None:
        self.journal = Journal(lambda _: None, lambda: 0.0, lambda: 0.0)
        self.enforcer = self.hangups = self
        self.server = server
        self.dialed: list[tuple[str, int]] = []
        self.connected: list[tuple[str, int]] = []

    async def dial(self, name: str, port: int) -> Granted | Refused:
        self.dialed.append((name, port))
        return GRANTS.get((name, port)) or Refused("denied", "no entry")

    async def tell(self, name: str, port: int, reason: str) -> None:
        assert reason in session.TOLD and (name, port) in GRANTS

    def watch(self, *_: object) -> None: ...

    def forget(self, *_: object) -> None: ...

    async def connect(self, addresses: Sequence[str], port: int, opened: Callable[[Any], None]) -> Any:
        self.connected.append((addresses[0], port))
        opened(self.server)
        return self.server


class Tunnel:
    """In place of the real one: notes with what it was begun."""

    begun: ClassVar[list[bytes]] = []

    def __init__(self, *_: object) -> None:
        self.up = self.down = self
        self.moved = 0

    async def run(self, rest: bytes) -> str:
        self.begun.append(rest)
        return tunnel.ENDED


# What is sent.

TARGETS = (
    *(f"{NAME}:443", f"{NAME}:443", f"{NAME}:443", f"{BARE}:443", f"{FREE}:22", "API.example.com.:443"),
    *(
        "evil.example:443",
        f"{NAME}:22",
        f"{FREE}:443",
        "127.0.0.1:443",
        "[::1]:443",
        f"x@{NAME}:443",
        f"{NAME}:0",
    ),
)
NAMES = (
    NAME,
    NAME,
    NAME,
    BARE,
    None,
    "evil.example",
    "API.EXAMPLE.com",
    NAME + "\0.evil.example",
    "x." + NAME,
)
METHODS = ("CONNECT",) * 12 + ("GET", "connect", "OPTIONS")
FIELDS = (
    "Host: a",
    "User-Agent: x/1",
    "Proxy-Authorization: Basic eA==",
    "Content-Length: 1",
    "A : b",
    " x",
    "A: \0",
)
MADE = [hellos.made(name, version) for name in (NAME, None, "evil.example") for version in ("1.2", "1.3")]
EXTENSIONS = [
    hellos.extension(42, b""),
    hellos.extension(16, b"\0\3\2h2"),
    hellos.extension(0xFE0D, hellos.names((0, b"inner.example"))),
    hellos.names((0, b"evil.example")),
    hellos.extension(51, bytes(3000)),
]
BETWEEN = (
    b"",
    b"",
    b"\x14\x03\x03\0\x01\x01",
    b"\x17\x03\x03\0\x03abc",
    b"\x15\x03\x03\0\x02\x01\0",
    b"junk",
)
ANSWERS = (
    hellos.server_hello(retry=False),
    hellos.server_hello(retry=True),
    hellos.server_hello(retry=True),
    b"HTTP/1.1 400 no\r\n\r\n",
    b"",
)


def _request(chance: random.Random) -> bytes:
    fields = chance.sample(FIELDS[:3] if chance.random() < 0.8 else FIELDS, chance.randrange(3))
    target = f"{chance.choice(METHODS)} {chance.choice(TARGETS)} HTTP/1.{chance.choice('0111')}"
    return "\r\n".join([target, *fields, "", ""]).encode("latin-1")


def _hello(chance: random.Random) -> bytes:
    if chance.random() < 0.3:
        return chance.choice(MADE)
    name = chance.choice(NAMES)
    entries = [hellos.names((0, name.encode("latin-1")))] if name is not None else []
    more = chance.sample(EXTENSIONS, chance.choice((0, 0, 1, 2)))
    every = [*entries, *more]
    chance.shuffle(every)
    return hellos.records(
        hellos.message(hellos.body(*every)), chance.choice((1 << 14, 1 << 14, 1 << 14, 40, 3))
    )


def _damaged(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((0, 0, 0, 1, 1, 2, 4))):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(5):
            case 0 if at < len(changed):
                changed[at] ^= 1 << chance.randrange(8)
            case 1:
                changed[at:at] = chance.randbytes(chance.randrange(1, 8))
            case 2:
                del changed[at : at + chance.randrange(1, 8)]
            case 3:
                changed[at:at] = changed[at // 2 : at // 2 + chance.randrange(60)]
            case 4:
                del changed[at:]
    return bytes(changed)


def _cut(chance: random.Random, data: bytes) -> list[bytes]:
    how = chance.randrange(8)
    if how < 4 or not data:
        return [data] if data else []
    step = 1 if how == 4 and len(data) < 600 else chance.choice((15, 40, 1000))
    return [data[at : at + step] for at in range(0, len(data), step)]


# What is held.


def _one(chance: random.Random) -> tuple[Stream, Stream, Means]:
    if chance.random() < 0.1:
        # One that gets far, so that the second hello is met often enough.
        sent = f"CONNECT {NAME}:443 HTTP/1.1\r\n\r\n".encode() + hellos.hello(NAME)
        sent += _damaged(chance, chance.choice(BETWEEN) + _hello(chance))
        client, server = Stream(_cut(chance, sent)), Stream(_cut(chance, hellos.server_hello(retry=True)))
        return client, server, Means(server)
    sent = _request(chance) + _hello(chance)
    for _ in range(chance.choice((0, 0, 1))):
        sent += chance.choice(BETWEEN) + _hello(chance)
    client = Stream(_cut(chance, _damaged(chance, sent)))
    server = Stream(_cut(chance, _damaged(chance, chance.choice(ANSWERS))))
    return client, server, Means(server)


def _messages(data: bytes) -> list[bytes]:
    """Return the handshake messages in the records of ``data``, each in a record of its own."""
    joined, at = b"", 0
    while at < len(data):
        end = at + 5 + int.from_bytes(data[at + 3 : at + 5], "big")
        joined += data[at + 5 : end] if data[at] == 22 else b""
        at = end
    assert at == len(data), "half a record"
    found = []
    while joined:
        size = 4 + int.from_bytes(joined[1:4], "big")
        found.append(hellos.records(joined[:size]))
        joined = joined[size:]
    return found


def _judge(client: Stream, server: Stream, means: Means, begun: list[bytes]) -> str:
    """Hold what must be true of each conversation; return which kind it was."""
    assert client.closed and len(means.dialed) <= 1 and len(means.connected) <= 1
    if not means.connected:
        assert not server.sent and not begun
        assert not client.sent or REPLY.fullmatch(bytes(client.sent)), bytes(client.sent)
        return bytes(client.sent[9:12]).decode() or "left"
    name, port = means.dialed[0]
    grant = GRANTS[name, port]
    assert means.connected == [(grant.addresses[0], port)] and server.closed
    assert client.sent.startswith(OK)
    if grant.protocol == "tcp":
        assert not server.sent and begun
        return "tcp"
    if not server.sent:
        assert not begun and client.sent == OK
        return "closed"
    found = [hellos.openssl_reads(message) for message in _messages(bytes(server.sent))]
    assert 1 <= len(found) <= 2
    for whole, said in found:
        # A whole hello to us may be one that OpenSSL does not like.
        assert not whole or not found[0][0] or (said is None) == (found[0][1] is None)
        assert not whole or (said is None and not grant.sni) or (said or "").lower().rstrip(".") == name
    if len(found) == 2:
        return "again"
    return "opened" if begun else "answered"


@pytest.mark.filterwarnings("error")
def test_nothing_that_is_not_allowed_goes_out_whatever_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "Tunnel", Tunnel)
    chance = random.Random(SEED)
    kinds: Counter[str] = Counter()

    async def all_of_them() -> None:
        for number in range(COUNT):
            seed = chance.getrandbits(64)
            client, server, means = _one(random.Random(seed))
            Tunnel.begun = []
            began = time.monotonic()
            try:
                await session.Session(client, "t-1", means).serve()  # type: ignore[arg-type]
                kinds[_judge(client, server, means, Tunnel.begun)] += 1
            except BaseException as error:
                raise AssertionError(f"conversation {number}, seed {seed}: {error!r}") from error
            assert time.monotonic() - began < 5, f"conversation {number}, seed {seed}: slow"
            if number % 100 == 0:
                # Timers that were cancelled are thrown away by the loop.
                await asyncio.sleep(0)

    asyncio.run(all_of_them())
    # It would prove little if all of them ended at the door.
    assert set(kinds) >= {"400", "403", "405", "tcp", "closed", "opened", "answered", "again"}, kinds
    assert all(count > COUNT // 1000 for kind, count in kinds.items() if kind != "left"), kinds


@told
async def test_the_same_with_real_sockets(world: World) -> None:
    chance = random.Random(SEED)
    world.allow(NAME)
    world.allow(BARE, sni=False)
    world.answers[FREE] = {"ok": False, "kind": "resolve", "text": "no"}
    passed = 0
    for number in range(max(300, COUNT // 100)):
        made, answer, _ = _one(chance)
        sent = made.left.replace(b":443 ", b":%d " % world.port, 1)
        client = await world.client()
        await client.send(sent)
        client.end()
        await world.until(lambda: world.server.active == 0 or _came(world), f"conversation {number} hangs")
        if world.server.active:
            server = await world.accepted()
            try:
                first = await server.recv()
                if first:
                    passed += 1
                    await server.send(answer.left)
                    server.end()
                    await server.rest()
            except ConnectionError:
                pass
            server.close()
        else:
            _drop(world)
        client.close()
        await world.until(lambda: world.server.active == 0, f"conversation {number} goes on")
    assert passed > 20
    assert all(line["status"] in answers.LINES for line in world.lines if "status" in line)


def _came(world: World) -> bool:
    return bool(select.select([world.upstream], [], [], 0)[0])


def _drop(world: World) -> None:
    while not world.nobody_came():
        pass
